"""`kvfoundry methods`: every method with its axes, parameters and paper."""

import json
from inspect import Parameter
from typing import Annotated, Any

import typer

from kvfoundry.cli.options import JsonOption
from kvfoundry.errors import SpecError, unknown_name

# A parameter without a default, as `kvfoundry.methods()` shows it.
REQUIRED = Parameter.empty


def _parameters(parameters: dict[str, Any]) -> str:
    return "\n".join(
        f"{key} (required)" if value is REQUIRED else f"{key}={json.dumps(value, default=str)}"
        for key, value in parameters.items()
    )


def _described(info: Any) -> dict[str, Any]:
    parameters = {
        key: {"required": True} if value is REQUIRED else {"default": value} for key, value in info.parameters.items()
    }
    return {
        "summary": info.summary,
        "kind": info.kind,
        "paper": info.paper,
        "axes": info.axes,
        "parameters": parameters,
    }


def methods(
    name: Annotated[str | None, typer.Argument(help="Only this method.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods: what each axis is, the parameters and the paper."""
    import kvfoundry

    known = kvfoundry.methods()
    if name is not None and name not in known:
        raise SpecError(unknown_name("method", name, known))
    chosen = {key: info for key, info in known.items() if name in (None, key)}
    if as_json:
        listing = {key: _described(info) for key, info in chosen.items()}
        typer.echo(json.dumps(listing, indent=1, default=str))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", show_lines=True)
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("parameters", no_wrap=True)
    table.add_column("axes", ratio=3)
    table.add_column("paper", ratio=2)
    for key, info in chosen.items():
        axes = "\n".join(f"{axis}: {member}" for axis, member in info.axes.items())
        table.add_row(*map(Text, (key, info.summary, _parameters(info.parameters), axes, info.paper or "")))
    Console().print(table)
