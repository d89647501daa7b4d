"""The first step of the pipeline: index the passages of a file, and find the best for each of its questions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.dataset import Asked, Dataset, text_hash
from kvfoundry.rag.index import PassageIndex
from kvfoundry.rag.retrieval_file import MODES, Answered, Found, Retrieval
from kvfoundry.rag.retrievers import Hit, Question, Retriever

OnProgress = Callable[[str, int, int], None]


def check_k(dataset: Dataset, k: int, mode: str, in_index: int) -> tuple[str, ...]:
    """A sentence for each sample that has fewer passages of its own than are asked for; all of them are its answer.

    in_index: passages that the whole-corpus search will have.

    Raises:
        DataError: an unknown mode, a `k` below 1, or one that no sample, or not the corpus, can give.
    """
    if mode not in MODES:
        raise DataError(f"unknown mode {mode!r}. Known: {', '.join(MODES)}.")
    if k < 1:
        raise DataError(f"k must be at least 1, got {k}.")
    if mode != "own" and k > in_index:
        raise DataError(f"k={k} is more than the {in_index} passages of the index.")
    if mode == "corpus":
        return ()
    most = max(len(asked.candidates) for asked in dataset.samples)
    if k > most:
        raise DataError(f"k={k} is more than the {most} passages that a sample of {dataset.path} has at most.")
    return tuple(
        f"sample {asked.item} has {len(asked.candidates)}" for asked in dataset.samples if len(asked.candidates) < k
    )


def fill_index(index: PassageIndex, dataset: Dataset, *, only: bool, on_progress: OnProgress | None = None) -> int:
    """Bring the passages of a dataset into an index; those that are there already are skipped.

    only: remove what the dataset does not hold.

    Returns:
        How many are new.
    """
    if only and (gone := [name for name in index.ids if name not in dataset.passages]):
        index.delete(gone)
    return index.add(
        dataset.passages, None if on_progress is None else lambda done, total: on_progress("passages", done, total)
    )


def retrieve(
    dataset: Dataset,
    index: PassageIndex,
    retriever: Retriever,
    *,
    k: int,
    mode: str = "both",
    on_progress: OnProgress | None = None,
) -> Retrieval:
    """The `k` best passages for every sample.

    mode: "own" searches among the sample's own passages, "corpus" among all of the index, "both" does both.

    Raises:
        DataError: as `check_k`, or the index lacks passages of the dataset.
    """
    few = check_k(dataset, k, mode, len(index))
    start = time.perf_counter()
    samples = []
    for done, asked in enumerate(dataset.samples, start=1):
        samples.append(_answer(asked, index, retriever, k, mode))
        if on_progress is not None:
            on_progress("questions", done, len(dataset.samples))
    seconds = time.perf_counter() - start
    found = {one.id for each in samples for one in (each.corpus or ())}
    extra = {name: {"title": index[name].title, "text": index[name].text} for name in found - dataset.passages.keys()}
    return Retrieval(
        dataset=_about(dataset),
        mode=mode,
        k=k,
        about=about(index, retriever, dataset) | {"fewer_than_k": few, "seconds": round(seconds, 3)},
        samples=tuple(samples),
        skipped=dataset.skipped,
        extra=dict(sorted(extra.items())),
    )


def about(index: PassageIndex, retriever: Retriever, dataset: Dataset) -> dict[str, Any]:
    """What was searched and how; two runs with the same answer find the same, apart from their times."""
    settings = index.settings
    return {
        "retriever": str(retriever),
        "encoder": settings.encoder,
        "encoder_digest": settings.digest,
        "vectors": "int8" if settings.rounded else "float32",
        "pool": settings.pool,
        "index": str(index.folder),
        "passages": len(index),
        "vector_bytes": index.nbytes,
        "longer_than_encoder": sum(name in dataset.passages for name in index.cut),
        "duplicates": dataset.duplicates,
    }


def _about(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "path": str(dataset.path),
        "sha256": dataset.digest,
        "samples": len(dataset.samples),
        "passages": len(dataset.passages),
    }


def _answer(asked: Asked, index: PassageIndex, retriever: Retriever, k: int, mode: str) -> Answered:
    question = Question(asked.sample.question, index.encoder, retriever.needs)
    collection = index.collection

    def found(rows: Tensor) -> tuple[Found, ...]:
        hits = retriever.search(question, collection, k, rows)
        return tuple(_found(hit, collection.passages[collection.row_of[hit.id]]) for hit in hits)

    own = found(collection.rows(each.id for each in asked.candidates)) if mode != "corpus" else None
    corpus = found(collection.rows()) if mode != "own" else None
    gold = tuple(each.id for each in asked.candidates if each.id in asked.gold)
    return Answered(asked.item, asked.sample.question, asked.sample.answers, own, corpus, gold)


def _found(hit: Hit, passage: Passage) -> Found:
    return Found(hit.id, round(hit.score, 6), text_hash(passage))
