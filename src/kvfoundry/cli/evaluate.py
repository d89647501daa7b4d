"""`kvfoundry eval TASK`: tasks x methods x budgets, resumable, with a report."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.options import (
    BudgetOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    Interrupted,
    JsonOption,
    MethodOption,
    ModelOption,
    PrefillOption,
    SeedOption,
    load_model,
    parse_budgets,
    parse_numbers,
)
from kvfoundry.evaluate.tasks.needles import KINDS

if TYPE_CHECKING:
    from kvfoundry.evaluate.runner import Outcome, Progress

eval_app = typer.Typer(help="Measure methods on a task: score, bytes and time on one board.", no_args_is_help=True)


@eval_app.callback()
def _group() -> None:
    """Keeps `niah` a subcommand while it is the only one."""


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
    for heading in ("items", "score", "exact", "stored\nMiB", "kept", "ms per\ntoken", "first\ntoken s"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [
            "n/a" if row[name] is None else format(row[name] / scale, pattern)
            for name, scale, pattern in (
                ("score", 1, ".2f"), ("exact", 1, ".2f"), ("stored_bytes", 1024 * 1024, ".2f"),
                ("kept_share", 1, ".0%"), ("ms_per_token", 1, ".1f"), ("ttft_seconds", 1, ".2f"),
            )
        ]  # fmt: skip
        failed = f" (+{row['failed']} failed)" if row["failed"] else ""
        task = [Text(row["task"])] if several else []
        table.add_row(*task, Text(row["method"]), f"{row['items']}{failed}", *numbers)
    Console().print(table)


def finish(outcome: "Outcome", as_json: bool, **more: Any) -> None:
    """Print what came out, with `more` in the JSON form; leave with 1 when items failed."""
    if as_json:
        record = {"rows": outcome.rows, "warnings": outcome.flags, "failed": outcome.failed}
        typer.echo(json.dumps({**record, "report": str(outcome.report), **more}, indent=1))
    else:
        print_table(outcome.rows)
        if len(outcome.rows) > len(outcome.board):
            typer.echo("mean over the tasks:")
            print_table(outcome.board)
        for flag in outcome.flags:
            typer.echo(f"warning: {flag['message']}.", err=True)
        typer.echo(f"report: {outcome.report}")
    if outcome.failed:
        typer.echo(
            f"{outcome.failed} items failed; see results.jsonl, and run again with --resume to retry them.", err=True
        )
        raise typer.Exit(1)


def _resume_hint(out: Path) -> str:
    command = ["kvfoundry", *sys.argv[1:]]
    if "--out" not in command and not any(word.startswith("--out=") for word in command):
        command += ["--out", str(out)]
    return shlex.join(command if "--resume" in command else [*command, "--resume"])


@eval_app.command()
def niah(
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths", help="Prompt lengths in the model's tokens; repeat or use commas. (default: 1024,2048)"
        ),
    ] = None,
    depths: Annotated[
        list[str] | None,
        typer.Option("--depths", help="Needle depths in percent; repeat or use commas. (default: 0,25,50,75,100)"),
    ] = None,
    kind: Annotated[
        str, typer.Option("--kind", help="; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items()))
    ] = "word",
    needles: Annotated[int, typer.Option("--needles", help="Facts hidden and asked for at once.")] = 1,
    distractors: Annotated[int, typer.Option("--distractors", help="Facts about other keys, to be told apart.")] = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Items per length and depth.")] = 1,
    haystack: Annotated[
        Path | None, typer.Option("--haystack", help="Folder of .txt or .md files. (default: generated prose)")
    ] = None,
    model: ModelOption = "smollm2",
    method: MethodOption = None,
    budget: BudgetOption = None,
    limit: Annotated[int | None, typer.Option("--limit", help="At most so many items, spread over the grid.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer in tokens, for each needle.")
    ] = 24,
    batch_size: Annotated[int, typer.Option("--eval-batch-size", "--eval_batch_size", help="Prompts per batch.")] = 1,
    chat: ChatOption = None,
    prefill_chunk: PrefillOption = None,
    hide_question: Annotated[
        bool, typer.Option("--hide-question", help="Methods act before they see the question, as on a stored document.")
    ] = False,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option("--out", help="Results folder.")] = Path("results/niah"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Needle in a haystack: a fact hidden in a long text, over lengths and depths."""
    from kvfoundry.evaluate.tasks.niah import NeedleTask

    task = NeedleTask(
        lengths=tuple(parse_numbers(lengths or ["1024,2048"], int, "--lengths")),
        depths=tuple(parse_numbers(depths or ["0,25,50,75,100"], float, "--depths")),
        kind=kind,
        needles=needles,
        distractors=distractors,
        repeats=repeats,
        haystack=haystack,
        max_new_tokens=max_new_tokens,
    )
    budgets = parse_budgets(budget)
    from kvfoundry.evaluate.arms import expand_arms
    from kvfoundry.evaluate.results import check_folder
    from kvfoundry.evaluate.runner import evaluate

    arms = expand_arms(method or ["fullkv"], budgets)
    check_folder(out, resume)  # before the model is loaded: a wrong folder is known at once
    loaded, tokenizer = load_model(model, device, dtype)
    try:
        with progress_bar(shown=not as_json) as on_progress:
            outcome = evaluate(
                loaded,
                tokenizer,
                [task],
                arms,
                out=out,
                seed=seed,
                limit=limit,
                batch_size=batch_size,
                chat=chat,
                prefill_chunk=prefill_chunk,
                hide_question=hide_question,
                resume=resume,
                arguments={"model": model, "device": device, "dtype": dtype},
                on_progress=on_progress,
            )
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted; finished items are kept. Go on with: {_resume_hint(out)}") from error
    finish(outcome, as_json)
