"""Decode attention over codes of 2 or 4 bits, lane by lane: keys scaled per channel, values per token, 128 channels.

The same sums as in `fused`, for the shape where products of few query rows cost more than reading: every word is loaded
where the tensor cores want it, or gets there by a transposition in registers, and all columns of a product are used.
One warp goes through its rows in tiles of 32, within a group of tokens; what the next tile needs is loaded before.

Keys. A word of 16 bits holds neighbouring channels. Lane 4 g + t reads those of channels 32 t .. 32 t + 31 of row g:
one place of four such words is the first operand of a product with the query's matching channels, which the group's
scales have been multiplied into. Its columns are the query heads, twice: column n is head n % 4. The minima of eight
groups meet the query together.

Values. Eight words of a row are a chunk, of two groups of channels (2 bits) or of one. A chunk of all rows is a matrix
that is transposed, so that words are rows of a product over rows of the cache: two places of a chunk (2 bits) or one of
two chunks. Its columns are the query heads with the weights of a group, then with those of the next: of the sums,
those of words and columns of one group are wanted. Minima of values and ones are further rows, met by the weights as
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.coded_decode.sides import LIFT_BITS, SLACK, TINY_BITS
from kvfoundry.kernels.coded_decode.tail import attend_tail
from kvfoundry.kernels.splitting import find_part, rows_of, share_out
from kvfoundry.kernels.triton_support import Tuning, interpreted, next_power, tl, triton
from kvfoundry.kernels.warp import from_lane, halves, multiply, pair, times, transposed

# Rows of a tile; tiles whose minima of keys are looked up together.
_TILE, _TOGETHER = tl.constexpr(32), tl.constexpr(8)
# Query heads of a stored head at most, and channels.
_HEADS, _DIM, _GROUP = 4, 128, 32
DEFAULT = Tuning(block=32, warps=1, stages=1, programs=12, registers=168)


@triton.jit
def _wide(at, WORDS: tl.constexpr):
    """A tuple of `WORDS` words of 32 bits per lane from `at`, pointers to 64 bits."""
    found = ()
    if WORDS == 2:
        both = tl.load(at)
        found += (both.to(tl.int32), (both >> 32).to(tl.int32))
    for part in tl.static_range(WORDS // 4):
        left, right = tl.split(tl.load(at[:, None] + (2 * part + tl.arange(0, 2))[None, :]))
        found += (left.to(tl.int32), (left >> 32).to(tl.int32), right.to(tl.int32), (right >> 32).to(tl.int32))
    return found


@triton.jit
def _at_place(channels, step: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Of a lane's 32 channels, two a word, those at one place of four words of codes, in the order of an operand."""
    places: tl.constexpr = 16 // BITS
    at: tl.constexpr = step // places * 2 * places + step % places // 2
    left = halves(channels[at], channels[at + places // 2], step % 2, PTX)
    right = halves(channels[at + places], channels[at + places + places // 2], step % 2, PTX)
    return left, right


@triton.jit
def _keys(codes_at, scale_at, row, table, K_ROW: tl.constexpr, KS_ROW: tl.constexpr, BITS: tl.constexpr):
    """What a lane holds of a tile: its words of rows g, g + 8, ..., and scales of its 32 channels."""
    words = ()
    at = codes_at + row * (K_ROW // 8)
    for block in tl.static_range(4):
        words += _wide(at + block * K_ROW, BITS)
    return words, _wide(scale_at + table * (KS_ROW // 4), 16)


@triton.jit
def _values(codes_at, table_at, row, V_ROW: tl.constexpr, VS_ROW: tl.constexpr, BITS: tl.constexpr):
    """What a lane holds of a tile: two words of every chunk of eight of rows g, g + 8, ..., two entries of tables."""
    words = ()
    tables = ()
    at = codes_at + row * (V_ROW // 4)
    table_at += row * (VS_ROW // 2)
    for block in tl.static_range(4):
        for chunk in tl.static_range(BITS):
            words += (tl.load(at + 2 * block * V_ROW + 4 * chunk),)
        tables += (tl.load(table_at + 4 * block * VS_ROW),)
    return words, tables


@triton.jit
def _codes(words, place: tl.constexpr, BITS: tl.constexpr):
    """The codes at one place of two words of 16 bits as subnormal numbers of bfloat16, 2 ** (BITS * place) as large.

    The least exponent's numbers and those of the next are in one line, so that eight bits serve; the upper eight begin
    at one again.
    """
    room: tl.constexpr = 8 // BITS
    return (words >> (place // room * 8)) & ((2**BITS - 1) * 0x00010001 << (BITS * (place % room)))


@triton.jit
def attend_lanes(
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
    q_batch,
    q_head,
    tq_batch,
    tq_head,
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
    KEY_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TINY_BITS: tl.constexpr,
    LIFT_BITS: tl.constexpr,
    SLACK: tl.constexpr,
    BITS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Parts of attention, as `fused._parts` leaves them. One warp."""
    program = tl.program_id(0)
    index = tl.arange(0, HEADS)
    rows = rows_of(coded, tails, index < heads_total * 2, index, 2)
    splits = share_out(rows, wanted, _TILE)
    if program >= tl.sum(splits, axis=0):
        return
    # kinds alternate: the codes of a head, then its tail
    found, start, stop = find_part(program, rows, splits, _TILE, HEADS)
    owner = found // 2
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
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
            tl.load(tails + owner),
            scaling,
            1.0,
            tq_head,
            0,
            tk_row,
            tv_row,
            GROUP=GROUP,
            QUERIES=1,
            M=16,
            KEY_DIM=128,
            VALUE_DIM=128,
            DK=128,
            DV=128,
            BLOCK=16,
            SOFTCAP=False,
            PRECISION="tf32",
        )
        return

    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    wide: tl.constexpr = tl.pointer_type(tl.int64)
    narrow: tl.constexpr = tl.pointer_type(tl.int32)
    query_head = head * GROUP + (g % 4) % GROUP
    asked = _wide((query + batch * q_batch + query_head * q_head).to(wide) + 8 * t, 16)
    kc_at = (key_codes + batch * k_batch + head * k_head).to(wide) + BITS // 2 * t
    ks_at = (key_scale + batch * ks_batch + head * ks_head).to(wide) + 8 * t
    km_at = (key_minimum + batch * ks_batch + head * ks_head).to(wide) + 8 * t
    vc_at = (value_codes + batch * v_batch + head * v_head).to(narrow) + t
    # lanes 0 and 1 of a row read its scales, 2 and 3 its minima
    vs_at = (value_scale + batch * vs_batch + head * vs_head).to(narrow)
    vm_at = (value_minimum + batch * vs_batch + head * vs_head).to(narrow)
    apart = (vm_at.to(tl.int64) - vs_at.to(tl.int64)) // 4
    table_at = vs_at + tl.where(t < 2, t.to(tl.int64), apart + t - 2)

    # places of a word, and those that are read without moving it; eight steps of a product go through all channels
    places: tl.constexpr = 16 // BITS
    room: tl.constexpr = 8 // BITS
    # a power of two is exact: codes at higher places count in larger units
    q = ()
    for step in tl.static_range(8):
        lift = tl.full([32], 2.0**LIFT_BITS / 2 ** (BITS * (step % room)), tl.float32)
        lift = pair(lift, lift, PTX)
        left, right = _at_place(asked, step, BITS, PTX)
        q += (times(left, lift, PTX), times(right, lift, PTX))

    nothing = tl.zeros([32], tl.float32)
    none = tl.zeros([32], tl.int32)
    ones = tl.full([32], 0x3F803F80, tl.int32)
    acc = ()
    for _ in tl.static_range(32):
        acc += (nothing,)
    sums = (nothing, nothing, nothing, nothing)
    low = (nothing, nothing)
    anchor = (tl.full([32], -1e30, tl.float32), tl.full([32], -1e30, tl.float32))
    factor = scaling * 1.4426950408889634
    unit = factor * 2.0 ** (TINY_BITS - LIFT_BITS)
    last = start + (stop - start - 1) // _TILE * _TILE
    words, scales = _keys(kc_at, ks_at, start + g, start // KEY_GROUP, K_ROW, KS_ROW, BITS)
    cells, tables = _values(vc_at, table_at, start + g, V_ROW, VS_ROW, BITS)
    for begin in range(start, stop, _TILE):
        following = tl.minimum(begin + _TILE, last)
        turn = (begin - start) // _TILE % _TOGETHER
        if turn == 0:
            table = tl.minimum(begin + _TILE * g, last) // KEY_GROUP
            minima = _wide(km_at + table * (KS_ROW // 4), 16)
            low = (nothing, nothing)
            for size in tl.static_range(room):
                found_low = (nothing, nothing, nothing, nothing)
                for step in tl.static_range(size, 8, room):
                    left, right = _at_place(minima, step, BITS, PTX)
                    found_low = multiply(left, none, right, none, q[2 * step], q[2 * step + 1], *found_low, PTX)
                low = (low[0] + found_low[0] * 2.0 ** (BITS * size), low[1] + found_low[1] * 2.0 ** (BITS * size))

        logits = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        for step in tl.static_range(8):
            left, right = _at_place(scales, step, BITS, PTX)
            left, right = times(q[2 * step], left, PTX), times(q[2 * step + 1], right, PTX)
            further = ()
            for half in tl.static_range(2):
                operand = ()
                for word in tl.static_range(2):
                    for block in tl.static_range(2):
                        read = words[(2 * half + block) * BITS + step // places * 2 + word]
                        operand += (_codes(read, step % places, BITS),)
                result = ()
                for register in tl.static_range(4):
                    result += (logits[4 * half + register],)
                further += multiply(*operand, left, right, *result, PTX)
            logits = further
        words, scales = _keys(kc_at, ks_at, following + g, following // KEY_GROUP, K_ROW, KS_ROW, BITS)
        if begin + _TILE > stop:
            seen = ()
            for number in tl.static_range(8):
                seen += (tl.where(begin + 8 * (number // 2) + g < stop, logits[number], float("-inf")),)
            logits = seen
            # nor do their tables count, whatever they hold
            blanked = ()
            for block in tl.static_range(4):
                blanked += (tl.where(begin + 8 * block + g < stop, tables[block], none),)
            tables = blanked

        common = ()
        offset = ()
        for column in tl.static_range(2):
            common += (from_lane(low[column], 4 * turn + t, PTX) * (factor * 2.0**-LIFT_BITS) + LIFT_BITS,)
            offset += (common[column] - anchor[column],)
        powers = ()
        most = tl.full([32], float("-inf"), tl.float32)
        for number in tl.static_range(8):
            powers += (logits[number] * unit + offset[number % 2],)
            most = tl.maximum(most, powers[number])
        # patterns of numbers above zero are in their order, and those of numbers below zero are integers below zero
        if tl.max(most.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True) > SLACK + LIFT_BITS:
            fade = ()
            risen = ()
            for column in tl.static_range(2):
                peak = tl.maximum(logits[column], logits[column + 2])
                peak = tl.maximum(peak, tl.maximum(logits[column + 4], logits[column + 6]))
                for distance in tl.static_range(2, 5):
                    peak = tl.maximum(peak, from_lane(peak, lane ^ (1 << distance), PTX))
                risen += (tl.maximum(anchor[column], peak * unit + (common[column] - LIFT_BITS)),)
                fade += (tl.exp2(anchor[column] - risen[column]),)
            anchor = risen
            faded = ()
            for number in tl.static_range(32):
                faded += (acc[number] * fade[number % 2],)
            acc = faded
            faded = ()
            for number in tl.static_range(4):
                faded += (sums[number] * fade[number % 2],)
            sums = faded
            lowered = ()
            for number in tl.static_range(8):
                lowered += (logits[number] * unit + (common[number % 2] - anchor[number % 2]),)
            powers = lowered
        weights = ()
        for block in tl.static_range(4):
            weights += (transposed(pair(tl.exp2(powers[2 * block]), tl.exp2(powers[2 * block + 1]), PTX), PTX),)

        factors = ()
        for block in tl.static_range(4):
            factors += (transposed(tables[block], PTX),)
        for half in tl.static_range(2):
            operand = (factors[2 * half], ones, factors[2 * half + 1], ones)
            sums = multiply(*operand, weights[2 * half], weights[2 * half + 1], *sums, PTX)
        further = ()
        for chunk in tl.static_range(2):
            own = ()
            turned = ()
            for block in tl.static_range(4):
                scale = from_lane(factors[block], (2 * chunk + g // 4) * 4 + t, PTX)
                own += (times(weights[block], scale, PTX),)
                for part in tl.static_range(BITS // 2):
                    turned += (transposed(cells[block * BITS + chunk * (BITS // 2) + part], PTX),)
            for place in tl.static_range(4):
                result = ()
                for register in tl.static_range(4):
                    result += (acc[16 * chunk + 4 * place + register],)
                for half in tl.static_range(2):
                    operand = ()
                    for block in tl.static_range(2 * half, 2 * half + 2):
                        for lower in tl.static_range(2):
                            read = turned[(block + lower) * (BITS // 2) - lower]
                            operand += (_codes(read, place + lower * (places - 4), BITS),)
                    result = multiply(*operand, own[2 * half], own[2 * half + 1], *result, PTX)
                further += result
        acc = further
        cells, tables = _values(vc_at, table_at, following + g, V_ROW, VS_ROW, BITS)

    total = (sums[2], sums[3])
    at = program.to(tl.int64) * GROUP
    # Of the sums of a lane those are wanted whose words belong to the group of channels of their columns.
    group = g // 4 if BITS == 2 else t // 2
    for column in tl.static_range(2):
        row = (2 * t + column) % 4
        inside = (group == t // 2) & (row < GROUP)
        share = 1.0 / total[column]
        lifted_share = 2.0**LIFT_BITS / total[column]
        seen_by = anchor[column] + tl.log2(total[column]) - LIFT_BITS
        tl.store(part_lse + at + row, seen_by, mask=(lane < 2) & (row < GROUP))
        for chunk in tl.static_range(2):
            shared = from_lane(sums[column], (4 + 2 * chunk + group) * 4 + t, PTX) * share
            word = 8 * chunk + g if BITS == 2 else 16 * chunk + 8 * group + g
            where = parts + (at + row) * 128 + word * places
            for place in tl.static_range(places):
                if BITS == 2:
                    result = acc[16 * chunk + 4 * (place % 4) + 2 * (place // 4) + column]
                else:
                    result = tl.where(
                        group == 0, acc[16 * chunk + 4 * place + column], acc[16 * chunk + 4 * place + 2 + column]
                    )
                result = result * 2.0 ** (TINY_BITS - LIFT_BITS - BITS * (place % room)) * lifted_share + shared
                tl.store(where + place, result, mask=inside)


def reads(query: Tensor, keys: Codes, values: Codes, softcap: float | None) -> bool:
    """Whether this kernel reads such codes."""
    query_heads, queries = query.shape[1:3]
    numbers = (query, keys.scale, keys.minimum, values.scale, values.minimum)
    return (
        softcap is None
        and keys.bits in (2, 4)
        and queries == 1
        and query_heads // keys.codes.shape[1] <= _HEADS
        and all(side.bits == keys.bits and side.mode == "asymmetric" and side.dim == _DIM for side in (keys, values))
        and keys.along == "tokens"
        and keys.group % DEFAULT.block == 0
        and values.along == "channels"
        and values.group == _GROUP
        and all(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in numbers)
        # tiles at the end are read whole, words of up to 16 bytes at once
        and keys.codes.shape[2] % DEFAULT.block == 0
        and all(_aligned(tensor) for tensor in (query, keys.codes, values.codes, keys.scale, keys.minimum))
        and all(_dense(tensor) for tensor in (values.scale, values.minimum))
        and all(side.minimum is not None and side.minimum.stride() == side.scale.stride() for side in (keys, values))
    )


def launch(
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
    """As `fused._launch`."""
    batch, heads = coded.shape
    attend_lanes[(programs,)](
        query,
        tail_query,
        keys.codes,
        keys.scale,
        keys.minimum,
        values.codes,
        values.scale,
        values.minimum,
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
        *query.stride()[:2],
        *tail_query.stride()[:2],
        *keys.codes.stride()[:2],
        *keys.scale.stride()[:2],
        *values.codes.stride()[:2],
        *values.scale.stride()[:2],
        *tail_keys.stride()[:3],
        *tail_values.stride()[:3],
        K_ROW=keys.codes.stride(2),
        KS_ROW=keys.scale.stride(2),
        V_ROW=values.codes.stride(2),
        VS_ROW=values.scale.stride(2),
        KEY_GROUP=keys.group,
        GROUP=query.shape[1] // heads,
        HEADS=next_power(2 * batch * heads),
        TINY_BITS=TINY_BITS[torch.bfloat16],
        LIFT_BITS=LIFT_BITS[torch.bfloat16],
        SLACK=SLACK,
        BITS=keys.bits,
        PTX=not interpreted(),
        num_warps=1,
        num_stages=1,
        maxnreg=tuning.registers,
    )
    return DEFAULT.block


def _aligned(tensor: Tensor | None) -> bool:
    """Whether every row is dense and starts at a multiple of 16 bytes."""
    return (
        tensor is not None
        and tensor.stride(3) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
    )


def _dense(tensor: Tensor | None) -> bool:
    """Whether the rows of a head are one behind the other, each at a multiple of its size."""
    return (
        tensor is not None
        and tensor.stride()[2:] == (tensor.shape[3], 1)
        and tensor.data_ptr() % (tensor.shape[3] * tensor.element_size()) == 0
        and all(stride % tensor.shape[3] == 0 for stride in tensor.stride()[:2])
    )
