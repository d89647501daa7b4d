"""The log of every query's sum in Triton, without attending: what column sums need where attention has not kept it.

Few queries over many rows are few tiles: the rows are cut into parts, enough to fill the GPU, which torch then joins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.prefill_attention.places import check, position_strides, queries_of, sees, token_of
from kvfoundry.kernels.splitting import LOG2_E, online
from kvfoundry.kernels.tiles import logits_of
from kvfoundry.kernels.triton_support import (
    Tuning,
    dot_precision,
    launches,
    multiprocessors,
    next_power,
    tl,
    triton,
)

# Queries of one tile; the tuning has the rows.
QUERY_BLOCK = 64

LOG_SUMS = Tuning(block=64, warps=4, stages=3, programs=4)


@triton.jit
def _log_sums(
    query,
    key,
    q_positions,
    k_positions,
    found,
    queries,
    rows,
    part_rows,
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
    first = tl.program_id(0) * QUERY_BLOCK
    owner = tl.program_id(1)
    part = tl.program_id(2)
    batch = (owner // query_heads).to(tl.int64)
    query_head = (owner % query_heads).to(tl.int64)
    head = query_head // GROUP
    distance = rows - queries
    i = first + tl.arange(0, QUERY_BLOCK)
    q, own = queries_of(
        query, q_positions, i, batch, query_head, queries, distance, q_batch, q_head, q_row, qp_batch, KEY_DIM, DK,
        POSITIONS,
    )  # fmt: skip
    k_base = key + batch * k_batch + head * k_head
    kp_base = k_positions + batch * kp_batch + head * kp_head
    start = part * part_rows
    stop = tl.minimum(start + part_rows, rows)
    if not POSITIONS:
        stop = tl.minimum(stop, distance + first + QUERY_BLOCK)
        if WINDOW > 0:
            start = tl.maximum(start, tl.maximum(0, distance + first - WINDOW + 1) // BLOCK * BLOCK)
    peak = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        logits = logits_of(q, k_base, n, n < rows, k_row, scaling, softcap, True, KEY_DIM, DK, SOFTCAP, PRECISION)
        seen = sees(token_of(n, kp_base, rows, POSITIONS)[None, :], own[:, None], WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
        _, peak, total, _ = online(logits, peak, total)
    value = tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    target = found + (part * tl.num_programs(1) + owner).to(tl.int64) * queries + i
    tl.store(target, value, mask=i < queries)


@launches
def log_sums(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    tuning: Tuning = LOG_SUMS,
    query_block: int = QUERY_BLOCK,
) -> Tensor:
    """The base-2 log-sum-exp [batch, query_heads, queries] of every query, as `forward.forward` gives it; float32."""
    check(query, key, key, query_positions, key_positions)
    batch, query_heads, queries, key_dim = query.shape
    heads, rows = key.shape[1], key.shape[2]
    block = next_power(min(query_block, queries), 16)
    tiles = triton.cdiv(queries, block) * batch * query_heads
    parts = max(1, min(triton.cdiv(multiprocessors(query.device) * tuning.programs, tiles), rows // tuning.block))
    part_rows = triton.cdiv(triton.cdiv(rows, parts), tuning.block) * tuning.block
    parts = max(1, triton.cdiv(rows, part_rows))
    found = torch.empty(parts, batch, query_heads, queries, dtype=torch.float32, device=query.device)
    _log_sums[(triton.cdiv(queries, block), batch * query_heads, parts)](
        query,
        key,
        found if query_positions is None else query_positions,
        found if key_positions is None else key_positions,
        found,
        queries,
        rows,
        part_rows,
        query_heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *key.stride()[:3],
        *position_strides(query_positions, key_positions),
        GROUP=query_heads // heads,
        KEY_DIM=key_dim,
        DK=next_power(key_dim, 16),
        QUERY_BLOCK=block,
        BLOCK=tuning.block,
        POSITIONS=query_positions is not None,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    if sinks is not None:
        sink = (sinks.float() * LOG2_E)[:, None].expand(1, batch, query_heads, queries)
        found = torch.cat([found, sink])
    summed = torch.logsumexp(found / LOG2_E, dim=0) * LOG2_E
    # where nothing was seen, an infinite sum makes every weight nothing
    return summed.masked_fill(summed.isneginf(), float("inf"))
