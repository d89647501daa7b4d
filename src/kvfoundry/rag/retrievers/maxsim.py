"""Late interaction: every token of the question looks for the token of the passage that is nearest to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfoundry.checks import number
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.retrievers.base import TOKENS, Question
from kvfoundry.rag.retrievers.registry import register

# Token vectors that are compared at once: bounds the memory of a search over a large index (50 MB at 384 numbers).
_AT_ONCE = 1 << 15


def maxsim(question: Tensor, collection: Collection, rows: Tensor) -> Tensor:
    """[candidates]: the sum over question tokens of the largest cosine with a token of the passage.

    question: unit vectors [tokens, dimensions]. Exact over the vectors that are stored. A passage without token
    vectors (nothing but punctuation) scores as if each cosine were -1.
    """
    stored, owner = collection.token_rows(rows)
    best = torch.full((len(question), len(rows)), -1.0)
    for start in range(0, len(stored), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        piece = type(stored)(stored.codes[part], None if stored.scales is None else stored.scales[part])
        owners = owner[part].expand(len(question), -1)
        best.scatter_reduce_(1, owners, piece.products(question), "amax")
    return best.sum(0)


@register("scorer")
@dataclass(frozen=True)
class MaxSim:
    """ColBERT's MaxSim over token vectors, exact (Khattab and Zaharia, 2020, arXiv 2004.12832)."""

    weight: float = 1.0

    name: ClassVar[str] = "maxsim"
    needs: ClassVar[frozenset[str]] = TOKENS

    def __post_init__(self) -> None:
        number("weight", self.weight, least=0)

    def scores(self, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        return maxsim(question.tokens, collection, rows)
