"""The prompt of a sample with a place for every candidate passage, taken or not.

    head        the worked example that opens the prompt
    candidates  the sample's passages that were not found, then those that were, the best last: next to the question
    question    behind all of them

A place is kept for a candidate whose rows are not there, so that they can come later without moving anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfoundry.blend.segments import front_ids, segment
from kvfoundry.chunks import ChunkKey, Identity
from kvfoundry.errors import DataError
from kvfoundry.evaluate.scores.answers import answer_f1, as_question
from kvfoundry.evaluate.tasks.ragqa import EXAMPLE
from kvfoundry.evaluate.tasks.ragqa_data import Passage, RagSample
from kvfoundry.feeding import position_limit
from kvfoundry.rag.dataset import Dataset
from kvfoundry.rag.retrieval_file import Answered, Retrieval

Behind = Literal["head", "start", "sample"]
Which = Literal["own", "corpus"]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A passage with its place. id: of the passage; at: its first position.

    rank: in the order of retrieval, 0 for the best; found: among those that may begin on the device.
    behind: what it is read behind when its chunk is computed.
    """

    id: str
    passage: Passage
    rank: int
    found: bool
    token_ids: Ids
    at: int
    behind: Ids

    @property
    def stop(self) -> int:
        return self.at + len(self.token_ids)

    def key(self, identity: Identity) -> ChunkKey:
        """Under which its chunk is stored."""
        return identity.key(self.token_ids, context_ids=self.behind)


@dataclass(frozen=True)
class Laid:
    """One sample's prompt. sample: with its candidates as passages, for scoring; question: its token ids."""

    sample: RagSample
    head: Ids
    candidates: tuple[Candidate, ...]
    question: Ids

    @property
    def item(self) -> str:
        return self.sample.item

    @property
    def question_at(self) -> int:
        """Position of the question's first token."""
        return self.candidates[-1].stop

    @property
    def tokens(self) -> int:
        """Positions up to the question's end."""
        return self.question_at + len(self.question)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First position and the one behind the last, of every candidate."""
        return [(each.at, each.stop) for each in self.candidates]

    @property
    def ranks(self) -> list[int]:
        """Of every candidate, 0 for the best."""
        return [each.rank for each in self.candidates]

    @property
    def found(self) -> list[bool]:
        """Which candidates may begin on the device."""
        return [each.found for each in self.candidates]

    def head_key(self, identity: Identity) -> ChunkKey:
        """Under which the rows of the head are stored."""
        return identity.key(self.head)


def lay_out(
    tokenizer: PreTrainedTokenizerBase,
    answered: Answered,
    own: RagSample,
    passages: dict[str, Passage],
    others: Sequence[tuple[str, Passage]],
    *,
    top: int,
    which: Which = "own",
    behind: Behind = "head",
    head: str = EXAMPLE,
) -> Laid:
    """The prompt of one sample. others: the sample's own passages by id; those that were not found rank last.

    Raises:
        DataError: the file has no such list, or finds nothing for the sample.
    """
    found = getattr(answered, which)
    if found is None:
        raise DataError(f"the retrieval file has no list {which!r}; retrieve with --mode {which} or both.")
    if not found:
        raise DataError("nothing was found for it")
    best = [(each.id, passages[each.id]) for each in found]
    held = {name for name, _ in best}
    rest = [pair for pair in others if pair[0] not in held] if which == "own" else []
    chosen = [*best, *rest][::-1]
    sample = RagSample(own.item, own.question, own.answers, tuple(passage for _, passage in chosen))
    question = f"Question: {as_question(sample.question)}\nAnswer:"
    documents = [f"{each.title}: {each.text}" if each.title else each.text for _, each in chosen]
    ids = segment(tokenizer, documents, question, head=head)
    front = tuple(front_ids(tokenizer))
    candidates, at, before = [], len(ids.head), ids.head
    for number, ((name, passage), own_ids) in enumerate(zip(chosen, ids.passages, strict=True)):
        context = {"head": ids.head, "start": front, "sample": before}[behind]
        rank = len(chosen) - 1 - number
        candidates.append(Candidate(name, passage, rank, rank < min(top, len(best)), own_ids, at, context))
        at, before = at + len(own_ids), before + own_ids
    return Laid(sample, ids.head, tuple(candidates), ids.question)


def lay_out_all(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    dataset: Dataset,
    retrieval: Retrieval,
    *,
    top: int,
    new_tokens: int,
    limit: int | None = None,
    which: Which = "own",
    behind: Behind = "head",
    head: str = EXAMPLE,
) -> tuple[list[Laid], list[str]]:
    """The prompts of the first `limit` samples, and a sentence for each that is left out.

    Raises:
        DataError: the file belongs to another dataset, `top` is more than it lists, or no sample is left.
    """
    passages = retrieval.passages(dataset)
    if not 1 <= top <= retrieval.k:
        raise DataError(
            f"--top-k {top} is not one of 1 to {retrieval.k}, which the retrieval file lists for a sample; retrieve "
            "with a larger --k."
        )
    if limit is not None and limit < 1:
        raise DataError(f"--limit must be at least 1, got {limit}.")
    known = {asked.item: asked for asked in dataset.samples}
    positions = position_limit(model)
    laid, skipped = [], list(retrieval.skipped)
    for answered in retrieval.samples[:limit]:
        asked = known[answered.item]
        others = [(each.id, each.passage) for each in asked.candidates]
        try:
            prompt = lay_out(
                tokenizer, answered, asked.sample, passages, others, top=top, which=which, behind=behind, head=head
            )
        except DataError as error:
            if getattr(answered, which) is None:
                raise
            skipped.append(f"({answered.item}) {error}")
            continue
        if positions is not None and prompt.tokens + new_tokens > positions:
            skipped.append(
                f"({answered.item}) has {prompt.tokens} tokens with all its passages and asks for {new_tokens} more; "
                f"the model has {positions} positions"
            )
            continue
        laid.append(prompt)
    if not laid:
        raise DataError(f"no sample of {dataset.path} can be answered: {'; '.join(skipped[:3])}.")
    return laid, skipped


def score(prompt: Laid, text: str) -> float:
    """F1 of an answer's first line, of the best accepted answer."""
    return max(answer_f1(text, answer) for answer in prompt.sample.answers)
