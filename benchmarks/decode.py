"""A decode step on a CUDA GPU beside its roofline: the engine in a CUDA graph, compiled too, and transformers.

    python benchmarks/decode.py [--out benchmarks/results/decode.json] [--limit 115] [--arms graph compiled ...]

The shape is that of Llama-3.1-8B in bfloat16 with random weights; nothing is fetched. Caches are filled with random
rows, since what they hold does not change the time. First the engine's logits are compared with those of the plain path
for every method, in float32 on four layers of the same shape, where rounding does not hide a fault; one that fails is
reported, and the command exits with 1. A figure is the median over
steps, in milliseconds; the roofline beside it is (bytes of weights + bytes of rows) / measured copy bandwidth. Stored
bytes are set against the bytes of the rows that the budget allows. The file is written after every figure; what does
not fit into `--limit` seconds is left out and named. `--device cpu --config tiny` runs it all on a toy.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from record import OutOfTime, Record
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from kvfoundry import DecodeEngine, KVCache, attach, compat
from kvfoundry.engine.program import Program
from kvfoundry.layouts import DenseRows, Layout
from kvfoundry.layouts.ragged import RaggedRows

RESULTS = Path(__file__).resolve().parent / "results" / "decode.json"
# Logits of the same rows in float32, relative to the norm of the plain path's: products of a GPU may round to 10 bits.
TOLERANCE = {"cpu": 1e-4, "cuda": 3e-3}
GATE_LAYERS = 4
STEPS = 48
# Kinds of methods that keep a tenth of the rows, and rows that quest reads.
DROPPING = ("snapkv", "adakv", "h2o")
QUEST = 4096


@dataclass(frozen=True)
class Setting:
    """A model, and the texts that it decodes behind: (batch, tokens)."""

    config: LlamaConfig
    dtype: torch.dtype
    full: tuple[tuple[int, int], ...]
    kept: tuple[int, int]
    beside: tuple[int, int]
    gate: tuple[int, int]


def setting(name: str) -> Setting:
    if name == "tiny":
        config = LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
            head_dim=16, vocab_size=128, max_position_embeddings=4096, initializer_range=0.15,
        )  # fmt: skip
        return Setting(config, torch.float32, ((1, 64), (1, 256), (4, 128)), (1, 640), (1, 64), (2, 200))
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=262144, rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    full = ((1, 8192), (1, 32768), (1, 131072), (8, 32768))
    return Setting(config, torch.bfloat16, full, (1, 131072), (1, 8192), (2, 2000))


class Board(Record):
    """All figures so far."""

    def figure(
        self, arm: str, method: str, batch: int, tokens: int, times: list[float], read: int, **more: Any
    ) -> None:
        """times: seconds of steps; read: bytes that a step cannot do without."""
        seconds = statistics.median(times)
        roofline = read / self.content["copy_bytes_per_s"]
        spread = sorted(times)
        entry = {
            "arm": arm, "method": method, "batch": batch, "tokens": tokens, "ms": seconds * 1e3,
            "ms_p10": spread[len(times) // 10] * 1e3, "ms_p90": spread[len(times) * 9 // 10] * 1e3, "steps": len(times),
            "roofline_ms": roofline * 1e3, "times_roofline": seconds / roofline, **more,
        }  # fmt: skip
        self.content["figures"].append(entry)
        extra = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in more.items()
        )
        print(
            f"{arm:14s} {method:10s} b{batch} {tokens:7d}  {seconds * 1e3:8.3f} ms  roofline {roofline * 1e3:7.3f} "
            f"= {seconds / roofline:5.2f} x  {extra}",
            flush=True,
        )
        self.save()


@dataclass
class Bench:
    """A model, its sizes, and where results go."""

    board: Board
    model: PreTrainedModel
    setting: Setting
    device: torch.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that every step reads: all but the embedding, of which it reads one row."""
        embedding = self.model.get_input_embeddings().weight
        return sum(weight.nbytes for weight in self.model.parameters()) - embedding.nbytes

    def row_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows per head in every layer, keys and values."""
        config = self.setting.config
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        return layers * heads * rows * 2 * config.head_dim * self.setting.dtype.itemsize

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.setting.dtype)

    def rows(self, kind: str, batch: int, tokens: int, kept: int) -> Layout:
        """Random rows of one layer, as a method of this kind leaves them: `kept` per head on average."""
        config = self.setting.config
        heads, dim = config.num_key_value_heads, config.head_dim
        if kind == "adakv":
            shares = torch.rand(batch, heads, generator=torch.Generator().manual_seed(kept)) ** 3 + 0.05
            counts = (shares / shares.sum(dim=1, keepdim=True) * kept * heads).long().clamp(max=tokens)
            counts[:, -1] += kept * heads - counts.sum(dim=1)
            slots = int(counts.sum())
            places = torch.cat([torch.arange(int(n)) * tokens // int(n) for n in counts.flatten()]).int()
            keys, values = self.random(slots, dim), self.random(slots, dim)
            return RaggedRows(keys, values, places.to(self.device), counts, counts.clone(), {})
        lengths = torch.full((batch, heads), kept)
        positions = (torch.arange(kept, device=self.device) * tokens // kept).int().expand(batch, 1, kept).contiguous()
        columns = {}
        if kind == "h2o":
            columns["attention_sum"] = torch.rand(batch, heads, kept, device=self.device)
        keys, values = self.random(batch, heads, kept, dim), self.random(batch, heads, kept, dim)
        return DenseRows(keys, values, positions, lengths, columns)

    def cache(
        self, spec: str | None, kind: str, batch: int, tokens: int, kept: int, like: KVCache | None = None
    ) -> KVCache:
        """A cache that has seen a prompt of `tokens` tokens; with the rows of another one, if given."""
        cache = KVCache(self.model, spec)
        cache.expect_prompt(tokens)
        heads = self.setting.config.num_key_value_heads
        for number, layer in enumerate(cache.attention_layers):
            held = None if like is None else like.attention_layers[number].rows
            if kind == "kivi" and held is None:
                codec = layer.codec_for(self.setting.config.head_dim, self.setting.config.head_dim)
                assert codec is not None
                held = codec.store(self.rows(kind, batch, tokens, kept).view(), None)
            layer.hold(self.rows(kind, batch, tokens, kept) if held is None else held.shared(), tokens, heads)
        return cache

    def ids(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(3, self.setting.config.vocab_size, (batch, tokens), device=self.device)

    def times(self, step: Callable[[], Any], count: int) -> list[float]:
        """Seconds of every one of `count` steps that follow each other without a pause."""
        if self.device.type != "cuda":
            found = []
            for _ in range(count):
                began = time.perf_counter()
                step()
                found.append(time.perf_counter() - began)
            return found
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(then) / 1e3 for first, then in pairwise(events)]


def specs(tokens: int) -> dict[str, str | None]:
    """The methods whose step is timed, by kind, for texts of so many tokens."""
    kept = tokens // 10
    return {
        "full": None,
        "snapkv": f"snapkv(budget={kept}, window=8)",
        "adakv": f"adakv(budget={kept}, window=8)",
        "h2o": f"h2o(budget={kept}, window=8)",
        "kivi": "kivi(bits=2)",
        "quest": f"quest(budget={QUEST if tokens > 2 * QUEST else tokens // 64 * 16})",
    }


def gates(whole: Bench) -> None:
    """The engine says what the plain path says, and its graph what its plain step says."""
    bench = shallow(whole)
    batch, tokens = bench.setting.gate
    limit = TOLERANCE[bench.device.type]
    for kind, spec in specs(tokens).items():
        kept = tokens // 10 if kind in DROPPING else tokens
        plain = bench.cache(spec, kind, batch, tokens, kept)
        twin = bench.cache(spec, kind, batch, tokens, kept, like=plain)
        again = bench.cache(spec, kind, batch, tokens, kept, like=plain)
        ids = bench.ids(batch, tokens + 1)
        engine = DecodeEngine(bench.model, graph=False)
        program = engine.begin(twin, ids, 8)
        token, error = ids[:, -1:], 0.0
        for step in range(4):
            positions = torch.full_like(token, tokens + step)
            arguments = {compat.CACHE_ARGUMENT: plain}
            said = (
                bench.model(input_ids=token, position_ids=positions, use_cache=True, **arguments).logits[:, -1].float()
            )
            found = program.logits().float()
            error = max(error, float((found - said).norm() / said.norm()))
            token = said.argmax(dim=-1, keepdim=True)
            program.ids.copy_(token)
            program.position += 1
        bench.board.gate(f"{kind}: logits of 4 steps", error, limit)
        engine.clear()
        if bench.device.type == "cuda":
            graph_gate(bench, kind, again, ids)


def shallow(whole: Bench) -> Bench:
    """The same in float32 with few layers."""
    config = copy.deepcopy(whole.setting.config)
    config.num_hidden_layers = min(GATE_LAYERS, config.num_hidden_layers)
    setting = replace(whole.setting, config=config, dtype=torch.float32)
    model = built(setting, whole.device)
    attach(model)
    return Bench(whole.board, model, setting, whole.device)


def graph_gate(bench: Bench, kind: str, cache: KVCache, ids: Tensor) -> None:
    """A replayed step says what the same step says without a graph, whatever token it is given."""
    said: list[list[Tensor]] = []
    tokens = bench.ids(ids.shape[0], 10)
    for graph, own in ((False, cache.fork()), (True, cache)):
        engine = DecodeEngine(bench.model, graph=graph)
        program = engine.begin(own, ids, 12)
        said.append([])
        for number in range(10):
            program.ids.copy_(tokens[:, number : number + 1])
            program.advance()
            assert program.said is not None
            said[-1].append(program.said.float().clone())  # a replay writes where the last one did
        if graph and not program.is_recorded:
            bench.board.note(f"{kind}: {program.note}")
            bench.board.gate(f"{kind}: a graph is recorded", 1.0, 0.0)
        engine.clear()
    error = max(float((a - b).norm() / a.norm()) for a, b in zip(*said, strict=True))
    bench.board.gate(f"{kind}: logits of replays", error, TOLERANCE[bench.device.type])


def engine_step(bench: Bench, arm: str, kind: str, batch: int, tokens: int) -> None:
    """Time one shape."""
    bench.board.check_time()
    kept = tokens // 10 if kind in DROPPING else tokens
    cache = bench.cache(specs(tokens)[kind], kind, batch, tokens, kept)
    engine = DecodeEngine(bench.model, compile=arm == "compiled", room=1)
    began = time.perf_counter()
    program: Program = engine.begin(cache, bench.ids(batch, tokens + 1), STEPS + 8)
    for _ in range(5):
        program.advance()
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
        if not program.is_recorded:
            bench.board.note(f"{arm} {kind}: no graph: {program.note}")
    ready = time.perf_counter() - began
    times = bench.times(program.advance, STEPS)
    budget = bench.row_bytes(kept) * batch
    read = budget
    if kind == "kivi":
        read = engine.nbytes
    elif kind == "quest":  # the first two layers read everything, the others bounds (a row for each page) and pages
        share = (QUEST + tokens // 16) / tokens
        layers = bench.setting.config.num_hidden_layers
        read = int(budget * (2 + (layers - 2) * min(1.0, share)) / layers)
    bench.board.figure(
        arm, kind, batch, tokens, times, bench.weight_bytes + read,
        kept=kept, stored_bytes=engine.nbytes, stored_over_budget=engine.nbytes / budget, seconds_until_ready=ready,
    )  # fmt: skip


class Clock(StoppingCriteria):
    """When each token of `generate` is ready. Never stops anything."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, list[float]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def transformers_step(bench: Bench, arm: str) -> None:
    """transformers' own generate: eager with a DynamicCache of random rows, or StaticCache with its torch.compile."""
    bench.board.check_time()
    batch, tokens = bench.setting.beside
    config, model = bench.setting.config, bench.model
    model.set_attn_implementation("sdpa")
    try:
        for _ in range(1 if arm == "eager" else 2):  # the first call compiles
            options: dict[str, Any] = {"cache_implementation": "static"}
            if arm == "eager":
                filled = DynamicCache(config=config)
                for number in range(config.num_hidden_layers):
                    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
                    filled.update(bench.random(*shape), bench.random(*shape), number)
                options = {compat.CACHE_ARGUMENT: filled}
            clock = Clock(bench.device)
            ids = bench.ids(batch, tokens + 1)
            model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
                pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]), **options,
            )  # fmt: skip
        times = [then - first for first, then in pairwise(clock.times[4:])]
        read = bench.weight_bytes + bench.row_bytes(tokens) * batch
        bench.board.figure(f"transformers {arm}", "full", batch, tokens, times, read)
    finally:
        attach(model)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    big = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(big)
    rates = []
    for _ in range(7):
        if device.type == "cuda":
            first, then = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            target.copy_(big)
            then.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(then) / 1e3
        else:
            began = time.perf_counter()
            target.copy_(big)
            seconds = time.perf_counter() - began
        rates.append(2 * big.nbytes / seconds)
    return statistics.median(rates)


