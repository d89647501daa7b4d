"""Results made by hand: lines, runs and folders that no model has to answer."""

import json
from pathlib import Path
from typing import Any

from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.results import FORMAT, META, PROMPTS, RESULTS, dump_lines
from kvfoundry.evaluate.runs import Run


def line(method: str = "fullkv", item: str | None = None, **more: Any) -> dict[str, Any]:
    """One result; depth, length and score decide what is not given."""
    depth, length, score = more.pop("depth", 0.0), more.pop("length", 128), more.pop("score", 1.0)
    kept = 1.0 if method == "fullkv" else 0.5
    return {
        "task": "niah", "item": item or f"L{length}-D{depth:g}", "method": method, "seed": 0, "length": length,
        "depth": depth, "prediction": f"it is {score}", "references": ["tiger"], "score": score, "exact": score == 1.0,
        "stored_bytes": int(4 * MIB * kept), "peak_bytes": 3 * MIB, "full_bytes": 4 * MIB, "kept_rows": length * kept,
        "kept_share": kept, "kept_profile": None, "prompt_tokens": length, "ttft_seconds": 0.5, "ms_per_token": 12.5,
        "seconds": 1.0, "notes": [], "prompt_hash": f"{length} {depth:g}",
    } | more  # fmt: skip


def lines(method: str, scores: list[float], task: str = "niah", **more: Any) -> list[dict[str, Any]]:
    """One line per score, on items of their own."""
    return [
        line(method, f"i{number}", task=task, score=score, prompt_hash=f"{task} {number}", **more)
        for number, score in enumerate(scores)
    ]


def run_of(*results: dict[str, Any], prompts: tuple[dict[str, Any], ...] = (), **arguments: Any) -> Run:
    """A run in memory."""
    arguments = {"model": "tiny", "seed": 0, "tasks": [], "methods": []} | arguments
    meta = {"format": FORMAT, "versions": {"kvfoundry": "0"}, "dtype": "float32", "arguments": arguments}
    return Run(Path("run"), list(results), meta, list(prompts))


def write(folder: Path, run: Run) -> Path:
    """The same run as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).write_text(json.dumps(run.meta))
    (folder / RESULTS).write_text(dump_lines(run.lines))
    (folder / PROMPTS).write_text(dump_lines(run.prompts))
    return folder
