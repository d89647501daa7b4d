"""Attention through torch's scaled_dot_product_attention, without ever repeating key or value heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.kernels.attention import halves, naive
from kvfoundry.visibility import Visibility

# Numbers that torch's flash kernel reads.
FLASH = (torch.float16, torch.bfloat16)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `naive.attend`. Soft-cap and sinks are not in torch's operator, so they take the reference path."""
    if softcap is not None or sinks is not None:
        return naive.attend(query, key, value, visibility, scaling=scaling, softcap=softcap, sinks=sinks)
    batch, query_heads, queries, head_dim = query.shape
    heads, rows = key.shape[1], key.shape[2]
    groups = query_heads // heads
    if visibility.pattern == "causal":
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    if visibility.pattern == "full":
        if groups > 1 and query.is_cuda and query.dtype in FLASH:
            # One query per head leaves a GPU idle in torch's flash kernel, unless it is told of the groups: it then
            # splits over the rows. Measured at batch 1: 130 us for 131,072 rows, and 1,494 us in the form below.
            return F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        # Query heads of one group become extra queries of their shared KV head: one read of the rows serves them all.
        packed = query.reshape(batch, heads, groups * queries, head_dim)
        output = F.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return output.reshape(batch, query_heads, queries, value.shape[3])
    if visibility.pattern == "behind" and query.is_cuda and query.dtype in FLASH and halves.serves(query, key, value):
        return halves.behind(query, key, value, scaling=scaling)
    step = naive.query_block(query.device, batch, query_heads, rows)
    outputs = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        seen = visibility.block(start, stop)
        packed = query[:, :, start:stop].reshape(batch, heads, groups * (stop - start), head_dim)
        mask = seen.unsqueeze(2).expand(-1, -1, groups, -1, -1).reshape(batch, seen.shape[1], packed.shape[2], rows)
        output = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
        outputs.append(output.reshape(batch, query_heads, stop - start, value.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
