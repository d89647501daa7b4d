"""What a result says of the rows that a cache kept: counts and a profile per row of the batch."""

from __future__ import annotations

import time

import pytest
import torch

import kvfoundry
from kvfoundry import compat, generation
from kvfoundry.kept import BINS, kept_by_row

PROMPTS = [" ".join(f"w{3 + i % 90}" for i in range(count)) for count in (60, 37)]


def held(cache, row: int, tokens: int) -> list[float]:
    """By hand: the share of heads over all full-attention layers that hold each position."""
    layers = [layer for layer in cache.attention_layers if not layer.is_sliding]
    shares = []
    for position in range(tokens):
        per_layer = [(layer.positions[row] == position).any(dim=-1).double().mean() for layer in layers]
        shares.append(float(torch.stack(per_layer).mean()))
    return shares


def digit(share: float) -> str:
    return "0" if share == 0 else "9" if share == 1 else str(1 + int(8 * share + 1e-9))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "spec",
    [
        "streamingllm(budget=12)",
        "snapkv(budget=12, window=4)",
        "snapkv(budget=12, window=4, granularity='query_head')",
        "adakv(budget=12, window=4)",
        "h2o(budget=12, window=4)+int4()",
        "l2norm(budget=12, skip_layers=1)",
    ],
)
def test_the_profile_is_that_of_the_positions(family, spec, tiny_model, tokenizer):
    model = tiny_model(family)
    cache = kvfoundry.KVCache(model, spec)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with torch.inference_mode():
        model(**inputs, **{compat.CACHE_ARGUMENT: cache})
    for row, (found, prompt) in enumerate(zip(kept_by_row(cache), PROMPTS, strict=True)):
        tokens = len(prompt.split())
        shares = held(cache, row, tokens)
        assert found.share == pytest.approx(sum(shares) / tokens) and found.rows == pytest.approx(sum(shares))
        expected = "".join(map(digit, shares))
        assert found.profile == (None if set(expected) == {"9"} else expected)


def test_a_long_text_has_several_positions_in_a_bin(tiny_model):
    """2,500 tokens, the first 4 and the last 1,000 kept: every bin by hand."""
    model = tiny_model("llama", max_position_embeddings=4096)
    cache = kvfoundry.KVCache(model, "streamingllm(budget=1004)")
    with torch.inference_mode():
        model(torch.arange(2500)[None] % 100 + 3, logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    (found,) = kept_by_row(cache)
    assert found.profile is not None and len(found.profile) == BINS and found.rows == 1004
    for number, shown in enumerate(found.profile):
        span = range(number * 2500 // BINS, (number + 1) * 2500 // BINS)
        assert shown == digit(sum(token < 4 or token >= 1500 for token in span) / len(span))


@pytest.mark.parametrize("spec", ["fullkv", "kivi(bits=2)", "snapkv(budget=100, window=4)", "quest(budget=16)"])
def test_there_is_no_profile_where_every_row_is_kept(spec, tiny_model, tokenizer):
    results = kvfoundry.generate(tiny_model("llama"), tokenizer, PROMPTS, spec, max_new_tokens=2, details=True)
    assert [(one.kept_rows, one.kept_share, one.kept_profile) for one in results] == [(60, 1, None), (37, 1, None)]


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_generate_tells_each_prompt_of_a_batch_what_it_tells_it_alone(family, tiny_model, tokenizer):
    options = dict(method="h2o(budget=0.4, window=4)", max_new_tokens=3, details=True)
    model = tiny_model(family)
    together = kvfoundry.generate(model, tokenizer, PROMPTS, **options)
    for batched, prompt in zip(together, PROMPTS, strict=True):
        alone = kvfoundry.generate(model, tokenizer, prompt, **options)
        for name in ("kept_rows", "kept_share", "kept_profile"):
            assert getattr(batched, name) == getattr(alone, name)


def test_beams_tell_of_their_own_prompt(tiny_model, tokenizer):
    options = dict(method="streamingllm(budget=12)", max_new_tokens=3, details=True)
    beams = kvfoundry.generate(tiny_model("llama"), tokenizer, PROMPTS, num_beams=2, num_return_sequences=2, **options)
    assert [len(beam.kept_profile) for beam in beams] == [60, 60, 37, 37]


def test_looking_at_the_cache_is_in_no_measured_time(tiny_model, tokenizer, monkeypatch):
    def slow(cache):
        time.sleep(0.8)
        return kept_by_row(cache)

    monkeypatch.setattr(generation, "kept_by_row", slow)
    began = time.perf_counter()
    result = kvfoundry.generate(tiny_model("llama"), tokenizer, PROMPTS[0], max_new_tokens=3, details=True)
    assert time.perf_counter() - began - result.seconds > 0.7
    assert result.ttft_seconds + 2e-3 * result.ms_per_token <= result.seconds + 1e-6
