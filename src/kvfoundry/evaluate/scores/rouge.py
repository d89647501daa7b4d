"""ROUGE-L of two kinds: as LongBench counts it, and as CacheBlend does. The numbers of one pair differ."""

from functools import cache
from typing import Any

from kvfoundry.evaluate.scores.extra import load


@cache
def _longbench_rouge() -> Any:
    return load("rouge").Rouge(metrics=["rouge-l"])


@cache
def _stemming_rouge() -> Any:
    return load("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)


def rouge(prediction: str, answer: str) -> float:
    """ROUGE-L F of the package `rouge`: sentences end at full stops, counts are over distinct words.

    A text that the package cannot score, such as an empty one, or one sentence of about a thousand words, on which its
    recursion ends, gives 0: so do the published numbers.

    Raises:
        MissingExtraError: the package is not installed.
    """
    scorer = _longbench_rouge()
    try:
        return float(scorer.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_zh(prediction: str, answer: str) -> float:
    """The same over the words that jieba finds.

    Raises:
        MissingExtraError: rouge or jieba is not installed.
    """
    jieba = load("jieba")
    return rouge(*(" ".join(jieba.cut(text, cut_all=False)) for text in (prediction, answer)))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F of the package `rouge-score` with stemming: one longest common subsequence of the whole texts.

    Raises:
        MissingExtraError: the package is not installed.
    """
    return float(_stemming_rouge().score(answer, prediction)["rougeL"].fmeasure)
