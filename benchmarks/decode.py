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
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList

from kvfoundry import DecodeEngine, KVCache, attach, compat
from kvfoundry.bench.gate import TOLERANCE, engine_error, replay_error
from kvfoundry.bench.random_rows import Maker, filled, of_transformers
from kvfoundry.bench.random_weights import built, shallow
from kvfoundry.bench.record import OutOfTime, Record
from kvfoundry.bench.roofline import Roofline, row_bytes, weight_bytes
from kvfoundry.bench.timing import Clock, step_times
from kvfoundry.bench.transfer import copy_rate
from kvfoundry.engine.program import Program
from kvfoundry.layouts import Layout
from kvfoundry.planning.geometry import geometry
from kvfoundry.planning.known import KNOWN

RESULTS = Path(__file__).resolve().parent / "results" / "decode.json"
GATE_LAYERS = 4
STEPS = 48
# Kinds of methods that keep a tenth of the rows, and rows that quest reads.
DROPPING = ("snapkv", "adakv", "h2o")
QUEST = 4096


@dataclass(frozen=True)
class Setting:
    """A model, and the texts that it decodes behind: (batch, tokens)."""

    config: PretrainedConfig
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
    config = KNOWN[name]()
    config.max_position_embeddings = 262144
    full = ((1, QUEST), (1, 8192), (1, 32768), (1, 131072), (8, 32768))
    return Setting(config, torch.bfloat16, full, (1, 131072), (1, 8192), (2, 2000))


class Board(Record):
    """All figures so far."""

    def figure(
        self, arm: str, method: str, batch: int, tokens: int, times: list[float], read: int, **more: Any
    ) -> None:
        """times: seconds of steps; read: bytes that a step cannot do without."""
        rate = Roofline(self.content["copy_bytes_per_s"])
        entry = {
            "arm": arm, "method": method, "batch": batch, "tokens": tokens, **rate.beside(times, read), **more
        }  # fmt: skip
        self.content["figures"].append(entry)
        extra = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in more.items()
        )
        print(
            f"{arm:14s} {method:10s} b{batch} {tokens:7d}  {entry['ms']:8.3f} ms  roofline {entry['roofline_ms']:7.3f} "
            f"= {entry['times_roofline']:5.2f} x  {extra}",
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
        """Bytes of the weights that every step reads."""
        return weight_bytes(self.model)

    def row_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows per head in every layer, keys and values."""
        return row_bytes(geometry(self.model), rows, self.setting.dtype.itemsize)

    def rows(self, kind: str, batch: int, tokens: int, kept: int) -> Layout:
        """Random rows of one layer, as a method of this kind leaves them: `kept` per head on average."""
        config, make = self.setting.config, Maker(batch, tokens, self.setting.dtype, self.device)
        sizes = config.num_key_value_heads, config.head_dim, config.head_dim
        if kind == "adakv":
            return make.ragged(*sizes, kept)
        return make.dense(*sizes, kept, columns=["attention_sum"] if kind == "h2o" else [])

    def cache(
        self, spec: str | None, kind: str, batch: int, tokens: int, kept: int, like: KVCache | None = None
    ) -> KVCache:
        """A cache that has seen a prompt of `tokens` tokens; with the rows of another one, if given."""
        return filled(self.model, spec, tokens, lambda layer: self.rows(kind, batch, tokens, kept), like)

    def ids(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(3, self.setting.config.vocab_size, (batch, tokens), device=self.device)


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
    bench = in_few_layers(whole)
    batch, tokens = bench.setting.gate
    limit = TOLERANCE[bench.device.type]
    for kind, spec in specs(tokens).items():
        kept = tokens // 10 if kind in DROPPING else tokens
        plain = bench.cache(spec, kind, batch, tokens, kept)
        twin = bench.cache(spec, kind, batch, tokens, kept, like=plain)
        again = bench.cache(spec, kind, batch, tokens, kept, like=plain)
        ids = bench.ids(batch, tokens + 1)
        bench.board.gate(f"{kind}: logits of 4 steps", engine_error(bench.model, plain, twin, ids), limit)
        if bench.device.type == "cuda":
            error, note = replay_error(bench.model, again, ids, bench.ids(batch, 10))
            if note is not None:
                bench.board.note(f"{kind}: {note}")
                bench.board.gate(f"{kind}: a graph is recorded", 1.0, 0.0)
            bench.board.gate(f"{kind}: logits of replays", error, limit)


def in_few_layers(whole: Bench) -> Bench:
    """The same in float32 with few layers."""
    setting = replace(whole.setting, config=shallow(whole.setting.config, GATE_LAYERS), dtype=torch.float32)
    model = built(setting.config, setting.dtype, whole.device)
    attach(model)
    return Bench(whole.board, model, setting, whole.device)


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
    times = step_times(program.advance, STEPS, bench.device)
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


def transformers_step(bench: Bench, arm: str) -> None:
    """transformers' own generate: eager with a DynamicCache of random rows, or StaticCache with its torch.compile."""
    bench.board.check_time()
    batch, tokens = bench.setting.beside
    model = bench.model
    model.set_attn_implementation("sdpa")
    try:
        for _ in range(1 if arm == "eager" else 2):  # the first call compiles
            options: dict[str, Any] = {"cache_implementation": "static"}
            if arm == "eager":
                options = {compat.CACHE_ARGUMENT: of_transformers(model, geometry(model), batch, tokens)}
            clock = Clock(bench.device)
            ids = bench.ids(batch, tokens + 1)
            model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
                pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]), **options,
            )  # fmt: skip
        read = bench.weight_bytes + bench.row_bytes(tokens) * batch
        bench.board.figure(f"transformers {arm}", "full", batch, tokens, clock.steps(4), read)
    finally:
        attach(model)


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
    model = built(chosen.config, chosen.dtype, device)
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
    if board.wrong:
        raise SystemExit(f"not right: {', '.join(board.wrong)}")


if __name__ == "__main__":
    main()
