"""Who holds the rows of one layer, and how they are read.

`DenseRows` is one rectangle per layer; `RaggedRows` gives every head of every batch row exactly the memory it keeps.
"""

from kvfoundry.layouts.base import Columns, Layout, RowsView
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows
from kvfoundry.layouts.storing import keep_rows

__all__ = ["Columns", "DenseRows", "Layout", "RaggedRows", "RowsView", "keep_rows"]
