"""Prompts of passages that are read again and again: chunks looked up, made where they are missing, and blended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry.blend.blended import Blended, blend_unchecked, ready_cache
from kvfoundry.blend.check import require_exact, require_fitting
from kvfoundry.blend.identity import identity_now
from kvfoundry.blend.segments import SEPARATOR, Segments, front_ids, segment
from kvfoundry.blend.spec import Blend
from kvfoundry.checks import choice
from kvfoundry.chunks import ChunkKV, ChunkStore, Report
from kvfoundry.chunks.passage import read_passage
from kvfoundry.chunks.search import NOT_STORED
from kvfoundry.errors import DataError
from kvfoundry.feeding import check_length
from kvfoundry.method import Method

Behind = Literal["head", "start"]
Ids = tuple[int, ...]


def blend_chunks(
    model: PreTrainedModel,
    chunks: Sequence[Sequence[ChunkKV]],
    questions: Sequence[Sequence[int] | Tensor] | None = None,
    *,
    blend: str | Blend = "blend()",
    method: str | Method | None = None,
) -> Blended:
    """The cache of prompts made of chunks: those of each batch row one behind the other, from position 0 on.

    questions: token ids of what will follow in every batch row; needed by a selector that reads them, and by models
    whose RoPE depends on the whole length. method: of the cache; it acts when the question has been read.
    Raises DataError for no chunks or those of another model, SpecError for a blend or a method that does not suit, and
    UnsupportedModelError for a model that fails the check of `kvfoundry.blend.check` or whose rows cannot be moved.
    """
    blend = Blend.parse(blend)
    shape = require_exact(model)
    for chunk in (chunk for own in chunks for chunk in own):
        require_fitting(model, shape, chunk)
    return blend_unchecked(model, chunks, questions, blend, method)


@dataclass(frozen=True)
class Found:
    """One passage of a prompt. hit: its chunk was in the store; otherwise it was computed, and put there."""

    tokens: int
    hit: bool


@dataclass(frozen=True, eq=False)
class BlendedPrompts:
    """Prompts whose documents are in `blended.cache` and whose questions come next.

    segments: the token ids of every prompt; passages: where each of its documents came from. report: what this request
    found in which tier of the store, why chunks were missed, bytes moved, and time waited; of the batch as a whole.
    """

    blended: Blended
    segments: list[Segments]
    passages: list[list[Found]]
    report: Report

    @property
    def reused_tokens(self) -> list[int]:
        """Tokens of documents of every prompt whose chunks were in the store."""
        return [sum(found.tokens for found in own if found.hit) for own in self.passages]

    @property
    def notes(self) -> list[list[str]]:
        """What is to say of every prompt: where its documents came from, and which tier failed."""
        failed = sorted(reason for reason in self.report.misses if reason != NOT_STORED)
        return [
            [
                f"{sum(found.hit for found in own)} of {len(own)} documents were in the store.",
                *(f"Missed in the store: {reason}." for reason in failed if not all(found.hit for found in own)),
            ]
            for own in self.passages
        ]


def blended_cache(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str] | Sequence[Sequence[str]],
    question: str | Sequence[str] = "",
    *,
    store: ChunkStore | None = None,
    blend: str | Blend = "blend()",
    method: str | Method | None = None,
    chunk_method: str | Method | None = None,
    head: str = "",
    separator: str = SEPARATOR,
    chat: bool = False,
    answer_prefix: str | Sequence[str] = "",
    behind: Behind = "head",
    namespace: str = "",
    max_new_tokens: int = 0,
) -> BlendedPrompts:
    """Read documents from stored chunks: the cache of `head`, all documents and the question, up to the question.

    documents, question: of one prompt, or a list of each for a batch. store: where chunks are looked up, and put when
    they had to be computed; without one all are computed. blend: which tokens are computed again. method: of the cache
    that answers; chunk_method: what is kept of a document's chunk (an eviction that needs no question, or a codec).
    head, separator, chat, answer_prefix: see `segment`; the last may be one for each prompt. behind: what a document
    is read behind when its chunk is computed: the whole "head", so that a chunk serves prompts with this head, or only
    the "start", the tokenizer's special tokens. namespace: of the store's entries; one never sees those of another.
    max_new_tokens: room to leave for an answer.
    Raises DataError for no documents, an empty one, or a prompt that is longer than the model's limit; otherwise as
    `blend_chunks`.
    """
    blend = Blend.parse(blend)
    choice("behind", behind, ("head", "start"))
    questions = [question] if isinstance(question, str) else list(question)
    prefixes = [answer_prefix] * len(questions) if isinstance(answer_prefix, str) else list(answer_prefix)
    batch = documents_of(documents, questions)
    segments = [
        segment(tokenizer, own, asked, head=head, separator=separator, chat=chat, answer_prefix=begun)
        for own, asked, begun in zip(batch, questions, prefixes, strict=True)
    ]
    longest = max(len(prompt.ids) for prompt in segments)
    ready_cache(model, blend, method)
    recipe = Method.parse("fullkv" if chunk_method is None else chunk_method)
    check_length(model, longest, max_new_tokens, "the longest prompt of documents and question")
    require_exact(model)
    front = segments[0].head if behind == "head" or chat else tuple(front_ids(tokenizer))
    wanted = {(passage, front): None for prompt in segments for passage in prompt.passages}
    wanted |= {(prompt.head, ()): None for prompt in segments if prompt.head}
    report = Report()
    chunks = _chunks(model, tokenizer, store, list(wanted), recipe, namespace, report)
    rows, found = [], []
    for prompt in segments:
        own = [chunks[passage, front] for passage in prompt.passages]
        first = [chunks[prompt.head, ()][0]] if prompt.head else []
        rows.append([*first, *(chunk for chunk, _ in own)])
        found.append([Found(len(passage), hit) for passage, (_, hit) in zip(prompt.passages, own, strict=True)])
    blended = blend_unchecked(model, rows, [list(prompt.question) for prompt in segments], blend, method)
    return BlendedPrompts(blended, segments, found, report)


def documents_of(documents: Sequence[str] | Sequence[Sequence[str]], questions: Sequence[str]) -> list[Sequence[str]]:
    """The documents of every question; those that are given once serve all. DataError where there are none."""
    if isinstance(documents, str) or not documents:
        raise DataError("documents is empty; give a list of at least one text.")
    batch: list[Any] = [documents] * len(questions) if isinstance(documents[0], str) else list(documents)
    if len(batch) != len(questions):
        raise DataError(f"{len(batch)} lists of documents for {len(questions)} questions; give one list for each.")
    return batch


def _chunks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    store: ChunkStore | None,
    wanted: list[tuple[Ids, Ids]],
    method: Method,
    namespace: str,
    report: Report,
) -> dict[tuple[Ids, Ids], tuple[ChunkKV, bool]]:
    """The chunk of every (passage, what it was read behind), and whether it was in the store; others are put there."""
    found: dict[tuple[Ids, Ids], tuple[ChunkKV, bool]] = {}
    keys = {}
    if store is not None:
        identity = identity_now(model, tokenizer, method, namespace)
        keys = {pair: identity.key(pair[0], context_ids=pair[1]) for pair in wanted}
        coming = {pair: store.promote(key, report=report) for pair, key in keys.items()}
        for pair, promotion in coming.items():
            chunk = promotion.result()
            if chunk is not None:
                found[pair] = chunk, True
    for passage, context in wanted:
        if (passage, context) not in found:
            chunk = read_passage(model, passage, method, context_ids=context, tokenizer=tokenizer)
            found[passage, context] = chunk, False
            if store is not None:
                store.put(keys[passage, context], chunk, report=report)
    return found
