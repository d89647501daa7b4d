"""`kvfoundry eval longbench`: the 21 data sets of LongBench."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.output import note_skipped
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import SkipDamagedOption, split_commas


@with_eval_options
def longbench(
    datasets: Annotated[
        list[str] | None,
        typer.Option("--datasets", help="Data sets; repeat or use commas; 'all' is all 21. (default: the 16 English)"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", "--data", help="Folder of NAME.jsonl or NAME.jsonl.gz. (default: from the hub)"),
    ] = None,
    skip_damaged: SkipDamagedOption = False,
    e: Annotated[
        bool, typer.Option("--e", help="LongBench-E: files NAME_e.jsonl, with scores for 0-4k, 4-8k and 8k+ words.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSON file of data set: template, such as the published dataset2prompt.json; only its wording gives "
            "scores that compare with published ones. (default: our own wording)",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            help="Longer prompts lose their middle; template and answer come on top. (default: what fits the model)",
        ),
    ] = None,
    *,
    options: EvalOptions,
) -> None:
    """LongBench: questions, summaries, examples, retrieval and code over long texts, as published."""
    from kvfoundry.evaluate.tasks.longbench import LongBenchTask, require_scores
    from kvfoundry.evaluate.tasks.longbench_data import folder_source, hub_source, load_data
    from kvfoundry.evaluate.tasks.longbench_prompts import load_prompts
    from kvfoundry.evaluate.tasks.longbench_sets import choose
    from kvfoundry.feeding import position_limit

    chosen = choose(split_commas(datasets), e)
    wording = load_prompts(prompts, chosen)
    for data_set in chosen:
        require_scores(data_set)
    source = folder_source(data_dir) if data_dir else hub_source()
    tasks = []
    for data_set in chosen:
        data = load_data(data_set, source, e=e, skip_damaged=skip_damaged)
        note_skipped(data.path, data.damaged)
        tasks.append(LongBenchTask(data_set, data, wording, e=e, max_length=max_length))
    for note in dict.fromkeys(wording.note(data_set) for data_set in chosen):
        typer.echo(f"note: {note}", err=True)
    run_tasks(lambda model, _: [replace(task, positions=position_limit(model)) for task in tasks], options)
