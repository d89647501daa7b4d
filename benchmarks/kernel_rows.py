"""Rows that are moved, and rows that become codes."""

from __future__ import annotations

from typing import Any

import torch
from kernel_codes import code_buffers
from kernel_timing import DEVICE, DIM, HEADS, Board, Call, cache_bytes, cold, random, timed
from torch import Tensor

from kvfoundry.kernels.encode_rows import Form
from kvfoundry.kernels.encode_rows import fused as encode
from kvfoundry.kernels.encode_rows import naive as encode_naive
from kvfoundry.kernels.gather_rows import fused as gather
from kvfoundry.kernels.gather_rows import naive as gather_naive


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
