"""Value folding: dropped values live on in the kept row with the most similar key; keys stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.layouts.base import RowsView
from kvfoundry.merging.base import Disposal
from kvfoundry.merging.nearest import Nearest, at_slots, folded, nearest_kept

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


@dataclass(frozen=True)
class ValueMerge(Disposal):
    """threshold: least cosine to fold at all; fraction: of the dropped rows of a head, only the most similar ones."""

    threshold: float = 0.0
    fraction: float = 1.0

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        return value_merged(evidence.rows, kept, self.threshold, self.fraction)


def value_merged(rows: RowsView, kept: Tensor, threshold: float = 0.0, fraction: float = 1.0) -> RowsView:
    """v' = (v + sum w v_dropped) / (1 + sum w), w = max(cosine, 0) ||v_dropped|| / (||v_dropped|| + ||v|| + 1e-6)."""
    near = nearest_kept(rows.keys, kept, rows.valid & ~kept)
    dropped = at_slots(rows.values, near.source)
    size, target_size = dropped.float().norm(dim=-1), at_slots(rows.values, near.target).float().norm(dim=-1)
    weights = near.similarity.clamp(min=0) * size / (size + target_size + 1e-6)
    weights = weights.masked_fill(~(near.present & _similar_enough(near, threshold, fraction)), 0.0)
    return replace(rows, values=folded(rows.values, near.target, weights, dropped))


def _similar_enough(near: Nearest, threshold: float, fraction: float) -> Tensor:
    """Boolean like `near.similarity`: at or above the threshold and, per head, the (1 - fraction) quantile."""
    passes = near.present & (near.similarity >= threshold)
    if fraction >= 1.0 or near.similarity.shape[2] == 0:
        return passes
    # Rows that fail the threshold count as the least similar; slots without a row do not count at all.
    similarity = near.similarity.masked_fill(~passes, -torch.inf).masked_fill(~near.present, torch.inf)
    ordered = similarity.sort(dim=-1).values
    place = (near.present.sum(dim=-1, keepdim=True) - 1).clamp(min=0) * (1.0 - fraction)
    low, high = (ordered.gather(2, index.long()) for index in (place.floor(), place.ceil()))
    # Between a row that fails and one that passes there is no number to interpolate: the one that passes is the bound.
    between = torch.where(low.isinf(), high, low + (high - low) * (place - place.floor()))
    return passes & (similarity >= between)
