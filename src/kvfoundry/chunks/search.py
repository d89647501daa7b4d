"""Where is it? Tiers are asked from the fastest to the slowest, and what is found is compared with what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvfoundry.chunks.backlog import Backlog
from kvfoundry.chunks.identity import ChunkKey
from kvfoundry.chunks.packing import Damaged, Entry, Unavailable
from kvfoundry.chunks.promotion import SingleFlight
from kvfoundry.chunks.tiers.base import Tier
from kvfoundry.chunks.tiers.memory import DeviceTier

T = TypeVar("T")

NOT_STORED = "not stored"
OTHER_TEXT = "another text has the same id"


@dataclass(frozen=True, eq=False)
class Hit:
    """An entry, the tier it came from, and the bytes of rows that were read for it."""

    entry: Entry
    tier: str
    nbytes: int = 0


def asked(tier: Tier, operation: Callable[[], T], otherwise: T) -> T:
    """What a tier says, or `otherwise` when it cannot be asked; the reason is noted with the tier."""
    try:
        return operation()
    except Unavailable as error:
        tier.counters.note(f"{tier.name}: unavailable, {error}")
        return otherwise


class Search:
    """Looks through tiers; requests for one entry at the same time share one read."""

    def __init__(self, tiers: Sequence[Tier], backlog: Backlog):
        self._tiers, self._backlog = tiers, backlog
        self._flight: SingleFlight[Hit | str] = SingleFlight()

    def in_memory(self, key: ChunkKey, *, counts: bool = True) -> Hit | None:
        """The entry in a memory tier, or on its way to slower ones. counts: the tiers count it as asked for."""
        for tier in self._tiers:
            if tier.in_memory:
                entry = tier.read(key.id)
                if entry is not None and key.matches(entry.identity, entry.chunk):
                    tier.counters.hits += counts
                    return Hit(entry, tier.name)
                tier.counters.misses += counts
        waiting = self._backlog.entry(key.id)
        if waiting is not None and key.matches(waiting.identity, waiting.chunk):
            return Hit(waiting, "backlog")
        return None

    def below(self, key: ChunkKey) -> Hit | str:
        """The entry in a slower tier, of which the faster ones then have a copy; or why there is none."""
        found, _ = self._flight.do(key.id, lambda: self._load(key))
        if isinstance(found, Hit) and not key.matches(found.entry.identity, found.entry.chunk):
            return OTHER_TEXT
        return found

    def _load(self, key: ChunkKey) -> Hit | str:
        reasons = []
        for place, tier in enumerate(self._tiers):
            if tier.in_memory:
                continue
            try:
                entry = tier.read(key.id)
            except Damaged as error:
                tier.counters.damaged += 1
                reasons.append(f"{tier.name}: damaged, {error}")
            except Unavailable as error:
                reasons.append(f"{tier.name}: unavailable, {error}")
            else:
                if entry is not None and key.matches(entry.identity, entry.chunk):
                    tier.counters.hits += 1
                    return Hit(self._copied_up(key, entry, self._tiers[:place]), tier.name, entry.chunk.nbytes)
                tier.counters.misses += 1
                if entry is not None:
                    reasons.append(OTHER_TEXT)
                continue
            tier.counters.note(reasons[-1])
        return reasons[0] if reasons else NOT_STORED

    def _copied_up(self, key: ChunkKey, entry: Entry, faster: Sequence[Tier]) -> Entry:
        """Write the entry to faster tiers; the entry as the host tier then holds it (pinned for a GPU), if it does."""
        for tier in reversed(faster):
            if isinstance(tier, DeviceTier) or not asked(tier, partial(tier.write, entry), False):
                continue
            held = tier.read(key.id) if tier.in_memory else None
            if held is not None and key.matches(held.identity, held.chunk):
                entry = held
        return entry
