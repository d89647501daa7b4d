"""`kvfoundry vllm-config`: the command that serves a model through vLLM with a chunk store behind it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvfoundry.cli.options import JsonOption


def vllm_config(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Tiers such as host:4GiB,redis://cache.local:6379/0")],
    model: Annotated[str, typer.Option("--model", help="What vLLM serves: a hub name or a folder.")] = "MODEL",
    method: Annotated[
        str, typer.Option("--method", help="Codec that rows are written with, such as int8 or 'kivi(bits=4)'.")
    ] = "fullkv",
    span: Annotated[int, typer.Option("--span", help="Tokens of one entry, a multiple of vLLM's block size.")] = 256,
    namespace: Annotated[str, typer.Option("--namespace", help="Entries of one are never served to another.")] = "",
    load: Annotated[
        str, typer.Option("--load", help="ahead: before a request is scheduled; layers: beside its first step.")
    ] = "ahead",
    documents: Annotated[
        str, typer.Option("--documents", help="off, or approximate: marked documents are reused at any place.")
    ] = "off",
    repair: Annotated[
        str, typer.Option("--repair", help="none, or a blend such as 'blend(ratio=0.15, select=query_aware)'.")
    ] = "none",
    windows: Annotated[bool, typer.Option("--windows", help="The model has sliding-window layers.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the `vllm serve` command for a store; --json prints only what --kv-transfer-config takes."""
    from kvfoundry.integrations.vllm.serving import Serving
    from kvfoundry.integrations.vllm.settings import connector_settings

    given = {"store": store, "method": method, "span": span, "namespace": namespace, "load": load}
    serving = Serving(model, connector_settings(given | {"documents": documents, "repair": repair}), windows)
    typer.echo(json.dumps(serving.transfer_config, indent=1) if as_json else serving.command)
