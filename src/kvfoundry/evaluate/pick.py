"""Which recipe to use: from measured results, a memory limit and a loss that is tolerated."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvfoundry.errors import DataError, unknown_name
from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.compare import Difference, difference, identity_of, pair
from kvfoundry.evaluate.guards import says_nothing
from kvfoundry.evaluate.recipes import FULL
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.runs import Run
from kvfoundry.evaluate.summary import group_by

# Folders that differ in one of these measured different things.
_SHARED = ("model", "dtype", "chat", "prefill_chunk", "hide_question")


@dataclass(frozen=True)
class Limits:
    """What a recipe may cost. memory: bytes stored for one prompt; share: of those that the full cache stored for it.
    Both must hold for every prompt measured. loss: share of the full cache's score that may be lost.

    Raises:
        DataError: a limit out of range.
    """

    memory: int | None = None
    share: float | None = None
    loss: float = 0.02

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise DataError(f"a memory limit of {self.memory} bytes holds nothing; give at least one byte.")
        if self.share is not None and not 0 < self.share <= 1:
            raise DataError(f"share {self.share:g} is out of range; give a share of the full cache in (0, 1].")
        if not 0 <= self.loss <= 1:
            raise DataError(f"loss {self.loss:g} is out of range; give a share of the full cache's score from 0 to 1.")


@dataclass(frozen=True)
class Candidate:
    """One measured recipe. score, full_score: means over the tasks, on the same items; loss: the share that is gone.

    stored_bytes, stored_share, parked_bytes (in host memory): of the prompts that took most.
    refused: why it does not qualify, one phrase per reason. excess: by how much it misses the limits, as the sum of
    shares of each; None where it was not fully measured.
    """

    method: str
    score: float | None = None
    full_score: float | None = None
    loss: float | None = None
    stored_bytes: int | None = None
    stored_share: float | None = None
    parked_bytes: int = 0
    ttft_seconds: float | None = None
    ms_per_token: float | None = None
    difference: Difference | None = None
    refused: list[str] = field(default_factory=list)
    excess: float | None = None


@dataclass(frozen=True)
class Pick:
    """The recipe to use, None when none qualifies; then `nearest` is what misses the limits least."""

    limits: Limits
    tasks: list[str]
    items: int
    best: Candidate | None
    runner_up: Candidate | None
    between: Difference | None  # runner-up minus best
    nearest: Candidate | None
    refused: list[Candidate]
    remarks: list[str]


def pick(
    runs: Sequence[Run], limits: Limits, *, tasks: Sequence[str] = (), model: str | None = None, seed: int = 0
) -> Pick:
    """The best recipe within the limits.

    With a memory limit the highest score is best, and of equal ones the fewest bytes; without one the fewest bytes are.
    Then the faster decoding wins. Later runs replace what earlier ones say of the same item and method.

    Args:
        tasks: the tasks that count; all that were measured by default.
        model: of runs of several models, the one that counts.

    Raises:
        DataError: an unknown task or model, runs that measured different things, no full cache to compare with.
    """
    lines, remarks = _merged(runs, model, tasks)
    chance = {task: max(run.chance(task) for run in runs) for task in {line["task"] for line in lines}}
    for task in list(chance):
        score = says_nothing(task, lines, chance[task])
        if score is not None:
            remarks.append(f"{task} is left out: the full cache itself scores {score:.2f} there")
            lines = [line for line in lines if line["task"] != task]
    by_method = {method: group for (method,), group in group_by(lines, "method").items()}
    if FULL not in by_method:
        raise DataError(
            f"{FULL} was not measured on a task that counts, so no loss is known; run it on the same tasks and seed, "
            "into a folder of its own, and name that folder too."
        )
    candidates = [_candidate(method, group, by_method[FULL], limits, seed) for method, group in by_method.items()]
    fitting = sorted((one for one in candidates if not one.refused), key=lambda one: _order(one, limits))
    best, second = (*fitting, None, None)[:2]
    refused = [one for one in candidates if one.refused]
    near = [one for one in refused if one.excess is not None]
    between = difference(pair(by_method[best.method], by_method[second.method]), seed) if best and second else None
    return Pick(
        limits=limits,
        tasks=list(dict.fromkeys(line["task"] for line in by_method[FULL])),
        items=len(by_method[FULL]),
        best=best,
        runner_up=second,
        between=between,
        nearest=None if best else min(near, key=lambda one: one.excess or 0.0, default=None),
        refused=refused,
        remarks=remarks,
    )


def _merged(runs: Sequence[Run], model: str | None, tasks: Sequence[str]) -> tuple[list[Line], list[str]]:
    """The lines that count, one per item and method, and remarks on what was left out."""
    models = list(dict.fromkeys(str(run.arguments.get("model")) for run in runs))
    if model is not None and model not in models:
        raise DataError(unknown_name("model", model, models))
    if model is None and len(models) > 1:
        raise DataError(f"these results are of {len(models)} models ({', '.join(models)}); name one with --model.")
    chosen = [run for run in runs if model is None or str(run.arguments.get("model")) == model]
    for run in chosen[1:]:
        for name in _SHARED:
            before, now = _setting(chosen[0], name), _setting(run, name)
            if before != now:
                raise DataError(
                    f"{chosen[0].folder} and {run.folder} measured different things: {name} is {before} and {now}; "
                    "name folders that agree."
                )
    merged = {}
    for run in chosen:
        for line in run.lines:
            merged[line["task"], line["item"], line["prompt_hash"], line["method"]] = line
    lines = list(merged.values())
    known = list(dict.fromkeys(line["task"] for line in lines))
    for task in tasks:
        if task not in known:
            raise DataError(unknown_name("task", task, known))
    remarks = [f"{run.folder} is unfinished: {run.missing} answers are missing" for run in chosen if run.missing]
    return [line for line in lines if not tasks or line["task"] in tasks], remarks


def _setting(run: Run, name: str) -> Any:
    return run.meta.get("dtype") if name == "dtype" else run.arguments.get(name)


def _candidate(method: str, group: Sequence[Line], full: Sequence[Line], limits: Limits, seed: int) -> Candidate:
    stored_whole = {identity_of(line): line["stored_bytes"] for line in full if not line.get("error")}
    done = [line for line in group if not line.get("error") and identity_of(line) in stored_whole]
    pairs, failed = pair(full, done), sum(bool(line.get("error")) for line in group)
    reasons = []
    if failed:
        reasons.append(f"{failed} of its items failed")
    paired, wanted = len(done), len(stored_whole)
    if paired < wanted:
        lacking = [task for task in dict.fromkeys(line["task"] for line in full) if task not in pairs]
        where = f"not at all on {', '.join(lacking)}" if lacking else f"on {paired} of {wanted} items"
        reasons.append(f"not measured like {FULL}: {where}")
    found = difference(pairs, seed)
    if reasons or found is None:
        return Candidate(method, refused=reasons or ["not measured"])
    loss = 1 - found.second / found.first if found.first else 0.0
    stored = max(line["stored_bytes"] for line in done)
    share = max(line["stored_bytes"] / (stored_whole[identity_of(line)] or 1) for line in done)
    excess = 0.0
    if limits.memory is not None and stored > limits.memory:
        reasons.append(f"stores {stored / MIB:.2f} MiB, over the limit of {limits.memory / MIB:.2f} MiB")
        excess += stored / limits.memory - 1
    if limits.share is not None and share > limits.share:
        reasons.append(f"stores {share:.1%} of the full cache, over the limit of {limits.share:.1%}")
        excess += share / limits.share - 1
    if loss > limits.loss + 1e-9:
        reasons.append(f"loses {loss:.1%} of the full cache's score, more than {limits.loss:.1%}")
        excess += loss - limits.loss
    return Candidate(
        method=method,
        score=found.second,
        full_score=found.first,
        loss=loss,
        stored_bytes=stored,
        stored_share=share,
        parked_bytes=max(line.get("parked_bytes") or 0 for line in done),
        ttft_seconds=_middle(done, "ttft_seconds"),
        ms_per_token=_middle(done, "ms_per_token"),
        difference=None if method == FULL else found,
        refused=reasons,
        excess=excess,
    )


def _middle(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None


def _order(candidate: Candidate, limits: Limits) -> tuple[float, ...]:
    """Smaller is better."""
    score, stored, pace = -(candidate.score or 0.0), candidate.stored_bytes or 0, candidate.ms_per_token or 0.0
    limited = limits.memory is not None or limits.share is not None
    return (score, stored, pace) if limited else (stored, score, pace)
