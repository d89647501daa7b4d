"""Blending and the tiers of the store on a GPU, with random weights in the shape of an 8-billion model.

    python benchmarks/blend_speed_device.py --limit 80                         on a CUDA device
    python benchmarks/blend_speed_device.py --device cpu --config tiny --passages 3 --tokens 64 --lengths 64 128 \\
        --out tiny.json                                                        the same path, without one

What is measured, in this order:

- time to the first token of a prompt of stored passages, blended from the device tier and from pinned host memory, over
  that of the whole prompt in the same round; looking up, moving, choosing, computing again and reading the question are
  all inside;
- bytes per second of the host tier on their way to the device, over those of one large pinned copy;
- a chunk from the disk tier to the device against reading its passage again, by length.

Nothing is timed when the blend of ratio 1 does not give the logits of the whole prompt. The JSON is written after every
round, so a run that is cut short leaves what it has; a step that would begin behind --limit is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from store_speed import forget
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import blend_chunks
from kvfoundry.chunks.passage import read_passage

RESULTS = Path(__file__).resolve().parent / "results" / "blend_speed_device.json"
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    },
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
ARMS = (
    ("device", "blend(ratio=0.15)"),
    ("host", "blend(ratio=0.15)"),
    ("device", "blend(ratio=0.15, select=query_aware)"),
    ("host", "blend(ratio=0.15, select=query_aware)"),
    ("device", "blend(ratio=0, select=none)"),
    ("host", "blend(ratio=0, select=none)"),
    ("device", "blend(ratio=0.15, check=(1, 3))"),
    ("device", "blend(ratio=0.15, select=first_k_per_chunk)"),
)


def random_model(config: str, device: torch.device) -> LlamaForCausalLM:
    """A Llama of this shape in bfloat16 (float32 on a CPU) with random weights, made where it is used."""
    shape = LlamaConfig(
        **SHAPES[config], max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=ROPE,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


class Clock:
    """Seconds on a device, and how many are left."""

    def __init__(self, device: torch.device, limit: float):
        self.device, self.began, self.limit = device, time.perf_counter(), limit

    @property
    def left(self) -> float:
        return self.began + self.limit - time.perf_counter()

    def seconds(self, action: Callable[[], Any]) -> float:
        """Seconds of an action, everything that it has queued on the device included."""
        self._finish()
        start = time.perf_counter()
        action()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Bench:
    """One model, one prompt of passages, and their chunks in a store of device memory and one of host memory."""

    def __init__(self, model: LlamaForCausalLM, clock: Clock, passages: int, tokens: int, question: int):
        self.model, self.clock, self.device = model, clock, clock.device
        self.passages = [self._ids(tokens, number) for number in range(passages)]
        self.question = self._ids(question, passages)
        started = time.perf_counter()
        self.identity = kvfoundry.Identity.of(model)
        self.identity_seconds = round(time.perf_counter() - started, 3)
        self.keys = [self.identity.key(own) for own in self.passages]
        chunks = [read_passage(model, own) for own in self.passages]
        self.chunk_bytes = sum(chunk.nbytes for chunk in chunks)
        size = int(1.1 * self.chunk_bytes) + (1 << 20)
        self.stores = {name: kvfoundry.ChunkStore(f"{name}:{size}") for name in ("device", "host")}
        for store in self.stores.values():
            for key, chunk in zip(self.keys, chunks, strict=True):
                if not store.put(key, chunk):
                    raise SystemExit("a chunk did not fit into its store.")

    def _ids(self, tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(100, self.model.config.vocab_size - 1, (tokens,), generator=generator)

    def read(self, ids: Tensor, cache: Any, past: int = 0) -> Tensor:
        """Logits [vocabulary] behind the last of these tokens; their greatest is known when this returns."""
        mask = torch.ones(1, past + ids.shape[1], dtype=torch.long, device=self.device)
        how = {"attention_mask": mask, "use_cache": True, "logits_to_keep": 1, compat.CACHE_ARGUMENT: cache}
        logits = self.model(ids.to(self.device), **how).logits[0, -1]
        logits.argmax().item()
        return logits

    def whole(self, cache: Any = None) -> Tensor:
        """The prompt read as it is."""
        ids = torch.cat([*self.passages, self.question])[None]
        return self.read(ids, kvfoundry.KVCache(self.model) if cache is None else cache)

    def blended(self, tier: str, spec: str) -> Tensor:
        """The prompt blended from the chunks of a tier."""
        found = [self.stores[tier].get(key) for key in self.keys]
        chunks = [chunk for chunk in found if chunk is not None]
        assert len(chunks) == len(self.keys), "a chunk is missing from the store"
        blended = blend_chunks(self.model, [chunks], [self.question], blend=spec)
        return self.read(blended.question_ids, blended.cache, blended.context_ids.shape[1])

    def apart(self) -> float:
        """How far the logits of ratio 1 are from those of the whole prompt, as a share of their greatest."""
        wanted, found = self.whole().float(), self.blended("host", "blend(ratio=1.0)").float()
        return float((found - wanted).abs().max() / wanted.abs().max())

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def first_tokens(bench: Bench, rounds: int, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Seconds of every arm and their share of the whole prompt, round by round."""
    clock = bench.clock
    arms: dict[tuple[str, str], Callable[[], Any]] = {
        ("", "whole prompt"): bench.whole,
        ("", "whole prompt, transformers' own cache"): lambda: bench.whole(DynamicCache()),
        **{arm: lambda arm=arm: bench.blended(*arm) for arm in ARMS},
    }
    for action in arms.values():  # warm
        action()
    times: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds):
        if turn and clock.left < 0:
            return
        for arm in arms if turn % 2 == 0 else reversed(arms):
            times[arm].append(clock.seconds(arms[arm]))
        whole = times["", "whole prompt"]
        keep(
            [
                {
                    "tier": tier,
                    "arm": spec,
                    "seconds": round(statistics.median(own), 4),
                    "share_of_whole": round(statistics.median(a / b for a, b in zip(own, whole, strict=True)), 4),
                    "shares": [round(a / b, 4) for a, b in zip(own, whole, strict=True)],
                }
                for (tier, spec), own in times.items()
            ]
        )


