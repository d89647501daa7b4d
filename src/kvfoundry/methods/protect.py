"""A piece that adds protected rows to any evicting method."""

from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection import protect as axis


@register(paper="axis", axes={"protect": "first `sinks` tokens, newest `recent` tokens"}, kind="piece")
def protect(sinks: int = 0, recent: int = 0) -> Piece:
    """Rows that no score can push out: the first `sinks` and the newest `recent` real tokens."""
    return Piece(protect=axis.Protect(sinks=sinks, recent=recent))
