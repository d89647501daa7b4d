"""`kvfoundry calibrate`: what a method wants to know of a model, measured once: tables of kvquant, patterns of
minference."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, load_model

# Options that only one of the methods has, as names of parameters.
_OWN = {"kvquant": ("outliers", "window", "fisher", "q_norm"), "minference": ("cost", "samples")}
_TOKENS = {"kvquant": 2048, "minference": 4096}
_FILES = {"kvquant": "kvquant.safetensors", "minference": "minference.json"}


def calibrate(
    model: ModelOption = "smollm2",
    for_: Annotated[str, typer.Option("--for", help="The method: kvquant or minference.")] = "kvquant",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. (default: kvquant.safetensors, minference.json)")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text to read. (default: generated prose)")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens to read. (default: 2048, 4096 for minference)")
    ] = None,
    outliers: Annotated[
        float | None, typer.Option("--outliers", help="kvquant: share of numbers kept exactly. (default: 0.01)")
    ] = None,
    window: Annotated[int | None, typer.Option("--window", help="kvquant: tokens read at once. (default: 512)")] = None,
    fisher: Annotated[
        bool | None,
        typer.Option("--fisher/--no-fisher", help="kvquant: weigh numbers by their squared gradient. (default: yes)"),
    ] = None,
    q_norm: Annotated[
        bool | None,
        typer.Option("--q-norm/--no-q-norm", help="kvquant: keep mean and deviation of what is quantized."),
    ] = None,
    cost: Annotated[
        int | None, typer.Option("--cost", help="minference: rows that every candidate computes. (default: 1024)")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="minference: queries that are compared. (default: 256)")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Measure thresholds and levels for kvquant(calibration=...), or search minference(patterns=...)."""
    from kvfoundry.errors import DataError, KVFoundryError, unknown_name

    if for_ not in _OWN:
        raise KVFoundryError(unknown_name("method of calibrate", for_, _OWN))
    given = {"outliers": outliers, "window": window, "fisher": fisher, "q_norm": q_norm, "cost": cost,
             "samples": samples}  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in _OWN[for_]:
            raise KVFoundryError(f"--{name.replace('_', '-')} means nothing to {for_}; leave it out.")
    path = Path(_FILES[for_]) if out is None else out
    if not path.parent.is_dir():
        raise DataError(f"cannot write the calibration {str(path)!r}: its folder does not exist.")
    words = _read(text) if text is not None else None
    if for_ == "minference":
        from kvfoundry.sparse_prefill.search import candidates

        candidates(1024 if cost is None else cost, 128, 64)  # refuses before a model is loaded
    loaded, tokenizer = load_model(model, device, dtype)
    count = _TOKENS[for_] if tokens is None else tokens
    words = _prose(count) if words is None else words
    measure = _kvquant if for_ == "kvquant" else _minference
    measure(loaded, tokenizer, words, path, {"tokens": count, **options})


def _kvquant(model: Any, tokenizer: Any, text: str, path: Path, options: dict[str, Any]) -> None:
    from kvfoundry.calibration import calibrate as measure

    found = measure(model, tokenizer, text, on_window=_shown("window"), **options)
    found.save(path)
    outliers = found.outliers
    typer.echo(f"{path}: {len(found.layers)} layers, {outliers:.2%} outliers, levels for 2, 3 and 4 bits")
    typer.echo(f"use it with kvquant(outliers={outliers}, calibration={str(path)!r})")


def _minference(model: Any, tokenizer: Any, text: str, path: Path, options: dict[str, Any]) -> None:
    from kvfoundry.analysis.patterns import search_patterns
    from kvfoundry.sparse_prefill.table import counts_of

    found = search_patterns(model, tokenizer, text, on_layer=_shown("layer"), **options)
    found.save(path)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts_of(found).items())
    typer.echo(f"{path}: {len(found.patterns)} layers, heads by pattern: {kinds}")
    typer.echo(f"use it with minference(patterns={str(path)!r})")


def _shown(what: str) -> Any:
    return lambda done, count: typer.echo(f"\r{what} {done} of {count}", nl=done == count, err=True)


def _read(path: Path) -> str:
    from kvfoundry.errors import DataError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"text file {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"text file {path} is not UTF-8 text.") from error


def _prose(tokens: int) -> str:
    """Generated prose, more than so many tokens of it."""
    from kvfoundry.evaluate.tasks.haystack import generated_sentences

    text = ""
    for sentence in generated_sentences(0):
        text += sentence
        if len(text) > 8 * tokens:
            break
    return text.strip()
