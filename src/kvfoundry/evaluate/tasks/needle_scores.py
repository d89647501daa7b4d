"""The published scores of a needle test: word overlap of the response and the whole needle sentence."""

from functools import cache
from typing import Any

from kvfoundry.errors import MissingExtraError

SCORES = {
    "recovered": "share of the answer that is given back",
    "rouge": "overlap of stemmed words with the whole needle (a tenth of the published figure)",
}


@cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError(
            "the rouge score needs rouge-score; get it with: pip install 'kvfoundry[eval]'"
        ) from error
    return RougeScorer(["rouge1"], use_stemmer=True)


def require_rouge() -> None:
    """Refuse early what would stop at the first answer.

    Raises:
        MissingExtraError: the package rouge-score is not installed.
    """
    _scorer()


def rouge_one(needle: str, response: str) -> float:
    """F measure of common stemmed words, in [0, 1]; the published figure is ten times that.

    A short right answer scores well below 1, since the needle holds the words of the question too.

    Raises:
        MissingExtraError: the package rouge-score is not installed.
    """
    return float(_scorer().score(needle, response.strip())["rouge1"].fmeasure)
