"""A results folder as a reader sees it, finished or not: checked lines, what was run, and the ends of every prompt."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import PROMPTS, RESULTS, Line, key_of, read_lines, read_meta

_TEXTS = ("task", "item", "method", "prompt_hash")
_NUMBERS = (
    "score", "stored_bytes", "peak_bytes", "full_bytes", "kept_rows", "kept_share", "ttft_seconds", "ms_per_token",
    "seconds", "prompt_tokens", "prefill_share",
)  # fmt: skip
# Every answer has these; times may lack, where nothing was decoded.
_MEASURED = ("stored_bytes", "peak_bytes", "full_bytes", "kept_rows", "kept_share")


@dataclass(frozen=True)
class Run:
    """One run. prompts: the lines of prompts.jsonl, empty when the file is gone; see `excerpts.excerpt`."""

    folder: Path
    lines: Sequence[Line]
    meta: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Mapping[str, Any]] = ()

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self.meta.get("arguments", {})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(line["method"] for line in self.lines))

    @property
    def missing(self) -> int:
        """Answers that the run was meant to have and has not; 0 when its prompts are not known."""
        return max(0, len(self.prompts) * len(self.arguments.get("methods", ())) - len(self.lines))

    def chance(self, task: str) -> float:
        """What guessing scores on a task: the `chance` in the settings of a task that has one."""
        declared = [entry for entry in self.arguments.get("tasks", ()) if entry.get("task") == task]
        return max((float(entry.get("chance") or 0.0) for entry in declared), default=0.0)


def _fault(line: Line) -> str | None:
    """What is wrong with a result line, or None."""
    for name in _TEXTS:
        if not isinstance(line.get(name), str):
            return f"{name} is not a text"
    for name in _NUMBERS:
        value = line.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"{name} is not a number"
        if value is not None and not math.isfinite(value):
            return f"{name} is {value}"
    references = line.get("references")
    if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
        return "references are not a list of texts"
    if line.get("error"):
        return None
    if line.get("score") is None or not isinstance(line.get("prediction"), str):
        return "it has neither a scored prediction nor an error"
    return next((f"{name} is missing" for name in _MEASURED if line.get(name) is None), None)


def _prompts(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        prompts = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text]
        for prompt in prompts:
            texts = (prompt["task"], prompt["item"], prompt["head"], prompt["tail"])
            if not all(isinstance(text, str) for text in texts) or not isinstance(prompt["prompt_tokens"], int):
                raise TypeError("a field of another type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; remove it to go on without the prompts' texts.") from error
    return prompts


def read_run(folder: Path) -> Run:
    """The run of a results folder.

    Raises:
        DataError: not a results folder, one without a single result, of another format, or damaged.
    """
    results = folder / RESULTS
    if not results.is_file():
        what = "holds no results" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder} {what}; name a folder that `kvfoundry eval` or `kvfoundry demo` has written.")
    meta, lines = read_meta(folder), read_lines(results)
    if not lines:
        raise DataError(f"{folder} holds no finished result yet; go on with the run first (--resume).")
    seen = set()
    for number, line in enumerate(lines, start=1):
        fault = "it repeats an earlier line" if key_of(line) in seen else _fault(line)
        if fault:
            raise DataError(f"line {number} of {results} is damaged: {fault}; repair or remove that line.")
        seen.add(key_of(line))
    return Run(folder, lines, meta, _prompts(folder / PROMPTS))
