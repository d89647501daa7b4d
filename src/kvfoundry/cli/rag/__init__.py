"""`kvfoundry rag STEP`: one small file per step of the pipeline, and one for all of them."""

import typer

from kvfoundry.cli.rag.build import build
from kvfoundry.cli.rag.decode import decode
from kvfoundry.cli.rag.retrieve import retrieve
from kvfoundry.cli.rag.run import run

rag_app = typer.Typer(help="Retrieval-augmented generation, step by step.", no_args_is_help=True)


@rag_app.callback()
def _group() -> None:
    pass


rag_app.command()(retrieve)
rag_app.command()(build)
rag_app.command()(decode)
rag_app.command()(run)
