"""Gather of kept rows in Triton: one launch for the keys and values of all heads."""

from __future__ import annotations

from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.triton_support import check_device, launches, next_power, tl, triton

# Rows that one program moves.
_BLOCK = 32


@triton.jit
def _gather(
    keys,
    values,
    slots,
    starts,
    keys_out,
    values_out,
    starts_out,
    stored_heads,
    width,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    ko_batch,
    ko_head,
    ko_row,
    vo_batch,
    vo_head,
    vo_row,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    FLAT_OUT: tl.constexpr,
):
    owner = tl.program_id(1)
    batch = (owner // stored_heads).to(tl.int64)
    head = (owner % stored_heads).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + owner.to(tl.int64) * width + i, mask=i < width, other=-1).to(tl.int64)
    there = slot >= 0
    source = tl.where(there, slot, 0)
    target = i.to(tl.int64)
    if FLAT:
        source += tl.load(starts + owner).to(tl.int64)
    if FLAT_OUT:
        target += tl.load(starts_out + owner).to(tl.int64)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    inside = there[:, None] & (dk < KEY_DIM)[None, :]
    tile = tl.load(keys + batch * k_batch + head * k_head + source[:, None] * k_row + dk[None, :], mask=inside)
    tl.store(keys_out + batch * ko_batch + head * ko_head + target[:, None] * ko_row + dk[None, :], tile, mask=inside)
    inside = there[:, None] & (dv < VALUE_DIM)[None, :]
    tile = tl.load(values + batch * v_batch + head * v_head + source[:, None] * v_row + dv[None, :], mask=inside)
    tl.store(values_out + batch * vo_batch + head * vo_head + target[:, None] * vo_row + dv[None, :], tile, mask=inside)


@launches
def gather(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    keys_out: Tensor,
    values_out: Tensor,
    *,
    starts: Tensor | None = None,
    starts_out: Tensor | None = None,
) -> None:
    """As `naive.gather`; slots and starts contiguous integers, the last dimension of rows dense."""
    check_device(keys, values, slots, keys_out, values_out, starts, starts_out)
    if any(tensor.stride(-1) != 1 for tensor in (keys, values, keys_out, values_out)):
        raise KVFoundryError("the last dimension of rows must be dense.")
    tables = [tensor for tensor in (slots, starts, starts_out) if tensor is not None]
    if not all(tensor.is_contiguous() for tensor in tables):
        raise KVFoundryError("slots and starts must be contiguous.")
    batch, heads, width = slots.shape
    strides: list[int] = []
    for tensor, first in ((keys, starts), (values, starts), (keys_out, starts_out), (values_out, starts_out)):
        strides += tensor.stride()[:3] if first is None else (0, 0, tensor.stride(0))
    _gather[(triton.cdiv(width, _BLOCK), batch * heads)](
        keys,
        values,
        slots,
        slots if starts is None else starts,
        keys_out,
        values_out,
        slots if starts_out is None else starts_out,
        heads,
        width,
        *strides,
        KEY_DIM=keys.shape[-1],
        VALUE_DIM=values.shape[-1],
        DK=next_power(keys.shape[-1]),
        DV=next_power(values.shape[-1]),
        BLOCK=_BLOCK,
        FLAT=starts is not None,
        FLAT_OUT=starts_out is not None,
        num_warps=4,
    )
