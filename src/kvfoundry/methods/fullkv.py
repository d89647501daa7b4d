"""The full cache: the reference every method is measured against."""

from kvfoundry.method import Piece
from kvfoundry.registry import register


@register(paper="the model's own attention", axes={"read": "all rows"}, evicts=False)
def fullkv() -> Piece:
    """Keep every row; equal to the model's own attention."""
    return Piece()
