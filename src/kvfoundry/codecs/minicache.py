"""MiniCache: the rows of two neighbouring layers as one shared direction and a length each. Pure functions.

MiniCache: KV Cache Compression in Depth Dimension for Large Language Models, arXiv 2405.14366. Which rows are retained
follows the public code of KVCache-Factory (a share of the rows), not the paper (a threshold on the distance).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps the angle away from 0 and pi, where the interpolation divides by a vanishing sine.
_EPSILON = 1e-6


@dataclass(frozen=True)
class LayerPairs:
    """Which layers are merged, and how.

    start: layers in front of this share of all layers stay as they are. t: place of the shared direction between the
    earlier layer's (0) and the later one's (1). retention: share of the rows that stay exact.
    """

    start: float
    t: float
    retention: float

    def of(self, num_layers: int) -> list[tuple[int, int]]:
        """The pairs (2i, 2i + 1) of `num_layers` layers that begin at the share `start` or behind it."""
        return [(i, i + 1) for i in range(0, num_layers - 1, 2) if i >= self.start * num_layers]


@dataclass(frozen=True)
class MergedRows:
    """What two rows become. direction: [..., rows, dim], of length 1; the magnitudes and the angle: [..., rows].

    All in float32; the angle between the two rows is in radians.
    """

    direction: Tensor
    earlier_magnitude: Tensor
    later_magnitude: Tensor
    angle: Tensor


def merge_rows(earlier: Tensor, later: Tensor, t: float) -> MergedRows:
    """Spherical interpolation between the directions of the rows of two layers.

    direction ~ sin((1 - t) W) / sin(W) u_earlier + sin(t W) / sin(W) u_later, normalised; W is the angle between the
    unit vectors u. t = 0 is the earlier layer's direction, t = 1 the later one's. earlier, later: [..., rows, dim].
    """
    earlier, later = earlier.float(), later.float()
    lengths = [rows.norm(dim=-1).clamp(min=_EPSILON) for rows in (earlier, later)]
    units = [rows / length[..., None] for rows, length in zip((earlier, later), lengths, strict=True)]
    cosine = (units[0] * units[1]).sum(dim=-1).clamp(-1 + _EPSILON, 1 - _EPSILON)
    angle = torch.arccos(cosine)
    sine = torch.sin(angle)
    weights = torch.sin((1 - t) * angle) / sine, torch.sin(t * angle) / sine
    mixed = weights[0][..., None] * units[0] + weights[1][..., None] * units[1]
    direction = mixed / mixed.norm(dim=-1, keepdim=True).clamp(min=_EPSILON)
    return MergedRows(direction, lengths[0], lengths[1], angle)


def retained_count(rows: int, share: float) -> int:
    """How many of `rows` rows stay exact: their share, rounded up."""
    return min(rows, math.ceil(share * rows))


def widest_angles(angle: Tensor, counts: Tensor) -> Tensor:
    """The rows with the largest angles, ascending: [batch, heads, largest count], -1 behind the last of a head.

    angle: [batch, heads, rows], -1 or less where there is no row; counts: [batch] or [batch, heads], how many to take.
    Ties go to the earlier row.
    """
    counts = counts if counts.dim() == 2 else counts[:, None].expand(angle.shape[:2])
    width = int(counts.max()) if counts.numel() else 0
    order = angle.argsort(dim=-1, descending=True, stable=True)[..., :width]
    beyond = angle.shape[-1]
    taken = torch.arange(width, device=angle.device) < counts.to(angle.device)[..., None]
    order = order.masked_fill(~taken, beyond).sort(dim=-1).values
    return order.masked_fill(order == beyond, -1)
