"""What has been put and is not in its slower tiers yet: it can be found meanwhile, and nothing of it gets lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future

from kvfoundry.chunks.packing import Entry

# A writer that is so many entries ahead waits for the oldest.
_LIMIT = 64


class Backlog:
    """Entries with work that is still to be done for them, in an executor."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._waiting: dict[str, tuple[Entry, Future[None]]] = {}
        self._lock = threading.Lock()

    def add(self, entry: Entry, work: Callable[[], None]) -> None:
        """Do `work` soon; until then the entry is found here. A newer entry of the same id takes its place."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    if self._waiting.get(entry.id, (None,))[0] is entry:
                        del self._waiting[entry.id]

        with self._lock:
            oldest = next(iter(self._waiting.values()))[1] if len(self._waiting) >= _LIMIT else None
        if oldest is not None:
            oldest.result()
        with self._lock:
            self._waiting[entry.id] = (entry, self._executor.submit(run))

    def entry(self, name: str) -> Entry | None:
        """The entry of this id that waits, None when none does."""
        with self._lock:
            held = self._waiting.get(name)
        return None if held is None else held[0]

    def finish(self, name: str | None = None) -> None:
        """Return when nothing waits any more, or nothing of this id."""
        while True:
            with self._lock:
                futures = [future for each, (_, future) in self._waiting.items() if name in (None, each)]
            if not futures:
                return
            for future in futures:
                future.result()
