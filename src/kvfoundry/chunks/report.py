"""What one request, or all of them, found where: hits by tier, why chunks were missed, bytes moved, time waited."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Hand it to the calls of one request; it adds up, from any thread.

    hits, hit_tokens, bytes_read: by the tier that the chunk came from; a token counts when its rows were really loaded.
    misses: by reason. bytes_placed: copied to the device. bytes_written: by tier. stall_seconds: that the caller waited
    for tiers other than memory, or for a promotion that was not ready.
    """

    hits: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    bytes_read: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    missed_tokens: int = 0
    bytes_placed: int = 0
    bytes_written: Counter[str] = field(default_factory=Counter)
    stall_seconds: float = 0.0
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens whose rows were loaded, from any tier."""
        return self.hit_tokens.total()

    def hit(self, tier: str, tokens: int, nbytes: int) -> None:
        """A chunk came from a tier."""
        with self._lock:
            self.hits[tier] += 1
            self.hit_tokens[tier] += tokens
            self.bytes_read[tier] += nbytes

    def miss(self, reason: str, tokens: int) -> None:
        """A chunk came from none."""
        with self._lock:
            self.misses[reason] += 1
            self.missed_tokens += tokens

    def placed(self, nbytes: int) -> None:
        """Bytes were copied to the device."""
        with self._lock:
            self.bytes_placed += nbytes

    def wrote(self, tier: str, nbytes: int) -> None:
        """Bytes were written to a tier."""
        with self._lock:
            self.bytes_written[tier] += nbytes

    def stalled(self, seconds: float) -> None:
        """Somebody waited."""
        with self._lock:
            self.stall_seconds += seconds

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        with self._lock:
            return {
                "hits": dict(self.hits),
                "hit_tokens": dict(self.hit_tokens),
                "bytes_read": dict(self.bytes_read),
                "misses": dict(self.misses),
                "missed_tokens": self.missed_tokens,
                "bytes_placed": self.bytes_placed,
                "bytes_written": dict(self.bytes_written),
                "stall_seconds": self.stall_seconds,
            }
