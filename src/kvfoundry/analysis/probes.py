"""Needles in made-up haystacks, as token ids with the place of every row that an answer has to come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvfoundry.errors import DataError

Variant = Literal["retrieval", "reasoning"]

_PEOPLE = ("Anna", "Boris", "Clara", "Deniz", "Emil", "Fatima", "Goran", "Helen", "Ivan", "Jana", "Karim", "Lena")
_PLACES = ("library", "harbour", "museum", "bakery", "station", "theatre", "garden", "school", "castle", "hospital")
_THINGS = ("letter", "basket", "ladder", "lantern", "violin", "bicycle", "blanket", "kettle", "painting", "umbrella")
_VERBS = ("carried", "repaired", "forgot", "borrowed", "painted", "found", "sold", "cleaned", "hid", "described")
_TIMES = ("before noon", "after the rain", "on a cold Monday", "late in the evening", "during the festival", "in May")
_WORDS = (
    "amber", "falcon", "river", "copper", "meadow", "tiger", "silver", "island", "maple", "rocket", "velvet", "canyon",
    "lemon", "hammer", "winter", "purple", "dragon", "marble", "forest", "candle", "eagle", "pepper", "ocean", "salmon",
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One question about one needle.

    prompt: token ids up to and with the beginning of the answer; answer: ids of the right answer. rows: indices into
    the prompt of the tokens that count. depth: place of the needle, 0 at the start, 1 at the question.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    rows: tuple[int, ...]
    depth: float


def make_probes(tokenizer: Any, variant: Variant, *, tokens: int, count: int, seed: int) -> list[Probe]:
    """`count` probes of at most `tokens` tokens, answer included, their needles at evenly spaced depths.

    "retrieval": the needle states one fact, and all of it counts. "reasoning": the needle states a wrong fact, why it
    no longer holds, and the right one; the last two count. Names, filler and answers depend on the seed alone.
    Raises DataError when `tokens` is too few for a needle, its question and some filler.
    """
    draw = random.Random(seed)
    return [_probe(tokenizer, variant, tokens, (i + 0.5) / count, draw) for i in range(count)]


def _probe(tokenizer: Any, variant: Variant, tokens: int, depth: float, draw: random.Random) -> Probe:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    person, place = draw.choice(_PEOPLE), draw.choice(_PLACES)
    words = draw.sample(_WORDS, 6)
    right, wrong = " " + " ".join(words[:3]), " " + " ".join(words[3:])
    # Parts are encoded one by one, so that the answer has the same ids in the needle and behind the question.
    if variant == "retrieval":
        needle = [(f" {person} said that the secret words of the {place} are", True), (right, True), (".", True)]
    else:
        needle = [
            (f" {person} said that the secret words of the {place} are", False),
            (wrong, False),
            (".", False),
            (" A guest overheard them, so they were changed the same day.", True),
            (f" Now the secret words of the {place} are", True),
            (right, True),
            (".", True),
        ]
    parts = [(ids(text), counts) for text, counts in needle]
    start: list[int] = tokenizer("").input_ids  # what the tokenizer puts in front of every text
    question = ids(
        f"\n\nQuestion: What are the secret words of the {place} now?\nAnswer: The secret words of the {place} are"
    )
    answer = ids(right)
    room = tokens - len(start) - sum(len(part) for part, _ in parts) - len(question) - len(answer)
    filler = _filler(ids, room, draw)
    if len(filler) < 2:
        raise DataError(f"tokens={tokens} is too few for a needle, its question and some filler; give more.")
    split = min(max(round(depth * len(filler)), 1), len(filler) - 1)
    prompt = start + [token for sentence in filler[:split] for token in sentence]
    rows: list[int] = []
    for part, counts in parts:
        rows += range(len(prompt), len(prompt) + len(part)) if counts else []
        prompt = prompt + part
    prompt += [token for sentence in filler[split:] for token in sentence] + question
    return Probe(tuple(prompt), tuple(answer), tuple(rows), depth)


def _filler(ids: Callable[[str], list[int]], room: int, draw: random.Random) -> list[list[int]]:
    """Sentences that together take at most `room` tokens."""
    sentences: list[list[int]] = []
    while True:
        subject, verb, thing = draw.choice(_PEOPLE), draw.choice(_VERBS), draw.choice(_THINGS)
        sentence = ids(f" {subject} {verb} the {thing} near the {draw.choice(_PLACES)} {draw.choice(_TIMES)}.")
        room -= len(sentence)
        if room < 0:
            return sentences
        sentences.append(sentence)
