"""What the analyses have in common on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_OUT = Path("results/analysis")

SamplesOption = Annotated[
    Path | None, typer.Option("--data", help="JSON of samples with question, answers, ctxs. (default: our own set)")
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the JSON file and the picture.")]
PassagesOption = Annotated[
    int | None,
    typer.Option(
        "--passages", min=1, help="Passages of a sample; others of the data come along. (default: own set 10)"
    ),
]
ChunkTokensOption = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens", min=1, help="Cut passages into chunks of so many tokens. (default: a passage is one)"
    ),
]


def tell(paths: Sequence[Path], *lines: str) -> None:
    """What was found, then the files that hold it."""
    for line in lines:
        typer.echo(line)
    typer.echo("written: " + ", ".join(map(str, paths)))
