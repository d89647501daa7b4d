"""Reference decode attention over preallocated rows whose lengths live on the device: everything in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention output [batch, query_heads, queries, value_dim] of the newest one to eight queries of every sequence.

    query: [batch, query_heads, queries, head_dim]. lengths: [batch, heads] int32, rows that each head has, those of the
    queries included; heads divides query_heads.
    keys, values: [batch, heads, capacity, dim], the rows of a head at the front; or, with starts [batch, heads] (first
    slot of each head), flat buffers [slots, dim] in which every head owns a stretch. What lies behind is never read.
    positions: token index of every row, [batch, heads or 1, capacity] or flat [slots], -1 where a row counts for
    nothing; query_positions: [batch, queries]. A query sees the rows up to its own position. Without them the rows of
    a head are consecutive tokens and the queries are the last ones: query i of n sees the first length - (n - 1 - i).
    window: only the last `window` tokens, the query's own included. sinks: [query_heads] logits without a row.
    return_lse: also the natural log of the sum of exponentials of all logits (the sink's too), float32 [batch,
    query_heads, queries]; -inf, and an output of zeros, where a query sees nothing.
    """
    queries, heads = query.shape[2], lengths.shape[1]
    number = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=query.device)
    inside = number < lengths[..., None]
    key, value = in_rectangle(keys, starts, inside), in_rectangle(values, starts, inside)
    if positions is None:
        at = number.expand_as(inside)
        own = lengths[..., None] - queries + torch.arange(queries, device=query.device)
    else:
        assert query_positions is not None
        at = in_rectangle(positions[..., None], starts, inside, fill=-1)[..., 0].long()
        own = query_positions[:, None].expand(-1, heads, -1)
    seen = (inside & (at >= 0))[:, :, None] & (at[:, :, None] <= own[..., None])
    if window is not None:
        seen = seen & (at[:, :, None] > own[..., None] - window)
    grouped = query.float().unflatten(1, (heads, -1))
    logits = torch.einsum("bhgqd,bhrd->bhgqr", grouped, key.float()) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf).flatten(1, 2)
    return weighted(logits, value.float(), sinks, query.dtype, return_lse)


def in_rectangle(tensor: Tensor, starts: Tensor | None, inside: Tensor, fill: float = 0.0) -> Tensor:
    """The rows of every head [batch, heads, rows, dim], `fill` where `inside` [batch, heads, rows] says there is none.

    tensor: [batch, heads or 1, capacity, dim], or [slots, dim] with the first slot of every head.
    """
    rows = inside.shape[2]
    if starts is None:
        found = tensor[:, :, :rows].expand(-1, inside.shape[1], -1, -1)
    else:
        slots = starts.long()[..., None] + torch.arange(rows, device=inside.device)
        found = tensor[slots.where(inside, 0)] if rows else tensor.new_zeros(*inside.shape, tensor.shape[1])
    return found.masked_fill(~inside[..., None], fill)


def weighted(
    logits: Tensor, value: Tensor, sinks: Tensor | None, dtype: torch.dtype, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax over logits [batch, query_heads, queries, rows] and the sink, times value [batch, heads, rows, dim]."""
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        lse = torch.cat([logits, column], dim=-1).logsumexp(dim=-1)
    else:
        lse = logits.logsumexp(dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    weights = weights.unflatten(1, (value.shape[1], -1))
    output = torch.einsum("bhgqr,bhrd->bhgqd", weights, value).flatten(1, 2).to(dtype)
    return (output, lse) if return_lse else output
