"""What happened while answers were decoded, step by step, as records for a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Step:
    """One call of the model.

    number: from 0; kind: "question" or "answer", "draft" or "verify"; position: of the first token read; tokens: how
    many; read: tokens of the answer that were read. resident: candidates that were there; started, landed, evicted,
    dropped, failed: transfers. values: the policy's worth of every candidate after the call; spent: attention that each
    got, of those that were there. stall_seconds: waited before the call. measure: attention that each would have got
    with all there, None where that was not measured.
    """

    number: int
    kind: str
    position: int
    tokens: int
    read: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    resident_bytes: int = 0
    started: list[int] = field(default_factory=list)
    landed: list[dict[str, Any]] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    stall_seconds: float = 0.0
    seconds: float = 0.0
    measure: list[float] | None = None

    def measured(self, mass: list[float]) -> None:
        """What the tokens of this step would have read with all passages there."""
        self.measure = mass

    @property
    def resident_share(self) -> float | None:
        """Share of the attention for passages that was for resident ones; None where it was not measured."""
        if self.measure is None:
            return None
        return sum(self.measure[each] for each in self.resident) / max(sum(self.measure), 1e-12)

    @property
    def absent_mass(self) -> float | None:
        """Attention that would have gone to absent passages, of all attention."""
        if self.measure is None:
            return None
        return sum(mass for each, mass in enumerate(self.measure) if each not in self.resident)

    @property
    def hit(self) -> bool | None:
        """Whether the passage that would have got most attention was there."""
        if self.measure is None:
            return None
        return self.measure.index(max(self.measure)) in self.resident


@dataclass
class Answer:
    """One sample. text: the answer; f1: of the best accepted answer; candidates: ids of passages, by number.

    room: bytes for resident rows; load_seconds: until the first were in their places; first_token_seconds: that
    included. peak_bytes: largest sum of resident rows.
    """

    item: str
    text: str
    token_ids: list[int]
    f1: float
    candidates: list[str]
    room: int
    load_seconds: float
    first_token_seconds: float
    seconds: float
    peak_bytes: int
    steps: list[Step]
    speculation: dict[str, Any] | None = None

    def record(self) -> dict[str, Any]:
        """Ready for JSON, with what follows from the steps."""
        told = asdict(self)
        for step, own in zip(self.steps, told["steps"], strict=True):
            own |= {name: getattr(step, name) for name in ("resident_share", "absent_mass", "hit")}
        return _rounded(told | self.sums())

    def sums(self) -> dict[str, Any]:
        """Counts, stalls and means over the steps."""
        return {
            "stall_seconds": sum(step.stall_seconds for step in self.steps),
            "promotions": sum(len(step.landed) for step in self.steps),
            "predictions": sum(len(step.started) for step in self.steps),
            "wrong_guesses": self.wrong_guesses(),
            "failed_transfers": sum(len(step.failed) for step in self.steps),
            "hit_rate": _mean([step.hit for step in self.steps]),
            "resident_share": _mean([step.resident_share for step in self.steps]),
        }

    def wrong_guesses(self) -> int:
        """Transfers that cost bandwidth for nothing: dropped, failed, not here by the end, or here and never read as
        much as what had to go for them was read before."""
        useful = 0
        for step in self.steps:
            before = self.steps[step.number - 1].spent
            for landed in step.landed:
                lost = max((before[each] for each in landed["replaced"]), default=0.0)
                useful += any(later.spent[landed["candidate"]] > lost for later in self.steps[step.number :])
        return sum(len(step.started) for step in self.steps) - useful


def totals(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and sums over the records of all samples."""
    names = ("f1", "stall_seconds", "first_token_seconds", "seconds", "hit_rate", "resident_share")
    found: dict[str, Any] = {"samples": len(records)}
    found |= {name: _mean([record.get(name) for record in records]) for name in names}
    counted = ("promotions", "predictions", "wrong_guesses", "failed_transfers")
    found |= {name: sum(record.get(name, 0) for record in records) for name in counted}
    found["stall_seconds_total"] = sum(record["stall_seconds"] for record in records)
    return dict(_rounded(found))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
