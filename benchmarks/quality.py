"""Quality of every method on the embedded model: needle at 2k and 4k tokens, and a needle among other keys.

    python benchmarks/quality.py [--model smollm2] [--device auto] [--jobs 5] [--batch 20] [--table FILE] [--resume]

Each method at 64, 128, 256 and 512 rows, in two columns: the question is part of the prompt when the method acts, or
it comes after (the text is compressed before the question, as a stored document would be). Both columns share prompts,
seed, backend and dtype. Writes benchmarks/results/quality.json and the table docs/quality.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
PAGE = ROOT / "docs" / "quality.md"
BUDGETS = (64, 128, 256, 512)
SEED = 17
DEPTHS = tuple(float(depth) for depth in range(5, 100, 10))
TASKS: dict[str, dict[str, Any]] = {
    "needle 2k": {"lengths": (2048,)},
    "needle 4k": {"lengths": (4096,)},
    # One more key: with two the full cache itself recovers 58 %, with seven 10 %, and nothing could be told apart.
    "multi-key 2k": {"lengths": (2048,), "distractors": 1},
}

# Pieces that refine a method are measured on the method they are usually put on.
COMPOSED = (
    "snapkv(budget=1)+pivot_merge()",
    "snapkv(budget=1)+weighted_merge()",
    "snapkv(budget=1)+value_merge()",
    "h2o(budget=1)+adaptive_heads()",
    "keydiff(budget=1)+adaptive_heads()",
    "expected_attention(budget=1)+adaptive_heads()",
    "expected_attention(budget=1)+critical()",
)


def method_specs(table: Path | None) -> list[str]:
    """Every registered method that drops rows or chooses what to read, and the compositions above."""
    import kvfoundry
    from kvfoundry.registry import REQUIRED

    specs = []
    for name, info in kvfoundry.methods().items():
        required = {key for key, value in info.parameters.items() if value is REQUIRED}
        if info.kind != "method" or "budget" not in info.parameters or required - {"budget", "table"}:
            continue
        if "table" in required and table is None:
            continue
        specs.append(f"{name}(budget=512, table={str(table)!r})" if "table" in required else f"{name}(budget=512)")
    return specs + [spec.replace("budget=1)", "budget=512)") for spec in COMPOSED]


@functools.cache
def _loaded(model: str, device: str, dtype: str, threads: int) -> tuple[Any, Any]:
    import torch
    import transformers

    import kvfoundry

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    return kvfoundry.load(model, device=device, dtype=dtype)


def run(job: tuple[str, bool, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One method on one task in one column, at every budget: summary rows."""
    name, hidden, spec, settings = job
    from kvfoundry.evaluate.runner import evaluate
    from kvfoundry.evaluate.tasks.niah import NeedleTask

    model, tokenizer = _loaded(*(settings[name] for name in ("model", "device", "dtype", "threads")))
    task = NeedleTask(depths=DEPTHS, repeats=settings["repeats"], kind="word", max_new_tokens=16, **TASKS[name])
    with tempfile.TemporaryDirectory() as folder:
        rows = evaluate(
            model, tokenizer, [task], [spec], out=Path(folder), budgets=() if spec == "fullkv" else BUDGETS, seed=SEED,
            limit=settings["limit"], batch_size=settings["batch"], hide_question=hidden,
        ).rows  # fmt: skip
    return [{**row, "table": name, "question": "after" if hidden else "seen"} for row in rows]


