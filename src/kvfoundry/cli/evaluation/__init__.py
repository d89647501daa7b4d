"""`kvfoundry eval TASK`: one small file per task, which says what is asked; how is the same for all of them."""

import typer

from kvfoundry.cli.evaluation.niah import niah

eval_app = typer.Typer(help="Measure methods on a task: score, bytes and time on one board.", no_args_is_help=True)


@eval_app.callback()
def _group() -> None:
    """Keeps a task a subcommand even where it is the only one."""


for _task in (niah,):
    eval_app.command()(_task)
