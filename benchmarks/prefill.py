"""A long prompt on a CUDA GPU: what methods that look at it add to the time and the memory of reading it.

    python benchmarks/prefill.py [--tokens 32768] [--limit 60] [--out benchmarks/results/prefill.json]

The shape is that of Llama-3.1-8B in bfloat16 with random weights. Every arm reads the same ids in one call, its rounds
in turn with the others'; a figure is the median, its ratio that to transformers' own flash prefill in the same round.
extra_bytes: peak of the call above the weights and the rows of the full cache. `--device cpu --config tiny` is a toy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from decode import Bench, Board, built, copy_rate, setting
from record import OutOfTime
from transformers import DynamicCache

from kvfoundry import KVCache, attach, compat

RESULTS = Path(__file__).resolve().parent / "results" / "prefill.json"


def arms(tokens: int) -> dict[str, str | None]:
    """Specs by name; None for transformers' own cache and attention."""
    kept = tokens // 10
    return {
        "transformers": None,
        "full": "fullkv",
        "snapkv": f"snapkv(budget={kept})",
        "adakv": f"adakv(budget={kept})",
        "h2o": f"h2o(budget={kept})",
        "kivi": "kivi(bits=2)",
        "quest": "quest(budget=4096)",
    }


def read(bench: Bench, spec: str | None, ids: torch.Tensor) -> dict[str, Any]:
    """Read the ids once. Returns seconds, peak and stored bytes."""
    cuda = bench.device.type == "cuda"
    bench.model.set_attn_implementation("sdpa")
    if spec is not None:
        attach(bench.model)
    cache: Any = DynamicCache(config=bench.setting.config) if spec is None else KVCache(bench.model, spec)
    if spec is not None:
        cache.expect_prompt(ids.shape[1])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    bench.model(
        ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache}
    )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    full = bench.row_bytes(ids.shape[1])
    return {
        "seconds": seconds,
        "extra_bytes": max(0, peak - full),
        "stored_bytes": full if spec is None else cache.nbytes,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which nothing new is begun")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", choices=["llama-3.1-8b", "tiny"], default="llama-3.1-8b")
    arguments = parser.parse_args()
    device, chosen = torch.device(arguments.device), setting(arguments.config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    board = Board(arguments.out, arguments.limit, device=name, transformers=transformers.__version__)
    board.content["copy_bytes_per_s"] = copy_rate(device)
    board.content["shape"] = {"config": arguments.config, "dtype": str(chosen.dtype), "tokens": arguments.tokens}
    bench = Bench(board, built(chosen, device), chosen, device)
    ids = bench.ids(1, arguments.tokens)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms(arguments.tokens)}
    try:
        for turn in range(arguments.rounds + 1):  # the first warms up
            for name, spec in arms(arguments.tokens).items():
                if turn > 1:
                    board.check_time()
                one = read(bench, spec, ids)
                if turn:
                    found[name].append(one)
    except OutOfTime:
        board.note("time is up")
    plain = [one["seconds"] for one in found["transformers"]]
    for name, rounds in found.items():
        seconds = [one["seconds"] for one in rounds]
        board.content["figures"].append(
            {
                "arm": name, "spec": arms(arguments.tokens)[name], "tokens": arguments.tokens,
                "seconds": statistics.median(seconds), "rounds": seconds,
                "times_transformers": statistics.median(a / b for a, b in zip(seconds, plain, strict=False)),
                "extra_bytes": max(one["extra_bytes"] for one in rounds), "stored_bytes": rounds[-1]["stored_bytes"],
            }
        )  # fmt: skip
        print({key: value for key, value in board.content["figures"][-1].items() if key != "rounds"}, flush=True)
    board.save()


if __name__ == "__main__":
    main()
