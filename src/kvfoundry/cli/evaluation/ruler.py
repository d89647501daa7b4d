"""`kvfoundry eval ruler`: the thirteen RULER tasks."""

from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.output import note_skipped
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import HaystackOption, SkipDamagedOption, parse_numbers, split_commas
from kvfoundry.evaluate.tasks.ruler.table import VARIANTS, QASpec


@with_eval_options
def ruler(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "--datasets",
            help=f"Of {', '.join(VARIANTS)}; repeat or use commas. (default: all that --qa-data allows)",
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths",
            help="Prompt and answer in the model's tokens; repeat or use commas. (default: 1024)",
        ),
    ] = None,
    items: Annotated[int, typer.Option("--items", help="Items per task and length.")] = 5,
    haystack: HaystackOption = None,
    qa_data: Annotated[
        list[Path] | None,
        typer.Option("--qa-data", help="SQuAD-style (qa_1) or HotpotQA-style (qa_2) JSON file; may be repeated."),
    ] = None,
    skip_damaged: SkipDamagedOption = False,
    answer_prefix: Annotated[
        bool, typer.Option("--answer-prefix/--no-answer-prefix", help="Begin the answer for the model, as published.")
    ] = True,
    *,
    options: EvalOptions,
) -> None:
    """RULER: hidden facts, chains of variables, frequent words and questions, in prompts of any length."""
    from kvfoundry.evaluate.tasks.ruler.qa_data import read_qa
    from kvfoundry.evaluate.tasks.ruler.task import RulerTask

    files = [read_qa(path, skip_damaged) for path in qa_data or ()]
    for data in files:
        note_skipped(data.path, data.skipped)
    by_style = {data.style: data for data in files}
    styles = {name: variant.spec.style for name, variant in VARIANTS.items() if isinstance(variant.spec, QASpec)}
    names = split_commas(tasks) or [name for name in VARIANTS if name not in styles or styles[name] in by_style]
    run_tasks(
        [
            RulerTask(
                variant=name,
                lengths=tuple(parse_numbers(lengths or ["1024"], int, "--lengths")),
                items_per_length=items,
                haystack=haystack,
                answer_prefix=answer_prefix,
                qa=by_style.get(styles[name]) if name in styles else None,
            )
            for name in dict.fromkeys(names)
        ],
        options,
    )
