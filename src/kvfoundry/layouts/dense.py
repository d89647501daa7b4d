"""One rectangle [batch, heads, capacity, dim] per layer, with spare slots so that a decode step is one small write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from kvfoundry.kernels.gather_rows import Rows, rectangle
from kvfoundry.kernels.gather_rows.naive import picked
from kvfoundry.layouts.base import (
    Block,
    Columns,
    Layout,
    Reading,
    RowsView,
    Stretches,
    owned,
    per_head,
    position_dtype,
    split_groups,
    widened,
    writable,
)


def spare_slots(rows: int) -> int:
    """Slots to add when the rectangle grows: about 6 %, so that the copy is rare and the waste small."""
    return min(256, max(16, rows // 16))


def _padded(tensor: Tensor, capacity: int, fill: float = 0) -> Tensor:
    """Copy into a buffer of `capacity` slots. The tail is filled: masked slots must still hold finite numbers."""
    shape = (*tensor.shape[:2], capacity, *tensor.shape[3:])
    buffer = tensor.new_full(shape, fill)
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


class DenseRows(Layout):
    """Rows at the front of each head's slots; `lengths` says how many. Equal lengths need no masks."""

    def __init__(
        self, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor, columns: Columns | None = None
    ):
        self._keys, self._values, self._positions = keys, values, positions
        self._shape = lengths.shape
        self._columns = columns or {}
        self._rows = int(lengths.max()) if lengths.numel() else 0
        # Equal lengths are one number; a tensor of them is only kept where heads or batch rows differ.
        self._uneven: Tensor | None = None if bool((lengths == self._rows).all()) else lengths
        # True while the rows are exactly the tokens of one call: then the lower triangle is the mask.
        self._own_tokens = False
        # The newest rows that came in one call of as many tokens for everybody; 0 where it was another.
        self._came_together = 0
        self._shared = False

    @classmethod
    def of_tokens(
        cls, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> DenseRows:
        """The first rows of an empty layer; arguments as in `append`."""
        batch, heads, tokens, _ = keys.shape
        lengths = torch.full((batch, heads), tokens) if counts is None else counts[:, None].expand(-1, heads).clone()
        if counts is not None:  # a shorter row has padding in the slots behind its tokens
            empty = positions[:, None, :, None] < 0
            keys, values = keys.masked_fill(empty, 0.0), values.masked_fill(empty, 0.0)
        # Projections often arrive as views of a larger storage; the cache keeps only what it counts.
        rows = cls(owned(keys), owned(values), owned(positions[:, None].to(position_dtype(last_position))), lengths)
        rows._own_tokens = True
        return rows

    @classmethod
    def gathered(cls, view: RowsView, slots: Tensor, counts: Tensor) -> Self:
        """The rows at `slots` of a view; see `keep_rows`."""
        rows = rectangle(Rows(view.keys, view.values, view.positions), slots)
        columns = {name: picked(column, slots) for name, column in view.columns.items()}
        return cls(*rows, counts, columns)

    @property
    def lengths(self) -> Tensor:
        return torch.full(self._shape, self._rows) if self._uneven is None else self._uneven

    def view(self) -> RowsView:
        rows = self._rows
        return RowsView(
            self._keys[:, :, :rows],
            self._values[:, :, :rows],
            self._positions[:, :, :rows],
            self.lengths,
            self._columns,
        )

    def stretches(self) -> Stretches:
        batch, heads, capacity, _ = self._keys.shape
        starts = torch.arange(batch * heads, device=self._keys.device).view(batch, heads) * capacity
        return Stretches(self._keys.flatten(0, 2), self._values.flatten(0, 2), starts, self.lengths)

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> DenseRows:
        tokens = keys.shape[2]
        old = self._rows
        even = counts is None and self._uneven is None
        lengths = None if even else self.lengths + (tokens if counts is None else per_head(counts, self.lengths))
        rows = old + tokens if lengths is None else int(lengths.max())
        self._reserve(rows)
        self._positions = widened(self._positions, last_position)
        if lengths is None:
            self._keys[:, :, old:rows] = keys
            self._values[:, :, old:rows] = values
            self._positions[:, :, old:rows] = self._own_heads(positions)
        else:
            # Slots behind a shorter head may hold rows that were taken back.
            self._keys[:, :, old:rows], self._values[:, :, old:rows] = 0.0, 0.0
            self._positions[:, :, old:rows] = -1
            self._scatter(keys, values, positions, lengths - self.lengths)
            self._uneven = None if bool((lengths == rows).all()) else lengths
        self._rows, self._own_tokens = rows, False
        self._came_together = tokens if counts is None else 0
        if self._columns:
            self._columns = {name: _padded(column, rows) for name, column in self._columns.items()}
        return self

    def _scatter(self, keys: Tensor, values: Tensor, positions: Tensor, added: Tensor) -> None:
        tokens = keys.shape[2]
        batch, head, token = (torch.arange(tokens) < added[:, :, None]).nonzero(as_tuple=True)
        slot = self.lengths[batch, head] + token
        device = keys.device
        batch, head, token, slot = (index.to(device) for index in (batch, head, token, slot))
        self._keys[batch, head, slot] = keys[batch, head, token]
        self._values[batch, head, slot] = values[batch, head, token]
        own = self._own_heads(positions).to(self._positions.dtype)
        shared = torch.zeros_like(head)
        position_head = head if self._positions.shape[1] > 1 else shared
        self._positions[batch, position_head, slot] = own[batch, head if own.shape[1] > 1 else shared, token]

    def _own_heads(self, positions: Tensor) -> Tensor:
        """[batch, heads or 1, tokens], with as many heads as the stored positions where these are shared by all."""
        positions = positions[:, None] if positions.dim() == 2 else positions
        return positions[:, : self._positions.shape[1]]

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows, in memory that only this layout writes."""
        capacity = self._keys.shape[2]
        if rows <= capacity and not self._shared and writable(self._keys):
            return
        if rows > capacity:
            capacity = rows + spare_slots(rows)
        self._keys = _padded(self._keys[:, :, : self._rows], capacity)
        self._values = _padded(self._values[:, :, : self._rows], capacity)
        self._positions = _padded(self._positions[:, :, : self._rows], capacity, fill=-1)
        self._shared = False

    def truncated(self, lengths: Tensor) -> DenseRows:
        rows = int(lengths.max()) if lengths.numel() else 0
        if bool((lengths != rows).any()):
            slot = torch.arange(rows).expand(*lengths.shape, rows)
            slots = slot.masked_fill(slot >= lengths[..., None], -1).to(self._keys.device)
            return DenseRows.gathered(self.view(), slots, lengths)
        # What lies behind is never read, and the next tokens overwrite it: no copy.
        columns = {name: column[:, :, :rows].clone() for name, column in self._columns.items()}
        result = DenseRows(self._keys, self._values, self._positions, lengths, columns)
        result._shared = self._shared
        return result

    def select_batch(self, indices: Tensor) -> Self:
        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, indices.to(tensor.device))

        lengths = pick(self.lengths)
        rows = int(lengths.max()) if lengths.numel() else 0  # fewer than before when the longest row leaves
        columns = {name: pick(column[:, :, :rows]) for name, column in self._columns.items()}
        return type(self)(pick(self._keys), pick(self._values), pick(self._positions), lengths, columns)

    def with_columns(self, columns: Columns) -> DenseRows:
        self._columns = columns
        return self

    def with_first_keys(self, keys: Tensor) -> DenseRows:
        self._reserve(self._rows)
        width = min(keys.shape[2], self._rows)
        present = torch.arange(width) < self.lengths[..., None]
        target = self._keys[:, :, :width]
        target.copy_(torch.where(present[..., None].to(keys.device), keys[:, :, :width], target))
        return self

    def expanded_heads(self, groups: int) -> DenseRows:
        view = self.view()
        # One row of positions serves all heads until heads keep different rows.
        positions = view.positions.repeat_interleave(groups, dim=1) if view.positions.shape[1] > 1 else view.positions
        return DenseRows(
            view.keys.repeat_interleave(groups, dim=1),
            view.values.repeat_interleave(groups, dim=1),
            positions.clone(),
            self.lengths.repeat_interleave(groups, dim=1),
            {name: split_groups(column, groups) for name, column in view.columns.items()},
        )

    def shared(self) -> DenseRows:
        twin = DenseRows(self._keys, self._values, self._positions, self.lengths.clone(), dict(self._columns))
        self._shared = twin._shared = True
        return twin

    def ends_with(self, queries: int) -> bool:
        """Whether the newest rows of every head are the tokens of a call with so many queries and no padding."""
        return self._came_together == queries

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._keys, self._values, self._positions, *self._columns.values())

    def blocks(self) -> Iterator[Block]:
        if self._rows:
            view = self.view()
            yield Block(slice(None), slice(None), view.keys, view.values, view.positions, self._uneven is None)

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        view = self.view()
        visibility = reading.visibility(
            query_positions,
            view.positions,
            own=self._own_tokens,
            complete=self._uneven is None,
            appended=self.ends_with(query.shape[2]),
        )
        return reading.kernel(
            query,
            view.keys,
            view.values,
            visibility,
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        )
