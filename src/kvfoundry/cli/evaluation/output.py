"""What an eval command shows: a progress bar, the table, and the exit status."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kvfoundry.evaluate.runner import Outcome, Progress


@contextmanager
def progress_bar(shown: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar with the time left on stderr."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    bar = Bar(*columns, console=Console(stderr=True))
    running = bar.add_task("", total=None, left="")

    def show(state: "Progress") -> None:
        bar.start()  # not before there is something to show: a refusal is one line
        minutes, seconds = divmod(round(state.seconds_left), 60)
        bar.update(
            running,
            description=state.method,
            completed=state.done,
            total=state.total,
            left=f"{minutes}:{seconds:02d} left",
        )

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


# heading, field of a summary row, scale, pattern
_COLUMNS = {
    "score": ("score", "score", 1, ".2f"),
    "exact": ("exact", "exact", 1, ".2f"),
    "kl": ("KL\nnats", "kl", 1, ".4f"),
    "nll": ("nats per\ntoken", "nll", 1, ".3f"),
    "stored": ("stored\nMiB", "stored_bytes", 1024 * 1024, ".2f"),
    "kept": ("kept", "kept_share", 1, ".0%"),
    "ms": ("ms per\ntoken", "ms_per_token", 1, ".1f"),
    "first": ("first\ntoken s", "ttft_seconds", 1, ".2f"),
}
_OF_ANSWERS = ("score", "exact", "stored", "kept", "ms", "first")
_OF_FIDELITY = ("score", "kl", "nll", "stored", "kept", "ms")
# Where rows name their task too, a terminal of 80 columns has no room for these.
_LEFT_OUT = ("exact", "first")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Rows of a summary, or those of the board that have no task, as a table on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    several = len({row.get("task") for row in rows}) > 1
    if several:
        table.add_column("task", overflow="fold")
    table.add_column("method", overflow="fold", min_width=24)
    table.add_column("items", justify="right")
    shown = _OF_FIDELITY if all("kl" in row for row in rows) else _OF_ANSWERS
    columns = [_COLUMNS[name] for name in shown if not (several and name in _LEFT_OUT)]
    for heading, *_ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [
            "n/a" if row.get(name) is None else format(row[name] / scale, pattern)
            for _, name, scale, pattern in columns
        ]
        failed = f" (+{row['failed']} failed)" if row["failed"] else ""
        task = [Text(row["task"])] if several else []
        table.add_row(*task, Text(row["method"]), f"{row['items']}{failed}", *numbers)
    Console().print(table)


def print_extra_table(rows: list[dict[str, Any]]) -> None:
    """What only some tasks have: ROUGE-L, and the scores of LongBench in percent, whole and by length."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    extra = [
        row.get("published_form", {}) | {name: row[name] for name in ("rouge_l",) if row.get(name) is not None}
        for row in rows
    ]
    headings = list(dict.fromkeys(name for values in extra for name in values))
    if not headings:
        return
    titles = {"score": "score in %", "rouge_l": "ROUGE-L"}
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("task", "method"):
        table.add_column(column, overflow="fold", min_width=20)
    for name in headings:
        table.add_column(titles.get(name, name), justify="right")
    for row, values in zip(rows, extra, strict=True):
        numbers = ["n/a" if values.get(name) is None else f"{values[name]:.2f}" for name in headings]
        table.add_row(Text(row["task"]), Text(row["method"]), *numbers)
    Console().print(table)


def finish(outcome: "Outcome", as_json: bool, picture: Path | None = None, **more: Any) -> None:
    """Print what came out, with `more` in the JSON form; leave with 1 when items failed."""
    drawn = {"picture": str(picture)} if picture else {}
    if as_json:
        record = {"rows": outcome.rows, "warnings": outcome.flags, "failed": outcome.failed}
        typer.echo(json.dumps({**record, "report": str(outcome.report), **drawn, **more}, indent=1))
    else:
        print_table(outcome.rows)
        if len(outcome.rows) > len(outcome.board):
            typer.echo("mean over the tasks:")
            print_table(outcome.board)
        print_extra_table(outcome.rows)
        for flag in outcome.flags:
            typer.echo(f"warning: {flag['message']}.", err=True)
        for name, path in {"report": str(outcome.report), **drawn}.items():
            typer.echo(f"{name}: {path}")
    if outcome.failed:
        typer.echo(
            f"{outcome.failed} items failed; see results.jsonl, and run again with --resume to retry them.", err=True
        )
        raise typer.Exit(1)


def note_skipped(path: Path, skipped: Sequence[str], fault: str = "damaged") -> None:
    """One line on stderr about the records of a file that are left out."""
    if skipped:
        count = f"{len(skipped)} {fault} record{'s' if len(skipped) > 1 else ''}"
        shown = "; ".join(skipped[:3]) + ("; ..." if skipped[3:] else "")
        typer.echo(f"note: {count} of {path} left out: {shown}", err=True)
