"""From result lines to one row per task and method, and one cell per grid position."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.scores.longbench import by_length, published_form

_MEANS = (
    "score", "exact", "stored_bytes", "stored_share", "peak_bytes", "full_bytes", "parked_bytes", "kept_rows",
    "kept_share", "prefill_share", "prompt_tokens",
)  # fmt: skip
# Means of fields that only some tasks write.
_OF_SOME_TASKS = ("kl", "nll", "full_nll", "f1", "exact_match", "rouge_l")
# The first item of an arm pays for warm-up: the median does not see it, a mean would.
_MEDIANS = ("ttft_seconds", "ms_per_token")


def _over(lines: Sequence[Line], name: str, how: Any) -> float | None:
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return how(values) if values else None


def group_by(lines: Iterable[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    """Lines by the values of some fields, in the order in which they first appear."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(name) for name in names), []).append(line)
    return groups


def _with_share(line: Line) -> Line:
    """The line and its stored bytes as a share of a full cache's."""
    stored, full = line.get("stored_bytes"), line.get("full_bytes")
    return line if stored is None or not full else {**line, "stored_share": stored / full}


def summarise(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """One row per (task, method). Scores are means over the items that ran; failed ones are counted, not averaged.

    A row of LongBench also has its score in percent as tables print it, whole and by length.
    """
    rows = []
    for (task, method), group in group_by(lines, "task", "method").items():
        done = [_with_share(line) for line in group if not line.get("error")]
        row: dict[str, Any] = {"task": task, "method": method, "items": len(done), "failed": len(group) - len(done)}
        row |= {name: _over(done, name, fmean) for name in _MEANS}
        row |= {name: _over(done, name, median) for name in _MEDIANS}
        row |= {name: mean for name in _OF_SOME_TASKS if (mean := _over(done, name, fmean)) is not None}
        if any("bucket" in line for line in done):
            scores = [line["score"] for line in done]
            row["published_form"] = {
                "score": published_form(scores),
                **by_length(scores, [line["length"] for line in done]),
            }
        row["seconds"] = sum(line["seconds"] for line in done if line.get("seconds") is not None)
        for field in ("notes", "task_notes"):
            row[field] = list(dict.fromkeys(note for line in done for note in line.get(field, ())))
        rows.append(row)
    return rows


def grid(lines: Iterable[Line]) -> dict[tuple[float, int], float]:
    """Mean score by (depth, length) of the lines that carry such a cell."""
    cells = group_by((line for line in lines if line.get("score") is not None and "depth" in line), "depth", "length")
    return {(depth, length): fmean(line["score"] for line in group) for (depth, length), group in cells.items()}


def shared_prompts(lines: Iterable[Line]) -> bool:
    """True when every item was put to every method as the same token ids (design law 10)."""
    return all(len({line["prompt_hash"] for line in group}) == 1 for group in group_by(lines, "task", "item").values())
