"""Bounded waits for a place across a network: after a failure it is left alone for a while, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvfoundry.chunks.packing import Unavailable

T = TypeVar("T")


class Guard:
    """timeout: seconds that one operation may take; retry: seconds without a further try after one that failed."""

    def __init__(self, what: str, timeout: float, retry: float):
        self.what, self.timeout, self.retry = what, timeout, retry
        self._down_until = 0.0
        self._reason = ""

    def check(self) -> None:
        """Unavailable while the place is left alone."""
        if time.monotonic() < self._down_until:
            raise Unavailable(f"{self.what} is left alone after a failure: {self._reason}")

    def failed(self, reason: str) -> Unavailable:
        """Note a failure; the error to raise."""
        self._reason, self._down_until = reason, time.monotonic() + self.retry
        return Unavailable(f"{self.what} does not answer: {reason}")

    def bounded(self, operation: Callable[[], T]) -> T:
        """Run something that knows no time limit in a thread of its own, and stop waiting for it after the timeout.

        The thread is a daemon and no other is started while the place is left alone, so at most one hangs.
        """
        self.check()
        result: list[T] = []
        error: list[BaseException] = []

        def run() -> None:
            try:
                result.append(operation())
            except BaseException as caught:  # handed to the caller below
                error.append(caught)

        thread = threading.Thread(target=run, daemon=True, name="kvfoundry-remote")
        thread.start()
        thread.join(self.timeout)
        if error:
            raise error[0]
        if not result:
            raise self.failed(f"no answer within {self.timeout:g} s")
        return result[0]


class Deadline:
    """What is left of the time of one operation."""

    def __init__(self, guard: Guard):
        self._guard, self._end = guard, time.monotonic() + guard.timeout

    def check(self) -> None:
        """Unavailable once the time is over."""
        if time.monotonic() > self._end:
            raise self._guard.failed(f"no complete answer within {self._guard.timeout:g} s")


def first_line(error: Any) -> str:
    """The first line of a library's message; never an address with a password in it."""
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
