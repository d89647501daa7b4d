"""A piece that says when an evicting method acts."""

from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.selection import schedule as axis


@register(paper="axis", axes={"schedule": "prompt, and every `every` decoded tokens"}, kind="piece")
def schedule(prefill: str = "chunk", every: int | None = None, cap: int | None = None) -> Piece:
    """When rows are dropped: after each prompt chunk, at the prompt's end or never; and in decode every `every` tokens.

    cap: rows per head to keep in decode, when that is not the prompt's budget.
    """
    return Piece(schedule=axis.Schedule(prefill=prefill, every=every, cap=cap))  # type: ignore[arg-type]
