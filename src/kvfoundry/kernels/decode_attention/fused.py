"""Decode attention in Triton: all query heads of a stored head in one program, the rows split over the whole GPU.

Two launches: parts of rows with a running softmax (`_parts`), then their combination (`kvfoundry.kernels.splitting`).
Neither asks the host anything, and every buffer follows from shapes: both can be captured in a CUDA graph while
lengths, starts, positions and page tables change in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.splitting import find_part, join, part_buffers, share_out, store_part
from kvfoundry.kernels.tiles import logits_of, taken_in
from kvfoundry.kernels.triton_support import (
    Tuning,
    check_device,
    dot_precision,
    launches,
    multiprocessors,
    next_power,
    tl,
    triton,
)

# Queries of one sequence in one call; their heads share a tile of at least 16 rows.
MOST_QUERIES = 8

DEFAULT = Tuning(block=64, warps=4, stages=3, programs=2)


@triton.jit
def _parts(
    query,
    keys,
    values,
    starts,
    lengths,
    positions,
    query_positions,
    pages,
    counts,
    parts,
    part_lse,
    kept,
    wanted,
    heads_total,
    stored_heads,
    scaling,
    softcap,
    q_batch,
    q_head,
    q_query,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    p_batch,
    p_head,
    qp_batch,
    table_width,
    kept_width,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    RAGGED: tl.constexpr,
    POSITIONS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEPT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, HEADS)
    if PAGE > 0:
        rows = tl.load(counts + index, mask=index < heads_total, other=0) * PAGE
    else:
        rows = tl.load(lengths + index, mask=index < heads_total, other=0)
    if MOST > 0:
        rows = tl.minimum(rows, MOST)
    splits = share_out(rows, wanted, BLOCK)
    if program >= tl.sum(splits, axis=0):
        return
    owner, start, stop = find_part(program, rows, splits, BLOCK, HEADS)
    length = tl.load(lengths + owner)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    # rows before the window of the oldest query are not read at all
    skipped = 0
    if MOST > 0:
        skipped = length - tl.minimum(length, MOST)

    m = tl.arange(0, M)
    dk = tl.arange(0, DK)
    real = m < GROUP * QUERIES
    number = m // GROUP
    q_at = query + batch * q_batch + (head * GROUP + m % GROUP)[:, None] * q_head + number[:, None] * q_query
    q = tl.load(q_at + dk[None, :], mask=real[:, None] & (dk < KEY_DIM)[None, :], other=0.0)
    if POSITIONS:
        own = tl.load(query_positions + batch * qp_batch + number, mask=real, other=-1).to(tl.int32)
    else:
        own = length - QUERIES + number

    k_base = keys + batch * k_batch + head * k_head
    v_base = values + batch * v_batch + head * v_head
    p_base = positions + batch * p_batch + head * p_head
    if RAGGED:
        slot = tl.load(starts + owner).to(tl.int64)
        k_base += slot * k_row
        v_base += slot * v_row
        p_base += slot
    table = pages + owner.to(tl.int64) * table_width

    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        if PAGE > 0:
            number_of = tl.load(table + n // PAGE, mask=n < stop, other=-1).to(tl.int32)
            row = number_of * PAGE + n % PAGE
            there = (number_of >= 0) & (row < length)
            row = tl.where(there, row, 0)
        else:
            row = skipped + n
            there = n < stop
        logits = logits_of(
            q, k_base, row, there, k_row, scaling, softcap, True, KEY_DIM, DK, SOFTCAP, PRECISION
        )  # fmt: skip
        if POSITIONS:
            at = tl.load(p_base + row, mask=there, other=-1).to(tl.int32)
            seen = (at >= 0)[None, :] & (at[None, :] <= own[:, None])
        else:
            at = row
            seen = there[None, :] & (at[None, :] <= own[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > own[:, None] - WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
        if KEPT:
            kept_at = kept + (owner.to(tl.int64) * (GROUP * QUERIES) + m)[:, None] * kept_width + row[None, :]
            tl.store(kept_at, logits, mask=real[:, None] & there[None, :])
        acc, peak, total = taken_in(
            acc, peak, total, logits, v_base, row, there, v_row, True, VALUE_DIM, DV, PRECISION
        )  # fmt: skip
    store_part(parts, part_lse, program, acc, peak, total, GROUP * QUERIES, M, VALUE_DIM, DV)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
    tuning: Tuning = DEFAULT,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `naive.attend`; lengths are contiguous int32, the last dimension of rows and queries is dense.

    Raises KVFoundryError for more than eight queries, lengths of another dtype, positions without query_positions, and
    tensors that are not on one GPU.
    """
    return launch(
        query,
        keys,
        values,
        lengths,
        scaling=scaling,
        starts=starts,
        positions=positions,
        query_positions=query_positions,
        softcap=softcap,
        sinks=sinks,
        window=window,
        return_lse=return_lse,
        tuning=tuning,
    )


