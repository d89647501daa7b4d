"""Attention of queries that stand here and there in a text over the rows of the whole text.

A mask from positions costs a kernel more than the rows that it hides. So queries are taken in blocks of neighbours: the
rows in front of a block's first query are read without a mask, and only those between its first and its last query with
one. On a GPU with Triton one kernel does so; elsewhere the two halves are joined by their log-sum-exp, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.kernels.attention.halves import half, joined
from kvfoundry.kernels.attention.span import Span
from kvfoundry.kernels.available import without_triton
from kvfoundry.visibility import Visibility

# Where a half begins, in rows: what the kernels want to be aligned.
_ALIGNED = 16


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    span: Span,
    *,
    scaling: float,
    block: int,
) -> Tensor:
    """Attention output [batch, query_heads, queries, dim].

    key, value: [batch, heads, rows, dim], the row of position p at place p. visibility: of these, whole past. span: of
    the queries. block: how many queries are taken at a time where Triton is missing.
    """
    if without_triton(query.device) is None:
        from kvfoundry.kernels.prefill_attention.forward import forward

        return forward(
            query, key, value, scaling=scaling, query_positions=visibility.query_positions,
            key_positions=visibility.key_positions, span=span,
        )[0]  # fmt: skip
    batch, query_heads, queries, dim = query.shape
    heads = key.shape[1]
    groups = query_heads // heads
    outputs = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        low, high = span.of(start, stop)
        low = low // _ALIGNED * _ALIGNED
        # Query heads of one group become extra queries of their shared KV head, as in a full read.
        packed = query[:, :, start:stop].reshape(batch, heads, groups * (stop - start), dim)
        near = slice(low, high)
        seen = Visibility(
            visibility.query_positions[:, start:stop], visibility.key_positions[:, :, near], "masked", visibility.rule
        ).block(0, stop - start)
        found = half(packed, key[:, :, near], value[:, :, near], _bias(seen, packed, heads), scaling)
        if low:
            found = joined(half(packed, key[:, :, :low], value[:, :, :low], None, scaling), found)
        outputs.append(found[0].to(query.dtype).reshape(batch, query_heads, stop - start, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _bias(seen: Tensor, packed: Tensor, heads: int) -> Tensor:
    """0 where a query sees a row and -inf elsewhere, [batch, heads, packed queries, rows] over aligned memory."""
    rows = seen.shape[-1]
    width = -(-rows // _ALIGNED) * _ALIGNED
    bias = packed.new_zeros(*seen.shape[:-1], width)
    bias[..., :rows].masked_fill_(~seen, -torch.inf)
    bias = bias[:, :, None].expand(-1, -1, packed.shape[2] // seen.shape[2], -1, -1).flatten(2, 3)
    return bias.expand(-1, heads, -1, -1)[..., :rows]
