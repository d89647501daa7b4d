"""Every head of every batch row in its own stretch of one flat buffer: a head costs what it keeps, nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvfoundry.kernels.gather_rows import Rows, stretches
from kvfoundry.kernels.gather_rows.naive import picked
from kvfoundry.layouts.base import (
    Block,
    Columns,
    Layout,
    Reading,
    RowsView,
    Stretches,
    per_head,
    split_groups,
    widened,
    writable,
)

# Spare slots per head when a buffer grows in decode.
_SPARE_SLOTS = 16


class RaggedRows(Layout):
    """Stretches [start, start + capacity) of flat buffers [slots, dim], `lengths` of each in use."""

    def __init__(
        self, keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor, capacities: Tensor, columns: Columns
    ):
        self._keys, self._values, self._positions = keys, values, positions
        self._lengths, self._capacities = lengths, capacities
        self._starts = (capacities.flatten().cumsum(0) - capacities.flatten()).view_as(capacities)
        self._columns = columns
        self._shared = False

    @classmethod
    def gathered(cls, view: RowsView, slots: Tensor, counts: Tensor) -> RaggedRows:
        """The rows at `slots` of a view; see `keep_rows`."""
        rows = stretches(Rows(view.keys, view.values, view.positions), slots, counts)
        columns = {name: picked(column, slots)[slots >= 0] for name, column in view.columns.items()}
        return cls(*rows, counts, counts.clone(), columns)

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def _slots(self, lengths: Tensor) -> Tensor:
        """Flat slot numbers [batch, heads, longest] of the first `lengths` rows, -1 behind a shorter head."""
        offset = torch.arange(int(lengths.max()) if lengths.numel() else 0)
        slots = self._starts[..., None] + offset
        return slots.masked_fill(offset >= lengths[..., None], -1).to(self._keys.device)

    def view(self) -> RowsView:
        slots = self._slots(self._lengths)
        present = slots >= 0
        index = slots.clamp(min=0)

        def rectangle(flat: Tensor) -> Tensor:
            trailing = flat.shape[1:]
            return flat[index] * present.reshape(*present.shape, *[1] * len(trailing))

        positions = self._positions[index].masked_fill(~present, -1)
        columns = {name: rectangle(flat) for name, flat in self._columns.items()}
        return RowsView(rectangle(self._keys), rectangle(self._values), positions, self._lengths, columns)

    def stretches(self) -> Stretches:
        return Stretches(self._keys, self._values, self._starts.to(self._keys.device), self._lengths)

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> RaggedRows:
        tokens = keys.shape[2]
        added = torch.full_like(self._lengths, tokens) if counts is None else per_head(counts, self._lengths)
        self._reserve(self._lengths + added)
        self._positions = widened(self._positions, last_position)
        batch, head, token = (torch.arange(tokens) < added[..., None]).nonzero(as_tuple=True)
        slot = self._starts[batch, head] + self._lengths[batch, head] + token
        batch, head, token, slot = (index.to(keys.device) for index in (batch, head, token, slot))
        self._keys[slot] = keys[batch, head, token]
        self._values[slot] = values[batch, head, token]
        positions = positions[:, None] if positions.dim() == 2 else positions
        position_head = head if positions.shape[1] > 1 else torch.zeros_like(head)
        self._positions[slot] = positions[batch, position_head, token].to(self._positions.dtype)
        for column in self._columns.values():
            column[slot] = 0
        self._lengths = self._lengths + added
        return self

    def _reserve(self, lengths: Tensor) -> None:
        """Make room for `lengths` rows per head, in memory that only this layout writes."""
        if not self._shared and writable(self._keys) and bool((lengths <= self._capacities).all()):
            return
        short = lengths > self._capacities
        capacities = torch.where(short, lengths + _SPARE_SLOTS, self._capacities)
        old = self._slots(self._lengths)
        old = old[old >= 0]
        starts = (capacities.flatten().cumsum(0) - capacities.flatten()).view_as(capacities)
        offset = torch.arange(int(self._lengths.max()) if self._lengths.numel() else 0)
        new = (starts[..., None] + offset)[offset < self._lengths[..., None]].to(self._keys.device)
        slots = int(capacities.sum())

        def moved(flat: Tensor, fill: float = 0) -> Tensor:
            buffer = flat.new_full((slots, *flat.shape[1:]), fill)
            buffer[new] = flat[old]
            return buffer

        self._keys, self._values = moved(self._keys), moved(self._values)
        self._positions = moved(self._positions, -1)
        self._columns = {name: moved(flat) for name, flat in self._columns.items()}
        self._capacities, self._starts, self._shared = capacities, starts, False

    def truncated(self, lengths: Tensor) -> RaggedRows:
        result = RaggedRows(self._keys, self._values, self._positions, lengths, self._capacities, dict(self._columns))
        result._shared = self._shared
        return result

    def select_batch(self, indices: Tensor) -> RaggedRows:
        indices = indices.to("cpu")
        lengths = self._lengths[indices]
        slots = self._slots(self._lengths)[indices.to(self._keys.device)]
        flat = slots[slots >= 0]
        columns = {name: column[flat] for name, column in self._columns.items()}
        return RaggedRows(
            self._keys[flat], self._values[flat], self._positions[flat], lengths, lengths.clone(), columns
        )

    def with_columns(self, columns: Columns) -> RaggedRows:
        present = self._slots(self._lengths)
        flat = present[present >= 0]
        self._columns = {}
        for name, rectangle in columns.items():
            self._columns[name] = rectangle.new_zeros((self._keys.shape[0], *rectangle.shape[3:]))
            self._columns[name][flat] = rectangle[present >= 0]
        return self

    def with_first_keys(self, keys: Tensor) -> RaggedRows:
        self._reserve(self._lengths)
        slots = self._slots(self._lengths.clamp(max=keys.shape[2]))
        present = slots >= 0
        self._keys[slots[present]] = keys[:, :, : slots.shape[2]][present]
        return self

    def expanded_heads(self, groups: int) -> RaggedRows:
        lengths = self._lengths.repeat_interleave(groups, dim=1)
        slots = self._slots(self._lengths).repeat_interleave(groups, dim=1)
        flat = slots[slots >= 0]
        columns = {name: split_groups(column, groups)[slots >= 0] for name, column in self.view().columns.items()}
        return RaggedRows(
            self._keys[flat], self._values[flat], self._positions[flat], lengths, lengths.clone(), columns
        )

    def shared(self) -> RaggedRows:
        twin = RaggedRows(
            self._keys, self._values, self._positions, self._lengths.clone(), self._capacities, dict(self._columns)
        )
        self._shared = twin._shared = True
        return twin

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._keys, self._values, self._positions, *self._columns.values())

    def blocks(self) -> Iterator[Block]:
        for row in range(self._lengths.shape[0]):
            for head in range(self._lengths.shape[1]):
                start, length = int(self._starts[row, head]), int(self._lengths[row, head])
                if length:
                    own = slice(start, start + length)
                    keys, values, positions = self._keys[own], self._values[own], self._positions[own]
                    yield Block(
                        slice(row, row + 1),
                        slice(head, head + 1),
                        keys[None, None],
                        values[None, None],
                        positions[None, None],
                        True,
                    )

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        batch, query_heads, queries, _ = query.shape
        groups = query_heads // self._lengths.shape[1]
        output = query.new_zeros(batch, query_heads, queries, self._values.shape[1])
        for block in self.blocks():  # a row of nothing but padding so far has none
            span = block.query_heads(groups)
            visibility = reading.visibility(query_positions[block.batch], block.positions, own=False, complete=True)
            output[block.batch, span] = reading.kernel(
                query[block.batch, span],
                block.keys,
                block.values,
                visibility,
                scaling=reading.scaling,
                softcap=reading.softcap,
                sinks=None if reading.sinks is None else reading.sinks[span],
            )
        return output
