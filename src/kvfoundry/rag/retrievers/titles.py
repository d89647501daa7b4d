"""Passages that are called by name: by the question, or by what was found first.

A question that needs two passages seldom resembles the second: "Who directed the film in which ...?" is near the
film's passage, and that one names the director, whose passage is titled with that name. Following titles is the
offline form of following links between pages (Asai et al., 2020, arXiv 1911.10470). Without titles nothing changes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfoundry.checks import number, whole
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.retrievers.base import Question
from kvfoundry.rag.retrievers.fusion import standardised
from kvfoundry.rag.retrievers.registry import register

_WORD = re.compile(r"\w+")
_REMARK = re.compile(r"\([^)]*\)")
# Letters that a title must have: shorter ones are found by accident.
_LEAST = 3


class Titles:
    """The titles of a collection by their words, so that a text is searched in one pass, however many there are.

    A remark in brackets is no part of a title ("Mercury (planet)"). Case counts only in titles of one word.
    """

    def __init__(self, collection: Collection):
        self._rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, passage in enumerate(collection.passages):
            words = _WORD.findall(_REMARK.sub(" ", passage.title))
            if len("".join(words)) >= _LEAST:
                self._rows[_key(words)].append(row)
        self._longest = max(map(len, self._rows), default=0)

    def named(self, text: str) -> set[int]:
        """The rows whose titles stand in a text."""
        if not self._rows:
            return set()
        words = _WORD.findall(text)
        found: set[int] = set()
        for start in range(len(words)):
            for length in range(1, min(self._longest, len(words) - start) + 1):
                found.update(self._rows.get(_key(words[start : start + length]), ()))
        return found


def _key(words: list[str]) -> tuple[str, ...]:
    return tuple(words) if len(words) == 1 else tuple(word.lower() for word in words)


@register("stage")
@dataclass(frozen=True)
class FollowTitles:
    """Lifts passages whose title stands in the question (by `named`) or in one of the `first` best passages (`linked`).

    Both are in standard deviations of the scores found so far.
    """

    named: float = 3.0
    linked: float = 3.0
    first: int = 2

    name: ClassVar[str] = "titles"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        number("named", self.named, least=0)
        number("linked", self.linked, least=0)
        whole("first", self.first)

    def apply(self, scores: Tensor, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        titles = collection.derived(self.name, Titles)
        place = {row: i for i, row in enumerate(rows.tolist())}
        result = standardised(scores)
        called = titles.named(question.text)
        result = result + self.named * _marked(called, place)
        best = result.argsort(descending=True, stable=True)[: self.first].tolist()
        linked = torch.zeros(len(rows))
        for i in best:
            row = int(rows[i])
            passage = collection.passages[row]
            linked = linked.maximum(_marked(titles.named(f"{passage.title} {passage.text}") - {row}, place))
        return result + self.linked * linked


def _marked(found: set[int], place: dict[int, int]) -> Tensor:
    """[candidates]: 1 for those found."""
    marks = torch.zeros(len(place))
    marks[[place[row] for row in found if row in place]] = 1.0
    return marks
