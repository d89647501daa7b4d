"""The contract of a policy, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

# Weight of the newest step in running means.
NEWEST = 0.5


@dataclass
class Seen:
    """What is known of the candidates of one answer up to now. ranks: of each in retrieval, 0 for the best.

    resident: numbers of those that are here. estimated: running mean of the attention that each would get, by its
    summary; spent: running mean of the attention that it got while it was here, None where it never was.
    steps: how many steps it has been read. future: attention that each gets in the coming steps when all are here;
    None where nobody knows. step: calls so far.
    """

    ranks: Sequence[int]
    resident: frozenset[int] = frozenset()
    step: int = 0
    estimated: list[float] = field(default_factory=list)
    spent: list[float | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    future: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self.estimated = self.estimated or [0.0] * len(self.ranks)
        self.spent = self.spent or [None] * len(self.ranks)
        self.steps = self.steps or [0] * len(self.ranks)

    def note(self, mass: Sequence[float], estimated: Sequence[float] | None) -> None:
        """A call has been made with `resident` here. mass, estimated: of every candidate, as `Look` has them."""
        for each in self.resident:
            before = self.spent[each]
            self.spent[each] = mass[each] if before is None else _mixed(before, mass[each])
            self.steps[each] += 1
        if estimated is not None:
            before_any = self.step > 0
            self.estimated = [
                _mixed(old, new) if before_any else new for old, new in zip(self.estimated, estimated, strict=True)
            ]
        self.step += 1


def _mixed(old: float, new: float) -> float:
    return (1 - NEWEST) * old + NEWEST * new


class Policy(ABC):
    """A rule for the worth of candidates; its fields are its parameters. Frozen: what it needs to know is in `Seen`.

    name: in specs; summary: one line for listings. estimates: it reads `Seen.estimated`; foresees: `Seen.future`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    estimates: ClassVar[bool] = False
    foresees: ClassVar[bool] = False

    @abstractmethod
    def values(self, seen: Seen) -> list[float]:
        """Worth of every candidate, in shares of attention or anything else that compares; 0 is never brought."""
