"""Share of the squared norm of keys and values: approximate leverage scores (CurDKV)."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.base import Score
from kvfoundry.selection.scores.uniform_random import hashed_normal

Leverage = Literal["kv_product", "kv_avg", "key", "value"]

# Columns of the random projection, as in the reference.
_SKETCH = 20


@dataclass(frozen=True)
class SquaredNorms(Score):
    """||k||^2 and ||v||^2, each divided by the sum over its block of `block` rows, then combined and normalised.

    block: None for no blocks. seed: project keys and values to 20 random directions before the norm, None for not.
    draws: normal numbers [dim, 20] of every layer to use instead of those that follow from the seed.
    """

    combine: Leverage = "kv_product"
    block: int | None = 16
    seed: int | None = None
    draws: tuple[Tensor, ...] | None = field(default=None, compare=False, repr=False)

    def __call__(self, evidence: Evidence) -> Tensor:
        rows = evidence.rows
        sketch = None
        if self.seed is not None:
            sketch = self._sketch(evidence.layer_idx, rows.keys.shape[3], rows.keys.device)
        keys, values = (self._share(tensor.float(), sketch) for tensor in (rows.keys, rows.values))
        if self.combine == "key":
            scores = keys
        elif self.combine == "value":
            scores = values
        elif self.combine == "kv_avg":
            scores = (keys + values) / 2
        else:
            scores = keys * values
        return scores / scores.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)

    def _share(self, rows: Tensor, sketch: Tensor | None) -> Tensor:
        """Squared norms [batch, heads, rows] relative to their block; rows that do not exist are zero."""
        if sketch is not None and sketch.shape[0] == rows.shape[-1]:
            rows = rows @ sketch
        squares = rows.square().sum(dim=-1)
        if self.block is None:
            return squares
        count = squares.shape[-1]
        blocks = torch.nn.functional.pad(squares, (0, -count % self.block)).unflatten(-1, (-1, self.block))
        total = blocks.sum(dim=-1, keepdim=True)
        return (blocks / total.where(total > 0, 1.0)).flatten(-2)[..., :count]

    def _sketch(self, layer: int, dim: int, device: torch.device) -> Tensor:
        assert self.seed is not None
        if self.draws is not None:
            return self.draws[layer].to(device) / _SKETCH**0.5
        places = torch.arange(dim * _SKETCH, device=device)[None, None]
        return hashed_normal(self.seed, layer, places).view(dim, _SKETCH) / _SKETCH**0.5
