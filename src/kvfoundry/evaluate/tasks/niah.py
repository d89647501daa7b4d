"""Needle in a haystack: one or several facts hidden in a long text, asked for at the end.

The grid is length x depth. A length is the whole prompt in the model's own tokens, chat template and question included;
a depth of 0 puts the needle before the text and 100 right before the question. Source of the form: G. Kamradt, "Needle
In A Haystack - pressure testing LLMs" (2023); several needles as in RULER's multi-value task (Hsieh et al., 2024,
arXiv:2404.06654).
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfoundry.errors import unknown_name
from kvfoundry.evaluate.metrics import contains_answer, score_answers
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.haystack import folder_sentences, generated_sentences
from kvfoundry.evaluate.tasks.needles import CITIES, KINDS, Needle

FRAME = "Read the following text and answer the question at the end.\n\n{context}\n\nQuestion: {question}"
_QUESTION = FRAME.partition("{context}")[2]


def truncate_middle(sizes: Sequence[int], budget: int) -> tuple[int, int]:
    """How many leading and trailing pieces to keep so that their sizes sum to at most `budget`.

    Pieces are dropped from the middle; head and tail are taken in turn, so that each gets about half.
    """
    if sum(sizes) <= budget:
        return len(sizes), 0
    head = tail = used = 0
    while head + tail < len(sizes):
        from_head = head <= tail
        size = sizes[head] if from_head else sizes[-1 - tail]
        if used + size > budget:
            break
        used += size
        head, tail = (head + 1, tail) if from_head else (head, tail + 1)
    return head, tail


def insert_at_depths(sentences: Sequence[str], sizes: Sequence[int], needles: Sequence[tuple[float, str]]) -> str:
    """The text with each (depth in percent, needle) at the sentence boundary nearest to that share of the tokens."""
    boundaries = list(itertools.accumulate(sizes, initial=0))
    slots: dict[int, list[str]] = {}
    for depth, needle in needles:
        target = boundaries[-1] * depth / 100
        slots.setdefault(min(range(len(boundaries)), key=lambda index: abs(boundaries[index] - target)), []).append(
            " " + needle
        )
    pieces: list[str] = []
    for index in range(len(boundaries)):
        pieces += slots.get(index, [])
        pieces += sentences[index : index + 1]
    return "".join(pieces).strip()


@dataclass(frozen=True)
class NeedleTask:
    """The needle grid; `kind` is a name of `needles.KINDS`, `needles` how many facts the question asks for at once.

    distractors: facts of the same wording about other keys, spread over the text (RULER's multi-key form).

    Raises:
        TaskError: a length, depth or count out of range, an unknown kind.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    kind: str = "word"
    needles: int = 1
    distractors: int = 0
    repeats: int = 1
    haystack: Path | None = None
    max_new_tokens: int = 24

    name = "niah"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TaskError(unknown_name("needle kind", self.kind, KINDS))
        for label, values in (("length", self.lengths), ("depth", self.depths)):
            if not values:
                raise TaskError(f"no {label} given; name at least one with --{label}s.")
            if len(set(values)) != len(values):
                raise TaskError(f"a {label} is given twice: {', '.join(f'{value:g}' for value in values)}.")
        for length in self.lengths:
            if length < 1:
                raise TaskError(f"length {length} is out of range; a length is the prompt in tokens, at least 1.")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise TaskError(f"depth {depth:g} is out of range; a depth is a percentage from 0 to 100.")
        most = KINDS[self.kind].most_answers
        if not 1 <= self.needles <= most:
            raise TaskError(f"{self.needles} needles are out of range; kind {self.kind!r} offers 1 to {most}.")
        if not 0 <= self.distractors < len(CITIES):
            raise TaskError(f"{self.distractors} distractors are out of range; give 0 to {len(CITIES) - 1}.")
        if self.repeats < 1 or self.max_new_tokens < 1:
            raise TaskError(f"repeats ({self.repeats}) and new tokens ({self.max_new_tokens}) must be at least 1.")

    def settings(self) -> dict[str, Any]:
        return {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "kind": self.kind,
            "needles": self.needles,
            "distractors": self.distractors,
            "repeats": self.repeats,
            "haystack": None if self.haystack is None else str(self.haystack),
            "max_new_tokens": self.max_new_tokens,
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        builder = _Builder(self, tokenizer, chat, seed)
        grid = itertools.product(range(self.repeats), self.lengths, self.depths)
        return [builder.build(repeat, length, depth) for repeat, length, depth in grid]

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        return score_answers(item.references, prediction)


@dataclass(frozen=True)
class _Builder:
    """Builds the items of one task for one tokenizer; sentence sizes are counted once."""

    task: NeedleTask
    tokenizer: Any
    chat: bool
    seed: int

    @cached_property
    def _folder(self) -> tuple[list[str], list[int]] | None:
        if self.task.haystack is None:
            return None
        sentences = folder_sentences(self.task.haystack)
        return sentences, self._sizes(sentences)

    def _sizes(self, sentences: Iterable[str]) -> list[int]:
        return [len(ids) for ids in self.tokenizer(list(sentences), add_special_tokens=False)["input_ids"]]

    def _haystack(self, repeat: int, length: int) -> tuple[list[str], list[int]]:
        """Sentences for one prompt, at least `length` tokens of them. Every depth of a repeat sees the same ones."""
        if self._folder is None:
            stream = generated_sentences(f"{self.seed} {repeat}")
            sentences: list[str] = []
            sizes: list[int] = []
            while sum(sizes) < length:
                more = list(itertools.islice(stream, 64))
                sentences += more
                sizes += self._sizes(more)
            # The generator has no end to keep: a text of the right length needs no cut beyond its last sentences.
            enough = next(index for index, total in enumerate(itertools.accumulate(sizes), start=1) if total >= length)
            return sentences[:enough], sizes[:enough]
        sentences, sizes = self._folder
        if sum(sizes) < length:
            raise TaskError(
                f"haystack folder {self.task.haystack} holds {sum(sizes)} tokens, too few for a prompt of {length}; "
                f"add texts or lower --lengths."
            )
        start = random.Random(f"start {self.seed} {repeat}").randrange(len(sentences))
        return sentences[start:] + sentences[:start], sizes[start:] + sizes[:start]

    def _draw(self, repeat: int, length: int, depth: float, haystack: str) -> Needle:
        """Key and answers, none of which stands in the text already."""
        rng = random.Random(f"needle {self.task.kind} {self.seed} {repeat} {length} {depth}")
        return KINDS[self.task.kind].draw(
            rng, self.task.needles, lambda word: contains_answer(word, haystack), self.task.distractors
        )

    def build(self, repeat: int, length: int, depth: float) -> Item:
        sentences, sizes = self._haystack(repeat, length)
        needle = self._draw(repeat, length, depth, "".join(sentences))
        # Several needles: the first at the depth itself, the others evenly over what follows it.
        depths = [depth + (100 - depth) * number / len(needle.sentences) for number in range(len(needle.sentences))]
        placed = list(zip(depths, needle.sentences, strict=True))
        count = len(needle.distractors)
        placed += [(100 * (number + 0.5) / count, sentence) for number, sentence in enumerate(needle.distractors)]

        def prompt_of(head: int, tail: int) -> str:
            end = len(sentences) - tail
            context = insert_at_depths(sentences[:head] + sentences[end:], sizes[:head] + sizes[end:], placed)
            return FRAME.format(context=context, question=needle.question)

        fixed = len(encode_prompt(self.tokenizer, prompt_of(0, 0), self.chat))
        budget = length - fixed
        head, tail = truncate_middle(sizes, budget)
        prompt = prompt_of(head, tail)
        # Tokens of the parts need not sum to those of the whole, so the count of the whole decides.
        while head + tail and len(encode_prompt(self.tokenizer, prompt, self.chat)) > length:
            head, tail = truncate_middle(sizes, budget := budget - 1)
            prompt = prompt_of(head, tail)
        if head + tail == 0:
            raise TaskError(
                f"length {length} is too short: question, needle and chat template alone take {fixed} tokens; "
                "raise --lengths."
            )
        return Item(
            item=f"{self.task.kind}-n{self.task.needles}-L{length}-D{depth:g}-{repeat}",
            prompt=prompt,
            references=needle.answers,
            max_new_tokens=self.task.max_new_tokens * self.task.needles,
            question=_QUESTION.format(question=needle.question),
            cell={
                "kind": self.task.kind,
                "needles": self.task.needles,
                "distractors": self.task.distractors,
                "length": length,
                "depth": depth,
                "repeat": repeat,
            },
        )
