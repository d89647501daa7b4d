"""Reference storing of one row per head at device-side slots, with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Write one row per head at `slots`, then move lengths and slots on, all in place.

    key, value: [batch, heads or a divisor, 1, dim]; stored heads that share one get the same row. position: [batch].
    keys, values: [slots, dim] and positions int32 [slots], in which every head owns `capacities` slots from `starts`
    (int64) onwards. slots, lengths, capacities, wraps: [batch, heads] int32. A head that has filled its slots goes on
    at slot `wraps`.
    """
    groups = slots.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    at = (starts + slots).flatten()
    keys.index_copy_(0, at, key.reshape(at.shape[0], -1))
    values.index_copy_(0, at, value.reshape(at.shape[0], -1))
    positions.index_copy_(0, at, position.to(positions.dtype)[:, None].expand_as(slots).flatten())
    lengths.copy_(torch.minimum(lengths + 1, capacities))
    after = slots + 1
    slots.copy_(torch.where(after == capacities, wraps, after))
