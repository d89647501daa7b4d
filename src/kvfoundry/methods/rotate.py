"""A piece that rotates keys before a codec stores them, and queries before they read."""

from kvfoundry.codecs.rotation import Rotation
from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(
    paper="QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, arXiv 2404.00456",
    axes={"rotation": "Hadamard, of queries and keys"},
    kind="piece",
)
def rotate() -> Piece:
    """Turn queries and keys by a Hadamard matrix before low-bit storage: rotate()+int4().

    (q R).(k R) = q.k, so attention logits stay what they are, while a channel that is far larger than the others is
    spread over all of them. For codecs that group channels of a token; one that groups tokens of a channel copes with
    outlier channels by itself.
    """
    return Piece(rotation=Rotation())
