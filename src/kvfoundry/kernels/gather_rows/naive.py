"""Reference gather of kept rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows as rectangles: keys and values [batch, heads, rows, dim], positions [batch, heads or 1, rows].

    Or as stretches, head after head: [slots, dim], and [slots].
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


def rectangle(rows: Rows, slots: Tensor) -> Rows:
    """Row `slots[b, h, i]` of every head as row i: rectangles [batch, heads, width, ...].

    slots: integers [batch, heads, width], -1 for none: zeros there, and position -1.
    """
    return Rows(picked(rows.keys, slots), picked(rows.values, slots), picked(rows.positions, slots, fill=-1))


def stretches(rows: Rows, slots: Tensor, counts: Tensor) -> Rows:
    """The same rows head after head, without those that there are not.

    slots: every head's own in front, -1 behind; counts: [batch, heads] how many these are, on the CPU.
    """
    batch, head, at = (slots >= 0).nonzero(as_tuple=True)
    source = slots[batch, head, at].long()
    shared = torch.zeros_like(head)
    return Rows(*(part[batch, head if part.shape[1] > 1 else shared, source] for part in rows))


def picked(tensor: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """Rows `index` [batch, heads, width] of [batch, heads or 1, rows, ...]; `fill` where the index is -1."""
    present, trailing = index >= 0, tensor.shape[3:]
    if tensor.shape[2] == 0:
        return tensor.new_full((*index.shape, *trailing), fill)
    wide = index.clamp(min=0).reshape(*index.shape, *[1] * len(trailing)).expand(*index.shape, *trailing)
    found = tensor.expand(-1, index.shape[1], *[-1] * (tensor.dim() - 2)).gather(2, wide)
    return found.masked_fill(~present.reshape(*present.shape, *[1] * len(trailing)), fill)
