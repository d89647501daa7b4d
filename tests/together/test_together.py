"""Methods that read a prompt together, and decode in common batches, give what each gives alone."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from laws.support import METHODS, small_spec
from tiny_models import build_tokenizer, random_ids

import kvfoundry
from kvfoundry.errors import CacheStateError, DataError, UnsupportedModelError
from kvfoundry.generation import Generation

TIMES = ("ttft_seconds", "ms_per_token", "seconds")


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


PROMPTS = [words(40, 1), words(17, 2), words(29, 3)]


def timeless(generations: list[Generation]) -> list[dict[str, Any]]:
    return [{name: value for name, value in asdict(found).items() if name not in TIMES} for found in generations]


def apart(model, tokenizer, prompts, methods, limits, **options) -> list[list[Generation]]:
    return [
        kvfoundry.generate(model, tokenizer, prompts, method, limits, details=True, do_sample=False, **options)
        for method in methods
    ]


# Three budgets of every registered name: one that all prompts exceed, a share, and one that the short prompt is within.
BUDGETS = (8, 12, 0.5, 20)
SPECS = {name: list(dict.fromkeys(small_spec(name, budget) for budget in BUDGETS)) for name in METHODS}
COMMON = ["fullkv", "snapkv(budget=12, window=4)"]


@cache
def common_alone(model) -> list[list[dict[str, Any]]]:
    """What the methods that every list below ends in give alone: the same for all lists, so found once for a model."""
    return [timeless(answers) for answers in apart(model, build_tokenizer(), PROMPTS, COMMON, 12)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_together_is_what_each_gives_alone(name, family, tiny_model, tokenizer):
    model = tiny_model(family)
    specs = [*SPECS[name], *COMMON]
    found = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, 12)
    expected = [timeless(answers) for answers in apart(model, tokenizer, PROMPTS, SPECS[name], 12)]
    for spec, together, alone in zip(specs, found, [*expected, *common_alone(model)], strict=True):
        assert timeless(together) == alone, spec


@pytest.mark.parametrize(
    "name", ["snapkv", "adakv", "h2o", "streamingllm", "l2norm", "kvzip", "quest", "int8", "minicache"]
)
def test_the_engine_gives_the_answers_of_the_loop(name, tiny_model, tokenizer):
    model = tiny_model("llama")
    specs, limits = [*SPECS[name], *COMMON], [12, 1, 5]
    free = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, limits, engine=False)
    stops = {"eos_token_id": [free[0][0].token_ids[6], free[-2][2].token_ids[2]]}
    for options in ({}, stops, {**stops, "min_new_tokens": 4}):
        plain = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, limits, engine=False, **options)
        found = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, limits, engine=True, **options)
        for spec, answers, expected in zip(specs, found, plain, strict=True):
            looped = any("plain loop" in note for answer in answers for note in answer.notes)
            assert looped == spec.startswith(("minicache", "quest(budget=0.5")), spec
            for answer in (*answers, *expected):
                answer.notes.clear()
            assert timeless(answers) == timeless(expected), spec


def test_a_question_that_methods_may_not_see_comes_after_them(tiny_model, tokenizer):
    model, specs = (
        tiny_model("llama"),
        ["fullkv", "snapkv(budget=8, window=4)", "h2o(budget=8, window=4)", "kvzip(budget=8, chunk=8)"],
    )
    found = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, 6, hold_back=5)
    alone = apart(model, tokenizer, PROMPTS, specs, 6, hold_back=5)
    assert [timeless(answers) for answers in found] == [timeless(answers) for answers in alone]


def test_every_answer_has_its_own_longest_and_rows_are_split_where_they_are_too_many(tiny_model, tokenizer):
    model, specs = tiny_model("llama"), ["fullkv", "snapkv(budget=8, window=4)", "keydiff(budget=9)"]
    found = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, [3, 9, 5], rows=3, min_new_tokens=9)
    for of_method in found:
        assert [generation.new_tokens for generation in of_method] == [3, 9, 5]
        assert all(generation.ttft_seconds is None and generation.ms_per_token is None for generation in of_method)
    whole = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, [3, 9, 5], min_new_tokens=9)
    assert [timeless(answers) for answers in found] == [timeless(answers) for answers in whole]


def test_short_rows_do_not_share_a_batch_with_long_ones(tiny_model, tokenizer, monkeypatch):
    from kvfoundry.together import answers

    widths, joined = [], answers.joined

    def noted(model, caches):
        result = joined(model, caches)
        layers = [cache.attention_layers[0] for cache in (*caches, result)]
        widths.append([layer.rows.view().keys.shape[2] for layer in layers])
        return result

    monkeypatch.setattr(answers, "joined", noted)
    specs = ["fullkv", *(f"{name}(budget={rows})" for name in ("keydiff", "random") for rows in (8, 12, 18))]
    kvfoundry.generate_together(tiny_model("llama"), tokenizer, [words(40, 1), words(38, 2)], specs, 4)
    assert widths == [[8, 8, 12, 12, 12], [18, 18, 18]]


def test_a_shared_prompt_is_read_in_one_call(tiny_model):
    model = tiny_model("llama")
    prompt = kvfoundry.SharedPrompt(model, ["fullkv", "snapkv(budget=8, window=4)"])
    ids = random_ids(20, seed=1)[None]
    with torch.inference_mode():
        model(ids, past_key_values=prompt)
        assert prompt.nbytes == 0 and [cache.seen_tokens for cache in prompt.caches] == [20, 20]
        assert prompt.caches[1].nbytes < prompt.caches[0].nbytes
        with pytest.raises(CacheStateError, match="one call"):
            model(ids, past_key_values=prompt)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"max_new_tokens": [1, 2]}, DataError, "2 max_new_tokens for 3 prompts"),
        ({"answer_prefix": ["a"]}, DataError, "1 answer prefixes for 3 prompts"),
        ({"hold_back": 17}, DataError, "leaves nothing"),
        ({"max_new_tokens": 10**6}, DataError, "limited to"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, error, says, tiny_model, tokenizer):
    with pytest.raises(error, match=says):
        kvfoundry.generate_together(tiny_model("llama"), tokenizer, PROMPTS, ["fullkv"], **given)


def test_beams_of_a_generation_config_are_refused(tiny_model, tokenizer):
    model = tiny_model("llama")
    before = model.generation_config.num_beams
    model.generation_config.num_beams = 2
    try:
        with pytest.raises(UnsupportedModelError, match="num_beams"):
            kvfoundry.generate_together(model, tokenizer, PROMPTS, ["fullkv"], 2)
    finally:
        model.generation_config.num_beams = before
