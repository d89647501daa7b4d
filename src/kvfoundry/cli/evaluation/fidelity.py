"""`kvfoundry eval fidelity`: how near a method stays to the full cache on any text."""

from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.evaluation.options import EvalOptions, with_eval_options
from kvfoundry.cli.evaluation.run import run_tasks
from kvfoundry.errors import KVFoundryError


@with_eval_options
def fidelity(
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text file. (default: generated prose)")] = None,
    prefix: Annotated[int, typer.Option("--prefix", help="Tokens that the method acts on.")] = 768,
    rest: Annotated[int, typer.Option("--rest", help="Tokens that follow, fed whatever the model says.")] = 256,
    items: Annotated[int, typer.Option("--items", help="Stretches of text.")] = 4,
    piece: Annotated[
        int, typer.Option("--piece", help="Tokens of the rest fed at once; 1 is the form of decoding, more is faster.")
    ] = 1,
    *,
    options: EvalOptions,
) -> None:
    """Divergence from the full cache, agreement on the next token, and perplexity, under teacher forcing."""
    from kvfoundry.evaluate.tasks.fidelity import FidelityTask

    task = FidelityTask(text=text, prefix=prefix, rest=rest, count=items, piece=piece)
    if options.chat or options.hide_question:
        raise KVFoundryError("fidelity reads plain text: leave out --chat and --hide-question.")
    run_tasks([task], options)
