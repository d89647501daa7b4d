"""Parking: dropped rows leave nothing behind in those that stay, and are not given up either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvfoundry.layouts.base import RowsView
from kvfoundry.merging.base import Disposal

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


@dataclass(frozen=True)
class Park(Disposal):
    """Rows that stay are as they were; whoever stores them puts the others on the host (`layouts.parked`)."""

    @property
    def parks(self) -> bool:
        return True

    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        return evidence.rows
