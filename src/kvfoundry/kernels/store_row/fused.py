"""One row of every head stored by one Triton launch, slots and lengths moved on by the program that used them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.triton_support import check_device, launches, next_power, tl, triton


@triton.jit
def _store(
    key,
    value,
    position,
    keys,
    values,
    positions,
    starts,
    slots,
    lengths,
    capacities,
    wraps,
    stored_heads,
    k_batch,
    k_head,
    v_batch,
    v_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    owner = tl.program_id(0)
    batch = (owner // stored_heads).to(tl.int64)
    head = ((owner % stored_heads) // GROUP).to(tl.int64)
    slot = tl.load(slots + owner)
    capacity = tl.load(capacities + owner)
    at = tl.load(starts + owner) + slot
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    row = tl.load(key + batch * k_batch + head * k_head + dk, mask=dk < KEY_DIM)
    tl.store(keys + at * KEY_DIM + dk, row, mask=dk < KEY_DIM)
    row = tl.load(value + batch * v_batch + head * v_head + dv, mask=dv < VALUE_DIM)
    tl.store(values + at * VALUE_DIM + dv, row, mask=dv < VALUE_DIM)
    tl.store(positions + at, tl.load(position + batch).to(tl.int32))
    tl.store(lengths + owner, tl.minimum(tl.load(lengths + owner) + 1, capacity))
    after = slot + 1
    tl.store(slots + owner, tl.where(after == capacity, tl.load(wraps + owner), after))


@launches
def store(
    key: Tensor,
    value: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    starts: Tensor,
    slots: Tensor,
    lengths: Tensor,
    capacities: Tensor,
    wraps: Tensor,
) -> None:
    """As `naive.store`. Raises KVFoundryError for buffers that are not contiguous, and rows that are not dense."""
    counts = (starts, slots, lengths, capacities, wraps)
    check_device(key, value, position, keys, values, positions, *counts)
    if not all(tensor.is_contiguous() for tensor in (keys, values, positions, position, *counts)):
        raise KVFoundryError("the buffers of rows, and what is known of their heads, must be contiguous.")
    if starts.dtype != torch.int64 or key.stride(3) != 1 or value.stride(3) != 1:
        raise KVFoundryError("starts must be int64, and the last dimension of new rows dense.")
    batch, heads = slots.shape
    _store[(batch * heads,)](
        key,
        value,
        position,
        keys,
        values,
        positions,
        *counts,
        heads,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        GROUP=heads // key.shape[1],
        KEY_DIM=keys.shape[1],
        VALUE_DIM=values.shape[1],
        DK=next_power(keys.shape[1]),
        DV=next_power(values.shape[1]),
        num_warps=1,
    )
