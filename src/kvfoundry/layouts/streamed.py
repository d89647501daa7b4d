"""Rows that live in host memory and come to the device one head (or a few) at a time, to be read there: HeadInfer.

On the device are only the newest rows and what the ring of the cache holds. New rows wait on the device and leave it
together, when there are enough of them or when a piece of the prompt has been read. So what is on the host does not
change between two steps, and its copies can be on their way before they are asked for.

A head's rows lie one after the other, so a page of them is one stretch of a few KiB. Reading chosen pages (quest)
leaves the ring out: a kernel fetches them over the link itself (`kernels.host_rows`), for a copy per page would cost
more to enqueue than to make.

Whatever else is done to rows (dropping, reordering, a look at them) is done by the layout that `fetched` gives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from kvfoundry.kernels.gather_rows.naive import picked
from kvfoundry.layouts.base import Columns, Layout, Reading, RowsView, Stretches, owned
from kvfoundry.layouts.dense import DenseRows
from kvfoundry.layouts.host import HostPart, counted
from kvfoundry.layouts.rectangles import appended
from kvfoundry.layouts.ring import Ring, Rings, Shape

# Rows of a head that wait on the device at most between two calls.
WAITING = 64


def in_units(shape: torch.Size, group: int) -> list[tuple[int, slice]]:
    """What is copied and read together of [batch, heads]: `group` neighbouring heads of one batch row."""
    batch, heads = shape
    spans = [slice(start, min(start + group, heads)) for start in range(0, heads, group)]
    return [(row, span) for row in range(batch) for span in spans]


class StreamedRows(Layout):
    """Keys, values and positions of all rows but the newest on the host; these in `tail`, on the device.

    group: heads of a batch row that are copied and read together. place: the layer among those of the rings.
    """

    def __init__(
        self,
        keys: HostPart,
        values: HostPart,
        positions: HostPart,
        tail: DenseRows,
        group: int,
        rings: Rings,
        place: int,
    ):
        self._keys, self._values, self._positions, self._tail = keys, values, positions, tail
        self._columns: Columns = {}
        self.group, self.place, self._rings = group, place, rings
        self._room = WAITING
        self._changed()

    @classmethod
    def of(cls, rows: Layout, group: int, rings: Rings, place: int, expected: int = 0) -> StreamedRows:
        """The rows of a layout, moved to the host. expected: rows of a head that there will be, where that is known."""
        view = rows.view()
        device, lengths = view.keys.device, view.lengths
        positions = view.positions.to(torch.int32)
        parts = [HostPart(device, (rows.shape[0], rows.shape[1])) for rows in (view.keys, view.values, positions)]
        tail = _empty(view.keys, view.values, positions, lengths)
        result = cls(parts[0], parts[1], parts[2], tail, group, rings, place)
        result._columns = {name: owned(column) for name, column in view.columns.items()}
        result._move(view.keys, view.values, positions, lengths, expected)
        result.ring.expect(result)
        return result

    def _changed(self) -> None:
        """What is on the host is another thing from now on."""
        self.version: object = object()
        self._stored = self._keys.counts
        self._units = in_units(self._stored.shape, self.group)
        self._shapes: dict[tuple[int, int], list[Shape]] = {}

    def _move(self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor, expected: int) -> None:
        """Write the first `counts` rows of rectangles of every head behind the rows on the host."""
        ring = self.ring
        keys, values, positions = (rows.detach() for rows in (keys, values, positions))
        with ring.receiving(keys, values, positions):
            for part, rows in ((self._keys, keys), (self._values, values), (self._positions, positions)):
                count = counts[:, : rows.shape[1]].flatten().tolist()
                lanes = [lane[:n] for lane, n in zip(rows.flatten(0, 1), count, strict=True)]
                part.append(lanes, expected)
        self._changed()

    @property
    def ring(self) -> Ring:
        """The ring of the device on which the rows are read."""
        return self._rings.on(self._keys.device)

    # What stays on the host while newer rows are elsewhere.

    @property
    def stored(self) -> Tensor:
        """Rows of every head on the host: [batch, heads], on the CPU."""
        return self._stored

    @property
    def parts(self) -> tuple[HostPart, HostPart]:
        """Keys and values on the host."""
        return self._keys, self._values

    @property
    def spans(self) -> list[tuple[int, slice]]:
        """The batch row and the heads of every unit."""
        return self._units

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self._tail.view().values.shape[3]

    @property
    def newest(self) -> DenseRows:
        """The rows that wait on the device."""
        return self._tail

    def with_newest(self, newest: DenseRows) -> StreamedRows:
        """The rows on the host with these behind them."""
        twin = copy.copy(self)
        twin._tail = newest
        twin._room = -(-max(1, newest.view().keys.shape[2]) // WAITING) * WAITING
        twin.ring.expect(twin)
        return twin

    @property
    def lengths(self) -> Tensor:
        return self._stored + self._tail.lengths

    def settled(self, rings: Rings, expected: int = 0) -> StreamedRows:
        """The rows after a call, those that have waited long enough on the host; read through these rings."""
        self._rings = rings
        tail = self._tail.view()
        if tail.keys.shape[2] >= WAITING:
            self._tail = _empty(tail.keys, tail.values, tail.positions, tail.lengths)
            self._move(tail.keys, tail.values, tail.positions, tail.lengths, expected)
        self.ring.expect(self)
        return self

    # The units of the ring.

    @property
    def units(self) -> int:
        return len(self._units)

    def shapes(self, unit: int) -> list[Shape]:
        if (unit, self._room) not in self._shapes:
            row, heads = self._units[unit]
            room = int(self._stored[row, heads].max()) + self._room
            self._shapes[unit, self._room] = [part.shape_of(heads, room) for part in (self._keys, self._values)]
        return self._shapes[unit, self._room]

    def fill(self, unit: int, parts: list[Tensor]) -> int:
        row, heads = self._units[unit]
        return sum(
            part.copy_to(row, heads, target) for part, target in zip((self._keys, self._values), parts, strict=True)
        )

    def attend(self, query: Tensor, query_positions: Tensor, reading: Reading) -> Tensor:
        batch, query_heads, queries, _ = query.shape
        groups = query_heads // self._stored.shape[1]
        tail, ring, lengths = self._tail.view(), self.ring, self.lengths
        # One query sees all rows; several have to be told apart by their positions.
        masked = queries > 1 or reading.unread_distance is not None
        positions = self._all_positions() if masked else None
        appended, nowhere = self._tail.ends_with(queries), query_positions.new_zeros(1, 1, 1)
        output = query.new_zeros(batch, query_heads, queries, tail.values.shape[3])
        ring.enter(self)
        for unit, (row, heads) in enumerate(self._units):
            with ring.taken(self, unit) as (keys, values):
                for number, span in _alike(lengths[row], tail.lengths[row], heads):
                    stored, waiting = int(self._stored[row, span.start]), int(tail.lengths[row, span.start])
                    rows = stored + waiting
                    if not rows:  # nothing but padding so far
                        continue
                    own = slice(number, number + span.stop - span.start)
                    keys[own, stored:rows] = tail.keys[row, span, :waiting].detach()
                    values[own, stored:rows] = tail.values[row, span, :waiting].detach()
                    asked = slice(span.start * groups, span.stop * groups)
                    seen = nowhere.expand(1, 1, rows)
                    if positions is not None:
                        shared = positions.shape[1] == 1
                        seen = positions[row : row + 1, slice(0, 1) if shared else span, :rows]
                    one = slice(row, row + 1)
                    output[one, asked] = reading.kernel(
                        query[one, asked],
                        keys[None, own, :rows],
                        values[None, own, :rows],
                        reading.visibility(query_positions[one], seen, own=False, complete=True, appended=appended),
                        scaling=reading.scaling,
                        softcap=reading.softcap,
                        sinks=None if reading.sinks is None else reading.sinks[asked],
                    )
        return output

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor | None, last_position: int
    ) -> StreamedRows:
        before = self.lengths
        self._tail = self._tail.append(keys, values, positions, counts, last_position)
        self._room = -(-self._tail.view().keys.shape[2] // WAITING) * WAITING
        added = self.lengths - before
        self._columns = {
            name: appended(column, before, column.new_zeros(*column.shape[:2], keys.shape[2], *column.shape[3:]), added)
            for name, column in self._columns.items()
        }
        return self

    # Everything else: looks, and changes by the layout that the device would hold.

    def _joined(self, part: HostPart, tail: Tensor, fill: float = 0.0) -> Tensor:
        """Entries of a part with the waiting ones behind: [batch, heads or 1, rows, ...] on the device."""
        heads = part.shape[1]
        stored, waiting = part.counts, self._tail.lengths[:, :heads]
        width = int((stored + waiting).max())
        self.ring.follow()
        hosted = part.rectangle()
        both = torch.cat([hosted, tail[:, :heads].to(hosted.dtype)], dim=2)
        place = torch.arange(width)
        behind = place - stored[..., None] + int(stored.max())
        index = torch.where(place < stored[..., None], place, behind)
        return picked(both, index.masked_fill(place >= (stored + waiting)[..., None], -1).to(both.device), fill)

    def _all_positions(self) -> Tensor:
        return self._joined(self._positions, self._tail.view().positions, -1)

    def view(self) -> RowsView:
        """All rows on the device, fetched when they are looked at."""
        return FetchedView.of(self)

    def fetched(self) -> DenseRows:
        view = self.view()
        return DenseRows(view.keys, view.values, view.positions, view.lengths, dict(self._columns))

    def stretches(self) -> Stretches:
        batch, heads = self._stored.shape
        width = int(self.lengths.max())
        starts = torch.arange(batch * heads, device=self._keys.device).view(batch, heads) * width
        tail = self._tail.view()
        self.ring.follow()
        keys, values = (
            StreamedSlots(part, rows, tail.lengths, width, self.ring)
            for part, rows in ((self._keys, tail.keys), (self._values, tail.values))
        )
        return Stretches(keys, values, starts, self.lengths)

    def truncated(self, lengths: Tensor) -> Layout:
        if bool((lengths < self._stored).any()):
            return self.fetched().truncated(lengths)
        twin = copy.copy(self)
        twin._tail = self._tail.truncated(lengths - self._stored)
        width = int(lengths.max())
        twin._columns = {name: column[:, :, :width].clone() for name, column in self._columns.items()}
        return twin

    def select_batch(self, indices: Tensor) -> StreamedRows:
        host = indices.cpu()
        self.ring.settle()
        twin = copy.copy(self)
        twin._keys, twin._values, twin._positions = (
            part.selected(host) for part in (self._keys, self._values, self._positions)
        )
        twin._tail = self._tail.select_batch(indices)
        twin._changed()
        width, columns = int(twin.lengths.max()), self._columns.items()
        twin._columns = {name: column[indices.to(column.device)][:, :, :width] for name, column in columns}
        return twin

    def with_columns(self, columns: Columns) -> StreamedRows:
        self._columns = columns
        return self

    def with_first_keys(self, keys: Tensor) -> DenseRows:
        return self.fetched().with_first_keys(keys)

    def expanded_heads(self, groups: int) -> DenseRows:
        return self.fetched().expanded_heads(groups)

    def shared(self) -> StreamedRows:
        self.ring.settle()
        twin = copy.copy(self)
        twin._keys, twin._values, twin._positions = (
            part.shared() for part in (self._keys, self._values, self._positions)
        )
        twin._tail, twin._columns = self._tail.shared(), dict(self._columns)
        return twin

    def tensors(self) -> Iterator[Tensor]:
        yield from self._tail.tensors()
        yield from self._columns.values()

    @property
    def hosted_nbytes(self) -> int:
        return sum(part.used_nbytes for part in (self._keys, self._values, self._positions))

    def host_tensors(self) -> Iterator[Tensor]:
        for part in (self._keys, self._values, self._positions):
            yield from part.tensors()


def _empty(keys: Tensor, values: Tensor, positions: Tensor, lengths: Tensor) -> DenseRows:
    """No rows, of the kind of these."""
    keys, values, positions = (rows[:, :, :0].detach().clone() for rows in (keys, values, positions))
    return DenseRows(keys, values, positions, torch.zeros_like(lengths))


def _alike(lengths: Tensor, waiting: Tensor, heads: slice) -> Iterator[tuple[int, slice]]:
    """Heads that are next to each other and have as many rows, as (number within `heads`, heads)."""
    counts = list(zip(lengths[heads].tolist(), waiting[heads].tolist(), strict=True))
    start = 0
    for stop in range(1, len(counts) + 1):
        if stop == len(counts) or counts[stop] != counts[start]:
            yield start, slice(heads.start + start, heads.start + stop)
            start = stop


class FetchedView(RowsView):
    """A view whose rows come from the host when somebody looks at them: many methods only ask for positions."""

    _rows: StreamedRows

    @classmethod
    def of(cls, rows: StreamedRows) -> FetchedView:
        """The view of streamed rows as they are now."""
        view = object.__new__(cls)
        for name, part in {"_rows": rows, "lengths": rows.lengths, "columns": rows._columns}.items():
            object.__setattr__(view, name, part)
        return view

    @cached_property
    def keys(self) -> Tensor:
        """[batch, heads, rows, head_dim]."""
        return self._rows._joined(self._rows._keys, self._rows._tail.view().keys)

    @cached_property
    def values(self) -> Tensor:
        """[batch, heads, rows, value_dim]."""
        return self._rows._joined(self._rows._values, self._rows._tail.view().values)

    @cached_property
    def positions(self) -> Tensor:
        """[batch, heads or 1, rows]."""
        return self._rows._all_positions()

    @property
    def head_positions(self) -> Tensor:
        return self.positions.expand(-1, self.lengths.shape[1], -1)


class StreamedSlots:
    """Keys or values by slot number, as `Stretches` number them; head h of all heads has slots h * width onwards.

    Rows on the host are read where they are, see `HostPart.at`.
    """

    def __init__(self, part: HostPart, tail: Tensor, waiting: Tensor, width: int, ring: Ring):
        self._part, self._tail, self._waiting, self._width, self.ring = part, tail, waiting, width, ring
        self.shape = torch.Size((waiting.numel() * width, tail.shape[3]))
        self.device = tail.device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros like a row's."""
        return self._tail.new_zeros(*shape)

    def at(self, index: Tensor) -> Tensor:
        """Rows `index` [batch, heads, n] of every head: [batch, heads, n, dim], zeros where it has none."""
        rows = self._part.at(index, self._tail, counted(self._waiting, self.device))
        self.ring.lend(self._part.tensors())
        self.ring.sent += rows.nbytes
        return rows

    def __getitem__(self, slots: Tensor) -> Tensor:
        # Query heads that share a stored head lie next to each other, so they read it together.
        return self.at((slots % self._width).view(*self._waiting.shape, -1)).view(*slots.shape, -1)
