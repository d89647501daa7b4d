"""Attention of a step and the row that leaves a full head, in Triton: the weights come from the step's own logits.

Three launches. Decode attention (`decode_attention.fused.cut`) also writes down its logits, a fraction of the keys in
bytes. Then some programs join its parts into the output while others turn the logits of a tile of rows into weights, by
the log-sum-exp of the parts, and find the row of the tile that is worth least. The last one compares tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.decode_attention.fused import DEFAULT, cut
from kvfoundry.kernels.splitting import join_row, own_parts, share_out
from kvfoundry.kernels.triton_support import Tuning, check_device, launches, next_power, tl, triton

# Parts of a head that are joined at a time.
_STEP = 32


@triton.jit
def _lse(
    part_lse,
    sinks,
    splits,
    owner,
    stored_heads,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Base-2 log-sum-exp [G] of all logits of one query, for every query head of a stored head."""
    first, number = own_parts(splits, owner, 1, HEADS)
    g = tl.arange(0, G)
    peak = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    if HAS_SINKS:
        of_head = sinks + (owner % stored_heads) * GROUP + g
        peak = tl.load(of_head, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full([G], 1.0, tl.float32)
    for begin in range(0, number, STEP):
        s = begin + tl.arange(0, STEP)
        at = (first + s).to(tl.int64)[:, None] * GROUP + g[None, :]
        part = tl.load(part_lse + at, mask=(s < number)[:, None] & (g < GROUP)[None, :], other=float("-inf"))
        highest = tl.maximum(peak, tl.max(part, axis=0))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(peak - anchor) + tl.sum(tl.exp2(part - anchor[None, :]), axis=0)
        peak = highest
    return peak + tl.log2(tl.where(total > 0.0, total, 1.0))


@triton.jit
def _rank(
    tile,
    owner,
    logits,
    part_lse,
    sinks,
    positions,
    sums,
    position,
    lengths,
    recent,
    first,
    tile_scores,
    tile_positions,
    tile_slots,
    wanted,
    heads_total,
    width,
    tiles,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    MEAN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One tile of rows of one head (SUMS), or of one sequence over all heads: its lowest score and whose it is."""
    batch = (owner // HEADS if SUMS else owner).to(tl.int64)
    n = tile * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, G)
    index = tl.arange(0, ALL_HEADS)
    splits = share_out(tl.load(lengths + index, mask=index < heads_total, other=0), wanted, PART)
    # what depends on nothing is asked for before the parts are joined
    now = tl.load(position + batch).to(tl.int32)
    row = (owner.to(tl.int64) if SUMS else batch * HEADS) * width + n
    present = n < tl.load(lengths + (owner if SUMS else batch * HEADS))
    at = tl.load(positions + row, mask=present, other=-1)
    if SUMS:
        earlier = tl.load(sums + row, mask=present, other=0.0)
    begin = (owner % HEADS) if SUMS else 0
    end = begin + 1 if SUMS else HEADS
    received = tl.zeros([BLOCK], tl.float32)
    for head in range(begin, end):
        stored = batch * HEADS + head
        there = n < tl.load(lengths + stored)
        inside = (g < GROUP)[:, None] & there[None, :]
        given_at = logits + (stored * GROUP + g)[:, None] * width + n[None, :]
        given = tl.load(given_at, mask=inside, other=float("-inf"))
        known = _lse(part_lse, sinks, splits, stored, HEADS, GROUP, G, ALL_HEADS, STEP, HAS_SINKS)
        received += tl.sum(tl.where(inside, tl.exp2(given - known[:, None]), 0.0), axis=0)
    if SUMS:
        scores = tl.where(at == now, 0.0, earlier) + (received / GROUP if MEAN else received)
        tl.store(sums + row, scores, mask=present)
        if NORMALIZE:
            scores = scores / tl.maximum(now - at + 1, 1).to(tl.float32)
    else:
        scores = received / (HEADS * GROUP)
    rivals = present & (at >= tl.load(first + batch)) & (at <= now - tl.load(recent + batch))
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
def _settle(
    parts,
    part_lse,
    logits,
    sinks,
    output,
    positions,
    sums,
    position,
    lengths,
    recent,
    first,
    tile_scores,
    tile_positions,
    tile_slots,
    wanted,
    heads_total,
    width,
    tiles,
    out_batch,
    out_head,
    out_query,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    MEAN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A row of the output for the first programs, a tile of rows for the others; both follow from the parts."""
    program = tl.program_id(0)
    joined = heads_total * GROUP
    if program < joined:
        join_row(
            program // GROUP, program % GROUP, 0, parts, part_lse, lengths, lengths, sinks, output, part_lse, wanted,
            heads_total, HEADS, out_batch, out_head, out_query, 1, 0, GROUP, 1, DIM, D, 1, ALL_HEADS, PART, STEP,
            HAS_SINKS, False,
        )  # fmt: skip
    else:
        _rank(
            (program - joined) % tiles, (program - joined) // tiles, logits, part_lse, sinks, positions, sums,
            position, lengths, recent, first, tile_scores, tile_positions, tile_slots, wanted, heads_total, width,
            tiles, HEADS, ALL_HEADS, GROUP, G, PART, STEP, BLOCK, SUMS, MEAN, NORMALIZE, HAS_SINKS,
        )  # fmt: skip


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
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
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
    tuning: Tuning = DEFAULT,
    block: int = 256,
) -> Tensor:
    """As `naive.attend`; block: rows that one program ranks. Raises KVFoundryError for tensors that do not fit."""
    batch, heads, width, _ = keys.shape
    known = (slots, lengths, capacities, recent, first)
    check_device(query, keys, values, positions, sums, position, sinks, *known)
    if not all(tensor.is_contiguous() for tensor in (positions, *known, *([] if sums is None else [sums]))):
        raise KVFoundryError("positions, sums and what is known of heads must be contiguous.")
    if any(tensor.dtype != torch.int32 for tensor in (positions, *known)):
        raise KVFoundryError("positions and what is known of heads must be int32.")
    query_heads, dim = query.shape[1], values.shape[3]
    logits = torch.empty(batch, query_heads, 1, width, dtype=torch.float32, device=query.device)
    parts = cut(query, keys, values, lengths, scaling=scaling, softcap=softcap, tuning=tuning, logits=logits)
    output = query.new_empty(batch, query_heads, 1, dim)
    tiles, owners = triton.cdiv(width, block), batch * heads if sums is not None else batch
    tile_scores = torch.empty(owners * tiles, dtype=torch.float32, device=query.device)
    tile_positions, tile_slots = (torch.empty_like(tile_scores, dtype=torch.int32) for _ in range(2))
    group = query_heads // heads
    _settle[(batch * query_heads + tiles * owners,)](
        parts.output,
        parts.lse,
        logits,
        sinks if sinks is not None else parts.lse,
        output,
        positions,
        sums if sums is not None else logits,
        position,
        lengths,
        recent,
        first,
        tile_scores,
        tile_positions,
        tile_slots,
        parts.wanted,
        batch * heads,
        width,
        tiles,
        *output.stride()[:3],
        HEADS=heads,
        ALL_HEADS=next_power(batch * heads),
        GROUP=group,
        G=next_power(group),
        DIM=dim,
        D=next_power(dim, 16),
        PART=tuning.block,
        STEP=_STEP,
        BLOCK=block,
        SUMS=sums is not None,
        MEAN=mean,
        NORMALIZE=normalize,
        HAS_SINKS=sinks is not None,
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
    return output
