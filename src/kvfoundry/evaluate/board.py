"""The board: one row per method over all tasks of a run, its columns, its order, and its CSV and Markdown forms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from kvfoundry.errors import DataError, unknown_name
from kvfoundry.evaluate.compare import difference, pair
from kvfoundry.evaluate.recipes import FULL
from kvfoundry.evaluate.results import Line
from kvfoundry.evaluate.summary import group_by, summarise
from kvfoundry.evaluate.tables import to_csv, to_markdown

MIB = 1024 * 1024

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of the board. best: which end a reader looks for first; pattern, scale: how it is shown."""

    name: str
    label: str
    title: str
    best: Literal["high", "low"] = "high"
    pattern: str = ""
    scale: float = 1.0

    def show(self, value: Any) -> str:
        if value is None:
            return "n/a"
        return format(value / self.scale, self.pattern) if self.pattern else str(value)


def columns_of(lines: Iterable[Line]) -> list[Column]:
    """Every column that these results have a figure for; the scores of several tasks stand behind all else."""
    lines = list(lines)
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    several, parks = len(tasks) > 1, any(line.get("parked_bytes") for line in lines)
    sparse = any(line.get("prefill_share") is not None for line in lines)
    parked = Column("parked_bytes", "parked MiB", "bytes of dropped rows in host memory, mean", "low", ".2f", MIB)
    computed = Column(
        "prefill_share", "prompt attention", "computed share of the prompt's attention, mean", "low", ".1%"
    )
    per_task = [Column(f"score:{task}", task, f"mean score on {task}", pattern=".3f") for task in tasks]
    return [
        Column("method", "method", "the recipe, in full", best="low"),
        Column("items", "items", "items that ran"),
        Column("score", "mean" if several else "score", "mean score, each task alike", pattern=".3f"),
        Column("difference", f"vs {FULL}", f"score minus that of {FULL} on the same items", pattern="+.3f"),
        Column("exact", "exact", "share of items answered whole", pattern=".3f"),
        Column("stored_bytes", "stored MiB", "bytes of the cache after the prompt, mean", "low", ".2f", MIB),
        Column("stored_share", "of full", "stored bytes as a share of those of a full cache, mean", "low", ".1%"),
        Column("peak_bytes", "peak MiB", "largest size of the cache until the prompt's end, mean", "low", ".2f", MIB),
        *([parked] if parks else []),
        Column("kept_rows", "kept rows", "rows per KV head and layer after the prompt, mean", "low", ".0f"),
        Column("kept_share", "kept share", "kept rows as a share of the prompt's tokens, mean", "low", ".1%"),
        *([computed] if sparse else []),
        Column("ttft_seconds", "first token s", "seconds to the first token, prefill included, median", "low", ".2f"),
        Column("ms_per_token", "ms / token", "milliseconds per decoded token, median", "low", ".1f"),
        *(per_task if several else []),
    ]


def pick_columns(columns: Sequence[Column], names: Iterable[str]) -> list[Column]:
    """The named columns, in the order named; all of them when none is.

    Raises:
        DataError: a name that the board does not have.
    """
    known = {column.name: column for column in columns}
    chosen = []
    for name in names:
        if name not in known:
            raise DataError(unknown_name("column", name, known))
        chosen.append(known[name])
    return chosen or list(columns)


_TASK_MEANS = (
    "score", "exact", "stored_bytes", "stored_share", "peak_bytes", "full_bytes", "parked_bytes", "kept_rows",
    "kept_share", "prefill_share",
)  # fmt: skip


def board_of(lines: Sequence[Line], seed: int = 0) -> list[Row]:
    """One row per method in the order of the run; a mean is over tasks of the mean over items, None where one lacks.

    Beside the columns: `failed` items; `low`, `high` and `verdict` of the difference from the full cache; `front`,
    whether no other method stores as little and scores as high.
    """
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    by_method = group_by(lines, "method")
    full = by_method.get((FULL,), [])
    rows: list[Row] = []
    for (method,), group in by_method.items():
        of_task = {row["task"]: row for row in summarise(group)}
        row: Row = {
            "method": method,
            "items": sum(found["items"] for found in of_task.values()),
            "failed": sum(found["failed"] for found in of_task.values()),
        }
        row |= {f"score:{task}": of_task.get(task, {}).get("score") for task in tasks}
        for name in _TASK_MEANS:
            means = [of_task.get(task, {}).get(name) for task in tasks]
            row[name] = None if None in means else fmean(mean for mean in means if mean is not None)
        for name in ("ttft_seconds", "ms_per_token"):
            values = [line[name] for line in group if line.get(name) is not None]
            row[name] = median(values) if values else None
        found = None if method == FULL else difference(pair(full, group), seed)
        row["difference"] = None if found is None else found.mean
        row["low"], row["high"] = (None, None) if found is None else (found.low, found.high)
        row["verdict"] = None if found is None else found.verdict
        row["reason"] = None if found is None else found.reason
        rows.append(row)
    _mark_front(rows)
    return rows


def _mark_front(rows: Sequence[Row]) -> None:
    """`front`: no other row has at most its bytes and at least its score, one of them strictly."""
    measured = [row for row in rows if row["score"] is not None and row["stored_bytes"] is not None]
    for row in rows:
        row["front"] = row in measured and not any(
            other["stored_bytes"] <= row["stored_bytes"]
            and other["score"] >= row["score"]
            and (other["stored_bytes"], other["score"]) != (row["stored_bytes"], row["score"])
            for other in measured
        )


def sort_rows(rows: Sequence[Row], column: Column) -> list[Row]:
    """The best of the column first, rows without a figure last; equal rows keep their order."""
    measured = [row for row in rows if row[column.name] is not None]
    measured.sort(key=lambda row: row[column.name], reverse=column.best == "high")
    return measured + [row for row in rows if row[column.name] is None]


def board_csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The figures as they are: bytes, seconds and shares unrounded; empty where there is none."""
    return to_csv([column.name for column in columns], ([row[column.name] for column in columns] for row in rows))


def board_markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The figures as the report shows them."""
    texts = [number for number, column in enumerate(columns) if column.name == "method"]
    cells = ([_cell(row, column) for column in columns] for row in rows)
    return to_markdown([column.label for column in columns], cells, texts)


def _cell(row: Row, column: Column) -> str:
    if column.name == "method":
        return f"`{row['method']}`"
    if column.name == "items" and row["failed"]:
        return f"{row['items']} (+{row['failed']} failed)"
    if column.name == "difference" and row["verdict"] == "noise":
        return f"{column.show(row['difference'])} (noise)"
    return column.show(row[column.name])
