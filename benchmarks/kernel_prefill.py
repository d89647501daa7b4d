"""Attention of a prompt, and what it gives every row."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from kernel_timing import DIM, HEADS, QUERY_HEADS, SCALING, Board, distance, random, timed

from kvfoundry.bench.record import OutOfTime
from kvfoundry.kernels.prefill_attention import columns, forward
from kvfoundry.kernels.prefill_attention import fused as prefill
from kvfoundry.kernels.prefill_attention import naive as prefill_naive
from kvfoundry.kernels.triton_support import Tuning


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
