"""Reference rotation of channel pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Which channels of a key turn together.

    neighbours: pairs are channels (2i, 2i+1); otherwise (i, i + number). start: first rotated channel. number: pairs.
    """

    start: int
    number: int
    neighbours: bool


def wide(keys: Tensor) -> Tensor:
    """In float32 at least, in which angles are taken."""
    return keys.to(torch.promote_types(keys.dtype, torch.float32))


def turn(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, *, out: Tensor | None = None) -> Tensor:
    """Keys [batch, heads, rows, head_dim] turned by cos and sin [batch, heads or 1, rows, pairs]; other channels pass.

    Computed in the dtype of the tables, at least float32, and returned in that of the keys. out: where it goes, the
    keys themselves perhaps. A pair with cos 1 and sin 0 stays as it is, bit for bit.
    """
    turned = turned_wide(wide(keys), cos, sin, pairs).to(keys.dtype)
    return turned if out is None else out.copy_(turned)


def turned_wide(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """The same without a change of dtype, for tables that broadcast to [..., rows, pairs]."""
    stop = pairs.start + 2 * pairs.number
    block = keys[..., pairs.start : stop]
    if pairs.neighbours:
        first, second = block[..., 0::2], block[..., 1::2]
    else:
        first, second = block[..., : pairs.number], block[..., pairs.number :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    merged = torch.stack(turned, dim=-1).flatten(-2) if pairs.neighbours else torch.cat(turned, dim=-1)
    return torch.cat((keys[..., : pairs.start], merged, keys[..., stop:]), dim=-1)
