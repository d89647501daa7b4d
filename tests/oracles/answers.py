"""Recordings without tensors: how LongBench and CacheBlend score an answer, and how LongBench puts a question.

`CHECKS` maps the folder of a recording to the function that holds it against ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvfoundry.evaluate.prompts import kept_ends
from kvfoundry.evaluate.scores import answers, longbench, rouge
from kvfoundry.evaluate.scores.code import code_line
from kvfoundry.evaluate.tasks.longbench_sets import DATA_SETS, ENGLISH, choose

from .cases import Key

Recording = dict[str, Any]

_CLOSE = partial(pytest.approx, rel=0, abs=1e-6)


def _pairs(metric: str, recorded: list[Recording]) -> list[Recording]:
    """The pairs of one metric; those of classification come in groups, each with its class names."""
    if metric != "classification":
        return recorded
    return [row | {"all_classes": group["all_classes"]} for group in recorded for row in group["rows"]]


def _longbench_scores(recorded: Recording) -> None:
    for package in ("rouge", "jieba", "rapidfuzz"):
        pytest.importorskip(package)
    for metric, rows in recorded["metrics"].items():
        for row in _pairs(metric, rows):
            ours = longbench.score(metric, row["prediction"], [row["answer"]], all_classes=row.get("all_classes"))
            assert ours == _CLOSE(row["score"]), (metric, row)
            if "compared_line" in row:
                assert code_line(row["prediction"]) == row["compared_line"], row
    for name, metric in recorded["dataset_metric"].items():
        assert f"{DATA_SETS[name].metric}_score" == metric, name
    assert {name for name, data_set in DATA_SETS.items() if data_set.first_line} == set(recorded["first_line_datasets"])
    for run in recorded["dataset_level"]:
        _whole_data_set(run)


def _whole_data_set(run: Recording) -> None:
    data_set = DATA_SETS[run["dataset"]]
    scores = [
        longbench.score(
            data_set.metric, prediction, references, all_classes=run["all_classes"], first_line_only=data_set.first_line
        )
        for prediction, references in zip(run["predictions"], run["answers"], strict=True)
    ]
    assert longbench.published_form(scores) == _CLOSE(run["score"]), run
    assert longbench.by_length(scores, run["lengths"]) == run["score_by_length"], run


def _longbench_rules(recorded: Recording) -> None:
    assert set(DATA_SETS) == set(recorded["datasets"])
    for name, entry in recorded["datasets"].items():
        data_set = DATA_SETS[name]
        ours = {
            "language": data_set.language,
            "metric": data_set.metric,
            "max_new_tokens": data_set.max_new_tokens,
            "chat_wrapped": data_set.chat,
            "first_line_only": data_set.first_line,
            "in_longbench_e": data_set.in_e,
            "in_kvcache_factory_default_list": name in ENGLISH,
            "template_fields": ["context", "input"] if data_set.takes_input else ["context"],
            "template_sha256": data_set.published,
        }
        assert ours == {field: entry[field] for field in ours}, name
    assert [data_set.name for data_set in choose(())] == list(ENGLISH)
    assert {data_set.name for data_set in choose(["all"])} - {
        data_set.name for data_set in DATA_SETS.values() if data_set.chat
    } == set(recorded["not_chat_wrapped"])
    assert {name for name, data_set in DATA_SETS.items() if data_set.line_ends} == {"samsum"}
    for row in recorded["truncation"]["examples"]:
        head, tail = kept_ends(row["tokens"], row["max_length"])
        assert [0, head] == row["kept_head"], row
        assert ([row["tokens"] - tail, row["tokens"]] if tail else None) == row["kept_tail"], row


def _cacheblend_scores(recorded: Recording) -> None:
    for row in recorded["parse_generation"]:
        # The reference fails on an empty first line; the answer is empty then.
        assert answers.given_answer(row["raw"]) == (row["parsed"] or ""), row
    for row in recorded["f1"]:
        assert answers.answer_f1(row["prediction"], row["answer"]) == _CLOSE(row["score"]), row
    for row in recorded["normalize_question"]:
        assert answers.as_question(row["raw"]) == row["normalized"], row
    pytest.importorskip("rouge_score")
    for row in recorded["rouge_l"]:
        assert rouge.rouge_l(row["prediction"], row["answer"]) == _CLOSE(row["score"]), row


CHECKS: dict[Key, Callable[[Recording], None]] = {
    ("metrics", "longbench"): _longbench_scores,
    ("metrics", "cacheblend"): _cacheblend_scores,
    ("prompts", "longbench"): _longbench_rules,
}
