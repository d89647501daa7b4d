"""Recordings without tensors: what evaluation tasks are made of, and how answers are scored.

`CHECKS` maps the folder of a recording to the function that holds it against ours.
"""

from collections.abc import Callable
from typing import Any

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


CHECKS: dict[Key, Callable[[Recording], None]] = {
    ("metrics", "ruler"): _ruler_scores,
    ("prompts", "ruler"): _ruler_tasks,
}
