"""Reference gather of kept rows."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Write row `slots[b, h, i]` of every head to row i of the same head in the output buffers.

    slots: [batch, heads, width] numbers of rows within their head, -1 for none: nothing is written there. keys, values,
    and the outputs: [batch, heads, capacity, dim], or flat [slots, dim] with the first slot of every head in starts
    and starts_out [batch, heads]. Outputs must not overlap the inputs.
    """
    batch, head, at = (slots >= 0).nonzero(as_tuple=True)
    source = slots[batch, head, at].long()
    for rows, out in ((keys, keys_out), (values, values_out)):
        found = rows[batch, head, source] if starts is None else rows[starts[batch, head].long() + source]
        if starts_out is None:
            out[batch, head, at] = found
        else:
            out[starts_out[batch, head].long() + at] = found


def kept_slots(keep: Tensor, width: int) -> Tensor:
    """Ascending slots of the rows that are kept: [batch, heads, width] int32, -1 behind; no decision on the host.

    keep: boolean [batch, heads, rows], at most `width` of a head.
    """
    batch, heads, rows = keep.shape
    place = keep.cumsum(dim=-1) - 1
    table = torch.full((batch, heads, width + 1), -1, dtype=torch.int32, device=keep.device)
    number = torch.arange(rows, dtype=torch.int32, device=keep.device).expand_as(keep)
    return table.scatter_(2, place.masked_fill(~keep, width), number)[..., :width].contiguous()
