"""How the Triton kernels are timed and recorded: shapes, inputs that no cache holds, graphs, sweeps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfoundry.bench.record import OutOfTime, Record
from kvfoundry.kernels.triton_support import Tuning, triton

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


def against_sdpa(board: Board, batch: int, rows: int, seconds: float) -> dict[str, Any]:
    base = board.content.get("sdpa_seconds", {}).get(f"{batch}x{rows}")
    return {} if base is None else {"times_sdpa": base / seconds}
