"""Gather of kept rows in Triton: one launch for the keys, values and positions of all heads."""

from __future__ import annotations

from torch import Tensor

from kvfoundry.errors import KVFoundryError
from kvfoundry.kernels.gather_rows.naive import Rows
from kvfoundry.kernels.triton_support import check_device, launches, next_power, tl, triton

# Rows that one program moves.
_BLOCK = 32


@triton.jit
def _move(
    source,
    target,
    from_row,
    to_row,
    source_stride,
    target_stride,
    there,
    written,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """One tile of rows; zeros where there is none."""
    d = tl.arange(0, D)
    channels = (d < DIM)[None, :]
    tile = tl.load(source + from_row[:, None] * source_stride + d[None, :], mask=there[:, None] & channels, other=0.0)
    tl.store(target + to_row[:, None] * target_stride + d[None, :], tile, mask=written[:, None] & channels)


@triton.jit
def _gather(
    keys,
    values,
    positions,
    slots,
    starts,
    keys_out,
    values_out,
    positions_out,
    stored_heads,
    width,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    p_batch,
    p_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):
    owner = tl.program_id(1).to(tl.int64)
    batch = owner // stored_heads
    head = owner % stored_heads
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + owner * width + i, mask=i < width, other=-1).to(tl.int64)
    there = slot >= 0
    row = tl.where(there, slot, 0)
    if FLAT:
        target = tl.load(starts + owner) + i
        written = there
    else:
        target = owner * width + i
        written = i < width
    _move(keys + batch * k_batch + head * k_head, keys_out, row, target, k_row, KEY_DIM, there, written, KEY_DIM, DK)
    _move(
        values + batch * v_batch + head * v_head, values_out, row, target, v_row, VALUE_DIM, there, written,
        VALUE_DIM, DV,
    )  # fmt: skip
    at = tl.load(positions + batch * p_batch + head * p_head + row, mask=there, other=-1)
    tl.store(positions_out + target, at, mask=written)


def rectangle(rows: Rows, slots: Tensor) -> Rows:
    """As `naive.rectangle`; the last dimension of rows is dense."""
    shape = tuple(slots.shape)
    return _launched(rows, slots, shape, None)


def stretches(rows: Rows, slots: Tensor, counts: Tensor) -> Rows:
    """As `naive.stretches`; the last dimension of rows is dense."""
    flat = counts.flatten()
    return _launched(rows, slots, (int(flat.sum()),), (flat.cumsum(0) - flat).to(slots.device, non_blocking=True))


@launches
def _launched(rows: Rows, slots: Tensor, shape: tuple[int, ...], starts: Tensor | None) -> Rows:
    keys, values, positions = rows
    check_device(keys, values, positions, slots, starts)
    if any(part.stride(-1) != 1 for part in rows):
        raise KVFoundryError("the last dimension of rows must be dense.")
    slots = slots.contiguous()
    batch, heads, width = slots.shape
    out = Rows(*(part.new_empty(*shape, *part.shape[3:]) for part in rows))
    _gather[(triton.cdiv(width, _BLOCK), batch * heads)](
        keys,
        values,
        positions,
        slots,
        slots if starts is None else starts,
        *out,
        heads,
        width,
        *keys.stride()[:3],
        *values.stride()[:3],
        positions.stride(0),
        0 if positions.shape[1] == 1 else positions.stride(1),
        KEY_DIM=keys.shape[3],
        VALUE_DIM=values.shape[3],
        DK=next_power(keys.shape[3]),
        DV=next_power(values.shape[3]),
        BLOCK=_BLOCK,
        FLAT=starts is not None,
        num_warps=4,
    )
    return out
