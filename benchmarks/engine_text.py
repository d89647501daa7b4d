"""The engine's greedy text beside the plain loop's, on the embedded model: prompts of this project's own pages.

    python benchmarks/engine_text.py [--prompts 50] [--device cuda] [--compile] [--out FILE]

Counts, for each method, prompts whose answers are the same token for token. On a GPU the two paths round differently in
half precision, so both run in float32, where equal text is expected; with --dtype bfloat16 the share is reported as it
is. The file is written after every method.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kvfoundry

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine_text.json"
METHODS = [
    "fullkv",
    "snapkv(budget=0.3, window=16)",
    "adakv(budget=0.3, window=16)",
    "pyramidkv(budget=0.4, window=16)",
    "kvzip(budget=0.4)",
    "l2norm(budget=0.5)",
    "streamingllm(budget=0.4)",
    "h2o(budget=0.4, window=16)",
    "tova(budget=0.4)",
    "kivi(bits=4, residual=32)",
    "quest(budget=64)",
]


def passages(count: int) -> list[str]:
    """Pieces of the README and the pages under docs, 60 to 120 words each."""
    words = " ".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]).split()
    found, start = [], 0
    for number in range(count):
        size = 60 + 37 * number % 61
        found.append(" ".join(words[start : start + size]))
        start = (start + size) % max(1, len(words) - 200)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    model, tokenizer = kvfoundry.load(arguments.model)
    model.to(arguments.device, getattr(torch, arguments.dtype))
    prompts = passages(arguments.prompts)
    engine = kvfoundry.DecodeEngine(model, compile=arguments.compile)
    content: dict[str, Any] = {"command": "python " + " ".join(sys.argv), "torch": torch.__version__, "methods": {}}
    for spec in arguments.methods:
        answers, seconds = [], []
        for how in (False, engine):
            began = time.perf_counter()
            answers.append(
                kvfoundry.generate(
                    model, tokenizer, prompts, spec, max_new_tokens=arguments.tokens, batch_size=arguments.batch,
                    do_sample=False, engine=how, details=True,
                )
            )  # fmt: skip
            seconds.append(time.perf_counter() - began)
        plain, found = answers
        same = [a.token_ids == b.token_ids for a, b in zip(plain, found, strict=True)]
        served = sum(not any("plain loop" in note for note in b.notes) for b in found)
        content["methods"][spec] = {
            "prompts": len(same), "equal": sum(same), "served": served,
            "differs": [i for i, s in enumerate(same) if not s], "plain_s": seconds[0], "engine_s": seconds[1],
        }  # fmt: skip
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{spec:36s} {sum(same)}/{len(same)} equal, {served} by the engine, "
              f"plain {seconds[0]:.1f} s, engine {seconds[1]:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
