"""Column maxima of the attention matrix, block of queries by block of queries: memory linear in the number of rows."""

import torch
from torch import Tensor

from kvfoundry.kernels.attention.naive import attention_weights, query_block
from kvfoundry.visibility import Visibility


def column_max(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Largest softmax weight on each row over all real queries, 0 where there is none.

    query: [batch, query_heads, queries, head_dim]; key: [batch, heads, rows, head_dim].
    Returns [batch, query_heads, rows] in float32.
    """
    batch, query_heads, queries, _ = query.shape
    largest = torch.zeros(batch, query_heads, key.shape[2], dtype=torch.float32, device=query.device)
    step = query_block(query.device, batch, query_heads, key.shape[2])
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        seen = visibility.block(start, stop)
        weights = attention_weights(query[:, :, start:stop], key, seen, scaling=scaling, softcap=softcap, sinks=sinks)
        real = (visibility.query_positions[:, None, start:stop, None] >= 0).to(weights.dtype)
        largest = torch.maximum(largest, (weights * real).amax(dim=2))
    return largest
