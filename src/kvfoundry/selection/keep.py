"""Top rows per head under protection: the one place where scores become a kept set."""

import torch
from torch import Tensor

from kvfoundry.layouts.base import RowsView


def comparable(scores: Tensor, view: RowsView) -> Tensor:
    """Scores [batch, heads or 1, rows] as [batch, heads, rows] in float32, NaN lowest."""
    ordered = torch.nan_to_num(scores.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return ordered.expand(-1, view.keys.shape[1], -1)


def top_slots(scores: Tensor, view: RowsView, counts: Tensor, protected: Tensor) -> Tensor:
    """Slots of the kept rows in ascending order: [batch, heads, widest], -1 behind a head that keeps fewer.

    scores: [batch, heads or 1, rows], higher stays; counts: [batch, heads] on the CPU; protected: boolean
    [batch, heads, rows], always inside as long as counts allow. Ties go to the earlier row, and no tie and no NaN can
    push a protected row out: protection is a rank of its own, not a high score.
    """
    order = comparable(scores, view).argsort(dim=-1, descending=True, stable=True)
    rank = torch.where(protected, 2, torch.where(view.valid, 1, 0))
    # Sorting twice, stably: by score, then by rank.
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    width = int(counts.max())
    taken = torch.arange(width, device=order.device) < counts.to(order.device)[..., None]
    # A slot number behind every real one sorts to the end, then becomes -1.
    beyond = scores.shape[-1]
    slots = order[..., :width].masked_fill(~taken, beyond).sort(dim=-1).values
    return slots.masked_fill(slots == beyond, -1)


def kept_mask(slots: Tensor, view: RowsView) -> Tensor:
    """Boolean [batch, heads, rows]: True for the rows at `slots` (-1 entries are ignored)."""
    kept = torch.zeros(view.keys.shape[:3], dtype=torch.bool, device=slots.device)
    # Absent slots write to a column behind the rows, which is cut off again.
    wide = torch.cat([kept, kept[..., :1]], dim=-1)
    return wide.scatter(-1, slots.masked_fill(slots < 0, kept.shape[-1]), True)[..., :-1]
