"""Chunks on their way up: loads that are shared by all who want the same one, and copies to a GPU beside its work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from kvfoundry.chunks.chunk import ChunkKV
from kvfoundry.chunks.report import Report
from kvfoundry.errors import StoreError

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Whoever asks for what somebody is fetching already waits for that, and gets the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[Hashable, Future[T]] = {}

    def do(self, what: Hashable, fetch: Callable[[], T]) -> tuple[T, bool]:
        """The result of `fetch`, and whether this call ran it."""
        with self._lock:
            flying = self._flying.get(what)
            if flying is None:
                mine = self._flying[what] = Future()
        if flying is not None:
            return flying.result(), False
        try:
            result = fetch()
            mine.set_result(result)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._flying[what]
        return result, True


@dataclass(frozen=True, eq=False)
class Arrival:
    """A chunk on a device. nbytes_moved: copied to get there.

    ready: when a copy that may still be under way is complete; None on the CPU.
    """

    chunk: ChunkKV
    nbytes_moved: int = 0
    ready: Any = None

    def here(self) -> ChunkKV:
        """The chunk, in order with what the present stream does next; the host does not wait."""
        device = self.chunk.device
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if self.ready is not None:
                stream.wait_event(self.ready)
            # The memory belongs to the copying stream: its next owner has to wait for this reader.
            for tensor in self.chunk.tensors().values():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.chunk


class Mover:
    """Copies to devices, each on a stream of its own so that what computes there goes on meanwhile."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def moved(self, chunk: ChunkKV, device: torch.device) -> Arrival:
        """The chunk on a device, the copy at least begun. From pinned memory the host does not wait for it.

        The source may be forgotten at once: pinned memory is not given to others before the copy has read it, and the
        target is new memory, so nobody else's rows are written over, whatever becomes of this arrival.
        """
        if chunk.devices == {device}:
            return Arrival(chunk)
        if device.type != "cuda":
            return Arrival(chunk.to(device), chunk.nbytes)
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            if chunk.device.type == "cuda":  # rows that another stream of this process has just computed
                stream.wait_stream(torch.cuda.default_stream(chunk.device))
            copy = chunk.to(device, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(stream)
        return Arrival(copy, chunk.nbytes, ready)


class Promotion:
    """A request for a chunk that runs while the caller does something else. `result` gives the chunk, or None.

    It can be dropped or cancelled at any time: what has been loaded by then lies in the tiers, and nothing stays
    pinned.
    """

    def __init__(self, future: Future[Arrival | None], tokens: int, reports: Sequence[Report]):
        self._future, self._tokens, self._reports = future, tokens, reports
        self._cancelled = False

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._cancelled or self._future.done()

    def cancel(self) -> None:
        """Stop wanting it. A load that has not begun does not begin."""
        self._cancelled = True
        self._future.cancel()

    def result(self, timeout: float | None = None) -> ChunkKV | None:
        """The chunk, None when no tier has it or it was cancelled; StoreError when it is not there in `timeout` s."""
        if self._cancelled:
            return None
        started, waits = time.perf_counter(), not self._future.done()
        try:
            arrival = self._future.result(timeout)
        except CancelledError:
            return None
        except TimeoutError as error:
            raise StoreError(f"the chunk of {self._tokens} tokens did not arrive within {timeout:g} s.") from error
        finally:
            if waits:
                for report in self._reports:
                    report.stalled(time.perf_counter() - started)
        return None if arrival is None else arrival.here()
