"""The board: RULER's needles, chains and word counts for the full cache and every method that drops rows.

    python benchmarks/board.py [--lengths 1024,2048] [--items 10] [--workers 4] [--resume]
    python benchmarks/board.py --lengths 4096 --items 50 --device cuda --workers 8

One run over the eight needle variants, vt, cwe and fwe: every method at three budgets, one of its prompts alone for the
times and the others together (`--together`). The run's folder is results/board_<lengths>; its report, its summary, and
what it was made with go to docs/board/<lengths>.html and .json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from quality import method_specs

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "smollm2_heads.json"
VARIANTS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
)  # fmt: skip
BUDGETS = (64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", default="1024,2048")
    parser.add_argument("--items", type=int, default=10, help="per task and length")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--together", type=int, default=1000)
    parser.add_argument("--timed", type=int, default=1)
    parser.add_argument("--workers", default="local")
    parser.add_argument("--only", nargs="*", default=[], help="names of methods")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "board")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    name = given.lengths.replace(",", "_")
    out = given.out or ROOT / "results" / f"board_{name}"

    from kvfoundry.evaluate.executors import ModelSource, worker_executor
    from kvfoundry.evaluate.results import META, REPORT, SUMMARY
    from kvfoundry.evaluate.runner import Progress, evaluate
    from kvfoundry.evaluate.tasks.ruler.task import RulerTask
    from kvfoundry.models import outline

    lengths = tuple(int(length) for length in given.lengths.split(","))
    tasks = [RulerTask(variant=variant, lengths=lengths, items_per_length=given.items) for variant in VARIANTS]
    specs = [spec for spec in method_specs(TABLE.relative_to(ROOT)) if "+" not in spec]
    specs = [spec for spec in specs if not given.only or spec.split("(")[0] in given.only]
    source = ModelSource(given.model, given.device, given.dtype)
    executor = worker_executor(given.workers, None, source)

    def show(progress: Progress) -> None:
        print(f"{progress.done}/{progress.total} {progress.seconds_left:.0f} s left", file=sys.stderr, flush=True)

    evaluate(
        *(source.load() if executor is None else outline(given.model)), tasks, ["fullkv", *specs], budgets=BUDGETS,
        out=out, seed=given.seed, batch_size=given.batch, together=given.together,
        timed=given.timed if given.together > 1 else 0, resume=given.resume, executor=executor, on_progress=show,
        arguments={"model": given.model, "device": given.device, "dtype": given.dtype, "workers": given.workers},
    )  # fmt: skip
    given.page.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / REPORT, given.page / f"{name}.html")
    record = {part: json.loads((out / file).read_text()) for part, file in (("run", META), ("summary", SUMMARY))}
    del record["run"]["command"]  # its arguments stand there in full
    (given.page / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
