"""Which layout stores rows that were gathered: a rectangle, or exactly what each head keeps."""

from torch import Tensor

from kvfoundry.layouts.base import RowsView
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows

# A rectangle may waste this share of its slots on shorter heads before the ragged layout takes over.
_TOLERATED_WASTE = 0.01


def keep_rows(view: RowsView, slots: Tensor, counts: Tensor) -> DenseRows | RaggedRows:
    """Gather the kept rows of a view into the layout that stores them without waste.

    slots: [batch, heads, width] slot numbers in ascending order, -1 behind the last one of a shorter head.
    counts: [batch, heads] how many of them each head keeps, on the CPU.
    """
    width = slots.shape[2]
    rectangle, kept = counts.numel() * width, int(counts.sum())
    target: type[DenseRows] | type[RaggedRows] = (
        DenseRows if rectangle - kept <= _TOLERATED_WASTE * rectangle else RaggedRows
    )
    return target.gathered(view, slots, counts)
