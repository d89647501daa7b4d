"""Decode attention over codes in Triton: codes are unpacked in registers, never written out.

A row is read in words of 8 or 16 bits. The codes at one place of all words are the channels place, place + n, ...: a
matrix product over channels may take them in any order, so each place is one product of its own, with the matching
channels of the query, and no code ever changes its lane. Codes below 128 become bfloat16 by one bit operation: the low
bits of the pattern of 128.0 count in whole numbers (of 1024.0 in float16); the base is taken off sums, not codes.

Scales of values per token go onto the softmax weights. Groups of channels differ in them, and a tile of the tensor
cores has 16 rows of which a group of query heads fills few: so every query head has one row for each group of channels,
with the weights of that group, and of each row only the channels of its group are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfoundry.codecs.grouped import offset
from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.decode_attention.fused import MOST_QUERIES
from kvfoundry.kernels.splitting import find_part, join, online, part_buffers, share_out, soften, store_part
from kvfoundry.kernels.triton_support import (
    Tuning,
    check_device,
    dot_precision,
    interpreted,
    launches,
    multiprocessors,
    next_power,
    tl,
    triton,
)

DEFAULT = Tuning(block=32, warps=1, stages=3, programs=8)
# Rows of a tile at least: a matrix product of the tensor cores takes no fewer.
_LEAST = 16

# How a decoded number follows from its code: code * scale + minimum, (code - zero) * scale, float8 * scale.
_MINIMUM, _ZERO, _FLOAT8 = 0, 1, 2


@triton.jit
def _raw(words, place: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """The codes at one place of the words, as numbers of the dtype, each too large by the base.

    PAIRS: two words of 16 bits at once in a register of 32, in two instructions; the compiler does not find them.
    """
    if KIND == 2:
        return words.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    if BITS == 8:
        return words.to(tl.float32).to(dtype)
    if PAIRS:
        # (word >> shift) & mask | base in both halves: bits that cross the middle fall to the mask
        mask: tl.constexpr = (2**BITS - 1) * 0x10001
        base: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        bits = tl.inline_asm_elementwise(
            f"shr.b32 $0, $1, {place * BITS}; lop3.b32 $0, $0, {mask}, {base}, 0xEA;",
            "=r,r",
            [words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        return bits.to(dtype, bitcast=True)
    code = (words.to(tl.int16) >> (place * BITS)) & (2**BITS - 1)
    if dtype == tl.bfloat16:
        return (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if dtype == tl.float16:
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return code.to(dtype)


@triton.jit
def _scaled(
    raw, scale, minimum, BASE: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr, dtype: tl.constexpr
):
    """Decoded numbers of the dtype, element by element."""
    number = raw - tl.full([], BASE, tl.float32).to(dtype)
    if HAS_MINIMUM:
        if KIND == 1:
            return ((number - minimum.to(dtype)) * scale.to(dtype)).to(dtype)
        return (number * scale.to(dtype) + minimum.to(dtype)).to(dtype)
    return (number * scale.to(dtype)).to(dtype)


@triton.jit
def _common(raw, weight, scale, minimum, BASE: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """scale * (sum of weighted numbers) + minimum * (sum of weights), from the weighted sum of raw codes; float32."""
    scale = scale.to(tl.float32)
    if HAS_MINIMUM:
        if KIND == 1:
            return (raw - (BASE + minimum.to(tl.float32)) * weight) * scale
        return (raw - BASE * weight) * scale + minimum.to(tl.float32) * weight
    return (raw - BASE * weight) * scale


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
    work,
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
    k_row,
    ks_batch,
    ks_head,
    ks_row,
    v_batch,
    v_head,
    v_row,
    vs_batch,
    vs_head,
    vs_row,
    tk_batch,
    tk_head,
    tk_row,
    tv_batch,
    tv_head,
    tv_row,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
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
    KEY_BASE: tl.constexpr,
    KEY_HAS_MINIMUM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_PLACES: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VW: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_SLICES: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUE_PAIRS: tl.constexpr,
    VALUE_BASE: tl.constexpr,
    VALUE_HAS_MINIMUM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, HEADS)
    rows = tl.load(work + index, mask=index < heads_total * 2, other=0)
    splits = share_out(rows, wanted, BLOCK)
    if program >= tl.sum(splits, axis=0):
        return
    # kinds alternate: the codes of a head, then its tail
    found, start, stop = find_part(program, rows, splits, BLOCK, HEADS)
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
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)

    if found % 2 == 1:
        tail_at = tail_query + batch * tq_batch + query_head * tq_head + number_of * tq_query
        whole = tl.load(tail_at[:, None] + dk[None, :], mask=real[:, None] & (dk < KEY_DIM)[None, :], other=0.0)
        tk_at = tail_keys + batch * tk_batch + head * tk_head
        tv_at = tail_values + batch * tv_batch + head * tv_head
        tail_acc = tl.zeros([M, DV], tl.float32)
        # few rows: no tiles in flight, which would take the shared memory of other programs
        for begin in tl.range(start, stop, BLOCK, num_stages=1):
            n = begin + tl.arange(0, BLOCK)
            there = n < stop
            inside = there[None, :] & (dk < KEY_DIM)[:, None]
            k = tl.load(tk_at + n[None, :] * tk_row + dk[:, None], mask=inside, other=0.0)
            logits = soften(tl.dot(whole, k, input_precision=PRECISION), scaling, softcap, SOFTCAP)
            logits = tl.where(there[None, :] & ((count + n)[None, :] <= own[:, None]), logits, float("-inf"))
            weights, peak, total, fade = online(logits, peak, total)
            inside = there[:, None] & (dv < VALUE_DIM)[None, :]
            v = tl.load(tv_at + n[:, None] * tv_row + dv[None, :], mask=inside, other=0.0)
            tail_acc = tl.dot(weights.to(dtype), v, tail_acc * fade[:, None], input_precision=PRECISION)
        store_part(parts, part_lse, program, tail_acc, peak, total, GROUP * QUERIES, M, VALUE_DIM, DV)
        return

    q_at = query + batch * q_batch + query_head * q_head + number_of * q_query
    kw = tl.arange(0, KW)
    vw = tl.arange(0, VW)
    q = ()
    asked_for = tl.zeros([M], tl.float32)
    for place in tl.static_range(KEY_PLACES):
        asked = kw * KEY_PLACES + place
        found_q = tl.load(q_at[:, None] + asked[None, :], mask=real[:, None] & (asked < KEY_DIM)[None, :], other=0.0)
        q += (found_q,)
        asked_for += tl.sum(found_q.to(tl.float32), axis=1)
    acc = ()
    for _ in tl.static_range(VALUE_PLACES):
        acc += (tl.zeros([M, VW], tl.float32),)
    common = tl.zeros([M], tl.float32)
    kc_at = key_codes + batch * k_batch + head * k_head
    ks_at = key_scale + batch * ks_batch + head * ks_head
    km_at = key_minimum + batch * ks_batch + head * ks_head
    vc_at = value_codes + batch * v_batch + head * v_head
    vs_at = value_scale + batch * vs_batch + head * vs_head
    vm_at = value_minimum + batch * vs_batch + head * vs_head
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        there = n < stop
        words = tl.load(
            kc_at + n[None, :] * k_row + kw[:, None], mask=there[None, :] & (kw < KEY_WORDS)[:, None], other=0
        )
        logits = tl.zeros([M, BLOCK], tl.float32)
        if not KEY_TOKENS and KEY_SLICES > 1:
            group = (kw * KEY_PLACES) // KEY_GROUP
            at = n[None, :] * ks_row + group[:, None]
            inside = there[None, :] & (kw < KEY_WORDS)[:, None]
            scale = tl.load(ks_at + at, mask=inside, other=0.0)
            minimum = scale
            if KEY_HAS_MINIMUM:
                minimum = tl.load(km_at + at, mask=inside, other=0)
        for place in tl.static_range(KEY_PLACES):
            if KEY_TOKENS:
                channel = kw * KEY_PLACES + place
                if KEY_GROUP >= BLOCK:
                    at = (begin // KEY_GROUP) * ks_row + channel
                    inside = channel < KEY_DIM
                else:  # several groups side by side in a tile
                    at = (n // KEY_GROUP)[None, :] * ks_row + channel[:, None]
                    inside = (channel < KEY_DIM)[:, None] & there[None, :]
                scale = tl.load(ks_at + at, mask=inside, other=0.0)
                minimum = scale
                if KEY_HAS_MINIMUM:
                    minimum = tl.load(km_at + at, mask=inside, other=0)
                if KEY_GROUP >= BLOCK:
                    scale, minimum = scale[:, None], minimum[:, None]
            k = _raw(words, place, KEY_BITS, KEY_KIND, KEY_PAIRS, dtype)
            if KEY_TOKENS or KEY_SLICES > 1:
                k = _scaled(k, scale, minimum, KEY_BASE, KEY_KIND, KEY_HAS_MINIMUM, dtype)
            logits = tl.dot(q[place], k, logits, input_precision=PRECISION)
        if not KEY_TOKENS and KEY_SLICES == 1:
            scale = tl.load(ks_at + n * ks_row, mask=there, other=0.0)[None, :]
            minimum = scale
            if KEY_HAS_MINIMUM:
                minimum = tl.load(km_at + n * ks_row, mask=there, other=0)[None, :]
            logits = _common(logits, asked_for[:, None], scale, minimum, KEY_BASE, KEY_KIND, KEY_HAS_MINIMUM)
        logits = soften(logits, scaling, softcap, SOFTCAP)
        logits = tl.where(there[None, :] & (n[None, :] <= own[:, None]), logits, float("-inf"))
        weights, peak, total, fade = online(logits, peak, total)
        words = tl.load(
            vc_at + n[:, None] * v_row + vw[None, :], mask=there[:, None] & (vw < VALUE_WORDS)[None, :], other=0
        )
        if not VALUE_TOKENS:
            at = n[None, :] * vs_row + part_of[:, None]
            inside = there[None, :] & real[:, None]
            scale = tl.load(vs_at + at, mask=inside, other=0.0).to(tl.float32)
            scaled = (weights * scale).to(dtype)
            # what all channels of a group have in common; the raw codes are too large by the base
            if VALUE_HAS_MINIMUM:
                minimum = tl.load(vm_at + at, mask=inside, other=0).to(tl.float32)
                if VALUE_KIND == 1:
                    shared = -scaled.to(tl.float32) * (minimum + VALUE_BASE)
                else:
                    shared = weights * minimum - scaled.to(tl.float32) * VALUE_BASE
            else:
                shared = -scaled.to(tl.float32) * VALUE_BASE
            common = common * fade + tl.sum(shared, axis=1)
        else:
            scaled = weights.to(dtype)
        further = ()
        for place in tl.static_range(VALUE_PLACES):
            v = _raw(words, place, VALUE_BITS, VALUE_KIND, VALUE_PAIRS, dtype)
            if VALUE_TOKENS:
                channel = vw * VALUE_PLACES + place
                if VALUE_GROUP >= BLOCK:
                    at = (begin // VALUE_GROUP) * vs_row + channel
                    inside = channel < VALUE_DIM
                else:
                    at = (n // VALUE_GROUP)[:, None] * vs_row + channel[None, :]
                    inside = there[:, None] & (channel < VALUE_DIM)[None, :]
                scale = tl.load(vs_at + at, mask=inside, other=0.0)
                minimum = scale
                if VALUE_HAS_MINIMUM:
                    minimum = tl.load(vm_at + at, mask=inside, other=0)
                if VALUE_GROUP >= BLOCK:
                    scale, minimum = scale[None, :], minimum[None, :]
                v = _scaled(v, scale, minimum, VALUE_BASE, VALUE_KIND, VALUE_HAS_MINIMUM, dtype)
            further += (tl.dot(scaled, v, acc[place] * fade[:, None], input_precision=PRECISION),)
        acc = further

    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = program.to(tl.int64) * (GROUP * QUERIES) + m % (GROUP * QUERIES)
    tl.store(part_lse + at, tl.where(some, peak + tl.log2(divisor), float("-inf")), mask=m < GROUP * QUERIES)
    for place in tl.static_range(VALUE_PLACES):
        channel = vw * VALUE_PLACES + place
        inside = real[:, None] & (channel < VALUE_DIM)[None, :]
        if VALUE_SLICES > 1:
            inside = inside & (part_of[:, None] == (channel // VALUE_GROUP)[None, :])
        result = (acc[place] + common[:, None]) / divisor[:, None]
        tl.store(parts + at[:, None] * VALUE_DIM + channel[None, :], result, mask=inside)


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
    tuning: Tuning = DEFAULT,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `naive.attend`; coded and tails are contiguous int32.

    Raises KVFoundryError for codes that the kernel cannot read (3 bits, groups that no tile or word fits into), more
    than eight queries, and tensors that are not on one GPU.
    """
    batch, query_heads, queries, key_dim = query.shape
    heads, value_dim = coded.shape[1], values.dim
    if queries > MOST_QUERIES:
        raise KVFoundryError(f"decode attention takes at most {MOST_QUERIES} queries, got {queries}.")
    if coded.dtype != torch.int32 or tails.dtype != torch.int32:
        raise KVFoundryError("the numbers of coded and of newest rows must be int32.")
    tensors = (query, coded, tails, tail_keys, tail_values, tail_query, sinks, keys.codes, keys.scale, keys.minimum)
    check_device(*tensors, values.codes, values.scale, values.minimum)
    group = query_heads // heads
    # a tile within one group of tokens where groups are no smaller than the least tile of the tensor cores
    groups = [max(_LEAST, side.group) for side in (keys, values) if side.along == "tokens"]
    block = min(tuning.block, *groups, tuning.block)
    side_terms = {**_terms("KEY", keys, block, query.dtype), **_terms("VALUE", values, block, query.dtype)}
    words = {"KEY": side_terms.pop("KEY_VIEW"), "VALUE": side_terms.pop("VALUE_VIEW")}
    wanted = multiprocessors(query.device) * tuning.programs
    programs = wanted + 2 * batch * heads
    work = torch.stack([coded, tails], dim=-1)
    parts, part_lse = part_buffers(programs, group * queries, value_dim, query.device)
    output = query.new_empty(batch, query_heads, queries, value_dim)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device) if return_lse else None
    tail_query = query if tail_query is None else tail_query
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
        work,
        parts,
        part_lse,
        wanted,
        batch * heads,
        heads,
        scaling,
        softcap or 1.0,
        *query.stride()[:3],
        *tail_query.stride()[:3],
        *words["KEY"].stride()[:3],
        *keys.scale.stride()[:3],
        *words["VALUE"].stride()[:3],
        *values.scale.stride()[:3],
        *tail_keys.stride()[:3],
        *tail_values.stride()[:3],
        GROUP=group,
        QUERIES=queries,
        M=next_power(group * queries * side_terms["VALUE_SLICES"], 16),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DK=next_power(key_dim, 16),
        DV=next_power(value_dim, 16),
        BLOCK=block,
        HEADS=next_power(2 * batch * heads),
        **side_terms,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    join(parts, part_lse, work, output, lse, sinks, wanted=wanted, block=block)
    return output if lse is None else (output, lse)


