"""Attention in decode over whole rows, dense and ragged, and what torch has for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_timing import (
    DEVICE,
    DIM,
    GRID,
    HEADS,
    QUERY_HEADS,
    SCALING,
    Board,
    Call,
    against_sdpa,
    cache_bytes,
    cold,
    counts,
    distance,
    random,
    sweep,
    timed,
)
from torch import Tensor

from kvfoundry.kernels.decode_attention import fused as decode
from kvfoundry.kernels.decode_attention import naive as decode_naive
from kvfoundry.kernels.triton_support import Tuning


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
