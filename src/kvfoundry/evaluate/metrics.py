"""Scores of a prediction against references: pure functions of strings, each in [0, 1]."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

_ARTICLES = frozenset({"a", "an", "the"})


def words_of(text: str) -> list[str]:
    """Case-folded words and numbers without punctuation; the commas of 1,234,567 are left out."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", unicodedata.normalize("NFKC", text).casefold())
    return re.findall(r"\w+", text)


def _contains_run(run: Sequence[str], sequence: Sequence[str]) -> bool:
    return any(list(sequence[start : start + len(run)]) == list(run) for start in range(len(sequence) - len(run) + 1))


def _longest_common_run(first: Sequence[str], second: Sequence[str]) -> int:
    best, lengths = 0, [0] * (len(second) + 1)
    for left in first:
        previous = 0
        for index, right in enumerate(second, start=1):
            previous, lengths[index] = lengths[index], previous + 1 if left == right else 0
            best = max(best, lengths[index])
    return best


def contains_answer(answer: str, prediction: str) -> bool:
    """True when the whole answer stands in the prediction, word for word, whatever the case and punctuation.

    "cat" is not in "catalogue", "1234" not in "12345".
    """
    answer_words = words_of(answer)
    return bool(answer_words) and _contains_run(answer_words, words_of(prediction))


def recovered_share(answer: str, prediction: str) -> float:
    """Share of the answer that the prediction gives back, as its longest unbroken piece.

    A number is compared digit by digit, since digits are separate tokens and are lost one by one; other answers
    word by word, articles left out. A single one of several digits counts nothing: chance alone gives that.
    """
    if contains_answer(answer, prediction):
        return 1.0
    answer_words = words_of(answer)
    if len(answer_words) == 1 and answer_words[0].isdigit():
        digits = answer_words[0]
        # An embedded copy inside a longer number is not the answer, hence the cap just below 1.
        longest = max((_longest_common_run(digits, number) for number in re.findall(r"\d+", prediction)), default=0)
        return min(longest, len(digits) - 1) / len(digits) if longest > 1 else 0.0
    content = [word for word in answer_words if word not in _ARTICLES]
    if not content:
        return 0.0
    return _longest_common_run(content, [word for word in words_of(prediction) if word not in _ARTICLES]) / len(content)


def score_answers(references: Iterable[str], prediction: str) -> tuple[float, bool]:
    """Mean recovered share over all references, and whether every one of them is given back whole."""
    answers = list(references)
    shares = [recovered_share(answer, prediction) for answer in answers]
    return sum(shares) / len(shares), all(contains_answer(answer, prediction) for answer in answers)
