"""The results folder while a run writes it: one line per finished item, safe against a kill at any moment.

`results.jsonl` is only appended to, one flushed and synced batch of lines at a time. A run that was killed leaves at
most one torn last line; resuming drops it, together with the lines of failed items, and goes on where the run stood.
`prompts.jsonl` holds the ends of every prompt and is written whole before the first answer. `runs.py` reads all of it.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvfoundry.errors import DataError

Line = dict[str, Any]
Key = tuple[str, str, str]

RESULTS, PROMPTS, META, SUMMARY, REPORT = (
    "results.jsonl", "prompts.jsonl", "run_meta.json", "summary.json", "report.html",
)  # fmt: skip

_LOCK = ".lock"

# Raised when a folder of before can no longer be read or continued. It stands in run_meta.json; 1 wrote none.
FORMAT = 2

# Arguments that may change between a run and its continuation: they decide no result.
_TRANSIENT = frozenset({"resume", "json", "out", "progress", "workers", "worker_count"})


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


def dump_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_meta(folder: Path) -> dict[str, Any]:
    """What run_meta.json says of the run.

    Raises:
        DataError: it cannot be read, or the folder has another format than this version's.
    """
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        found, by = meta.get("format", 1), meta.get("versions", {}).get("kvfoundry", "an unknown version")
        meta["arguments"].items()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); results without it mean nothing.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged, and results without it mean nothing; run again elsewhere.") from error
    if found != FORMAT:
        raise DataError(
            f"results folder {folder} has format {found}, written by kvfoundry {by}; this version reads and writes "
            f"format {FORMAT}. Use the version that wrote it, or run again into another folder."
        )
    return dict(meta)


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in _TRANSIENT and before.get(name) != now.get(name):
            return f"{name} was {json.dumps(before.get(name))} and is now {json.dumps(now.get(name))}"
    return None


def check_folder(folder: Path, resume: bool) -> bool:
    """Make the folder and try it; True when it holds results to go on with.

    Raises:
        DataError: the folder cannot be written, holds results already and `resume` is not set, or holds results of
            another format.
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
    if exists:
        read_meta(folder)
    return exists


class ResultsFolder:
    """Owns the files of one run. Use as a context manager; `append` writes one result for good.

    Raises:
        DataError: the folder cannot be written, holds results already and `resume` is not set, holds those of a run
            with other arguments, or is being written by another run.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], resume: bool) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        from filelock import FileLock, Timeout  # not at the top: `--help` reads names of files from here

        check_folder(folder, resume)
        self._lock = FileLock(folder / _LOCK)  # let go of by the system when its process dies
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise DataError(f"another run is writing to {folder}; wait for its end or name another --out.") from error
        try:
            self._open(folder, arguments, resume)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, folder: Path, arguments: Mapping[str, Any], resume: bool) -> None:
        # Through JSON and back: what is compared is what a later run will read.
        arguments = json.loads(json.dumps(arguments))
        results = folder / RESULTS
        exists = check_folder(folder, resume)
        if exists:
            self._check_same_run(arguments)
            self.lines = [line for line in read_lines(results) if not line.get("error")]
            write_text(results, dump_lines(self.lines))
        for torn in folder.glob("*.tmp"):  # files that a kill kept from taking their place
            if torn.name.startswith((RESULTS, PROMPTS, META, SUMMARY, REPORT)):
                torn.unlink(missing_ok=True)
        self.finished = {key_of(line) for line in self.lines}
        self._file = results.open("ab")

    def _check_same_run(self, arguments: Mapping[str, Any]) -> None:
        difference = _first_difference(read_meta(self.folder)["arguments"], arguments)
        if difference:
            raise DataError(f"cannot resume {self.folder}: {difference}; use the same arguments or another --out.")

    def append(self, lines: Sequence[Line]) -> None:
        """Keep these lines for good."""
        self._file.write(dump_lines(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines += lines
        self.finished |= {key_of(line) for line in lines}

    def arrange(self, order: Sequence[Key]) -> None:
        """Put the lines into the order of the run, whatever the order was in which they were finished."""
        place = {key: number for number, key in enumerate(order)}
        arranged = sorted(self.lines, key=lambda line: place[key_of(line)])
        if arranged != self.lines:
            self._file.close()
            write_text(self.folder / RESULTS, dump_lines(arranged))
            self._file = (self.folder / RESULTS).open("ab")
            self.lines = arranged

    def write_prompts(self, prompts: Sequence[Mapping[str, Any]]) -> None:
        write_text(self.folder / PROMPTS, dump_lines(prompts))

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
        self._lock.release()
