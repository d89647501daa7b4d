"""Random ranking that depends on seed, layer, head and token index only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score

_MASK = (1 << 31) - 1


def hashed_uniform(seed: int, layer: int, positions: Tensor) -> Tensor:
    """A uniform number in [0, 1) for every (head, position), from an integer hash.

    positions: [batch, heads, rows]. Counter-based instead of a generator, so that a token draws the same number in a
    batch and alone, in one block and in pieces, on every device. Returns float32 of the same shape.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    base = (seed * 9_576_890_767 + layer * 7_368_787) & _MASK
    state = positions.to(torch.int64) + heads * 1_000_003 + base
    for multiplier in (0x7FEB352D, 0x45D9F3B, 0x297A2D39):
        state = ((state ^ (state >> 15)) & _MASK) * multiplier
    return ((state >> 8) & 0xFFFFFF).float() / 0x1000000


def hashed_normal(seed: int, layer: int, positions: Tensor) -> Tensor:
    """A standard normal number for every (head, position), as reproducible as `hashed_uniform`."""
    radius = torch.sqrt(-2 * torch.log1p(-hashed_uniform(seed, layer, positions)))
    return radius * torch.cos(2 * torch.pi * hashed_uniform(seed + 1, layer, positions))


@dataclass(frozen=True)
class UniformRandom(Score):
    """The baseline every method must beat."""

    seed: int = 0

    def __call__(self, evidence: Evidence) -> Tensor:
        return hashed_uniform(self.seed, evidence.layer_idx, evidence.rows.head_positions)
