"""Random tokens: the baseline that every other rule must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfoundry.blend.select.base import Selector, best
from kvfoundry.blend.select.register import register
from kvfoundry.checks import whole
from kvfoundry.selection.scores.uniform_random import hashed_uniform

if TYPE_CHECKING:
    from kvfoundry.blend.blending import Blending

# Keeps these draws apart from those of methods that sample under the same seed.
_SALT = 15_485_863


@register
@dataclass(frozen=True)
class Random(Selector):
    """The draw of a token depends on the seed and its index only, never on the batch."""

    seed: int = 0

    name = "random"
    summary = "random tokens"
    source = "baseline"

    def __post_init__(self) -> None:
        whole("seed", self.seed)

    def choose(self, blending: Blending, ratio: float) -> list[Tensor]:
        width = int(blending.lengths.max())
        positions = torch.arange(width).expand(len(blending.lengths), 1, width)
        return best(hashed_uniform(self.seed + _SALT, 0, positions)[:, 0], ratio, blending)
