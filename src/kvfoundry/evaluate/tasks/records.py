"""Data files of a task: JSON records, one a line or one list, plain or gzipped, with damaged ones named and counted."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError

_SHOWN = 3


@dataclass(frozen=True)
class Records:
    """What a file holds: (line number or place in the list, record), and a sentence for each damaged one left out."""

    path: Path
    rows: tuple[tuple[int, dict[str, Any]], ...]
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


def read_records(path: Path, fault: Callable[[dict[str, Any]], str | None], skip_damaged: bool = False) -> Records:
    """The records of a .jsonl file (one object a line) or a .json file (one list of objects), also with .gz behind.

    Args:
        fault: what is wrong with a record, such as "has no field 'answers'", or None.
        skip_damaged: leave damaged records out; they are refused otherwise.

    Raises:
        DataError: the file cannot be read, holds no record, or holds damaged ones that are not to be skipped.
    """
    text = read_text(path)
    name = path.name.removesuffix(".gz")
    rows: list[tuple[int, dict[str, Any]]] = []
    damaged: list[str] = []
    if name.endswith(".json"):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise DataError(
                f"data file {path} is not JSON ({error}); a file of one object a line is a .jsonl."
            ) from error
        if not isinstance(content, list):
            raise DataError(f"data file {path} holds no list of records.")
        found, word = list(enumerate(content, start=1)), "record"
    else:
        found, word = [], "line"
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                found.append((number, json.loads(line)))
            except ValueError:
                damaged.append(f"line {number} is not JSON")
    for number, record in found:
        problem = fault(record) if isinstance(record, dict) else "is no object"
        if problem:
            damaged.append(f"{word} {number} {problem}")
        else:
            rows.append((number, record))
    if damaged and not skip_damaged:
        more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        raise DataError(
            f"data file {path} is damaged: {'; '.join(damaged[:_SHOWN])}{more}; "
            "repair it, or leave such records out with --skip-damaged."
        )
    if not rows:
        raise DataError(f"data file {path} holds no usable record.")
    return Records(path, tuple(rows), tuple(damaged))
