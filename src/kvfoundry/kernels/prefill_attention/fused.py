"""Prompt attention with column sums in Triton, in memory linear in the tokens.

Two passes. The first is flash attention that keeps the log of every query's sum; with it the second knows any weight
without having seen the others, so it takes block after block of rows, walks the queries that see them, and adds up.
Each sum has one writer: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.attention.span import Span
from kvfoundry.kernels.prefill_attention.naive import Attended
from kvfoundry.kernels.splitting import online, soften
from kvfoundry.kernels.triton_support import Tuning, check_device, dot_precision, launches, next_power, tl, triton

# Queries of one tile; the tuning has the rows.
QUERY_BLOCK = 128
COLUMN_QUERY_BLOCK = 64

FORWARD = Tuning(block=64, warps=8, stages=3)
COLUMNS = Tuning(block=128, warps=8, stages=3)


@triton.jit
def _tokens(n, k_positions, rows, POSITIONS: tl.constexpr):
    """Token index of rows; beyond every query where there is none."""
    if POSITIONS:
        at = tl.load(k_positions + n, mask=n < rows, other=-1).to(tl.int32)
        return tl.where(at < 0, 2147483647, at)
    return tl.where(n < rows, n, 2147483647)


@triton.jit
def _seen(at, own, WINDOW: tl.constexpr):
    """Who sees whom, for token indices of rows and queries that broadcast against each other."""
    if WINDOW > 0:
        return (at <= own) & (at > own - WINDOW)
    return at <= own


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
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        inside = (dk < KEY_DIM)[:, None]
        if MASKED:
            inside = inside & (n < rows)[None, :]
        k = tl.load(k_base + n[None, :] * k_row + dk[:, None], mask=inside, other=0.0)
        logits = soften(tl.dot(q, k, input_precision=PRECISION), scaling, softcap, SOFTCAP)
        if MASKED:
            seen = _seen(_tokens(n, k_positions, rows, POSITIONS)[None, :], own[:, None], WINDOW)
            logits = tl.where(seen, logits, float("-inf"))
        weights, peak, total, fade = online(logits, peak, total)
        valued = (dv < VALUE_DIM)[None, :]
        if MASKED:
            valued = valued & (n < rows)[:, None]
        v = tl.load(v_base + n[:, None] * v_row + dv[None, :], mask=valued, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
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
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    q = tl.load(
        query + batch * q_batch + query_head * q_head + i[:, None] * q_row + dk[None, :],
        mask=(i < queries)[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    if POSITIONS:
        own = tl.load(q_positions + batch * qp_batch + i, mask=i < queries, other=-1).to(tl.int32)
    else:
        own = distance + i
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
        sink = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(peak, sink)
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.exp2(sink - highest)
        acc = acc * fade[:, None]
        peak = highest
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = output + batch * o_batch + query_head * o_head + i[:, None] * o_row + dv[None, :]
    inside = (i < queries)[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(at, (acc / divisor[:, None]).to(output.dtype.element_ty), mask=inside)
    # where nothing was seen, an infinite sum makes every weight nothing
    value_of = tl.where(some, peak + tl.log2(divisor), float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + i, value_of, mask=i < queries)


@triton.jit
def _columns_range(
    sums,
    recent,
    k,
    q_base,
    q_positions,
    k_positions,
    lse,
    n,
    start,
    stop,
    queries,
    rows,
    distance,
    last,
    scaling,
    softcap,
    q_row,
    MASKED: tl.constexpr,
    RECENT: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DK: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dk = tl.arange(0, DK)
    if MASKED:
        at = _tokens(n, k_positions, rows, POSITIONS)
    # rows first: sums over the queries stay within a few lanes
    for begin in range(start, stop, QUERY_BLOCK):
        i = begin + tl.arange(0, QUERY_BLOCK)
        if MASKED:
            inside = (i < queries)[None, :] & (dk < KEY_DIM)[:, None]
            q = tl.load(q_base + i[None, :] * q_row + dk[:, None], mask=inside, other=0.0)
            high = tl.load(lse + i, mask=i < queries, other=float("inf"))
        else:
            q = tl.load(q_base + i[None, :] * q_row + dk[:, None], mask=(dk < KEY_DIM)[:, None], other=0.0)
            high = tl.load(lse + i)
        logits = soften(tl.dot(k, q, input_precision=PRECISION), scaling, softcap, SOFTCAP)
        weights = tl.exp2(logits - high[None, :])
        if MASKED:
            own = distance + i
            if POSITIONS:
                own = tl.load(q_positions + i, mask=i < queries, other=-1).to(tl.int32)
            weights = tl.where(_seen(at[:, None], own[None, :], WINDOW), weights, 0.0)
        sums += tl.sum(weights, axis=1)
        if RECENT:
            recent += tl.sum(tl.where((i >= queries - last)[None, :], weights, 0.0), axis=1)
    return sums, recent


@triton.jit
def _columns(
    query,
    key,
    q_positions,
    k_positions,
    lse,
    sums_out,
    recent_out,
    queries,
    rows,
    last,
    query_heads,
    scaling,
    softcap,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    qp_batch,
    kp_batch,
    kp_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DK: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    owner = tl.program_id(1)
    batch = (owner // query_heads).to(tl.int64)
    query_head = (owner % query_heads).to(tl.int64)
    head = query_head // GROUP
    distance = rows - queries
    n = first + tl.arange(0, BLOCK)
    dk = tl.arange(0, DK)
    k = tl.load(
        key + batch * k_batch + head * k_head + n[:, None] * k_row + dk[None, :],
        mask=(n < rows)[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    q_base = query + batch * q_batch + query_head * q_head
    qp_base = q_positions + batch * qp_batch
    kp_base = k_positions + batch * kp_batch + head * kp_head
    lse_base = lse + owner.to(tl.int64) * queries
    # from the first query that sees one of these rows; all queries behind `whole` see all of them
    start = 0
    whole = 0
    stop = queries
    if not POSITIONS:
        start = tl.maximum(0, first - distance) // QUERY_BLOCK * QUERY_BLOCK
        if WINDOW > 0:
            stop = tl.minimum(queries, tl.maximum(0, first + BLOCK - 1 - distance + WINDOW))
    # the queries whose weights are also counted apart begin here
    border = tl.maximum(start, tl.maximum(0, queries - last) // QUERY_BLOCK * QUERY_BLOCK)
    border = tl.minimum(border, tl.maximum(start, stop))
    whole = border
    if not POSITIONS and WINDOW == 0:
        whole = tl.maximum(0, tl.cdiv(tl.maximum(0, first + BLOCK - 1 - distance), QUERY_BLOCK) * QUERY_BLOCK)
        whole = tl.minimum(tl.maximum(whole, start), border)
    sums = tl.zeros([BLOCK], tl.float32)
    recent = tl.zeros([BLOCK], tl.float32)
    sums, recent = _columns_range(
        sums,
        recent,
        k,
        q_base,
        qp_base,
        kp_base,
        lse_base,
        n,
        start,
        whole,
        queries,
        rows,
        distance,
        last,
        scaling,
        softcap,
        q_row,
        True,
        False,
        QUERY_BLOCK,
        KEY_DIM,
        DK,
        POSITIONS,
        WINDOW,
        SOFTCAP,
        PRECISION,
    )
    if not POSITIONS and WINDOW == 0:
        sums, recent = _columns_range(
            sums,
            recent,
            k,
            q_base,
            qp_base,
            kp_base,
            lse_base,
            n,
            whole,
            border,
            queries,
            rows,
            distance,
            last,
            scaling,
            softcap,
            q_row,
            False,
            False,
            QUERY_BLOCK,
            KEY_DIM,
            DK,
            POSITIONS,
            WINDOW,
            SOFTCAP,
            PRECISION,
        )
    sums, recent = _columns_range(
        sums,
        recent,
        k,
        q_base,
        qp_base,
        kp_base,
        lse_base,
        n,
        border,
        stop,
        queries,
        rows,
        distance,
        last,
        scaling,
        softcap,
        q_row,
        True,
        True,
        QUERY_BLOCK,
        KEY_DIM,
        DK,
        POSITIONS,
        WINDOW,
        SOFTCAP,
        PRECISION,
    )
    target = owner.to(tl.int64) * rows + n
    tl.store(sums_out + target, sums, mask=n < rows)
    tl.store(recent_out + target, recent, mask=n < rows)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    last: int = 0,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    forward_tuning: Tuning = FORWARD,
    columns_tuning: Tuning = COLUMNS,
    query_block: int = QUERY_BLOCK,
    column_query_block: int = COLUMN_QUERY_BLOCK,
) -> Attended:
    """As `naive.attend`. Only without positions are blocks that nobody sees left out."""
    output, lse = forward(
        query,
        key,
        value,
        scaling=scaling,
        query_positions=query_positions,
        key_positions=key_positions,
        softcap=softcap,
        sinks=sinks,
        window=window,
        tuning=forward_tuning,
        query_block=query_block,
    )
    sums, recent = column_sums(
        query,
        key,
        lse,
        scaling=scaling,
        last=last,
        query_positions=query_positions,
        key_positions=key_positions,
        softcap=softcap,
        window=window,
        tuning=columns_tuning,
        query_block=column_query_block,
    )
    return Attended(output, sums, recent)


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
    _check(query, key, value, query_positions, key_positions)
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
        *_position_strides(query_positions, key_positions),
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


@launches
def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scaling: float,
    last: int = 0,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
    tuning: Tuning = COLUMNS,
    query_block: int = COLUMN_QUERY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """The second pass alone: sums and recent sums, from the lse of `forward` (contiguous float32, base 2)."""
    _check(query, key, key, query_positions, key_positions)
    batch, query_heads, queries, key_dim = query.shape
    heads, rows = key.shape[1], key.shape[2]
    sums = torch.empty(batch, query_heads, rows, dtype=torch.float32, device=query.device)
    recent = torch.empty_like(sums)
    _columns[(triton.cdiv(rows, tuning.block), batch * query_heads)](
        query,
        key,
        lse if query_positions is None else query_positions,
        lse if key_positions is None else key_positions,
        lse,
        sums,
        recent,
        queries,
        rows,
        min(last, queries),
        query_heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *key.stride()[:3],
        *_position_strides(query_positions, key_positions),
        GROUP=query_heads // heads,
        KEY_DIM=key_dim,
        DK=next_power(key_dim, 16),
        QUERY_BLOCK=next_power(min(query_block, queries), 16),
        BLOCK=tuning.block,
        POSITIONS=query_positions is not None,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return sums, recent


def _position_strides(query_positions: Tensor | None, key_positions: Tensor | None) -> tuple[int, int, int]:
    if query_positions is None or key_positions is None:
        return 0, 0, 0
    head = 0 if key_positions.shape[1] == 1 else key_positions.stride(1)
    return query_positions.stride(0), key_positions.stride(0), head


def _check(
    query: Tensor, key: Tensor, value: Tensor, query_positions: Tensor | None, key_positions: Tensor | None
) -> None:
    check_device(query, key, value, query_positions, key_positions)
    if (query_positions is None) != (key_positions is None):
        raise KVFoundryError("positions are given for queries and rows, or for neither.")
    if query_positions is None and key.shape[2] < query.shape[2]:
        raise KVFoundryError("without positions the queries are the last rows: there are fewer rows than queries.")
    if query.shape[1] % key.shape[1]:
        raise KVFoundryError(f"{query.shape[1]} query heads cannot share {key.shape[1]} stored heads evenly.")
    dense = [tensor for tensor in (query, key, value, query_positions, key_positions) if tensor is not None]
    if any(tensor.stride(-1) != 1 for tensor in dense):
        raise KVFoundryError("the last dimension of queries, rows and positions must be dense.")
