"""Methods that drop one row per step by its score: the row that goes is overwritten by the next token's.

Everything has a fixed shape and is decided on the device (`kernels.replace_row`): statistics lie beside the slots, what
is protected follows from the positions, and the row with the lowest score becomes the next slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvfoundry.engine.rows import StaticRows
from kvfoundry.layouts.base import Columns
from kvfoundry.method import Method
from kvfoundry.selection.scores.accumulated_attention import COLUMN, AccumulatedAttention
from kvfoundry.selection.scores.last_query import LastQueryAttention


def replaces(method: Method) -> bool:
    """Whether the rows that a method drops in decode can be chosen this way."""
    if isinstance(method.score, AccumulatedAttention):
        return method.group != "max"  # the sum of the largest is not the largest sum
    return isinstance(method.score, LastQueryAttention)


def sinks_of(method: Method, budget: Tensor) -> Tensor:
    """First tokens that are never dropped, as `Protect.mask` counts them; budget: rows per head."""
    recent = budget.clamp(max=method.protect.recent)
    return (budget - recent.clamp(min=1)).clamp(min=0, max=method.protect.sinks)


class Replacing:
    """What the choice of the next slot knows of one layer, whose `rows` are even.

    sums: float32 [batch, heads, width], attention that the rows received, in the order of their slots; None where the
    newest query alone decides. recent, first: int32 [batch], tokens at both ends that stay. mean, normalize: see
    `kernels.replace_row`.
    """

    def __init__(self, method: Method, rows: StaticRows):
        self.method, self.rows = method, rows
        batch, device = rows.starts.shape[0], rows.starts.device
        self.recent, self.first = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.sums: Tensor | None = None
        if isinstance(method.score, AccumulatedAttention):
            self.sums = torch.zeros(*rows.starts.shape, rows.width, dtype=torch.float32, device=device)
        self.mean = method.group == "mean"
        self.normalize = isinstance(method.score, AccumulatedAttention) and method.score.normalize

    def begin(self, budget: Tensor, columns: Columns) -> None:
        """Take over the statistics of a layer. budget: [batch] rows per head that stay, on the CPU."""
        self.recent.copy_(budget.clamp(max=self.method.protect.recent))
        self.first.copy_(sinks_of(self.method, budget))
        if self.sums is not None:
            self.sums.zero_()
            if COLUMN in columns:
                self.sums[:, :, : columns[COLUMN].shape[2]] = columns[COLUMN]

    def columns(self) -> Columns:
        """The statistics, for the layer that goes on with them."""
        return {} if self.sums is None else {COLUMN: self.sums}

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from (self.recent, self.first)
        if self.sums is not None:
            yield self.sums
