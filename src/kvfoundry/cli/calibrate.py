"""`kvfoundry calibrate`: the tables of kvquant, measured once per model."""

from pathlib import Path
from typing import Annotated

import typer

from kvfoundry.cli.options import DeviceOption, DtypeOption, ModelOption, load_model


def calibrate(
    model: ModelOption = "smollm2",
    out: Annotated[Path, typer.Option("--out", help="File to write (safetensors).")] = Path("kvquant.safetensors"),
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text to read. (default: generated prose)")] = None,
    outliers: Annotated[float, typer.Option("--outliers", help="Share of numbers kept exactly.")] = 0.01,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to read.")] = 2048,
    window: Annotated[int, typer.Option("--window", help="Tokens read at once.")] = 512,
    fisher: Annotated[
        bool, typer.Option("--fisher/--no-fisher", help="Weigh numbers by their squared gradient of the loss.")
    ] = True,
    q_norm: Annotated[
        bool, typer.Option("--q-norm/--no-q-norm", help="Keep mean and deviation of what is quantized.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Measure thresholds and levels for kvquant(calibration=...)."""
    from kvfoundry.errors import DataError

    if not out.parent.is_dir():
        raise DataError(f"cannot write the calibration {str(out)!r}: its folder does not exist.")
    words = _read(text) if text is not None else None
    from kvfoundry.calibration import calibrate as measure

    loaded, tokenizer = load_model(model, device, dtype)
    if words is None:
        words = _prose(tokens)
    calibration = measure(
        loaded,
        tokenizer,
        words,
        outliers=outliers,
        tokens=tokens,
        window=window,
        fisher=fisher,
        q_norm=q_norm,
        on_window=lambda done, count: typer.echo(f"\rwindow {done} of {count}", nl=done == count, err=True),
    )
    calibration.save(out)
    typer.echo(f"{out}: {len(calibration.layers)} layers, {outliers:.2%} outliers, levels for 2, 3 and 4 bits")
    typer.echo(f"use it with kvquant(outliers={outliers}, calibration={str(out)!r})")


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
