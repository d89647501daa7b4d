"""Pivotal merging (LOOK-M): the mean of a kept row and its midpoints with the dropped rows nearest to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvfoundry.layouts.base import RowsView
from kvfoundry.merging.base import Disposal
from kvfoundry.merging.nearest import at_slots, folded, nearest_kept

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


@dataclass(frozen=True)
class PivotMerge(Disposal):
    """Keys and values of every dropped row go half into the kept row with the most similar key."""

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        return pivot_merged(evidence.rows, kept)


def pivot_merged(rows: RowsView, kept: Tensor) -> RowsView:
    """k' = (k + sum over its dropped rows of (k_dropped + k) / 2) / (1 + their number), and the same for values.

    kept: boolean [batch, heads, rows]. Targets are chosen on keys.
    """
    near = nearest_kept(rows.keys, kept, rows.valid & ~kept)
    weights = near.present.float()

    def merged(tensor: Tensor) -> Tensor:
        midpoints = (at_slots(tensor, near.source).float() + at_slots(tensor, near.target).float()) / 2
        return folded(tensor, near.target, weights, midpoints)

    return replace(rows, keys=merged(rows.keys), values=merged(rows.values))
