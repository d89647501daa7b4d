"""Reference decode attention over codes: decode everything, put the newest rows behind it, attend."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.coded_decode.codes import Codes
from kvfoundry.kernels.decode_attention.naive import in_rectangle, weighted


def attend(
    query: Tensor,
    keys: Codes,
    values: Codes,
    coded: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tails: Tensor,
    *,
    scaling: float,
    tail_query: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention output [batch, query_heads, queries, value_dim] of the newest one to eight queries of every sequence.

    query: [batch, query_heads, queries, head_dim]. coded: [batch, heads] int32, rows of each head that are codes in
    both sides; tail_keys, tail_values: [batch, heads, tail capacity, dim], the newer rows whole, `tails` [batch, heads]
    int32 of them. Rows are consecutive: query i of n sees the first coded + tails - (n - 1 - i) of them.
    tail_query: what reads the tail where the coded keys are rotated and `query` with them; None: the same.
    softcap, sinks, return_lse: as in `decode_attention`.
    """
    heads, queries = coded.shape[1], query.shape[2]
    rows = int(coded.max())
    inside = torch.arange(rows, device=query.device) < coded[..., None]
    number = torch.arange(tail_keys.shape[2], device=query.device)
    behind = number < tails[..., None]
    # decoded as the kernel does, to the dtype of the query, before everything turns to float32
    key = keys.decoded(rows, query.dtype).float().masked_fill(~inside[..., None], 0.0)
    value = values.decoded(rows, query.dtype).float().masked_fill(~inside[..., None], 0.0)
    whole_key, whole_value = (in_rectangle(tensor, None, behind).float() for tensor in (tail_keys, tail_values))
    at = torch.cat([torch.arange(rows, device=query.device).expand_as(inside), coded[..., None] + number], dim=2)
    own = (coded + tails)[..., None] - queries + torch.arange(queries, device=query.device)
    seen = torch.cat([inside, behind], dim=2)[:, :, None] & (at[:, :, None] <= own[..., None])
    grouped, newest = (
        tensor.float().unflatten(1, (heads, -1)) for tensor in (query, query if tail_query is None else tail_query)
    )
    logits = torch.cat(
        [
            torch.einsum("bhgqd,bhrd->bhgqr", grouped, key),
            torch.einsum("bhgqd,bhrd->bhgqr", newest, whole_key),
        ],
        dim=-1,
    )
    logits = logits * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf).flatten(1, 2)
    return weighted(logits, torch.cat([value, whole_value], dim=2), sinks, query.dtype, return_lse)
