"""Weighted merging (KVMerger): similar neighbours become one row, each weighted by how near it is to the pivot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvfoundry.layouts.base import RowsView
from kvfoundry.merging.base import Disposal
from kvfoundry.merging.nearest import at_slots, folded, nearest_kept, slots_of

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


@dataclass(frozen=True)
class WeightedMerge(Disposal):
    """form "sets" is the paper's: merging sets of consecutive similar keys; "neighbour": each dropped row by itself."""

    form: Literal["sets", "neighbour"] = "sets"
    threshold: float = 0.75
    sigma: float | None = None

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        if self.form == "neighbour":
            return neighbour_merged(evidence.rows, kept)
        return sets_merged(evidence.rows, kept, scores, self.threshold, self.sigma)


def neighbour_merged(rows: RowsView, kept: Tensor) -> RowsView:
    """Every dropped row into the kept row with the most similar key, weight max((cosine + 1) / 2, 1e-6) to its 1."""
    near = nearest_kept(rows.keys, kept, rows.valid & ~kept)
    weights = ((near.similarity + 1) / 2).clamp(min=1e-6).masked_fill(~near.present, 0.0)
    keys = folded(rows.keys, near.target, weights, at_slots(rows.keys, near.source))
    values = folded(rows.values, near.target, weights, at_slots(rows.values, near.source))
    return replace(rows, keys=keys, values=values)


def merging_sets(rows: RowsView, threshold: float) -> Tensor:
    """Number of the merging set of every row: [batch, heads, rows].

    A set is a run of stored neighbours whose keys have a cosine of at least `threshold` from each to the next.
    """
    unit = rows.keys.float()
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    similar = (unit[:, :, 1:] * unit[:, :, :-1]).sum(dim=-1) >= threshold
    starts = torch.ones(rows.keys.shape[:3], dtype=torch.long, device=unit.device)
    starts[:, :, 1:] = (~similar).long()
    return starts.cumsum(dim=-1) - 1


def pivots(sets: Tensor, kept: Tensor, scores: Tensor) -> Tensor:
    """Slot of the kept row with the best score in the set of every row, -1 where the set keeps none: like `sets`."""
    scores = torch.nan_to_num(scores.float(), nan=-torch.inf).expand(sets.shape)
    scores = scores.clamp(min=torch.finfo(torch.float32).min)  # a kept row with score -inf still beats none at all
    ranked = scores.masked_fill(~kept, -torch.inf)
    best = torch.full_like(ranked, -torch.inf).scatter_reduce(2, sets, ranked, "amax")
    slot = torch.arange(sets.shape[2], device=sets.device).expand_as(sets)
    none = sets.shape[2]
    is_best = kept & (ranked == best.gather(2, sets))
    first = torch.full_like(sets, none).scatter_reduce(2, sets, slot.masked_fill(~is_best, none), "amin")
    pivot = first.gather(2, sets)
    return pivot.masked_fill(pivot == none, -1)


def sets_merged(rows: RowsView, kept: Tensor, scores: Tensor, threshold: float, sigma: float | None) -> RowsView:
    """Every dropped row of a merging set into the set's pivot, the kept row with the best score.

    Weight of row i: g_i = exp(-||k_pivot - k_i||^2 / (2 sigma^2)), of the pivot 1, divided by their sum. Without a
    `sigma` it is the mean distance of the set's dropped rows from the pivot. Rows of a set that keeps none are lost.
    """
    dropped = rows.valid & ~kept
    source = slots_of(dropped)
    target = pivots(merging_sets(rows, threshold), kept, scores).gather(2, source.clamp(min=0))
    present = (source >= 0) & (target >= 0)
    distance = (at_slots(rows.keys, source).float() - at_slots(rows.keys, target).float()).norm(dim=-1)
    if sigma is None:
        into = target.clamp(min=0)
        zeros = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
        sums = zeros.scatter_add(2, into, distance * present)
        counts = zeros.scatter_add(2, into, present.float())
        width = (sums / counts.clamp(min=1)).gather(2, into).clamp(min=1e-6)
    else:
        width = torch.full_like(distance, sigma)
    weights = torch.exp(-((distance / width) ** 2) / 2).masked_fill(~present, 0.0)
    keys = folded(rows.keys, target, weights, at_slots(rows.keys, source))
    values = folded(rows.values, target, weights, at_slots(rows.values, source))
    return replace(rows, keys=keys, values=values)
