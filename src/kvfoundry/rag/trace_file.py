"""`results/decoding/speculative_trace.json`: what happened to every sample, written while it happens.

Each finished sample is appended to a file of lines beside it, flushed and synced; the JSON file is made of these at the
end, or when a run is interrupted. A run with the same arguments goes on with the samples that are missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import write_text
from kvfoundry.rag.trace import totals

NAME = "speculative_trace.json"
_FORMAT, _VERSION = "kvfoundry decoding trace", 1


class TraceFile:
    """The file of one run. Use as a context manager: leaving it writes the JSON file, whatever happened.

    arguments: what decides the answers. Raises DataError where the folder cannot be written, another run writes to it,
    or it holds a run with other arguments and `resume` is not False; without `resume` one with any is refused.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], *, resume: bool = False):
        self.path = folder / NAME
        self._lines = folder / f"{NAME}l"
        self.arguments = json.loads(json.dumps(arguments))
        self.records: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".trace.lock")
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise DataError(f"another run is writing to {folder}; wait for its end or name another --out.") from error
        except OSError as error:
            raise DataError(f"{folder} cannot be written ({error.strerror}); name another with --out.") from error
        try:
            self._open(resume)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, resume: bool) -> None:
        exists = self._lines.exists() or self.path.exists()
        if exists and not resume:
            raise DataError(f"{self.path} is there already; add --resume to go on with it or name another --out.")
        if exists:
            self._read()
        self._file = self._lines.open("wb")
        self._append({"arguments": self.arguments})
        for record in self.records:
            self._append(record)

    def _read(self) -> None:
        if self._lines.exists():
            whole, _, _ = self._lines.read_bytes().rpartition(b"\n")
            try:
                first, *rest = [json.loads(line) for line in whole.splitlines()] or [{}]
                before, records = first.get("arguments"), rest
            except (ValueError, AttributeError) as error:
                raise DataError(f"{self._lines} is damaged; move it away.") from error
        else:
            found = load_trace(self.path)
            before, records = found["arguments"], found["samples"]
        if before is not None and before != self.arguments:
            changed = [name for name in self.arguments if before.get(name) != self.arguments[name]]
            raise DataError(
                f"cannot resume {self.path}: {', '.join(changed) or 'its arguments'} differ; use the same or another "
                "--out."
            )
        self.records = records

    @property
    def finished(self) -> set[str]:
        """Items that are there."""
        return {record["item"] for record in self.records}

    def add(self, record: dict[str, Any]) -> None:
        """Keep one sample for good."""
        self._append(record)
        self.records.append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def totals(self) -> dict[str, Any]:
        """Over all samples that are there."""
        return totals(self.records)

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
            record = {
                "format": _FORMAT,
                "version": _VERSION,
                "arguments": self.arguments,
                "totals": self.totals,
                "skipped": self.skipped,
                "samples": self.records,
            }
            write_text(self.path, json.dumps(record, indent=1) + "\n")
            self._lines.unlink()
        finally:
            self._lock.release()


def load_trace(path: Path) -> dict[str, Any]:
    """A trace as it was written. DataError where it cannot be read, or is something else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}).") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise DataError(f"{path} is no decoding trace of this version.")
    return record