def built(chosen: Setting, device: torch.device) -> PreTrainedModel:
    """The model with random weights, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(chosen.dtype)
    try:
        with device:
            model = LlamaForCausalLM(chosen.config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def main() -> None:
    """Run the chosen arms, the quick ones first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=115.0, help="seconds after which nothing new is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", choices=["llama-3.1-8b", "tiny"], default="llama-3.1-8b")
    arms = ["graph", "eager", "compiled", "static"]
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
    parser.add_argument("--only", nargs="+", choices=list(specs(1)), default=list(specs(1)), help="methods")
    parser.add_argument("--tokens", nargs="+", type=int, help="of the default texts, those of so many tokens")
    parser.add_argument("--no-gate", action="store_true", help="leave out the comparisons (a repeated run)")
    arguments = parser.parse_args()
    device, chosen = torch.device(arguments.device), setting(arguments.config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here; --device cpu --config tiny runs the benchmark on a toy.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    board = Board(arguments.out, arguments.limit, device=name, transformers=transformers.__version__)
    board.content["copy_bytes_per_s"] = copy_rate(device)
    board.content["shape"] = {"config": arguments.config, "dtype": str(chosen.dtype)}
    board.note(f"{board.content['device']}: copies move {board.content['copy_bytes_per_s'] / 1e9:.0f} GB/s")
    model = built(chosen, device)
    attach(model)
    bench = Bench(board, model, chosen, device)
    board.note(f"model of {bench.weight_bytes / 1e9:.2f} GB of weights read per step")
    work: list[tuple[str, Callable[[], None]]] = []
    if not arguments.no_gate:
        work.append(("gates", lambda: gates(bench)))
    shapes = [("full", *shape) for shape in chosen.full if "full" in arguments.only]
    shapes += [(kind, *chosen.kept) for kind in arguments.only if kind != "full"]
    shapes = [shape for shape in shapes if not arguments.tokens or shape[2] in arguments.tokens]
    single = [shape for shape in shapes if shape[1] == 1]
    several = [shape for shape in shapes if shape[1] > 1]

    def steps(arm: str, group: list[tuple[str, int, int]]) -> list[tuple[str, Callable[[], None]]]:
        return [
            (f"{arm} {kind} b{batch} {tokens}", lambda k=kind, b=batch, t=tokens: engine_step(bench, arm, k, b, t))
            for kind, batch, tokens in group
            if arm in arguments.arms
        ]  # type: ignore[misc]

    work += steps("graph", single + several)
    work += [("eager", lambda: transformers_step(bench, "eager"))] if "eager" in arguments.arms else []
    work += steps("compiled", single)
    work += [("static", lambda: transformers_step(bench, "static"))] if "static" in arguments.arms else []
    work += steps("compiled", several)
    for number, (name, task) in enumerate(work):
        try:
            task()
        except OutOfTime:
            board.note(f"time is up; left out: {', '.join(left for left, _ in work[number:])}")
            break
        except Exception:
            board.note(f"{name} stopped: {traceback.format_exc(limit=-4)}")
            board.content["gates"][name] = {"error": "stopped", "passed": False}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    board.save()
    wrong = [name for name, gate in board.content["gates"].items() if not gate["passed"]]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
