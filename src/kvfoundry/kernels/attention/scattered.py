"""Attention of queries that stand here and there in a text over the rows of the whole text.

A mask from positions costs a kernel more than the rows that it hides. So queries are taken in blocks of neighbours: the
rows in front of a block's first query are read without a mask, and only those between its first and its last query with
one. On a GPU with Triton one kernel does so; elsewhere the two halves are joined by their log-sum-exp, in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from kvfoundry.kernels.attention.span import Span
from kvfoundry.visibility import Visibility

# Where a half begins, in rows: what the kernels want to be aligned.
_ALIGNED = 16

Half = tuple[Tensor, Tensor]


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` can read these: torch's kernels want one width of rows, in steps of eight."""
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    return len(widths) == 1 and query.shape[-1] % 8 == 0 and query.device.type in ("cpu", "cuda")


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
    if query.is_cuda and importlib.util.find_spec("triton") is not None:
        from kvfoundry.kernels.prefill_attention import fused

        return fused.forward(
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
        found = _half(packed, key[:, :, near], value[:, :, near], _bias(seen, packed, heads), scaling)
        if low:
            found = _joined(_half(packed, key[:, :, :low], value[:, :, :low], None, scaling), found)
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


def _half(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float) -> Half:
    """Output and log-sum-exp [batch, heads, queries] over these rows."""
    aten = torch.ops.aten
    kernel: Callable[..., tuple[Tensor, ...]]
    if query.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        found = kernel(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
    elif bias is None and query.dtype in (torch.bfloat16, torch.float16):
        kernel = aten._scaled_dot_product_flash_attention
        found = kernel(query, key, value, 0.0, False, False, scale=scaling)
    else:
        kernel = aten._scaled_dot_product_efficient_attention
        found = kernel(query, key, value, bias, True, 0.0, False, scale=scaling)
    return found[0], found[1][..., : query.shape[2]]  # some kernels round the number of queries up


def _joined(one: Half, other: Half) -> Half:
    """Attention over two sets of rows, from attention over each."""
    total = torch.logaddexp(one[1], other[1])
    shares = ((half[1] - total).exp()[..., None] for half in (one, other))
    output = sum(share * half[0].float() for share, half in zip(shares, (one, other), strict=True))
    assert isinstance(output, Tensor)
    return output, total
