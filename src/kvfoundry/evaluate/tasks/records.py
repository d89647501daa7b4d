"""Data files of a task: JSON records, one a line or one list, plain or gzipped, with damaged ones named and counted."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError

_SHOWN = 3


@dataclass(frozen=True)
class Records:
    """What a file holds, and a sentence for each damaged record that was left out."""

    path: Path
    rows: tuple[dict[str, Any], ...]
    damaged: tuple[str, ...] = ()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, unpacked when its name ends in .gz.

    Raises:
        DataError: it cannot be read, unpacked or decoded.
    """
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"data file {path} is a damaged gzip file; fetch it again.") from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text.") from error


def text_fault(*names: str) -> Callable[[dict[str, Any]], str | None]:
    """A check for `read_records`: each of the fields is there and is text."""

    def fault(record: dict[str, Any]) -> str | None:
        for name in names:
            if name not in record:
                return f"has no field {name!r}"
            if not isinstance(record[name], str):
                return f"has no text in field {name!r}"
        return None

    return fault


def read_json(path: Path) -> Any:
    """What a .json file holds, also with .gz behind.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data file {path} is not JSON ({error}); one object a line makes a .jsonl.") from error


def sort_out(
    path: Path,
    found: Iterable[tuple[str, Any]],
    fault: Callable[[dict[str, Any]], str | None],
    skip_damaged: bool,
    damaged: Sequence[str] = (),
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The usable records of a file, and a sentence for each that is left out.

    Args:
        found: (where it stands, record).
        fault: what is wrong with a record, such as "has no field 'answers'", or None.
        skip_damaged: leave damaged records out; they are refused otherwise.
        damaged: what is known to be damaged already.

    Raises:
        DataError: no usable record, or damaged ones that are not to be skipped.
    """
    rows, faults = [], list(damaged)
    for place, record in found:
        problem = fault(record) if isinstance(record, dict) else "is no object"
        if problem:
            faults.append(f"{place} {problem}")
        else:
            rows.append(record)
    if faults and not skip_damaged:
        raise DataError(
            f"data file {path} is damaged: {_listed(faults)}; repair it, or leave such records out with --skip-damaged."
        )
    if not rows:
        raise DataError(f"data file {path} holds no usable record{': ' if faults else ''}{_listed(faults)}.")
    return tuple(rows), tuple(faults)


def _listed(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


def read_records(path: Path, fault: Callable[[dict[str, Any]], str | None], skip_damaged: bool = False) -> Records:
    """The records of a .jsonl file (one object a line) or a .json file (one list of objects), also with .gz behind.

    `fault` and `skip_damaged` as for `sort_out`.

    Raises:
        DataError: the file cannot be read, holds no record, or holds damaged ones that are not to be skipped.
    """
    if not path.name.removesuffix(".gz").endswith(".json"):
        return records_of_lines(path, read_text(path), fault, skip_damaged)
    content = read_json(path)
    if not isinstance(content, list):
        raise DataError(f"data file {path} holds no list of records.")
    found = [(f"record {number}", record) for number, record in enumerate(content, start=1)]
    rows, damaged = sort_out(path, found, fault, skip_damaged)
    return Records(path, rows, damaged)


def records_of_lines(
    path: Path, text: str, fault: Callable[[dict[str, Any]], str | None], skip_damaged: bool = False
) -> Records:
    """The records of a text with one object a line; `path` says where it comes from.

    Raises:
        DataError: no record in it, or damaged ones that are not to be skipped.
    """
    found: list[tuple[str, Any]] = []
    torn: list[str] = []
    # Not splitlines: JSON text may hold line separators that are no line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append((f"line {number}", json.loads(line)))
        except ValueError:
            torn.append(f"line {number} is not JSON")
    rows, damaged = sort_out(path, found, fault, skip_damaged, torn)
    return Records(path, rows, damaged)
