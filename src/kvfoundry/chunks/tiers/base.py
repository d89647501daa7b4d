"""The contract of a tier: a place that holds entries up to a size, forgets the least recently used, and counts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfoundry.chunks.packing import Entry
from kvfoundry.errors import StoreError

_ID = re.compile(r"[0-9a-f]{64}")


def is_id(name: str) -> bool:
    """Whether a name can be an entry's: 64 hex characters. Nothing else ever becomes part of a path or a key."""
    return _ID.fullmatch(name) is not None


def checked_id(name: str) -> str:
    """The name, or StoreError when it is none."""
    if not is_id(name):
        raise StoreError(f"an entry's id is 64 hex characters, got {name!r:.80}.")
    return name


@dataclass(frozen=True)
class Listing:
    """One entry as a tier lists it. size: bytes that it takes there; used: when last read or written, since 1970."""

    id: str
    size: int
    tokens: int
    namespace: str
    method: str
    used: float


@dataclass(frozen=True)
class Problem:
    """Something that a check found and removed."""

    tier: str
    id: str
    reason: str


@dataclass
class Counters:
    """What a tier has done since it was opened."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    evictions: int = 0
    refused: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    problems: list[str] = field(default_factory=list)
    """The newest reasons of damage, refusals and errors, at most 20."""

    def note(self, reason: str) -> None:
        """Remember a reason."""
        self.problems = [*self.problems[-19:], reason]


class Tier(ABC):
    """One place. Every method may be called from any thread.

    name: unique within a store. capacity: bytes at most, None for no bound. in_memory: whether reading costs nothing
    worth planning for. is_pinned: told by the store; a pinned entry is never evicted.
    """

    in_memory = False

    def __init__(self, name: str, capacity: int | None):
        self.name, self.capacity = name, capacity
        self.counters = Counters()
        self.is_pinned: Callable[[str], bool] = lambda _: False

    @abstractmethod
    def read(self, name: str) -> Entry | None:
        """The entry of this id, None when there is none.

        Raises Damaged for what was not written so (it is gone afterwards), Unavailable when the place does not answer
        within its time.
        """

    @abstractmethod
    def write(self, entry: Entry) -> bool:
        """Hold an entry, in place of one with the same id; others leave to make room, the least recently used first.

        False when there can be no room: it is larger than the tier, or too much is pinned. Raises Unavailable.
        """

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether there is an entry of this id, without reading it. Raises Unavailable."""

    @abstractmethod
    def drop(self, name: str) -> bool:
        """Forget an entry; whether it was there. Raises Unavailable."""

    @abstractmethod
    def listing(self) -> Iterator[Listing]:
        """All entries. Raises Unavailable."""

    def verify(self) -> list[Problem]:
        """Read every entry and remove what is damaged or left over. Raises Unavailable."""
        return []

    def clear(self, namespace: str | None = None) -> int:
        """Forget all entries, or those of one namespace; how many. Raises Unavailable."""
        names = [each.id for each in self.listing() if namespace in (None, each.namespace)]
        return sum(self.drop(name) for name in names)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries. Raises Unavailable."""
        return sum(each.size for each in self.listing())

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing open
        """Give back what is held open; entries stay where they stay."""

    def refuse(self, reason: str) -> bool:
        """Count an entry that finds no room; False, as `write` returns it."""
        self.counters.refused += 1
        self.counters.note(reason)
        return False
