"""Needle in a haystack: one or several facts hidden in a long text, asked for at the end.

The grid is length x depth. A length is the whole prompt in the model's own tokens, chat template and question included;
a depth of 0 puts the needle before the text and 100 right before the question. Source of the form: G. Kamradt, "Needle
In A Haystack - pressure testing LLMs" (2023); several needles as in RULER's multi-value task (Hsieh et al., 2024,
arXiv:2404.06654).
"""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from kvfoundry.errors import unknown_name
from kvfoundry.evaluate.metrics import contains_answer, score_answers
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.base import Item, TaskError
from kvfoundry.evaluate.tasks.haystack import folder_sentences, generated_sentences
from kvfoundry.evaluate.tasks.needle_scores import SCORES, require_rouge, rouge_one
from kvfoundry.evaluate.tasks.needles import CITIES, KINDS, Needle
from kvfoundry.evaluate.tasks.placement import PLACEMENTS, insert_at_depths, insert_at_tokens, truncate_middle

FRAME = "Read the following text and answer the question at the end.\n\n{context}\n\nQuestion: {question}"
_QUESTION = FRAME.partition("{context}")[2]


@dataclass(frozen=True)
class NeedleTask:
    """The needle grid; `kind` is a name of `needles.KINDS`, `needles` how many facts the question asks for at once.

    distractors: facts of the same wording about other keys, spread over the text (RULER's multi-key form).
    placement: a name of `PLACEMENTS`. scoring: a name of `SCORES`.

    Raises:
        TaskError: a length, depth or count out of range, an unknown kind, placement or scoring.
        MissingExtraError: the scoring needs a package that is not installed.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    kind: str = "word"
    needles: int = 1
    distractors: int = 0
    repeats: int = 1
    haystack: Path | None = None
    max_new_tokens: int = 24
    placement: str = "nearest"
    scoring: str = "recovered"

    name = "niah"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TaskError(unknown_name("needle kind", self.kind, KINDS))
        if self.placement not in PLACEMENTS:
            raise TaskError(unknown_name("placement", self.placement, PLACEMENTS))
        if self.scoring not in SCORES:
            raise TaskError(unknown_name("score", self.scoring, SCORES))
        if self.scoring == "rouge":
            require_rouge()
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
            "placement": self.placement,
            "scoring": self.scoring,
        }

    def items(self, tokenizer: Any, chat: bool, seed: int) -> list[Item]:
        builder = _Builder(self, tokenizer, chat, seed)
        grid = itertools.product(range(self.repeats), self.lengths, self.depths)
        return [builder.build(repeat, length, depth) for repeat, length, depth in grid]

    def score(self, item: Item, prediction: str) -> tuple[float, bool]:
        if self.scoring == "rouge":
            scores = [rouge_one(needle, prediction) for needle in item.references]
            return fmean(scores), all(score == 1.0 for score in scores)
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

        place = self._between_sentences if self.task.placement == "nearest" else self._at_tokens
        prompt = place(length, sentences, sizes, placed, needle.question)
        return Item(
            item=f"{self.task.kind}-n{self.task.needles}-L{length}-D{depth:g}-{repeat}",
            prompt=prompt,
            references=needle.sentences if self.task.scoring == "rouge" else needle.answers,
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

    def _prompt(self, context: str, question: str) -> tuple[str, int]:
        """The prompt around a context, and its tokens."""
        prompt = FRAME.format(context=context, question=question)
        return prompt, len(encode_prompt(self.tokenizer, prompt, self.chat))

    def _too_short(self, length: int, tokens: int) -> TaskError:
        return TaskError(
            f"length {length} is too short: question, needle and chat template alone take {tokens} tokens; "
            "raise --lengths."
        )

    def _between_sentences(
        self, length: int, sentences: list[str], sizes: list[int], placed: list[tuple[float, str]], question: str
    ) -> str:
        """The longest prompt of whole sentences, cut in the middle, with each needle at a sentence boundary."""

        def prompt_of(head: int, tail: int) -> tuple[str, int]:
            end = len(sentences) - tail
            kept, of_kept = sentences[:head] + sentences[end:], sizes[:head] + sizes[end:]
            return self._prompt(insert_at_depths(kept, of_kept, placed), question)

        _, fixed = prompt_of(0, 0)
        budget = length - fixed
        head, tail = truncate_middle(sizes, budget)
        prompt, tokens = prompt_of(head, tail)
        # Tokens of the parts need not sum to those of the whole, so the count of the whole decides.
        while head + tail and tokens > length:
            head, tail = truncate_middle(sizes, budget := budget - 1)
            prompt, tokens = prompt_of(head, tail)
        if head + tail == 0:
            raise self._too_short(length, fixed)
        return prompt

    def _at_tokens(
        self, length: int, sentences: list[str], sizes: list[int], placed: list[tuple[float, str]], question: str
    ) -> str:
        """The longest prompt of the text's first tokens, with each needle in front of a token."""
        text = "".join(sentences).strip()
        spans = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
            "offset_mapping"
        ]

        def prompt_of(room: int) -> tuple[str, int]:
            context = insert_at_tokens(text, spans, room, placed, to_stop=self.task.placement == "stop")
            return self._prompt(context, question)

        _, fixed = prompt_of(0)
        room = length - fixed
        prompt, tokens = prompt_of(max(room, 0))
        while room > 0 and tokens > length:
            room -= tokens - length
            prompt, tokens = prompt_of(max(room, 0))
        if room <= 0:
            raise self._too_short(length, fixed)
        return prompt
