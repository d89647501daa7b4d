"""The contract of a disposal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from kvfoundry.layouts.base import Columns, RowsView

if TYPE_CHECKING:
    from kvfoundry.selection.evidence import Evidence


class Disposal(ABC):
    """Decides what dropped rows leave behind. Frozen dataclasses, no state."""

    @property
    def accumulates(self) -> bool:
        """True when `observe` must see every call, not only those after which rows are evicted."""
        return False

    @property
    def parks(self) -> bool:
        """True when dropped rows are kept on the host, to come back when they are recalled."""
        return False

    def observe(self, evidence: Evidence) -> Columns:
        """Statistics to store with the rows after a call, as `Score.observe`."""
        return {}

    @abstractmethod
    def __call__(self, evidence: Evidence, kept: Tensor, scores: Tensor) -> RowsView:
        """`evidence.rows` in which kept rows have taken in what they should of the dropped ones.

        kept: boolean [batch, heads, rows]; rows that are valid and not kept are about to be dropped. scores: [batch,
        heads or 1, rows], what ranked them. Shapes and positions stay; dropping nothing must return the rows bit for
        bit.
        """
