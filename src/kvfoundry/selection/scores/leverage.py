"""Statistical leverage of keys before RoPE, by a random sketch (Compactor)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfoundry.errors import CacheStateError
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score
from kvfoundry.selection.scores.uniform_random import hashed_normal

# Added to the diagonal, so that keys in a narrow subspace can still be solved for.
_JITTER = 1e-2


@dataclass(frozen=True)
class Leverage(Score):
    """diag(X (X'X + jitter I)^-1 X') for X = (K - mean) Phi / sqrt(sketch), K before RoPE, Phi normal [dim, sketch].

    Phi follows from seed, layer and head. draws: the normal numbers of every layer [1 or batch, heads, dim, sketch] to
    use in its place.
    """

    sketch: int = 48
    seed: int = 0
    draws: tuple[Tensor, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def needs_rope(self) -> bool:
        return True

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        if evidence.rope is None:
            raise CacheStateError("leverage scores need the model's RoPE; use them through KVCache(model).")
        positions = rows.head_positions.long().clamp(min=0)
        raw = evidence.rope.unrotate(rows.keys, positions, length=int(evidence.seen.max())).float()
        present = rows.valid[..., None]
        mean = (raw * present).sum(dim=2, keepdim=True) / present.sum(dim=2, keepdim=True).clamp(min=1)
        features = ((raw - mean) * present) @ self._phi(evidence)
        gram = features.transpose(-1, -2) @ features
        gram = gram + _JITTER * torch.eye(self.sketch, device=gram.device)
        solved = torch.linalg.solve(gram, features.transpose(-1, -2)).transpose(-1, -2)
        return (features * solved).sum(dim=-1).clamp(min=0)

    def _phi(self, evidence: Evidence) -> Tensor:
        keys = evidence.rows.keys
        heads, dim = keys.shape[1], keys.shape[3]
        if self.draws is not None:
            return self.draws[evidence.layer_idx].to(keys.device) / self.sketch**0.5
        places = torch.arange(dim * self.sketch, device=keys.device).expand(1, heads, -1)
        normal = hashed_normal(self.seed, evidence.layer_idx, places)
        return normal.view(1, heads, dim, self.sketch) / self.sketch**0.5
