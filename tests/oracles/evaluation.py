"""Recordings without tensors: what evaluation tasks are made of, and how answers are scored.

`CHECKS` maps the folder of a recording to the function that holds it against ours.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvfoundry.evaluate.tasks.needle_scores import rouge_one
from kvfoundry.evaluate.tasks.placement import insertion_point, logistic_depth
from kvfoundry.evaluate.tasks.ruler.counting import CodedSpec, CommonSpec, occurrences
from kvfoundry.evaluate.tasks.ruler.filler import DEPTHS
from kvfoundry.evaluate.tasks.ruler.niah import NeedleSpec
from kvfoundry.evaluate.tasks.ruler.scoring import cleaned, percentage
from kvfoundry.evaluate.tasks.ruler.table import VARIANTS, QASpec
from kvfoundry.evaluate.tasks.ruler.variables import ChainSpec

from .cases import Key

Recording = dict[str, Any]


def _ruler_scores(recorded: Recording) -> None:
    for row in recorded["postprocess"]:
        assert cleaned(row["raw"]) == row["original"], row
    for row in recorded["score_sets"]:
        for name, metric in (("string_match_all", "all"), ("string_match_part", "part")):
            ours = percentage(metric, row["references"], row["predictions"])
            assert abs(ours - row[name]) < 1e-6, (name, row)


_KINDS = {"words": "pair", "numbers": "number", "uuids": "identifier"}
_HAYSTACKS = {"repeat": "noise", "essay": "essay", "needle": "needles"}
_STYLES = {"squad": "squad", "hotpotqa": "hotpot"}


def _ruler_spec(entry: Recording) -> NeedleSpec | ChainSpec | CommonSpec | CodedSpec | QASpec:
    """The published numbers of a task as a spec of ours."""
    generator = entry["generator"]
    if generator == "niah":
        return NeedleSpec(
            haystack=_HAYSTACKS[entry["haystack"]],
            keys=_KINDS[entry["key_type"]],
            values=_KINDS[entry["value_type"]],
            num_keys=entry["keys"],
            values_per_key=entry["values_per_key"],
            queries=entry["queries"],
        )
    if generator == "variable_tracking":
        return ChainSpec(chains=entry["chains"], hops=entry["hops"])
    if generator == "common_words_extraction":
        return CommonSpec(entry["common_words"], entry["frequency_common"], entry["frequency_uncommon"])
    if generator == "freq_words_extraction":
        return CodedSpec(alpha=entry["alpha"], word_length=entry["word_length"], words=entry["answers"])
    return QASpec(_STYLES[entry["source"]])


def _ruler_tasks(recorded: Recording) -> None:
    assert set(recorded["tasks"]) == set(VARIANTS)
    for name, entry in recorded["tasks"].items():
        variant = VARIANTS[name]
        assert variant.spec == _ruler_spec(entry), name
        assert variant.answer_tokens == entry["tokens_to_generate"], name
        assert f"string_match_{variant.metric}" == entry["metric"], name
    assert list(DEPTHS) == recorded["niah_depths"]
    for row in recorded["fwe_occurrences"]:
        counts = occurrences(row["words"], row["vocabulary"], row["alpha"])
        assert counts[:10] == row["first_ten"] and sum(counts) == row["total"], row


def _needle_places(recorded: Recording) -> None:
    stops = [word == "." for length in recorded["haystack_sentence_lengths"] for word in ["w"] * length + ["."]]
    needle = len(recorded["needle"].split())
    for row in recorded["insertions"]:
        # The original keeps a buffer of the length; kvpress names its reserve among its defaults.
        reserve = recorded["defaults"]["kvpress"]["reserve_tokens"]
        for wanted, room, is_stop in (
            (row["original"], row["context_length"] - recorded["buffer"] - needle, stops.__getitem__),
            (row["kvpress"], row["kvpress"]["max_context_length"] - reserve - needle, None),
        ):
            kept = min(room, len(stops))
            assert kept + needle == wanted["total_tokens"], row
            assert insertion_point(kept, row["depth_percent"], is_stop) == wanted["needle_index"], row
    # The original's logistic falls between the end points; the set of depths is the same.
    ours = [logistic_depth(row["x"]) for row in recorded["sigmoid_depths"]]
    assert sorted(ours) == sorted(row["value"] for row in recorded["sigmoid_depths"])


def _needle_scores(recorded: Recording) -> None:
    pytest.importorskip("rouge_score")
    for row in recorded["rows"]:
        ours = 10 * rouge_one(recorded["needle"], row["response"])
        assert abs(ours - row["kvcache_factory_score"]) < 1e-6, row


CHECKS: dict[Key, Callable[[Recording], None]] = {
    ("metrics", "needle"): _needle_scores,
    ("metrics", "ruler"): _ruler_scores,
    ("prompts", "needle"): _needle_places,
    ("prompts", "ruler"): _ruler_tasks,
}
