"""Who holds the rows of one layer, and how they are read.

`DenseRows` is one rectangle per layer; `RaggedRows` gives every head of every batch row exactly the memory it keeps;
`CodedRows` writes rows down as codes.
"""

from kvfoundry.layouts.base import Columns, Layout, RowsView
from kvfoundry.layouts.coded import CodedRows
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.ragged import RaggedRows
from kvfoundry.layouts.storing import keep_rows

__all__ = ["CodedRows", "Columns", "DenseRows", "Layout", "RaggedRows", "RowsView", "keep_rows"]
