"""Attention of the last queries, reduced over the group query by query (KVCache-Factory's CaM)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class GroupedWindowAttention(Score):
    """Sum over the last `queries` queries of the group reduction of their attention.

    Differs from an unpooled `WindowAttention` under the reduction by maximum only, which there follows the sum.
    """

    queries: int = 8

    @property
    def window(self) -> int:
        return self.queries

    def __call__(self, evidence: Evidence) -> Tensor:
        return evidence.reduced(evidence.window_attention).sum(dim=2)
