"""`kvfoundry plan`: will it fit, and how many tokens, chunks and sequences."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvfoundry.cli.options import JsonOption, MethodOption, ModelOption, parse_budgets, parse_bytes
from kvfoundry.errors import DataError

if TYPE_CHECKING:
    from kvfoundry.planning import MethodPlan, Plan

# Columns of a terminal from which names of methods have room beside their figures.
_WIDE = 110
_LADDER = ("B", "KiB", "MiB", "GiB", "TiB")


def plan(
    model: ModelOption = "smollm2",
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="A size such as 24GiB, or a card: h100, rtx4090, ... (default: the device at hand)"),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    method: MethodOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Rows or kept share for methods that take one. (default: 0.25 without --method)"),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sequence. (default: 4096, or the model's positions)")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that are read and decoded together.")] = 1,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk (a passage).")] = 512,
    headroom: Annotated[
        float, typer.Option("--headroom", help="Share of the device that stays free for everything else.")
    ] = 0.1,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Size of the weights where it is not parameters times dtype.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what fits on a device: bytes per token and chunk of every method, largest context, sequences and chunks.

    The model may be a config.json, or a folder with one: no weights are read. Leaves with 1 when a method named by
    --method does not fit.
    """
    from kvfoundry.method import Method
    from kvfoundry.planning import memory_at_hand
    from kvfoundry.planning import plan as make
    from kvfoundry.planning.memory import memory_of

    device = memory_at_hand() if gpu is None else memory_of(gpu)
    amounts = parse_budgets([budget] if budget else [])
    if len(amounts) > 1:
        raise DataError("give one --budget.")
    asked = [Method.parse(spec, *amounts) for spec in method or ()]
    from rich.console import Console

    with Console(stderr=True).status("reading the model ...") as status:
        made = make(
            model,
            device=device,
            dtype=dtype,
            methods=asked,
            budget=amounts[0] if amounts else 0.25,
            context=context,
            batch=batch,
            chunk_tokens=chunk_tokens,
            headroom=headroom,
            weight_bytes=None if weights is None else parse_bytes(weights, "--weights"),
            on_method=lambda spec: status.update(f"sizing {spec} ..."),
        )
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=1))
    else:
        _print(made)
    if asked and not all(line.fits for line in made.methods):
        raise typer.Exit(1)


def size(nbytes: float) -> str:
    """12884901888 as "12.0 GiB"."""
    step = 0
    while nbytes >= 1024 and step < len(_LADDER) - 1:
        nbytes, step = nbytes / 1024, step + 1
    return f"{nbytes:.0f} {_LADDER[step]}" if step == 0 or nbytes >= 100 else f"{nbytes:.3g} {_LADDER[step]}"


def _count(number: int) -> str:
    return f"{number:,}"


def _parameters(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


def _print(made: "Plan") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"{made.model}: {made.family}", style="bold"))
    layers = "; ".join(f"{count} layers of {words}" for words, count in made.layers.items())
    facts = [
        ("model", f"{_parameters(made.parameters)} parameters in {made.dtype}; {layers}"),
        ("device", f"{made.device} ({size(made.device_bytes)})"),
        (
            "room",
            f"{size(made.room_bytes)} for the cache = {size(made.device_bytes)} - {size(made.weight_bytes)} weights "
            f"- {size(made.headroom_bytes)} headroom",
        ),
        ("asked", f"{made.batch} x {_count(made.context)} tokens; chunks of {_count(made.chunk_tokens)} tokens"),
    ]
    for name, text in facts:
        console.print(Text(f"{name:7s} {text}"))
    for remark in made.remarks:
        console.print(Text(f"note    {remark}."))
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    wide = console.width >= _WIDE  # else methods are numbered, and their names stand below
    table.add_column("method" if wide else "", ratio=1 if wide else None, overflow="fold")
    for heading in ("per\ntoken", "per\nchunk", "cache", "of\nfull", "peak with\nweights", "fits", "largest\ncontext",
                    "sequ-\nences", "chunks"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    names = []
    for number, (name, line) in enumerate(_folded(sorted(made.methods, key=lambda line: -line.cache_bytes)), start=1):
        names.append(f"{number:2d} {name}")
        context = _count(line.largest_context)
        if made.positions is not None and line.largest_context >= made.positions:
            context += "*"
        table.add_row(
            Text(name if wide else str(number)), size(line.token_bytes), size(line.chunk_bytes), size(line.cache_bytes),
            f"{line.share:.1%}", size(line.peak_bytes), "yes" if line.fits else "no", context, _count(line.sequences),
            _count(line.chunks),
        )  # fmt: skip
    console.print(table)
    if not wide:
        for name in names:
            console.print(Text(name))
    if made.positions is not None:
        console.print(Text(f"* all {_count(made.positions)} positions of the model"))
    for line in made.methods:
        parked = [f"{size(line.parked_bytes)} in host memory"] if line.parked_bytes else []
        for remark in (*parked, *line.remarks):
            console.print(Text(f"{line.method}: {remark}."))
    for name, reason in made.left_out.items():
        console.print(Text(f"not for this model: {name}: {reason}"))


def _folded(lines: list["MethodPlan"]) -> list[tuple[str, "MethodPlan"]]:
    """Lines that say the same as one, with all their names."""
    groups: dict[tuple[object, ...], list[MethodPlan]] = {}
    for line in lines:
        told = (size(line.token_bytes), size(line.chunk_bytes), size(line.cache_bytes), size(line.peak_bytes),
                line.fits, line.largest_context, line.sequences, line.chunks)  # fmt: skip
        groups.setdefault(told, []).append(line)
    return [(", ".join(line.method for line in group), group[0]) for group in groups.values()]
