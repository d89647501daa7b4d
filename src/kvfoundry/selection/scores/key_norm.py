"""Negative key norm: rows with small keys attract attention (L2Norm, Knorm)."""

from dataclasses import dataclass

from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class KeyNorm(Score):
    """Minus the Euclidean norm of the key as attention sees it (after RoPE)."""

    def __call__(self, evidence: Evidence) -> Tensor:
        return -evidence.rows.keys.float().norm(dim=-1)
