"""Page selection in Triton: scores by two small matrix products, then a selection in one program per head.

That needs no sort: all scores of a head lie in registers, and counts find the score of the last page that is taken, two
bits of it at a time, until just as many pages are above. A running sum gives every page its place in the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.page_selection.naive import Group
from kvfoundry.kernels.triton_support import check_device, dot_precision, launches, next_power, tl, triton

# Pages that a warp ranks.
_PAGES_OF_WARP = 256
_REDUCTIONS = {"max": 0, "mean": 1, "sum": 2}


@triton.jit
def _score(
    query,
    low,
    high,
    lengths,
    scores,
    stored_heads,
    room,
    q_batch,
    q_head,
    b_batch,
    b_head,
    b_page,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCTION: tl.constexpr,
    PRECISION: tl.constexpr,
):
    owner = tl.program_id(1)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.cdiv(tl.load(lengths + owner), PAGE)
    target = scores + owner.to(tl.int64) * room + p
    if tl.program_id(0) * BLOCK >= count:
        tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=p < room)
        return
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(
        query + batch * q_batch + (head * GROUP + m)[:, None] * q_head + d[None, :],
        mask=(m < GROUP)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    at = batch * b_batch + head * b_head + p[None, :] * b_page + d[:, None]
    # the last page is read anyway: its bounds need not be there
    whole = (p < count - 1)[None, :] & (d < DIM)[:, None]
    zero = tl.zeros_like(q)
    found = tl.dot(tl.where(q > 0, q, zero), tl.load(high + at, mask=whole, other=0.0), input_precision=PRECISION)
    found = tl.dot(tl.where(q < 0, q, zero), tl.load(low + at, mask=whole, other=0.0), found, input_precision=PRECISION)
    if REDUCTION == 0:
        best = tl.max(tl.where((m < GROUP)[:, None], found, float("-inf")), axis=0)
    else:
        best = tl.sum(found, axis=0)
        if REDUCTION == 1:
            best = best / GROUP
    best = tl.where(p == count - 1, float("inf"), best)
    tl.store(target, tl.where(p < count, best, float("-inf")), mask=p < room)


@triton.jit
def _select(
    scores,
    lengths,
    table,
    counts,
    room,
    PAGE: tl.constexpr,
    BUDGET: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = tl.program_id(0)
    count = tl.cdiv(tl.load(lengths + owner), PAGE)
    taken = tl.minimum(count, BUDGET)
    target = table + owner.to(tl.int64) * BUDGET
    w = tl.arange(0, WIDTH)
    tl.store(target + w, tl.full([WIDTH], -1, tl.int32), mask=(w >= taken) & (w < BUDGET))
    tl.store(counts + owner, taken)
    if taken == 0:
        return

    p = tl.arange(0, BLOCK)
    there = p < count
    score = tl.load(scores + owner.to(tl.int64) * room + p, mask=there, other=float("-inf"))
    # integers in the order of the scores, -0 taken for 0; a page that is not there has the least of all
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = tl.where(there, key, tl.zeros_like(key))
    # the highest number that as many keys reach as pages are taken, its highest two bits first; three counts in a sum
    last = tl.zeros([], tl.uint32)
    reached = tl.full([], BLOCK, tl.int64)
    shift = tl.full([], 30, tl.int32)
    while (shift >= 0) & (reached != taken):
        step = (tl.full([], 1, tl.uint32) << shift.to(tl.uint32)).to(tl.uint32)
        one = (key >= last + step).to(tl.int64)
        two = (key >= last + 2 * step).to(tl.int64)
        three = (key >= last + 3 * step).to(tl.int64)
        counted = tl.sum(one + (two << 21) + (three << 42), axis=0)
        highest = last
        for number in tl.static_range(1, 4):
            above = (counted >> (21 * (number - 1))) & 0x1FFFFF
            enough = above >= taken
            reached = tl.where(enough, above, reached)
            highest = tl.where(enough, last + number * step, highest)
        last = highest
        shift -= 2
    keep = there & (key >= last)
    if reached != taken:  # of equal ones the first
        equal = (there & (key == last)).to(tl.int32)
        wanted = taken - tl.sum((key > last).to(tl.int32), axis=0)
        keep = there & ((key > last) | ((equal == 1) & (tl.cumsum(equal, axis=0) <= wanted)))
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(target + place, p, mask=keep)


@triton.jit
def _extend(
    low,
    high,
    keys,
    lengths,
    stored_heads,
    b_batch,
    b_head,
    b_page,
    k_batch,
    k_head,
    k_row,
    PAGE: tl.constexpr,
    NEW: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    owner = tl.program_id(0)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    d = tl.arange(0, D)
    inside = d < DIM
    first = tl.load(lengths + owner) - NEW
    base = batch * b_batch + head * b_head + d
    begun = inside & (first % PAGE != 0)
    smallest = tl.load(low + base + (first // PAGE) * b_page, mask=begun, other=float("inf"))
    largest = tl.load(high + base + (first // PAGE) * b_page, mask=begun, other=float("-inf"))
    for i in tl.static_range(NEW):
        row = first + i
        key = tl.load(keys + batch * k_batch + head * k_head + i * k_row + d, mask=inside, other=0.0)
        fresh = row % PAGE == 0
        smallest = tl.where(fresh, key, tl.minimum(smallest, key))
        largest = tl.where(fresh, key, tl.maximum(largest, key))
        tl.store(low + base + (row // PAGE) * b_page, smallest, mask=inside)
        tl.store(high + base + (row // PAGE) * b_page, largest, mask=inside)


@launches
def extend_bounds(low: Tensor, high: Tensor, keys: Tensor, lengths: Tensor, *, page: int) -> None:
    """As `naive.extend_bounds`; lengths contiguous int32, the last dimension dense, low and high with equal strides."""
    batch, heads, new, dim = keys.shape
    check_device(low, high, keys, lengths)
    if low.stride() != high.stride() or low.stride(3) != 1 or keys.stride(3) != 1:
        raise KVFoundryError("bounds must be laid out alike, with a dense last dimension like the keys.")
    _extend[(batch * heads,)](
        low,
        high,
        keys,
        lengths,
        heads,
        *low.stride()[:3],
        *keys.stride()[:3],
        PAGE=page,
        NEW=new,
        DIM=dim,
        D=next_power(dim),
        num_warps=1,
    )


@launches
def page_scores(
    query: Tensor, low: Tensor, high: Tensor, lengths: Tensor, *, page: int, group: Group, block: int = 64
) -> Tensor:
    """As `naive.page_scores`; lengths contiguous int32, the last dimension dense, low and high with equal strides."""
    batch, query_heads, dim = query.shape
    heads, room = low.shape[1], low.shape[2]
    check_device(query, low, high, lengths)
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise KVFoundryError(f"lengths must be contiguous int32, got {lengths.dtype}.")
    if low.stride() != high.stride() or low.stride(3) != 1 or query.stride(2) != 1:
        raise KVFoundryError("bounds must be laid out alike, with a dense last dimension.")
    scores = torch.empty(batch, heads, room, dtype=torch.float32, device=query.device)
    _score[(triton.cdiv(room, block), batch * heads)](
        query,
        low,
        high,
        lengths,
        scores,
        heads,
        room,
        query.stride(0),
        query.stride(1),
        low.stride(0),
        low.stride(1),
        low.stride(2),
        PAGE=page,
        GROUP=query_heads // heads,
        M=next_power(query_heads // heads, 16),
        DIM=dim,
        D=next_power(dim, 16),
        BLOCK=block,
        REDUCTION=_REDUCTIONS[group],
        PRECISION=dot_precision(query.dtype),
        num_warps=4,
    )
    return scores


@launches
def best_pages(scores: Tensor, lengths: Tensor, *, page: int, budget: int) -> tuple[Tensor, Tensor]:
    """As `naive.best_pages`; scores contiguous float32 without NaN."""
    batch, heads, room = scores.shape
    check_device(scores, lengths)
    table = torch.empty(batch, heads, budget, dtype=torch.int32, device=scores.device)
    counts = torch.empty(batch, heads, dtype=torch.int32, device=scores.device)
    block = next_power(room, 16)
    _select[(batch * heads,)](
        scores,
        lengths,
        table,
        counts,
        room,
        PAGE=page,
        BUDGET=budget,
        WIDTH=next_power(budget),
        BLOCK=block,
        num_warps=min(32, max(4, block // _PAGES_OF_WARP)),
    )
    return table, counts


def select(
    query: Tensor, low: Tensor, high: Tensor, lengths: Tensor, *, page: int, budget: int, group: Group = "max"
) -> tuple[Tensor, Tensor]:
    """As `naive.select`."""
    scores = page_scores(query, low, high, lengths, page=page, group=group)
    return best_pages(scores, lengths, page=page, budget=budget)
