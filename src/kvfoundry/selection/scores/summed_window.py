"""Attention that the last queries spent on a row, summed and not smoothed (NaCl, KVCache-Factory's CaM)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class SummedWindowAttention(Score):
    """Sum over the last `queries` queries, then the group reduction; with `group_first` the reduction comes first.

    The order matters under the reduction by maximum only.
    """

    queries: int = 32
    group_first: bool = False

    @property
    def window(self) -> int:
        return self.queries

    def __call__(self, evidence: Evidence) -> Tensor:
        if self.group_first:
            return evidence.reduced(evidence.window_attention).sum(dim=2)
        return evidence.reduced(evidence.window_sums)
