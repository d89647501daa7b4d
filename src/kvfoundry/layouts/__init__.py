"""Who holds the rows of one layer, and how they are read.

`DenseRows` is one rectangle per layer; `RaggedRows` gives every head of every batch row exactly the memory it keeps;
`CodedRows` writes rows down as codes.
"""

from torch import Tensor

from kvfoundry.layouts.base import Columns, Layout, RowsView
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows

__all__ = ["CodedRows", "Columns", "DenseRows", "Layout", "RaggedRows", "RowsView", "keep_rows"]

# A rectangle may waste this share of its slots on shorter heads before the ragged layout takes over.
_TOLERATED_WASTE = 0.01


def keep_rows(view: RowsView, slots: Tensor, counts: Tensor) -> Layout:
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
