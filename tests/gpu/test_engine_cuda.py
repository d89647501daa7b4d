"""The decode engine on a CUDA device: graphs, kernels, recording anew, memory; skipped where there is none."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, random_ids
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import DecodeEngine, KVCache
from kvfoundry.layouts import DenseRows

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (extra `kernels`)"),
]

SPECS = [
    "fullkv",
    "snapkv(budget=8, window=4)",
    "adakv(budget=8, window=4)",
    "pyramidkv(budget=8, window=4)",
    "l2norm(budget=8)",
    "kvzip(budget=8)",
    "streamingllm(budget=8, sinks=2)",
    "h2o(budget=8, window=4)",
    "tova(budget=8)",
]


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


PROMPTS = [words(40, 1), words(17, 2), words(29, 3)]


@pytest.fixture
def cuda_model(tiny_model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """A private copy of a tiny model on the device."""

    def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = copy.deepcopy(tiny_model(family)).to("cuda", dtype)
        model.set_attn_implementation("eager")
        return model

    return build


def texts(model: Any, tokenizer: Any, spec: str, engine: Any, **options: Any) -> list[list[int]]:
    found = kvfoundry.generate(
        model, tokenizer, PROMPTS, spec, engine=engine, details=True, **{"max_new_tokens": 24, **options}
    )
    return [generation.token_ids for generation in found]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_graph_gives_the_text_of_the_plain_loop(family: str, spec: str, cuda_model, tokenizer) -> None:
    model = cuda_model(family)
    engine = DecodeEngine(model)
    expected = texts(model, tokenizer, spec, False)
    assert texts(model, tokenizer, spec, engine) == expected
    assert engine.recorded == 1 and engine.is_recorded
    # the same buffers and the same graph, once more
    assert texts(model, tokenizer, spec, engine) == expected
    assert engine.recorded == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served(family: str, cuda_model, tokenizer) -> None:
    model = cuda_model(family)
    engine = DecodeEngine(model)
    assert texts(model, tokenizer, "h2o(budget=8, window=4)", engine) == texts(
        model, tokenizer, "h2o(budget=8, window=4)", False
    )


def test_the_engine_serves_or_says_why_not(cuda_model, tokenizer) -> None:
    model = cuda_model("llama")
    found = kvfoundry.generate(model, tokenizer, PROMPTS, max_new_tokens=8, details=True, require_kernels=True)
    assert found[0].notes == []
    found = kvfoundry.generate(model, tokenizer, PROMPTS, "minicache()", max_new_tokens=8, details=True, engine=True)
    assert "decoded by the plain loop" in found[0].notes[-1]


def test_stops_and_sampling(cuda_model, tokenizer) -> None:
    model = cuda_model("llama")
    free = texts(model, tokenizer, "fullkv", False)
    stops = [free[0][5], free[2][9]]
    assert texts(model, tokenizer, "fullkv", True, eos_token_id=stops) == texts(
        model, tokenizer, "fullkv", False, eos_token_id=stops
    )
    sampled = dict(do_sample=True, temperature=0.8, top_p=0.9, top_k=20, seed=3)
    engine = DecodeEngine(model)
    first = texts(model, tokenizer, "fullkv", engine, **sampled)
    assert engine.is_recorded and all(0 <= token < 128 for answer in first for token in answer)
    assert texts(model, tokenizer, "fullkv", engine, **sampled) == first  # the seed decides in a graph too
    assert texts(model, tokenizer, "fullkv", engine, **{**sampled, "seed": 4}) != first


def test_a_cache_goes_on(cuda_model, tokenizer) -> None:
    model, said = cuda_model("llama"), []
    for engine in (False, True):
        asked = kvfoundry.prefill(model, tokenizer, PROMPTS[0], "h2o(budget=8, window=4)")
        said.append(
            [kvfoundry.generate(model, tokenizer, words(5, seed), cache=asked, engine=engine) for seed in (7, 8)]
        )
    assert said[0] == said[1]


def test_a_compiled_step_gives_the_same_text(cuda_model, tokenizer) -> None:
    model = cuda_model("llama")
    engine = DecodeEngine(model, compile=True)
    assert texts(model, tokenizer, "h2o(budget=8, window=4)", engine) == texts(
        model, tokenizer, "h2o(budget=8, window=4)", False
    )
    assert engine.is_recorded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype: torch.dtype, cuda_model) -> None:
    model = cuda_model("qwen2", dtype)
    ids = random_ids(2, 60).cuda()
    with torch.inference_mode():
        caches = [KVCache(model, "snapkv(budget=16, window=4)") for _ in range(2)]
        for cache in caches:
            model(ids, use_cache=True, past_key_values=cache)
        position = torch.full((2, 1), 60, device="cuda")
        expected = model(ids[:, :1], position_ids=position, use_cache=True, past_key_values=caches[0]).logits[:, -1]
        program = DecodeEngine(model).begin(caches[1], torch.cat([ids, ids[:, :1]], dim=1), 4)
        found = program.logits()
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.03


def test_rows_leave_the_cache_layer_by_layer(cuda_model) -> None:
    """Moving rows needs room for one layer more, not for a second cache, and the old memory is free."""
    model, rows = cuda_model("llama"), 100_000
    cache = KVCache(model)
    cache.expect_prompt(rows)
    with torch.inference_mode():
        for layer in cache.attention_layers:
            keys, values = (torch.randn(1, 2, rows, 16, device="cuda") for _ in range(2))
            positions = torch.arange(rows, device="cuda", dtype=torch.int32)[None, None]
            layer.hold(DenseRows(keys, values, positions, torch.full((1, 2), rows)), rows, 2)
        del keys, values, positions
        held = torch.cuda.memory_allocated()
        one = cache.attention_layers[0].nbytes
        torch.cuda.reset_peak_memory_stats()
        engine = DecodeEngine(model, room=1)
        engine.begin(cache, torch.ones(1, rows + 1, dtype=torch.long, device="cuda"), 8)
        assert cache.nbytes == 0
        assert torch.cuda.memory_allocated() - held < one // 4
        assert torch.cuda.max_memory_allocated() - held < 2 * one
        engine.clear()
        assert torch.cuda.memory_allocated() < held - one
