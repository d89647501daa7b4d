"""`kvfoundry eval niah`: a fact hidden in a long text."""

from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import HaystackOption, parse_numbers
from kvfoundry.evaluate.tasks.needles import KINDS


@with_eval_options
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
    haystack: HaystackOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer in tokens, for each needle.")
    ] = 24,
    *,
    options: EvalOptions,
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
    run_tasks([task], options)
