"""Scores that the caller brings, one tensor per layer."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True, eq=False)
class GivenScores(Score):
    """`per_layer[i]` is [batch, heads, tokens] for layer i, indexed by token position. For studies and tests."""

    per_layer: tuple[Tensor, ...]

    def __call__(self, evidence: Evidence) -> Tensor:
        positions = evidence.rows.head_positions.long().clamp(min=0)
        return self.per_layer[evidence.layer_idx].to(positions.device).float().gather(2, positions)
