"""Attention over part of the rows, with what it takes to join two parts: output and log-sum-exp."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Half = tuple[Tensor, Tensor]


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `half` can read these: torch's kernels want one width of rows, in steps of eight, up to 256."""
    width, widths = query.shape[-1], {query.shape[-1], key.shape[-1], value.shape[-1]}
    return len(widths) == 1 and width % 8 == 0 and width <= 256 and query.device.type in ("cpu", "cuda")


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch's flash kernel runs on a CUDA device: it wants Ampere or newer."""
    return torch.cuda.get_device_capability(device)[0] >= 8


def half(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, *, causal: bool = False
) -> Half:
    """Output and log-sum-exp [batch, heads, queries] over these rows.

    bias: [batch, heads, queries, rows] in aligned memory, or None. causal: the rows are the queries' own tokens.
    """
    aten = torch.ops.aten
    kernel: Callable[..., tuple[Tensor, ...]]
    if query.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        found = kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scaling)
    elif bias is None and query.dtype in (torch.bfloat16, torch.float16) and _has_flash(query.device):
        kernel = aten._scaled_dot_product_flash_attention
        found = kernel(query, key, value, 0.0, causal, False, scale=scaling)
    else:
        kernel = aten._scaled_dot_product_efficient_attention
        found = kernel(query, key, value, bias, True, 0.0, causal, scale=scaling)
    return found[0], found[1][..., : query.shape[2]]  # some kernels round the number of queries up


def joined(one: Half, other: Half) -> Half:
    """Attention over two sets of rows, from attention over each."""
    total = torch.logaddexp(one[1], other[1])
    shares = ((lse - total).exp()[..., None] for _, lse in (one, other))
    output = sum(share * part.float() for share, (part, _) in zip(shares, (one, other), strict=True))
    assert isinstance(output, Tensor)
    return output, total
