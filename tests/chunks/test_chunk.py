"""A chunk is a copy of what a cache holds, bit for bit, in every layout, and makes a cache that goes on the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import left_padded, random_ids
from torch import Tensor
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import compat
from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import CacheStateError, DataError, SpecError

Models = Callable[..., PreTrainedModel]
SPECS = [
    "fullkv",
    "snapkv(budget=20, window=8)",
    "snapkv(budget=20, window=8, granularity=query_head)",
    "adakv(budget=20, window=8)",
    "kivi(bits=2, group=16, residual=16)",
    "gear",
    "kvquant(bits=3, outliers=0.02)",
    "rotate()+int4",
    "fp8",
    "think",
    "adakv(budget=20, window=8)+think",
    "snapkv(budget=40, window=8)+kivi(bits=2, group=8, residual=16)",
    "minicache(start=0.0, retention=0.1)",
]


def cache_of(model: PreTrainedModel, ids: Tensor, method: str = "fullkv", **inputs: Any) -> kvfoundry.KVCache:
    cache = kvfoundry.KVCache(model, method)
    model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache}, **inputs)
    return cache


def continued(model: PreTrainedModel, cache: kvfoundry.KVCache, steps: int = 12) -> Tensor:
    """Logits of a question and some greedy steps behind it."""
    out = [model(random_ids(1, 5, seed=3), use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits]
    for _ in range(steps):
        out.append(model(out[-1][:, -1:].argmax(-1), use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits)
    return torch.cat(out, dim=1)


def same(one: ChunkKV, other: ChunkKV) -> bool:
    left, right = one.tensors(), other.tensors()
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.filterwarnings("ignore::kvfoundry.coding.LossyCodecWarning")
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_chunk_goes_on_as_its_cache_would(spec: str, tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 90)
    cache = cache_of(model, ids, spec)
    chunk = ChunkKV.from_cache(cache, ids)
    assert same(chunk, ChunkKV.from_cache(chunk.to_cache(model), ids))
    read = ChunkKV.from_tensors(chunk.tensors(), chunk.metadata())
    expected = continued(model, cache.fork())
    for _ in range(2):  # the chunk is never written
        assert torch.equal(continued(model, read.to_cache(model)), expected)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
@torch.no_grad()
def test_window_layers_travel_too(family: str, tiny_model: Models) -> None:
    model, ids = tiny_model(family), random_ids(1, 150)
    cache = cache_of(model, ids)
    chunk = ChunkKV.from_cache(cache, ids)
    assert torch.equal(continued(model, cache), continued(model, chunk.to_cache(model)))


@torch.no_grad()
def test_tensors_own_their_storage_and_nothing_of_the_cache(tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = cache_of(model, ids)
    chunk = ChunkKV.from_cache(cache, ids)
    before = {name: tensor.clone() for name, tensor in chunk.tensors().items()}
    for tensor in (tensor for layer in cache.attention_layers for tensor in layer.tensors()):
        tensor.fill_(1)
    for name, tensor in chunk.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert torch.equal(tensor, before[name]), name
    assert chunk.nbytes == sum(tensor.nbytes for tensor in before.values())


@torch.no_grad()
def test_a_passage_behind_a_context(tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 40)
    chunk = ChunkKV.from_cache(cache_of(model, ids), ids, start=7)
    whole = ChunkKV.from_cache(cache_of(model, ids), ids)
    assert chunk.start == 7 and torch.equal(chunk.token_ids, ids[0, 7:]) and torch.equal(chunk.context_ids, ids[0, :7])
    for layer, full in zip(chunk.layers, whole.layers, strict=True):
        assert layer.is_whole and torch.equal(layer.positions, torch.arange(33)[None])
        assert torch.equal(layer.keys, full.keys[:, 7:]) and torch.equal(layer.values, full.values[:, 7:])
    cache = chunk.to_cache(model)
    assert cache.seen_tokens == 40 and int(cache.layers[0].positions.min()) == 7


@pytest.mark.filterwarnings("ignore::kvfoundry.coding.LossyCodecWarning")
@pytest.mark.parametrize("spec", ["kvquant(bits=4, outliers=0.02)", "adakv(budget=20, window=8)+int8", "think"])
@torch.no_grad()
def test_plain_reads_what_attention_reads(spec: str, tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 80)
    cache = cache_of(model, ids, spec)
    plain = ChunkKV.from_cache(cache, ids, start=3).plain(model)
    for layer, held in zip(plain.layers, cache.attention_layers, strict=True):
        view, rows = held.rows.view(), layer.rows()
        inside = view.head_positions >= 3
        assert torch.equal(layer.lengths, inside.sum(-1)[0])
        assert torch.equal(rows.keys[rows.valid], view.keys[inside])
        assert torch.equal(rows.values[rows.valid], view.values[inside])
        assert torch.equal(rows.head_positions[rows.valid].long(), view.head_positions[inside].long() - 3)


@torch.no_grad()
def test_tokens_of_an_evicted_passage_are_not_taken_back(tiny_model: Models) -> None:
    """What follows can be taken back; the passage itself cannot, once rows of it are gone."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    kept = ChunkKV.from_cache(cache_of(model, ids, "snapkv(budget=20, window=8)"), ids).to_cache(model)
    before = kept.layers[0].keys.clone()
    continued(model, kept, steps=3)
    kept.crop(-8)
    assert kept.seen_tokens == 40 and torch.equal(kept.layers[0].keys, before)
    with pytest.raises(CacheStateError, match="already dropped"):
        kept.crop(-1)
    whole = ChunkKV.from_cache(cache_of(model, ids), ids).to_cache(model)
    whole.crop(-10)
    assert whole.seen_tokens == 30 and whole.layers[0].keys.shape[2] == 30


