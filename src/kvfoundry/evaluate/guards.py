"""Guards: what makes the figures of a run say less than they seem to. Each is one sentence for the reader."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TypedDict

from kvfoundry.evaluate.recipes import FULL, split_budget
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.runs import Run
from kvfoundry.evaluate.summary import group_by, shared_prompts

# A baseline this close to what guessing scores tells nothing apart.
_MARGIN = 0.05

# Stored bytes from here on are those of the full cache.
_NOTHING_SAVED = 0.98

_GRAVITY = ("prompts", "baseline", "idle", "budget")


class Flag(TypedDict):
    """kind: prompts, baseline, idle or budget. task, method: what it is about, None for all."""

    kind: str
    task: str | None
    method: str | None
    message: str


def flags_of(run: Run) -> list[Flag]:
    """Every guard that a run trips, the gravest first."""
    found: list[Flag] = []
    if not shared_prompts(run.lines):
        found.append(_flag("prompts", "not every method was given the same prompt token ids: do not compare them"))
    for (task,), lines in group_by(run.lines, "task").items():
        found += _baseline(task, lines, run.chance(task))
        found += _idle(task, lines)
        found += _budgets(task, lines)
    return sorted(found, key=lambda flag: _GRAVITY.index(flag["kind"]))


def says_nothing(task: str, lines: Sequence[Line], chance: float) -> float | None:
    """The full cache's score on a task where it is no better than guessing, else None (also where it did not run)."""
    scores = [line["score"] for line in lines if line["task"] == task and line["method"] == FULL]
    answered = [score for score in scores if score is not None]
    mean = fmean(answered) if answered else None
    return mean if mean is not None and mean <= chance + _MARGIN else None


def _flag(kind: str, message: str, task: str | None = None, method: str | None = None) -> Flag:
    return {"kind": kind, "task": task, "method": method, "message": message}


def _baseline(task: str, lines: Sequence[Line], chance: float) -> Iterator[Flag]:
    score = says_nothing(task, lines, chance)
    if score is not None:
        guessing = f"guessing scores {chance:.2f}" if chance else "about zero"
        yield _flag(
            "baseline", f"{task}: the full cache itself scores {score:.2f} ({guessing}), so the task says nothing "
            "about methods; take an easier setting or a stronger model", task, FULL,
        )  # fmt: skip


def _done(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if not line.get("error")]


def _idle(task: str, lines: Sequence[Line]) -> Iterator[Flag]:
    """Methods that kept every row, left nothing out, saved nothing and answered as the full cache did."""
    answers = {line["item"]: line["prediction"] for line in lines if line["method"] == FULL}
    for (method,), group in group_by(_done(lines), "method").items():
        if method == FULL:
            continue
        idle = all(
            line.get("kept_share") == 1
            and line.get("prefill_share") in (None, 1)
            and (line.get("stored_bytes") or 0) >= _NOTHING_SAVED * (line.get("full_bytes") or 0)
            and line["prediction"] == answers.get(line["item"], line["prediction"])
            for line in group
        )
        if idle:
            yield _flag(
                "idle", f"{task}: {method} never acted: on all {len(group)} items it kept every row and stored as much "
                "as the full cache; its score is that of the full cache", task, method,
            )  # fmt: skip


def _budgets(task: str, lines: Sequence[Line]) -> Iterator[Flag]:
    """Methods whose answers are the same whatever the budget."""
    families: dict[str, dict[int | float, list[Line]]] = {}
    for (method,), group in group_by(_done(lines), "method").items():
        family, budget = split_budget(method)
        if budget is not None:
            families.setdefault(family, {})[budget] = group
    for family, by_budget in families.items():
        answers = [{line["item"]: line["prediction"] for line in group} for group in by_budget.values()]
        if len(by_budget) < 2 or any(other != answers[0] for other in answers):
            continue
        rows = [fmean(line["kept_rows"] for line in group) for group in by_budget.values()]
        budgets = ", ".join(f"{budget:g}" for budget in by_budget)
        cause = (
            f"and so are the rows it kept ({rows[0]:.0f}): the budget has no effect"
            if max(rows) - min(rows) < 1e-6
            else "although it kept different rows: the task does not tell these budgets apart"
        )
        yield _flag(
            "budget", f"{task}: {family} answers the same on all {len(answers[0])} items at every budget ({budgets}), "
            f"{cause}", task, family,
        )  # fmt: skip
