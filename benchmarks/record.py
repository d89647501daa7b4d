"""What a benchmark has found so far, in a JSON file that is written after every figure."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch


class OutOfTime(Exception):
    """The time limit has come."""


class Record:
    """All of a run: what it was made with, gates (comparisons with a reference), figures and notes."""

    def __init__(self, path: Path, limit: float, **about: Any):
        self.path, self.began = path, time.perf_counter()
        self.deadline = self.began + limit
        self.content: dict[str, Any] = {
            **about,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": "python " + " ".join(sys.argv),
            "gates": {},
            "figures": [],
            "notes": [],
        }

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def check_time(self) -> None:
        """Raise OutOfTime behind the limit."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime

    def note(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", flush=True)
        self.content["notes"].append(text)
        self.save()

    def gate(self, name: str, error: float, limit: float) -> bool:
        """Whether the error is within the limit; a NaN is not."""
        passed = error <= limit
        self.content["gates"][name] = {"error": error if math.isfinite(error) else str(error), "passed": passed}
        print(f"{'right' if passed else 'WRONG'}  {name}: error {error:.2e}, allowed {limit:.0e}", flush=True)
        self.save()
        return passed
