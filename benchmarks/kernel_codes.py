"""Attention in decode over codes."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import (
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    QUERY_HEADS,
    SCALING,
    Board,
    Call,
    against_sdpa,
    cold,
    counts,
    distance,
    random,
    sweep,
    timed,
)

from kvfoundry.kernels.coded_decode import Codes, lanes
from kvfoundry.kernels.coded_decode import fused as coded_decode
from kvfoundry.kernels.coded_decode import naive as coded_decode_naive
from kvfoundry.kernels.triton_support import Tuning


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

    def calls_of(name: str) -> Callable[[int, int, Tuning | None], list[Call]]:
        def calls(batch: int, rows: int, tuning: Tuning | None) -> list[Call]:
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

    # of the kernel that goes lane by lane, and of the other
    swept = {
        "kivi 2 bits": [lanes.DEFAULT, Tuning(32, 1, 1, 8, 248), Tuning(32, 1, 1, 16, 128)],
        "int4": [coded_decode.DEFAULT, Tuning(32, 1, 3, 12, 168), Tuning(64, 1, 2, 8)],
    }
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
        if name in swept:
            sweep(board, f"coded {name}", swept[name], calls_of(name), moved)
        for batch, rows in ((1, 131072), (1, 32768), (8, 32768)) if name.startswith("kivi") else ((1, 131072),):
            seconds = timed(board, calls_of(name)(batch, rows, None))
            board.figure(
                f"coded {name}", batch, rows, seconds, moved(batch, rows), **against_sdpa(board, batch, rows, seconds)
            )
