"""The Triton kernels on a CUDA GPU: right first, then fast, beside torch's attention and the measured copy bandwidth.

    python benchmarks/kernel_speed.py [--out FILE] [--seconds 55] [--only decode quest ...]

Shapes are those of one layer of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16). Every kernel passes
a comparison with its reference before it is timed; one that fails is reported and not timed. Times are medians over
replays of a CUDA graph that calls the kernel on several copies of its input, so that neither launches nor the L2 cache
count. Sweeps over launch shapes are printed: the defaults in the `fused` modules are set from them. The file is written
after every figure; at the time limit the rest is left out. Exits with 1 when a comparison failed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.bench.record import OutOfTime, Record
from kvfoundry.bench.transfer import copy_rate
from kvfoundry.kernels.coded_decode import Codes
from kvfoundry.kernels.coded_decode import fused as coded_decode
from kvfoundry.kernels.coded_decode import naive as coded_decode_naive
from kvfoundry.kernels.decode_attention import fused as decode
from kvfoundry.kernels.decode_attention import naive as decode_naive
from kvfoundry.kernels.encode_rows import Form
from kvfoundry.kernels.encode_rows import fused as encode
from kvfoundry.kernels.encode_rows import naive as encode_naive
from kvfoundry.kernels.gather_rows import fused as gather
from kvfoundry.kernels.gather_rows import naive as gather_naive
from kvfoundry.kernels.page_selection import fused as selection
from kvfoundry.kernels.page_selection import naive as selection_naive
from kvfoundry.kernels.paged_attention import fused as paged
from kvfoundry.kernels.paged_attention import naive as paged_naive
from kvfoundry.kernels.prefill_attention import columns, forward
from kvfoundry.kernels.prefill_attention import fused as prefill
from kvfoundry.kernels.prefill_attention import naive as prefill_naive
from kvfoundry.kernels.triton_support import Tuning, triton

RESULTS = Path(__file__).resolve().parent / "results" / "kernel_speed.json"
HEADS, QUERY_HEADS, DIM = 8, 32, 128
SCALING = DIM**-0.5
DTYPE = torch.bfloat16
DEVICE = "cuda"
# Inputs together are at least this many times the L2 cache of an H200.
COLD_BYTES = 300 << 20
REPLAYS = 11
GRID = [(1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (8, 131072)]
SWEPT = [(1, 131072), (1, 8192)]
# bfloat16 in, float32 inside: relative to the norm of the reference
TOLERANCE = 1e-2

Call = Callable[[], Any]


class Board(Record):
    """All figures so far."""

    def __init__(self, path: Path, seconds: float):
        device = torch.cuda.get_device_properties(0)
        super().__init__(
            path,
            seconds,
            device=device.name,
            multiprocessors=device.multi_processor_count,
            triton=triton.__version__,
            shape={"kv_heads": HEADS, "query_heads": QUERY_HEADS, "head_dim": DIM, "dtype": str(DTYPE)},
        )

    def gate(self, name: str, error: float, limit: float = TOLERANCE) -> bool:
        return super().gate(name, error, limit)

    def figure(self, kernel: str, batch: int, rows: int, seconds: float, moved: int, **more: Any) -> float:
        """Record a time. moved: the bytes that have to be read at least."""
        rate = moved / seconds
        share = rate / self.content.get("copy_bytes_per_s", math.inf)
        entry = {
            "kernel": kernel,
            "batch": batch,
            "rows": rows,
            "us": seconds * 1e6,
            "bytes": moved,
            "bytes_per_s": rate,
        }
        self.content["figures"].append(entry | {"share_of_copy": share} | more)
        parts = [
            f"{kernel:34s} b{batch} {rows:7d} rows {seconds * 1e6:9.1f} us {rate / 1e9:8.0f} GB/s {share:5.2f} of copy",
            *(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in more.items()),
        ]
        print("  ".join(parts), flush=True)
        self.save()
        return seconds


def timed(board: Board, calls: list[Call], replays: int = REPLAYS) -> float:
    """Median seconds of one call, replayed from a CUDA graph of all of them."""
    board.check_time()
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spans = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in spans) / 1e3 / len(calls)


def copies(moved: int) -> int:
    """How many inputs to walk through so that none is found in the cache."""
    return max(1, min(32, -(-COLD_BYTES // moved)))


def cold(make: Callable[[], Call], moved: int) -> list[Call]:
    """Calls on enough inputs; at least four per graph."""
    calls = [make() for _ in range(copies(moved))]
    return calls * -(-4 // len(calls))


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def counts(batch: int, rows: int) -> Tensor:
    return torch.full((batch, HEADS), rows, dtype=torch.int32, device=DEVICE)


def sweep(
    board: Board, name: str, shapes: Iterable[Tuning], run: Callable[[int, int, Tuning], list[Call]], moved: Any
) -> Tuning:
    """Time every launch shape at the swept sizes; the best one at the first of them."""
    best: dict[tuple[int, int], tuple[float, Tuning]] = {}
    shapes = list(shapes)
    for batch, rows in SWEPT:
        for tuning in shapes:
            try:
                seconds = timed(board, run(batch, rows, tuning), replays=5)
            except OutOfTime:
                break
            except Exception as error:  # a shape that does not fit into shared memory is no reason to stop
                board.note(f"{name} {tuning}: {type(error).__name__}: {str(error)[:200]}")
                continue
            board.figure(f"sweep {name}", batch, rows, seconds, moved(batch, rows), tuning=repr(tuning))
            best[batch, rows] = min(
                best.get((batch, rows), (math.inf, tuning)), (seconds, tuning), key=lambda pair: pair[0]
            )
    for (batch, rows), (seconds, tuning) in best.items():
        board.note(f"best {name} at batch {batch}, {rows} rows: {tuning}, {seconds * 1e6:.1f} us")
    board.check_time()
    return best[SWEPT[0]][1] if SWEPT[0] in best else shapes[0]


def cache_bytes(batch: int, rows: int) -> int:
    return batch * HEADS * rows * DIM * 2 * 2


def sdpa(board: Board) -> None:
    """What there is without these kernels: torch's attention, grouped, and with the group as extra queries."""
    for batch, rows in GRID:
        moved = cache_bytes(batch, rows)

        def grouped(batch: int = batch, rows: int = rows) -> Call:
            query, key, value = (
                random(batch, QUERY_HEADS, 1, DIM),
                random(batch, HEADS, rows, DIM),
                random(batch, HEADS, rows, DIM),
            )
            return lambda: F.scaled_dot_product_attention(query, key, value, scale=SCALING, enable_gqa=True)

        def packed(batch: int = batch, rows: int = rows) -> Call:
            query = random(batch, HEADS, QUERY_HEADS // HEADS, DIM)
            key, value = random(batch, HEADS, rows, DIM), random(batch, HEADS, rows, DIM)
            return lambda: F.scaled_dot_product_attention(query, key, value, scale=SCALING)

        seconds = board.figure("sdpa enable_gqa", batch, rows, timed(board, cold(grouped, moved), 5), moved)
        board.content.setdefault("sdpa_seconds", {})[f"{batch}x{rows}"] = seconds
        board.figure("sdpa group as queries", batch, rows, timed(board, cold(packed, moved), 5), moved)


def against_sdpa(board: Board, batch: int, rows: int, seconds: float) -> dict[str, Any]:
    base = board.content.get("sdpa_seconds", {}).get(f"{batch}x{rows}")
    return {} if base is None else {"times_sdpa": base / seconds}


def run_decode(board: Board) -> None:
    """Dense and ragged rows."""
    query, keys, values = random(2, QUERY_HEADS, 1, DIM), random(2, HEADS, 5000, DIM), random(2, HEADS, 5000, DIM)
    lengths = torch.randint(1, 5001, (2, HEADS), dtype=torch.int32, device=DEVICE)
    lengths[0, 0], lengths[1, 1] = 0, 1
    starts = (torch.arange(2 * HEADS, device=DEVICE) * 5000).view(2, HEADS)
    expected = decode_naive.attend(query, keys, values, lengths, scaling=SCALING)
    flat = (keys.flatten(0, 2), values.flatten(0, 2))
    right = board.gate("decode dense", distance(decode.attend(query, keys, values, lengths, scaling=SCALING), expected))
    found = decode.attend(query, *flat, lengths, starts=starts, scaling=SCALING)
    right &= board.gate("decode ragged", distance(found, expected))
    several = random(2, QUERY_HEADS, 5, DIM)
    lengths = lengths.clamp(min=5)
    expected = decode_naive.attend(several, keys, values, lengths, scaling=SCALING, softcap=20.0, window=1000)
    found = decode.attend(several, keys, values, lengths, scaling=SCALING, softcap=20.0, window=1000)
    right &= board.gate("decode 5 queries, softcap, window", distance(found, expected))
    if not right:
        return

    def calls(batch: int, rows: int, tuning: Tuning) -> list[Call]:
        def make() -> Call:
            query, lengths = random(batch, QUERY_HEADS, 1, DIM), counts(batch, rows)
            keys, values = random(batch, HEADS, rows, DIM), random(batch, HEADS, rows, DIM)
            return lambda: decode.attend(query, keys, values, lengths, scaling=SCALING, tuning=tuning)

        return cold(make, cache_bytes(batch, rows))

    shapes = [
        decode.DEFAULT,
        Tuning(64, 4, 4, 2),
        Tuning(64, 4, 3, 4),
        Tuning(128, 4, 2, 2),
        Tuning(128, 8, 3, 1),
        Tuning(32, 4, 4, 4),
        Tuning(64, 2, 3, 3),
        Tuning(64, 4, 3, 1),
    ]
    best = sweep(board, "decode", dict.fromkeys(shapes), calls, cache_bytes)
    for batch, rows in GRID:
        seconds = timed(board, calls(batch, rows, best))
        board.figure(
            "decode dense", batch, rows, seconds, cache_bytes(batch, rows), **against_sdpa(board, batch, rows, seconds)
        )
    # a tenth kept, evenly and very unevenly: the same bytes
    for batch, rows in ((1, 131072), (8, 32768)):
        kept = rows // 10 * HEADS * batch
        shares = torch.rand(batch * HEADS, device=DEVICE) ** 3 + 0.01
        for name, share in (("even", torch.ones_like(shares)), ("uneven", shares)):
            number = (share / share.sum() * kept).int()
            first = (number.cumsum(0) - number).view(batch, HEADS)

            def ragged(number: Tensor = number, first: Tensor = first, batch: int = batch) -> Call:
                slots = int(number.sum())
                query, keys, values = random(batch, QUERY_HEADS, 1, DIM), random(slots, DIM), random(slots, DIM)
                own = number.view(batch, HEADS)
                return lambda: decode.attend(query, keys, values, own, starts=first, scaling=SCALING, tuning=best)

            moved = int(number.sum()) * DIM * 2 * 2
            seconds = timed(board, cold(ragged, moved))
            board.figure(
                f"decode ragged, a tenth, {name}",
                batch,
                rows,
                seconds,
                moved,
                **against_sdpa(board, batch, rows, seconds),
            )


def run_quest(board: Board) -> None:
    """Page scores, selection, and attention over 4,096 rows."""
    page, budget = 16, 256
    query, keys, values = random(1, QUERY_HEADS, DIM), random(1, HEADS, 20000, DIM), random(1, HEADS, 20000, DIM)
    low, high = (keys.unflatten(2, (-1, page)).amin(3), keys.unflatten(2, (-1, page)).amax(3))
    lengths = torch.randint(5000, 20001, (1, HEADS), dtype=torch.int32, device=DEVICE)
    scores = selection_naive.page_scores(query, low, high, lengths, page=page, group="max")
    found = selection.page_scores(query, low, high, lengths, page=page, group="max")
    finite = scores.isfinite()
    right = board.gate(
        "quest scores", distance(found[finite], scores[finite]) + float((found[~finite] != scores[~finite]).sum())
    )
    ours, theirs = (
        module.best_pages(scores, lengths, page=page, budget=budget)[0] for module in (selection, selection_naive)
    )
    right &= board.gate("quest selection", float((ours != theirs).sum()), 0.0)
    starts = (torch.arange(HEADS, device=DEVICE) * 20000).view(1, HEADS)
    flat = (keys.flatten(0, 2), values.flatten(0, 2))
    real = torch.ones(1, dtype=torch.bool, device=DEVICE)
    wide = (query.float(), *(tensor.float() for tensor in flat))
    expected = paged_naive.attend(*wide, theirs, starts, lengths, page, real, scaling=SCALING)
    right &= board.gate(
        "quest attention",
        distance(paged.attend(query, *flat, theirs, starts, lengths, page, scaling=SCALING), expected),
    )
    if not right:
        return

    def calls(batch: int, rows: int, tuning: Tuning, parts: str = "both") -> list[Call]:
        def make() -> Call:
            query, keys, values = (
                random(batch, QUERY_HEADS, DIM),
                random(batch * HEADS * rows, DIM),
                random(batch * HEADS * rows, DIM),
            )
            low, high = random(batch, HEADS, rows // page, DIM), random(batch, HEADS, rows // page, DIM)
            lengths = counts(batch, rows)
            starts = (torch.arange(batch * HEADS, device=DEVICE) * rows).view(batch, HEADS)
            table, number = selection.select(query, low, high, lengths, page=page, budget=budget)
            scores = selection.page_scores(query, low, high, lengths, page=page, group="max")

            def attend(table: Tensor, number: Tensor) -> Tensor:
                return paged.attend(
                    query, keys, values, table, starts, lengths, page, scaling=SCALING, counts=number, tuning=tuning
                )

            whole: dict[str, Call] = {
                "scores": lambda: selection.page_scores(query, low, high, lengths, page=page, group="max"),
                "selection": lambda: selection.best_pages(scores, lengths, page=page, budget=budget),
                "attention": lambda: attend(table, number),
                "both": lambda: attend(*selection.select(query, low, high, lengths, page=page, budget=budget)),
            }
            return whole[parts]

        return cold(make, cache_bytes(batch, min(rows, page * budget)))[: 2 if batch * rows > 300000 else 8]

    def moved(batch: int, rows: int) -> int:
        return cache_bytes(batch, min(rows, page * budget))

    shapes = [paged.DEFAULT, Tuning(32, 4, 3, 2), Tuning(64, 4, 2, 4), Tuning(128, 4, 2, 2)]
    best = sweep(board, "quest attention", shapes, lambda b, r, t: calls(b, r, t, "attention"), moved)
    for batch, rows in ((1, 131072), (1, 32768), (8, 32768)):
        bounds = cache_bytes(batch, rows) // page
        for name, size in (
            ("scores", bounds),
            ("selection", 4 * batch * HEADS * rows // page),
            ("attention", moved(batch, rows)),
            ("both", bounds + moved(batch, rows)),
        ):
            seconds = timed(board, calls(batch, rows, best, name))
            board.figure(f"quest {name}", batch, rows, seconds, size, **against_sdpa(board, batch, rows, seconds))


def code_buffers(batch: int, rows: int, bits: int, along: Any, group: int, mode: Any = "asymmetric") -> Codes:
    shape = (rows // group, DIM) if along == "tokens" else (rows, DIM // group)
    scale = torch.rand(batch, HEADS, *shape, device=DEVICE).to(DTYPE) / 2**bits
    codes = torch.randint(
        0, 127 if mode == "float8" else 256, (batch, HEADS, rows, DIM * bits // 8), dtype=torch.uint8, device=DEVICE
    )
    return Codes(codes, scale, -scale if mode == "asymmetric" else None, bits, group, along, mode, DIM)


CODES: dict[str, tuple[int, Any, int, Any, int, Any]] = {
    # bits, keys along, group, values along, group, mode
    "kivi 2 bits": (2, "tokens", 32, "channels", 32, "asymmetric"),
    "kivi 2 bits, group 64": (2, "tokens", 64, "channels", 64, "asymmetric"),
    "kivi 4 bits": (4, "tokens", 32, "channels", 32, "asymmetric"),
    "int4": (4, "channels", 32, "channels", 32, "asymmetric"),
    "int8": (8, "channels", 128, "channels", 128, "symmetric"),
    "fp8": (8, "channels", 128, "channels", 128, "float8"),
}


def both_sides(name: str, batch: int, rows: int) -> tuple[Codes, Codes]:
    bits, key_along, key_group, value_along, value_group, mode = CODES[name]
    return code_buffers(batch, rows, bits, key_along, key_group, mode), code_buffers(
        batch, rows, bits, value_along, value_group, mode
    )


def coded_bytes(name: str) -> Callable[[int, int], int]:
    def moved(batch: int, rows: int) -> int:
        bits, _, key_group, _, value_group, mode = CODES[name]
        factors = 2 if mode == "asymmetric" else 1
        return batch * HEADS * rows * DIM * 2 * bits // 8 + batch * HEADS * rows * DIM * 2 * factors * (
            key_group + value_group
        ) // (key_group * value_group)

    return moved


def run_coded(board: Board) -> None:
    """Rows as codes, 128 newest ones whole behind them."""
    newest = 128

    def calls_of(name: str) -> Callable[[int, int, Tuning], list[Call]]:
        def calls(batch: int, rows: int, tuning: Tuning) -> list[Call]:
            def make() -> Call:
                keys, values = both_sides(name, batch, rows)
                query, tail_keys, tail_values = (
                    random(batch, QUERY_HEADS, 1, DIM),
                    random(batch, HEADS, 160, DIM),
                    random(batch, HEADS, 160, DIM),
                )
                coded, tails = counts(batch, rows), counts(batch, newest)
                return lambda: coded_decode.attend(
                    query, keys, values, coded, tail_keys, tail_values, tails, scaling=SCALING, tuning=tuning
                )

            return cold(make, coded_bytes(name)(batch, rows))

        return calls

    shapes = [
        coded_decode.DEFAULT,
        Tuning(32, 1, 3, 12, 168),
        Tuning(32, 1, 3, 16, 128),
        Tuning(32, 1, 4, 8),
        Tuning(32, 1, 2, 8),
        Tuning(64, 1, 2, 8),
    ]
    best: Tuning | None = None
    for name in CODES:
        keys, values = both_sides(name, 2, 3072)
        coded = torch.randint(0, 97, (2, HEADS), dtype=torch.int32, device=DEVICE) * 32
        tails = torch.randint(1, 161, (2, HEADS), dtype=torch.int32, device=DEVICE)
        arguments = (
            random(2, QUERY_HEADS, 1, DIM),
            keys,
            values,
            coded,
            random(2, HEADS, 160, DIM),
            random(2, HEADS, 160, DIM),
            tails,
        )
        try:
            found = coded_decode.attend(*arguments, scaling=SCALING)
        except Exception:
            board.note(f"{name}: {traceback.format_exc(limit=-3)}")
            board.gate(f"coded {name}", math.nan)
            continue
        if not board.gate(f"coded {name}", distance(found, coded_decode_naive.attend(*arguments, scaling=SCALING))):
            continue
        moved = coded_bytes(name)
        if best is None:
            best = sweep(board, f"coded {name}", shapes, calls_of(name), moved)
        for batch, rows in ((1, 131072), (1, 32768), (8, 32768)) if name == "kivi 2 bits" else ((1, 131072),):
            seconds = timed(board, calls_of(name)(batch, rows, best))
            board.figure(
                f"coded {name}", batch, rows, seconds, moved(batch, rows), **against_sdpa(board, batch, rows, seconds)
            )


def run_rows(board: Board) -> None:
    """Gather of a tenth of the rows; encoding of a whole prompt and of one group."""
    keys, rows_of = random(1, HEADS, 4096, DIM), gather_naive.Rows

    def a_tenth(rows: int) -> Tensor:
        return torch.rand(1, HEADS, rows, device=DEVICE).argsort(dim=-1)[..., : rows // 10].sort(dim=-1).values

    def positions(rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.int32, device=DEVICE).expand(1, 1, -1)

    some, slots = rows_of(keys, random(1, HEADS, 4096, DIM), positions(4096)), a_tenth(4096)
    pairs = zip(gather.rectangle(some, slots), gather_naive.rectangle(some, slots), strict=True)
    if board.gate("gather", float(sum((a != b).sum() for a, b in pairs)), 0.0):
        for rows in (32768, 131072):
            moved = 2 * cache_bytes(1, rows // 10)
            for name, way in (("gather, a tenth", gather), ("gather, a tenth, torch", gather_naive)):

                def make(rows: int = rows, way: Any = way) -> Call:
                    source = rows_of(random(1, HEADS, rows, DIM), random(1, HEADS, rows, DIM), positions(rows))
                    slots = a_tenth(rows)
                    return lambda: way.rectangle(source, slots)

                board.figure(name, 1, rows, timed(board, cold(make, moved)), moved)
    at = torch.zeros(1, HEADS, dtype=torch.int32, device=DEVICE)
    for along, group in (("tokens", 32), ("channels", 32)):
        ours, theirs = (code_buffers(1, 4096, 2, along, group) for _ in range(2))
        encode.encode(keys, ours, at)
        encode_naive.encode(keys, theirs, at)
        different = (ours.codes != theirs.codes).sum() + (ours.scale != theirs.scale).sum()
        if not board.gate(f"encode along {along}", float(different), 0.0):
            continue
        for rows in (32, 32768):
            moved = HEADS * rows * DIM * 2
            for suffix, way in (("", encode), (", torch", encode_naive)):

                def make(rows: int = rows, along: str = along, group: int = group, way: Any = way) -> Call:
                    source = random(1, 1, HEADS * rows, DIM)
                    form = Form(2, group, along, "asymmetric", DIM)  # type: ignore[arg-type]
                    return lambda: way.encoded(source, form)

                board.figure(f"encode 2 bits along {along}{suffix}", 1, rows, timed(board, cold(make, moved)), moved)


def run_prefill(board: Board) -> None:
    """Prompt attention, alone and with column sums, beside torch's."""
    query, key, value = random(1, QUERY_HEADS, 1500, DIM), random(1, HEADS, 1500, DIM), random(1, HEADS, 1500, DIM)
    expected = prefill_naive.attend(query, key, value, scaling=SCALING, last=64)
    found = prefill.attend(query, key, value, scaling=SCALING, last=64)
    passed = [
        board.gate(f"prefill {name}", distance(a, b))
        for name, a, b in zip(expected._fields, found, expected, strict=True)
    ]
    if not all(passed):
        return
    shapes: dict[str, tuple[Tuning, Tuning, int, int]] = {
        "default": (forward.FORWARD, columns.COLUMNS, forward.QUERY_BLOCK, columns.QUERY_BLOCK),
        "128 rows": (Tuning(128, 8, 2), Tuning(128, 8, 3), 128, 128),
        "4 warps": (Tuning(64, 4, 3), Tuning(64, 4, 3), 64, 64),
        "4 warps, 2 stages": (Tuning(128, 8, 3), Tuning(128, 4, 2), 128, 64),
    }
    for rows in (8192, 32768):
        query, key, value = random(1, QUERY_HEADS, rows, DIM), random(1, HEADS, rows, DIM), random(1, HEADS, rows, DIM)
        operations = 2 * 2 * QUERY_HEADS * DIM * rows * rows // 2
        moved = (QUERY_HEADS * 2 + HEADS * 2) * rows * DIM * 2

        def flops(seconds: float, operations: int = operations) -> dict[str, Any]:
            return {"tflop_per_s": operations / seconds / 1e12}

        seconds = timed(
            board,
            [
                lambda q=query, k=key, v=value: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=SCALING, enable_gqa=True
                )
            ],
            5,
        )  # type: ignore[misc]
        board.figure("prefill sdpa", 1, rows, seconds, moved, **flops(seconds))
        base = seconds
        for name, (first, second, block, column_block) in shapes.items():
            try:
                seconds = timed(
                    board,
                    [
                        lambda q=query, k=key, v=value, t=first, b=block: forward.forward(
                            q, k, v, scaling=SCALING, tuning=t, query_block=b
                        )
                    ],
                    5,
                )  # type: ignore[misc]
                board.figure(
                    f"prefill forward, {name}", 1, rows, seconds, moved, over_sdpa=seconds / base, **flops(seconds)
                )
                _, lse = forward.forward(query, key, value, scaling=SCALING)
                seconds = timed(
                    board,
                    [
                        lambda q=query, k=key, s=lse, t=second, b=column_block: columns.column_sums(
                            q, k, s, scaling=SCALING, last=64, tuning=t, query_block=b
                        )
                    ],
                    5,
                )  # type: ignore[misc]
                board.figure(
                    f"prefill column sums, {name}",
                    1,
                    rows,
                    seconds,
                    moved // 2,
                    over_sdpa=seconds / base,
                    **flops(seconds, operations // 2),
                )
            except OutOfTime:
                raise
            except Exception as error:  # a shape that does not fit into shared memory is no reason to stop
                board.note(f"prefill {name}: {type(error).__name__}: {str(error)[:200]}")


SECTIONS: dict[str, Callable[[Board], None]] = {
    "sdpa": sdpa,
    "decode": run_decode,
    "coded": run_coded,
    "quest": run_quest,
    "prefill": run_prefill,
    "rows": run_rows,
}


def main() -> None:
    """Run the chosen sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU.")
    torch.manual_seed(0)
    board = Board(arguments.out, arguments.seconds)
    board.content["copy_bytes_per_s"] = copy_rate(torch.device(DEVICE))
    print(f"{board.content['device']}: copies move {board.content['copy_bytes_per_s'] / 1e9:.0f} GB/s", flush=True)
    for name in arguments.only:
        began = time.perf_counter()
        try:
            SECTIONS[name](board)
        except OutOfTime:
            board.note(f"time is up in {name}; run it alone with --only {name}")
            break
        except Exception:
            board.note(f"{name} stopped: {traceback.format_exc(limit=-4)}")
            board.content["gates"][name] = {"error": "stopped", "passed": False}
        torch.cuda.empty_cache()
        board.note(f"{name} took {time.perf_counter() - began:.1f} s")
    board.save()
    wrong = [name for name, gate in board.content["gates"].items() if not gate["passed"]]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
