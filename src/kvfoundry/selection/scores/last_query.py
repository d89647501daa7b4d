"""Attention of the newest query, averaged over all heads (TOVA)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class LastQueryAttention(Score):
    """One ranking for the whole layer: the mean over query heads of the last query's attention."""

    @property
    def window(self) -> int:
        return 1

    def __call__(self, evidence: Evidence) -> Tensor:
        weights = evidence.window_attention[:, :, -1]
        if evidence.rows.keys.shape[1] == 1 or _same_rows(evidence):
            return weights.mean(dim=1, keepdim=True).expand(-1, evidence.rows.keys.shape[1], -1)
        return evidence.reduced(weights)


def _same_rows(evidence: Evidence) -> bool:
    """Averaging over heads is meaningful only where slot i is the same token in every head."""
    positions = evidence.rows.positions
    return positions.shape[1] == 1 or bool((positions == positions[:, :1]).all())
