"""A prompt in pieces takes the memory of a budget and a piece, however long it is: rows and all tensors are counted."""

from __future__ import annotations

import pytest
import torch
from tiny_models import KV_HEADS, random_ids
from torch import Tensor

import kvfoundry
from kvfoundry.feeding import feed
from kvfoundry.layer import CacheLayer

from .support import LargestTensor

BUDGET, PIECE = 32, 64
SPECS = ["snapkv(budget=32, window=8)", "tova(budget=32)", "streamingllm(budget=32)", "keydiff(budget=32)",
         "snapkv(budget=32, window=8)+headinfer()", "adakv(budget=32, window=8)"]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_never_holds_more_than_the_budget_and_a_piece(spec, tiny_model, monkeypatch):
    """Looked at when rows were just stored; one layer is that large, all others hold their budget."""
    model, store = tiny_model("llama", num_hidden_layers=3), CacheLayer._store
    cache = kvfoundry.KVCache(model, spec)
    held, bytes_held = [], []

    def stored(layer: CacheLayer, *args: Tensor) -> None:
        store(layer, *args)
        held.append([int(each.lengths.sum()) if each.rows is not None else 0 for each in cache.attention_layers])
        bytes_held.append(cache.nbytes + cache.host_nbytes)

    monkeypatch.setattr(CacheLayer, "_store", stored)
    cache.expect_prompt(1500)
    with torch.inference_mode():
        feed(model, random_ids(1, 1500), None, cache, PIECE, 1500)
    assert len(held) == 3 * 24
    for rows in held[3:]:
        assert sorted(rows)[-1] <= KV_HEADS * (BUDGET + PIECE) and sorted(rows)[-2] <= KV_HEADS * BUDGET
    early, late = max(bytes_held[6:12]), max(bytes_held[-6:])
    assert late <= 1.01 * early
    assert cache.seen_tokens == 1500 and cache.kept_rows == BUDGET


@pytest.mark.parametrize("spec", ["snapkv(budget=32, window=8)", "streamingllm(budget=32)"])
@pytest.mark.parametrize("marked", [False, True])
def test_no_tensor_follows_the_prompt(spec, marked, tiny_model):
    """No mask, no position, no logit of more tokens than a piece has; ids stay where they are."""
    model, largest = tiny_model("llama"), []
    for tokens in (6 * PIECE, 300 * PIECE):
        cache = kvfoundry.KVCache(model, spec)
        cache.expect_prompt(tokens)
        ids = random_ids(1, tokens)
        mask = torch.ones_like(ids) if marked else None
        with torch.inference_mode():
            if mask is not None:
                assert bool(mask.all())
            with LargestTensor() as meter:
                feed(model, ids, mask, cache, PIECE, tokens)
        largest.append(meter.numel)
    assert largest[0] == largest[1]


def test_pieces_without_a_mask_say_what_pieces_with_one_say(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 200)
    caches = [kvfoundry.KVCache(model, "snapkv(budget=32, window=8)") for _ in range(2)]
    with torch.inference_mode():
        for cache, mask in zip(caches, (None, torch.ones_like(ids)), strict=True):
            cache.expect_prompt(200)
            feed(model, ids, mask, cache, 64, 200)
        said = [model(ids[:, :1], past_key_values=cache, use_cache=True).logits for cache in caches]
    assert torch.equal(*said)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(*(c.attention_layers for c in caches), strict=True))


def test_a_padded_prompt_in_pieces_keeps_its_mask(tiny_model):
    """Every row of the batch as alone, also where a piece has no padding but an earlier one had."""
    model, ids = tiny_model("llama"), random_ids(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :90] = 0
    together, alone = (kvfoundry.KVCache(model, "snapkv(budget=32, window=8)") for _ in range(2))
    with torch.inference_mode():
        together.expect_prompt(200)
        feed(model, ids, mask, together, 200, 200)
        alone.expect_prompt(110)
        feed(model, ids[1:, 90:], None, alone, 110, 110)
    for layer, other in zip(together.attention_layers, alone.attention_layers, strict=True):
        assert torch.equal(layer.positions[1], other.positions[0])
