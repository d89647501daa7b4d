"""Reference choice of the row that leaves a full head, with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import attention_weights
from kvfoundry.kernels.decode_attention import naive as decode


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sums: Tensor | None,
    position: Tensor,
    *,
    slots: Tensor,
    lengths: Tensor,
    capacities: Tensor,
    recent: Tensor,
    first: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mean: bool = True,
    normalize: bool = False,
) -> Tensor:
    """Attention output [batch, query_heads, 1, value_dim] of a step, and what `choose` does behind it.

    values: [batch, heads, width, value_dim] of all slots; the rest as of `choose`.
    """
    output = decode.attend(query, keys, values, lengths, scaling=scaling, softcap=softcap, sinks=sinks)
    choose(
        query, keys, positions, sums, position, slots=slots, lengths=lengths, capacities=capacities, recent=recent,
        first=first, scaling=scaling, softcap=softcap, sinks=sinks, mean=mean, normalize=normalize,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output


def choose(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    sums: Tensor | None,
    position: Tensor,
    *,
    slots: Tensor,
    lengths: Tensor,
    capacities: Tensor,
    recent: Tensor,
    first: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mean: bool = True,
    normalize: bool = False,
) -> None:
    """After a step whose row is stored: take its attention into `sums`, and set `slots` of full heads.

    query: [batch, query_heads, 1, head_dim] of the newest token, position: [batch] its index. keys: [batch, heads,
    width, head_dim] and positions: int32 [batch, heads, width] of all slots. slots, lengths, capacities: int32 [batch,
    heads]; a head is full when its length is its capacity. sums: float32 [batch, heads, width], what every row has
    received from all queries, summed over the query heads of its head, or averaged (`mean`); what stands in the slot of
    the newest row is that of the row before it. None: rows are ranked by this query alone, averaged over all query
    heads, alike in every head. normalize: rank by the sum over the number of queries that could see the row.
    The row with the lowest score leaves, the newest among equals; never one of the newest `recent` or `first` tokens of
    the sequence, [batch] int32 each, which must leave a row to choose. NaN ranks lowest.
    softcap, sinks: terms of the model's attention.
    """
    width = keys.shape[2]
    inside = torch.arange(width, device=query.device) < lengths[..., None]
    weights = attention_weights(query, keys, inside[:, :, None], scaling=scaling, softcap=softcap, sinks=sinks)[:, :, 0]
    now = position[:, None, None]
    if sums is None:
        scores = weights.mean(dim=1, keepdim=True).expand_as(positions)
    else:
        grouped = weights.unflatten(1, (keys.shape[1], -1))
        received = grouped.mean(dim=2) if mean else grouped.sum(dim=2)
        sums.copy_(sums.masked_fill(positions == now, 0.0) + received)
        scores = sums / (now - positions + 1).clamp(min=1) if normalize else sums
    rivals = inside & (positions >= first[:, None, None]) & (positions <= now - recent[:, None, None])
    scores = torch.nan_to_num(scores, nan=-torch.inf).masked_fill(~rivals, torch.inf)
    lowest = rivals & (scores == scores.amin(dim=-1, keepdim=True))
    leaving = torch.where(lowest, positions, -1).argmax(dim=-1).int()
    slots.copy_(torch.where(lengths == capacities, leaving, slots))
