"""`kvfoundry pick`: the recipe to use, from measured results, a memory limit and a tolerated loss."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfoundry.cli.options import JsonOption, SeedOption, parse_bytes, split_commas

if TYPE_CHECKING:
    from kvfoundry.evaluate.pick import Candidate, Pick


def pick(
    folders: Annotated[list[Path], typer.Argument(help="Results folders of `kvfoundry eval`, one or several.")],
    memory: Annotated[
        str | None, typer.Option("--memory", help="Most bytes that a prompt may store, such as 64MiB or 1.5GB.")
    ] = None,
    share: Annotated[
        float | None, typer.Option("--share", help="The same as a share of the full cache, such as 0.3.")
    ] = None,
    loss: Annotated[float, typer.Option("--loss", help="Share of the full cache's score that may be lost.")] = 0.02,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Tasks that count; repeat or use commas. (default: all)")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The one that counts where the results are of several models.")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Name the recipe that fits the limits, with what it was measured to cost, and why the others do not fit.

    Leaves with 1 when none fits. Without a memory limit the smallest cache within the loss is best.
    """
    from kvfoundry.evaluate.pick import Limits
    from kvfoundry.evaluate.pick import pick as choose
    from kvfoundry.evaluate.runs import read_run

    limits = Limits(None if memory is None else parse_bytes(memory, "--memory"), share, loss)
    made = choose([read_run(folder) for folder in folders], limits, tasks=split_commas(task), model=model, seed=seed)
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=1))
    else:
        _print(made)
    if made.best is None:
        raise typer.Exit(1)


def _print(made: "Pick") -> None:
    typer.echo(f"measured on {made.items} items of {', '.join(made.tasks)}")
    for remark in made.remarks:
        typer.echo(f"note: {remark}.")
    if made.best is not None:
        _describe("use", made.best)
        if made.runner_up is not None:
            _describe("runner-up", made.runner_up)
            if made.between is not None:
                typer.echo(f"          against the first: {made.between.mean:+.3f} ({made.between.reason})")
    else:
        typer.echo("nothing that was measured fits these limits.")
        if made.nearest is not None:
            _describe("nearest", made.nearest)
    if made.refused:
        typer.echo("refused:")
        for candidate in made.refused:
            typer.echo(f"  {candidate.method}: {'; '.join(candidate.refused)}")


def _describe(label: str, candidate: "Candidate") -> None:
    from kvfoundry.evaluate.board import MIB

    assert candidate.stored_bytes is not None and candidate.stored_share is not None
    typer.secho(f"{label:9s} {candidate.method}", bold=label == "use")
    against = "" if candidate.difference is None else f"; {candidate.difference.reason}"
    typer.echo(
        f"          score {candidate.score:.3f}, full cache {candidate.full_score:.3f}: "
        f"{max(candidate.loss or 0.0, 0.0):.1%} lost{against}"
    )
    pace = "" if candidate.ms_per_token is None else f", {candidate.ms_per_token:.1f} ms per token"
    parked = f", and has {candidate.parked_bytes / MIB:.2f} MiB in host memory" if candidate.parked_bytes else ""
    typer.echo(
        f"          stores at most {candidate.stored_bytes / MIB:.2f} MiB a prompt, "
        f"{candidate.stored_share:.1%} of the full cache{parked}{pace}"
    )
