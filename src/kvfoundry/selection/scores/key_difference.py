"""Dissimilarity of a key from the mean direction of all keys (KeyDiff)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score


@dataclass(frozen=True)
class KeyDifference(Score):
    """Minus the cosine between a key and the mean of the unit keys that are stored, per head."""

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        present = rows.valid[..., None]
        unit = F.normalize(rows.keys.float(), dim=-1) * present
        anchor = unit.sum(dim=2, keepdim=True) / present.sum(dim=2, keepdim=True).clamp(min=1)
        return -F.cosine_similarity(rows.keys.float(), anchor, dim=-1)
