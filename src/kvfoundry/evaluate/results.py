"""The results folder: one line per finished item, safe against a kill at any moment.

`results.jsonl` is only appended to, one flushed and synced line per item. A run that was killed leaves at most one torn
last line; resuming drops it, together with the lines of failed items, and goes on where the run stood.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvfoundry.errors import DataError

Line = dict[str, Any]
Key = tuple[str, str, str]

RESULTS, META, SUMMARY, REPORT = "results.jsonl", "run_meta.json", "summary.json", "report.html"

# Arguments that may change between a run and its continuation: they decide no result.
_TRANSIENT = frozenset({"resume", "json", "out", "progress"})


def key_of(line: Mapping[str, Any]) -> Key:
    return line["task"], line["item"], line["method"]


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a kill leaves the old text or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp makes it private; a report is there to be read
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> list[Line]:
    """Every whole line of a results file; a torn last line, the mark of a kill, is left out.

    Raises:
        DataError: no such file, or a line before the last that is not a result.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"results file {path} cannot be read ({error.strerror}).") from error
    whole, _, _ = raw.rpartition(b"\n")
    lines = []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            key_of(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {path} is not a result; move the file away or repair that line."
            ) from error
        lines.append(line)
    return lines


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in _TRANSIENT and before.get(name) != now.get(name):
            return f"{name} was {json.dumps(before.get(name))} and is now {json.dumps(now.get(name))}"
    return None


def check_folder(folder: Path, resume: bool) -> bool:
    """Make the folder and try it; True when it holds results to go on with.

    Raises:
        DataError: the folder cannot be written, or holds results already and `resume` is not set.
    """
    results = folder / RESULTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        exists = results.exists() and results.stat().st_size > 0
    except OSError as error:
        raise DataError(
            f"output folder {folder} cannot be written ({error.strerror}); name another with --out."
        ) from error
    if exists and not resume:
        raise DataError(
            f"output folder {folder} already holds results; add --resume to go on with them or name another with --out."
        )
    return exists


class ResultsFolder:
    """Owns the files of one run. Use as a context manager; `append` writes one result for good.

    Raises:
        DataError: the folder cannot be written, holds results already and `resume` is not set, or holds those of a run
            with other arguments.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], resume: bool) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        # Through JSON and back: what is compared is what a later run will read.
        arguments = json.loads(json.dumps(arguments))
        results = folder / RESULTS
        exists = check_folder(folder, resume)
        if exists:
            self._check_same_run(arguments)
            self.lines = [line for line in read_lines(results) if not line.get("error")]
            write_text(results, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines))
        self.finished = {key_of(line) for line in self.lines}
        self._file = results.open("ab")

    def _check_same_run(self, arguments: Mapping[str, Any]) -> None:
        try:
            before = json.loads((self.folder / META).read_text(encoding="utf-8"))["arguments"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.folder / META} cannot be read, so the run cannot be resumed; name another folder with --out."
            ) from error
        difference = _first_difference(before, arguments)
        if difference:
            raise DataError(f"cannot resume {self.folder}: {difference}; use the same arguments or another --out.")

    def append(self, line: Line) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)
        self.finished.add(key_of(line))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_report(self, html: str) -> Path:
        path = self.folder / REPORT
        write_text(path, html)
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
