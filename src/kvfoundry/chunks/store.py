"""The chunk store: tiers behind one another, fastest first, that share what they hold.

store = kvfoundry.ChunkStore("host:2GiB,disk:/var/cache/kv:20GiB")
identity = kvfoundry.Identity.of(model, tokenizer)
key = identity.key(token_ids)
chunk = store.get(key)                 # None when nobody has it: compute it, and store.put(key, chunk)
coming = store.promote(key)            # or fetched while something else is done: coming.result()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfoundry.chunks.backlog import Backlog
from kvfoundry.chunks.chunk import ChunkKV
from kvfoundry.chunks.config import StoreConfig, store_config
from kvfoundry.chunks.identity import ChunkKey
from kvfoundry.chunks.looking import everywhere, listings, pinned_bytes, problems_of, tier_stats
from kvfoundry.chunks.packing import Entry, in_own_memory
from kvfoundry.chunks.pins import Pins
from kvfoundry.chunks.promotion import Arrival, Mover, Promotion, SingleFlight
from kvfoundry.chunks.report import Report
from kvfoundry.chunks.search import Hit, Search, asked
from kvfoundry.chunks.tiers.base import Listing, Problem, Tier
from kvfoundry.chunks.tiers.memory import DeviceTier
from kvfoundry.chunks.tiers.opening import named_device, opened_tier


class ChunkStore:
    """Chunks by key, from any thread. What a tier cannot give is a miss with a reason, never an error.

    look: to list, check or empty what is there: nothing is made, and nothing evicted.
    source: the short form (see `kvfoundry.chunks.config`) or a `StoreConfig`; or the keywords of a StoreConfig.
    Raises StoreError for a store that cannot be opened as asked, MissingExtraError when a tier's package is missing.
    """

    def __init__(self, source: str | Path | StoreConfig | None = None, *, look: bool = False, **settings: Any):
        self.config = store_config(source, look=look, **settings)
        self.tiers: list[Tier] = []
        self._pins = Pins()
        try:
            for tier in self.config.tiers:
                self.tiers.append(opened_tier(tier, look=look))
        except Exception:
            for opened in self.tiers:
                opened.close()
            raise
        for opened in self.tiers:
            opened.is_pinned = self._pins.__contains__
        self.report = Report()
        self._device_tier = next((tier for tier in self.tiers if isinstance(tier, DeviceTier)), None)
        self._placing: SingleFlight[Arrival] = SingleFlight()
        self._mover = Mover()
        self._pool = ThreadPoolExecutor(self.config.workers, thread_name_prefix="kvfoundry-store")
        self._backlog = Backlog(self._pool)
        self._search = Search(self.tiers, self._backlog)

    # Getting.

    def get(
        self, key: ChunkKey, *, device: str | torch.device | None = None, report: Report | None = None
    ) -> ChunkKV | None:
        """The chunk of this key, from the fastest tier that has it; None when none has, and `report` says why.

        device: where its rows are wanted; by default the device of the device tier, or the host. Every faster tier
        takes a copy. A hit has the token ids and the whole identity of the key, whatever its id.
        """
        started = time.perf_counter()
        arrival, waited = self._obtain(key, self._target(device), self._reports(report))
        chunk = None if arrival is None else arrival.here()
        if waited:
            for each in self._reports(report):
                each.stalled(time.perf_counter() - started)
        return chunk

    def promote(
        self, key: ChunkKey, *, device: str | torch.device | None = None, report: Report | None = None
    ) -> Promotion:
        """Begin to bring a chunk up, and return at once; see `Promotion`. device: as in `get`.

        Nothing is read that lies in memory already, and requests for one chunk at the same time share one read.
        """
        target, reports = self._target(device), self._reports(report)
        hit = self._search.in_memory(key, counts=False)
        future: Future[Arrival | None] = Future()
        if hit is not None and target in (None, hit.entry.chunk.device):
            future.set_result(self._obtain(key, target, reports)[0])
        else:
            future = self._pool.submit(lambda: self._obtain(key, target, reports)[0])
        return Promotion(future, len(key.token_ids), reports)

    def fetch(
        self, key: ChunkKey, compute: Callable[[], ChunkKV], *, report: Report | None = None, **options: Any
    ) -> ChunkKV:
        """`get`, or else `compute` and `put`."""
        chunk = self.get(key, report=report, **options)
        if chunk is None:
            chunk = compute()
            self.put(key, chunk, report=report)
        return chunk

    def contains(self, key: ChunkKey) -> bool:
        """Whether some tier has an entry of this id: a look at names. What counts as loaded is what `get` returns."""
        held = self._backlog.entry(key.id) is not None
        return held or any(asked(tier, partial(tier.holds, key.id), False) for tier in self.tiers)

    def _target(self, device: str | torch.device | None) -> torch.device | None:
        if device is not None:
            return named_device(device)
        return None if self._device_tier is None else self._device_tier.device

    def _reports(self, report: Report | None) -> list[Report]:
        return [self.report] if report is None else [self.report, report]

    def _obtain(
        self, key: ChunkKey, target: torch.device | None, reports: Sequence[Report]
    ) -> tuple[Arrival | None, bool]:
        """The chunk where it is wanted, and whether anybody had to wait for more than memory."""
        hit = self._search.in_memory(key)
        if hit is not None:
            return self._arrived(key, hit, target, reports), False
        found = self._search.below(key)
        if isinstance(found, str):
            for report in reports:
                report.miss(found, len(key.token_ids))
            return None, True
        return self._arrived(key, found, target, reports), True

    def _arrived(self, key: ChunkKey, hit: Hit, target: torch.device | None, reports: Sequence[Report]) -> Arrival:
        """A found entry on the device, which the device tier then holds; those who want it there share one copy."""
        entry = hit.entry

        def place() -> Arrival:
            if target in (None, entry.chunk.device):
                arrival = Arrival(entry.chunk, 0, entry.ready)
            else:
                assert target is not None
                arrival = self._mover.moved(entry.chunk, target)
            tier = self._device_tier
            if tier is not None and tier.device == target and hit.tier != tier.name:
                tier.write(Entry(entry.id, entry.identity, arrival.chunk, arrival.ready))
            return arrival

        arrival, mine = self._placing.do((id(entry), target), place)
        for report in reports:
            report.hit(hit.tier, len(key.token_ids), hit.nbytes)
            if mine:
                report.placed(arrival.nbytes_moved)
        return arrival

    # Putting.

    def put(self, key: ChunkKey, chunk: ChunkKV, *, report: Report | None = None) -> list[str]:
        """Hold a chunk; the names of the tiers that have it when this returns (write="back": the memory tiers).

        Rows on a GPU are copied to the host here, in order with what computes them. Raises DataError when the chunk is
        not what the key names.
        """
        key.check(chunk)
        entry, there = Entry(key.id, dict(key.identity.parts), chunk), []
        slower: list[Tier] = []
        for tier in self.tiers:
            if isinstance(tier, DeviceTier):
                if chunk.devices == {tier.device} and tier.write(_marked(entry)):
                    there.append(tier.name)
                continue
            if any(device.type != "cpu" for device in chunk.devices):
                entry = in_own_memory(entry, pinned=torch.cuda.is_available())
                chunk = entry.chunk
            if tier.in_memory or self.config.write == "through":
                there += self._written(tier, entry, report)
            else:
                slower.append(tier)
        if slower:
            later = in_own_memory(entry)
            self._backlog.add(later, lambda: self._write_all(later, slower, report))
        return there

    def _write_all(self, entry: Entry, tiers: Sequence[Tier], report: Report | None) -> None:
        for tier in tiers:
            self._written(tier, entry, report)

    def _written(self, tier: Tier, entry: Entry, report: Report | None) -> list[str]:
        if not asked(tier, lambda: tier.write(entry), False):
            return []
        for each in self._reports(report):
            each.wrote(tier.name, entry.chunk.nbytes)
        return [tier.name]

    def flush(self) -> None:
        """Return when everything that was put is in all its tiers."""
        self._backlog.finish()

    # Keeping and forgetting.

    @contextmanager
    def pin(self, *keys: ChunkKey) -> Iterator[None]:
        """Inside the block no tier of this store evicts these chunks; any number of blocks may hold one."""
        names = [key.id for key in keys]
        self._pins.add(names)
        try:
            yield
        finally:
            self._pins.remove(names)

    def evict(self, key: ChunkKey) -> bool:
        """Out of memory; slower tiers keep it. False when it is pinned, or was not there."""
        if key.id in self._pins:
            return False
        self._backlog.finish(key.id)
        dropped = [tier.drop(key.id) for tier in self.tiers if tier.in_memory]
        return any(dropped)

    def invalidate(self, key: ChunkKey) -> bool:
        """Forget a chunk everywhere; whether it was anywhere. StoreError when a tier cannot be reached."""
        self.flush()
        return everywhere(self.tiers, lambda tier: tier.drop(key.id)) > 0

    def clear(self, namespace: str | None = None) -> int:
        """Forget everything, or one namespace; entries removed, counted per tier. StoreError as in `invalidate`."""
        self.flush()
        return everywhere(self.tiers, lambda tier: tier.clear(namespace))

    # Looking.

    def listing(self) -> dict[str, list[Listing]]:
        """All entries by tier. StoreError when a tier cannot be reached."""
        return listings(self.tiers)

    def verify(self) -> list[Problem]:
        """Read everything; what is damaged or left over is removed and named."""
        self.flush()
        return problems_of(self.tiers)

    def stats(self) -> dict[str, Any]:
        """What the tiers hold and have done, and the sum of all requests; ready for JSON."""
        pinned = pinned_bytes(self.tiers, self._pins)
        return {"tiers": tier_stats(self.tiers), "pinned_bytes": pinned, "requests": self.report.as_dict()}

    def close(self) -> None:
        """Write what waits, end the threads, close the tiers. The store cannot be used afterwards."""
        self.flush()
        self._pool.shutdown(wait=True)
        for tier in self.tiers:
            asked(tier, tier.close, None)

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _marked(entry: Entry) -> Entry:
    """The entry with the moment, on the present stream, from which its rows on a GPU are complete."""
    if entry.chunk.device.type != "cuda":
        return entry
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(entry.chunk.device))
    return Entry(entry.id, entry.identity, entry.chunk, ready)
