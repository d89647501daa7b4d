"""Batch rows of several caches in one rectangle, so that one forward pass decodes them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfoundry.layouts.base import Columns, Layout, RowsView
from kvfoundry.layouts.dense import DenseRows, spare_slots


class JoinedRows(DenseRows):
    """A rectangle as wide as the longest head of all caches, and one again after every eviction.

    Speed alone: a cache that shows its bytes to anyone stores rows as `keep_rows` does.
    """

    @classmethod
    def of(cls, parts: Sequence[Layout]) -> JoinedRows:
        """The batch rows of all parts, one part after the other; all store as many heads and the same columns."""
        views = [part.view() for part in parts]
        lengths = torch.cat([view.lengths for view in views])
        rows = int(lengths.max())
        capacity = rows + spare_slots(rows)
        batch, heads = lengths.shape
        own_heads = max(view.positions.shape[1] for view in views)
        dtype = max((view.positions.dtype for view in views), key=lambda dtype: dtype.itemsize)

        def rectangle(tensors: list[Tensor], width: int, slots: int, fill: int = 0) -> Tensor:
            first = tensors[0]
            buffer = first.new_full((batch, width, slots, *first.shape[3:]), fill)
            row = 0
            for tensor in tensors:
                buffer[row : row + tensor.shape[0], :, : tensor.shape[2]] = tensor
                row += tensor.shape[0]
            return buffer

        keys = rectangle([view.keys for view in views], heads, capacity)
        values = rectangle([view.values for view in views], heads, capacity)
        positions = rectangle([view.positions.to(dtype) for view in views], own_heads, capacity, -1)
        columns: Columns = {
            name: rectangle([view.columns[name] for view in views], heads, rows) for name in views[0].columns
        }
        return cls(keys, values, positions, lengths, columns)

    def kept(self, view: RowsView, slots: Tensor, counts: Tensor) -> JoinedRows:
        return JoinedRows.gathered(view, slots, counts)
