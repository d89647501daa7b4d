"""Likeness of one line of code.

Source: the scores of LongBench (THUDM/LongBench, metrics.py).
"""

from kvfoundry.evaluate.scores.extra import load


def code_line(prediction: str) -> str:
    """The first line without a back tick, a hash or two slashes, after leading newlines; empty when there is none."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def code_sim(prediction: str, answer: str) -> float:
    """Insert-delete similarity of the first code line and the answer, in whole hundredths.

    As published where python-Levenshtein is installed; without it the reference falls back to another measure.

    Raises:
        MissingExtraError: rapidfuzz is not installed.
    """
    similarity = load("rapidfuzz.distance").Indel.normalized_similarity(code_line(prediction), answer)
    return round(100 * similarity) / 100
