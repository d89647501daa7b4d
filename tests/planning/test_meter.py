"""Predicted bytes against those of real caches: within 2 %, over families, methods and codecs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import _COMMON, EVICTABLE, FAMILIES, KV_HEADS, random_ids
from transformers import AutoModelForCausalLM, Gemma2Config

import kvfoundry
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import SpecError, UnsupportedModelError
from kvfoundry.planning import Meter, geometry

TOKENS = 421
CODECS = ["int8", "int4", "int2", "fp8", "kivi(bits=2)", "kvquant", "gear", "think", "rotate()+int4", "minicache"]
EVICTING = [
    "snapkv(budget=0.3)", "adakv(budget=64)", "h2o(budget=0.25)", "streamingllm(budget=64)",
    "pyramidkv(budget=64, window=8)",
    "chunkkv(budget=64)", "lagkv(budget=0.5)", "l2norm(budget=64,skip_layers=1)", "scissorhands(budget=0.4)",
    "expected_attention(budget=0.3)", "criticalkv(budget=64)", "rkv(budget=64)",
    "streamingllm(budget=64, positions='slot')", "snapkv(budget=64, granularity='query_head')",
]  # fmt: skip
MIXED = ["fullkv", "quest(budget=64)", "snapkv(budget=0.5)+int4", "streamingllm(budget=300)+kivi(bits=2)"]
FEW = ["fullkv", "h2o(budget=0.25)", "kivi(bits=2)"]


@torch.inference_mode()
def measured(model, spec, tokens, batch=1):
    cache = kvfoundry.KVCache(model, spec)
    model(random_ids(batch, tokens), past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("family", "spec"),
    [("llama", spec) for spec in CODECS + EVICTING + MIXED]
    + [(family, spec) for family in FAMILIES for spec in FEW if family != "llama"],
)
def test_predicted_bytes_are_the_measured_ones(family, spec, tiny_model):
    model = tiny_model(family)
    cache = measured(model, spec, TOKENS)
    size = Meter(model, spec, torch.float32).size(TOKENS)
    assert size.stored == pytest.approx(cache.nbytes, rel=0.02)
    assert size.peak == pytest.approx(cache.peak_nbytes, rel=0.05)
    if family in EVICTABLE:
        assert size.rows == pytest.approx(cache.kept_rows, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [("int4", 30), ("kvquant", 30)]
    + [(spec, 999) for spec in ("fullkv", "kivi(bits=2)", "gear", "snapkv(budget=0.5)+int8")]
    + [("kvquant", 1850), ("minicache", 1850)],
)
def test_a_long_prompt_is_on_the_line_of_two_short_ones(spec, tokens, tiny_model):
    model = tiny_model("llama", max_position_embeddings=4096)
    size = Meter(model, spec, torch.float32).size(tokens)
    assert size.stored == pytest.approx(measured(model, spec, tokens).nbytes, rel=0.02)


def test_half_precision_wide_heads_and_a_batch(own_model):
    model = own_model("qwen3", head_dim=48, num_key_value_heads=4).to(torch.bfloat16)
    for spec in ("fullkv", "int4", "kivi(bits=2)", "snapkv(budget=64)"):
        size = Meter(model, spec, torch.bfloat16).size(300)
        assert 3 * size.stored == pytest.approx(measured(model, spec, 300, batch=3).nbytes, rel=0.02), spec


def test_positions_beyond_two_bytes(tiny_model):
    """A text of more than 32,767 tokens: its positions take four bytes each."""
    model = tiny_model("llama", max_position_embeddings=40000, num_hidden_layers=1)
    tokens, piece, spec = 33_200, 415, "streamingllm(budget=64)"
    cache, ids = kvfoundry.KVCache(model, spec), random_ids(1, tokens)
    cache.expect_prompt(tokens)
    with torch.inference_mode():
        for start in range(0, tokens, piece):
            model(ids[:, start : start + piece], past_key_values=cache, use_cache=True, logits_to_keep=1)
    meter = Meter(model, spec, torch.float32)
    assert meter.size(tokens).stored == pytest.approx(cache.nbytes, rel=0.01)
    assert meter.size(tokens).stored > meter.size(32_768).stored == meter.size(1000).stored


def test_parked_rows_are_counted_apart(tiny_model):
    model, spec = tiny_model("llama"), "snapkv(budget=64)+park()"
    cache, size = measured(model, spec, TOKENS), Meter(model, spec, torch.float32).size(TOKENS)
    assert cache.parked_nbytes > 0
    assert size.parked == pytest.approx(cache.parked_nbytes, rel=0.02)
    assert size.stored == pytest.approx(cache.nbytes, rel=0.02)


@pytest.mark.parametrize("spec", ["headinfer()", "headinfer()+int8", "snapkv(budget=200)+headinfer()"])
def test_streamed_rows_are_on_the_host_and_a_few_heads_on_the_device(spec, tiny_model):
    model = tiny_model("llama")
    cache, size = measured(model, spec, TOKENS), Meter(model, spec, torch.float32).size(TOKENS)
    hosted = [layer.rows.hosted_nbytes for layer in cache.attention_layers if layer.rows is not None]
    assert size.parked == pytest.approx(sum(hosted), rel=0.02) and 0 < size.parked <= cache.host_nbytes
    assert size.stored == pytest.approx(cache.nbytes, rel=0.02, abs=200)
    with torch.inference_mode():
        model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    assert size.peak >= size.stored + 3 * hosted[0] // KV_HEADS
    assert cache.prompt.rings.nbytes == pytest.approx(3 * hosted[0] / KV_HEADS, rel=0.4)


@pytest.mark.parametrize("scope", ["model", "head"])
def test_a_second_reading(scope, tiny_model, tokenizer):
    model, spec = tiny_model("llama"), f"kvzip(budget=0.4, scope={scope})"
    text = " ".join(f"w{3 + i % 120}" for i in range(300))
    cache = kvfoundry.prefill(model, tokenizer, text, method=spec)
    size = Meter(model, spec, torch.float32).size(cache.seen_tokens)
    assert size.stored == pytest.approx(cache.nbytes, rel=0.02)
    assert size.peak == pytest.approx(Meter(model, "fullkv", torch.float32).size(cache.seen_tokens).stored, rel=0.01)


@pytest.mark.parametrize("spec", ["fullkv", "snapkv(budget=0.5)", "kivi(bits=2)", "think"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chunk_in_a_store_is_as_large(spec, family, tiny_model):
    model = tiny_model(family)
    chunk = read_passage(model, random_ids(256)[None].flatten().tolist(), spec)
    held = chunk.nbytes - chunk.token_ids.nbytes
    assert Meter(model, spec, torch.float32).chunk_bytes(256) == pytest.approx(held, rel=0.02)


def test_geometry_comes_from_the_modules(tiny_model):
    """B93: a head size that is not hidden size over heads, grouped queries, layers of two kinds."""
    found = geometry(tiny_model("gemma3", head_dim=24, num_key_value_heads=4))
    assert [(shape.kv_heads, shape.key_dim, shape.value_dim, shape.query_heads) for shape in found.values()] == [
        (4, 24, 24, 8)
    ] * 2
    assert [shape.rule.span for shape in found.values()] == [16, None]


def test_what_a_cache_refuses_is_refused(tiny_model):
    with pytest.raises(SpecError, match="budget=0"):
        Meter(tiny_model("llama"), "snapkv(budget=0)", torch.float32)
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma2Config(**_COMMON | {"num_hidden_layers": 4, "layer_types": kinds})
    with pytest.raises(UnsupportedModelError, match="minicache"):
        Meter(AutoModelForCausalLM.from_config(config), "minicache", torch.float32)
