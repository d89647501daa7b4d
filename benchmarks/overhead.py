"""Cost of the layer: the full cache through kvfoundry against transformers' DynamicCache with SDPA, in one process.

    python benchmarks/overhead.py [--model smollm2] [--lengths 512 1024 2048 4096] [--rounds 5] [--new-tokens 16]

Prefill and decode are timed in turn, A B A B, and the ratio is taken pair by pair: machines drift, pairs do not. Writes
benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import kvfoundry

RESULTS = Path(__file__).resolve().parent / "results" / "overhead.json"


@torch.inference_mode()
def timed(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> tuple[float, float, int]:
    """(prefill seconds, seconds per decode step, last token) of one greedy run."""
    start = time.perf_counter()
    token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return prefill, (time.perf_counter() - start) / new_tokens, int(token)


def arm(model: Any, ours: bool, ids: torch.Tensor, new_tokens: int) -> tuple[float, float, int]:
    """One run under our attention and cache, or under the model's own with DynamicCache."""
    if ours:
        with kvfoundry.attach(model):
            return timed(model, ids, kvfoundry.KVCache(model), new_tokens)
    return timed(model, ids, transformers.DynamicCache(config=model.config), new_tokens)


def compare(model: Any, length: int, rounds: int, new_tokens: int) -> dict[str, Any]:
    """Median times of both arms and the median of the pairwise ratios at one prompt length."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(100, model.config.vocab_size - 100, (1, length), generator=generator)
    arm(model, True, ids[:, :64], 4)
    arm(model, False, ids[:, :64], 4)
    pairs = []
    for i in range(rounds):
        order = (True, False) if i % 2 else (False, True)
        runs = {ours: arm(model, ours, ids, new_tokens) for ours in order}
        if runs[True][2] != runs[False][2]:
            raise SystemExit(f"the arms disagree on a token at {length} tokens: no ratio is printed on a red check.")
        pairs.append((runs[True], runs[False]))

    def median(index: int, side: int) -> float:
        return statistics.median(pair[side][index] for pair in pairs)

    def ratio(index: int) -> float:
        return statistics.median(ours[index] / theirs[index] for ours, theirs in pairs)

    return {
        "tokens": length,
        "prefill_ratio": round(ratio(0), 4),
        "decode_ratio": round(ratio(1), 4),
        "prefill_seconds": {"kvfoundry": round(median(0, 0), 4), "DynamicCache": round(median(0, 1), 4)},
        "decode_ms": {"kvfoundry": round(1e3 * median(1, 0), 3), "DynamicCache": round(1e3 * median(1, 1), 3)},
        "pairs": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    model, _ = kvfoundry.load(arguments.model, device="cpu")
    rows = []
    for length in arguments.lengths:
        rows.append(compare(model, length, arguments.rounds, arguments.new_tokens))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        "what": "full cache through kvfoundry over DynamicCache with SDPA; ratio of times, pair by pair",
        "model": arguments.model,
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
