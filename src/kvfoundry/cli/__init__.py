"""The command `kvfoundry`: parses, calls, renders.

Nothing here imports torch at module level, so that `--help` answers at once, and also where torch is broken.
"""

import sys
from typing import Annotated

import typer

import kvfoundry
from kvfoundry.cli.analyze import analyze_app
from kvfoundry.cli.bench import bench
from kvfoundry.cli.calibrate import calibrate
from kvfoundry.cli.demo import demo
from kvfoundry.cli.evaluation import eval_app
from kvfoundry.cli.lm_eval import PASS_ON, lm_eval
from kvfoundry.cli.methods import methods
from kvfoundry.cli.options import Interrupted
from kvfoundry.cli.pick import pick
from kvfoundry.cli.plan import plan
from kvfoundry.cli.rag import rag_app
from kvfoundry.cli.report import report
from kvfoundry.cli.run import run
from kvfoundry.cli.store import store_app
from kvfoundry.cli.vllm import vllm_config
from kvfoundry.errors import KVFoundryError

app = typer.Typer(
    name="kvfoundry",
    help="The KV cache of any transformers decoder: smaller, reusable, movable and measured.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(run)
app.command()(methods)
app.command()(calibrate)
app.add_typer(eval_app, name="eval")
app.command(context_settings=PASS_ON)(lm_eval)
app.command()(bench)
app.command()(report)
app.command()(pick)
app.command()(plan)
app.add_typer(analyze_app, name="analyze")
app.add_typer(rag_app, name="rag")
app.add_typer(store_app, name="store")
app.command("vllm-config")(vllm_config)

# typer exports no name for the base of its usage errors; BadParameter is the one public member of that family.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfoundry {kvfoundry.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _one_line(message: str) -> str:
    return "error: " + " ".join(message.split())


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 when items failed, 2 on bad input, 130 after Ctrl-C.

    A deliberate refusal and a usage error are one line on stderr. Anything else is a defect and keeps its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(args=arguments or ["--help"], prog_name="kvfoundry", standalone_mode=False)
    except KVFoundryError as error:
        typer.echo(_one_line(str(error)), err=True)
        return 2
    except _UsageError as error:
        message = getattr(error, "format_message", error.__str__)()
        if message.strip():  # empty where typer has printed the help of a group already
            typer.echo(f"{_one_line(message)} Try --help.", err=True)
        return 2
    except Interrupted as error:
        typer.echo(str(error), err=True)
        return 130
    if status == 130:  # what typer makes of Ctrl-C
        typer.echo("interrupted.", err=True)
    return status if isinstance(status, int) else 0
