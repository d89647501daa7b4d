"""Online softmax: largest logit so far, weights relative to it, and the weighted values; all in float32."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that are taken (and, where they are stored in a code, decoded) at once.
TILE = 512


class RunningAttention:
    """The attention of fixed queries over parts of rows: `add` every part, then `output`.

    Of logits x_j and values v_j it holds m = max x_j, s = sum exp(x_j - m) and o = sum exp(x_j - m) v_j; a part with a
    larger logit rescales what is there by exp(m - m'). The order of the parts does not matter but for rounding.
    """

    def __init__(self, query: Tensor, value_dim: int, *, scaling: float, softcap: float | None = None):
        """query: [batch, query_heads, queries, head_dim]; value_dim: width of the values."""
        shape = query.shape[:3]
        self._scaling, self._softcap = scaling, softcap
        self._peak = query.new_full((*shape, 1), torch.finfo(torch.float32).min, dtype=torch.float32)
        self._total = torch.zeros_like(self._peak)
        self._weighted = query.new_zeros(*shape, value_dim, dtype=torch.float32)

    def add(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor | None,
        at: tuple[slice, slice, slice] = (slice(None), slice(None), slice(None)),
    ) -> None:
        """Take in one part.

        query: [batch, query_heads, queries, dim] and keys: [batch, heads, rows, dim] in whatever channels this part is
        stored; values: [batch, heads, rows, value_dim]. seen: boolean [batch, heads or 1, queries, rows], None when
        every query sees every row. at: which batch rows, query heads and queries these are.
        """
        batch, query_heads, queries, dim = query.shape
        heads, rows = keys.shape[1], keys.shape[2]
        if rows == 0:
            return
        groups = query_heads // heads
        packed = query.reshape(batch, heads, groups * queries, dim)
        logits = torch.matmul(packed, keys.transpose(-1, -2)).float().view(batch, heads, groups, queries, rows)
        logits = logits * self._scaling
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if seen is not None:
            logits = logits.masked_fill(~seen.unsqueeze(2), torch.finfo(torch.float32).min)
        logits = logits.view(batch, query_heads, queries, rows)
        peak = torch.maximum(self._peak[at], logits.amax(dim=-1, keepdim=True))
        weights = torch.exp(logits - peak)
        if seen is not None:  # where nothing was seen yet, the peak itself is the mask's
            weights = weights * seen.expand(-1, heads, -1, -1).repeat_interleave(groups, dim=1)
        grouped = weights.to(values.dtype).reshape(batch, heads, groups * queries, rows)
        weighted = torch.matmul(grouped, values).float().view(batch, query_heads, queries, -1)
        fade = torch.exp(self._peak[at] - peak)
        self._total[at] = self._total[at] * fade + weights.sum(dim=-1, keepdim=True)
        self._weighted[at] = self._weighted[at] * fade + weighted
        self._peak[at] = peak

    def output(self, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
        """[batch, query_heads, queries, value_dim]; zeros where no row was seen.

        sinks: [query_heads] logits that take weight without a row (GPT-OSS), or None.
        """
        total, weighted = self._total, self._weighted
        if sinks is not None:
            logits = sinks.float().view(1, -1, 1, 1)
            peak = torch.maximum(self._peak, logits)
            fade = torch.exp(self._peak - peak)
            total, weighted = total * fade + torch.exp(logits - peak), weighted * fade
        return (weighted / total.clamp(min=torch.finfo(torch.float32).tiny)).to(dtype)
