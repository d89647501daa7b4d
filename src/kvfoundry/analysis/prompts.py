"""Questions over passages as token ids, with the place of every passage: what the attention analyses feed a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from kvfoundry.errors import DataError
from kvfoundry.evaluate.scores.answers import as_question
from kvfoundry.evaluate.tasks.ragqa import EXAMPLE
from kvfoundry.evaluate.tasks.ragqa_data import OWN_DATA, Passage, RagSample, load_ragqa

Kind = Literal["start", "passage", "question"]
# Passages of a sample of our own set, which brings four to six: others of the set come along.
OWN_PASSAGES = 10


@dataclass(frozen=True)
class Part:
    """A stretch of a prompt, tokens start to stop (exclusive). gold: whether the answer needs it, None if unknown."""

    name: str
    kind: Kind
    start: int
    stop: int
    gold: bool | None = None


@dataclass(frozen=True)
class PassagePrompt:
    """A question behind its passages: ids, and the parts that cover them from the first token to the last."""

    item: str
    question: str
    ids: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def chunks(self) -> list[int]:
        """Numbers of the parts that are passages, or pieces of them."""
        return [number for number, part in enumerate(self.parts) if part.kind == "passage"]


def samples_of(
    data: Path | None, *, limit: int, passages: int | None = None, skip_damaged: bool = False
) -> list[RagSample]:
    """The first `limit` samples of a file, or of our own set.

    passages: so many for each sample: those of the samples that follow come along, or the last ones are left out. None
    leaves a file's samples as they are, and gives ours `OWN_PASSAGES`. Raises DataError.
    """
    found = load_ragqa(data or OWN_DATA, skip_damaged).samples
    wanted = passages if passages is not None else (OWN_PASSAGES if data is None else None)
    if wanted is None:
        return list(found[:limit])
    return [_with(sample, found[number + 1 :] + found[:number], wanted) for number, sample in enumerate(found[:limit])]


def _with(sample: RagSample, others: Sequence[RagSample], wanted: int) -> RagSample:
    own = {passage.text for passage in sample.passages}
    more: dict[str, Passage] = {}
    for passage in chain.from_iterable(other.passages for other in others):
        if len(own) + len(more) >= wanted:
            break
        if passage.text not in own:
            more.setdefault(passage.text, Passage(passage.title, passage.text, None if passage.gold is None else False))
    kept = (*sample.passages, *more.values())[:wanted]
    return RagSample(sample.item, sample.question, sample.answers, kept)


def passage_prompt(tokenizer: Any, sample: RagSample, chunk_tokens: int | None = None) -> PassagePrompt:
    """The prompt of a sample, behind the worked example of the task ragqa.

    chunk_tokens: passages are cut into chunks of so many tokens, the last one of each shorter.
    """

    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    ids: list[int] = [*tokenizer("").input_ids, *ids_of(EXAMPLE)]
    parts = [Part("start", "start", 0, len(ids))]
    for number, passage in enumerate(sample.passages, start=1):
        own = ids_of(f"{passage.title}: {passage.text}\n\n" if passage.title else f"{passage.text}\n\n")
        size = chunk_tokens or max(len(own), 1)
        for piece in range(0, len(own), size):
            stop = min(piece + size, len(own))
            name = f"{number}. {passage.title}" if passage.title else f"passage {number}"
            if size < len(own):
                name += f" [{piece // size + 1}]"
            parts.append(Part(name, "passage", len(ids) + piece, len(ids) + stop, passage.gold))
        ids += own
    asked = ids_of(f"Question: {as_question(sample.question)}\nAnswer:")
    parts.append(Part("question", "question", len(ids), len(ids) + len(asked)))
    return PassagePrompt(sample.item, sample.question, tuple(ids + asked), tuple(parts))


def check_any(prompts: Sequence[Any], what: str) -> None:
    """DataError when nothing is left to analyse."""
    if not prompts:
        raise DataError(f"no sample is left to analyse: {what}.")
