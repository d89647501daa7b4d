"""Attention of the last queries, smoothed along the sequence (SnapKV, PyramidKV, AdaKV)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.pooling import Pooling, pooled
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class WindowAttention(Score):
    """Mean over the last `queries` queries of their attention, group reduction, pooling over `kernel` neighbours.

    Only rows before the window are pooled: the window's own columns are protected and must not leak into their
    neighbours.
    """

    queries: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"

    @property
    def window(self) -> int:
        return self.queries

    def __call__(self, evidence: Evidence) -> Tensor:
        queries = (evidence.window_positions >= 0).sum(dim=1).clamp(min=1)[:, None, None]
        scores = evidence.reduced(evidence.window_sums / queries)
        before_window = evidence.rows.valid & (evidence.ages() > self.queries)
        return pooled(scores, before_window, self.kernel, self.pooling)
