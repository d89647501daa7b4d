"""The first pass over a prompt in Triton: flash attention that keeps the log of every query's sum."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.attention.span import Span
from kvfoundry.kernels.prefill_attention.places import check, position_strides, queries_of, sees, token_of
from kvfoundry.kernels.tiles import logits_of, taken_in, with_sink
from kvfoundry.kernels.triton_support import Tuning, dot_precision, launches, next_power, tl, triton

# Queries of one tile; the tuning has the rows.
QUERY_BLOCK = 128

FORWARD = Tuning(block=64, warps=8, stages=3)


@triton.jit
def _forward_range(
    acc,
    peak,
    total,
    q,
    k_base,
    v_base,
    k_positions,
    own,
    start,
    stop,
    rows,
    scaling,
    softcap,
    k_row,
    v_row,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        logits = logits_of(
            q, k_base, n, n < rows, k_row, scaling, softcap, MASKED, KEY_DIM, DK, SOFTCAP, PRECISION
        )  # fmt: skip
        if MASKED:
            seen = sees(token_of(n, k_positions, rows, POSITIONS)[None, :], own[:, None], WINDOW)
            logits = tl.where(seen, logits, float("-inf"))
        acc, peak, total = taken_in(
            acc, peak, total, logits, v_base, n, n < rows, v_row, MASKED, VALUE_DIM, DV, PRECISION
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def _forward(
    query,
    key,
    value,
    q_positions,
    k_positions,
    reach,
    sinks,
    output,
    lse,
    queries,
    rows,
    query_heads,
    scaling,
    softcap,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    qp_batch,
    kp_batch,
    kp_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    REACH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the last queries see most: they start first
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    first = number * QUERY_BLOCK
    batch = (tl.program_id(1) // query_heads).to(tl.int64)
    query_head = (tl.program_id(1) % query_heads).to(tl.int64)
    head = query_head // GROUP
    distance = rows - queries
    i = first + tl.arange(0, QUERY_BLOCK)
    dv = tl.arange(0, DV)
    q, own = queries_of(
        query, q_positions, i, batch, query_head, queries, distance, q_batch, q_head, q_row, qp_batch, KEY_DIM, DK,
        POSITIONS,
    )  # fmt: skip
    peak = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    acc = tl.zeros([QUERY_BLOCK, DV], tl.float32)
    k_base = key + batch * k_batch + head * k_head
    v_base = value + batch * v_batch + head * v_head
    kp_base = k_positions + batch * kp_batch + head * kp_head
    start = 0
    whole = 0
    stop = rows
    if not POSITIONS:
        stop = tl.minimum(rows, distance + first + QUERY_BLOCK)
        if WINDOW > 0:
            start = tl.maximum(0, distance + first - WINDOW + 1) // BLOCK * BLOCK
            whole = start
        else:
            whole = (distance + first + 1) // BLOCK * BLOCK
    if REACH:
        whole = tl.load(reach + 2 * number)
        stop = tl.load(reach + 2 * number + 1)
    if REACH or (not POSITIONS and WINDOW == 0):
        acc, peak, total = _forward_range(
            acc,
            peak,
            total,
            q,
            k_base,
            v_base,
            kp_base,
            own,
            0,
            whole,
            rows,
            scaling,
            softcap,
            k_row,
            v_row,
            False,
            BLOCK,
            KEY_DIM,
            VALUE_DIM,
            DK,
            DV,
            POSITIONS,
            WINDOW,
            SOFTCAP,
            PRECISION,
        )
    acc, peak, total = _forward_range(
        acc,
        peak,
        total,
        q,
        k_base,
        v_base,
        kp_base,
        own,
        whole,
        stop,
        rows,
        scaling,
        softcap,
        k_row,
        v_row,
        True,
        BLOCK,
        KEY_DIM,
        VALUE_DIM,
        DK,
        DV,
        POSITIONS,
        WINDOW,
        SOFTCAP,
        PRECISION,
    )
    if HAS_SINKS:
        acc, peak, total = with_sink(acc, peak, total, tl.load(sinks + query_head))
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = output + batch * o_batch + query_head * o_head + i[:, None] * o_row + dv[None, :]
    inside = (i < queries)[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(at, (acc / divisor[:, None]).to(output.dtype.element_ty), mask=inside)
    # where nothing was seen, an infinite sum makes every weight nothing
    value_of = tl.where(some, peak + tl.log2(divisor), float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + i, value_of, mask=i < queries)


@launches
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    span: Span | None = None,
    tuning: Tuning = FORWARD,
    query_block: int = QUERY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """The first pass alone: output, and the base-2 log-sum-exp [batch, query_heads, queries] of every query (inf where
    it sees nothing), the sink's logit included.

    span: with positions and no window, where row p is that of position p: what the queries can see, so that tiles
    behind it are left out and those in front of it read without a mask.
    """
    check(query, key, value, query_positions, key_positions)
    batch, query_heads, queries, key_dim = query.shape
    heads, rows, value_dim = key.shape[1], key.shape[2], value.shape[3]
    output = query.new_empty(batch, query_heads, queries, value_dim)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device)
    block = next_power(min(query_block, queries), 16)
    reach = None if span is None else span.reach(block, tuning.block, rows, query.device)
    _forward[(triton.cdiv(queries, block), batch * query_heads)](
        query,
        key,
        value,
        lse if query_positions is None else query_positions,
        lse if key_positions is None else key_positions,
        lse if reach is None else reach,
        lse if sinks is None else sinks,
        output,
        lse,
        queries,
        rows,
        query_heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *output.stride()[:3],
        *position_strides(query_positions, key_positions),
        GROUP=query_heads // heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DK=next_power(key_dim, 16),
        DV=next_power(value_dim, 16),
        QUERY_BLOCK=block,
        BLOCK=tuning.block,
        POSITIONS=query_positions is not None,
        REACH=reach is not None,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return output, lse
