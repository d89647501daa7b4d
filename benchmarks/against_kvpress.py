"""The same prompts, the same model, the same number of kept rows: kvfoundry beside kvpress, method by method.

    python benchmarks/against_kvpress.py --rival-python PATH [--device auto] [--items 10] [--length 1024]

PATH is the Python of an environment of its own with kvpress 0.5.5 (it needs transformers below 5.3). Both sides
compress the text before the question is read, then answer greedily. Kept rows per head are equal by construction and
recorded by both. Writes benchmarks/results/against_kvpress.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "against_kvpress.json"
SEED = 23

# name -> (our spec with the number of rows left open, kvpress class, its arguments)
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snapkv": ("snapkv(budget={rows}, window=64, kernel=5)", "SnapKVPress", {"window_size": 64, "kernel_size": 5}),
    "streamingllm": (
        "streamingllm(budget={rows}, sinks=4)+schedule(prefill='end')",
        "StreamingLLMPress",
        {"n_sink": 4},
    ),
    "knorm": ("l2norm(budget={rows}, skip_layers=0)", "KnormPress", {}),
    "tova": ("tova(budget={rows})+schedule(prefill='end')", "TOVAPress", {}),
    "keydiff": ("keydiff(budget={rows})", "KeyDiffPress", {}),
    "lagkv": ("lagkv(budget={rows}, lag=128, sinks=4)", "LagKVPress", {"lag_size": 128, "n_sink": 4}),
    "expected attention": ("expected_attention(budget={rows})", "ExpectedAttentionPress", {}),
    "chunkkv over snapkv": (
        "chunkkv(budget={rows}, window=64, chunk=20)",
        "ChunkKVPress",
        {"press": "SnapKVPress", "chunk_length": 20},
    ),
    "adakv over snapkv": ("adakv(budget={rows}, window=64, kernel=5)", "AdaKVPress", {"press": "SnapKVPress"}),
    "kvzip": ("kvzip(budget={rows})", "KVzipPress", {}),
}


def prompts(tokenizer: Any, items: int, length: int) -> list[dict[str, Any]]:
    """Needle prompts split where the question begins, with the token ids that both sides read."""
    from kvfoundry.evaluate.prompts import encode_prompt, hidden_tokens
    from kvfoundry.evaluate.tasks.niah import NeedleTask

    depths = tuple(100 * (i + 0.5) / items for i in range(items))
    task = NeedleTask(lengths=(length,), depths=depths, kind="word", max_new_tokens=16)
    made = task.items(tokenizer, True, SEED)
    tail = max(hidden_tokens(tokenizer, item, True) for item in made)
    split = []
    for item in made:
        ids = encode_prompt(tokenizer, item.prompt, True)
        split.append(
            {
                "prompt": item.prompt,
                "context": ids[:-tail],
                "question": ids[-tail:],
                "references": list(item.references),
            }
        )
    return split


def ours(model: Any, tokenizer: Any, spec: str, items: list[dict[str, Any]], tail: int) -> dict[str, Any]:
    """Answers under our method; the rows are those after the text and before the question."""
    import kvfoundry

    answers, rows = [], []
    for item in items:
        found = kvfoundry.generate(
            model, tokenizer, [item["prompt"]], spec, 16, chat=True, hold_back=tail, details=True, do_sample=False
        )[0]
        answers.append(found.text)
        rows.append(found.kept_rows - tail)
    return {"answers": answers, "rows": sum(rows) / len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", required=True)
    parser.add_argument(
        "--model", default="smollm2", help="a name of kvfoundry.load; a folder when kvpress shall read it"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--items", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    import torch
    import transformers

    import kvfoundry
    from kvfoundry.evaluate.metrics import score_answers

    transformers.logging.set_verbosity_error()
    model, tokenizer = kvfoundry.load(arguments.model, device=arguments.device, dtype="float32")
    items = prompts(tokenizer, arguments.items, arguments.length)
    tail = len(items[0]["question"])
    pairs = {name: pair for name, pair in PAIRS.items() if not arguments.only or name in arguments.only}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model.save_pretrained(work / "model")
        jobs = [
            {"name": name, "press": press, "arguments": values, "rows": kept}
            for name, (_, press, values) in pairs.items()
            for kept in arguments.rows
        ]
        (work / "jobs.json").write_text(json.dumps({"jobs": jobs, "items": items, "device": str(model.device)}))
        script = Path(__file__).with_name("kvpress_arm.py")
        done = subprocess.run([arguments.rival_python, str(script), folder], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        theirs = json.loads((work / "answers.json").read_text())
        for job, rival in zip(jobs, theirs, strict=True):
            spec = PAIRS[job["name"]][0].format(rows=job["rows"])
            found = ours(model, tokenizer, spec, items, tail)
            score = {
                side: [score_answers(item["references"], answer)[0] for item, answer in zip(items, said, strict=True)]
                for side, said in (
                    ("kvfoundry", found["answers"]),
                    ("kvpress", map(tokenizer.decode, rival["answers"])),
                )
            }
            means = {side: sum(values) / len(values) for side, values in score.items()}
            rows.append(
                {
                    "method": job["name"], "rows": job["rows"], "spec": spec, "score": means, "item_scores": score,
                    "kept_rows": {"kvfoundry": found["rows"], "kvpress": rival["rows"]},
                }
            )  # fmt: skip
            print(f"{job['name']:22s} {job['rows']:5d}  {means}  {rows[-1]['kept_rows']}", flush=True)
    record = {
        "what": "needle prompts, text compressed before the question; share of the answer recovered",
        "items": arguments.items, "prompt_tokens": arguments.length, "seed": SEED,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "transformers": {"kvfoundry": transformers.__version__, "kvpress": theirs[0]["transformers"]},
        "kvpress": theirs[0]["kvpress"], "rows": rows,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
