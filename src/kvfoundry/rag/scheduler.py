"""Which passages to bring next, and which make room: logic alone, without model, store, threads or time.

A policy says what each candidate is worth now. The scheduler begins transfers of absent ones that are worth more than
what they would replace, at most so many at a time, and decides when one arrives whether it is still wanted. Rows of a
passage that makes room are read until the new one is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfoundry.checks import number, whole


@dataclass(frozen=True)
class Limits:
    """room: bytes for resident rows. ahead: transfers at a time, whose bytes come on top of `room`.

    horizon: steps that lie between a prediction and the step that may wait for it; 0 is fetching on demand. margin:
    share by which a newcomer must be worth more than what it replaces, against passages that come and go in turn.
    """

    room: int
    ahead: int = 1
    horizon: int = 4
    margin: float = 0.1

    def __post_init__(self) -> None:
        whole("room", self.room)
        whole("ahead", self.ahead, least=1)
        whole("horizon", self.horizon)
        number("margin", self.margin, least=0.0)


@dataclass
class Scheduler:
    """State of one answer. sizes: bytes of every candidate; resident: numbers of those that are here.

    coming: number -> the step at which it was predicted. failed: those that could not be brought; not tried again.
    """

    sizes: Sequence[int]
    limits: Limits
    resident: set[int]
    coming: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @property
    def used(self) -> int:
        """Bytes of resident rows."""
        return sum(self.sizes[each] for each in self.resident)

    def predict(self, values: Sequence[float], step: int) -> list[int]:
        """Candidates whose transfer is to begin now, the most valuable first. values: worth of every candidate."""
        begun = []
        order = sorted(range(len(values)), key=lambda each: (-values[each], each))
        planned = set(self.resident)
        for each in self.coming:  # what is coming has its room promised
            planned = self._with(each, planned, values) or planned
        for each in order:
            if len(self.coming) >= self.limits.ahead:
                break
            if each in planned or each in self.coming or each in self.failed or values[each] <= 0:
                continue
            room = self._with(each, planned, values)
            if room is None:
                continue
            planned = room
            self.coming[each] = step
            begun.append(each)
        return begun

    def due(self, step: int) -> list[int]:
        """What was predicted at least `horizon` steps ago and is not here: what a step that may wait waits for."""
        return [each for each, since in self.coming.items() if step - since >= self.limits.horizon]

    def arrive(self, each: int, values: Sequence[float]) -> list[int] | None:
        """A transfer has ended: those that make room for it, or None when it is no longer worth it, and is dropped."""
        del self.coming[each]
        after = self._with(each, self.resident, values)
        if after is None:
            return None
        leaving = sorted(self.resident - after)
        self.resident = after
        return leaving

    def fail(self, each: int) -> None:
        """A transfer has failed."""
        del self.coming[each]
        self.failed.add(each)

    def _with(self, each: int, held: set[int], values: Sequence[float]) -> set[int] | None:
        """What is held when a candidate has come and the least valuable have gone; None when that is no gain."""
        if self.sizes[each] > self.limits.room:
            return None
        kept = set(held)
        used = sum(self.sizes[other] for other in kept)
        lost = 0.0
        for other in sorted(held, key=lambda other: (values[other], -other)):
            if used + self.sizes[each] <= self.limits.room:
                break
            kept.remove(other)
            used -= self.sizes[other]
            lost += values[other]
        if kept != set(held) and values[each] <= lost * (1 + self.limits.margin):
            return None
        return kept | {each}
