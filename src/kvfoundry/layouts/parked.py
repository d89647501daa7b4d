"""Rows that left the device and wait on the host: what `park()` keeps of an eviction until it is recalled.

They arrive in parcels, one per eviction. A parcel is never written again, so forks, copies and beams share it: which
stretch of it belongs to whom is all that selecting batch rows changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvfoundry.errors import CacheStateError
from kvfoundry.layouts.base import Columns, Layout, RowsView, joined_groups, position_dtype
from kvfoundry.layouts.dense import DenseRows

# Rows that are copied at a time: on their way they exist twice on the device.
_PIECE = 1 << 16


@dataclass(frozen=True, eq=False)
class Parcel:
    """Rows of every head of every batch row, in flat host buffers that nobody writes again.

    keys, values: [slots, dim]; positions: [slots], int32; columns: statistics, name -> [slots, ...]. starts, lengths:
    [batch, heads] the stretch of each head. arrived: when a copy that may still be under way is complete.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    columns: Columns
    starts: Tensor
    lengths: Tensor
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(cls, view: RowsView, leaving: Tensor, counts: Tensor) -> Parcel:
        """A copy of the rows of a view where `leaving` [batch, heads, rows] is True; counts: [batch, heads] of them.

        From a CUDA device the rows go into pinned memory on the current stream: behind what still computes them, and
        before anything that may use their memory next. The host does not wait.
        """
        width, device = int(counts.max()), view.keys.device
        slots = (~leaving).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
        batch, head, place = (i.to(device) for i in _inside(counts).nonzero(as_tuple=True))
        at = batch, head, slots[batch, head, place]
        parcel = cls(
            _copied(view.keys, at),
            _copied(view.values, at),
            _copied(view.head_positions, at, torch.int32),
            {name: _copied(column, at) for name, column in view.columns.items()},
            _starts(counts),
            counts,
        )
        if device.type != "cuda":
            return parcel
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        return replace(parcel, arrived=arrived)

    def __deepcopy__(self, memo: object) -> Parcel:
        return self

    @property
    def rows(self) -> int:
        """Rows of all heads together."""
        return int(self.lengths.sum())

    def wait(self) -> None:
        """Return when the host may read the buffers."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def selected(self, indices: Tensor) -> Parcel:
        """The batch rows `indices`; where most of a buffer belongs to nobody any more, a smaller copy of the rest."""
        host = indices.cpu()
        chosen = replace(self, starts=self.starts[host], lengths=self.lengths[host])
        return _packed([chosen]) if 2 * chosen.rows <= self.keys.shape[0] else chosen

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory for the rows."""
        yield from (self.keys, self.values, self.positions, *self.columns.values())


