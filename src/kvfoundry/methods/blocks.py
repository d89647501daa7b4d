"""A piece that lets rows compete block by block instead of all at once."""

from kvfoundry.checks import whole
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
    axes={"contest": "`size` rows at a time against those kept so far"},
    kind="piece",
)
def blocks(size: int = 128) -> Piece:
    """At each eviction, rows enter the contest `size` at a time and are ranked against the rows kept so far.

    Scores are computed on those candidates alone, as when the text had been read in blocks: the setting of the KeyDiff
    paper (and kvpress' BlockPress). The prompt itself is still attended to in full.
    """
    whole("size", size, least=1)
    return Piece(block=size)
