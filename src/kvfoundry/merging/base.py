"""The contract of a disposal."""

from abc import ABC, abstractmethod

from torch import Tensor

from kvfoundry.layouts.base import RowsView


class Disposal(ABC):
    """Decides what dropped rows leave behind. Frozen dataclasses, no state."""

    @abstractmethod
    def __call__(self, rows: RowsView, kept: Tensor) -> RowsView:
        """The view in which kept rows have taken in what they should of the dropped ones.

        kept: boolean [batch, heads, rows]; rows that are valid and not kept are about to be dropped. Shapes and
        positions stay; dropping nothing must return the rows bit for bit.
        """
