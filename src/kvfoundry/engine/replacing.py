"""Methods that drop one row per step by its score: the row that goes is overwritten by the next token's.

Everything has a fixed shape and is decided on the device: statistics are kept beside the slots, the rows that are
protected follow from the positions, and the row with the lowest score (the newest among equals) becomes the next slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from kvfoundry.engine.rows import StaticRows
from kvfoundry.kernels.attention.naive import attention_weights
from kvfoundry.layouts.base import Columns
from kvfoundry.method import Method
from kvfoundry.selection.scores.accumulated_attention import COLUMN, AccumulatedAttention
from kvfoundry.selection.scores.last_query import LastQueryAttention


def replaces(method: Method) -> bool:
    """Whether the rows that a method drops in decode can be chosen this way."""
    if isinstance(method.score, AccumulatedAttention):
        return method.group != "max"  # the sum of the largest is not the largest sum
    return isinstance(method.score, LastQueryAttention)


def replacing(method: Method, rows: StaticRows, budget: Tensor) -> Replacing | None:
    """What chooses the next slot after every step; None where the oldest row goes, or none at all.

    budget: [batch] rows per head that stay, on the CPU.
    """
    kinds: dict[type, type[Replacing]] = {
        AccumulatedAttention: ByAccumulatedAttention,
        LastQueryAttention: ByLastQuery,
    }
    kind = kinds.get(type(method.score))
    return None if kind is None else kind(method, rows, budget)


def sinks_of(method: Method, budget: Tensor) -> Tensor:
    """First tokens that are never dropped, as `Protect.mask` counts them; budget: rows per head."""
    recent = budget.clamp(max=method.protect.recent)
    return (budget - recent.clamp(min=1)).clamp(min=0, max=method.protect.sinks)


class Replacing(ABC):
    """Chooses the slot of the next row in `rows`, which are even."""

    def __init__(self, method: Method, rows: StaticRows, budget: Tensor):
        self.method, self.rows = method, rows
        self._recent, self._sinks = (torch.zeros_like(rows.starts[:, :1, None]) for _ in range(2))
        self.begin(budget, {})

    def begin(self, budget: Tensor, columns: Columns) -> None:
        """Take over the statistics of a layer. budget: [batch] rows per head that stay."""
        self._recent.copy_(budget.clamp(max=self.method.protect.recent)[:, None, None])
        self._sinks.copy_(sinks_of(self.method, budget)[:, None, None])

    def after(
        self, query: Tensor, position: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> None:
        """Observe a step whose row is stored, and choose the slot of the next where the head is full.

        query: [batch, query_heads, 1, head_dim]; position: [batch].
        """
        rows = self.rows
        number = torch.arange(rows.width, device=query.device)
        inside = number < rows.lengths[..., None]
        weights = attention_weights(
            query,
            rows.rectangle(rows.keys),
            inside[:, :, None],
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )[:, :, 0]
        positions = rows.rectangle(rows.positions)
        now = position[:, None, None]
        scores = torch.nan_to_num(self.scores(weights, positions, now), nan=-torch.inf)
        protected = (positions < self._sinks) | (positions > now - self._recent)
        rivals = inside & ~protected
        scores = scores.masked_fill(~rivals, torch.inf)
        lowest = rivals & (scores == scores.amin(dim=-1, keepdim=True))
        leaving = torch.where(lowest, positions, -1).argmax(dim=-1).int()
        rows.slots.copy_(torch.where(rows.lengths == rows.capacities, leaving, rows.slots))

    @abstractmethod
    def scores(self, weights: Tensor, positions: Tensor, now: Tensor) -> Tensor:
        """What the rows are worth after this step: [batch, heads, width] float32.

        weights: [batch, query_heads, width] softmax weights of the newest query; positions: [batch, heads, width];
        now: [batch, 1, 1], the newest of them.
        """

    def columns(self) -> Columns:
        """The statistics, for the layer that goes on with them."""
        return {}

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory."""
        yield from (self._recent, self._sinks)

    def _reduced(self, weights: Tensor) -> Tensor:
        grouped = weights.unflatten(1, (self.rows.starts.shape[1], -1))
        return grouped.sum(dim=2) if self.method.group == "sum" else grouped.mean(dim=2)


class ByAccumulatedAttention(Replacing):
    """As `selection.scores.AccumulatedAttention`: attention summed over all queries."""

    def __init__(self, method: Method, rows: StaticRows, budget: Tensor):
        self._sums = rows.rectangle(rows.positions).new_zeros(*rows.starts.shape, rows.width, dtype=torch.float32)
        super().__init__(method, rows, budget)

    def begin(self, budget: Tensor, columns: Columns) -> None:
        super().begin(budget, columns)
        self._sums.zero_()
        if COLUMN in columns:
            self._sums[:, :, : columns[COLUMN].shape[2]] = columns[COLUMN]

    def scores(self, weights: Tensor, positions: Tensor, now: Tensor) -> Tensor:
        earlier = self._sums.masked_fill(positions == now, 0.0)  # of the row that stood there before
        self._sums.copy_(earlier + self._reduced(weights))
        assert isinstance(self.method.score, AccumulatedAttention)
        return self._sums / (now - positions + 1).clamp(min=1) if self.method.score.normalize else self._sums

    def columns(self) -> Columns:
        return {COLUMN: self._sums}

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield self._sums


class ByLastQuery(Replacing):
    """As `selection.scores.LastQueryAttention`: one ranking for all heads, from the newest query."""

    def scores(self, weights: Tensor, positions: Tensor, now: Tensor) -> Tensor:
        return weights.mean(dim=1, keepdim=True).expand_as(positions)
