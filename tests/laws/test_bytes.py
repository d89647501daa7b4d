"""Law 5: bytes are real. Reported sizes are compared with memory that is counted without asking the cache."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from tiny_models import EVICTABLE, KV_HEADS, QUERY_HEADS, left_padded, random_ids
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.host import HostPart
from kvfoundry.layouts.parked import ParkedRows

from .support import BUDGETED, NAMES, crossed, forward_pieces, granularities, small_spec

TOKENS = 400


@pytest.fixture
def only_new_tensors() -> None:
    """`live_bytes` then counts what was made during the test."""
    gc.collect()
    gc.freeze()  # and left so: what is there now is looked at by no later collection


def live_bytes() -> int:
    """Bytes of every distinct tensor storage that Python keeps alive."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def reachable_bytes(root: Any, *, on_host: bool = False) -> int:
    """Bytes of every distinct storage reachable through attributes and containers of `root`.

    on_host: only those of rows that are parked or streamed from there; otherwise all others.
    """
    storages, seen, todo, aside = {}, set(), [root], []
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (ParkedRows, HostPart)) and thing is not root:
            aside.append(thing)
            continue
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            todo += thing
        elif type(thing).__module__.startswith("kvfoundry") and hasattr(thing, "__dict__"):
            todo += vars(thing).values()
    return sum(reachable_bytes(thing) for thing in aside) if on_host else sum(storages.values())


@pytest.mark.parametrize(("name", "given"), granularities(NAMES))
def test_reported_bytes_are_the_bytes_of_the_storages(name, given, tiny_model, only_new_tensors):
    """B28: within 5 % of what is alive, after the prompt, after decode, and for a padded batch."""
    model = tiny_model("llama")
    ids, mask = left_padded([TOKENS, TOKENS - 150])
    ids = torch.cat([ids, ids[:, -20:]], dim=1)
    mask = torch.cat([mask, mask[:, -20:]], dim=1)
    before = live_bytes()
    cache = kvfoundry.KVCache(model, small_spec(name, 100, **given))
    for pieces in ([TOKENS], [1] * 17, [3]):
        forward_pieces(model, cache, ids[:, cache.seen_tokens :], pieces, mask)
        # lengths and the like, a few numbers per layer, are not counted
        assert cache.nbytes == pytest.approx(reachable_bytes(cache), rel=0.02, abs=500)
        assert cache.host_nbytes == pytest.approx(reachable_bytes(cache, on_host=True), rel=0.02)
        assert cache.nbytes + cache.host_nbytes == pytest.approx(live_bytes() - before, rel=0.05)
    cache.reset()
    assert cache.nbytes == cache.host_nbytes == 0 and live_bytes() - before < 2000


@pytest.mark.parametrize(("name", "family"), crossed(BUDGETED, EVICTABLE))
def test_a_dropped_row_frees_its_memory(name, family, tiny_model):
    """B26, B27: at a share of 0.5 at most 0.55 of the full cache, at 0.25 at most 0.30, counted by storages."""
    full = full_layer_bytes(tiny_model(family))
    assert layer_bytes(tiny_model(family), small_spec(name, 0.5)) <= 0.55 * full
    assert layer_bytes(tiny_model(family), small_spec(name, 0.25)) <= 0.30 * full


def layer_bytes(model: PreTrainedModel, spec: str) -> int:
    """Bytes of the layers without a window that have read the prompt."""
    cache = kvfoundry.KVCache(model, spec)
    forward_pieces(model, cache, random_ids(1, TOKENS), [TOKENS])
    return sum(reachable_bytes(layer) for layer in cache.attention_layers if layer.rule.span is None)


@functools.cache
def full_layer_bytes(model: PreTrainedModel) -> int:
    return layer_bytes(model, "fullkv")


