"""Rows that no score can push out: the first tokens and the newest ones."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.errors import SpecError
from kvfoundry.layouts.base import RowsView


@dataclass(frozen=True)
class Protect:
    """sinks: first real tokens of each sequence (attention sinks). recent: newest tokens."""

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name, value in (("sinks", self.sinks), ("recent", self.recent)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SpecError(f"protect: {name} must be a whole number of tokens, 0 or more, got {value!r}.")

    def __or__(self, other: "Protect") -> "Protect":
        """Both protections at once."""
        return Protect(max(self.sinks, other.sinks), max(self.recent, other.recent))

    def mask(self, view: RowsView, seen: Tensor, rows: Tensor) -> Tensor:
        """Boolean [batch, heads, rows]: the protected rows.

        seen: [batch] real tokens so far; rows: [batch] budget per head. Where a share of a short prompt leaves fewer
        rows than are protected, the newest tokens come first and the budget still holds: a budget is a contract.
        """
        device = view.keys.device
        recent = rows.clamp(max=self.recent)
        sinks = (rows - recent.clamp(min=1)).clamp(min=0, max=self.sinks)
        positions = view.head_positions
        edge = carried(seen - recent, device)[:, None, None]
        first = positions < carried(sinks, device)[:, None, None]
        return (first | (positions >= edge)) & view.valid
