"""Column sums of the attention matrix, block of queries by block of queries: memory linear in the number of rows."""

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import attention_weights, query_block
from kvfoundry.visibility import Visibility


def column_sums(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Sum over all real queries of their softmax weight on each row.

    query: [batch, query_heads, queries, head_dim]; key: [batch, heads, rows, head_dim].
    Returns [batch, query_heads, rows] in float32. Padded queries (position -1) contribute nothing.
    """
    batch, query_heads, queries, _ = query.shape
    rows = key.shape[2]
    total = torch.zeros(batch, query_heads, rows, dtype=torch.float32, device=query.device)
    step = query_block(query.device, batch, query_heads, rows)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        reach = stop if visibility.pattern == "causal" else rows
        seen = None if visibility.pattern == "full" else visibility.block(start, stop)[..., :reach]
        weights = attention_weights(
            query[:, :, start:stop], key[:, :, :reach], seen, scaling=scaling, softcap=softcap, sinks=sinks
        )
        real = (visibility.query_positions[:, None, start:stop, None] >= 0).to(weights.dtype)
        total[..., :reach] += (weights * real).sum(dim=2)
    return total
