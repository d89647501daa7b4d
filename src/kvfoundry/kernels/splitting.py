"""Splitting the rows of many heads evenly over programs, decided on the device, and joining the parts again.

A launch has a fixed grid; lengths live on the device and may change between replays of a CUDA graph. With n_h the rows
of head h, N their sum and P the wanted number of programs,

    chunk = N / P, rounded up to whole tiles;   splits_h = ceil(n_h / chunk);

head h is cut into splits_h equal parts of whole tiles. Every program works this out from the lengths (a few hundred
numbers) and finds its own head and part: P + heads programs always suffice, those left over end at once. Heads of very
different lengths thus keep all multiprocessors busy alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.triton_support import next_power, tl, triton

LOG2_E = 1.4426950408889634
LOG_2 = 0.6931471805599453

# Of one program that joins: channels, and parts that are read at once.
_CHANNELS, _MOST_AT_ONCE = 32, 256


@triton.jit
def share_out(rows, wanted, BLOCK: tl.constexpr):
    """Splits of every head, int32 like `rows`."""
    total = tl.sum(rows, axis=0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(total, wanted), BLOCK), 1) * BLOCK
    return tl.cdiv(rows, chunk)


@triton.jit
def find_part(program, rows, splits, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """(head, first row, row behind the last) of a program; the head is past the last one where there is no part."""
    index = tl.arange(0, HEADS)
    ends = tl.cumsum(splits, axis=0)
    head = tl.sum((ends <= program).to(tl.int32), axis=0)
    own = index == head
    count = tl.sum(tl.where(own, rows, 0), axis=0)
    parts = tl.maximum(tl.sum(tl.where(own, splits, 0), axis=0), 1)
    part = program - tl.sum(tl.where(index < head, splits, 0), axis=0)
    size = tl.cdiv(tl.cdiv(count, parts), BLOCK) * BLOCK
    start = part * size
    return head, start, tl.minimum(start + size, count)


@triton.jit
def soften(logits, scaling, softcap, SOFTCAP: tl.constexpr):
    """Scaled logits in base 2, capped where asked for."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x)
        capped = 1.0 - 2.0 / (1.0 + tl.exp2(logits * (2.0 * 1.4426950408889634 * scaling / softcap)))
        return capped * (softcap * 1.4426950408889634)
    return logits * (scaling * 1.4426950408889634)


@triton.jit
def online(logits, peak, total):
    """One step of the running softmax: (weights, new peak, new total, factor of everything so far)."""
    highest = tl.maximum(peak, tl.max(logits, axis=1))
    # a query may have seen nothing yet: exp(-inf - -inf) is no number
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - anchor[:, None])
    fade = tl.exp2(peak - anchor)
    return weights, highest, total * fade + tl.sum(weights, axis=1), fade


@triton.jit
def store_part(
    output, lse, program, acc, peak, total, ROWS: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr
):
    """Normalized output [ROWS, DIM] and base-2 log-sum-exp [ROWS] of one part; -inf where nothing was seen."""
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = program.to(tl.int64) * ROWS + m
    tl.store(
        output + at[:, None] * DIM + d[None, :],
        acc / divisor[:, None],
        mask=(m < ROWS)[:, None] & (d < DIM)[None, :],
    )
    tl.store(lse + at, tl.where(some, peak + tl.log2(divisor), float("-inf")), mask=m < ROWS)


