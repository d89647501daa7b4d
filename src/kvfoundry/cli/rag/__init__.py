"""`kvfoundry rag STEP`: one small file per step of the pipeline."""

import typer

from kvfoundry.cli.rag.retrieve import retrieve

rag_app = typer.Typer(help="Retrieval-augmented generation, step by step.", no_args_is_help=True)


@rag_app.callback()
def _group() -> None:
    pass


rag_app.command()(retrieve)
