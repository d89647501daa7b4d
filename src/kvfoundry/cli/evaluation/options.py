"""What every eval command takes, declared once: each field of `EvalOptions` is an option of each task."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.evaluation.playground import PlaygroundWords
from kvfoundry.cli.options import (
    BudgetOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelOption,
    PrefillOption,
    SeedOption,
)
from kvfoundry.cli.shared import sharing


@dataclass(frozen=True)
class EvalOptions(PlaygroundWords):
    """The options that all eval tasks share; `with_eval_options` adds them to a command."""

    model: ModelOption = "smollm2"
    method: MethodOption = None
    budget: BudgetOption = None
    limit: Annotated[
        int | None, typer.Option("--limit", help="At most so many items of each task, spread over its grid.")
    ] = None
    batch_size: Annotated[int, typer.Option("--eval-batch-size", "--eval_batch_size", help="Prompts per batch.")] = 1
    chat: ChatOption = None
    prefill_chunk: PrefillOption = None
    hide_question: Annotated[
        bool, typer.Option("--hide-question", help="Methods act before they see the question, as on a stored document.")
    ] = False
    together: Annotated[
        int,
        typer.Option(
            "--together",
            help="So many methods at a time read a prompt together: the same answers much faster, no times per method.",
        ),
    ] = 1
    timed: Annotated[
        int,
        typer.Option("--timed", help="With --together: so many prompts that every method answers alone, timed."),
    ] = 0
    workers: Annotated[
        str,
        typer.Option(
            "--workers", help="local, a number of processes, or ray (the cluster of RAY_ADDRESS, or one here)."
        ),
    ] = "local"
    worker_count: Annotated[
        int | None,
        typer.Option(
            "--worker-count",
            help="Workers of --workers ray. (default: one per GPU, one per machine with auto-map, or 2)",
        ),
    ] = None
    seed: SeedOption = 0
    out: Annotated[Path, typer.Option("--out", "--save_dir", help="Results folder.")] = Path("results")
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    as_json: JsonOption = False


def with_eval_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the shared options behind its own; it receives them as `options`, an `EvalOptions`.

    Without --out, results go to results/NAME, where NAME is that of the command.
    """
    return sharing(EvalOptions, out=Path("results") / command.__name__)(command)
