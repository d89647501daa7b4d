"""How many of the passages that an answer needs were found, where the file says which those are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Recall:
    """Over labelled samples. recall: mean share of the needed passages found; complete: share of samples with all."""

    samples: int
    recall: float
    complete: float


def share_found(found: Collection[str], gold: frozenset[str]) -> float:
    """The share of the needed passages among those found."""
    return len(gold.intersection(found)) / len(gold)


def recall_of(results: Iterable[tuple[Sequence[str], frozenset[str]]]) -> Recall | None:
    """Over (found ids, needed ids) of samples; those that need none are not counted. None where none is labelled."""
    shares = [share_found(found, gold) for found, gold in results if gold]
    return Recall(len(shares), fmean(shares), fmean(share == 1 for share in shares)) if shares else None
