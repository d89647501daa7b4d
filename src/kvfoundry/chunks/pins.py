"""Which entries may not be evicted now, and how often each was asked to stay."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Pins:
    """Counts per id; any number of readers may hold one entry."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, names: Iterable[str]) -> None:
        """One more for each."""
        with self._lock:
            self._counts.update(names)

    def remove(self, names: Iterable[str]) -> None:
        """One less for each; none where there is none."""
        with self._lock:
            for name in names:
                if self._counts[name] <= 1:
                    del self._counts[name]
                else:
                    self._counts[name] -= 1

    def __contains__(self, name: object) -> bool:
        return name in self._counts
