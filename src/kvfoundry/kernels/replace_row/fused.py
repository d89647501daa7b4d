"""The row that leaves a full head in Triton: tiles of rows rank themselves, one program per head compares tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.splitting import soften
from kvfoundry.kernels.triton_support import check_device, dot_precision, launches, next_power, tl, triton


@triton.jit
def _rank(
    query,
    keys,
    positions,
    sums,
    position,
    lengths,
    recent,
    first,
    lse,
    tile_scores,
    tile_positions,
    tile_slots,
    scaling,
    softcap,
    q_batch,
    q_head,
    width,
    tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    MEAN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of rows of one head (SUMS), or of one sequence over all heads: its lowest score and whose it is."""
    tile = tl.program_id(0)
    owner = tl.program_id(1)
    batch = (owner // HEADS if SUMS else owner).to(tl.int64)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    now = tl.load(position + batch).to(tl.int32)
    begin = (owner % HEADS) if SUMS else 0
    end = begin + 1 if SUMS else HEADS
    received = tl.zeros([BLOCK], tl.float32)
    for head in range(begin, end):
        stored = batch * HEADS + head
        there = n < tl.load(lengths + stored)
        q_at = query + batch * q_batch + (head * GROUP + m)[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=(m < GROUP)[:, None] & (d < DIM)[None, :], other=0.0)
        k_at = keys + (stored * width + n)[None, :] * DIM + d[:, None]
        k = tl.load(k_at, mask=there[None, :] & (d < DIM)[:, None], other=0.0)
        logits = soften(tl.dot(q, k, input_precision=PRECISION), scaling, softcap, SOFTCAP)
        known = tl.load(lse + (batch * HEADS + head) * GROUP + m, mask=m < GROUP, other=0.0) * 1.4426950408889634
        weights = tl.where((m < GROUP)[:, None] & there[None, :], tl.exp2(logits - known[:, None]), 0.0)
        received += tl.sum(weights, axis=0)
    row = (owner.to(tl.int64) if SUMS else batch * HEADS) * width + n
    there = n < tl.load(lengths + (owner if SUMS else batch * HEADS))
    at = tl.load(positions + row, mask=there, other=-1)
    if SUMS:
        earlier = tl.load(sums + row, mask=there, other=0.0)
        scores = tl.where(at == now, 0.0, earlier) + (received / GROUP if MEAN else received)
        tl.store(sums + row, scores, mask=there)
        if NORMALIZE:
            scores = scores / tl.maximum(now - at + 1, 1).to(tl.float32)
    else:
        scores = received / (HEADS * GROUP)
    rivals = there & (at >= tl.load(first + batch)) & (at <= now - tl.load(recent + batch))
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.where(rivals, scores, float("inf"))
    lowest = tl.min(scores, axis=0)
    newest = tl.max(tl.where(rivals & (scores == lowest), at, -1), axis=0)
    slot = tl.max(tl.where(rivals & (at == newest), n, -1), axis=0)
    result = owner * tiles + tile
    tl.store(tile_scores + result, lowest)
    tl.store(tile_positions + result, newest)
    tl.store(tile_slots + result, slot)


@triton.jit
def _pick(
    tile_scores,
    tile_positions,
    tile_slots,
    slots,
    lengths,
    capacities,
    tiles,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One head: the tile whose row leaves."""
    stored = tl.program_id(0)
    if tl.load(lengths + stored) != tl.load(capacities + stored):
        return
    owner = stored if SUMS else stored // HEADS
    t = tl.arange(0, TILES)
    at = owner * tiles + t
    newest = tl.load(tile_positions + at, mask=t < tiles, other=-1)
    scores = tl.load(tile_scores + at, mask=t < tiles, other=float("inf"))
    lowest = tl.min(tl.where(newest >= 0, scores, float("inf")), axis=0)
    leaving = tl.max(tl.where((newest >= 0) & (scores == lowest), newest, -1), axis=0)
    found = tl.load(tile_slots + at, mask=t < tiles, other=-1)
    tl.store(slots + stored, tl.max(tl.where((newest >= 0) & (newest == leaving), found, -1), axis=0))


@launches
def choose(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    sums: Tensor | None,
    position: Tensor,
    *,
    slots: Tensor,
    lengths: Tensor,
    capacities: Tensor,
    recent: Tensor,
    first: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mean: bool = True,
    normalize: bool = False,
    lse: Tensor | None = None,
    block: int = 128,
) -> None:
    """As `naive.choose`; lse is needed, and has the sinks in it. Raises KVFoundryError for tensors that do not fit."""
    batch, heads, width, dim = keys.shape
    if lse is None:
        raise KVFoundryError("the fused choice of a row needs the log-sum-exp of the step's attention.")
    known = (slots, lengths, capacities, recent, first)
    check_device(query, keys, positions, sums, position, lse, *known)
    if not all(tensor.is_contiguous() for tensor in (keys, positions, lse, *known, *([] if sums is None else [sums]))):
        raise KVFoundryError("rows, positions, sums and what is known of heads must be contiguous.")
    if query.stride(3) != 1 or any(tensor.dtype != torch.int32 for tensor in (positions, *known)):
        raise KVFoundryError("the last dimension of queries must be dense, and whole numbers int32.")
    tiles, owners = triton.cdiv(width, block), batch * heads if sums is not None else batch
    tile_scores = torch.empty(owners * tiles, dtype=torch.float32, device=query.device)
    tile_positions, tile_slots = (torch.empty_like(tile_scores, dtype=torch.int32) for _ in range(2))
    group = query.shape[1] // heads
    _rank[(tiles, owners)](
        query,
        keys,
        positions,
        sums if sums is not None else lse,
        position,
        lengths,
        recent,
        first,
        lse,
        tile_scores,
        tile_positions,
        tile_slots,
        scaling,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        width,
        tiles,
        HEADS=heads,
        GROUP=group,
        M=next_power(group, 16),
        DIM=dim,
        D=next_power(dim, 16),
        BLOCK=block,
        SUMS=sums is not None,
        MEAN=mean,
        NORMALIZE=normalize,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=4,
    )
    _pick[(batch * heads,)](
        tile_scores,
        tile_positions,
        tile_slots,
        slots,
        lengths,
        capacities,
        tiles,
        HEADS=heads,
        TILES=next_power(tiles),
        SUMS=sums is not None,
        num_warps=1,
    )
