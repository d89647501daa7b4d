"""Words that occur more often than others: the ten commonest of a list, and the three commonest coded words."""

import random
from dataclasses import dataclass
from math import pi

from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.ruler.base import Draft, Filler, Setting
from kvfoundry.evaluate.tasks.ruler.words import letters, plain_words

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

LIST_INTRO = "Below is a numbered list of words. A few of them occur in it far more often than the others.\n\n"
LIST_QUESTION = "\n\nWhich {count} words occur most often in the list above?"
LIST_ANSWER = "\nThe {count} words that occur most often in the list are:"

CODE_INTRO = "Below is a text of coded words. Keep count of how often each of them occurs.\n\n"
CODE_QUESTION = "\n\nDo not count the dots. Which {count} coded words occur most often in the text above?"
CODE_ANSWER = "\nThe {count} coded words that occur most often in the text are:"
DOTS = "..."


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


@dataclass(frozen=True)
class CommonSpec:
    """`words` words occur `common` times, all others `uncommon` times; the worked example has numbers of its own.

    The defaults are for 4,096 tokens and more; below that the numbers are smaller, as published.
    """

    words: int = 10
    common: int = 30
    uncommon: int = 3
    example_words: int = 40
    example_common: int = 10
    example_uncommon: int = 3

    def at(self, length: int) -> "CommonSpec":
        """The numbers for a length."""
        return self if length >= 4096 else CommonSpec(self.words, 6, 1, 20, 3, 1)


def _word_list(words: list[str], wanted: int, common: int, uncommon: int, rng: random.Random) -> str:
    entries = words[:wanted] * common + words[wanted:] * uncommon
    rng.shuffle(entries)
    return _numbered(entries)


def common_words(spec: CommonSpec, setting: Setting) -> Draft:
    """A list of words, ten of which are common; a worked example stands in front. A unit of filler is another word."""
    spec = spec.at(setting.length)
    # An entry is a number, a dot and a word: three tokens or more.
    most = setting.length // (3 * spec.uncommon)
    words = plain_words(setting.rng("words"), max(most, spec.words + 1))
    example = plain_words(setting.rng("example"), spec.example_words)
    shown = _word_list(example, spec.words, spec.example_common, spec.example_uncommon, setting.rng("example order"))
    count = _NUMBERS[spec.words]
    question, answer = LIST_QUESTION.format(count=count), LIST_ANSWER.format(count=count)

    def context(size: int) -> str:
        return _word_list(words[:size], spec.words, spec.common, spec.uncommon, setting.rng("order"))

    return Draft(
        filler=Filler(context, spec.words + 1, max(most, spec.words + 1), "words"),
        before=f"{LIST_INTRO}{shown}{question}{answer} {_numbered(example[: spec.words])}\n\n{LIST_INTRO}",
        question=question,
        answer_prefix=answer,
        references=tuple(words[: spec.words]),
    )


def zeta(alpha: float) -> float:
    """Riemann's zeta function at alpha > 1, to about 1e-12: a partial sum and the first terms of Euler-Maclaurin."""
    if alpha == 2:
        return pi * pi / 6
    last = 1000
    head = sum(k**-alpha for k in range(1, last))
    return head + last ** (1 - alpha) / (alpha - 1) + last**-alpha / 2 + alpha * last ** (-alpha - 1) / 12


def occurrences(words: int, vocabulary: int, alpha: float) -> list[int]:
    """How often each word of a vocabulary occurs, the commonest first: int(words * rank^-alpha / zeta(alpha))."""
    scale = zeta(alpha)
    return [int(words * rank**-alpha / scale) for rank in range(1, vocabulary + 1)]


@dataclass(frozen=True)
class CodedSpec:
    """Zipf's law over random words: the commonest one is written as dots, and the next `words` are asked for."""

    alpha: float = 2.0
    word_length: int = 6
    words: int = 3

    def vocabulary(self, length: int) -> int:
        return length // 50


def coded_words(spec: CodedSpec, setting: Setting) -> Draft:
    """A text of coded words. A unit of filler adds to the number that Zipf's law shares out.

    Raises:
        TaskError: the length is too short for a vocabulary with an answer.
    """
    size_of_vocabulary = spec.vocabulary(setting.length)
    if size_of_vocabulary < spec.words + 2:
        raise TaskError(
            f"length {setting.length} is too short for fwe: it has a coded word for every 50 tokens and needs "
            f"{spec.words + 2}; raise --lengths."
        )
    vocabulary = letters(setting.rng("words"), spec.word_length, size_of_vocabulary)
    vocabulary[0] = DOTS

    def context(size: int) -> str:
        counts = occurrences(size, len(vocabulary), spec.alpha)
        text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        setting.rng("order").shuffle(text)
        return " ".join(text)

    # From here on the last word that is asked for occurs more often than the next one.
    last, after = ((spec.words + shift) ** -spec.alpha for shift in (1, 2))
    smallest = int(zeta(spec.alpha) / (last - after)) + 1
    count = _NUMBERS[spec.words]
    return Draft(
        filler=Filler(context, smallest, max(smallest, 2 * setting.length), "words"),
        before=CODE_INTRO,
        question=CODE_QUESTION.format(count=count),
        answer_prefix=CODE_ANSWER.format(count=count),
        references=tuple(vocabulary[1 : spec.words + 1]),
    )
