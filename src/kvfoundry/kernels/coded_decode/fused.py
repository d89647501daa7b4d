"""Decode attention over codes in Triton: codes are unpacked in registers, never written out.

A row is read in words of 8 or 16 bits. The codes at one place of all words are the channels place, place + n, ...: a
matrix product over channels may take them in any order, so each place is one product of its own, with the matching
channels of the query, and no code ever changes its lane. Codes below 128 become bfloat16 by one bit operation: the low
bits of the pattern of 128.0 count in whole numbers (of 1024.0 in float16); the base is taken off sums, not codes. Where
scales go onto the other factor there is no base: the bits alone are a subnormal number, which tensor cores multiply
like any other, and the other factor is made larger by a power of two. Codes that lie higher in the word need not be
moved down: they count in larger units, which the other factor takes back.

Scales of keys per channel go onto the query, once for a tile that lies within one group of tokens; their minima add the
same to all logits of a row, found by products with a matrix whose columns are all alike.

Scales of values per token go onto the softmax weights. Groups of channels differ in them, and a tile of the tensor
cores has 16 rows of which a group of query heads fills few: so every query head has one row for each group of channels,
with the weights of that group, and of each row only the channels of its group are written. Words whose groups belong to
different rows are laid below each other, as further rows of values, so that a row sums little else than its own.

Tables are read several entries in one word, ahead of their use like the codes: such copies have four bytes or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode import lanes
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.coded_decode.registers import (
    codes_at,
    common_terms,
    entry_of,
    entry_of_row,
    laid_beside,
    load_entries,
    scaled_codes,
    times_pairs,
)
from kvfoundry.kernels.coded_decode.sides import LEAST, LIFT_BITS, SLACK, TINY_BITS, chunks_of, side_terms
from kvfoundry.kernels.coded_decode.tail import attend_tail
from kvfoundry.kernels.decode_attention.fused import MOST_QUERIES
from kvfoundry.kernels.splitting import find_part, join, part_buffers, rows_of, share_out, soften
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

DEFAULT = Tuning(block=32, warps=1, stages=3, programs=8)
# Columns of a matrix product that only sums: what the tensor cores take at least.
_COLUMNS = tl.constexpr(8)


@triton.jit
def _parts(
    query,
    tail_query,
    key_codes,
    key_scale,
    key_minimum,
    value_codes,
    value_scale,
    value_minimum,
    tail_keys,
    tail_values,
    coded,
    tails,
    parts,
    part_lse,
    wanted,
    heads_total,
    stored_heads,
    scaling,
    softcap,
    q_batch,
    q_head,
    q_query,
    tq_batch,
    tq_head,
    tq_query,
    k_batch,
    k_head,
    ks_batch,
    ks_head,
    v_batch,
    v_head,
    vs_batch,
    vs_head,
    tk_batch,
    tk_head,
    tk_row,
    tv_batch,
    tv_head,
    tv_row,
    K_ROW: tl.constexpr,
    KS_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    VS_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_PLACES: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KW: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_SLICES: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_PAIRS: tl.constexpr,
    KEY_ROOM: tl.constexpr,
    KEY_PER: tl.constexpr,
    KEY_TINY: tl.constexpr,
    KEY_BASE: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    KEY_HAS_MINIMUM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_PLACES: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    VW: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_SLICES: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUE_PAIRS: tl.constexpr,
    VALUE_ROOM: tl.constexpr,
    VALUE_PER: tl.constexpr,
    VALUE_TINY: tl.constexpr,
    VALUE_BASE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    VALUE_HAS_MINIMUM: tl.constexpr,
    TINY_BITS: tl.constexpr,
    LIFT_BITS: tl.constexpr,
    SLACK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, HEADS)
    rows = rows_of(coded, tails, index < heads_total * 2, index, 2)
    splits = share_out(rows, wanted, STEP)
    if program >= tl.sum(splits, axis=0):
        return
    # kinds alternate: the codes of a head, then its tail
    found, start, stop = find_part(program, rows, splits, STEP, HEADS)
    owner = found // 2
    count = tl.load(coded + owner)
    tail = tl.load(tails + owner)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    dtype: tl.constexpr = query.dtype.element_ty

    # every row once for each group of channels of the values: see the head of this file
    m = tl.arange(0, M)
    real = m < GROUP * QUERIES * VALUE_SLICES
    part_of = m // (GROUP * QUERIES)
    number_of = m % (GROUP * QUERIES) // GROUP
    own = count + tail - QUERIES + number_of
    query_head = head * GROUP + m % GROUP

    if found % 2 == 1:
        attend_tail(
            tail_query + batch * tq_batch,
            tail_keys + batch * tk_batch + head * tk_head,
            tail_values + batch * tv_batch + head * tv_head,
            parts,
            part_lse,
            program,
            head,
            start,
            stop,
            tail,
            scaling,
            softcap,
            tq_head,
            tq_query,
            tk_row,
            tv_row,
            GROUP=GROUP,
            QUERIES=QUERIES,
            M=TAIL_ROWS,
            KEY_DIM=KEY_DIM,
            VALUE_DIM=VALUE_DIM,
            DK=DK,
            DV=DV,
            BLOCK=TAIL_BLOCK,
            SOFTCAP=SOFTCAP,
            PRECISION=PRECISION,
        )
        return

    q_at = query + batch * q_batch + query_head * q_head + number_of * q_query
    kw = tl.arange(0, KW)
    # a row that belongs to one slice reads only the words of its chunk: no sums that nobody wants
    vw = tl.arange(0, VW)
    chunk_of = part_of // (VALUE_SLICES // VALUE_CHUNKS)
    q = ()
    key_lift: tl.constexpr = 2.0**LIFT_BITS if KEY_TINY else 1.0
    # what is to be taken off sums of products with subnormal numbers and lifted ones
    lifted: tl.constexpr = 2.0 ** (TINY_BITS - LIFT_BITS)
    lift_bits: tl.constexpr = LIFT_BITS if VALUE_TINY else 0
    asked_for = tl.zeros([M], tl.float32)
    for place in tl.static_range(KEY_PLACES):
        d = kw * KEY_PLACES + place
        found_q = tl.load(q_at[:, None] + d[None, :], mask=real[:, None] & (d < KEY_DIM)[None, :], other=0.0)
        asked_for += tl.sum(found_q.to(tl.float32), axis=1)
        if KEY_TOKENS and KEY_GROUP >= BLOCK:
            # As they are (a power of two is exact), but in the lanes where products want them: every tile scales them.
            identity = (kw[:, None] == kw[None, :]).to(tl.float32) * (key_lift / 2 ** (place * KEY_BITS % KEY_ROOM))
            found_q = tl.dot(found_q, identity.to(dtype), input_precision=PRECISION).to(dtype)
        q += (found_q,)
    acc = ()
    for _ in tl.static_range(VALUE_PLACES):
        acc += (tl.zeros([M, VW], tl.float32),)
    # sums over rows as products with a matrix of ones: all of its columns say the same
    ones = tl.full([BLOCK, _COLUMNS], 1.0, tl.float32).to(dtype)
    weighed = tl.zeros([M, _COLUMNS], tl.float32)
    scaled_weighed = tl.zeros([M, _COLUMNS], tl.float32)
    shared_weighed = tl.zeros([M, _COLUMNS], tl.float32)
    scale_type: tl.constexpr = key_scale.dtype.element_ty
    kc_at = key_codes + batch * k_batch + head * k_head
    ks_at = key_scale + batch * ks_batch + head * ks_head
    km_at = key_minimum + batch * ks_batch + head * ks_head
    apart = (km_at.to(tl.int64) - ks_at.to(tl.int64)) // (scale_type.primitive_bitwidth // 8)
    vc_at = value_codes + batch * v_batch + head * v_head
    vs_at = value_scale + batch * vs_batch + head * vs_head
    vm_at = value_minimum + batch * vs_batch + head * vs_head
    minimum_type: tl.constexpr = key_minimum.dtype.element_ty
    value_scale_type: tl.constexpr = value_scale.dtype.element_ty
    value_minimum_type: tl.constexpr = value_minimum.dtype.element_ty
    end = tl.minimum(stop, own + 1)
    seen_by_all = tl.min(end, axis=0)
    # What weights are set against, in base 2: a peak that is a little too low serves, and sums stay as they are.
    anchor = tl.full([M], -1e30, tl.float32)
    factor = 1.0 if SOFTCAP else scaling * 1.4426950408889634
    key_unit: tl.constexpr = lifted if KEY_TINY else 1.0
    logit_unit: tl.constexpr = 1.0 if SOFTCAP else key_unit
    for begin in range(start, stop, STEP):
        # logits of the tiles, and what those of a tile have in common; tiles of one group of tokens share its scales
        logits = ()
        added = ()
        for tile in tl.static_range(0, STEP, BLOCK):
            # behind the last row it is read again: nothing weighs it
            n = tl.minimum(begin + tile + tl.arange(0, BLOCK), stop - 1)
            words = tl.load(kc_at + n[None, :] * K_ROW + kw[:, None], mask=(kw < KEY_WORDS)[:, None], other=0)
            logit = tl.zeros([M, BLOCK], tl.float32)
            common = tl.zeros([M], tl.float32)
            if KEY_TOKENS:
                scales = ()
                minima = ()
                for place in tl.static_range(0, KEY_PLACES, KEY_PER):
                    channel = kw * KEY_PLACES + place
                    if KEY_GROUP >= BLOCK:
                        at = (tl.minimum(begin + tile, stop - 1) // KEY_GROUP) * KS_ROW + channel
                        inside = channel < KEY_DIM
                    else:  # several groups side by side in a tile
                        at = (n // KEY_GROUP)[None, :] * KS_ROW + channel[:, None]
                        inside = (channel < KEY_DIM)[:, None]
                    if KEY_HAS_MINIMUM and KEY_KIND == 0 and KEY_GROUP >= BLOCK:
                        # both tables in one load, which is wide enough to be shared out over the lanes
                        pair = at[:, None] + (tl.arange(0, 2) * apart)[None, :]
                        scale, minimum = tl.split(load_entries(ks_at + pair, inside[:, None], KEY_PER))
                        scales += (scale,)
                        minima += (minimum,)
                    else:
                        scales += (load_entries(ks_at + at, inside, KEY_PER),)
                        if KEY_HAS_MINIMUM:
                            minima += (load_entries(km_at + at, inside, KEY_PER),)
                # scales go onto the query. What offsets add is taken off by the very numbers that read the codes.
                bases = tl.zeros([M, _COLUMNS], tl.float32)
                lows = tl.zeros([M, _COLUMNS], tl.float32)
                for place in tl.static_range(KEY_PLACES):
                    scale = entry_of(scales[place // KEY_PER], place % KEY_PER, KEY_PER, scale_type).to(dtype)
                    minimum = scale
                    if KEY_HAS_MINIMUM:
                        minimum = entry_of(minima[place // KEY_PER], place % KEY_PER, KEY_PER, minimum_type).to(dtype)
                    k = codes_at(words, place, KEY_BITS, KEY_ROOM, KEY_KIND, KEY_PAIRS, KEY_TINY, dtype)
                    if KEY_GROUP >= BLOCK:
                        unit = 2 ** (place * KEY_BITS % KEY_ROOM)
                        asked = (q[place] * scale[None, :]).to(dtype)
                        if KEY_HAS_MINIMUM and KEY_KIND != 1:
                            low = minimum
                            if unit > 1:
                                low = (low * tl.full([], unit, tl.float32).to(dtype)).to(dtype)
                            low = low[:, None].broadcast_to(KW, _COLUMNS)
                            lows = tl.dot(q[place], low, lows, input_precision=PRECISION)
                        if KEY_BASE + KEY_OFFSET != 0 or KEY_KIND == 1:
                            base = tl.full([KW], -KEY_BASE - KEY_OFFSET * unit, tl.float32)
                            if KEY_KIND == 1:
                                base -= minimum.to(tl.float32) * unit
                            base = base.to(dtype)[:, None].broadcast_to(KW, _COLUMNS)
                            bases = tl.dot(asked, base, bases, input_precision=PRECISION)
                    else:
                        asked = q[place]
                        k = scaled_codes(k, scale, minimum, KEY_BASE + KEY_OFFSET, KEY_KIND, KEY_HAS_MINIMUM, dtype)
                    logit = tl.dot(asked, k, logit, input_precision=PRECISION)
                common = tl.max(bases + lows, axis=1) * (1.0 / key_lift)
            elif KEY_SLICES > 1:
                group = (kw * KEY_PLACES) // KEY_GROUP
                at = n[None, :] * KS_ROW + group[:, None]
                inside = (kw < KEY_WORDS)[:, None]
                scale = tl.load(ks_at + at, mask=inside, other=0.0)
                minimum = scale
                if KEY_HAS_MINIMUM:
                    minimum = tl.load(km_at + at, mask=inside, other=0)
                for place in tl.static_range(KEY_PLACES):
                    raw = codes_at(words, place, KEY_BITS, KEY_ROOM, KEY_KIND, KEY_PAIRS, KEY_TINY, dtype)
                    k = scaled_codes(raw, scale, minimum, KEY_BASE + KEY_OFFSET, KEY_KIND, KEY_HAS_MINIMUM, dtype)
                    logit = tl.dot(q[place], k, logit, input_precision=PRECISION)
            else:
                for place in tl.static_range(KEY_PLACES):
                    raw = codes_at(words, place, KEY_BITS, KEY_ROOM, KEY_KIND, KEY_PAIRS, KEY_TINY, dtype)
                    logit = tl.dot(q[place], raw, logit, input_precision=PRECISION)
                scale = tl.load(ks_at + n * KS_ROW)[None, :]
                minimum = scale
                if KEY_HAS_MINIMUM:
                    minimum = tl.load(km_at + n * KS_ROW)[None, :]
                logit = common_terms(
                    logit, asked_for[:, None], scale, minimum, KEY_BASE + KEY_OFFSET, KEY_KIND, KEY_HAS_MINIMUM
                )
            if SOFTCAP:
                logit = soften(logit * key_unit + common[:, None], scaling, softcap, SOFTCAP)
                common = tl.zeros([M], tl.float32)
            if begin + STEP > seen_by_all:
                n = begin + tile + tl.arange(0, BLOCK)
                logit = tl.where(n[None, :] < end[:, None], logit, float("-inf"))
            logits += (logit,)
            added += (common * factor,)
        powers = ()
        # patterns of numbers above zero are in their order, and those of numbers below zero are integers below zero
        most = tl.zeros([], tl.int32)
        for tile in tl.static_range(STEP // BLOCK):
            power = logits[tile] * (factor * logit_unit) - (anchor - added[tile] - lift_bits)[:, None]
            most = tl.maximum(most, tl.max(power.to(tl.int32, bitcast=True)))
            powers += (power,)
        if most.to(tl.float32, bitcast=True) > SLACK + lift_bits:
            highest = anchor
            for tile in tl.static_range(STEP // BLOCK):
                highest = tl.maximum(highest, tl.max(logits[tile], axis=1) * (factor * logit_unit) + added[tile])
            fade = tl.exp2(anchor - highest)
            anchor = highest
            weighed *= fade[:, None]
            scaled_weighed *= fade[:, None]
            shared_weighed *= fade[:, None]
            further = ()
            for place in tl.static_range(VALUE_PLACES):
                further += (acc[place] * fade[:, None],)
            acc = further
            further = ()
            for tile in tl.static_range(STEP // BLOCK):
                power = logits[tile] * (factor * logit_unit) - (anchor - added[tile] - lift_bits)[:, None]
                further += (power,)
            powers = further
        for tile in tl.static_range(STEP // BLOCK):
            n = tl.minimum(begin + tile * BLOCK + tl.arange(0, BLOCK), stop - 1)
            weights = tl.exp2(powers[tile]).to(dtype)
            weighed = tl.dot(weights, ones, weighed, input_precision=PRECISION)
            if not VALUE_TOKENS:
                if VALUE_PER == VALUE_SLICES:
                    at = (n * VS_ROW)[None, :]
                    inside = None
                else:
                    at = n[None, :] * VS_ROW + (part_of // VALUE_PER * VALUE_PER)[:, None]
                    inside = real[:, None]
                number = (part_of % VALUE_PER)[:, None]
                scale = load_entries(vs_at + at, inside, VALUE_PER)
                scale = entry_of_row(scale, number, VALUE_PER, value_scale_type, VALUE_PAIRS, M).to(dtype)
                if VALUE_HAS_MINIMUM:
                    minimum = load_entries(vm_at + at, inside, VALUE_PER)
                    minimum = entry_of_row(minimum, number, VALUE_PER, value_minimum_type, VALUE_PAIRS, M).to(dtype)
                    if VALUE_KIND == 0:
                        shared = times_pairs(weights, minimum, VALUE_PAIRS, dtype)
                        shared_weighed = tl.dot(shared, ones, shared_weighed, input_precision=PRECISION)
            # chunks below each other are read by the weights of their own rows beside each other
            reading = ()
            for chunk in tl.static_range(VALUE_CHUNKS):
                part = weights
                if not VALUE_TOKENS:
                    own_scale = scale
                    if VALUE_CHUNKS > 1:
                        nothing = tl.zeros([M, BLOCK], tl.float32).to(dtype)
                        own_scale = tl.where((chunk_of == chunk)[:, None], scale, nothing)
                    part = times_pairs(weights, own_scale, VALUE_PAIRS, dtype)
                    if VALUE_BASE + VALUE_OFFSET != 0:
                        scaled_weighed = tl.dot(part, ones, scaled_weighed, input_precision=PRECISION)
                    if VALUE_KIND == 1:
                        shared = times_pairs(-part, minimum, VALUE_PAIRS, dtype)
                        shared_weighed = tl.dot(shared, ones, shared_weighed, input_precision=PRECISION)
                reading += (part,)
            for level in tl.static_range(3):
                if VALUE_CHUNKS >> level > 1:
                    wider = ()
                    for chunk in tl.static_range(0, VALUE_CHUNKS >> level, 2):
                        wider += (laid_beside(reading[chunk], reading[chunk + 1], VALUE_PAIRS, dtype),)
                    reading = wider
            lines = tl.arange(0, VALUE_CHUNKS * BLOCK)
            row = tl.minimum(begin + tile * BLOCK + lines % BLOCK, stop - 1)
            words = tl.load(
                vc_at + row[:, None] * V_ROW + (lines // BLOCK * VW)[:, None] + vw[None, :],
                mask=(vw < VALUE_WORDS)[None, :],
                other=0,
            )
            further = ()
            for place in tl.static_range(VALUE_PLACES):
                v = codes_at(words, place, VALUE_BITS, VALUE_ROOM, VALUE_KIND, VALUE_PAIRS, VALUE_TINY, dtype)
                if VALUE_TOKENS:
                    if place % VALUE_PER == 0:
                        channel = vw * VALUE_PLACES + place
                        if VALUE_GROUP >= BLOCK:
                            at = (tl.minimum(begin + tile * BLOCK, stop - 1) // VALUE_GROUP * VS_ROW + channel)[None, :]
                        else:
                            at = (n // VALUE_GROUP)[:, None] * VS_ROW + channel[None, :]
                        inside = (channel < VALUE_DIM)[None, :]
                        scales = load_entries(vs_at + at, inside, VALUE_PER)
                        minima = scales
                        if VALUE_HAS_MINIMUM:
                            minima = load_entries(vm_at + at, inside, VALUE_PER)
                    scale = entry_of(scales, place % VALUE_PER, VALUE_PER, value_scale_type)
                    minimum = entry_of(minima, place % VALUE_PER, VALUE_PER, value_minimum_type)
                    v = scaled_codes(v, scale, minimum, VALUE_BASE + VALUE_OFFSET, VALUE_KIND, VALUE_HAS_MINIMUM, dtype)
                further += (tl.dot(reading[0], v, acc[place], input_precision=PRECISION),)  # type: ignore[misc]
            acc = further

    total = tl.max(weighed, axis=1)
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = program.to(tl.int64) * (GROUP * QUERIES) + m % (GROUP * QUERIES)
    seen = tl.where(some, anchor + tl.log2(divisor) - lift_bits, float("-inf"))
    tl.store(part_lse + at, seen, mask=m < GROUP * QUERIES)
    scaled_total, shared_total = tl.max(scaled_weighed, axis=1), tl.max(shared_weighed, axis=1)
    for place in tl.static_range(VALUE_PLACES):
        channel = (chunk_of[:, None] * VW + vw[None, :]) * VALUE_PLACES + place
        inside = real[:, None] & (channel < VALUE_DIM)
        if VALUE_SLICES > 1:
            inside = inside & (part_of[:, None] == channel // VALUE_GROUP)
        # the raw codes are too large by the base, and in other units
        unit = 2.0 ** (place * VALUE_BITS % VALUE_ROOM)
        shared = shared_total - scaled_total * (VALUE_BASE / unit + VALUE_OFFSET)
        value_unit = (lifted if VALUE_TINY else 1.0) / unit
        result = acc[place] * value_unit / (divisor * 2.0**-lift_bits)[:, None] + (shared / divisor)[:, None]
        tl.store(parts + at[:, None] * VALUE_DIM + channel, result, mask=inside)


@launches
def attend(
    query: Tensor,
    keys: Codes,
    values: Codes,
    coded: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tails: Tensor,
    *,
    scaling: float,
    tail_query: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    tuning: Tuning | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `naive.attend`; coded and tails are contiguous int32.

    Raises KVFoundryError for codes that the kernel cannot read (3 bits, groups that no tile or word fits into), more
    than eight queries, and tensors that are not on one GPU.
    """
    batch, query_heads, queries, _ = query.shape
    heads, value_dim = coded.shape[1], values.dim
    if queries > MOST_QUERIES:
        raise KVFoundryError(f"decode attention takes at most {MOST_QUERIES} queries, got {queries}.")
    if coded.dtype != torch.int32 or tails.dtype != torch.int32:
        raise KVFoundryError("the numbers of coded and of newest rows must be int32.")
    tensors = (query, coded, tails, tail_keys, tail_values, tail_query, sinks, keys.codes, keys.scale, keys.minimum)
    check_device(*tensors, values.codes, values.scale, values.minimum)
    group = query_heads // heads
    by_lanes = lanes.reads(query, keys, values, softcap)
    tuning = tuning or (lanes.DEFAULT if by_lanes else DEFAULT)
    wanted = multiprocessors(query.device) * tuning.programs
    programs = wanted + 2 * batch * heads
    parts, part_lse = part_buffers(programs, group * queries, value_dim, query.device)
    output = query.new_empty(batch, query_heads, queries, value_dim)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device) if return_lse else None
    tail_query = query if tail_query is None else tail_query
    given = (query, tail_query, keys, values, tail_keys, tail_values, coded, tails, parts, part_lse)
    launch = lanes.launch if by_lanes else _launch
    step = launch(*given, programs=programs, wanted=wanted, scaling=scaling, softcap=softcap, tuning=tuning)
    join(parts, part_lse, coded, output, lse, sinks, wanted=wanted, block=step, others=tails)
    return output if lse is None else (output, lse)