def to_device(bench: Bench, rounds: int = 5) -> dict[str, float]:
    """Gigabytes per second of the host tier to the device, and of one large copy from pinned memory."""
    clock, cuda = bench.clock, bench.device.type == "cuda"
    large = torch.empty(min(bench.chunk_bytes, 1 << 30), dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(large, device=bench.device)
    held: list[Any] = []

    def load() -> None:
        held[:] = [bench.stores["host"].get(key, device=bench.device) for key in bench.keys]

    for action in (load, load):
        clock.seconds(action)
    link = large.numel() / min(clock.seconds(lambda: target.copy_(large, non_blocking=True)) for _ in range(rounds))
    tier = bench.chunk_bytes / min(clock.seconds(load) for _ in range(rounds))
    return {"link": round(link / 1e9, 2), "host_tier": round(tier / 1e9, 2), "share_of_link": round(tier / link, 3)}


def disk_row(bench: Bench, identity: kvfoundry.Identity, method: str, length: int, folder: Path) -> dict[str, Any]:
    """A chunk of one passage from disk to the device, as rows that attention reads, against reading the passage."""
    clock, model = bench.clock, bench.model
    ids = bench._ids(length, 1000 + length)
    read_passage(model, ids, method)
    recompute = min(clock.seconds(lambda: read_passage(model, ids, method)) for _ in range(3))
    chunk = read_passage(model, ids, method)
    key = identity.key(ids)
    with kvfoundry.ChunkStore(f"disk:{folder / f'{method}-{length}'}:{int(1.2 * chunk.nbytes) + (4 << 20)}") as store:
        put = clock.seconds(lambda: store.put(key, chunk))

        def load() -> None:
            found = store.get(key, device=bench.device)
            assert found is not None, "the chunk is missing from the disk tier"
            found.plain(model)

        load()
        warm = min(clock.seconds(load) for _ in range(3))
        forget(folder)
        cold = clock.seconds(load)
        store.clear()
    return {
        "method": method,
        "tokens": length,
        "megabytes": round(chunk.nbytes / 1e6, 1),
        "recompute_ms": round(1e3 * recompute, 1),
        "put_ms": round(1e3 * put, 1),
        "get_ms": round(1e3 * warm, 1),
        "get_cold_ms": round(1e3 * cold, 1),
        "get_over_recompute": round(warm / recompute, 3),
        "get_cold_over_recompute": round(cold / recompute, 3),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", choices=SHAPES, default="8b")
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--question", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--methods", nargs="*", default=["fullkv", "int8"], help="of the chunks on disk")
    parser.add_argument("--folder", type=Path, help="where the disk tier lies; a temporary folder by default")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which no further step begins")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    clock = Clock(device, options.limit)
    record: dict[str, Any] = {
        "what": "time to first token over that of the whole prompt; GB/s to the device; disk tier against recompute",
        "command": " ".join(["python", "benchmarks/blend_speed_device.py", *sys.argv[1:]]),
        "config": options.config,
        "dtype": "torch.bfloat16" if device.type == "cuda" else "torch.float32",
        "passages": options.passages,
        "tokens_per_passage": options.tokens,
        "question_tokens": options.question,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "left_out": [],
    }

    def keep(**found: Any) -> None:
        record.update(found, seconds=round(time.perf_counter() - clock.began, 1))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        for name, value in found.items():
            print(f"{record['seconds']:6.1f} s  {name}: {json.dumps(value)}", flush=True)

    bench = Bench(random_model(options.config, device), clock, options.passages, options.tokens, options.question)
    keep(chunk_bytes=bench.chunk_bytes, identity_seconds=bench.identity_seconds)
    keep(apart_at_ratio_1=round(apart := bench.apart(), 5))
    if apart > (0.2 if device.type == "cuda" else 1e-3):  # 32 layers of bfloat16 round so much, and not more
        raise SystemExit(f"blending with ratio 1 is {apart:.2g} away from the whole prompt: no time is written.")
    first_tokens(bench, options.rounds, lambda rows: keep(first_token=rows))
    if clock.left > 0:
        keep(gigabytes_per_second=to_device(bench))
    else:
        record["left_out"].append("gigabytes per second")
    bench.close()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for method in options.methods:
            took, identity = 0.0, kvfoundry.Identity.of(bench.model, method=method)
            for length in options.lengths:
                if clock.left < 2.5 * took:  # a length takes about twice as long as the one before
                    record["left_out"].append(f"disk: {method}, {length} tokens")
                    continue
                began = time.perf_counter()
                rows.append(disk_row(bench, identity, method, length, Path(folder)))
                took = time.perf_counter() - began
                keep(disk=rows)
    keep(finished=True)


if __name__ == "__main__":
    main()
