"""The contract of a policy, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvfoundry.checks import choice

MEASURES = ("focus", "mass")

# Weight of the newest call in running means.
NEWEST = 0.25

By = Literal["focus", "mass"]
Measures = Mapping[str, Sequence[float]]


@dataclass
class Seen:
    """What is known of the candidates of one answer up to now. ranks: of each in retrieval, 0 for the best.

    resident: numbers of those that are here. estimated: running mean of what each would get, by its summary; spent:
    running mean of what it got while it was here, None where it never was; both by measure ("focus", "mass", see
    `kvfoundry.rag.observing.Read`). steps: how many calls have read it. future: attention that each gets in the coming
    calls when all are here; None where nobody knows. step: calls so far.
    """

    ranks: Sequence[int]
    resident: frozenset[int] = frozenset()
    step: int = 0
    estimated: dict[str, list[float]] = field(default_factory=dict)
    spent: dict[str, list[float | None]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    future: Sequence[float] | None = None

    def __post_init__(self) -> None:
        nothing = len(self.ranks)
        self.estimated = self.estimated or {by: [0.0] * nothing for by in MEASURES}
        self.spent = self.spent or {by: [None] * nothing for by in MEASURES}
        self.steps = self.steps or [0] * nothing

    def note(self, spent: Measures, estimated: Measures | None) -> None:
        """A call has been made with `resident` here. spent, estimated: of every candidate, by measure."""
        for by in MEASURES:
            for each in self.resident:
                before = self.spent[by][each]
                self.spent[by][each] = spent[by][each] if before is None else _mixed(before, spent[by][each])
            if estimated is not None:
                pairs = zip(self.estimated[by], estimated[by], strict=True)
                self.estimated[by] = [_mixed(old, new) if self.step else new for old, new in pairs]
        for each in self.resident:
            self.steps[each] += 1
        self.step += 1


def _mixed(old: float, new: float) -> float:
    return (1 - NEWEST) * old + NEWEST * new


def check_measure(name: str, by: str) -> None:
    """SpecError unless `by` is a measure."""
    choice(f"{name}: by", by, MEASURES)


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
