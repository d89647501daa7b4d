"""Rotation of channel pairs in Triton: every key is read once and written once, in place if wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.rotation.naive import Pairs
from kvfoundry.kernels.triton_support import check_device, launches, next_power, tl, triton

# Elements of keys that one program turns.
_TILE = 1 << 13


@triton.jit
def _turn(
    keys,
    cos,
    sin,
    out,
    heads,
    rows,
    k_batch,
    k_head,
    k_row,
    o_batch,
    o_head,
    o_row,
    c_batch,
    c_head,
    c_row,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    REST: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = tl.program_id(1)
    batch = (owner // heads).to(tl.int64)
    head = (owner % heads).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (n < rows)[:, None]
    row = n.to(tl.int64)[:, None]
    pair = tl.arange(0, P)[None, :]
    inside = there & (pair < PAIRS)
    first = START + (2 * pair if NEIGHBOURS else pair)
    apart: tl.constexpr = 1 if NEIGHBOURS else PAIRS
    source = keys + batch * k_batch + head * k_head + row * k_row
    target = out + batch * o_batch + head * o_head + row * o_row
    table = batch * c_batch + head * c_head + row * c_row + pair
    c = tl.load(cos + table, mask=inside, other=0.0)
    s = tl.load(sin + table, mask=inside, other=0.0)
    one = tl.load(source + first, mask=inside, other=0.0).to(c.dtype)
    other = tl.load(source + first + apart, mask=inside, other=0.0).to(c.dtype)
    tl.store(target + first, one * c - other * s, mask=inside)
    tl.store(target + first + apart, other * c + one * s, mask=inside)
    if REST > 0:  # channels that pass, in front of the pairs and behind them
        rest = tl.arange(0, R)[None, :]
        channel = tl.where(rest < START, rest, rest + 2 * PAIRS)
        inside = there & (rest < REST)
        tl.store(target + channel, tl.load(source + channel, mask=inside), mask=inside)


@launches
def turn(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, *, out: Tensor | None = None) -> Tensor:
    """As `naive.turn`; the last dimension of keys, tables and result must be dense."""
    check_device(keys, cos, sin, out)
    batch, heads, rows, dim = keys.shape
    out = torch.empty_like(keys, memory_format=torch.contiguous_format) if out is None else out
    cos, sin = (table.expand(batch, heads, rows, -1) for table in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(3) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rest = dim - 2 * pairs.number
    block = max(1, min(next_power(rows), _TILE // next_power(dim)))
    _turn[(triton.cdiv(rows, block), batch * heads)](
        keys,
        cos,
        sin,
        out,
        heads,
        rows,
        *keys.stride()[:3],
        *out.stride()[:3],
        *cos.stride()[:3],
        START=pairs.start,
        PAIRS=pairs.number,
        NEIGHBOURS=pairs.neighbours,
        REST=rest,
        P=next_power(pairs.number),
        R=next_power(max(1, rest)),
        BLOCK=block,
        num_warps=4,
    )
    return out
