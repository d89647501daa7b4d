"""`kvfoundry rag run`: retrieve, build and decode as one command with one configuration."""

import json
import os
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfoundry.cli.options import JsonOption


def run(
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file; see --print-config. (default: the steps' own defaults)")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="File with question, answers, ctxs per sample. (default: our own)")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Embedded model, hub name, folder or .gguf.")] = None,
    k: Annotated[int | None, typer.Option("--k", "--top-k", help="Passages for each question.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many samples.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for all results. (default: results)")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting: step.option=value, such as decode.policy=bandit; repeatable."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration with every setting explained, and leave.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer the questions of a file from its passages: retrieve, build, decode.

    Settings come from --config, then from KVFOUNDRY_RAG_<OPTION> and KVFOUNDRY_RAG_<STEP>_<OPTION>, then from flags;
    the later wins. Every step skips what is done already, so the same command goes on after an interruption.
    """
    from kvfoundry.cli.rag.config import Settings, read_assignments, read_config, read_environment, template
    from kvfoundry.cli.rag.steps import steps

    settings = Settings(steps())
    if config is not None:
        read_config(settings, config)
    read_environment(settings, os.environ)
    flags = {"data": data, "model": model, "limit": limit, "out": out, "device": device}
    for name, value in flags.items():
        if value is not None:
            settings.set(None, name, value, f"--{name}")
    if k is not None:
        settings.set("retrieve", "k", k, "--k")
    read_assignments(settings, assign or ())
    if print_config:
        typer.echo(template(settings), nl=False)
        return
    handed: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for number, step in enumerate(settings.steps, start=1):
        if not as_json:
            typer.echo(f"[{number}/{len(settings.steps)}] {step.name}")
        with redirect_stdout(StringIO()) if as_json else nullcontext() as told:
            handed |= step.command(**settings.of(step, handed), as_json=as_json) or {}
        if told is not None:
            records[step.name] = json.loads(told.getvalue())
    if as_json:
        typer.echo(json.dumps(records, indent=1))
