"""Top rows per head under protection: the one place where scores become a kept set."""

import torch
from torch import Tensor

from kvfoundry.devices import carried
from kvfoundry.layouts.base import RowsView

# Bits of the number of a row in what rows are ranked by: 32 more are the score's, 2 the protection's.
_NUMBER_BITS = 29


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
    width, beyond = int(counts.max()), scores.shape[-1]
    order = ranking(comparable(scores, view), torch.where(protected, 2, view.valid.long()))
    if bool((counts == width).all()):
        return order.topk(width, sorted=False).indices.sort(dim=-1).values
    best = order.topk(width).indices
    taken = torch.arange(width, device=best.device) < carried(counts, best.device)[..., None]
    # A slot number behind every real one sorts to the end, then becomes -1.
    slots = best.masked_fill(~taken, beyond).sort(dim=-1).values
    return slots.masked_fill(slots == beyond, -1)


def ranking(scores: Tensor, rank: Tensor) -> Tensor:
    """Integers in the order of the entries, no two along the last dimension alike: by rank, score, the earlier entry.

    scores: [..., entries], floating; rank: like scores, whole numbers from 0 to 2 or booleans. Returns int64.
    """
    # the patterns of positive numbers are in order, those of negative ones the other way round; -0 becomes 0
    pattern = (scores.float() + 0.0).view(torch.int32)
    pattern = torch.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).long() + 2**31
    number = torch.arange(scores.shape[-1], device=scores.device)
    return (rank.long() << 61) | (pattern << _NUMBER_BITS) | (2**_NUMBER_BITS - 1 - number)


def kept_mask(slots: Tensor, view: RowsView) -> Tensor:
    """Boolean [batch, heads, rows]: True for the rows at `slots` (-1 entries are ignored)."""
    kept = torch.zeros(view.keys.shape[:3], dtype=torch.bool, device=slots.device)
    # Absent slots write to a column behind the rows, which is cut off again.
    wide = torch.cat([kept, kept[..., :1]], dim=-1)
    return wide.scatter(-1, slots.masked_fill(slots < 0, kept.shape[-1]), True)[..., :-1]
