"""How LongBench scores a prediction: one metric per data set, the best of several answers, buckets of length.

Source: THUDM/LongBench, eval.py.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from kvfoundry.evaluate.scores.choices import classification, count, retrieval, retrieval_zh
from kvfoundry.evaluate.scores.code import code_sim
from kvfoundry.evaluate.scores.rouge import rouge, rouge_zh
from kvfoundry.evaluate.scores.words import qa_f1, qa_f1_zh

# Scores of a prediction against one answer, in [0, 1]; classification also takes the names of all classes.
METRICS: dict[str, Callable[..., float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_sim": code_sim,
}

# Modules of the extra `eval` behind each metric.
NEEDED: dict[str, tuple[str, ...]] = {
    "qa_f1_zh": ("jieba",),
    "rouge": ("rouge",),
    "rouge_zh": ("rouge", "jieba"),
    "code_sim": ("rapidfuzz.distance",),
}

# LongBench-E: name and first length that is no longer in the bucket; lengths are words or characters, not tokens.
BUCKETS: tuple[tuple[str, float], ...] = (("0-4k", 4000), ("4-8k", 8000), ("8k+", float("inf")))


def first_line(prediction: str) -> str:
    """The line that follows leading newlines."""
    return prediction.lstrip("\n").split("\n")[0]


def score(
    metric: str,
    prediction: str,
    answers: Sequence[str],
    *,
    all_classes: Sequence[str] | None = None,
    first_line_only: bool = False,
) -> float:
    """The best score over the answers."""
    text = first_line(prediction) if first_line_only else prediction
    more = {"all_classes": all_classes or ()} if metric == "classification" else {}
    return max((METRICS[metric](text, answer, **more) for answer in answers), default=0.0)


def bucket_of(length: int) -> str:
    """The LongBench-E bucket of a sample's length."""
    return next(name for name, end in BUCKETS if length < end)


def published_form(scores: Iterable[float]) -> float | None:
    """The mean in percent with two decimals, as tables print it; None without scores."""
    values = list(scores)
    return round(100 * fmean(values), 2) if values else None


def by_length(scores: Iterable[float], lengths: Iterable[int]) -> dict[str, float | None]:
    """`published_form` of each bucket."""
    parts: dict[str, list[float]] = {name: [] for name, _ in BUCKETS}
    for value, length in zip(scores, lengths, strict=True):
        parts[bucket_of(length)].append(value)
    return {name: published_form(values) for name, values in parts.items()}
