"""A piece that lets any score choose whole stretches of text."""

from kvfoundry.checks import choice, whole
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection import units
from kvfoundry.selection.budgets import UniformHeads


@register(
    paper="ChunkKV: Semantic-Preserving KV Cache Compression, arXiv 2502.00299",
    axes={"unit": "chunks of `size` tokens, the same in every head of a layer"},
    kind="piece",
)
def chunks(size: int = 10, rest: str = "fill") -> Piece:
    """Chunks of `size` tokens stay or go together, ranked by the mean score of their rows summed over heads.

    rest: what becomes of budget that holds no whole chunk: "fill" gives it to the beginning of the next best chunk,
    "drop" to nobody, so that budget // size whole chunks stay (the paper and its ports).
    """
    return Piece(unit=unit(size, rest), heads=UniformHeads())


def unit(size: object, rest: object) -> units.Chunks:
    """The unit of selection, or SpecError for a size below 1 or an unknown word."""
    whole("size", size, least=1)
    choice("rest", rest, ("fill", "drop"))
    return units.Chunks(size, rest == "drop")  # type: ignore[arg-type]
