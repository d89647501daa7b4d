"""`kvfoundry demo`: the main job on the embedded model, with a report to look at."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.evaluation.output import finish, progress_bar
from kvfoundry.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, SeedOption, load_model
from kvfoundry.evaluate.results import check_folder


def demo(
    model: ModelOption = "smollm2",
    out: Annotated[Path | None, typer.Option("--out", help="Results folder. (default: results/demo-DATE-TIME)")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare the full cache with four methods at two budgets, and ask one document many questions."""
    folder = out or Path("results") / time.strftime("demo-%Y%m%d-%H%M%S")
    check_folder(folder, resume=False)
    from kvfoundry.demo import BUDGETS, LENGTH, METHODS, run_demo

    began = time.perf_counter()
    if not as_json:
        typer.echo(f"loading {model} ...", err=True)
    loaded, tokenizer = load_model(model, device, dtype)
    if not as_json:
        typer.echo(
            f"needles in {LENGTH} tokens: {', '.join(METHODS)}; budgets {', '.join(map(str, BUDGETS))} rows", err=True
        )
    with progress_bar(shown=not as_json) as on_progress:
        result = run_demo(loaded, tokenizer, folder, seed=seed, name=model, on_progress=on_progress)
    finish(result.outcome, as_json, reuse=[asdict(reuse) for reuse in result.reuse])
    if as_json:
        return
    for reuse in result.reuse:
        typer.echo(
            f"one document of {reuse.document_tokens} tokens, {reuse.questions} questions ({reuse.method}): "
            f"{reuse.forked_seconds:.1f} s with one prefill and forks, "
            f"{reuse.fresh_seconds:.1f} s reading it anew each time; "
            f"{reuse.same_answers} of {reuse.questions} answers equal, score {reuse.forked_score:.2f}"
        )
    typer.echo(f"took {time.perf_counter() - began:.0f} s")
