"""One score from several: by how far each stands above the mean, or by rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.rag.retrievers.registry import register


def standardised(scores: Tensor) -> Tensor:
    """Scores in standard deviations above their mean; zeros where all are equal."""
    spread = scores.std(correction=0)
    return (scores - scores.mean()) / spread if spread > 1e-9 else torch.zeros_like(scores)


@register("fusion")
@dataclass(frozen=True)
class ZScore:
    """Weighted mean of the scores, each in standard deviations above its mean over the candidates."""

    name: ClassVar[str] = "zscore"

    def fuse(self, scores: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        parts = [weight * standardised(each) for each, weight in zip(scores, weights, strict=True)]
        return torch.stack(parts).sum(0)


@register("fusion")
@dataclass(frozen=True)
class Ranks:
    """Reciprocal rank fusion: weight / (constant + rank), summed (Cormack, Clarke and Büttcher, 2009)."""

    constant: int = 60

    name: ClassVar[str] = "ranks"

    def __post_init__(self) -> None:
        whole("constant", self.constant)

    def fuse(self, scores: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        total = torch.zeros(len(scores[0]))
        for each, weight in zip(scores, weights, strict=True):
            order = each.argsort(descending=True, stable=True)
            ranks = torch.empty(len(each)).scatter_(0, order, torch.arange(1, len(each) + 1).float())
            total += weight / (self.constant + ranks)
        return total
