"""String match as published: the share of the references that stand in the answer, or whether any does.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv:2404.06654. A
reference counts as found wherever its letters stand in a row, whatever the case: "234" is found in "123456".
"""

import re
from collections.abc import Callable, Sequence
from statistics import fmean


def cleaned(prediction: str) -> str:
    """The answer without white space around it, and with a line break for every other control character."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def match_all(references: Sequence[str], prediction: str) -> float:
    """Share of the references that the answer holds, in [0, 1]."""
    text = cleaned(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(references: Sequence[str], prediction: str) -> float:
    """1 when the answer holds any of the references, else 0."""
    return float(match_all(references, prediction) > 0)


METRICS: dict[str, Callable[[Sequence[str], str], float]] = {"all": match_all, "part": match_part}


def percentage(metric: str, references: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """The published figure of a set: the mean over items times 100, with two decimals."""
    scores = [METRICS[metric](wanted, given) for wanted, given in zip(references, predictions, strict=True)]
    return round(100 * fmean(scores), 2)