@dataclass(frozen=True, eq=False)
class ParkedRows:
    """All parcels of one layer. Frozen: whoever parks, selects or recalls goes on with another object."""

    parcels: tuple[Parcel, ...] = field(default=())

    def joined_by(self, view: RowsView, leaving: Tensor, counts: Tensor) -> ParkedRows:
        """With the rows of one more eviction; arguments as of `Parcel.of`.

        Parcels of like size become one, as digits carry in a binary counter: however often a method evicts, there are
        few of them, and no row is copied often. The newest parcel stays as it is, so nobody waits for its copy.
        """
        parcels = list(self.parcels)
        while len(parcels) > 1 and parcels[-2].rows <= parcels[-1].rows and _alike(*parcels[-2:]):
            parcels[-2:] = [_packed(parcels[-2:])]
        return ParkedRows((*parcels, Parcel.of(view, leaving, counts)))

    def selected(self, indices: Tensor) -> ParkedRows:
        """The batch rows `indices`, in that order, repeats allowed."""
        return ParkedRows(tuple(parcel.selected(indices) for parcel in self.parcels))

    def without_columns(self) -> ParkedRows:
        """The same rows; their statistics are forgotten."""
        return ParkedRows(tuple(replace(parcel, columns={}) for parcel in self.parcels))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory for the rows."""
        for parcel in self.parcels:
            yield from parcel.tensors()

    def view(self) -> RowsView | None:
        """The rows as rectangles on the host, in token order: for a look. None while there are none."""
        if not self.parcels:
            return None
        one = _packed(self.parcels)
        inside = _inside(one.lengths)
        slots = (one.starts[..., None] + torch.arange(inside.shape[2])).masked_fill(~inside, 0)
        beyond = torch.iinfo(torch.int32).max
        order = one.positions[slots].masked_fill(~inside, beyond).argsort(dim=-1)
        slots = slots.gather(2, order)  # absent ones are still behind
        keys, values = (rows[slots].masked_fill(~inside[..., None], 0) for rows in (one.keys, one.values))
        return RowsView(keys, values, one.positions[slots].masked_fill(~inside, -1), one.lengths)

    def reunited(self, kept: Layout, tokens: Tensor, heads: int, *, columns: bool) -> DenseRows:
        """Kept and parked rows in one rectangle on the device of the kept ones: slot i holds token i, in every head.

        tokens: [batch] real tokens, on the CPU. heads: KV heads of the model; where one set is kept per query head,
        the sets of a group have become equal again and are stored once. columns: with the statistics of the rows.
        Raises CacheStateError when the two parts do not make up all tokens.
        """
        view = kept.view()
        stored = view.lengths.shape[1]
        held = view.lengths + sum(parcel.lengths for parcel in self.parcels)
        if not torch.equal(held, tokens[:, None].expand_as(held)):
            raise CacheStateError(f"of {tokens.tolist()} tokens, {held.tolist()} rows per head are kept or parked.")
        groups, width = stored // heads, int(tokens.max())

        def rectangle(rows: Tensor, count: int) -> Tensor:
            return rows.new_zeros(rows.shape[0], count, width, *rows.shape[3:])

        keys, values = rectangle(view.keys, heads), rectangle(view.values, heads)
        statistics = {name: rectangle(column, stored) for name, column in view.columns.items()} if columns else {}
        _place(keys, view.keys[:, ::groups], view.head_positions[:, ::groups])
        _place(values, view.values[:, ::groups], view.head_positions[:, ::groups])
        for name, column in statistics.items():
            _place(column, view.columns[name], view.head_positions)
        for parcel in self.parcels:
            parcel.wait()
            for row, head in parcel.lengths.nonzero().tolist():
                start = int(parcel.starts[row, head])
                stretch = slice(start, start + int(parcel.lengths[row, head]))
                targets = [
                    (statistics[name], parcel.columns[name], head) for name in statistics.keys() & parcel.columns
                ]
                if head % groups == 0:
                    targets += [(keys, parcel.keys, head // groups), (values, parcel.values, head // groups)]
                slots = parcel.positions[stretch].to(keys.device, torch.long, non_blocking=True)
                for target, source, at in targets:
                    for some in range(0, len(slots), _PIECE):
                        piece = source[stretch][some : some + _PIECE].to(target.device, non_blocking=True)
                        target[row, at].index_copy_(0, slots[some : some + _PIECE], piece)
        slot = torch.arange(width, dtype=position_dtype(width - 1))
        positions = slot.expand(len(tokens), 1, -1).masked_fill(slot >= tokens[:, None, None], -1)
        statistics = {name: joined_groups(column, groups) for name, column in statistics.items()}
        lengths = tokens[:, None].repeat(1, heads)
        return DenseRows(keys, values, positions.to(keys.device), lengths, statistics)


def _inside(lengths: Tensor) -> Tensor:
    """Boolean [batch, heads, longest]: True for as many places of each head as it has rows."""
    return torch.arange(int(lengths.max()) if lengths.numel() else 0) < lengths[..., None]


def _starts(lengths: Tensor) -> Tensor:
    """First slots [batch, heads] of stretches that lie one behind the other."""
    return (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)


def _copied(rows: Tensor, at: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Tensor:
    """The rows [batch, heads, rows, ...] at (batch row, head, slot), flat on the host: [slots, ...]."""
    count, pinned = len(at[0]), rows.is_cuda
    host = torch.empty(count, *rows.shape[3:], dtype=dtype or rows.dtype, pin_memory=pinned)
    for start in range(0, count, _PIECE):
        piece = tuple(index[start : start + _PIECE] for index in at)
        host[start : start + _PIECE].copy_(rows[piece], non_blocking=pinned)
    return host


def _alike(first: Parcel, second: Parcel) -> bool:
    """Whether two parcels carry the same statistics."""
    return first.columns.keys() == second.columns.keys()


def _packed(parcels: Sequence[Parcel]) -> Parcel:
    """The rows of parcels that carry the same statistics as one parcel, in buffers of their own."""
    lengths = torch.stack([parcel.lengths for parcel in parcels]).sum(dim=0)
    starts, slots, first = _starts(lengths), int(lengths.sum()), parcels[0]

    def buffer(rows: Tensor) -> Tensor:
        return torch.empty(slots, *rows.shape[1:], dtype=rows.dtype, pin_memory=rows.is_pinned())

    keys, values, positions = buffer(first.keys), buffer(first.values), buffer(first.positions)
    packed = Parcel(
        keys, values, positions, {name: buffer(column) for name, column in first.columns.items()}, starts, lengths
    )
    behind = starts
    for parcel in parcels:
        parcel.wait()
        inside = _inside(parcel.lengths)
        offset = torch.arange(inside.shape[2])
        source, target = ((first_slot[..., None] + offset)[inside] for first_slot in (parcel.starts, behind))
        for name, column in packed.columns.items():
            column[target] = parcel.columns[name][source]
        keys[target], values[target] = parcel.keys[source], parcel.values[source]
        positions[target] = parcel.positions[source]
        behind = behind + parcel.lengths
    return packed


def _place(target: Tensor, rows: Tensor, positions: Tensor) -> None:
    """Write rows [batch, heads, rows, ...] into the slots that their positions [batch, heads, rows] name."""
    batch, head, slot = (positions >= 0).nonzero(as_tuple=True)
    target[batch, head, positions[batch, head, slot].long()] = rows[batch, head, slot]
