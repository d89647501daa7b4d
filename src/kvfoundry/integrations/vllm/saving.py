"""Saves of a worker: rows are copied out of vLLM's blocks within the step, and written to the store by a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfoundry.chunks import ChunkStore, Identity
from kvfoundry.errors import KVFoundryError
from kvfoundry.integrations.vllm.blocks import LayerBlocks
from kvfoundry.integrations.vllm.loading import slot_numbers
from kvfoundry.integrations.vllm.messages import Job, Span, span_key
from kvfoundry.integrations.vllm.packing import Packing, Rows
from kvfoundry.integrations.vllm.stats import Counts


@dataclass(frozen=True, eq=False)
class Taken:
    """Rows of one span on the host. ready: the CUDA event after which they are complete."""

    job: Job
    span: Span
    rows: list[Rows]
    nbytes: int
    ready: Any


class Saver:
    """limit: bytes that may wait to be written; what comes on top is not stored, and counted."""

    def __init__(
        self,
        store: ChunkStore,
        identity: Identity,
        packing: Packing,
        layers: Mapping[str, LayerBlocks],
        block_size: int,
        counts: Counts,
        say: Callable[[str], None],
        limit: int = 1 << 30,
    ):
        self.store, self.identity, self.packing, self.layers = store, identity, packing, layers
        self.block_size, self.counts, self._say, self.limit = block_size, counts, say, limit
        self.device = next(iter(layers.values())).cache.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._waiting: deque[Taken] = deque()
        self._bytes, self._closed = 0, False
        self._new: set[str] = set()
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="kvfoundry-save")
        self._thread.start()

    def take(self, job: Job) -> None:
        """Copy the rows of a job's spans. Its blocks may be given to others when this returns."""
        for span in job.spans:
            slots = slot_numbers(job.blocks, self.block_size, span.start, span.stop).to(self.device)
            size = sum(
                (each.shape.key_dim + each.shape.value_dim) * each.shape.heads * len(slots) * each.cache.dtype.itemsize
                for each in self.layers.values()
            )
            with self._turn:
                if self._bytes + size > self.limit or self._closed:
                    self.counts.dropped(len(slots), "too many rows wait to be written")
                    continue
                self._bytes += size
            rows = [self._on_host(*layer.read(slots)) for layer in self.layers.values()]
            ready = None
            if self._stream is not None:
                ready = torch.cuda.Event()
                ready.record(self._stream)
            with self._turn:
                self._waiting.append(Taken(job, span, rows, size, ready))
                self._turn.notify()

    def _on_host(self, *rows: Tensor) -> Rows:
        if self._stream is None:
            keys, values = (each.contiguous() for each in rows)
            return keys, values
        # read on the computing stream, in order with what writes the blocks next; copied on a stream of its own
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        copies = []
        with torch.cuda.stream(self._stream):
            for each in rows:
                host = torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
                host.copy_(each, non_blocking=True)
                each.record_stream(self._stream)
                copies.append(host)
        return copies[0], copies[1]

    def new(self) -> set[str]:
        """Names of entries that came into host memory since the last call."""
        with self._turn:
            new, self._new = self._new, set()
        return new

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything taken is written; whether it is."""
        with self._turn:
            return self._turn.wait_for(lambda: self._bytes == 0, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits, within `timeout` seconds, and end the thread."""
        if not self.flush(timeout):
            self._say(f"rows were still waiting to be written after {timeout:g} s; they are not stored")
        with self._turn:
            self._closed = True
            self._turn.notify()
        self._thread.join(1.0)

    # In the thread.

    def _write_all(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                taken = self._waiting.popleft()
            tokens = taken.span.stop - taken.span.start
            try:
                self._write(taken)
            except KVFoundryError as error:
                self.counts.dropped(tokens, str(error))
                self._say(f"{tokens} tokens were not stored: {error}")
            except Exception as error:  # the thread must live on
                self.counts.dropped(tokens, type(error).__name__)
                self._say(f"{tokens} tokens were not stored: {type(error).__name__}: {error}")
            finally:
                with self._turn:
                    self._bytes -= taken.nbytes
                    self._turn.notify_all()

    @torch.inference_mode()
    def _write(self, taken: Taken) -> None:
        if taken.ready is not None:
            taken.ready.synchronize()
        key = span_key(taken.job.tenant.identity(self.identity), taken.job.token_ids, taken.span)
        chunk = self.packing.chunk(key.token_ids, key.context_ids, taken.rows)
        there = self.store.put(key, chunk, report=self.counts.report)
        if not there:
            self.counts.dropped(len(key.token_ids), "no tier took it")
            return
        self.counts.saved(len(key.token_ids))
        if "host" in there:
            with self._turn:
                self._new.add(key.id)
