"""`kvfoundry store`: what a chunk store holds, whether it is sound, and how to empty it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfoundry.cli.options import JsonOption
from kvfoundry.errors import StoreError

if TYPE_CHECKING:
    from kvfoundry.chunks.store import ChunkStore

MIB = 1024 * 1024

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="A folder, or tiers such as disk:/var/cache/kv or redis://host:6379/0, by commas."
    ),
]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Only entries of this namespace.")]

store_app = typer.Typer(
    help="Look into a chunk store, check it, empty it. A Redis password comes from KVFOUNDRY_REDIS_PASSWORD.",
    no_args_is_help=True,
)


def _open(source: str) -> ChunkStore:
    from kvfoundry.chunks.store import ChunkStore

    if Path(source).expanduser().is_dir():
        source = f"disk:{source}"
    store = ChunkStore(source, look=True)
    if all(tier.in_memory for tier in store.tiers):
        store.close()
        raise StoreError("memory tiers belong to a process; name a folder, a Redis or another address.")
    return store


@store_app.command("ls")
def ls(source: StoreArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """List the entries of every tier, the last used first."""
    with _open(source) as store:
        found = {
            tier: sorted((each for each in held if namespace in (None, each.namespace)), key=lambda each: -each.used)
            for tier, held in store.listing().items()
        }
    if as_json:
        typer.echo(json.dumps({tier: [asdict(each) for each in held] for tier, held in found.items()}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for column in ("tier", "id", "tokens", "MiB", "namespace", "method", "last used"):
        table.add_column(column, justify="right" if column in ("tokens", "MiB") else "left")
    for tier, held in found.items():
        for each in held:
            used = datetime.fromtimestamp(each.used).isoformat(" ", "seconds")
            cells = (tier, each.id[:12], str(each.tokens), f"{each.size / MIB:.2f}", each.namespace, each.method, used)
            table.add_row(*map(Text, cells))
    Console().print(table)


@store_app.command("stats")
def stats(source: StoreArgument, as_json: JsonOption = False) -> None:
    """Entries, tokens and bytes of every tier."""
    with _open(source) as store:
        tiers = store.stats()["tiers"]
    told = {
        name: {key: held[key] for key in ("entries", "tokens", "bytes", "unavailable") if key in held}
        for name, held in tiers.items()
    }
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    for name, held in told.items():
        if "unavailable" in held:
            typer.echo(f"{name}: {held['unavailable']}")
        else:
            typer.echo(f"{name}: {held['entries']} entries, {held['tokens']} tokens, {held['bytes'] / MIB:.2f} MiB")


@store_app.command("verify")
def verify(source: StoreArgument, as_json: JsonOption = False) -> None:
    """Read every entry; damaged and left-over ones are removed and named. Exit status 1 when there were any."""
    with _open(source) as store:
        problems = store.verify()
        sound = sum(len(held) for held in store.listing().values()) if not problems else None
    if as_json:
        typer.echo(json.dumps([asdict(problem) for problem in problems], indent=1))
    elif not problems:
        typer.echo(f"all {sound} entries are sound.")
    else:
        for problem in problems:
            typer.echo(f"{problem.tier} {problem.id[:12]}: {problem.reason}".replace(" :", ":"))
    if problems:
        raise typer.Exit(1)


@store_app.command("clear")
def clear(source: StoreArgument, namespace: NamespaceOption = None) -> None:
    """Remove every entry, or those of one namespace, from every tier."""
    with _open(source) as store:
        removed = store.clear(namespace)
    typer.echo(f"{removed} entries removed.")