@triton.jit
def own_parts(splits, owner, KINDS: tl.constexpr, HEADS: tl.constexpr):
    """(number of the first part, number of parts) of a stored head."""
    index = tl.arange(0, HEADS)
    first = tl.sum(tl.where(index < owner * KINDS, splits, 0), axis=0)
    return first, tl.sum(tl.where(index // KINDS == owner, splits, 0), axis=0)


@triton.jit
def rows_of(rows, others, there, index, KINDS: tl.constexpr):
    """Rows of every head, or of both kinds in turn: the first of each head in `rows`, the second in `others`."""
    found = tl.load(rows + index // KINDS, mask=there, other=0)
    if KINDS == 2:
        found = tl.where(index % 2 == 0, found, tl.load(others + index // 2, mask=there, other=0))
    return found


@triton.jit
def join_row(
    owner,
    row,
    channel,
    parts,
    part_lse,
    rows,
    others,
    sinks,
    output,
    lse,
    wanted,
    heads_total,
    stored_heads,
    out_batch,
    out_head,
    out_query,
    SCALE: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Combine the parts of one row (query, query head of the group) of a stored head, add the sink.

    channel: the first of D that are combined.
    """
    index = tl.arange(0, HEADS)
    counts = rows_of(rows, others, index < heads_total * KINDS, index, KINDS) * SCALE
    if MOST > 0:
        counts = tl.minimum(counts, MOST)
    splits = share_out(counts, wanted, BLOCK)
    first, number = own_parts(splits, owner, KINDS, HEADS)
    d = channel + tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    peak = float("-inf")
    total = 0.0
    for begin in range(0, number, STEP):
        s = begin + tl.arange(0, STEP)
        at = (first + s).to(tl.int64) * (GROUP * QUERIES) + row
        part = tl.load(part_lse + at, mask=s < number, other=float("-inf"))
        highest = tl.maximum(peak, tl.max(part, axis=0))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(part - anchor)
        fade = tl.exp2(peak - anchor)
        tile = tl.load(parts + at[:, None] * DIM + d[None, :], mask=(s < number)[:, None] & (d < DIM)[None, :], other=0)
        acc = acc * fade + tl.sum(tile * weight[:, None], axis=0)
        total = total * fade + tl.sum(weight, axis=0)
        peak = highest
    query_head = (owner % stored_heads) * GROUP + row % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(peak, sink)
        fade = tl.exp2(peak - highest)
        acc = acc * fade
        total = total * fade + tl.exp2(sink - highest)
        peak = highest
    divisor = tl.where(total > 0.0, total, 1.0)
    batch = (owner // stored_heads).to(tl.int64)
    query = row // GROUP
    where = output + batch * out_batch + query_head * out_head + query * out_query + d
    tl.store(where, (acc / divisor).to(output.dtype.element_ty), mask=d < DIM)
    if HAS_LSE and channel == 0:
        at_lse = (batch * stored_heads * GROUP + query_head) * QUERIES + query
        value = tl.where(total > 0.0, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + at_lse, value)


@triton.jit
def _join(
    parts,
    part_lse,
    rows,
    others,
    sinks,
    output,
    lse,
    wanted,
    heads_total,
    stored_heads,
    out_batch,
    out_head,
    out_query,
    SCALE: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One program per stored head, row and block of channels."""
    join_row(
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2) * D,
        parts,
        part_lse,
        rows,
        others,
        sinks,
        output,
        lse,
        wanted,
        heads_total,
        stored_heads,
        out_batch,
        out_head,
        out_query,
        SCALE,
        MOST,
        GROUP,
        QUERIES,
        DIM,
        D,
        KINDS,
        HEADS,
        BLOCK,
        STEP,
        HAS_SINKS,
        HAS_LSE,
    )


def join(
    parts: Tensor,
    part_lse: Tensor,
    rows: Tensor,
    output: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    *,
    wanted: int,
    block: int,
    scale: int = 1,
    most: int = 0,
    others: Tensor | None = None,
) -> None:
    """Fill `output` [batch, query_heads, queries, dim] and `lse` [batch, query_heads, queries] from the parts.

    parts: [programs, group * queries, dim] float32 and part_lse [programs, group * queries], as `store_part` leaves
    them. rows: [batch, heads] int32 on the device, each times `scale` and at most `most` (0: no bound) to be read;
    others: as many of a second kind, cut into parts of their own. wanted, block: what the parts were cut with.
    """
    batch, query_heads, queries, dim = output.shape
    heads, kinds = rows.shape[1], 1 if others is None else 2
    channels = min(_CHANNELS, next_power(dim, 16))
    _join[(batch * heads, parts.shape[1], triton.cdiv(dim, channels))](
        parts,
        part_lse,
        rows,
        rows if others is None else others,
        sinks if sinks is not None else part_lse,
        output,
        lse if lse is not None else part_lse,
        wanted,
        batch * heads,
        heads,
        output.stride(0),
        output.stride(1),
        output.stride(2),
        SCALE=scale,
        MOST=most,
        GROUP=query_heads // heads,
        QUERIES=queries,
        DIM=dim,
        D=channels,
        KINDS=kinds,
        HEADS=next_power(batch * heads * kinds),
        BLOCK=block,
        STEP=step_of(wanted, batch * heads),
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=4,
    )


def step_of(wanted: int, heads: int) -> int:
    """How many parts of a head are read at once: all of them, where heads are of one length and not too few."""
    return min(_MOST_AT_ONCE, next_power(triton.cdiv(wanted, heads) + 1, 16))


def part_buffers(programs: int, rows: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the parts of a launch: its size follows from shapes alone."""
    return (
        torch.empty(programs, rows, dim, dtype=torch.float32, device=device),
        torch.empty(programs, rows, dtype=torch.float32, device=device),
    )
