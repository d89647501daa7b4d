"""Loads of a worker: entries out of the store, decoded, into vLLM's blocks, in threads beside the model's work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfoundry.chunks import ChunkKV, ChunkStore, Identity
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import LayerBlocks
from kvfoundry.integrations.vllm.messages import Job, Span, span_key
from kvfoundry.integrations.vllm.moving import Mover
from kvfoundry.integrations.vllm.packing import Packing
from kvfoundry.integrations.vllm.repair import Repairer
from kvfoundry.integrations.vllm.stats import Counts

# Entries of one request that are fetched while the one before them is put in its place.
_AHEAD = 3


@dataclass(eq=False)
class Load:
    """One job under way. waits: per layer, set when its rows are in place; empty for a load between steps."""

    job: Job
    waits: dict[str, threading.Event] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    events: dict[str, Any] = field(default_factory=dict)  # CUDA events of layers, for the stream that reads them
    failed_from: int | None = None  # first token that could not be loaded


class Loader:
    """layers: by name, in order. block_size: tokens of one of vLLM's blocks. say: takes a line for the log."""

    def __init__(
        self,
        store: ChunkStore,
        identity: Identity,
        packing: Packing,
        layers: Mapping[str, LayerBlocks],
        block_size: int,
        counts: Counts,
        say: Callable[[str], None],
        workers: int = 2,
        mover: Mover | None = None,
        repairer: Repairer | None = None,
    ):
        self.store, self.identity, self.packing, self.layers = store, identity, packing, layers
        self.block_size, self.counts, self._say = block_size, counts, say
        self._mover, self._repairer = mover, repairer
        self.device = next(iter(layers.values())).cache.device
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvfoundry-load")
        self._running: dict[str, Load] = {}
        self._bad: set[int] = set()
        self._gone: set[str] = set()
        self._new: set[str] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()

    # Called by the worker's own thread.

    def begin(self, job: Job, *, by_layer: bool) -> Load:
        """Start a load. by_layer: somebody will wait for its layers one by one in this very step."""
        load = Load(job, {name: threading.Event() for name in self.layers} if by_layer else {})
        if not by_layer:
            self._running[job.request] = load
        ready = self._event()  # blocks may still be read by work that was given to the device before
        self._pool.submit(self._run, load, ready)
        return load

    def cancel(self, request: str) -> None:
        """The request is over: what is not read yet is not read."""
        if request in self._running:
            self._running[request].cancelled = True

    def finished(self) -> set[str]:
        """Requests whose loads between steps have ended since the last call, well or not."""
        over = {name for name, load in self._running.items() if load.done.is_set()}
        for name in over:
            del self._running[name]
        return over

    def wait(self, seconds: float) -> None:
        """Give the threads the processor until a load ends: a step without work would only take it from them."""
        if self._running and not any(load.done.is_set() for load in self._running.values()):
            self._ended.clear()
            if not any(load.done.is_set() for load in self._running.values()):
                self._ended.wait(seconds)

    def bad_blocks(self) -> set[int]:
        """Blocks that could not be filled, since the last call."""
        with self._lock:
            bad, self._bad = self._bad, set()
        return bad

    def gone(self) -> set[str]:
        """Names of entries that were not there, or not sound, since the last call."""
        with self._lock:
            gone, self._gone = self._gone, set()
        return gone

    def new(self) -> set[str]:
        """Names of entries of which host memory got a copy since the last call."""
        with self._lock:
            new, self._new = self._new, set()
        return new

    def close(self) -> None:
        """End the threads; a load that runs is ended at the next entry."""
        for load in self._running.values():
            load.cancelled = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    # In a thread.

    def _run(self, load: Load, ready: Any) -> None:
        began = time.perf_counter()
        try:
            with torch.inference_mode(), self._stream(ready):
                if self._repairer is not None and load.job.moves:
                    self._repaired(load, self._repairer)
                elif load.waits:
                    self._by_layer(load)
                else:
                    self._by_span(load)
        except KVFoundryError as error:
            self._fail(load, load.failed_from, str(error))
        except Exception as error:  # a thread that dies would leave its request waiting for ever
            self._fail(load, load.failed_from, f"{type(error).__name__}: {error}")
        finally:
            for event in load.waits.values():
                event.set()
            load.done.set()
            self._ended.set()
            self.counts.loaded_in(time.perf_counter() - began)

    def _by_span(self, load: Load) -> None:
        load.failed_from = load.job.first
        for span, chunk in self._chunks(load):
            load.failed_from = max(span.start, load.job.first)
            for number, name in enumerate(self.layers):
                self._place(load.job, number, name, span, chunk)
            self._complete()
            load.failed_from = span.stop
            self._count(load.job, span)

    def _by_layer(self, load: Load) -> None:
        load.failed_from = load.job.first
        chunks = list(self._chunks(load))
        for number, name in enumerate(self.layers):
            for span, chunk in chunks:
                self._place(load.job, number, name, span, chunk)
            load.events[name] = self._event()
            load.waits[name].set()
        self._complete()
        for span, _ in chunks:
            self._count(load.job, span)

    def _repaired(self, load: Load, repairer: Repairer) -> None:
        """Documents at other places, blended; rows of all of them come at once."""
        job = load.job
        load.failed_from = job.first
        found = list(self._chunks(load))
        if not found or load.cancelled or found[-1][0].stop <= job.first:
            return
        behind = job.token_ids[found[-1][0].stop :].tolist()
        repaired = repairer.repaired([chunk for _, chunk in found], [*behind, *job.following])
        stop = min(found[-1][0].stop, len(job.blocks) * self.block_size)
        slots = slot_numbers(job.blocks, self.block_size, job.first, stop).to(self.device)
        for name, (keys, values) in zip(self.layers, repaired.rows, strict=True):
            self.layers[name].write(slots, keys[:, job.first : stop], values[:, job.first : stop])
            if load.waits:
                load.events[name] = self._event()
                load.waits[name].set()
        self._complete()
        self.counts.recomputed(repaired.recomputed)
        for span, _ in found:
            self._count(job, span)

    def _count(self, job: Job, span: Span) -> None:
        stop = min(span.stop, len(job.blocks) * self.block_size)
        tokens = stop - max(span.start, job.first)
        if tokens > 0:  # a repair reads documents that vLLM has itself, and puts them nowhere
            self.counts.loaded(tokens, moved=span.moves)

    def _chunks(self, load: Load) -> Iterator[tuple[Span, ChunkKV]]:
        """The entries in order, some fetched ahead; ends at the first that is not there, which is noted."""
        job = load.job
        identity = job.tenant.identity(self.identity)
        keys = [span_key(identity, job.token_ids, span) for span in job.spans]
        coming = deque(self.store.promote(key, report=self.counts.report) for key in keys[:_AHEAD])
        for place, span in enumerate(job.spans):
            chunk = coming.popleft().result() if not load.cancelled else None
            if place + _AHEAD < len(keys) and chunk is not None:
                coming.append(self.store.promote(keys[place + _AHEAD], report=self.counts.report))
            if chunk is None:
                if not load.cancelled:
                    with self._lock:
                        self._gone.update(key.id for key in keys[place:])
                self._fail(load, max(span.start, job.first), self._why_gone())
                return
            name = keys[place].id
            if any(tier.in_memory and tier.holds(name) for tier in self.store.tiers):
                with self._lock:
                    self._new.add(name)
            chunk = chunk if self.device.type == "cpu" else chunk.to(self.device, non_blocking=True)
            if span.moves and self._repairer is None:
                if self._mover is None:
                    raise UnsupportedModelError("documents are not served at other places here.")
                self._mover.check(chunk, self.packing.rows(chunk, 0)[0])
            yield span, chunk

    def _why_gone(self) -> str:
        """What tiers have noted last, where they have noted anything."""
        noted = [tier.counters.problems[-1] for tier in self.store.tiers if tier.counters.problems]
        return f"an entry is gone ({'; '.join(noted)})" if noted else "an entry is gone"

    def _place(self, job: Job, number: int, name: str, span: Span, chunk: ChunkKV) -> None:
        keys, values = self.packing.rows(chunk, number)
        if span.moves and self._mover is not None:
            keys = self._mover.moved(keys, span.behind, span.start)
        skip, stop = max(0, job.first - span.start), min(span.stop, len(job.blocks) * self.block_size)
        slots = slot_numbers(job.blocks, self.block_size, span.start + skip, stop).to(self.device)
        self.layers[name].write(slots, keys[:, skip : stop - span.start], values[:, skip : stop - span.start])

    def _fail(self, load: Load, token: int | None, reason: str) -> None:
        token = load.job.first if token is None else token
        lost = load.job.blocks[token // self.block_size :]
        if not lost or load.cancelled:
            return
        with self._lock:
            self._bad.update(lost)
        tokens = len(load.job.blocks) * self.block_size - token
        self._say(f"{tokens} tokens of request {load.job.request} were not loaded and are computed: {reason}")

    # Streams, where there are any.

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _stream(self, ready: Any) -> Any:
        if self.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(ready)
        return torch.cuda.stream(stream)

    def _complete(self) -> None:
        """Wait until what this thread gave to the device is done: only then vLLM may hear of it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def slot_numbers(blocks: tuple[int, ...], block_size: int, start: int, stop: int) -> torch.Tensor:
    """Where tokens start to stop of a request lie, counted through all blocks: [tokens]."""
    tokens = torch.arange(start, stop)
    return torch.tensor(blocks)[tokens // block_size] * block_size + tokens % block_size
