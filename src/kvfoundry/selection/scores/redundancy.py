"""Attention of the last queries against likeness to other keys (R-KV)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.pooling import pooled
from kvfoundry.selection.scores.base import Score

# Bound on the elements of one block of cosines: 4M elements are 16 MiB in float32.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class ImportanceMinusRedundancy(Score):
    """weight * importance - (1 - weight) * redundancy, for the rows before the last `queries` tokens.

    importance: mean attention of the last `queries` queries, renormalised over the rows before them, reduced over the
    group, max-pooled over `kernel` neighbours. redundancy: softmax over rows of the mean cosine to the other keys,
    where every row forgives the newest key that resembles it (cosine above `threshold`).
    """

    queries: int = 8
    kernel: int = 7
    weight: float = 0.1
    threshold: float = 0.5

    @property
    def window(self) -> int:
        return self.queries

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        before = rows.valid & (evidence.ages() > self.queries)
        attention = evidence.window_attention
        attention = attention * before.repeat_interleave(evidence.groups, dim=1)[:, :, None]
        attention = attention / attention.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        queries = (evidence.window_positions >= 0).sum(dim=1).clamp(min=1)[:, None, None]
        importance = pooled(evidence.reduced(attention.sum(dim=2) / queries), before, self.kernel, "max")
        return self.weight * importance - (1 - self.weight) * self._redundancy(rows.keys, rows.valid)

    def _redundancy(self, keys: Tensor, valid: Tensor) -> Tensor:
        unit = F.normalize(keys.float(), dim=-1) * valid[..., None]
        batch, heads, count, _ = unit.shape
        total = torch.zeros(batch, heads, count, device=keys.device)
        step = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * count))
        column = torch.arange(count, device=keys.device)
        for start in range(0, count, step):
            row = column[start : start + step, None]
            cosine = (unit[:, :, start : start + step] @ unit.transpose(-1, -2)).masked_fill(row == column, 0.0)
            newest = torch.where(cosine > self.threshold, column, -1).amax(dim=-1, keepdim=True)
            total += cosine.masked_fill(column == newest, 0.0).sum(dim=2)
        mean = total / valid.sum(dim=-1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~valid, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
