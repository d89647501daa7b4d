"""`kvfoundry bench`: how fast methods decode here, and how much memory they take, beside what the device allows."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfoundry.cli.evaluation.playground import PlaygroundWords, specs
from kvfoundry.cli.options import (
    BudgetOption,
    ChatOption,
    DeviceOption,
    DtypeOption,
    Interrupted,
    JsonOption,
    MethodOption,
    ModelOption,
    PrefillOption,
    SeedOption,
    load_model,
    parse_budgets,
    parse_numbers,
    read_prompts,
    split_commas,
)
from kvfoundry.cli.shared import sharing
from kvfoundry.errors import DataError, MissingExtraError, ModelLoadError

if TYPE_CHECKING:
    import torch

    from kvfoundry.bench import Grid
    from kvfoundry.bench.grid import Cell

MIB = 1024 * 1024


@dataclass(frozen=True)
class BenchOptions(PlaygroundWords):
    """What `bench` takes beside its own options, with the meaning that it has in other commands."""

    model: ModelOption = "smollm2"
    method: MethodOption = None
    budget: BudgetOption = None
    chat: ChatOption = None
    prefill_chunk: PrefillOption = None
    seed: SeedOption = 0
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    as_json: JsonOption = False


@sharing(BenchOptions)
def bench(
    lengths: Annotated[
        list[str] | None,
        typer.Option("--lengths", help="Contexts in tokens, of random ids; repeat or use commas. (default: 1024)"),
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", help="Sequences at once; repeat or use commas. (default: 1)")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A text file with one prompt per line, instead of --lengths.")
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(
            "--random-weights",
            help="Instead of --model: a config.json, a folder with one, or a built-in name such as llama-3.1-8b; "
            "the model is made on the device with random weights.",
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="Who decodes; repeat or use commas. eager, static: transformers' own generate, with its dynamic and "
            "its static cache, which it compiles on a GPU; plain: our cache in that loop; engine: our engine, in a "
            "CUDA graph on a GPU; compiled: the engine over a compiled model. (default: all but compiled)",
        ),
    ] = None,
    random_rows: Annotated[
        bool,
        typer.Option(
            "--random-rows",
            help="Fill caches with random rows instead of reading a prompt: steps only, also behind contexts that take "
            "long to read. A method that needs statistics of a prompt reads one.",
        ),
    ] = False,
    repeat: Annotated[int, typer.Option("--repeat", help="Runs of every figure, behind one that warms up.")] = 3,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens decoded in every run.")] = 33,
    limit: Annotated[
        float, typer.Option("--limit", help="Seconds after which no run is begun; what is left out is named.")
    ] = 600.0,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw bench.png beside bench.json.")] = True,
    out: Annotated[Path, typer.Option("--out", "--save_dir", help="Folder; its disk is measured too.")] = Path(
        "results/bench"
    ),
    *,
    options: BenchOptions,
) -> None:
    """Measure decode latency, time to the first token, peak and stored bytes, and transfer rates.

    Every method is compared with its reference first; one that is wrong is reported and not timed. Figures are medians,
    each beside its roofline: the bytes that it cannot do without over the measured bandwidth. Leaves with 1 when a
    method is wrong, or an error stops a figure.
    """
    budgets = parse_budgets(options.budgets(options.budget))
    contexts = parse_numbers(lengths or ([] if file else ["1024"]), int, "--lengths")
    batches = parse_numbers(batch or ["1"], int, "--batch")
    _refuse_pairs(file, lengths, random_weights, options)
    prompts = [] if file is None else read_prompts(None, file)
    from kvfoundry.bench import Grid, Record
    from kvfoundry.bench import bench as measure
    from kvfoundry.evaluate.arms import expand_arms
    from kvfoundry.evaluate.prompts import encode_prompt, resolve_chat
    from kvfoundry.models import architecture, check_device

    def grid_over(texts: Sequence[Sequence[int]]) -> "Grid":
        return Grid(
            methods, contexts, batches, texts=texts, new_tokens=max_new_tokens, repeat=repeat, seed=options.seed,
            prefill_chunk=options.prefill_chunk, random_rows=random_rows,
            **({"arms": split_commas(arm)} if arm else {}),
        )  # fmt: skip

    methods = expand_arms(specs(options.method, options), budgets)
    folder, device = _folder(out, plot), check_device(options.device)
    grid = grid_over([[0]] * len(prompts))  # whatever is wrong is known before a model is there
    if random_weights is None:
        grid.refuse(architecture(options.model))
        attention = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
        model, tokenizer = load_model(options.model, options.device, options.dtype, **attention)
    else:
        model, tokenizer = _with_random_weights(random_weights, grid, device, options), None
    if prompts:
        with_template = resolve_chat(tokenizer, options.chat)
        grid = grid_over([encode_prompt(tokenizer, text, with_template) for text in prompts])
    with _Progress(shown=not options.as_json) as progress:
        record = Record(
            folder / "bench.json", limit, say=progress.say, command=shlex.join(["kvfoundry", *sys.argv[1:]]),
            **_about(model, options, random_weights),
        )  # fmt: skip
        try:
            measure(model, grid, record, tokenizer=tokenizer, on_cell=progress.on_cell)
        except KeyboardInterrupt as error:
            raise Interrupted(f"interrupted; the figures so far are in {record.path}.") from error
    paths = [record.path]
    if plot:
        paths.append(_draw(record.content, folder / "bench.png"))
    if options.as_json:
        typer.echo(json.dumps({**record.content, "files": [str(path) for path in paths]}, indent=1))
    else:
        _print(record.content)
        typer.echo("written: " + ", ".join(map(str, paths)))
    if record.wrong or record.content["stopped"]:
        raise typer.Exit(1)


def _refuse_pairs(
    file: Path | None, lengths: list[str] | None, random_weights: str | None, options: BenchOptions
) -> None:
    """Raises DataError or ModelLoadError for options that exclude each other."""
    if options.device == "auto-map":
        raise ModelLoadError(
            "bench measures one device, and auto-map spreads a model over several; name one with --device."
        )
    if file is not None and lengths:
        raise DataError("--file and --lengths both say what is read; give one of them.")
    if random_weights is None:
        return
    if options.model != "smollm2":
        raise ModelLoadError("--model and --random-weights both name the model; give one of them.")
    if file is not None:
        raise DataError("--random-weights has no tokenizer for --file; give --lengths, or a --model.")


def _folder(out: Path, plot: bool) -> Path:
    """The folder, made before anything is computed. Raises DataError, and MissingExtraError without matplotlib."""
    from kvfoundry.analysis.results import prepared

    try:
        return prepared(out, plot=plot)
    except MissingExtraError as error:
        raise MissingExtraError(f"{error} (or --no-plot)") from error


def _with_random_weights(name: str, grid: "Grid", device: "torch.device", options: BenchOptions) -> Any:
    import torch

    from kvfoundry.attention import attach
    from kvfoundry.bench.random_weights import built, config_of
    from kvfoundry.errors import unknown_name
    from kvfoundry.planning.known import outline_of
    from kvfoundry.planning.plan import DTYPES

    if options.dtype not in ("auto", *DTYPES):
        raise ModelLoadError(unknown_name("dtype", options.dtype, ["auto", *DTYPES]))
    config = config_of(name)
    grid.refuse(outline_of(config))
    usual = (getattr(config, "dtype", None) or torch.bfloat16) if device.type == "cuda" else torch.float32
    dtype: torch.dtype = DTYPES.get(options.dtype, usual)
    model = built(config, dtype, device, seed=options.seed)
    if options.attn_implementation is not None:
        attach(model, attn_implementation=options.attn_implementation)
    return model


def _about(model: Any, options: BenchOptions, random_weights: str | None) -> dict[str, Any]:
    from kvfoundry.evaluate.machine import describe, git_commit, versions

    return {
        "model": random_weights or options.model,
        "random_weights": random_weights is not None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "machine": describe(model),
        "versions": versions(),
        "git_commit": git_commit(),
        "seed": options.seed,
    }


class _Progress:
    """One line on stderr that says what is done now."""

    def __init__(self, shown: bool):
        from rich.console import Console

        self._status = Console(stderr=True).status("measuring the device ...") if shown else None

    def __enter__(self) -> "_Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text))

    def on_cell(self, cell: "Cell", number: int, total: int) -> None:
        self.say(f"{number + 1} of {total}: {cell}")


def _draw(content: dict[str, Any], path: Path) -> Path:
    from kvfoundry.bench.picture import picture

    weights = " (random weights)" if content["random_weights"] else ""
    title = f"{content['model']}{weights} in {content['dtype']} on {content['machine']['device']}"
    try:
        picture(content, title).savefig(path, dpi=130)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}).") from error
    return path


def _print(content: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvfoundry.bench.numbers import short  # its package needs torch

    rates = {name.removesuffix("_bytes_per_s"): rate for name, rate in content["rates"].items() if "bytes" in name}
    typer.echo("GB/s: " + ", ".join(f"{name.replace('_', ' ')} {short(rate / 1e9)}" for name, rate in rates.items()))
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=18)
    headings = (
        "arm",
        "batch x\ntokens",
        "step\nms",
        "roof-\nline",
        "first\nms",
        "roof-\nline",
        "stored\nMiB",
        "peak\nMiB",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    from kvfoundry.bench.latency import OWN

    for each in content["figures"]:
        table.add_row(
            Text("transformers" if each["arm"] in OWN else each["method"]), each["arm"],
            f"{each['batch']}x{each['tokens']}", short(each["ms"]), short(each["roofline_ms"]),
            short(each["ttft_ms"]), short(each["ttft_roofline_ms"]), short(each["stored_bytes"] / MIB),
            short(each["peak_bytes"] / MIB),
        )  # fmt: skip
    Console().print(table)
    for name, gate in content["gates"].items():
        if not gate["passed"]:
            typer.echo(f"WRONG: {name}: error {gate['error']}", err=True)
    left: dict[tuple[str, str, str], list[str]] = {}
    for each in content["left_out"]:
        what = "transformers" if each["arm"] in OWN else each["method"]
        left.setdefault((each["arm"], what, each["reason"]), []).append(f"{each['batch']} x {each['tokens']}")
    for (arm, what, reason), shapes in left.items():
        typer.echo(f"left out: {arm} {what}, {', '.join(shapes)} tokens: {reason.removesuffix('.')}.", err=True)
    notes = [note for each in content["figures"] for note in each["notes"]]
    notes += [note.splitlines()[0] for note in content["notes"]]
    for note in dict.fromkeys(notes):
        typer.echo(f"note: {note.removesuffix('.')}.", err=True)