def _launch(
    query: Tensor,
    tail_query: Tensor,
    keys: Codes,
    values: Codes,
    tail_keys: Tensor,
    tail_values: Tensor,
    coded: Tensor,
    tails: Tensor,
    parts: Tensor,
    part_lse: Tensor,
    *,
    programs: int,
    wanted: int,
    scaling: float,
    softcap: float | None,
    tuning: Tuning,
) -> int:
    """Fill the parts; the rows that parts are whole numbers of."""
    batch, query_heads, queries, key_dim = query.shape
    heads, value_dim = coded.shape[1], values.dim
    group = query_heads // heads
    terms = {**side_terms("KEY", keys, query.dtype), **side_terms("VALUE", values, query.dtype)}
    words = {"KEY": terms.pop("KEY_VIEW"), "VALUE": terms.pop("VALUE_VIEW")}
    chunks = chunks_of(words["VALUE"].shape[3], terms["VALUE_SLICES"])
    # a tile within one group of tokens where groups are no smaller than the least tile of the tensor cores
    groups = [max(LEAST, side.group) for side in (keys, values) if side.along == "tokens"]
    block = min(tuning.block, *groups, tuning.block)
    for side in (keys, values):
        if side.along == "tokens" and side.group % block and block % side.group:
            raise KVFoundryError(f"groups of {side.group} tokens and tiles of {block} rows do not fill each other.")
    _parts[(programs,)](
        query,
        tail_query,
        words["KEY"],
        keys.scale,
        keys.scale if keys.minimum is None else keys.minimum,
        words["VALUE"],
        values.scale,
        values.scale if values.minimum is None else values.minimum,
        tail_keys,
        tail_values,
        coded,
        tails,
        parts,
        part_lse,
        wanted,
        batch * heads,
        heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *tail_query.stride()[:3],
        *words["KEY"].stride()[:2],
        *keys.scale.stride()[:2],
        *words["VALUE"].stride()[:2],
        *values.scale.stride()[:2],
        *tail_keys.stride()[:3],
        *tail_values.stride()[:3],
        K_ROW=words["KEY"].stride(2),
        KS_ROW=keys.scale.stride(2),
        V_ROW=words["VALUE"].stride(2),
        VS_ROW=values.scale.stride(2),
        GROUP=group,
        QUERIES=queries,
        M=next_power(group * queries * terms["VALUE_SLICES"], 16),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DK=next_power(key_dim, 16),
        DV=next_power(value_dim, 16),
        STEP=tuning.block,
        BLOCK=block,
        TAIL_BLOCK=tuning.block,
        TAIL_ROWS=next_power(group * queries, 16),
        HEADS=next_power(2 * batch * heads),
        KW=next_power(words["KEY"].shape[3], 16),
        VALUE_CHUNKS=chunks,
        VW=next_power(words["VALUE"].shape[3], 16) // chunks,
        **terms,
        TINY_BITS=TINY_BITS.get(query.dtype, 0),
        LIFT_BITS=LIFT_BITS.get(query.dtype, 0),
        SLACK=0 if query.dtype == torch.float16 else SLACK,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        **({} if tuning.registers is None else {"maxnreg": tuning.registers}),
    )
    return tuning.block
