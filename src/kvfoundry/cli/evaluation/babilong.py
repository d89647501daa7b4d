"""`kvfoundry eval babilong`: reasoning over a few facts in a book."""

from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.output import note_skipped
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.cli.options import DataOption, SkipDamagedOption, split_commas
from kvfoundry.errors import KVFoundryError


@with_eval_options
def babilong(
    data: DataOption = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", help="Of qa1 to qa10; repeat or use commas. (default: all there are)")
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option("--lengths", help="As the files say: 0k, 1k, ...; repeat or use commas. (default: all there are)"),
    ] = None,
    items: Annotated[int, typer.Option("--items", help="Items per file, the first ones.")] = 10,
    skip_damaged: SkipDamagedOption = False,
    *,
    options: EvalOptions,
) -> None:
    """BABILong: questions about a few facts between the sentences of a book."""
    from kvfoundry.evaluate.tasks.babilong import BabilongTask, read_babilong

    if data is None:
        raise KVFoundryError("babilong needs local data; name a folder with files such as 1k_qa1.jsonl with --data.")
    files = read_babilong(data, split_commas(tasks), split_commas(lengths), skip_damaged)
    for file in files:
        note_skipped(file.records.path, file.records.damaged)
    families = dict.fromkeys(file.family for file in files)
    run_tasks(
        [BabilongTask(family, tuple(file for file in files if file.family == family), items) for family in families],
        options,
    )
