"""`kvfoundry eval TASK`: one small file per task, which says what is asked; how is the same for all of them."""

import typer

from kvfoundry.cli.evaluation.babilong import babilong
from kvfoundry.cli.evaluation.fidelity import fidelity
from kvfoundry.cli.evaluation.longbench import longbench
from kvfoundry.cli.evaluation.niah import niah
from kvfoundry.cli.evaluation.ragqa import ragqa
from kvfoundry.cli.evaluation.ruler import ruler

eval_app = typer.Typer(help="Measure methods on a task: score, bytes and time on one board.", no_args_is_help=True)


for _task in (niah, ruler, longbench, ragqa, babilong, fidelity):
    eval_app.command()(_task)