def page(record: dict[str, Any]) -> str:
    """docs/quality.md: methods down, budgets across, for every task and column."""
    lines = [
        "# Quality of the methods",
        "",
        "Made by `python benchmarks/quality.py`; the figures are in `benchmarks/results/quality.json`.",
        f"Model {record['model']}, {record['dtype']} on {record['device']}, seed {SEED},",
        f"{record['items']} items per cell:",
        "share of the answer recovered, in per cent. *Seen*: the question is in the prompt when the method acts.",
        "*After*: the text is compressed before the question comes. The standard error of a cell is at most "
        f"{50 / record['items'] ** 0.5:.0f} points: differences below twice that are noise.",
        "",
    ]
    measured = {row["recipe"] for row in record["rows"]}
    known = {recipe_of(spec)[0] for spec in method_specs(Path("table"))}
    if known - measured:
        lines += [f"Not measured yet: {', '.join(sorted(known - measured))}.", ""]
    for name in TASKS:
        rows = [row for row in record["rows"] if row["table"] == name]
        full = {row["question"]: row["score"] for row in rows if row["method"] == "fullkv"}
        lines += [
            f"## {name}",
            "",
            f"Full cache: {100 * full.get('seen', float('nan')):.0f}.",
            "",
        ]
        if full.get("seen", 0.0) < 0.5:
            lines += ["The full cache itself fails here, so the task says nothing about methods: no table.", ""]
            continue
        lines += [
            "| method | " + " | ".join(f"seen {budget} | after {budget}" for budget in BUDGETS) + " |",
            "|---|" + "---|" * (2 * len(BUDGETS)),
        ]
        cells: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
        for row in rows:
            if row["method"] != "fullkv" and row["score"] is not None:
                cells[row["recipe"]][row["question"], row["budget"]] = row["score"]
        best = sorted(cells, key=lambda recipe: -sum(cells[recipe].values()))
        for recipe in best:
            numbers = [
                f"{100 * cells[recipe][column, budget]:.0f}" if (column, budget) in cells[recipe] else ""
                for budget in BUDGETS
                for column in ("seen", "after")
            ]
            lines.append(f"| `{recipe}` | " + " | ".join(numbers) + " |")
        lines.append("")
    return "\n".join(lines)


def recipe_of(method: str) -> tuple[str, int]:
    """The spec without its budget, and the budget."""
    import re

    found = re.search(r"budget=(\d+)", method)
    recipe = re.sub(r"budget=\d+(, )?", "", method).replace("()", "")
    recipe = re.sub(r"table='[^']*'", "table=measured", recipe)
    return recipe, int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only", nargs="*", default=[], help="names of methods")
    parser.add_argument("--table", help="head table for headkv, from `kvfoundry analyze heads`")
    parser.add_argument("--resume", action="store_true", help="add what --out does not hold yet")
    parser.add_argument("--out", type=Path, default=RESULTS)
    settings = vars(parser.parse_args())
    out = settings.pop("out")
    specs = method_specs(Path(settings["table"]) if settings["table"] else None)
    chosen = [spec for spec in specs if not settings["only"] or spec.split("(")[0] in settings["only"]]
    jobs = [
        (name, hidden, spec, settings) for spec in ["fullkv", *chosen] for name in TASKS for hidden in (False, True)
    ]
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if settings["resume"] else []
    done = {(row["table"], row["question"], row["recipe"]) for row in rows}
    jobs = [job for job in jobs if (job[0], "after" if job[1] else "seen", recipe_of(job[2])[0]) not in done]
    with multiprocessing.get_context("spawn").Pool(settings["jobs"]) as pool:
        for i, found in enumerate(pool.imap_unordered(run, jobs)):
            rows += found
            print(f"{i + 1}/{len(jobs)} {found[0]['table']} {found[0]['question']} {found[0]['method']}", flush=True)
            write(rows, settings, out)  # a run that is cut short keeps what it has


def write(rows: list[dict[str, Any]], settings: dict[str, Any], out: Path) -> None:
    """The record, and the page when it is the project's own record."""
    import torch
    import transformers

    for row in rows:
        row["recipe"], row["budget"] = recipe_of(row["method"])
    record = {
        "model": settings["model"],
        "dtype": settings["dtype"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
        "items": max(row["items"] for row in rows),
        "rows": sorted(rows, key=lambda row: (row["table"], row["question"], row["recipe"], row["budget"])),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    if out == RESULTS:
        PAGE.write_text(page(record))


if __name__ == "__main__":
    main()
