"""Is a difference of two scores more than noise? Paired items, and a bootstrap of their mean difference."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.runs import Run
from kvfoundry.evaluate.summary import group_by
from kvfoundry.evaluate.tables import to_csv, to_markdown

RESAMPLES = 4000

# With fewer items that differ, even a unanimous outcome is no rarer than five in a hundred (sign test).
FEWEST = 6

Pairs = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Difference:
    """The second score minus the first, over items that both have answered.

    first, second, mean: means over the tasks of the mean over items. low, high: the 95 % interval of `mean`.
    items, differing: paired items, and those of them whose scores differ.
    """

    items: int
    differing: int
    first: float
    second: float
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """better, worse, equal (on every item), or noise."""
        if self.differing == 0:
            return "equal"
        if self.differing < FEWEST or self.low <= 0 <= self.high:
            return "noise"
        return "better" if self.mean > 0 else "worse"

    @property
    def reason(self) -> str:
        """The verdict as a phrase that says what it rests on."""
        interval = f"95 % interval {self.low:+.3f} to {self.high:+.3f}"
        if self.verdict == "equal":
            return f"equal on all {self.items} items"
        if self.verdict == "noise" and self.differing < FEWEST:
            return f"noise: only {self.differing} of {self.items} items differ, at least {FEWEST} must"
        return f"{self.verdict}: {interval}, {self.items} items"


def identity_of(line: Line) -> tuple[Any, ...]:
    """What two lines about the same item share, whatever the run and the method."""
    return line["task"], line["item"], line.get("seed"), tuple(line["references"])


def pair(first: Iterable[Line], second: Iterable[Line]) -> Pairs:
    """Scores (first, second) of every item that both answered, by task.

    Two lines are about the same item when task, item, seed and references agree; failed items have no score.
    """
    scores = {identity_of(line): line["score"] for line in first if line.get("score") is not None}
    pairs: Pairs = {}
    for line in second:
        if line.get("score") is not None and identity_of(line) in scores:
            pairs.setdefault(line["task"], []).append((scores[identity_of(line)], line["score"]))
    return pairs


def difference(pairs: Mapping[str, list[tuple[float, float]]], seed: int = 0) -> Difference | None:
    """What the pairs say; None without any. Items are drawn anew within each task, `RESAMPLES` times (percentiles)."""
    if not pairs:
        return None
    rng = np.random.default_rng(seed)
    resampled = np.zeros(RESAMPLES)
    for task in sorted(pairs):
        gains = np.array([second - first for first, second in pairs[task]])
        # Blocks of draws bound the memory: a long task has thousands of items.
        block = max(1, 2_000_000 // len(gains))
        for start in range(0, RESAMPLES, block):
            draws = rng.integers(len(gains), size=(min(block, RESAMPLES - start), len(gains)))
            resampled[start : start + block] += gains[draws].mean(axis=1) / len(pairs)
    low, high = np.percentile(resampled, [2.5, 97.5])
    both = [scores for of_task in pairs.values() for scores in of_task]
    first, second = (fmean(fmean(scores[side] for scores in of_task) for of_task in pairs.values()) for side in (0, 1))
    return Difference(
        items=len(both),
        differing=sum(left != right for left, right in both),
        first=first,
        second=second,
        mean=second - first,
        low=float(low),
        high=float(high),
    )


@dataclass(frozen=True)
class ComparedRow:
    """One method of the first run against one of the second; task None stands for the mean over the shared tasks."""

    task: str | None
    first: str
    second: str
    difference: Difference


@dataclass(frozen=True)
class Comparison:
    """Two runs: first, second are their folders; remarks say what they do not share, without a full stop."""

    first: str
    second: str
    rows: list[ComparedRow]
    remarks: list[str]


def compare_runs(first: Run, second: Run, seed: int = 0) -> Comparison:
    """Every method that both runs have; where they share none, every method of one against every method of the other.

    Raises:
        DataError: no item was answered in both.
    """
    of_first, of_second = (group_by(run.lines, "method") for run in (first, second))
    both = [(method, method) for (method,) in of_first if (method,) in of_second]
    matches = both or [(left, right) for (left,) in of_first for (right,) in of_second]
    rows = []
    for left, right in matches:
        pairs = pair(of_first[left,], of_second[right,])
        if len(pairs) > 1:
            rows += _row(None, left, right, pairs, seed)
        for task, scores in pairs.items():
            rows += _row(task, left, right, {task: scores}, seed)
    if not rows:
        raise DataError(
            f"{first.folder} and {second.folder} share no answered item (task, item, seed and references must agree); "
            "compare runs of the same tasks, settings and seed."
        )
    return Comparison(str(first.folder), str(second.folder), rows, _remarks(first, second))


def _row(task: str | None, first: str, second: str, pairs: Pairs, seed: int) -> list[ComparedRow]:
    found = difference(pairs, seed)
    return [] if found is None else [ComparedRow(task, first, second, found)]


def _remarks(first: Run, second: Run) -> list[str]:
    remarks = []
    names = [name for name in {**first.arguments, **second.arguments} if name not in ("methods", "tasks")]
    for name in names:
        before, after = first.arguments.get(name), second.arguments.get(name)
        if before != after:
            remarks.append(f"{name} is {before} in A and {after} in B")
    if first.meta.get("dtype") != second.meta.get("dtype"):
        remarks.append(f"dtype is {first.meta.get('dtype')} in A and {second.meta.get('dtype')} in B")
    prompts = [{identity_of(line): line["prompt_hash"] for line in run.lines} for run in (first, second)]
    other = sum(prompts[1].get(item, digest) != digest for item, digest in prompts[0].items())
    if other:
        remarks.append(f"{other} of the shared items have other prompt tokens in B than in A")
    for run, name, fellow in ((first, "A", second), (second, "B", first)):
        lone = [method for method in run.methods if method not in fellow.methods]
        if lone and len(lone) < len(run.methods):
            more = f" and {len(lone) - 5} more" if len(lone) > 5 else ""
            remarks.append(f"only in {name}: {', '.join(lone[:5])}{more}")
    return remarks


_HEADER = ("task", "first", "second", "items", "A", "B", "difference", "low", "high", "verdict")


def comparison_csv(comparison: Comparison) -> str:
    """One line per row, figures unrounded; the task of a mean over tasks is empty."""
    return to_csv(
        _HEADER,
        (
            (row.task, row.first, row.second, found.items, found.first, found.second, found.mean, found.low, found.high,
             found.verdict)
            for row in comparison.rows
            for found in [row.difference]
        ),
    )  # fmt: skip


def comparison_markdown(comparison: Comparison) -> str:
    """A table with rounded figures."""
    rows = (
        (row.task or "all tasks", f"`{row.first}`", f"`{row.second}`", str(found.items), f"{found.first:.3f}",
         f"{found.second:.3f}", f"{found.mean:+.3f}", f"{found.low:+.3f}", f"{found.high:+.3f}", found.verdict)
        for row in comparison.rows
        for found in [row.difference]
    )  # fmt: skip
    return to_markdown(_HEADER, rows, texts=(0, 1, 2, 9))
