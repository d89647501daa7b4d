"""Page selection in Triton: scores by two small matrix products, then a selection in one program per head.

That needs no sort: all scores of a head lie in registers, and counts close in on the score of the last page that is
taken, a quarter of what is left at a time, until just as many pages are above. A running sum gives every page its place
in the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.page_selection.naive import Group
from kvfoundry.kernels.triton_support import check_device, dot_precision, launches, next_power, tl, triton

# Neighbouring pages of one lane: what it loads at once. And how often a program with its warps goes on to further ones.
_PAGES_OF_LANE, _CHUNKS = 4, 12
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
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    FIELD_BITS: tl.constexpr,
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

    # integers in the order of the scores, -0 taken for 0; a page that is not there has the least of all
    absent: tl.constexpr = -0x80000000
    infinity: tl.constexpr = 0x7F800000
    keys = ()
    lowest = tl.full([BLOCK], infinity, tl.int32)
    highest = tl.full([BLOCK], absent, tl.int32)
    endless = tl.zeros([BLOCK], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        p = chunk * BLOCK + tl.arange(0, BLOCK)
        there = p < count
        score = tl.load(scores + owner.to(tl.int64) * room + p, mask=there, other=float("-inf"))
        bits = (score + 0.0).to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        lowest = tl.minimum(lowest, tl.where(there, key, infinity))
        key = tl.where(there, key, absent)
        highest = tl.maximum(highest, tl.where(key < infinity, key, absent))
        endless += (key >= infinity).to(tl.int32)
        keys += (key,)
    # at least as many keys as pages are taken reach `low`, fewer reach `high`
    infinite = tl.sum(endless, axis=0)
    low = tl.min(lowest, axis=0)
    high = tl.max(highest, axis=0) + 1
    if infinite >= taken:
        low = tl.full([], infinity, tl.int32)
        high = low + 1
    reached = tl.where(infinite >= taken, infinite, count)
    span = (high - low).to(tl.uint32, bitcast=True)
    while (span > 1) & (reached != taken):
        step = tl.maximum(span // 4, 1).to(tl.int32, bitcast=True)
        counted = tl.zeros([BLOCK], tl.int32)
        for chunk in tl.static_range(CHUNKS):
            for number in tl.static_range(3):
                counted += (keys[chunk] >= low + (number + 1) * step).to(tl.int32) << (10 * number)
        spread = tl.zeros([BLOCK], tl.int64)
        for number in tl.static_range(3):
            spread += ((counted >> (10 * number)) & 0x3FF).to(tl.int64) << (21 * number)
        total = tl.sum(spread, axis=0)
        bottom = low
        for number in tl.static_range(3):
            above = ((total >> (21 * number)) & 0x1FFFFF).to(tl.int32)
            border = bottom + (number + 1) * step
            enough = above >= taken
            reached = tl.where(enough, above, reached)
            low = tl.where(enough, border, low)
            high = tl.where(enough, high, tl.minimum(high, border))
        span = (high - low).to(tl.uint32, bitcast=True)

    keep = ()
    for chunk in tl.static_range(CHUNKS):
        keep += (keys[chunk] >= low,)
    if reached != taken:  # of equal ones the first
        equal = ()
        above = tl.zeros([BLOCK], tl.int32)
        for chunk in tl.static_range(CHUNKS):
            equal += (keys[chunk] == low,)
            above += (keys[chunk] > low).to(tl.int32)
        wanted = taken - tl.sum(above, axis=0)
        rank = _running(equal, CHUNKS, BLOCK, FIELDS, FIELD_BITS)
        chosen = ()
        for chunk in tl.static_range(CHUNKS):
            chosen += (keep[chunk] & ((keys[chunk] != low) | (rank[chunk] <= wanted)),)
        keep = chosen
    place = _running(keep, CHUNKS, BLOCK, FIELDS, FIELD_BITS)
    for chunk in tl.static_range(CHUNKS):
        tl.store(target + place[chunk] - 1, chunk * BLOCK + tl.arange(0, BLOCK), mask=keep[chunk])


@triton.jit
def _running(flags, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, FIELD_BITS: tl.constexpr):
    """How many flags are set up to every one, chunk by chunk; sums of FIELDS chunks lie side by side in one number."""
    mask: tl.constexpr = (1 << FIELD_BITS) - 1
    before = tl.zeros([], tl.int32)
    found = ()
    for first in tl.static_range(0, CHUNKS, FIELDS):
        packed = tl.zeros([BLOCK], tl.int64)
        for field in tl.static_range(FIELDS):
            if first + field < CHUNKS:
                packed += flags[first + field].to(tl.int64) << (field * FIELD_BITS)
        ranks = tl.cumsum(packed, axis=0)
        total = tl.sum(packed, axis=0)
        for field in tl.static_range(FIELDS):
            if first + field < CHUNKS:
                found += (before + ((ranks >> (field * FIELD_BITS)) & mask).to(tl.int32),)
                before += ((total >> (field * FIELD_BITS)) & mask).to(tl.int32)
    return found


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
    warps = min(32, max(4, next_power(triton.cdiv(room, 32 * _PAGES_OF_LANE * _CHUNKS))))
    block = min(32 * _PAGES_OF_LANE * warps, next_power(room))
    bits = block.bit_length()
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
        CHUNKS=triton.cdiv(room, block),
        FIELDS=63 // bits,
        FIELD_BITS=bits,
        num_warps=warps,
    )
    return table, counts


def select(
    query: Tensor, low: Tensor, high: Tensor, lengths: Tensor, *, page: int, budget: int, group: Group = "max"
) -> tuple[Tensor, Tensor]:
    """As `naive.select`."""
    scores = page_scores(query, low, high, lengths, page=page, group=group)
    return best_pages(scores, lengths, page=page, budget=budget)
