"""Attention over two sets of rows, each by the kernel that suits it, joined by their log-sum-exp in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Half = tuple[Tensor, Tensor]


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these can be read so: torch's kernels want one width of rows, in steps of eight."""
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    return len(widths) == 1 and query.shape[-1] % 8 == 0 and query.device.type in ("cpu", "cuda")


def behind(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """Attention of the last tokens of a text over all of it, on a GPU in half precision.

    query: [batch, query_heads, queries, dim]; key, value: [batch, heads, rows, dim], the queries' own rows last. What
    lies in front of them is read without a mask, in as many parts as keep the device busy.
    """
    aten = torch.ops.aten
    before = key.shape[2] - query.shape[2]
    output, *found = aten._scaled_dot_product_flash_attention(
        query, key[:, :, before:], value[:, :, before:], 0.0, True, False, scale=scaling
    )
    if not before:
        return output
    past = half(query, key[:, :, :before], value[:, :, :before], None, scaling)
    own = output, found[0][..., : query.shape[2]]
    return joined(past, own)[0].to(query.dtype)


def half(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float) -> Half:
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


def joined(one: Half, other: Half) -> Half:
    """Attention over two sets of rows, from attention over each."""
    total = torch.logaddexp(one[1], other[1])
    shares = ((half[1] - total).exp()[..., None] for half in (one, other))
    output = sum(share * half[0].float() for share, half in zip(shares, (one, other), strict=True))
    assert isinstance(output, Tensor)
    return output, total
