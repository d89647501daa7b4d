"""Answers as bags of words: normal form and F1, in English and Chinese.

Source: the scores of LongBench (THUDM/LongBench, metrics.py), which follow SQuAD's.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from kvfoundry.evaluate.scores.extra import load

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def _between(first: str, last: str) -> frozenset[str]:
    """The characters from the first to the last one, both included."""
    return frozenset(map(chr, range(ord(first), ord(last) + 1)))


# The published list: full-width forms of ASCII punctuation (without ．), CJK brackets and marks (without 〈, 〉 and 《)
# and the dashes and quotation marks that Chinese shares with other scripts (without ‚).
_CHINESE_PUNCTUATION = _PUNCTUATION.union(
    _between("！", "／") - {"．"}, _between("：", "＠"), _between("［", "｀"), _between("｛", "､"),
    _between("、", "〃"), _between("》", "】"), _between("〔", "〟"), _between("〾", "〿"), {"〰", "﹏"},
    _between("–", "—"), _between("‘", "‟") - {"‚"}, {"…", "‧"},
)  # fmt: skip


def normal_form(text: str) -> str:
    """Lower case; ASCII punctuation deleted; then the words a, an, the; then single spaces between words.

    Deleted and not replaced: "north-west" is one word, "1,000" is "1000".
    """
    bare = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def bag_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two bags of words; 0 when they share nothing, also when both are empty."""
    shared = sum((Counter(prediction) & Counter(answer)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, answer: str) -> float:
    """F1 over the words of the normal forms."""
    return bag_f1(normal_form(prediction).split(), normal_form(answer).split())


def _chinese_words(text: str) -> list[str]:
    """Segmented first, then each word without punctuation and white space; empty ones are dropped."""
    words = load("jieba").cut(text, cut_all=False)
    kept = ("".join(c for c in word.lower() if c not in _CHINESE_PUNCTUATION and not c.isspace()) for word in words)
    return [word for word in kept if word]


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 over the words that jieba finds.

    Raises:
        MissingExtraError: jieba is not installed.
    """
    return bag_f1(_chinese_words(prediction), _chinese_words(answer))
