"""One vector for a question, one for a passage: the cosine of the angle between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfoundry.checks import number
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.retrievers.base import POOLED, Question
from kvfoundry.rag.retrievers.registry import register


@register("scorer")
@dataclass(frozen=True)
class Dense:
    """Cosine of the vectors of question and passage, over all candidates."""

    weight: float = 1.0

    name: ClassVar[str] = "dense"
    needs: ClassVar[frozenset[str]] = POOLED

    def __post_init__(self) -> None:
        number("weight", self.weight, least=0)

    def scores(self, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        assert collection.pooled is not None
        stored = collection.pooled if len(rows) == len(collection) else None
        if stored is not None and bool((rows[1:] > rows[:-1]).all()):  # all of them as they stand: nothing to gather
            return stored.products(question.pooled[None])[0]
        return collection.pooled.take(rows).products(question.pooled[None])[0]
