"""The token index itself: newer rows stay (StreamingLLM)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class Recency(Score):
    """Position of the row in its own sequence."""

    def __call__(self, evidence: Evidence) -> Tensor:
        return evidence.rows.head_positions.float()
