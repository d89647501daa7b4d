"""A few device buffers through which rows stream from the host, ahead of the attention that reads them.

One ring serves all layers of one device. Whatever is asked for is copied on a stream of its own. While a head (or a
group of them) is read, the next ones are on their way: those of the same layer, then the first ones of the layer that
came next the last time, and behind the last layer those of the first one, which the next step will ask for. A buffer is
filled again when an event says that it was read. The CPU runs the same code without streams.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

# Buffers: one that is read, the others on their way.
SLOTS = 3
# Where parts of a buffer begin, in bytes; and the share that a buffer is larger than it has to be, so that it lasts.
_ALIGNED, _SPARE = 256, 32

Shape = tuple[tuple[int, ...], torch.dtype]


class Streamable(Protocol):
    """Rows of one layer on the host, in units that are copied and read one after the other.

    place: the layer, among those of a ring. version: another object whenever what is on the host has changed. units:
    how many there are.
    """

    place: int
    version: object

    @property
    def units(self) -> int: ...

    def shapes(self, unit: int) -> list[Shape]:
        """Shapes and dtypes of the parts of a unit on the device."""
        ...

    def fill(self, unit: int, parts: list[Tensor]) -> int:
        """Enqueue the copies of a unit on the current stream; returns the bytes on their way."""
        ...


class Slot:
    """One device buffer. holds: the unit that is there or on its way, as (version of its layer's rows, number)."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.parts: list[Tensor] = []
        self.shapes: list[Shape] = []
        self.holds: tuple[object, int] | None = None
        self.busy = False
        self.arrived: torch.cuda.Event | None = None
        self.read: torch.cuda.Event | None = None

    def empty(self) -> None:
        """Give the buffer up."""
        self.buffer, self.parts, self.shapes, self.holds = None, [], [], None


class Ring:
    """The buffers of one device. sent, received: bytes that went to the device and came from it, for whoever counts."""

    def __init__(self, device: torch.device):
        self.device = device
        self.slots = [Slot() for _ in range(SLOTS)]
        self.sent = self.received = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._written: torch.cuda.Event | None = None
        self._lent: list[tuple[torch.cuda.Event, list[Tensor]]] = []
        self._newest: dict[int, weakref.ref[Streamable]] = {}
        self._after: dict[int, int] = {}
        self._last: int | None = None
        self._mark = self._pass = 0  # what was sent before the present pass, and in the last one

    def enter(self, rows: Streamable) -> None:
        """A layer is about to ask for its units."""
        if self._last is not None:
            self._after[self._last] = rows.place
        self._last = rows.place
        self.expect(rows)

    def expect(self, rows: Streamable) -> None:
        """These are the rows that a layer will ask for next."""
        self._newest[rows.place] = weakref.ref(rows)

    def begin(self, order: Sequence[Streamable]) -> None:
        """A pass over these rows begins, one after the other; it ends with `end`, and may become part of a CUDA graph.

        A graph waits for nothing outside of it, so whatever the buffers hold is sent for anew.
        """
        self.forget()
        self._newest = {rows.place: weakref.ref(rows) for rows in order}
        self._after = {rows.place: following.place for rows, following in pairwise(order)}
        self._last, self._mark = None, self.sent
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for rows, unit in islice(((each, unit) for each in order for unit in range(each.units)), SLOTS):
            self._load(self._free(()), rows, unit)

    def end(self) -> None:
        """What is enqueued next comes after the pass."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._pass = self.sent - self._mark

    def repeated(self) -> None:
        """The last pass was made once more, by a graph."""
        self.sent += self._pass

    def forget(self) -> None:
        """Take it that the buffers hold nothing and that nothing is under way."""
        for slot in self.slots:
            slot.holds = None
            if slot.buffer is not None and self._stream is not None:
                slot.read, slot.arrived = torch.cuda.Event(), torch.cuda.Event()
                slot.read.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def taken(self, rows: Streamable, unit: int) -> Iterator[list[Tensor]]:
        """The parts of a unit, there for what is enqueued inside; the units behind it are sent for."""
        slot = self._holding(rows, unit)
        if slot is None:
            slot = self._free(())
            self._load(slot, rows, unit)
        slot.busy = True
        try:
            self._send_for_next(rows, unit)
            if slot.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.arrived)
            yield slot.parts
        finally:
            slot.busy = False
            if slot.read is not None:
                slot.read.record(torch.cuda.current_stream(self.device))

    def _holding(self, rows: Streamable, unit: int) -> Slot | None:
        for slot in self.slots:
            if slot.holds is not None and slot.holds[0] is rows.version and slot.holds[1] == unit:
                return slot if slot.shapes == rows.shapes(unit) else None
        return None

    def _free(self, kept: tuple[Slot, ...]) -> Slot:
        """The buffer that was filled longest ago, of those that nobody reads or waits for."""
        slot = next(slot for slot in self.slots if not slot.busy and slot not in kept)
        self.slots.remove(slot)
        self.slots.append(slot)
        return slot

    def _send_for_next(self, rows: Streamable, unit: int) -> None:
        coming = list(islice(self._coming(rows, unit), SLOTS - 1))
        held = [self._holding(*each) for each in coming]
        kept = tuple(slot for slot in held if slot is not None)
        for each, slot in zip(coming, held, strict=True):
            if slot is None:
                slot = self._free(kept)
                self._load(slot, *each)
                kept += (slot,)

    def _coming(self, rows: Streamable, unit: int) -> Iterator[tuple[Streamable, int]]:
        """The units behind this one, as far as they are known, once round at most."""
        yield from ((rows, number) for number in range(unit + 1, rows.units))
        place, passed = self._after.get(rows.place), set[int]()
        while place is not None and place not in passed:
            passed.add(place)
            following = self._newest[place]()
            if following is None:
                return
            yield from ((following, n) for n in range(following.units) if following is not rows or n < unit)
            place = self._after.get(place)

    def _load(self, slot: Slot, rows: Streamable, unit: int) -> None:
        slot.holds = None
        shapes = rows.shapes(unit)
        slot.parts, slot.shapes = self._carved(slot, shapes), shapes
        if self._stream is None:
            self.sent += rows.fill(unit, slot.parts)
        else:
            assert slot.read is not None and slot.arrived is not None
            self._stream.wait_event(slot.read)
            with torch.cuda.stream(self._stream):
                self.sent += rows.fill(unit, slot.parts)
            slot.arrived.record(self._stream)
        slot.holds = rows.version, unit

    def _carved(self, slot: Slot, shapes: list[Shape]) -> list[Tensor]:
        """Tensors of these shapes in the buffer, which grows when it is too small."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGNED) * _ALIGNED
        if slot.buffer is None or slot.buffer.numel() < total:
            slot.empty()
            with torch.inference_mode(False):
                slot.buffer = torch.empty(total + total // _SPARE, dtype=torch.uint8, device=self.device)
            if self._stream is not None:
                # whoever gives it up, its memory becomes another tensor's only behind the copies on their way to it
                slot.buffer.record_stream(self._stream)
                # Its memory may have been another tensor's, which the current stream is not done with.
                slot.read, slot.arrived = torch.cuda.Event(), torch.cuda.Event()
                slot.read.record(torch.cuda.current_stream(self.device))
        buffer = slot.buffer
        return [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=True)
        ]

    @contextmanager
    def receiving(self, *sources: Tensor) -> Iterator[None]:
        """Copies to the host inside come after what computes these tensors, and before what is sent later."""
        self.received += sum(source.nbytes for source in sources)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
            self._written = torch.cuda.Event()
            self._written.record(self._stream)
        for source in sources:
            source.record_stream(self._stream)

    def settle(self) -> None:
        """Return when all that was copied to the host has arrived there."""
        if self._written is not None:
            self._written.synchronize()

    def follow(self) -> None:
        """Let what the current stream does next come after all that was copied to the host."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Keep host memory that a kernel on the current stream reads by itself until it has been read.

        torch knows of its own copies from and to pinned memory, and not of such kernels.
        """
        if self._stream is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._lent = [(read, lent) for read, lent in self._lent if not read.query()] + [(event, list(tensors))]

    def __del__(self) -> None:
        for read, _ in self._lent:
            read.synchronize()

    def clear(self) -> None:
        """Give the buffers back."""
        for read, _ in self._lent:
            read.synchronize()
        self._lent = []
        for slot in self.slots:
            slot.empty()
        self._newest, self._after, self._last = {}, {}, None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory on the device."""
        for slot in self.slots:
            if slot.buffer is not None:
                yield slot.buffer


class Rings:
    """The rings of one cache, one for each device that rows stream to. A copy of a cache has rings of its own."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Ring] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Rings:
        return Rings()

    def on(self, device: torch.device) -> Ring:
        """The ring of a device."""
        if device not in self._by_device:
            self._by_device[device] = Ring(device)
        return self._by_device[device]

    def clear(self) -> None:
        """Give all buffers back."""
        for ring in self._by_device.values():
            ring.clear()
        self._by_device = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    @property
    def link_nbytes(self) -> tuple[int, int]:
        """Bytes that went to devices through the buffers, and that came from them, so far."""
        rings = self._by_device.values()
        return sum(ring.sent for ring in rings), sum(ring.received for ring in rings)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that holds memory on a device."""
        for ring in self._by_device.values():
            yield from ring.tensors()
