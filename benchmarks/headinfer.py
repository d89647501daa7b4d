"""Decode steps whose rows come from host memory, beside the measured link: whole, as codes, and chosen pages alone.

    python benchmarks/headinfer.py [--out benchmarks/results/headinfer.json] [--limit 280] [--tokens 131072]

The shape is that of Llama-3.1-8B in bfloat16 with random weights; caches are filled with random rows. The link is
measured by pinned copies of 1 GiB. Every arm is decoded by the engine, on a GPU from a CUDA graph that holds copies
too. Its first steps, replays among them, are compared with those of the same method whose rows are on the device, by
the plain loop (logits, the same tokens fed to both; the command exits with 1 where that fails). Then steps are timed. A
figure is the median over them. bytes_per_token: what crossed the link to the device; share_of_link: bytes per second
over the link's. `--device cpu --config tiny` runs it all on a toy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from decode import QUEST, Bench, Board, setting
from torch import Tensor

from kvfoundry import DecodeEngine, KVCache, attach, compat
from kvfoundry.bench.random_weights import built
from kvfoundry.bench.record import OutOfTime
from kvfoundry.bench.timing import spread, step_times
from kvfoundry.bench.transfer import link_rate
from kvfoundry.engine.program import Program
from kvfoundry.layouts import Layout

RESULTS = Path(__file__).resolve().parent / "results" / "headinfer.json"
# compared: two that warm up, one that records, and replays
STEPS, COMPARED = 16, 5
# Logits of the same rows, relative to the norm of those with rows on the device: in bfloat16 32 layers were measured to
# round to 0.05, and to 0.08 over codes, where rows out of place give 1.4.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class Arm:
    """spec: with rows on the host; beside: the same on the device, None where an arm is timed alone. kind: of rows."""

    name: str
    spec: str
    beside: str | None
    kind: str


def arms(tokens: int) -> list[Arm]:
    read = QUEST if tokens > 2 * QUEST else tokens // 64 * 16
    return [
        Arm("full on the device", "fullkv", None, "full"),
        Arm("headinfer", "headinfer()", "fullkv", "full"),
        Arm("headinfer+kivi2", "headinfer(group=4)+kivi(bits=2)", "kivi(bits=2)", "kivi"),
        Arm("headinfer+kivi2, one head", "headinfer()+kivi(bits=2)", "kivi(bits=2)", "kivi"),
        Arm("headinfer+quest", f"quest(budget={read})+headinfer()", f"quest(budget={read})", "quest"),
        Arm(
            "headinfer+quest, all layers",
            f"quest(budget={read}, skip_layers=0)+headinfer()",
            f"quest(budget={read}, skip_layers=0)",
            "quest",
        ),
    ]


def said(bench: Bench, cache: KVCache, token: Tensor) -> Tensor:
    """Logits behind one more token."""
    position = torch.full_like(token, cache.seen_tokens)
    output = bench.model(input_ids=token, position_ids=position, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
    logits: Tensor = output.logits[:, -1].float()
    return logits


def moved(bench: Bench, arm: Arm, tokens: int, rows: list[Layout]) -> KVCache:
    """A cache under the arm's method that holds these rows; they are given up one by one."""
    cache = KVCache(bench.model, arm.spec)
    cache.expect_prompt(tokens)
    heads = bench.setting.config.num_key_value_heads
    for layer in cache.attention_layers:
        layer.hold(rows.pop(0).shared(), tokens, heads)
    return cache


def begun(bench: Bench, arm: Arm, tokens: int) -> tuple[KVCache, DecodeEngine, Program]:
    """The arm's cache in an engine, after it said what the method says on the device, whose memory is free again."""
    plain = bench.cache(arm.beside or arm.spec, arm.kind, 1, tokens, tokens)
    rows = [layer.rows.shared() for layer in plain.attention_layers if layer.rows is not None]
    began = time.perf_counter()
    cache = moved(bench, arm, tokens, rows)
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    moving = time.perf_counter() - began
    bench.board.note(f"{arm.name}: {cache.host_nbytes / 1e9:.2f} GB moved to the host in {moving:.1f} s")
    engine = DecodeEngine(bench.model, room=1)
    program = engine.begin(cache, bench.ids(1, tokens + 1), COMPARED + STEPS + 8)
    error, same = 0.0, 0
    for _ in range(COMPARED):
        expected = said(bench, plain, program.ids.clone())
        program.advance()
        assert program.said is not None
        found = program.said.float()
        error = max(error, float((found - expected).norm() / expected.norm()))
        same += int(torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1)))
    bench.board.gate(f"{arm.name}: logits of {COMPARED} steps", error, TOLERANCE[bench.setting.dtype])
    how = "replays of a graph" if program.is_recorded else f"no graph ({program.note})"
    bench.board.note(f"{arm.name}: {how}; {same} of {COMPARED} tokens are those of {arm.beside or arm.spec}")
    return cache, engine, program


