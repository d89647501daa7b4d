"""`kvfoundry report`: the board of a run as a page, CSV or Markdown; of two runs, what differs and what is noise."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.options import JsonOption, SeedOption, split_commas
from kvfoundry.errors import DataError

if TYPE_CHECKING:
    from kvfoundry.evaluate.compare import Comparison
    from kvfoundry.evaluate.runs import Run

# What stands for standard output in --csv and --md.
_STDOUT = Path("-")


def report(
    folders: Annotated[list[Path], typer.Argument(help="A results folder, or two to compare.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Page to write. (default: report.html in the folder; of two: none)")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="CSV file to write; - prints it.")] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Markdown table to write; - prints it.")] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", help="Columns of the board, such as score,stored_bytes; repeat or use commas."),
    ] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="Column that orders the board, best first.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Make the report of a results folder, or compare two runs item by item."""
    from kvfoundry.evaluate.runs import read_run

    if len(folders) > 2:
        raise DataError(f"{len(folders)} folders are given; report takes one, or two to compare.")
    runs = [read_run(folder) for folder in folders]
    names = split_commas(columns)
    if len(runs) == 2:
        if names or sort:
            raise DataError("--columns and --sort order the board of one run; leave them out to compare two.")
        _compare(runs[0], runs[1], html, csv, md, seed, as_json)
    else:
        _board(runs[0], html, csv, md, names, sort, as_json)


def _write(path: Path, text: str) -> None:
    if path == _STDOUT:
        typer.echo(text, nl=False)
        return
    from kvfoundry.evaluate.results import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}).") from error


def _board(
    run: "Run", html: Path | None, csv: Path | None, md: Path | None, names: list[str], sort: str | None, as_json: bool
) -> None:
    from kvfoundry.cli.evaluation.output import print_table
    from kvfoundry.evaluate.board import board_csv, board_markdown, board_of, columns_of, pick_columns, sort_rows
    from kvfoundry.evaluate.guards import flags_of
    from kvfoundry.evaluate.report import render_report
    from kvfoundry.evaluate.results import REPORT

    known = columns_of(run.lines)
    shown, rows = pick_columns(known, names), board_of(run.lines)
    if sort is not None:
        rows = sort_rows(rows, pick_columns(known, [sort])[0])
    page = html or run.folder / REPORT
    _write(page, render_report(run, names, sort))
    if csv is not None:
        _write(csv, board_csv(rows, shown))
    if md is not None:
        _write(md, board_markdown(rows, shown))
    if as_json:
        typer.echo(json.dumps({"board": rows, "warnings": flags_of(run), "report": str(page)}, indent=1))
    elif _STDOUT not in (csv, md):
        print_table(rows)
        for flag in flags_of(run):
            typer.echo(f"warning: {flag['message']}.", err=True)
        typer.echo(f"report: {page}")


def _compare(
    first: "Run", second: "Run", html: Path | None, csv: Path | None, md: Path | None, seed: int, as_json: bool
) -> None:
    from kvfoundry.evaluate.compare import compare_runs, comparison_csv, comparison_markdown
    from kvfoundry.evaluate.report import render_comparison

    comparison = compare_runs(first, second, seed)
    if html is not None:
        _write(html, render_comparison(comparison))
    if csv is not None:
        _write(csv, comparison_csv(comparison))
    if md is not None:
        _write(md, comparison_markdown(comparison))
    if as_json:
        typer.echo(json.dumps(_plain(comparison), indent=1))
    elif _STDOUT not in (csv, md):
        _print(comparison)


def _plain(comparison: "Comparison") -> dict[str, Any]:
    record = asdict(comparison)
    for row, made in zip(record["rows"], comparison.rows, strict=True):
        row["difference"] |= {"verdict": made.difference.verdict, "reason": made.difference.reason}
    return record


def _print(comparison: "Comparison") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task")
    table.add_column("method", overflow="fold", min_width=20)
    for heading in ("items", "A", "B", "B - A", "95 %\ninterval", "verdict"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        found = row.difference
        method = row.first if row.first == row.second else f"{row.first} -> {row.second}"
        table.add_row(
            Text(row.task or "all tasks"), Text(method), str(found.items), f"{found.first:.3f}", f"{found.second:.3f}",
            f"{found.mean:+.3f}", f"{found.low:+.3f}\n{found.high:+.3f}", found.verdict,
        )  # fmt: skip
    typer.echo(f"A: {comparison.first}\nB: {comparison.second}")
    Console().print(table)
    for remark in comparison.remarks:
        typer.echo(f"note: {remark}.", err=True)
