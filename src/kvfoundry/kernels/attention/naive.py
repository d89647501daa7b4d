"""Reference attention: grouped heads, soft-cap, sinks, any mask; memory linear in the number of rows.

The arithmetic follows the `eager` functions of transformers: logits in the input dtype, softmax in float32.
"""

import torch
from torch import Tensor

from kvfoundry.visibility import Visibility

# Upper bound on the elements of one block of logits: 16M elements are 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24
# A GPU has room for larger blocks, and there every block costs the launch of a dozen kernels.
_GPU_BLOCKS = 8


def query_block(device: torch.device, batch: int, heads: int, rows: int) -> int:
    """How many queries to take at once so that a block of logits stays within the bound."""
    elements = _BLOCK_ELEMENTS * (_GPU_BLOCKS if device.type == "cuda" else 1)
    return max(1, elements // max(1, batch * heads * rows))


def attention_weights(
    query: Tensor, key: Tensor, seen: Tensor | None, *, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax weights of every query over every row.

    query: [batch, query_heads, queries, head_dim]; key: [batch, heads, rows, head_dim]; heads divides query_heads.
    seen: boolean [batch, heads or 1, queries, rows], None when every query sees every row.
    sinks: [query_heads] logits of the attention sink that takes weight without a row (GPT-OSS), or None.
    Returns [batch, query_heads, queries, rows] in float32.
    """
    batch, query_heads, queries, head_dim = query.shape
    heads, rows = key.shape[1], key.shape[2]
    groups = query_heads // heads
    packed = query.reshape(batch, heads, groups * queries, head_dim)
    logits = torch.matmul(packed, key.transpose(-1, -2)).view(batch, heads, groups, queries, rows) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if seen is not None:
        logits = logits.masked_fill(~seen.unsqueeze(2), torch.finfo(logits.dtype).min)
    logits = logits.view(batch, query_heads, queries, rows)
    if sinks is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    sink = sinks.reshape(1, query_heads, 1, 1).to(logits.dtype).expand(batch, -1, queries, 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


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
    """Attention output [batch, query_heads, queries, value_dim]; arguments as in `attention_weights`."""
    batch, query_heads, queries, _ = query.shape
    heads, rows, value_dim = key.shape[1], key.shape[2], value.shape[3]
    groups = query_heads // heads
    step = query_block(query.device, batch, query_heads, rows)
    outputs = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        # Causal blocks end at their own diagonal: rows after it are never read.
        reach = stop if visibility.pattern == "causal" else rows
        seen = None if visibility.pattern == "full" else visibility.block(start, stop)[..., :reach]
        weights = attention_weights(
            query[:, :, start:stop], key[:, :, :reach], seen, scaling=scaling, softcap=softcap, sinks=sinks
        ).to(value.dtype)
        grouped = weights.reshape(batch, heads, groups * (stop - start), reach)
        outputs.append(torch.matmul(grouped, value[:, :, :reach]).view(batch, query_heads, stop - start, value_dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