def timed(bench: Bench, arm: Arm, tokens: int, link: float) -> None:
    """One arm."""
    bench.board.check_time()
    cuda = bench.device.type == "cuda"
    cache, engine, program = begun(bench, arm, tokens)
    weights = sum(weight.nbytes for weight in bench.model.parameters())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    sent = cache.prompt.rings.link_nbytes[0]
    times = step_times(program.advance, STEPS, bench.device)
    sent = (cache.prompt.rings.link_nbytes[0] - sent) // STEPS
    seconds = statistics.median(times)
    ring = program.cache.ring
    entry = {
        "arm": arm.name, "method": arm.spec, "tokens": tokens, **spread(times),
        "bytes_per_token": sent, "bytes_per_s": sent / seconds, "share_of_link": sent / seconds / link,
        "device_kv_bytes": engine.nbytes, "ring_bytes": cache.prompt.rings.nbytes,
        "host_kv_bytes": 0 if ring is None else program.cache.host_nbytes,
        "head_bytes": bench.row_bytes(tokens) // bench.setting.config.num_hidden_layers
        // bench.setting.config.num_key_value_heads,
        "peak_bytes_over_weights": torch.cuda.max_memory_allocated() - weights if cuda else None,
    }  # fmt: skip
    bench.board.content["figures"].append(entry)
    bench.board.save()
    print(
        f"{arm.name:28s} {seconds * 1e3:8.2f} ms  {sent / 1e9:6.2f} GB a token  {sent / seconds / 1e9:6.1f} GB/s = "
        f"{sent / seconds / link:4.0%} of the link  "
        f"device {engine.nbytes / 1e6:8.1f} MB  host {entry['host_kv_bytes'] / 1e9:.2f} GB",
        flush=True,
    )
    engine.clear()


def conclude(bench: Board) -> None:
    """How many times faster than streaming all rows whole."""
    ms = {figure["arm"]: figure["ms"] for figure in bench.content["figures"]}
    if "headinfer" in ms:
        bench.content["times_headinfer"] = {name: ms["headinfer"] / own for name, own in ms.items()}
        bench.note(", ".join(f"{name}: {ms['headinfer'] / own:.2f} x headinfer" for name, own in ms.items()))


@torch.inference_mode()
def main() -> None:
    """Run the chosen arms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=280.0, help="seconds after which nothing new is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", choices=["llama-3.1-8b", "tiny"], default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, help="131072, and 640 of the toy")
    parser.add_argument("--arms", nargs="+", type=int, help="numbers of arms, from 0 on, in the order of the file")
    arguments = parser.parse_args()
    device, chosen = torch.device(arguments.device), setting(arguments.config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here; --device cpu --config tiny runs the benchmark on a toy.")
    tokens = arguments.tokens or (131072 if arguments.config != "tiny" else 640)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    board = Board(arguments.out, arguments.limit, device=name, transformers=transformers.__version__)
    link = board.content["link_bytes_per_s"] = link_rate(device)
    board.content["shape"] = {"config": arguments.config, "dtype": str(chosen.dtype), "tokens": tokens}
    board.note(f"{name}: pinned copies bring {link / 1e9:.1f} GB/s to the device")
    model = built(chosen.config, chosen.dtype, device)
    attach(model)
    bench = Bench(board, model, chosen, device)
    work = [arm for number, arm in enumerate(arms(tokens)) if not arguments.arms or number in arguments.arms]
    for number, arm in enumerate(work):
        try:
            timed(bench, arm, tokens, link)
        except OutOfTime:
            board.note(f"time is up; left out: {', '.join(left.name for left in work[number:])}")
            break
        except Exception:
            board.note(f"{arm.name} stopped: {traceback.format_exc(limit=-4)}")
            board.content["gates"][arm.name] = {"error": "stopped", "passed": False}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    conclude(board)
    board.save()
    if board.wrong:
        raise SystemExit(f"not right: {', '.join(board.wrong)}")


if __name__ == "__main__":
    main()