@launches
def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    starts: Tensor | None,
    positions: Tensor | None,
    query_positions: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    return_lse: bool,
    tuning: Tuning,
    pages: Tensor | None = None,
    counts: Tensor | None = None,
    page: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The launches behind `attend` and behind paged attention.

    pages: [batch, heads, widest] int32 page numbers with -1 for none; counts: [batch, heads] int32 entries to look at;
    page: rows of a page, 0 where there are none.
    """
    batch, query_heads, queries, _ = query.shape
    output = query.new_empty(batch, query_heads, queries, values.shape[-1])
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device) if return_lse else None
    parts = cut(
        query,
        keys,
        values,
        lengths,
        scaling=scaling,
        starts=starts,
        positions=positions,
        query_positions=query_positions,
        softcap=softcap,
        window=window,
        tuning=tuning,
        pages=pages,
        counts=counts,
        page=page,
    )
    join(
        parts.output,
        parts.lse,
        counts if counts is not None else lengths,
        output,
        lse,
        sinks,
        wanted=parts.wanted,
        block=tuning.block,
        scale=max(1, page),
        most=parts.most,
    )
    return output if lse is None else (output, lse)


class Parts(NamedTuple):
    """What the first launch leaves: `splitting.join` takes these. most: rows of a head that were read, 0 for all."""

    output: Tensor
    lse: Tensor
    wanted: int
    most: int


def cut(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
    tuning: Tuning = DEFAULT,
    pages: Tensor | None = None,
    counts: Tensor | None = None,
    page: int = 0,
    logits: Tensor | None = None,
) -> Parts:
    """The first of two launches; arguments as of `launch`.

    logits: contiguous float32 [batch, query_heads, queries, capacity], filled with what every query gives every row
    before the softmax: scaled, capped, times log2(e); a head's own rows alone are written.
    """
    batch, query_heads, queries, key_dim = query.shape
    heads, value_dim = lengths.shape[1], values.shape[-1]
    check_device(query, keys, values, lengths, starts, positions, query_positions, pages, counts, logits)
    _check(query, keys, values, lengths, starts, positions, query_positions)
    group = query_heads // heads
    wanted = multiprocessors(query.device) * tuning.programs
    programs = wanted + batch * heads
    # consecutive tokens: rows that no query's window reaches need not be read
    most = window + queries - 1 if window is not None and positions is None and page == 0 else 0
    parts, part_lse = part_buffers(programs, group * queries, value_dim, query.device)
    ragged = starts is not None
    flat_positions = positions is not None and positions.dim() == 1
    _parts[(programs,)](
        query,
        keys,
        values,
        starts if starts is not None else lengths,
        lengths,
        positions if positions is not None else lengths,
        query_positions if query_positions is not None else lengths,
        pages if pages is not None else lengths,
        counts if counts is not None else lengths,
        parts,
        part_lse,
        logits if logits is not None else part_lse,
        wanted,
        batch * heads,
        heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *((0, 0, keys.stride(0)) if ragged else keys.stride()[:3]),
        *((0, 0, values.stride(0)) if ragged else values.stride()[:3]),
        0 if positions is None or flat_positions else positions.stride(0),
        0 if positions is None or flat_positions or positions.shape[1] == 1 else positions.stride(1),
        query_positions.stride(0) if query_positions is not None else 0,
        pages.shape[2] if pages is not None else 0,
        logits.shape[3] if logits is not None else 0,
        GROUP=group,
        QUERIES=queries,
        M=next_power(group * queries, 16),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DK=next_power(key_dim, 16),
        DV=next_power(value_dim, 16),
        BLOCK=tuning.block,
        HEADS=next_power(batch * heads),
        RAGGED=ragged,
        POSITIONS=positions is not None,
        PAGE=page,
        WINDOW=window or 0,
        MOST=most,
        SOFTCAP=softcap is not None,
        KEPT=logits is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return Parts(parts, part_lse, wanted, most)


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    query_positions: Tensor | None,
) -> None:
    if query.shape[2] > MOST_QUERIES:
        raise KVFoundryError(f"decode attention takes at most {MOST_QUERIES} queries, got {query.shape[2]}.")
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise KVFoundryError(f"lengths must be contiguous int32, got {lengths.dtype}.")
    if starts is not None and not starts.is_contiguous():
        raise KVFoundryError("starts must be contiguous.")
    if query.shape[1] % lengths.shape[1]:
        raise KVFoundryError(f"{query.shape[1]} query heads cannot share {lengths.shape[1]} stored heads evenly.")
    if positions is not None and query_positions is None:
        raise KVFoundryError("positions of rows need query_positions.")
    ragged = starts is not None
    if keys.dim() != (2 if ragged else 4) or values.dim() != keys.dim():
        raise KVFoundryError("rows are [batch, heads, capacity, dim], or [slots, dim] together with starts.")
    dense_last = (query, keys, values, *((positions, query_positions) if positions is not None else ()))
    if any(tensor.stride(-1) != 1 for tensor in dense_last if tensor is not None):
        raise KVFoundryError("the last dimension of queries, rows and positions must be dense.")
