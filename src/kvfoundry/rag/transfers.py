"""Passages on their way to the device, while tokens are computed: one thread, one after the other, as over one link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A transfer that was under way when all were called off."""


@dataclass(frozen=True)
class Arrived(Generic[T]):
    """A transfer that has ended. content: None where it failed, and `failure` says how; seconds: from its start."""

    number: int
    content: T | None
    failure: str
    seconds: float


class Transfers(Generic[T]):
    """Brings things by number. fetch: gets one, in the thread; delay: seconds that each takes at least, for measuring.

    Use as a context manager: leaving it calls everything off, and the thread has ended when it returns.
    """

    def __init__(self, fetch: Callable[[int], T], delay: float = 0.0):
        self._fetch, self._delay = fetch, delay
        self._stop = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvfoundry-promote")
        self._coming: dict[int, tuple[Future[T], float]] = {}

    def start(self, number: int) -> None:
        """Begin to bring one; nothing happens where it is coming already."""
        if number not in self._coming:
            self._coming[number] = self._worker.submit(self._bring, number), time.perf_counter()

    def _bring(self, number: int) -> T:
        if self._stop.wait(self._delay):
            raise Stopped
        content = self._fetch(number)
        if self._stop.is_set():
            raise Stopped
        return content

    @property
    def coming(self) -> frozenset[int]:
        """What has been started and not been taken yet."""
        return frozenset(self._coming)

    def landed(self) -> list[Arrived[T]]:
        """What has come since the last time, in the order of its start."""
        return [self._taken(number) for number, (future, _) in list(self._coming.items()) if future.done()]

    def wait(self, numbers: Collection[int]) -> float:
        """Return when these have come (or failed); seconds waited."""
        futures = [self._coming[number][0] for number in numbers if number in self._coming]
        began = time.perf_counter()
        if all(future.done() for future in futures):
            return 0.0
        wait(futures)
        return time.perf_counter() - began

    def _taken(self, number: int) -> Arrived[T]:
        future, began = self._coming.pop(number)
        seconds = time.perf_counter() - began
        error = future.exception()
        if error is not None:
            return Arrived(number, None, f"{type(error).__name__}: {error}", seconds)
        return Arrived(number, future.result(), "", seconds)

    def close(self) -> None:
        """Call everything off and end the thread."""
        self._stop.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()

    def __enter__(self) -> Transfers[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
