"""MiniCache: rows of two layers share a direction. What is stored, what is read, and that pairs stay together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from laws.support import forward_pieces, greedy
from tiny_models import build, left_padded, random_ids
from torch import Tensor
from transformers import DynamicCache

import kvfoundry
from kvfoundry.codecs.minicache import LayerPairs, merge_rows
from kvfoundry.errors import CacheStateError, DataError, SpecError, UnsupportedModelError
from kvfoundry.kernels.attention import backend
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading
from kvfoundry.layouts.pair_store import MiniCachePairStore
from kvfoundry.layouts.paired import PairedRows
from kvfoundry.method import Method
from kvfoundry.pairing import LayerPair, far_apart
from kvfoundry.prompt import Prompt

from .support import LargestTensor

ALL = "minicache(start=0.0)"
EXACT = "minicache(start=0.0, retention=1.0)"  # every row retained: the full cache, by another way


def rows(tokens: int, seed: int, batch: int = 1, heads: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pair_of_layers(spec: str = ALL) -> LayerPair:
    """Two layers by hand, as a cache would bind them."""
    method, prompt = Method.parse(spec), Prompt()
    layers = [CacheLayer(method, layer_idx=i, num_layers=2, prompt=prompt) for i in range(2)]
    pair = LayerPair(MiniCachePairStore(method.pairs.t, method.pairs.retention), (0, 1), *layers)
    pair.bind()
    return pair


def feed(pair: LayerPair, earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], pieces: list[int]) -> None:
    start = 0
    for size in pieces:
        at = slice(start, start + size)
        for layer, (keys, values) in ((pair.earlier, earlier), (pair.later, later)):
            layer.step(keys[:, :, at], keys[:, :, at], values[:, :, at])
        start += size


def stored(pair: LayerPair) -> dict[str, Tensor]:
    """Everything that the store holds, by name, in the parts that are in use."""
    merged = pair.store.pair(*pair.numbers)
    view = merged.directions.view()
    found = {"keys": view.keys, "values": view.values, "positions": view.positions}
    found |= {f"magnitude of {name}": column for name, column in merged.magnitudes.items()}
    for side, retained in merged.retained.items():
        found |= {f"slots of {side}": retained.slots, f"bound of {side}": retained.bound}
        found |= {f"rows of {side} {half}": exact for half, exact in retained.rows.items()}
    return found


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_the_pairs_of_a_model():
    assert LayerPairs(0.5, 0.6, 0.05).of(8) == [(4, 5), (6, 7)]
    assert LayerPairs(0.5, 0.6, 0.05).of(6) == [(4, 5)]  # layer 3 would pair with 2, which is in front of the middle
    assert LayerPairs(0.0, 0.6, 0.05).of(5) == [(0, 1), (2, 3)]
    assert LayerPairs(1.0, 0.6, 0.05).of(4) == []


def test_a_row_is_its_direction_times_its_length():
    (k0, v0), (k1, v1) = rows(60, 1), rows(60, 2)
    store = MiniCachePairStore(t=0.6, retention=0.1)
    store.merge_pair(3, 4, (k0, v0), (k1, v1))
    pair, retained = store.restore_pair(3, 4), store.retention_indices(3, 4)
    for side, old, new, ours, other, slots in (
        ("keys", k0, k1, pair.earlier.keys, pair.later.keys, retained.keys),
        ("values", v0, v1, pair.earlier.values, pair.later.values, retained.values),
    ):
        assert slots.shape == (1, 2, 6), side
        merged = merge_rows(old, new, 0.6)
        assert torch.equal(slots, merged.angle.topk(6).indices.sort().values)
        kept = torch.zeros(1, 2, 60, dtype=torch.bool).scatter(2, slots, True)
        assert torch.equal(ours[kept], old[kept]) and torch.equal(other[kept], new[kept])
        for found, source in ((ours, old), (other, new)):
            torch.testing.assert_close(found.norm(dim=-1), source.norm(dim=-1))
            unit = found / found.norm(dim=-1, keepdim=True)
            torch.testing.assert_close(unit[~kept], merged.direction[~kept])


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_the_direction_lies_between_the_rows(t):
    """At the ends it is one of them; between, the angles to both are the shares of the whole angle."""
    (k0, _), (k1, _) = rows(40, 3), rows(40, 4)
    merged = merge_rows(k0, k1, t)
    for row, share in ((k0, t), (k1, 1 - t)):
        cosine = (merged.direction * row / row.norm(dim=-1, keepdim=True)).sum(-1).clamp(-1, 1)
        torch.testing.assert_close(torch.arccos(cosine), share * merged.angle, rtol=1e-3, atol=1e-3)


def test_the_store_knows_its_pairs():
    store = MiniCachePairStore()
    first, second = rows(30, 1), rows(30, 2)
    assert not store.has_pair(0, 1)
    store.merge_pair(0, 1, first, second)
    store.merge_pair(2, 3, second, first)
    assert store.has_pair(0, 1) and store.has_pair(1, 0) and store.has_pair(2, 3) and not store.has_pair(1, 2)
    turned = MiniCachePairStore()
    turned.merge_pair(1, 0, second, first)  # the same pair, named the other way round
    assert torch.equal(turned.restore_pair(0, 1).later.keys, store.restore_pair(1, 0).later.keys)
    store.clear_pair(0, 1)
    assert not store.has_pair(0, 1) and store.has_pair(2, 3)
    with pytest.raises(CacheStateError, match="layers 0 and 1 have no merged rows"):
        store.restore_pair(0, 1)
    store.clear()
    assert not store.has_pair(2, 3)


@pytest.mark.parametrize("call", ["has_pair", "restore_pair", "retention_indices", "clear_pair"])
def test_a_layer_is_no_pair_with_itself(call):
    with pytest.raises(CacheStateError, match="layer 2 cannot be merged with itself"):
        getattr(MiniCachePairStore(), call)(2, 2)
    with pytest.raises(CacheStateError, match="layer 2 cannot be merged with itself"):
        MiniCachePairStore().merge_pair(2, 2, rows(4, 1), rows(4, 2))


def test_rows_that_do_not_fit_together_are_refused():
    with pytest.raises(UnsupportedModelError, match="layers 0 and 1 cannot be merged"):
        MiniCachePairStore().merge_pair(0, 1, rows(8, 1, heads=2), rows(8, 2, heads=4))
    bad = rows(8, 1)
    bad[1][0, 0, 3, 3] = torch.inf
    with pytest.raises(DataError, match="layer 1 has keys or values that are not finite"):
        MiniCachePairStore().merge_pair(0, 1, rows(8, 2), bad)


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", [0.0, 0.05, 0.3, 1.0])
def test_decode_in_any_pieces_stores_the_same(retention):
    earlier, later = rows(200, 1, batch=2), rows(200, 2, batch=2)
    found = []
    for pieces in ([1] * 160, [7] * 22 + [6], [160]):
        pair = pair_of_layers(f"minicache(start=0.0, retention={retention})")
        feed(pair, earlier, later, [40, *pieces])
        found.append(stored(pair))
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for name, tensor in found[0].items():
            assert torch.equal(tensor, other[name]), name
    counts = (found[0]["slots of keys"] != torch.iinfo(torch.int32).max).sum(-1)
    assert bool((counts <= -(-200 * retention // 1)).all())
    if retention == 1.0:
        assert bool((counts == 200).all())


def test_a_prompt_in_pieces_is_the_prompt():
    """Announced pieces wait for the end; the rows of both layers are whole until then."""
    earlier, later = rows(90, 1), rows(90, 2)
    whole, pieces = pair_of_layers(), pair_of_layers()
    feed(whole, earlier, later, [90])
    pieces.earlier.prompt.tokens = 90
    feed(pieces, earlier, later, [30, 30, 29])
    assert not pieces.store.has_pair(0, 1)
    feed(pieces, tuple(t[:, :, 89:] for t in earlier), tuple(t[:, :, 89:] for t in later), [1])
    for name, tensor in stored(whole).items():
        assert torch.equal(tensor, stored(pieces)[name]), name


def test_new_rows_are_exact_while_they_are_new():
    """The earlier layer reads its own new row, and stores nothing before the later one has read its own."""
    earlier, later = rows(50, 1), rows(50, 2)
    pair = pair_of_layers("minicache(start=0.0, retention=0.0)")
    feed(pair, earlier, later, [49])
    (keys, values), at = earlier, slice(49, 50)
    before = pair.earlier.keys
    output = pair.earlier.step(keys[:, :, at], keys[:, :, at], values[:, :, at])
    assert torch.equal(pair.earlier.keys[:, :, 49:], keys[:, :, at])
    whole = torch.cat([before, keys[:, :, at]], dim=2)
    restored = torch.cat([pair.store.restore_pair(0, 1).earlier.values, values[:, :, at]], dim=2)
    weights = (keys[:, :, at] @ whole.transpose(-1, -2) / 4).softmax(dim=-1)
    torch.testing.assert_close(output, weights @ restored)
    pair.later.step(later[0][:, :, at], later[0][:, :, at], later[1][:, :, at])
    assert not torch.equal(pair.earlier.keys[:, :, 49:], keys[:, :, at])
    torch.testing.assert_close(pair.earlier.keys[:, :, 49:].norm(dim=-1), keys[:, :, at].norm(dim=-1))


# --- in a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "phi3"])
def test_decode_reads_the_restored_rows(family, tiny_model, reference_model):
    """Logits after the prompt are those of a stock cache that holds the restored rows."""
    ids = random_ids(2, 70)
    cache = kvfoundry.KVCache(tiny_model(family), ALL)
    forward_pieces(tiny_model(family), cache, ids[:, :60], [60])
    stock = DynamicCache()
    for i, layer in enumerate(cache.layers):
        assert isinstance(layer.rows, PairedRows)
        stock.update(layer.keys.clone(), layer.values.clone(), i)
    found = forward_pieces(tiny_model(family), cache, ids[:, 60:], [10])
    wanted = forward_pieces(reference_model(family), stock, ids[:, 60:], [10])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_in_front_of_the_start_are_untouched(tiny_model):
    model, ids = tiny_model("llama", num_hidden_layers=5), random_ids(1, 40)
    cache, full = kvfoundry.KVCache(model, "minicache(start=0.4)"), kvfoundry.KVCache(model)
    forward_pieces(model, cache, ids, [40])
    forward_pieces(model, full, ids, [40])
    assert [pair.numbers for pair in cache.pairs] == [(2, 3)]
    for i in (0, 1, 4):
        torch.testing.assert_close(cache.layers[i].keys, full.layers[i].keys)
    assert all(isinstance(cache.layers[i].rows, PairedRows) for i in (2, 3))


def test_with_everything_retained_it_is_the_full_cache(tiny_model):
    model = tiny_model("llama", num_hidden_layers=4)
    ids, mask = left_padded([40, 23, 9])
    for options in ({}, {"num_beams": 3}):
        full, merged = (
            model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0,
                past_key_values=kvfoundry.KVCache(model, spec), **options,
            )
            for spec in (None, EXACT)
        )  # fmt: skip
        assert torch.equal(full, merged)
    lookup = dict(prompt_lookup_num_tokens=3, max_new_tokens=20, do_sample=False, pad_token_id=0)
    ids = random_ids(1, 12).repeat(1, 4)
    assert torch.equal(
        model.generate(ids, past_key_values=kvfoundry.KVCache(model, EXACT), **lookup),
        model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0),
    )


def test_each_row_of_a_batch_equals_its_single_run(tiny_model):
    model = tiny_model("llama", num_hidden_layers=4)
    ids, mask = left_padded([60, 31, 7])
    together = kvfoundry.KVCache(model, "minicache(start=0.5, retention=0.2)")
    more = random_ids(3, 9, seed=5)
    ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
    found = forward_pieces(model, together, ids, [60, 1, 7, 1], mask)
    for row, length in enumerate([60, 31, 7]):
        alone = kvfoundry.KVCache(model, "minicache(start=0.5, retention=0.2)")
        own = forward_pieces(model, alone, ids[row : row + 1, 60 - length :], [length, 1, 7, 1])
        torch.testing.assert_close(found[row, 60 - length :], own[0], rtol=1e-3, atol=1e-3)
        for ours, single in zip(together.layers, alone.layers, strict=True):
            rows_here = length + 9
            torch.testing.assert_close(ours.keys[row, :, :rows_here], single.keys[0], rtol=1e-3, atol=1e-3)
            assert ours.lengths[row].tolist() == single.lengths[0].tolist() == [rows_here] * 2


def prefilled(model, spec: str = "minicache(start=0.0, retention=0.2)", batch: int = 3) -> kvfoundry.KVCache:
    cache = kvfoundry.KVCache(model, spec)
    forward_pieces(model, cache, random_ids(batch, 46), [40, 1, 5])
    return cache


def contents(cache: kvfoundry.KVCache) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.attention_layers]


def retention(cache: kvfoundry.KVCache) -> list[Tensor]:
    return [cache.pairs[0].store.retention_indices(*pair.numbers).keys for pair in cache.pairs]


STATE: dict[str, tuple[Callable[[kvfoundry.KVCache], None], Callable[[Tensor], Tensor]]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 2])), lambda t: t[[2, 0, 2]]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, dim=0)),
    "crop": (lambda c: c.crop(-9), lambda t: t[:, :, :-9]),
}


@pytest.mark.parametrize("name", STATE)
def test_both_layers_of_a_pair_follow(name, tiny_model):
    model = tiny_model("llama", num_hidden_layers=4)
    cache, (act, expected) = prefilled(model), STATE[name]
    before, exact = contents(cache), retention(cache)
    act(cache)
    for (keys, values), (old_keys, old_values) in zip(contents(cache), before, strict=True):
        assert torch.equal(keys, expected(old_keys)) and torch.equal(values, expected(old_values))
    for now, then in zip(retention(cache), exact, strict=True):
        left = then.where(then < 37, -1) if name == "crop" else expected(then)
        assert torch.equal(now.sort().values[..., -5:], left.sort().values[..., -5:])
    ids = random_ids(cache.layers[0].lengths.shape[0], 4, seed=9)
    assert bool(forward_pieces(model, cache, ids, [1, 3]).isfinite().all())
    assert {int(n) for layer in cache.layers for n in layer.lengths.flatten()} == {37 + 4 if name == "crop" else 50}


def test_a_fork_goes_its_own_way(tiny_model):
    model = tiny_model("llama", num_hidden_layers=4)
    cache = prefilled(model)
    before, size = contents(cache), cache.nbytes
    twin, other = cache.fork(), copy.deepcopy(cache)
    assert all(pair.store is not cache.pairs[0].store for pair in twin.pairs)
    more = random_ids(3, 6, seed=3)
    found = forward_pieces(model, twin, more, [1, 5])
    assert torch.equal(found, forward_pieces(model, other, more, [1, 5]))
    assert cache.nbytes == size
    for (keys, values), (old_keys, old_values) in zip(contents(cache), before, strict=True):
        assert torch.equal(keys, old_keys) and torch.equal(values, old_values)
    twin.reset()
    assert twin.nbytes == 0 and cache.nbytes == size
    assert torch.equal(forward_pieces(model, cache, more, [1, 5]), found)


def test_a_reset_cache_is_a_new_cache(tiny_model):
    model, ids = tiny_model("llama", num_hidden_layers=4), random_ids(2, 33, seed=2)
    cache = prefilled(model)
    cache.reset()
    assert cache.nbytes == cache.peak_nbytes == cache.seen_tokens == 0 and not cache.pairs[0].store.has_pair(0, 1)
    fresh = kvfoundry.KVCache(model, "minicache(start=0.0, retention=0.2)")
    assert torch.equal(greedy(model, cache, ids), greedy(model, fresh, ids))
    assert cache.nbytes == fresh.nbytes and cache.peak_nbytes == fresh.peak_nbytes
    cache.crop(-cache.seen_tokens)
    assert cache.nbytes == 0 and not cache.pairs[0].store.has_pair(0, 1)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_real_bytes_from_the_middle_layer_on():
    """At 4,096 tokens and head size 128: at most 0.80 of bf16, every storage counted once."""
    model = build("llama", num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=128)
    model = model.to(torch.bfloat16)
    cache, tokens = kvfoundry.KVCache(model, "minicache"), 4096
    forward_pieces(model, cache, random_ids(1, tokens), [tokens])
    bf16 = 4 * 2 * 2 * tokens * 128 * 2
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for x in cache.layers for t in x.tensors()}
    assert cache.nbytes == sum(storages.values()) == sum(layer.nbytes for layer in cache.layers)
    assert cache.nbytes <= 0.80 * bf16
    assert sum(layer.nbytes for layer in cache.layers[2:]) <= 0.60 * bf16 / 2
    assert cache.layers[3].nbytes < 0.1 * cache.layers[2].rows._merged.directions.view().keys.nbytes * 2
    assert cache.peak_nbytes <= 1.01 * bf16


def test_attention_restores_tile_by_tile():
    earlier, later = rows(3000, 1, heads=1), rows(3000, 2, heads=1)
    pair = pair_of_layers()
    feed(pair, earlier, later, [3000])
    query = torch.randn(1, 4, 1, 16)
    with LargestTensor() as largest:
        pair.later.rows.append(*(t[:, :, :1] for t in later), torch.tensor([[3000]]), None, 3000)
        pair.later.rows.attend(query, torch.tensor([[3000]]), Reading(backend("sdpa"), 0.25))
    assert largest.numel <= 513 * 16  # one tile, not 3,000 rows


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, message",
    [
        ("minicache(t=1.5)", "t must be from 0 to 1"),
        ("minicache(start=-1)", "start must be from 0 to 1"),
        ("minicache(retention=nan)", "retention must be a finite number"),
        ("snapkv(budget=64)+minicache", "choose for themselves which rows they drop"),
        ("minicache+quest(budget=64)", "not read by pages"),
        ("minicache+kivi", "both set how rows are stored"),
        ("minicache+think", "both set how rows are stored"),
        ("minicache+protect(sinks=2)", "nothing to act on"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused(spec, message):
    with pytest.raises(SpecError, match=message):
        Method.parse(spec)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_layers_of_different_kinds_are_refused_by_name(family, tiny_model):
    with pytest.raises(UnsupportedModelError, match=r"model_type.*layers 0 and 1 are of different kinds"):
        kvfoundry.KVCache(tiny_model(family), ALL)


def test_it_says_when_it_acts_on_no_layer(tiny_model):
    for family in ("llama", "mistral"):
        cache = kvfoundry.KVCache(tiny_model(family), "minicache" if family == "llama" else ALL)
        assert "acts on no layer" in cache.notes[0]
        assert torch.equal(
            greedy(tiny_model(family), cache, random_ids(1, 30)), greedy(tiny_model(family), None, random_ids(1, 30))
        )


def test_it_says_when_the_layers_of_a_pair_have_little_in_common(tiny_model):
    cache = kvfoundry.KVCache(tiny_model("llama"), ALL)
    assert cache.notes == []
    forward_pieces(tiny_model("llama"), cache, random_ids(1, 40), [40])
    sides = [merge_rows(old, new, 0.6).angle for old, new in zip(*exact_rows(tiny_model), strict=True)]
    degrees = float(torch.stack(sides).mean()) * 180 / math.pi
    assert f"layers 0 and 1 are {degrees:.0f} degrees apart" in cache.notes[0]
    assert cache.fork().notes == cache.notes
    cache.reset()
    assert cache.notes == []
    alike = pair_of_layers()
    feed(alike, rows(40, 1), rows(40, 1), [40])
    assert far_apart(Method.parse(ALL), alike.store) == []


def exact_rows(tiny_model) -> list[tuple[Tensor, Tensor]]:
    full = kvfoundry.KVCache(tiny_model("llama"))
    forward_pieces(tiny_model("llama"), full, random_ids(1, 40), [40])
    return [(layer.keys, layer.values) for layer in full.layers]


def test_tensors_of_one_layer_are_not_enough():
    with pytest.raises(SpecError, match="needs the rows of neighbouring layers"):
        Method.parse("minicache").compress(*(torch.randn(1, 2, 8, 16) for _ in range(3)))
