"""A second look at the best candidates by late interaction, which is dearer than what found them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.retrievers.base import TOKENS, Question
from kvfoundry.rag.retrievers.maxsim import maxsim
from kvfoundry.rag.retrievers.registry import register


@register("stage")
@dataclass(frozen=True)
class Rerank:
    """The `top` candidates found so far in the order of their exact MaxSim; the others follow as they were."""

    top: int = 50

    name: ClassVar[str] = "rerank"
    needs: ClassVar[frozenset[str]] = TOKENS

    def __post_init__(self) -> None:
        whole("top", self.top, least=1)

    def apply(self, scores: Tensor, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        order = scores.argsort(descending=True, stable=True)
        best, others = order[: self.top], order[self.top :]
        found = maxsim(question.tokens, collection, rows[best])
        result = scores.clone()
        result[best] = found
        if len(others):  # moved below, their distances kept
            result[others] = scores[others] - scores[others].max() + found.min() - 1
        return result
