"""Options that mean the same in every command, and how their values are read."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvfoundry.errors import DataError, KVFoundryError, SpecError

Number = TypeVar("Number", int, float, int | float)

ModelOption = Annotated[str, typer.Option("--model", help="Embedded model, hub name, local folder or .gguf file.")]
MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", help="Method spec such as 'snapkv(budget=256)'; may be repeated. (default: fullkv)"),
]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", help="Rows (256) or kept share (0.25) for each method that takes one; repeat or separate by commas."
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ..., or auto-map to spread a model over all GPUs.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Put prompts into the chat template. (default: when the tokenizer has one)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a machine instead of text.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything drawn.")]
PrefillOption = Annotated[
    int | None,
    typer.Option("--prefill-chunk", min=1, help="Read the prompt in pieces of so many tokens, evicting after each."),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="File or folder with the task's data.")]
HaystackOption = Annotated[
    Path | None, typer.Option("--haystack", help="Folder of .txt or .md files. (default: generated prose)")
]
SkipDamagedOption = Annotated[
    bool, typer.Option("--skip-damaged", help="Leave damaged records of the data out instead of stopping.")
]


class Interrupted(Exception):
    """Ctrl-C in a command that can go on later; the message says how."""


def split_commas(values: Iterable[str] | None) -> list[str]:
    """["1,2", "3"] -> ["1", "2", "3"]."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def parse_numbers(values: Iterable[str] | None, kind: Callable[[str], Number], option: str) -> list[Number]:
    """Numbers of a repeatable, comma-separated option.

    Raises:
        KVFoundryError: one of them is not such a number.
    """
    numbers = []
    for value in split_commas(values):
        try:
            numbers.append(kind(value))
        except ValueError as error:
            noun = "whole number" if kind is int else "number"
            raise KVFoundryError(f"{option} {value!r} is not a {noun}.") from error
    return numbers


def parse_budgets(values: Iterable[str] | None) -> list[int | float]:
    """ "128" is rows, "0.2" a share, "1.0" the share of everything."""

    def number(text: str) -> int | float:
        try:
            return int(text)
        except ValueError:
            return float(text)

    try:
        return parse_numbers(values, number, "--budget")
    except KVFoundryError as error:
        raise SpecError(f"{error} Give rows (256) or a share between 0 and 1 (0.25).") from error


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str, option: str) -> int:
    """ "64MiB" -> 67108864; B, kB, MB, GB, TB and KiB, MiB, GiB, TiB are known, a bare number is bytes.

    Raises:
        DataError: not such a size, or none that holds a byte.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:([kmgt]?i?)b)?\s*", text.lower())
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found and (found[2] or "") in _UNITS else 0
    if size < 1:
        raise DataError(f"{option} {text!r} is not a size; give bytes with a unit, such as 64MiB or 1.5GB.")
    return size


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompt of the command line, or one per non-empty line of a file.

    Raises:
        KVFoundryError: neither or both are given, or the prompt is empty.
        DataError: the file cannot be read, or holds no prompt.
    """
    if (prompt is None) == (file is None):
        raise KVFoundryError("give one prompt, or --file with one prompt per line.")
    if file is None:
        if prompt is None or not prompt.strip():
            raise KVFoundryError("the prompt is empty; give some text.")
        return [prompt]
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"prompt file {file} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"prompt file {file} is not UTF-8 text.") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"prompt file {file} holds no prompt; write one per line.")
    return prompts


def load_model(name: str, device: str, dtype: str, **more: Any) -> tuple[Any, Any]:
    import kvfoundry

    return kvfoundry.load(name, device=device, dtype=dtype, **more)
