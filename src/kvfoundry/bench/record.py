"""What a benchmark has found so far, in a JSON file that is written after every figure."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfoundry.errors import DataError


class OutOfTime(Exception):
    """The time limit has come."""


class Record:
    """All of a run: what it was made with, gates (comparisons with a reference), figures and notes.

    limit: seconds after which `check_time` raises. say: told what happens, line by line; by default it is printed.
    command: that made it, by default this script's. about: what else the file says.
    """

    def __init__(
        self,
        path: Path,
        limit: float,
        *,
        say: Callable[[str], None] | None = None,
        command: str | None = None,
        **about: Any,
    ):
        self.path, self.began, self.say = path, time.perf_counter(), say or partial(print, flush=True)
        self.deadline = self.began + limit
        self.content: dict[str, Any] = {
            **about,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": command or "python " + " ".join(sys.argv),
            "gates": {},
            "figures": [],
            "notes": [],
        }

    def save(self) -> None:
        """Write the file. Raises DataError where it cannot be."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{error.filename or self.path} cannot be written ({error.strerror}).") from error

    def check_time(self) -> None:
        """Raise OutOfTime behind the limit."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime

    def note(self, text: str) -> None:
        """A sentence that belongs to the figures."""
        self.say(f"[{time.perf_counter() - self.began:5.1f} s] {text}")
        self.content["notes"].append(text)
        self.save()

    def gate(self, name: str, error: float, limit: float) -> bool:
        """Whether the error is within the limit; a NaN is not."""
        passed = error <= limit
        self.content["gates"][name] = {"error": error if math.isfinite(error) else str(error), "passed": passed}
        self.say(f"{'right' if passed else 'WRONG'}  {name}: error {error:.2e}, allowed {limit:.0e}")
        self.save()
        return passed

    @property
    def wrong(self) -> list[str]:
        """Names of the gates that did not pass."""
        return [name for name, gate in self.content["gates"].items() if not gate["passed"]]
