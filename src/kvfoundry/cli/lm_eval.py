"""`kvfoundry lm-eval`: EleutherAI's lm-evaluation-harness over a model under a method."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from typing import Annotated, Any

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, PrefillOption, parse_budgets
from kvfoundry.errors import KVFoundryError

# Left to the harness, whatever it means there.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

# Ours, or set here; a second way to say them would say something else.
_OURS = ("--model_args", "-a", "-M")


def lm_eval(
    context: typer.Context,
    model: ModelOption = "smollm2",
    method: Annotated[str, typer.Option("--method", help="Method spec such as 'snapkv(budget=256)'.")] = "fullkv",
    budget: Annotated[
        str | None, typer.Option("--budget", help="Rows (256) or kept share (0.25), if the method takes one.")
    ] = None,
    prefill_chunk: PrefillOption = None,
    piece: Annotated[
        int, typer.Option("--piece", min=1, help="Tokens of a continuation fed at once; 1 is the form of decoding.")
    ] = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Run tasks of the lm-evaluation-harness; every other option is the harness', see `lm_eval run --help`.

    For example --tasks hellaswag --limit 50 --batch_size 8 --output_path results/hellaswag.
    """
    for word in context.args:
        if word.partition("=")[0] in _OURS:
            raise KVFoundryError(f"{word.partition('=')[0]} is made of --model and --method here; leave it out.")
    if not any(word.partition("=")[0] in ("--tasks", "-t", "--config", "-C") for word in context.args):
        raise KVFoundryError("name the harness' tasks with --tasks; `lm_eval ls tasks` lists them.")
    budgets = parse_budgets([budget] if budget is not None else None)
    if len(budgets) > 1:
        raise KVFoundryError("the harness runs one model under one method; give one --budget.")
    from kvfoundry.method import Method

    method = str(Method.parse(method, budgets[0] if budgets else None))
    import_module("kvfoundry.integrations.lm_eval")  # registers the model
    arguments = {
        "pretrained": model,
        "method": method,
        "dtype": dtype,
        "prefill_chunk": prefill_chunk,
        "piece": piece,
    }
    words = ["run", "--model", "kvfoundry", "--model_args", json.dumps(arguments), "--device", device, *context.args]
    _harness(words)


def _harness(words: list[str]) -> None:
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    harness = HarnessCLI()
    with _command_line(words):
        parsed = _parsed(harness)
        try:
            harness.execute(parsed)
        except ValueError as error:
            if not str(error).startswith("Tasks not found"):
                raise
            raise KVFoundryError(f"the harness says: {error}; --include_path adds a folder of tasks.") from error


def _parsed(harness: Any) -> Any:
    """The harness' reading of its command line; what it has against it in one line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return harness.parse_args()
    except SystemExit as error:
        lines = [line.partition("error: ")[2] or line for line in said.getvalue().splitlines() if line.strip()]
        if error.code and lines:
            raise KVFoundryError(f"the harness says: {lines[-1]}") from error
        raise typer.Exit(int(error.code or 0)) from error


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, ["lm_eval", *words]
    try:
        yield
    finally:
        sys.argv = before
