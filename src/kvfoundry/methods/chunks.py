"""A piece that lets any score choose whole stretches of text."""

from kvfoundry.checks import whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection import units
from kvfoundry.selection.budgets import UniformHeads


@register(
    paper="ChunkKV: Semantic-Preserving KV Cache Compression, arXiv 2502.00299",
    axes={"unit": "chunks of `size` tokens, the same in every head of a layer"},
    kind="piece",
)
def chunks(size: int = 10) -> Piece:
    """Whole chunks of `size` tokens stay or go, ranked by the mean score of their rows summed over heads."""
    whole("size", size, least=1)
    return Piece(unit=units.Chunks(size), heads=UniformHeads())
