"""Group-wise encoding in Triton: every number is rounded as in `codecs.grouped`, so the codes are the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.packing import packed_bytes
from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.encode_rows.form import Form
from kvfoundry.kernels.triton_support import check_device, launches, next_power, tl, triton

# Rows of one program where every row stands alone.
_BLOCK = 16

_MODES = {"asymmetric": 0, "symmetric": 1, "symmetric_full": 2, "zero_point": 3, "float8": 4}


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 as the dtype would hold it; bfloat16 is computed with in float32."""
    if dtype == tl.float16:
        return x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _stored(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _whole(x):
    """The nearest whole number, half to even, of a float32 below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _shared(x, parts: tl.constexpr, INVERT: tl.constexpr):
    """x / parts as torch does it: by the inverse on a GPU."""
    if INVERT:
        return x * (1.0 / parts)
    return tl.div_rn(x, parts * 1.0)


@triton.jit
def _quantized(
    x,
    low,
    high,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
    INVERT: tl.constexpr,
):
    """(codes int32 like x, scale, minimum) of groups with these extremes; scale and minimum float32, as stored."""
    levels: tl.constexpr = 2**BITS - 1
    if MODE == 0:
        scale = _stored(_shared(tl.minimum(_stored(high - low, dtype), TOP), levels, INVERT), dtype)
        steps = _rounded(tl.div_rn(_rounded(x - low, dtype), tl.where(scale == 0.0, 1.0, scale)), dtype)
        codes = tl.minimum(tl.maximum(_whole(steps), 0.0), levels * 1.0)
        return codes.to(tl.int32), scale, low
    if MODE == 3:
        low = tl.minimum(low, 0.0)
        high = tl.maximum(high, 0.0)
        scale = _stored(_shared(tl.minimum(_stored(high - low, dtype), TOP), levels, INVERT), dtype)
        scale = tl.where(scale == 0.0, 1.0, scale)
        zero = tl.minimum(tl.maximum(_whole(_rounded(tl.div_rn(-low, scale), dtype)), 0.0), levels * 1.0)
        codes = _whole(_rounded(tl.div_rn(x, scale), dtype)) + zero
        codes = tl.minimum(tl.maximum(codes, 0.0), levels * 1.0)
        return codes.to(tl.int32), scale, zero
    size = tl.maximum(tl.abs(high), tl.abs(low))
    if MODE == 1:
        scale = _stored(_shared(size, 2 ** (BITS - 1) - 1, INVERT), dtype)
    else:
        scale = _stored(_shared(size, levels / 2, INVERT), dtype)
    steps = _whole(_rounded(tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale)), dtype))
    least: tl.constexpr = -(2 ** (BITS - 1)) + (1 if MODE == 1 else 0)
    shift: tl.constexpr = 2 ** (BITS - 1) - (1 if MODE == 1 else 0)
    codes = tl.minimum(tl.maximum(steps, least * 1.0), (2 ** (BITS - 1) - 1) * 1.0) + shift
    return codes.to(tl.int32), scale, scale


@triton.jit
def _packed(codes, ROWS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr):
    """uint8 [ROWS, BYTES] of codes with ROWS * BYTES * 8 / BITS elements in row-major order."""
    per: tl.constexpr = 8 // BITS
    split = tl.reshape(codes, (ROWS, BYTES, per))
    place = tl.arange(0, per) * BITS
    return tl.sum(split << place[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def _per_token(
    rows,
    codes,
    scales,
    minima,
    at,
    stored_heads,
    number,
    r_batch,
    r_head,
    r_row,
    c_batch,
    c_head,
    c_row,
    s_batch,
    s_head,
    s_row,
    DIM: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
    INVERT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = tl.program_id(1)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    dtype: tl.constexpr = rows.dtype.element_ty
    begin = tl.load(at + owner)
    if begin < 0:
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slice_of = tl.arange(0, SLICES_PADDED)
    within = tl.arange(0, WIDTH)
    channel = slice_of[:, None] * GROUP + within[None, :]
    inside = (i < number)[:, None, None] & ((within < GROUP)[None, :] & (channel < DIM))[None, :, :]
    source = rows + batch * r_batch + head * r_head + i[:, None, None] * r_row + channel[None, :, :]
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, x, float("inf")), axis=2)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=2)
    there = (i < number)[:, None] & (slice_of < SLICES)[None, :]
    low = tl.where(there, low, 0.0)[:, :, None]
    high = tl.where(there, high, 0.0)[:, :, None]
    target = begin + i
    base = batch * s_batch + head * s_head
    s_at = scales + base + target[:, None] * s_row + slice_of[None, :]
    byte = tl.arange(0, SLICES_PADDED * WIDTH * BITS // 8)
    c_at = codes + batch * c_batch + head * c_head + target[:, None] * c_row + byte[None, :]
    c_inside = (i < number)[:, None] & (byte < BYTES)[None, :]
    if MODE == 4:
        scale = _stored(_shared(tl.maximum(tl.abs(low), tl.abs(high)), 448, INVERT), dtype)
        steps = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
        steps = tl.minimum(tl.maximum(steps, -448.0), 448.0)
        bits = steps.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(c_at, tl.reshape(bits, (BLOCK, SLICES_PADDED * WIDTH)), mask=c_inside)
    else:
        found, scale, minimum = _quantized(x, low, high, dtype, BITS, MODE, TOP, INVERT)
        tl.store(c_at, _packed(found, BLOCK, SLICES_PADDED * WIDTH * BITS // 8, BITS), mask=c_inside)
        if MODE == 0 or MODE == 3:
            m_at = minima + base + target[:, None] * s_row + slice_of[None, :]
            flat = tl.reshape(minimum, (BLOCK, SLICES_PADDED))
            tl.store(m_at, flat.to(minima.dtype.element_ty), mask=there)
    tl.store(s_at, tl.reshape(scale, (BLOCK, SLICES_PADDED)).to(dtype), mask=there)


@triton.jit
def _per_channel(
    rows,
    codes,
    scales,
    minima,
    at,
    stored_heads,
    r_batch,
    r_head,
    r_row,
    c_batch,
    c_head,
    c_row,
    s_batch,
    s_head,
    s_row,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
    INVERT: tl.constexpr,
):
    owner = tl.program_id(1)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    dtype: tl.constexpr = rows.dtype.element_ty
    first = tl.load(at + owner)
    if first < 0:
        return
    token = tl.arange(0, WIDTH)
    d = tl.arange(0, D)
    i = tl.program_id(0) * GROUP + token
    inside = (token < GROUP)[:, None] & (d < DIM)[None, :]
    x = tl.load(rows + batch * r_batch + head * r_head + i[:, None] * r_row + d[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    low = tl.where(d < DIM, tl.min(tl.where(inside, x, float("inf")), axis=0), 0.0)
    high = tl.where(d < DIM, tl.max(tl.where(inside, x, float("-inf")), axis=0), 0.0)
    found, scale, minimum = _quantized(x, low[None, :], high[None, :], dtype, BITS, MODE, TOP, INVERT)
    byte = tl.arange(0, D * BITS // 8)
    c_at = codes + batch * c_batch + head * c_head + (first + i)[:, None] * c_row + byte[None, :]
    tl.store(c_at, _packed(found, WIDTH, D * BITS // 8, BITS), mask=(token < GROUP)[:, None] & (byte < BYTES)[None, :])
    table = first // GROUP + tl.program_id(0)
    base = batch * s_batch + head * s_head + table * s_row
    tl.store(scales + base + d, tl.reshape(scale, (D,)).to(dtype), mask=d < DIM)
    if MODE == 0 or MODE == 3:
        tl.store(minima + base + d, tl.reshape(minimum, (D,)).to(minima.dtype.element_ty), mask=d < DIM)


def encoded(rows: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `naive.encoded`; raises as `encode`."""
    # Groups lie one after the other, so all rows are those of one head.
    flat = rows.reshape(1, 1, -1, form.dim)
    number = flat.shape[2]
    groups = (number // form.group, form.dim) if form.along == "tokens" else (number, form.slices)
    scale = rows.new_empty(1, 1, *groups)
    minimum = {"asymmetric": rows.dtype, "zero_point": torch.uint8}.get(form.mode)
    into = Codes(
        torch.empty(1, 1, number, packed_bytes(form.dim, form.bits), dtype=torch.uint8, device=rows.device),
        scale,
        None if minimum is None else torch.empty_like(scale, dtype=minimum),
        form.bits,
        form.group,
        form.along,
        form.mode,
        form.dim,
    )
    encode(flat, into, torch.zeros(1, 1, dtype=torch.int32, device=rows.device))

    def shaped(part: Tensor) -> Tensor:
        return part.view(*rows.shape[:-2], -1, part.shape[-1])

    return shaped(into.codes), shaped(scale), None if into.minimum is None else shaped(into.minimum)


@launches
def encode(rows: Tensor, into: Codes, at: Tensor) -> None:
    """As `naive.encode`; at is contiguous int32.

    Raises KVFoundryError for what `Form.refusal` names, and for rows that do not fill their groups of tokens.
    """
    batch, heads, number, dim = rows.shape
    check_device(rows, into.codes, into.scale, into.minimum, at)
    form = Form.of(into)
    refused = form.refusal(rows.dtype)
    if refused is not None:
        raise KVFoundryError(refused)
    minima = into.scale if into.minimum is None else into.minimum
    if minima.stride() != into.scale.stride() or any(part.stride(3) != 1 for part in (rows, into.codes, into.scale)):
        raise KVFoundryError(
            "scales and minima must be laid out alike; rows, codes and scales need a dense last dimension."
        )
    if at.dtype != torch.int32 or not at.is_contiguous():
        raise KVFoundryError(f"at must be contiguous int32, got {at.dtype}.")
    common = (rows, into.codes, into.scale, minima, at, heads)
    strides = (*rows.stride()[:3], *into.codes.stride()[:3], *into.scale.stride()[:3])
    terms = {
        "BITS": into.bits,
        "MODE": _MODES[into.mode],
        "TOP": torch.finfo(rows.dtype).max,
        "INVERT": rows.device.type == "cuda",
    }
    width = next_power(into.group, 8)
    if into.along == "tokens":
        if number % into.group:
            raise KVFoundryError(f"{number} rows are no whole number of groups of {into.group} tokens.")
        _per_channel[(number // into.group, batch * heads)](
            *common,
            *strides,
            DIM=dim,
            D=next_power(dim, 16),
            BYTES=into.codes.shape[3],
            GROUP=into.group,
            WIDTH=width,
            **terms,
            num_warps=4,
        )
        return
    _per_token[(triton.cdiv(number, _BLOCK), batch * heads)](
        *common,
        number,
        *strides,
        DIM=dim,
        BYTES=into.codes.shape[3],
        GROUP=into.group,
        WIDTH=width,
        SLICES=form.slices,
        SLICES_PADDED=next_power(form.slices),
        **terms,
        BLOCK=_BLOCK,
        num_warps=4,
    )
