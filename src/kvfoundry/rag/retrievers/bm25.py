"""BM25 by the library bm25s: words, counted; needs no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfoundry.checks import number
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.extra import load
from kvfoundry.rag.retrievers.base import Question
from kvfoundry.rag.retrievers.registry import register


class Words:
    """The words of every passage of a collection (title and text), stemmed, without English stop words."""

    def __init__(self, collection: Collection, k1: float, b: float):
        self._library = load("bm25s", "the retriever bm25")
        self._stemmer = load("Stemmer", "the retriever bm25").Stemmer("english")
        texts = [f"{passage.title} {passage.text}" for passage in collection.passages]
        self._index: Any = None
        counted = self._words(texts)
        if any(counted):  # the library refuses passages without a single word
            self._index = self._library.BM25(k1=k1, b=b)
            self._index.index(counted, create_empty_token=False, show_progress=False)

    def _words(self, texts: list[str]) -> Any:
        return self._library.tokenize(
            texts, stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False, allow_empty=False
        )

    def scores(self, question: str) -> Tensor | None:
        """[passages]; None where the question has no word that a passage has."""
        if self._index is None:
            return None
        known = self._index.get_tokens_ids(self._words([question])[0])
        return torch.from_numpy(self._index.get_scores_from_ids(known)) if known else None


@register("scorer")
@dataclass(frozen=True)
class Bm25:
    """BM25 over the words of title and text (Robertson and Walker, 1994); rare words count by the whole index."""

    k1: float = 1.5
    b: float = 0.75
    weight: float = 1.0

    name: ClassVar[str] = "bm25"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        number("k1", self.k1, least=0)
        number("b", self.b, least=0, most=1)
        number("weight", self.weight, least=0)

    def scores(self, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        words = collection.derived((self.name, self.k1, self.b), lambda all_of_it: Words(all_of_it, self.k1, self.b))
        found = words.scores(question.text)
        return torch.zeros(len(rows)) if found is None else found[rows]
