"""Rows as codes, with the newest ones in full precision: the layout under every codec.

Both sides (keys, values) hold the same rows of every head; positions and statistics are kept once for both. Nothing is
written in place: a fork shares every tensor until it goes its own way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from kvfoundry.codecs.base import KVCodec, Parts
from kvfoundry.errors import CacheStateError
from kvfoundry.kernels import coded_attention
from kvfoundry.kernels.gather_rows.naive import picked
from kvfoundry.layouts.base import (
    Columns,
    Layout,
    Reading,
    RowsView,
    Stretches,
    owned,
    position_dtype,
    split_groups,
    widened,
)
from kvfoundry.layouts.rectangles import appended, cut
from kvfoundry.layouts.side import CodedSide


class CodedRows(Layout):
    """Rows of one layer under one codec; `codec` must be the one for this layer (`KVCodec.at`).

    positions: [batch, heads or 1, rows], one row for all heads while these hold the same tokens; columns likewise
    [batch, heads, rows, ...]. lengths: [batch, heads] on the CPU.
    """

    coded = True

    def __init__(
        self,
        codec: KVCodec,
        keys: CodedSide,
        values: CodedSide,
        positions: Tensor,
        lengths: Tensor,
        dtype: torch.dtype,
        columns: Columns | None = None,
    ):
        self.codec = codec
        self.keys, self.values = keys, values
        self._positions, self._lengths, self._columns = positions, lengths, columns or {}
        self._dtype = dtype

    @classmethod
    def of(cls, codec: KVCodec, view: RowsView, query: Tensor | None) -> CodedRows:
        """The rows of a view, what is due encoded at once.

        query: the last `codec.window` queries of the prompt [batch, query_heads, window, head_dim], None when 0.
        """
        valid = view.valid
        turned = view.keys if codec.rotation is None else codec.rotation.turn(view.keys)
        turned_query = query if codec.rotation is None or query is None else codec.rotation.turn(query)
        fixed_keys: Parts = codec.keys.fit(codec.keys.prepared(turned, view.head_positions), valid, turned_query)
        fixed_values: Parts = codec.values.fit(view.values, valid, query)
        lengths = view.lengths.clone()
        rows = cls(
            codec,
            CodedSide.of(codec.keys, codec.rotation, owned(view.keys), lengths, fixed_keys),
            CodedSide.of(codec.values, None, owned(view.values), lengths, fixed_values),
            owned(_narrowed(view.positions, lengths)),
            lengths,
            view.keys.dtype,
            {name: owned(column) for name, column in view.columns.items()},
        )
        return rows.flushed()

    def _with(self, keys: CodedSide, values: CodedSide, **changed: object) -> CodedRows:
        twin = copy.copy(self)
        twin.keys, twin.values = keys, values
        for name, value in changed.items():
            setattr(twin, name, value)
        return twin

    def flushed(self) -> CodedRows:
        """The rows with everything encoded that is due; called after attention, so a token is read whole once."""
        return self._with(self.keys.flushed(self._positions), self.values.flushed(self._positions))

    @property
    def dtype(self) -> torch.dtype:
        """In which rows are decoded."""
        return self._dtype

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    @property
    def full_rows(self) -> Tensor:
        """Rows of each head still in full precision, first ones included: [2, batch, heads] for keys and values."""
        return torch.stack([self._lengths - side.counts for side in (self.keys, self.values)])

    def view(self) -> RowsView:
        """All rows, decoded when looked at. For selection, one layer at a time; attention never calls it."""
        return DecodedView.of(self)

    def decoded(self, side: CodedSide) -> Tensor:
        """All rows of one side as a rectangle [batch, heads, rows, dim], zeros where there is none."""
        rows = side.tile(0, self._width, self._dtype, self._positions)
        return rows.masked_fill((self._positions < 0)[..., None], 0.0)

    def coded_span(self) -> tuple[int, int]:
        return int(self.keys.firsts.max()), int((self.keys.firsts + self.keys.counts).min())

    def coded_keys(self, start: int, stop: int, view: RowsView) -> Tensor:
        return self.keys.tile(start, stop, view.keys.dtype, view.positions[:, :, start:stop])

    def stretches(self) -> Stretches:
        batch, heads = self._lengths.shape
        starts = torch.arange(batch * heads, device=self._positions.device).view(batch, heads) * self._width
        keys, values = (CodedSlots(side, self._positions, self._dtype) for side in (self.keys, self.values))
        return Stretches(keys, values, starts, self._lengths)

    @property
    def _width(self) -> int:
        return self._positions.shape[2]

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> CodedRows:
        tokens = keys.shape[2]
        added = torch.full_like(self._lengths, tokens) if counts is None else counts[:, None].expand_as(self._lengths)
        old = widened(self._positions, last_position)
        one = slice(0, old.shape[1])
        new = positions[:, None].expand(-1, old.shape[1], -1).to(old.dtype)
        columns = {
            name: appended(column, self._lengths, column.new_zeros(*column.shape[:2], tokens, *column.shape[3:]), added)
            for name, column in self._columns.items()
        }
        return self._with(
            self.keys.appended(keys, added),
            self.values.appended(values, added),
            _positions=appended(old, self._lengths[:, one], new, added[:, one], fill=-1),
            _lengths=self._lengths + added,
            _columns=columns,
        )

    def kept(self, view: RowsView, slots: Tensor, counts: Tensor) -> CodedRows:
        """Codes are picked; what the view holds of keys and values is not used."""
        host = slots.cpu()
        return self._with(
            self.keys.kept(host),
            self.values.kept(host),
            _positions=picked(self._positions, slots, fill=-1),
            _lengths=counts,
            _columns={name: picked(column, slots) for name, column in self._columns.items()},
        )

    def truncated(self, lengths: Tensor) -> CodedRows:
        if torch.equal(lengths, self._lengths):
            return self
        slots = torch.arange(int(lengths.max()) if lengths.numel() else 0).expand(*lengths.shape, -1)
        slots = slots.masked_fill(slots >= lengths[..., None], -1)
        shared = self._positions.shape[1] == 1 and bool((lengths == lengths[:, :1]).all())
        none = torch.zeros_like(lengths)
        positions = (
            cut(self._positions, none[:, :1], lengths[:, :1], fill=-1)
            if shared
            else picked(self._positions, slots.to(self._positions.device), fill=-1)
        )
        return self._with(
            self.keys.kept(slots),
            self.values.kept(slots),
            _positions=positions,
            _lengths=lengths,
            _columns={name: cut(column, none, lengths) for name, column in self._columns.items()},
        )

    def select_batch(self, indices: Tensor) -> CodedRows:
        host = indices.cpu()
        batch, heads = self._lengths.shape
        source = torch.arange(batch * heads).view(batch, heads)[host]
        lengths = self._lengths[host]
        width = int(lengths.max()) if lengths.numel() else 0

        def pick(tensor: Tensor) -> Tensor:
            return tensor[indices.to(tensor.device), :, :width]

        return self._with(
            self.keys.rearranged(source),
            self.values.rearranged(source),
            _positions=pick(self._positions),
            _lengths=lengths,
            _columns={name: pick(column) for name, column in self._columns.items()},
        )

    def expanded_heads(self, groups: int) -> CodedRows:
        batch, heads = self._lengths.shape
        source = torch.arange(batch * heads).view(batch, heads).repeat_interleave(groups, dim=1)
        shared = self._positions.shape[1] == 1
        return self._with(
            self.keys.rearranged(source),
            self.values.rearranged(source),
            _positions=self._positions if shared else self._positions.repeat_interleave(groups, dim=1),
            _lengths=self._lengths.repeat_interleave(groups, dim=1),
            _columns={name: split_groups(column, groups) for name, column in self._columns.items()},
        )

    def with_columns(self, columns: Columns) -> CodedRows:
        return self._with(self.keys, self.values, _columns=columns)

    def with_first_keys(self, keys: Tensor) -> CodedRows:
        raise CacheStateError("keys that are stored as codes cannot be exchanged.")

    def shared(self) -> CodedRows:
        return copy.copy(self)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._positions, *self._columns.values())
        yield from self.keys.tensors()
        yield from self.values.tensors()

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        visibility = reading.visibility(query_positions, self._positions, own=False, complete=False)
        return coded_attention.attend(
            query if self.codec.rotation is None else self.codec.rotation.turn(query),
            self.keys,
            self.values,
            visibility,
            scaling=reading.scaling,
            softcap=reading.softcap,
            sinks=reading.sinks,
        )


def _narrowed(positions: Tensor, lengths: Tensor) -> Tensor:
    """The positions in the narrowest type; the device is only asked where they are if that could change it."""
    longest = int(lengths.max()) if lengths.numel() else 0
    if positions.dtype == position_dtype(longest - 1):  # the last of so many rows is no earlier token
        return positions
    return positions.to(position_dtype(int(positions.max())))


class DecodedView(RowsView):
    """A view whose rows are decoded when somebody looks at them: many methods only ask for positions."""

    _rows: CodedRows

    @classmethod
    def of(cls, rows: CodedRows) -> DecodedView:
        """The view of coded rows as they are now."""
        view = object.__new__(cls)
        parts = {"_rows": rows, "positions": rows._positions, "lengths": rows._lengths, "columns": rows._columns}
        for name, part in parts.items():
            object.__setattr__(view, name, part)
        return view

    @cached_property
    def keys(self) -> Tensor:
        """[batch, heads, rows, head_dim]."""
        return self._rows.decoded(self._rows.keys)

    @cached_property
    def values(self) -> Tensor:
        """[batch, heads, rows, value_dim]."""
        return self._rows.decoded(self._rows.values)

    @property
    def head_positions(self) -> Tensor:
        return self.positions.expand(-1, self.lengths.shape[1], -1)


class CodedSlots:
    """One side, read by slot number as `Stretches` number them: head h of all heads has slots h * width onwards."""

    def __init__(self, side: CodedSide, positions: Tensor, dtype: torch.dtype):
        self._side, self._positions, self._dtype = side, positions, dtype
        self.shape = torch.Size((side.counts.numel() * positions.shape[2], side.tail.shape[3]))
        self.device = side.tail.device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros like a row's."""
        return torch.zeros(*shape, dtype=self._dtype, device=self.device)

    def __getitem__(self, slots: Tensor) -> Tensor:
        batch, heads = self._side.counts.shape
        width = self._positions.shape[2]
        # Query heads that share a stored head lie next to each other, so they read it together.
        index = (slots % width).view(batch, heads, -1)
        positions = self._positions.expand(-1, heads, -1).gather(2, index)
        return self._side.at(index, self._dtype, positions).view(*slots.shape, -1)
