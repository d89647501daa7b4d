"""Which rows stay once scores, counts and protection are known: the best ones, or some of them by lot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.selection.draws import Draws, HashedDraws
from kvfoundry.selection.keep import top_slots

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


class Choice(ABC):
    """Turns scores into a kept set. Frozen, without state."""

    @abstractmethod
    def __call__(self, scores: Tensor, evidence: Evidence, counts: Tensor, protected: Tensor) -> Tensor:
        """Slots of the kept rows, as `keep.top_slots` returns them, with its arguments; rows are `evidence.rows`."""


@dataclass(frozen=True)
class TopRows(Choice):
    """The rows with the highest scores."""

    def __call__(self, scores: Tensor, evidence: Evidence, counts: Tensor, protected: Tensor) -> Tensor:
        return top_slots(scores, evidence.rows, counts, protected)


@dataclass(frozen=True)
class TopThenSampled(Choice):
    """The best rows, then `sampled` rows drawn without replacement from the rest.

    sampled: rows (int) or share of the head's count (float); 1.0 draws everything that is not protected. A row is drawn
    with weight softmax(score / temperature), every row alike when the temperature is 0. Drawing by the largest of
    score / temperature - log(-log(u)) is the same as drawing one after the other.
    """

    sampled: int | float
    temperature: float = 1.0
    draws: Draws = field(default_factory=HashedDraws)

    def __call__(self, scores: Tensor, evidence: Evidence, counts: Tensor, protected: Tensor) -> Tensor:
        view = evidence.rows
        scores = torch.nan_to_num(scores.float(), nan=-torch.inf).expand(-1, view.keys.shape[1], -1)
        counts_here = carried(counts, scores.device)
        free = (counts_here - (protected & view.valid).sum(dim=-1)).clamp(min=0)
        wanted = (counts_here * self.sampled).long() if isinstance(self.sampled, float) else self.sampled
        best = (free - wanted).clamp(min=0)
        open_ = view.valid & ~protected
        rank = scores.masked_fill(~open_, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        certain = open_ & (rank < best[..., None])
        uniform = self.draws(evidence.layer_idx, view.head_positions).clamp(1e-7, 1 - 1e-7)
        keys = -torch.log(-torch.log(uniform))
        if self.temperature > 0:
            keys = keys + scores / self.temperature
        return top_slots(keys.masked_fill(certain, torch.inf), view, counts, protected)
