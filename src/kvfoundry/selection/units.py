"""What is chosen as one piece: single rows by default, or whole stretches of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.layouts.base import RowsView


class Unit(ABC):
    """Turns scores of rows into scores of larger units, and says how many rows whole units come to."""

    @abstractmethod
    def __call__(self, scores: Tensor, view: RowsView, rows: Tensor, protected: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [batch, heads, rows] that are equal inside a unit, and rows to keep per head [batch, heads] (CPU).

        scores: [batch, heads, rows]; rows: [batch] budget per head, on the CPU; protected: [batch, heads, rows].
        """


@dataclass(frozen=True)
class Chunks(Unit):
    """Stretches of `size` tokens, counted from each sequence's first token, the same ones in every head of a layer.

    A chunk's score is the mean over its stored rows of the sum over heads; a chunk with a protected row comes first.
    The best chunks stay; what is left of the budget goes to the beginning of the next one, or to nobody when `whole`:
    then the best budget // size chunks stay, and fewer rows than the budget where one of them is short. A sequence
    shorter than one chunk has nothing to choose from and keeps its best rows.
    """

    size: int
    whole: bool = False

    def __call__(self, scores: Tensor, view: RowsView, rows: Tensor, protected: Tensor) -> tuple[Tensor, Tensor]:
        valid, positions = view.valid, view.head_positions.long()
        chunk = torch.where(valid, positions.div(self.size, rounding_mode="floor") + 1, 0)  # 0: no row
        number = int(chunk.max()) + 1
        shared = torch.zeros(*chunk.shape[:2], number, device=scores.device)
        heads = scores.shape[1]

        def per_chunk(values: Tensor) -> Tensor:
            """Sum over the rows of each chunk and over heads: [batch, 1, chunks]."""
            return shared.scatter_add(2, chunk, values.where(valid, 0.0)).sum(dim=1, keepdim=True)

        members = shared.scatter_add(2, chunk, valid.float())
        mean = per_chunk(scores.float()) / (members.sum(dim=1, keepdim=True) / heads).clamp(min=1)
        first = per_chunk(protected.float()) > 0
        exists = per_chunk(valid.float()) > 0
        mean = mean.masked_fill(first, torch.inf).masked_fill(~exists, -torch.inf)
        unit_scores = mean.expand(-1, heads, -1).gather(2, chunk)

        short = (positions.amax(dim=(1, 2)) < self.size).cpu()
        unit_scores = unit_scores.where(~short.to(scores.device)[:, None, None], scores.float())
        if not self.whole:
            return unit_scores, torch.minimum(view.lengths, rows[:, None])
        order = mean.argsort(dim=-1, descending=True, stable=True).expand(-1, heads, -1)
        sizes = members.gather(2, order).cumsum(dim=-1).long().cpu()
        taken = (rows // self.size).clamp(max=number)
        held = sizes.gather(2, (taken - 1).clamp(min=0)[:, None, None].expand(-1, heads, 1))[..., 0]
        held = held.where(taken[:, None] > 0, rows[:, None])  # less than one chunk: the best one's beginning
        counts = torch.maximum(held, protected.sum(dim=-1).cpu())
        return unit_scores, torch.minimum(counts.where(~short[:, None], rows[:, None]), view.lengths)
