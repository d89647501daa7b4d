"""Dropped rows, the kept rows they resemble, and the weighted mean that joins them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Upper bound on the elements of one block of similarities between dropped and kept rows.
_BLOCK_ELEMENTS = 1 << 24


def slots_of(mask: Tensor) -> Tensor:
    """Slot numbers where a boolean mask [batch, heads, rows] is True, ascending, -1 behind the last: [.., widest]."""
    counts = mask.sum(dim=-1, keepdim=True)
    width = int(counts.max()) if counts.numel() else 0
    order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    return order.masked_fill(torch.arange(width, device=mask.device) >= counts, -1)


def at_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows [batch, heads, rows, dim] at slots [batch, heads, width]; slot -1 gives the first row."""
    return rows.gather(2, slots.clamp(min=0)[..., None].expand(-1, -1, -1, rows.shape[-1]))


@dataclass(frozen=True)
class Nearest:
    """source: slots of the dropped rows; target: slot of the kept row each resembles most; similarity: their cosine.

    [batch, heads, dropped] each. Where a head drops fewer, or keeps nothing, source or target is -1.
    """

    source: Tensor
    target: Tensor
    similarity: Tensor

    @property
    def present(self) -> Tensor:
        """True where there is a row to fold and a row to fold it into."""
        return (self.source >= 0) & (self.target >= 0)


def nearest_kept(keys: Tensor, kept: Tensor, dropped: Tensor) -> Nearest:
    """The kept row with the largest key cosine for every dropped row; norms are at least 1e-6.

    keys: [batch, heads, rows, head_dim]; kept, dropped: boolean [batch, heads, rows]. Memory is dropped by kept rows,
    block by block: never a matrix of all rows by all rows.
    """
    unit = keys.float()
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    source, candidates = slots_of(dropped), slots_of(kept)
    batch, heads, count = source.shape
    if count == 0 or candidates.shape[2] == 0:
        return Nearest(source, torch.full_like(source, -1), torch.zeros_like(source, dtype=torch.float32))
    kept_keys = at_slots(unit, candidates).transpose(-1, -2)
    absent = (candidates < 0)[:, :, None]
    step = max(1, _BLOCK_ELEMENTS // (batch * heads * candidates.shape[2]))
    similarities, targets = [], []
    for start in range(0, count, step):
        cosine = at_slots(unit, source[..., start : start + step]) @ kept_keys
        best = cosine.masked_fill(absent, -torch.inf).max(dim=-1)
        similarities.append(best.values)
        targets.append(candidates.gather(2, best.indices))
    return Nearest(source, torch.cat(targets, dim=2), torch.cat(similarities, dim=2))


def folded(rows: Tensor, target: Tensor, weights: Tensor, contributions: Tensor) -> Tensor:
    """Weighted means in place of the targets: (row + sum of weight x contribution) / (1 + sum of weights).

    rows: [batch, heads, rows, dim]; target, weights: [batch, heads, n], weight 0 folds nothing; contributions:
    [batch, heads, n, dim]. Rows that take in nothing come back bit for bit.
    """
    target = target.clamp(min=0)
    total = torch.zeros(rows.shape[:3], dtype=torch.float32, device=rows.device).scatter_add(2, target, weights)
    weighted = contributions.float() * weights[..., None]
    taken = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    taken = taken.scatter_add(2, target[..., None].expand_as(weighted), weighted)
    means = ((rows.float() + taken) / (1 + total[..., None])).to(rows.dtype)
    return torch.where(total[..., None] > 0, means, rows)
