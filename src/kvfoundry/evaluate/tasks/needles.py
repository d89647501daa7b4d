"""The kinds of needle: a sentence to hide, the question for it and the answer.

The wordings are chosen by measurement, not by taste: `benchmarks/needle_wordings.py` asks the embedded model with the
full cache at 2,048 tokens and keeps what it found in `benchmarks/results/needle_wordings.json`. Answered whole, of 20
each: word 20, phrase 18, digits 20.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvfoundry.evaluate.tasks.base import TaskError

CITIES = ("Lisbon", "Cairo", "Oslo", "Nairobi", "Lima", "Kyoto", "Toronto", "Mumbai", "Athens", "Havana")


@dataclass(frozen=True)
class Needle:
    """Facts to hide, each a sentence with its answer, and the one question that asks for all of them.

    distractors: sentences of the same wording about other keys, with other answers.
    """

    sentences: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    distractors: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedleKind:
    """A family of needles.

    Attributes:
        sentence: with {key} and {answer}.
        question: asks for the answer of {key}; `question_many` asks for all answers.
        answers: the pool to draw from; None draws seven digits.
    """

    summary: str
    sentence: str
    question: str
    question_many: str
    answers: tuple[str, ...] | None

    @property
    def most_answers(self) -> int:
        return 8 if self.answers is None else min(8, len(self.answers))

    def draw(self, rng: random.Random, count: int, is_taken: Callable[[str], bool], distractors: int = 0) -> Needle:
        """`count` different answers for one key, none of which the haystack holds already, and facts about other keys.

        Raises:
            TaskError: the haystack leaves too few keys or answers.
        """
        keys = [key for key in CITIES if not is_taken(key)]
        wanted = count + distractors
        digits = [str(rng.randint(10**6, 10**7 - 1)) for _ in range(2 * wanted)]
        pool = digits if self.answers is None else self.answers
        free = [answer for answer in dict.fromkeys(pool) if not is_taken(answer)]
        if len(keys) <= distractors or len(free) < wanted:
            raise TaskError(
                "the haystack already holds the needles' own words; use another --kind or another --haystack."
            )
        key = rng.choice(keys)
        answers = tuple(rng.sample(free, count))
        others = rng.sample([other for other in keys if other != key], distractors) if distractors else []
        rest = [answer for answer in free if answer not in answers]
        question = self.question if count == 1 else self.question_many
        return Needle(
            sentences=tuple(self.sentence.format(key=key, answer=answer) for answer in answers),
            question=question.format(key=key, count=count),
            answers=answers,
            distractors=tuple(
                self.sentence.format(key=other, answer=answer) for other, answer in zip(others, rest, strict=False)
            ),
        )


KINDS = {
    "word": NeedleKind(
        summary="one word",
        sentence="Remember this: the mayor of {key} keeps a {answer} as a pet.",
        question="What animal does the mayor of {key} keep as a pet?",
        question_many="Which {count} animals does the mayor of {key} keep as pets?",
        # consonants first: "keeps a elephant" was answered with a lion
        answers=(
            "penguin", "tiger", "dolphin", "parrot", "camel", "rabbit", "giraffe", "turtle", "monkey", "zebra",
            "kangaroo", "panda",
        ),
    ),
    "phrase": NeedleKind(
        summary="a few words",
        sentence="Remember this: the best thing to do in {key} is to {answer}.",
        question="What is the best thing to do in {key}?",
        question_many="What are the {count} best things to do in {key}?",
        answers=(
            "ride the red tram", "feed the hungry penguins", "eat a fresh mango", "drink strong mint tea",
            "rent a yellow bicycle", "climb the glass tower", "dance in the rain", "visit the diamond museum",
        ),
    ),
    "digits": NeedleKind(
        summary="seven digits",
        sentence="Remember this: the number filed under {key} is {answer}.",
        question="What is the number filed under {key}?",
        question_many="What are the {count} numbers filed under {key}?",
        answers=None,
    ),
}  # fmt: skip
