"""Answers that are one of several: a class name, or a number.

Source: the scores of LongBench (THUDM/LongBench, metrics.py).
"""

import re
from collections.abc import Sequence


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 / the number of class names in the prediction, if the answer is one of them; case counts.

    A name that is part of the answer ("other" in "other location") is not held against it, but the reference looks at
    the list while it shortens it and passes over the name after each that goes; so do we.
    """
    named = [name for name in all_classes if name in prediction]
    place = 0
    while place < len(named):
        name = named[place]
        if name in answer and name != answer:
            named.remove(name)  # the first of equal names, as there
        place += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are written exactly as the answer; 0 without numbers."""
    numbers = re.findall(r"\d+", prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def _numbered(prediction: str, answer: str, pattern: str) -> float:
    found = re.search(pattern, answer)
    if found is None:
        raise ValueError(f"the answer {answer!r} names no paragraph")
    return count(prediction, found[1])


def retrieval(prediction: str, answer: str) -> float:
    """`count` against the number of the answer "Paragraph 12". Raises ValueError for another answer."""
    return _numbered(prediction, answer, r"Paragraph (\d+)")


def retrieval_zh(prediction: str, answer: str) -> float:
    """`count` against the number of the answer "段落12". Raises ValueError for another answer."""
    return _numbered(prediction, answer, r"段落(\d+)")
