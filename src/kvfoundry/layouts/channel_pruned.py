"""Keys of older rows without the channels that the queries do not ask for; the newest rows whole (ThinK)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.codecs.think import picked_channels, queries_for, with_all_channels
from kvfoundry.errors import CacheStateError
from kvfoundry.kernels.running_attention import RunningAttention
from kvfoundry.layouts.base import Columns, Layout, Reading, RowsView, Stretches, split_groups
from kvfoundry.layouts.parts import WholeRows, behind, front, joined, take_in_rows
from kvfoundry.layouts.storing import keep_rows


class ChannelPrunedRows(Layout):
    """old: rows whose keys have the kept channels only, values whole; tail: the newest rows, whole.

    channels: [batch, heads, kept], ascending. A head has at most `recent + stride - 1` rows in its tail between calls:
    the oldest `stride` are pruned as soon as more are there.
    """

    coded = True

    def __init__(
        self,
        old: WholeRows,
        tail: WholeRows,
        channels: Tensor,
        head_dim: int,
        recent: int,
        stride: int,
        columns: Columns | None = None,
    ):
        self._old, self._tail, self._channels = old, tail, channels
        self._head_dim, self._recent, self._stride = head_dim, recent, stride
        self._columns = columns or {}

    @classmethod
    def pruned(cls, view: RowsView, channels: Tensor, recent: int, stride: int) -> ChannelPrunedRows:
        """All rows but the newest `recent` of every head without the other channels."""
        counts = (view.lengths - recent).clamp(min=0)
        keys = picked_channels(view.keys, channels.long())
        old = front(RowsView(keys, view.values, view.positions, view.lengths), counts)
        tail = behind(view, counts)
        # A channel number fits in two bytes; head sizes are far below that bound.
        return cls(old, tail, channels.to(torch.int16), view.keys.shape[3], recent, stride, dict(view.columns))

    @property
    def _value_dim(self) -> int:
        return self._tail.stretches().values.shape[1]

    def _with(self, old: WholeRows, tail: WholeRows, columns: Columns) -> ChannelPrunedRows:
        return ChannelPrunedRows(old, tail, self._channels, self._head_dim, self._recent, self._stride, columns)

    @property
    def lengths(self) -> Tensor:
        return self._old.lengths + self._tail.lengths

    def parts(self) -> tuple[WholeRows, WholeRows, Tensor]:
        """What is stored: the pruned rows, the whole ones, and the channels that the former have."""
        return self._old, self._tail, self._channels

    @property
    def channels(self) -> Tensor:
        """Channels that the keys of the older rows have: [batch, heads, kept], ascending."""
        return self._channels.long()

    @property
    def pruned_lengths(self) -> Tensor:
        """Rows of every head that are pruned: [batch, heads], on the CPU. They are its first ones."""
        return self._old.lengths

    def view(self) -> RowsView:
        """A copy with zeros in the channels that are gone: for scores and for a look, never on the way of attention."""
        old = self._old.view()
        keys = with_all_channels(old.keys, self.channels, self._head_dim)
        whole = RowsView(keys, old.values, old.positions, old.lengths)
        return joined(whole, self._tail.view(), self._columns)

    def coded_span(self) -> tuple[int, int]:
        return 0, int(self._old.lengths.min()) if self._old.lengths.numel() else 0

    def coded_keys(self, start: int, stop: int, view: RowsView) -> Tensor:
        pruned = self._old.view().keys[:, :, start:stop]
        return with_all_channels(pruned, self.channels, self._head_dim)

    def stretches(self) -> Stretches:
        raise CacheStateError("keys without some of their channels are not read by pages.")

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> ChannelPrunedRows:
        self._tail = self._tail.append(keys, values, positions, counts, last_position)
        if self._columns:
            rows = int(self.lengths.max())
            self._columns = {
                name: F.pad(column, (0, 0) * (column.dim() - 3) + (0, rows - column.shape[2]))
                for name, column in self._columns.items()
            }
        return self

    def flushed(self) -> ChannelPrunedRows:
        """The rows with the oldest whole ones pruned, a stride at a time; itself while the tail is short enough."""
        counts = (self._tail.lengths - self._recent).clamp(min=0) // self._stride * self._stride
        if not bool(counts.any()):
            return self
        waiting = self._tail.view()
        view, tail = front(waiting, counts).view(), behind(waiting, counts)
        even = bool((counts == counts[0, 0]).all())
        old = self._old.append(
            picked_channels(view.keys, self.channels),
            view.values,
            view.positions,
            None if even else counts,
            int(view.positions.max()),
        )
        return self._with(old, tail, self._columns)

    def kept(self, view: RowsView, slots: Tensor, counts: Tensor) -> ChannelPrunedRows:
        """As every layout; stored keys are picked, never pruned again, so what the view holds of them is not used."""
        first = self._old.lengths.to(slots.device)[..., None]
        in_old = (slots >= 0) & (slots < first)
        kept = in_old.sum(dim=-1).cpu()
        width = int(kept.max()) if kept.numel() else 0
        old = keep_rows(self._old.view(), slots.masked_fill(~in_old, -1)[..., :width], kept)
        rest = counts - kept
        offset = torch.arange(int(rest.max()) if rest.numel() else 0, device=slots.device)
        index = (kept.to(slots.device)[..., None] + offset).clamp(max=max(0, slots.shape[2] - 1))
        behind = slots.gather(2, index) - first
        behind = behind.masked_fill(offset >= rest.to(slots.device)[..., None], -1)
        tail = keep_rows(self._tail.view(), behind, rest)
        present = slots >= 0
        columns = {}
        for name, column in self._columns.items():
            trailing = [1] * (column.dim() - 3)
            wide = slots.clamp(min=0).reshape(*slots.shape, *trailing).expand(*slots.shape, *column.shape[3:])
            columns[name] = column.gather(2, wide) * present.reshape(*slots.shape, *trailing)
        return self._with(old, tail, columns)

    def truncated(self, lengths: Tensor) -> ChannelPrunedRows:
        old = self._old.truncated(torch.minimum(lengths, self._old.lengths))
        tail = self._tail.truncated((lengths - self._old.lengths).clamp(min=0))
        width = int(lengths.max()) if lengths.numel() else 0
        return self._with(old, tail, {name: column[:, :, :width] for name, column in self._columns.items()})

    def select_batch(self, indices: Tensor) -> ChannelPrunedRows:
        old, tail = self._old.select_batch(indices), self._tail.select_batch(indices)
        width = int((old.lengths + tail.lengths).max()) if indices.numel() else 0
        on_device = indices.to(self._channels.device)
        columns = {name: column[on_device][:, :, :width].clone() for name, column in self._columns.items()}
        result = self._with(old, tail, columns)
        result._channels = self._channels[on_device]
        return result

    def with_columns(self, columns: Columns) -> ChannelPrunedRows:
        self._columns = columns
        return self

    def with_first_keys(self, keys: Tensor) -> ChannelPrunedRows:
        raise CacheStateError("keys without some of their channels cannot be rotated to another position.")

    def expanded_heads(self, groups: int) -> ChannelPrunedRows:
        columns = {name: split_groups(column, groups) for name, column in self._columns.items()}
        result = self._with(self._old.expanded_heads(groups), self._tail.expanded_heads(groups), columns)
        result._channels = self._channels.repeat_interleave(groups, dim=1)
        return result

    def shared(self) -> ChannelPrunedRows:
        return self._with(self._old.shared(), self._tail.shared(), dict(self._columns))

    def tensors(self) -> Iterator[Tensor]:
        yield from self._old.tensors()
        yield from self._tail.tensors()
        yield self._channels
        yield from self._columns.values()

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        running = RunningAttention(query, self._value_dim, scaling=reading.scaling, softcap=reading.softcap)
        if bool(self._old.lengths.any()):
            take_in_rows(running, self._old, queries_for(query, self.channels), query_positions, reading)
        take_in_rows(running, self._tail, query, query_positions, reading)
        return running.output(query.dtype, reading.sinks)
