"""Sparse attention of a prompt on a CUDA GPU: right first, then beside torch's dense attention.

    python benchmarks/sparse_prefill.py [--out FILE] [--limit 55] [--rows 32768 131072] [--whole] [--layers 4] [--sweep]

One layer in the shape of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16): the estimate of the pattern
and the kernel, apart and together, beside scaled_dot_product_attention(is_causal, enable_gqa), on inputs in which every
head has single rows and slash lines, and on random ones; the kept share is in every figure, and how far the output is
from the dense one. --sweep: tiles and launch shapes; the defaults are set from what it finds. --whole: the prompt
of a model in that shape with random weights and so many layers through KVCache, dense and sparse in turn; the time of a
layer is what counts. Nothing is timed before the kernel agrees with its reference. The file is written after every
figure; at the limit the rest is left out. Exits with 1 when a comparison failed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import OutOfTime, Record
from torch import Tensor

from kvfoundry.kernels.sparse_prefill import BlockIndex, Tiles, fused, naive
from kvfoundry.kernels.triton_support import Tuning, triton
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.patterns import Pattern, Sight
from kvfoundry.sparse_prefill.prefill import index_of
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash

RESULTS = Path(__file__).resolve().parent / "results" / "sparse_prefill.json"
HEADS, QUERY_HEADS, DIM = 8, 32, 128
SCALING = DIM**-0.5
TILE, BLOCK = 128, 64
# bfloat16 in, float32 inside: relative to the norm of the reference
TOLERANCE = 1e-2
SPECS = ("minference", "minference(vertical=500, slash=1500)", "minference(rule=offsets)")
PATTERNS: dict[str, Pattern] = {
    "vertical_slash(1000, 6096)": VerticalSlash(),
    "vertical_slash(1000, 6096, rule=offsets)": VerticalSlash(rule="offsets"),
    "vertical_slash(500, 1500)": VerticalSlash(500, 1500),
    "a_shape(1024, 4096)": AShape(),
    "block_sparse(100)": BlockSparse(),
}
# tile, block, launch
SHAPES = [
    (128, 64, Tuning(64, 8, 3)),
    (128, 64, Tuning(64, 8, 2)),
    (128, 64, Tuning(64, 8, 4)),
    (128, 64, Tuning(64, 4, 3)),
    (128, 64, Tuning(128, 8, 3)),
    (128, 128, Tuning(128, 8, 2)),
    (128, 128, Tuning(64, 8, 2)),
    (64, 64, Tuning(64, 4, 3)),
    (64, 64, Tuning(64, 4, 4)),
]


def seconds(record: Record, call: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of a call; compiled and warm before."""
    record.check_time()
    call()
    spans = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in spans) / 1e3


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative distance, head by head so that no copy of everything is made."""
    wrong, size = 0.0, 0.0
    for ours, theirs in zip(found.flatten(0, 1), expected.flatten(0, 1), strict=True):
        wrong += float((ours.float() - theirs.float()).square().sum())
        size += float(theirs.float().square().sum())
    return (wrong / max(size, 1e-30)) ** 0.5


def random_inputs(rows: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    made = dict(device="cuda", dtype=torch.bfloat16)
    query = torch.randn(batch, QUERY_HEADS, rows, DIM, **made)  # type: ignore[call-overload]
    key, value = (torch.randn(batch, HEADS, rows, DIM, **made) for _ in range(2))  # type: ignore[call-overload]
    return query, key, value


def structured_inputs(rows: int, strength: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    """Every query head looks at the 64 rows that its KV head has set apart, at two distances of its own, and around."""
    query, key, value = random_inputs(rows)
    query *= 0.1
    shared = torch.randn(HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    columns = torch.stack([torch.randperm(rows, device="cuda")[:64] for _ in range(HEADS)])
    for head in range(HEADS):
        key[0, head, columns[head]] = shared[head]
    group = QUERY_HEADS // HEADS
    for number in range(QUERY_HEADS):
        own = key[0, number // group]
        for offset in (3 + 5 * number, 1337 + 411 * number):
            query[0, number, offset:] += strength * own[: rows - offset]
        query[0, number] += strength * shared[number // group]
    return query, key, value


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALING, enable_gqa=True)


def sight_of(query: Tensor, key: Tensor, tile: int, block: int) -> Sight:
    rows, count = key.shape[2], query.shape[2]
    batch, heads = key.shape[:2]
    tiles = Tiles.of(torch.full((batch, heads), rows), torch.full((batch,), count), tile, block, query.device)
    return Sight(query, key, tiles, SCALING)


def gates(record: Record, shapes: list[tuple[int, int, Tuning]]) -> bool:
    """The kernel equals its reference under every pattern, and dense attention where it reads everything."""
    right = True
    query, key, value = random_inputs(3000, batch=2)
    for name, pattern in {
        "vertical_slash": VerticalSlash(100, 300),
        "a_shape": AShape(100, 300),
        "block_sparse": BlockSparse(9),
        "everything": AShape(0, 3000),
    }.items():
        for tile, block, tuning in shapes:
            index = index_of(sight_of(query, key, tile, block), (pattern,) * QUERY_HEADS)
            found = fused.attend(query, key, value, index, scaling=SCALING, tuning=tuning)
            expected = dense(query, key, value) if name == "everything" else naive.attend(
                query, key, value, index, scaling=SCALING
            )  # fmt: skip
            right &= record.gate(f"{name}, tile {tile}, block {block}", distance(found, expected), TOLERANCE)
    return right


def figure(record: Record, **entry: Any) -> None:
    record.content["figures"].append(entry)
    shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in entry.items())
    print("  ".join(shown), flush=True)
    record.save()


def one_layer(record: Record, rows: int) -> None:
    """Attention of one layer over a prompt of so many rows."""
    for kind, make in (("structured", structured_inputs), ("random", random_inputs)):
        query, key, value = make(rows)
        base = seconds(record, lambda q=query, k=key, v=value: dense(q, k, v), 3)  # type: ignore[misc]
        flops = 2 * rows * rows * DIM * QUERY_HEADS
        figure(record, what="dense", input=kind, rows=rows, ms=base * 1e3, tflop_per_s=flops / base / 1e12)
        expected = dense(query, key, value)
        for name, pattern in PATTERNS.items():
            sight, patterns = sight_of(query, key, TILE, BLOCK), (pattern,) * QUERY_HEADS

            def estimate(sight: Sight = sight, patterns: Any = patterns) -> BlockIndex:
                return index_of(sight, patterns)

            index = estimate()
            share = int(index.computed) / index.causal
            chosen = seconds(record, estimate)

            def attend(index: BlockIndex = index, tensors: Any = (query, key, value)) -> Tensor:
                return fused.attend(*tensors, index, scaling=SCALING)

            spent = seconds(record, attend)
            figure(
                record, what=name, input=kind, rows=rows, kept_share=share, estimate_ms=chosen * 1e3,
                kernel_ms=spent * 1e3, times_dense=base / (chosen + spent), error=distance(attend(), expected),
                tflop_per_s=flops * share / spent / 1e12,
            )  # fmt: skip


def sweep(record: Record, rows: int) -> None:
    """Tiles and launch shapes, on structured inputs; the kept share differs with the tiles."""
    query, key, value = structured_inputs(rows)
    flops, found = 2 * rows * rows * DIM * QUERY_HEADS, []
    for tile, block, tuning in SHAPES:
        index = index_of(sight_of(query, key, tile, block), (VerticalSlash(),) * QUERY_HEADS)
        try:
            spent = seconds(
                record, lambda i=index, t=tuning: fused.attend(query, key, value, i, scaling=SCALING, tuning=t), 3
            )  # type: ignore[misc]
        except OutOfTime:
            raise
        except Exception as error:  # a shape that does not fit into shared memory is no reason to stop
            record.note(f"sweep {tile} {block} {tuning}: {type(error).__name__}: {str(error)[:200]}")
            continue
        share = int(index.computed) / index.causal
        found.append((spent, tile, block, tuning))
        figure(
            record, what=f"sweep {tile} x {block} {tuning}", rows=rows, kept_share=share, kernel_ms=spent * 1e3,
            tflop_per_s=flops * share / spent / 1e12,
        )  # fmt: skip
    if found:
        best = min(found, key=lambda entry: entry[0])
        record.note(f"best at {rows} rows: tile {best[1]}, block {best[2]}, {best[3]}, {best[0] * 1e3:.2f} ms")


def whole_model(record: Record, rows: int, layers: int) -> None:
    """The prompt of a model through the cache; the attention of random weights has no structure to find."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvfoundry
    from kvfoundry import compat

    shape = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=QUERY_HEADS,
        num_key_value_heads=HEADS, head_dim=DIM, vocab_size=128256, max_position_embeddings=rows,
        tie_word_embeddings=False, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(shape).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(1, shape.vocab_size, (1, rows), device="cuda")

    def read(spec: str) -> Any:
        cache = kvfoundry.KVCache(model, spec)
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
        return cache

    base = 0.0
    for spec in ("fullkv", *SPECS):
        spent = seconds(record, lambda spec=spec: read(spec), 3)  # type: ignore[misc]
        base = base or spent
        cache = read(spec)
        figure(
            record, what=f"whole prompt, {spec}", rows=rows, layers=layers, seconds=spent,
            seconds_per_layer=spent / layers, times_dense=base / spent, kept_share=cache.prefill_share,
        )  # fmt: skip
        del cache


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=55.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU.")
    torch.manual_seed(0)
    record = Record(
        arguments.out, arguments.limit, device=torch.cuda.get_device_name(0), triton=triton.__version__,
        shape={"kv_heads": HEADS, "query_heads": QUERY_HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        tile=TILE, block=BLOCK,
    )  # fmt: skip
    try:
        # of each tile and block once
        distinct = {(tile, block): (tile, block, tuning) for tile, block, tuning in reversed(SHAPES)}
        if gates(record, list(distinct.values()) if arguments.sweep else [(TILE, BLOCK, fused.DEFAULT)]):
            record.note("the kernel is right")
            if arguments.whole:
                whole_model(record, max(arguments.rows), arguments.layers)
                torch.cuda.empty_cache()
            for rows in arguments.rows:
                one_layer(record, rows)
                torch.cuda.empty_cache()
            if arguments.sweep:
                sweep(record, max(arguments.rows))
    except OutOfTime:
        record.note("time is up; the rest was left out")
    record.save()
    wrong = [name for name, gate in record.content["gates"].items() if not gate["passed"]]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
