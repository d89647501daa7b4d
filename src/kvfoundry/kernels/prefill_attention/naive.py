"""Reference prompt attention with column sums: the whole matrix of weights, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import attention_weights


class Attended(NamedTuple):
    """output: [batch, query_heads, queries, value_dim]. sums, recent: [batch, query_heads, rows] float32, the weight
    that every row received from all queries and from the last ones."""

    output: Tensor
    sums: Tensor
    recent: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    last: int = 0,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Attended:
    """Causal attention and its column sums.

    query: [batch, query_heads, queries, head_dim]; key, value: [batch, heads, rows, dim], rows >= queries. Without
    positions the queries are the last tokens of the rows. With query_positions [batch, queries] and key_positions
    [batch, heads or 1, rows], -1 for padding, a query sees the rows up to its own position; padded queries give zeros
    and no weight. last: how many of the last queries `recent` sums over. window: only the last `window` tokens, the
    query's own included. softcap, sinks [query_heads]: as in `decode_attention`.
    """
    batch, queries = query.shape[0], query.shape[2]
    heads, rows = key.shape[1], key.shape[2]
    if query_positions is None or key_positions is None:
        own = torch.arange(rows - queries, rows, device=query.device).expand(batch, -1)
        at = torch.arange(rows, device=query.device).expand(batch, 1, -1)
    else:
        own, at = query_positions, key_positions
    seen = (at[:, :, None] >= 0) & (at[:, :, None] <= own[:, None, :, None])
    if window is not None:
        seen = seen & (at[:, :, None] > own[:, None, :, None] - window)
    weights = attention_weights(query.float(), key.float(), seen, scaling=scaling, softcap=softcap, sinks=sinks)
    weights = weights * seen.any(dim=-1)[..., None].repeat_interleave(query.shape[1] // seen.shape[1], dim=1)
    output = torch.einsum("bhgqr,bhrd->bhgqd", weights.unflatten(1, (heads, -1)), value.float())
    return Attended(
        output.flatten(1, 2).to(query.dtype),
        weights.sum(dim=2),
        weights[:, :, queries - min(last, queries) :].sum(dim=2),
    )
