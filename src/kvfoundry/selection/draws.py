"""Random numbers for sampling methods: one per layer, head and token, the same in a batch and alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.selection.scores.uniform_random import hashed_uniform

# Keeps these draws apart from those of the random method under the same seed.
_SALT = 104_729


class Draws(ABC):
    """A source of uniform numbers. Frozen, without state."""

    @abstractmethod
    def __call__(self, layer_idx: int, positions: Tensor) -> Tensor:
        """Uniform numbers in [0, 1], float32, one for each of positions [batch, heads, rows]."""


@dataclass(frozen=True)
class HashedDraws(Draws):
    """Numbers that depend on seed, layer, head and token index only."""

    seed: int = 0

    def __call__(self, layer_idx: int, positions: Tensor) -> Tensor:
        return hashed_uniform(self.seed + _SALT, layer_idx, positions)


@dataclass(frozen=True, eq=False)
class GivenDraws(Draws):
    """`per_layer[i]` is [batch, heads, tokens] for layer i, indexed by token position. For studies and tests."""

    per_layer: tuple[Tensor, ...]

    def __call__(self, layer_idx: int, positions: Tensor) -> Tensor:
        given = self.per_layer[layer_idx].to(positions.device, torch.float32)
        return given.gather(2, positions.long().clamp(min=0))
