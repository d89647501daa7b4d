"""The second pass over a prompt in Triton: what all queries gave to every row, once the log of their sums is known.

A program takes a block of rows, walks the queries that see them, and adds up. Each sum has one writer: no atomics, the
same bits every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.prefill_attention.places import check, position_strides, sees, token_of
from kvfoundry.kernels.splitting import soften
from kvfoundry.kernels.triton_support import Tuning, dot_precision, launches, next_power, tl, triton

# Queries of one tile; the tuning has the rows.
QUERY_BLOCK = 64

COLUMNS = Tuning(block=128, warps=8, stages=3)


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
        at = token_of(n, k_positions, rows, POSITIONS)
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
            weights = tl.where(sees(at[:, None], own[None, :], WINDOW), weights, 0.0)
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
    query_block: int = QUERY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """The second pass alone: sums and recent sums, from the lse of `forward.forward` (contiguous float32, base 2)."""
    check(query, key, key, query_positions, key_positions)
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
        *position_strides(query_positions, key_positions),
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