@torch.no_grad()
def test_one_row_of_a_padded_batch(tiny_model: Models) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([12, 30])
    where = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = cache_of(model, ids, attention_mask=mask, position_ids=where)
    chunk = ChunkKV.from_cache(cache, ids[0, -12:], row=0)
    alone = ChunkKV.from_cache(cache_of(model, ids[:1, -12:]), ids[0, -12:])
    for layer, other in zip(chunk.layers, alone.layers, strict=True):
        assert layer.is_whole
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


@torch.no_grad()
def test_refusals_are_one_sentence(tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = cache_of(model, ids)
    with pytest.raises(DataError, match="an id per token"):
        ChunkKV.from_cache(cache, ids[:, :-1])
    with pytest.raises(DataError, match="leaves nothing"):
        ChunkKV.from_cache(cache, ids, start=40)
    with pytest.raises(CacheStateError, match="parked"):
        ChunkKV.from_cache(cache_of(model, ids, "snapkv(budget=16, window=8)+park"), ids)
    with pytest.raises(CacheStateError, match="streams"):
        ChunkKV.from_cache(cache_of(model, ids, "streamingllm(budget=16, positions='slot')"), ids)
    coded = ChunkKV.from_cache(cache_of(model, ids, "int8"), ids)
    with pytest.raises(SpecError, match="go on under it"):
        coded.to_cache(model, "fullkv")
    with pytest.raises(CacheStateError, match="compressed"):
        _ = coded.layers[0].keys
    with pytest.raises(DataError, match="attention layers"):
        ChunkKV.from_cache(cache, ids).to_cache(tiny_model("llama", num_hidden_layers=3))


@pytest.mark.filterwarnings("ignore::kvfoundry.coding.LossyCodecWarning")
@pytest.mark.parametrize("spec", ["fullkv", "adakv(budget=20, window=8)", "int8", "think"])
@torch.no_grad()
def test_odd_tensors_and_metadata_are_refused(spec: str, tiny_model: Models) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 60)
    chunk = ChunkKV.from_cache(cache_of(model, ids, spec), ids)
    for name in chunk.tensors():
        rest = {other: tensor for other, tensor in chunk.tensors().items() if other != name}
        required = not name.startswith(("0.keys.", "0.values.", "1.keys.", "1.values.")) or name.endswith("counts")
        if required and "positions" not in name:
            with pytest.raises(DataError):
                ChunkKV.from_tensors(rest, chunk.metadata())
    good = chunk.metadata()
    odd = [{"format": "x"}, {"dtype": "load"}, {"start": -1}, {"start": True}, {"method": 7}, {"layers": []}]
    odd += [{"layers": [{"form": "pickled", "heads": 2}] * 2}, {"layers": [{"form": "whole"}] * 2}, {"layers": 5}]
    for change in odd:
        with pytest.raises(DataError):
            ChunkKV.from_tensors(chunk.tensors(), good | change)