@pytest.mark.parametrize("name", NAMES)
def test_grouped_heads_are_not_expanded(name, tiny_model):
    """B26: stored tensors have the model's 2 KV heads, not its 8 query heads."""
    model = tiny_model("qwen3")
    cache = kvfoundry.KVCache(model, small_spec(name))
    forward_pieces(model, cache, random_ids(1, 45), [40, 1, 4])
    for layer in cache.attention_layers:
        assert layer.keys.shape[1] == layer.values.shape[1] == layer.lengths.shape[1] == KV_HEADS


def test_query_head_granularity_pays_for_its_heads(tiny_model):
    model = tiny_model("llama")
    sizes = {}
    for granularity in ("kv_head", "query_head"):
        cache = kvfoundry.KVCache(model, f"snapkv(budget=16, window=4, granularity={granularity})")
        forward_pieces(model, cache, random_ids(1, 80), [80])
        sizes[granularity] = cache.nbytes
    assert sizes["query_head"] == pytest.approx(sizes["kv_head"] * QUERY_HEADS / KV_HEADS, rel=0.05)


class PeakMeter:
    """Bytes of all layers, looked at right after every layer has stored its new rows and after it has read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: kvfoundry.KVCache):
        self.peak = 0
        store, read = CacheLayer._store, CacheLayer._read

        def look() -> None:
            self.peak = max(self.peak, reachable_bytes(cache.attention_layers))

        def stored(layer: CacheLayer, *args: Any) -> None:
            store(layer, *args)
            look()

        def has_read(layer: CacheLayer, *args: Any, **kwargs: Any) -> Any:
            output = read(layer, *args, **kwargs)
            look()
            return output

        monkeypatch.setattr(CacheLayer, "_store", stored)
        monkeypatch.setattr(CacheLayer, "_read", has_read)


@pytest.mark.parametrize("pieces", [[TOKENS], [100] * 4, [40] * 10])
@pytest.mark.parametrize("name", NAMES)
def test_the_reported_peak_is_the_peak(name, pieces, tiny_model, monkeypatch):
    model, ids = tiny_model("llama", num_hidden_layers=4), random_ids(1, TOKENS + 1)
    cache = kvfoundry.KVCache(model, small_spec(name, 60, layers=4))
    meter = PeakMeter(monkeypatch, cache)
    cache.expect_prompt(TOKENS)
    forward_pieces(model, cache, ids, [*pieces, 1])
    assert cache.peak_nbytes == pytest.approx(meter.peak, rel=0.05)


@pytest.mark.parametrize("name", BUDGETED)
def test_eviction_after_each_piece_lowers_the_peak(name, tiny_model):
    """B27: 4 layers, budget 60 of 400 tokens, pieces of 40: the peak is below half of the full cache."""
    model, ids = tiny_model("llama", num_hidden_layers=4), random_ids(1, TOKENS)
    full = kvfoundry.KVCache(model)
    forward_pieces(model, full, ids, [TOKENS])
    cache = kvfoundry.KVCache(model, small_spec(name, 60, layers=4))
    cache.expect_prompt(TOKENS)
    forward_pieces(model, cache, ids, [40] * 10)
    assert cache.peak_nbytes < 0.5 * full.peak_nbytes


def test_a_window_layer_holds_its_window_and_a_little_more(tiny_model):
    """Rows that no later query reaches are freed; 64 tokens stay for a rollback, and decode trims in strides of 64."""
    model = tiny_model("mistral")
    cache = kvfoundry.KVCache(model)
    forward_pieces(model, cache, random_ids(1, 600), [400] + [1] * 200)
    for layer in cache.attention_layers:
        assert 15 <= int(layer.lengths.max()) <= 15 + 2 * 64


def test_spare_slots_of_decode_stay_a_small_share(tiny_model):
    model = tiny_model("llama")
    cache = kvfoundry.KVCache(model)
    forward_pieces(model, cache, random_ids(1, 700), [600] + [1] * 100)
    exact = kvfoundry.KVCache(model)
    forward_pieces(model, exact, random_ids(1, 700), [700])
    assert exact.nbytes <= cache.nbytes <= 1.07 * exact.nbytes
