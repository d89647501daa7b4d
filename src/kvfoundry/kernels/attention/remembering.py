"""Attention that keeps what the softmax of a prompt divided by: its weights can be told again without a pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfoundry.kernels.attention.sdpa import FLASH
from kvfoundry.visibility import Visibility


@dataclass
class Remembering:
    """The attention function `kernel`, and the log-sum-exp of the last call's queries where torch's operator tells it.

    query: the queries of that call. lse: [batch, query_heads, queries] float32, base 2; None where it is not known.
    """

    kernel: Callable[..., Tensor]
    query: Tensor | None = field(default=None, repr=False)
    lse: Tensor | None = field(default=None, repr=False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `naive.attend`."""
        self.query = self.lse = None
        dim = query.shape[3]
        if (
            visibility.pattern == "causal"
            and softcap is None
            and sinks is None
            and query.is_cuda
            and query.dtype in FLASH
            and value.shape[3] == dim
            and dim % 8 == 0
            and dim <= 256
        ):
            output, lse = _causal(query, key, value, scaling)
            self.query, self.lse = query, lse * math.log2(math.e)
            return output
        return self.kernel(query, key, value, visibility, scaling=scaling, softcap=softcap, sinks=sinks)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp [batch, query_heads, queries], by the operator that torch itself would take."""
    given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1])
    if torch.backends.cuda.can_use_cudnn_attention(given):  # the faster one where there is a choice
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scaling
        )
        return output, lse.reshape(query.shape[:3])
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, False, scale=scaling
    )
    return output, lse
