"""A stored chunk against reading its passage again: times of put and get for each tier, and of the forward pass.

    python benchmarks/store_speed.py [--model smollm2] [--lengths 256 1024 4096] [--rounds 5] [--redis redis://127.0.0.1]

Every get is checked bit for bit against what was put before a time is written. "disk cold" is read after the kernel was
told to forget the file. Writes benchmarks/results/store_speed.json and the table of docs/store.md; --tables only renews
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvfoundry
from kvfoundry.chunks import ChunkKV, ChunkStore, Identity
from kvfoundry.chunks.identity import ChunkKey
from kvfoundry.chunks.passage import read_passage

RESULTS = Path(__file__).resolve().parent / "results" / "store_speed.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "store.md"


def same(one: ChunkKV | None, other: ChunkKV) -> bool:
    """Bit for bit."""
    if one is None:
        return False
    left, right = one.tensors(), other.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def seconds(action: Callable[[], Any], rounds: int, before: Callable[[], Any] = lambda: None) -> float:
    """The least time of an action over some rounds, each after `before`: a shared machine only ever adds."""
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def forget(folder: Path) -> None:
    """Ask the kernel to drop its copies of the files."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tier_times(spec: str, key: ChunkKey, chunk: ChunkKV, rounds: int, folder: Path | None = None) -> dict[str, float]:
    """Milliseconds of put and get in a store of one tier."""
    with ChunkStore(spec) as store:
        put = seconds(lambda: store.put(key, chunk), rounds, lambda: store.invalidate(key))
        if not same(store.get(key), chunk):
            raise SystemExit(f"{spec}: what comes back is not what was put; no time is written on a red check.")
        told = {"put_ms": put, "get_ms": seconds(lambda: store.get(key), rounds)}
        if folder is not None:
            told["get_cold_ms"] = seconds(lambda: store.get(key), rounds, lambda: forget(folder))
        store.clear()
    return {name: round(1e3 * value, 2) for name, value in told.items()}


def measure(model: Any, tokenizer: Any, method: str, length: int, rounds: int, redis: str | None) -> dict[str, Any]:
    """One passage length under one method."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(100, model.config.vocab_size - 100, (length,), generator=generator)
    key = Identity.of(model, tokenizer, method).key(ids)
    chunk = read_passage(model, ids, method)
    row: dict[str, Any] = {"method": method, "tokens": length, "megabytes": round(chunk.nbytes / 1e6, 2)}
    with tempfile.TemporaryDirectory() as folder:
        size = 4 * chunk.nbytes + (1 << 20)
        specs = {"host": f"host:{size}", "disk": f"disk:{folder}/kv:{size}"}
        if redis is not None:
            specs["redis"] = f"{redis}?size={size}&timeout=60&prefix=kvfoundry-bench"
        for name, spec in specs.items():
            row[name] = tier_times(spec, key, chunk, rounds, Path(folder) if name == "disk" else None)
    row["recompute_ms"] = round(1e3 * seconds(lambda: read_passage(model, ids, method), max(2, rounds // 3)), 1)
    row["recompute_over_disk_get"] = round(row["recompute_ms"] / row["disk"]["get_ms"], 1)
    return row


def write_table(told: dict[str, Any]) -> None:
    """Renew the table of docs/store.md."""
    lines = [
        f"{told['model']} in {told['dtype'].removeprefix('torch.')}, {told['threads']} thread(s) on {told['machine']}; "
        f"milliseconds, the least of the rounds, put / get. Cold: after the kernel was told to forget the file.",
        "",
        "| method | tokens | MB | host | disk | disk, cold | Redis | reading the passage | over disk |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in told["rows"]:
        host, disk, redis = row["host"], row["disk"], row.get("redis")
        away = "" if redis is None else f"{redis['put_ms']:.0f} / {redis['get_ms']:.0f}"
        lines.append(
            f"| `{row['method']}` | {row['tokens']} | {row['megabytes']:.1f} | {host['put_ms']:.1f} / "
            f"{host['get_ms']:.2f} | {disk['put_ms']:.0f} / {disk['get_ms']:.0f} | {disk['get_cold_ms']:.0f} | {away} "
            f"| {row['recompute_ms']:.0f} | {row['recompute_over_disk_get']:.0f} x |"
        )
    pattern = r"(<!-- speed:begin.*?-->\n).*?(<!-- speed:end -->)"
    text = re.sub(pattern, lambda m: m[1] + "\n".join(lines) + "\n" + m[2], PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--methods", nargs="+", default=["fullkv", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--redis", help="address of a Redis that may be written to, for example redis://127.0.0.1:6379")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="renew the table from the results that are there")
    options = parser.parse_args()
    if options.tables:
        write_table(json.loads(options.out.read_text()))
        return
    model, tokenizer = kvfoundry.load(options.model)
    start = time.perf_counter()
    Identity.of(model, tokenizer)
    told: dict[str, Any] = {
        "what": "put and get of one chunk by tier, against reading the passage again; least of the rounds",
        "model": options.model,
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "identity_seconds": round(time.perf_counter() - start, 3),
        "rows": [],
    }
    for method in options.methods:
        for length in options.lengths:
            row = measure(model, tokenizer, method, length, options.rounds, options.redis)
            told["rows"].append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(told, indent=1) + "\n")
    write_table(told)


if __name__ == "__main__":
    main()
