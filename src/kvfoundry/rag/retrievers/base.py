"""What a retriever is made of: scorers, one fusion of their scores, and stages that change the order found so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from kvfoundry.rag.collection import Collection
from kvfoundry.rag.encoders.base import Encoder, Vectors

POOLED, TOKENS = frozenset({"pooled"}), frozenset({"tokens"})


class Question:
    """A question and, once they are needed, its vectors."""

    def __init__(self, text: str, encoder: Encoder | None = None, want: frozenset[str] = frozenset()):
        self.text = text
        self._encoder, self._want = encoder, want
        self._vectors: Vectors | None = None

    @property
    def _found(self) -> Vectors:
        if self._vectors is None:
            assert self._encoder is not None
            self._vectors = self._encoder.question(self.text, self._want)
        return self._vectors

    @property
    def pooled(self) -> Tensor:
        """[dimensions]."""
        assert self._found.pooled is not None
        return self._found.pooled

    @property
    def tokens(self) -> Tensor:
        """[tokens, dimensions]."""
        assert self._found.tokens is not None
        return self._found.tokens


class Scorer(Protocol):
    """Gives every candidate a score of its own; higher is better.

    Attributes:
        needs: the vectors that an index must keep for it.
        weight: its share in a fusion, in relation to the others'.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    @property
    def weight(self) -> float: ...

    def scores(self, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        """[candidates] for the candidates at `rows` of the collection."""
        ...


class Fusion(Protocol):
    """Makes one score of several."""

    name: ClassVar[str]

    def fuse(self, scores: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """[candidates] from one [candidates] for each scorer; the weights sum to 1."""
        ...


class Stage(Protocol):
    """Changes scores that were found before it."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    def apply(self, scores: Tensor, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        """[candidates] -> [candidates]."""
        ...
