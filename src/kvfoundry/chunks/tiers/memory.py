"""Entries in memory: of a device, or of the host, where a GPU can copy from it while it computes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch

from kvfoundry.chunks.packing import Entry, in_own_memory
from kvfoundry.chunks.tiers.base import Listing, Tier
from kvfoundry.layouts.base import owned


class MemoryTier(Tier):
    """Entries of this process; what others still hold of an evicted one lives on with them."""

    in_memory = True

    def __init__(self, name: str, capacity: int):
        super().__init__(name, capacity)
        self._entries: OrderedDict[str, tuple[Entry, int, float]] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    def _placed(self, entry: Entry) -> Entry:
        """The entry in the memory of this tier."""
        return in_own_memory(entry)

    def read(self, name: str) -> Entry | None:
        with self._lock:
            held = self._entries.pop(name, None)
            if held is None:
                return None
            self._entries[name] = (held[0], held[1], time.time())
            return held[0]

    def write(self, entry: Entry) -> bool:
        placed = self._placed(entry)
        size = placed.chunk.nbytes
        assert self.capacity is not None
        with self._lock:
            old = self._entries.get(entry.id)
            if size > self.capacity:
                return self.refuse(f"an entry of {size} bytes is larger than the tier {self.name}")
            room = self.capacity - self._used + (old[1] if old else 0)
            leaving = []
            for name, (_, bytes_there, _) in self._entries.items():
                if room >= size:
                    break
                if name != entry.id and not self.is_pinned(name):
                    leaving.append(name)
                    room += bytes_there
            if room < size:
                return self.refuse(f"no room in the tier {self.name}: too much of it is pinned")
            for name in leaving:
                self._forget(name)
            self.counters.evictions += len(leaving)
            self._forget(entry.id)
            self._entries[entry.id] = (placed, size, time.time())
            self._used += size
            self.counters.bytes_written += size
        return True

    def _forget(self, name: str) -> bool:
        held = self._entries.pop(name, None)
        if held is None:
            return False
        self._used -= held[1]
        return True

    def holds(self, name: str) -> bool:
        with self._lock:
            return name in self._entries

    def drop(self, name: str) -> bool:
        with self._lock:
            return self._forget(name)

    def listing(self) -> Iterator[Listing]:
        with self._lock:
            entries = list(self._entries.values())
        for entry, size, used in entries:
            parts = entry.identity
            yield Listing(entry.id, size, entry.tokens, parts["namespace"], parts["method"], used)

    @property
    def nbytes(self) -> int:
        return self._used


class HostTier(MemoryTier):
    """Host memory; pinned where there is a GPU, so that promotions run beside its work."""

    def __init__(self, capacity: int):
        super().__init__("host", capacity)
        self._pins = torch.cuda.is_available()

    def _placed(self, entry: Entry) -> Entry:
        return in_own_memory(entry, pinned=self._pins)


class DeviceTier(MemoryTier):
    """Memory of the device that reads the entries. device: where they are held."""

    def __init__(self, capacity: int, device: torch.device):
        super().__init__("device", capacity)
        self.device = device

    def _placed(self, entry: Entry) -> Entry:
        return replace(entry, chunk=entry.chunk.to(self.device).mapped(owned))
