"""A retriever is a recipe, written like a method: scorers, how they are fused, and stages, joined by `+`.

bm25
dense(weight=0.8)+bm25(weight=0.2)+titles
dense+maxsim+ranks(constant=60)
dense(weight=0.8)+bm25(weight=0.2)+rerank(top=50)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfoundry.errors import SpecError, unknown_name
from kvfoundry.method import Call, parse_calls
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.retrievers.base import Fusion, Question, Scorer, Stage
from kvfoundry.rag.retrievers.fusion import ZScore
from kvfoundry.rag.retrievers.registry import piece

# The best of those measured on two labelled sets: docs/retrieval.md.
DEFAULT = "dense(weight=0.8)+bm25(weight=0.2)+titles"


@dataclass(frozen=True)
class Hit:
    """A passage that was found; score: in the units of the recipe, comparable within one question only."""

    id: str
    score: float


@dataclass(frozen=True)
class Retriever:
    """A complete recipe, frozen and without state. `str(retriever)` parses back to an equal one."""

    calls: tuple[Call, ...]
    scorers: tuple[Scorer, ...]
    fusion: Fusion
    stages: tuple[Stage, ...]

    @classmethod
    def parse(cls, spec: str | Retriever = DEFAULT) -> Retriever:
        """The retriever of a spec string. Several scorers without a fusion are fused by `zscore`.

        Raises:
            SpecError: bad syntax, an unknown name or parameter, an impossible value, or nothing that scores.
        """
        if isinstance(spec, Retriever):
            return spec
        calls: list[Call] = []
        made: dict[str, list[Any]] = {"scorer": [], "fusion": [], "stage": []}
        for name, arguments in parse_calls(spec, "retriever", "dense+bm25(weight=0.2)"):
            entry = piece(name)
            if any(call.name == name for call in calls):
                raise SpecError(f"{name} is given twice in the retriever {spec!r}.")
            for parameter in arguments:
                if parameter not in entry.parameters:
                    raise SpecError(unknown_name(f"parameter of {name}", parameter, entry.parameters))
            made[entry.kind].append(entry.build(**arguments))
            values = tuple((entry.parameters | arguments).items())
            calls.append(Call(name, values, tuple(entry.parameters.items())))
        scorers, fusions, stages = made["scorer"], made["fusion"], made["stage"]
        if not scorers:
            raise SpecError(f"the retriever {spec!r} has nothing that scores; add bm25, dense or maxsim.")
        if len(fusions) > 1 or (fusions and len(scorers) == 1):
            wanted = "one fusion is enough" if len(fusions) > 1 else f"{fusions[0].name} fuses several scorers"
            raise SpecError(f"{wanted} in the retriever {spec!r}.")
        if sum(scorer.weight for scorer in scorers) <= 0:
            raise SpecError(f"every weight is 0 in the retriever {spec!r}.")
        return cls(tuple(calls), tuple(scorers), fusions[0] if fusions else ZScore(), tuple(stages))

    def __str__(self) -> str:
        return "+".join(str(call) for call in self.calls)

    @property
    def needs(self) -> frozenset[str]:
        """The vectors that an index must keep for it: "pooled", "tokens"."""
        pieces: tuple[Scorer | Stage, ...] = (*self.scorers, *self.stages)
        return frozenset().union(*(each.needs for each in pieces))

    def scores(self, question: Question, collection: Collection, rows: Tensor) -> Tensor:
        """[candidates]: the scores of the candidates at `rows` of the collection."""
        found = [scorer.scores(question, collection, rows) for scorer in self.scorers]
        total = sum(scorer.weight for scorer in self.scorers)
        weights = [scorer.weight / total for scorer in self.scorers]
        scores = found[0] if len(found) == 1 else self.fusion.fuse(found, weights)
        for stage in self.stages:
            scores = stage.apply(scores, question, collection, rows)
        return scores

    def search(self, question: Question, collection: Collection, k: int, rows: Tensor | None = None) -> list[Hit]:
        """The `k` best of the candidates, the best first; equal scores keep the order of the candidates."""
        rows = collection.rows() if rows is None else rows
        scores = self.scores(question, collection, rows)
        order = scores.argsort(descending=True, stable=True)[:k].tolist()
        return [Hit(collection.ids[int(rows[i])], float(scores[i])) for i in order]