def _terms(name: str, side: Codes, block: int, dtype: torch.dtype) -> dict[str, Any]:
    """How one side is read, as arguments of the kernel, and its codes as words."""
    size = side.codes.shape[3]
    if side.bits not in (1, 2, 4, 8):
        raise KVFoundryError(f"the fused kernel reads codes of 1, 2, 4 and 8 bits, got {side.bits}.")
    if side.codes.stride(3) != 1 or side.scale.stride(3) != 1:
        raise KVFoundryError("the last dimension of codes and scales must be dense.")
    if side.minimum is not None and side.minimum.stride() != side.scale.stride():
        raise KVFoundryError("scales and minima of codes must be laid out alike.")
    # 16 bits at a time, as long as that leaves at least 16 words for a matrix product
    even = all(stride % 2 == 0 for stride in side.codes.stride()[:3]) and side.codes.storage_offset() % 2 == 0
    wide = side.bits < 8 and size % 2 == 0 and size // 2 > 8 and even
    view = side.codes.view(torch.int16) if wide else side.codes
    places = (16 if wide else 8) // side.bits
    if side.along == "tokens" and side.group % block and block % side.group:
        raise KVFoundryError(f"groups of {side.group} tokens and tiles of {block} rows do not fill each other.")
    if side.along == "channels" and side.group % places and side.group < side.dim:
        raise KVFoundryError(f"groups of {side.group} channels are no whole number of {places} codes.")
    slices = -(-side.dim // side.group) if side.along == "channels" else 1
    base = 0
    if side.bits < 8:
        base = {torch.bfloat16: 128, torch.float16: 1024}.get(dtype, 0)
    kind = {"zero_point": _ZERO, "float8": _FLOAT8}.get(side.mode, _MINIMUM)
    return {
        f"{name}_VIEW": view,
        f"{name}_BITS": side.bits,
        f"{name}_PLACES": places,
        f"{name}_WORDS": view.shape[3],
        "KW" if name == "KEY" else "VW": next_power(view.shape[3], 16),
        f"{name}_GROUP": side.group,
        f"{name}_TOKENS": side.along == "tokens",
        f"{name}_KIND": kind,
        f"{name}_PAIRS": wide and base > 0 and not interpreted(),
        f"{name}_SLICES": slices,
        f"{name}_BASE": float(base + (0 if side.mode == "float8" else offset(side.bits, side.mode))),
        f"{name}_HAS_MINIMUM": side.minimum is not None,
    }
