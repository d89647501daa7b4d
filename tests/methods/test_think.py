"""ThinK: keys in the channels that the queries ask for. What is stored, what is read, and that all parts move."""

from __future__ import annotations

import pytest
import torch
from laws.support import forward_pieces, greedy, random_rows
from tiny_models import build, left_padded, random_ids
from torch import Tensor
from transformers import DynamicCache

import kvfoundry
from kvfoundry.codecs.think import channel_scores, kept_channels
from kvfoundry.errors import CacheStateError, DataError, SpecError
from kvfoundry.kernels.attention import backend, naive
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts.base import Reading
from kvfoundry.layouts.channel_pruned import ChannelPrunedRows
from kvfoundry.method import Method
from kvfoundry.visibility import Visibility

from .support import LargestTensor

# --- which channels ---------------------------------------------------------------------------------------------------


def test_scores_are_the_energies_of_query_and_key():
    query, key, _ = random_rows(2, 6, 3, 20)
    scores = channel_scores(query, key, torch.ones(2, 3, 20, dtype=torch.bool))
    for head in range(3):
        asked = query[:, 2 * head : 2 * head + 2].square().mean(dim=(1, 2))
        torch.testing.assert_close(scores[:, head], asked * key[:, head].square().mean(dim=1))


@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.99])
def test_the_lowest_channels_go(dim, ratio):
    scores = torch.rand(2, 3, dim)
    channels = kept_channels(scores, ratio)
    assert channels.shape == (2, 3, dim - int(dim * ratio)) and bool((channels.diff(dim=-1) > 0).all())
    gone = torch.ones_like(scores, dtype=torch.bool).scatter(2, channels, False)
    left = scores.gather(2, channels).amin(dim=-1)
    assert bool((scores.masked_fill(~gone, -1.0).amax(dim=-1) <= left).all())


def test_one_channel_that_both_sides_use_survives_any_ratio():
    query, key, value = random_rows(1, 4, 2, 60)
    query[..., 5] *= 100
    layer = Method.parse("think(ratio=0.9, window=8)").compress(query, key, value)
    assert bool((layer.rows.channels == 5).any(dim=-1).all())


# --- what is stored ---------------------------------------------------------------------------------------------------


def stored(layer: CacheLayer) -> dict[str, Tensor]:
    assert isinstance(layer.rows, ChannelPrunedRows)
    view = layer.rows.view()
    found = {"keys": view.keys, "values": view.values, "positions": view.positions, "channels": layer.rows.channels}
    return found | {"pruned": layer.rows.pruned_lengths}


def test_old_keys_lose_channels_and_the_newest_rows_lose_none():
    query, key, value = random_rows(2, 4, 2, 50)
    layer = Method.parse("think(ratio=0.5, window=8, recent=6)").compress(query, key, value)
    whole = torch.zeros(2, 2, 16, dtype=torch.bool).scatter(2, layer.rows.channels, True)[:, :, None]
    assert torch.equal(layer.keys[:, :, :44], key[:, :, :44] * whole) and torch.equal(
        layer.keys[:, :, 44:], key[:, :, 44:]
    )
    assert torch.equal(layer.values, value)
    old = next(t for t in layer.rows.tensors() if t.shape[-1] == 8)
    assert old.shape == (2, 2, 44, 8)  # nothing is stored in place of a dropped channel


def test_a_prompt_shorter_than_the_recent_rows_stays_whole_for_now():
    query, key, value = random_rows(1, 4, 2, 5)
    layer = Method.parse("think(recent=8, block=4)").compress(query, key, value)
    assert torch.equal(layer.keys, key) and int(layer.rows.pruned_lengths.max()) == 0
    for _ in range(20):
        layer.step(*(t[:, :, :1] for t in random_rows(1, 4, 2, 1)))
    assert int(layer.rows.pruned_lengths.max()) == 16


@pytest.mark.parametrize("recent, block", [(0, 1), (0, 32), (5, 3), (32, 32)])
def test_decode_in_any_pieces_stores_the_same(recent, block):
    query, key, value = random_rows(2, 4, 2, 200)
    found = []
    for pieces in ([1] * 160, [7] * 22 + [6], [160]):
        layer = CacheLayer(Method.parse(f"think(window=8, recent={recent}, block={block})"))
        start = 0
        for size in (40, *pieces):
            layer.step(*(t[:, :, start : start + size] for t in (query, key, value)))
            start += size
        found.append(stored(layer))
        whole = layer.lengths - layer.rows.pruned_lengths
        assert bool((whole < recent + block).all())
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(tensor, other[name]), name


def test_a_prompt_in_pieces_is_the_prompt():
    query, key, value = random_rows(1, 4, 2, 90)
    whole = Method.parse("think(window=16)").compress(query, key, value)
    layer = CacheLayer(Method.parse("think(window=16)"))
    layer.prompt.tokens = 90
    for at in range(0, 90, 10):  # pieces shorter than the window
        layer.step(*(t[:, :, at : at + 10] for t in (query, key, value)))
    for name, tensor in stored(whole).items():
        assert torch.equal(tensor, stored(layer)[name]), name


def test_whole_rows_stay_within_their_bound_for_300_tokens(tiny_model):
    cache = kvfoundry.KVCache(tiny_model("llama"), "think(recent=32, block=16)")
    forward_pieces(tiny_model("llama"), cache, random_ids(1, 60), [60])
    for _ in range(300):
        forward_pieces(tiny_model("llama"), cache, random_ids(1, 1), [1])
        for layer in cache.layers:
            assert int((layer.lengths - layer.rows.pruned_lengths).max()) < 48


# --- what is read -----------------------------------------------------------------------------------------------------

COMPOSED = [
    "think(window=8, recent=5, block=3)",
    "think(window=8, recent=5, block=3, granularity=query_head)",
    "snapkv(budget=30, window=8)+think(window=8, recent=4, block=3)",
    "snapkv(budget=30, window=8, granularity=query_head)+think(window=8, recent=4, block=3)",
    "adakv(budget=30, window=8)+think(window=8, recent=4, block=3)",  # ragged heads
    "l2norm(budget=30, skip_layers=0)+think(window=8, recent=4, block=3)",
    "h2o(budget=30, window=4)+think(window=8, recent=4, block=3)",  # drops rows in decode
    "streamingllm(budget=24, sinks=2)+think(window=8, recent=4, block=3)",
    "snapkv(budget=30, window=8)+pivot_merge()+think(window=8, recent=4, block=3)",
]


@pytest.mark.parametrize("spec", COMPOSED)
def test_attention_is_that_over_keys_with_zeros(spec):
    """q k over the kept channels equals q k with zeros in the others: every step against a plain softmax."""
    query, key, value = random_rows(2, 4, 2, 120)
    mask = torch.arange(70) >= torch.tensor([[0], [23]])
    layer = CacheLayer(Method.parse(spec))
    layer.step(query[:, :, :70], key[:, :, :70], value[:, :, :70], attention_mask=mask)
    at = 70
    for size in [1, 1, 5, 1, 7, 1, 1, 12, 1, 1, 1]:
        new = slice(at, at + size)
        before, real = layer.rows.view(), layer.real.clone()
        repeat = before.keys.shape[1] // 2
        positions = real[:, None] + torch.arange(size)
        output = layer.step(query[:, :, new], key[:, :, new], value[:, :, new])
        keys, values = (
            torch.cat([old, rows[:, :, new].repeat_interleave(repeat, dim=1)], dim=2)
            for old, rows in ((before.keys, key), (before.values, value))
        )
        places = torch.cat([before.head_positions, positions[:, None].expand(-1, keys.shape[1], -1)], dim=2)
        seen = Visibility(positions, places, "masked")
        torch.testing.assert_close(output, naive.attend(query[:, :, new], keys, values, seen, scaling=0.25))
        at += size


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_decode_reads_what_is_stored(family, tiny_model):
    """With soft-cap, sinks and window layers: logits as with the whole rows when no channel is dropped."""
    ids, mask = left_padded([60, 41])
    specs = (None, "think(ratio=0.0, window=8, recent=4, block=3)")
    full, pruned = (
        forward_pieces(tiny_model(family), kvfoundry.KVCache(tiny_model(family), spec), ids, [40, 1, 7, 1, 11], mask)
        for spec in specs
    )
    torch.testing.assert_close(pruned[mask.bool()], full[mask.bool()], rtol=1e-3, atol=1e-3)


def test_decode_equals_a_stock_cache_with_zeros(tiny_model, reference_model):
    ids = random_ids(2, 62)
    cache = kvfoundry.KVCache(tiny_model("qwen3"), "think(ratio=0.5, window=8, recent=4, block=8)")
    forward_pieces(tiny_model("qwen3"), cache, ids[:, :60], [60])
    stock = DynamicCache()
    for i, layer in enumerate(cache.layers):
        stock.update(layer.keys.clone(), layer.values.clone(), i)
    found = forward_pieces(tiny_model("qwen3"), cache, ids[:, 60:], [1, 1])
    torch.testing.assert_close(found, forward_pieces(reference_model("qwen3"), stock, ids[:, 60:], [1, 1]))


def test_with_all_channels_it_is_the_full_cache(tiny_model):
    model, spec = tiny_model("llama"), "think(ratio=0.0, window=8, recent=4, block=3)"
    ids, mask = left_padded([40, 23, 9])
    for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}):
        full, pruned = (
            model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0,
                past_key_values=kvfoundry.KVCache(model, each), **options,
            )
            for each in (None, spec)
        )  # fmt: skip
        assert torch.equal(full, pruned)
    lookup = dict(prompt_lookup_num_tokens=3, max_new_tokens=20, do_sample=False, pad_token_id=0)
    ids = random_ids(1, 12).repeat(1, 4)
    assert torch.equal(
        model.generate(ids, past_key_values=kvfoundry.KVCache(model, spec), **lookup),
        model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0),
    )


# --- state ------------------------------------------------------------------------------------------------------------


def prefilled(model) -> kvfoundry.KVCache:
    cache = kvfoundry.KVCache(model, "think(window=8, recent=4, block=3)")
    forward_pieces(model, cache, random_ids(3, 46), [40, 1, 5])
    return cache


@pytest.mark.parametrize(
    "act, expected",
    [
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 2])), lambda t: t[[2, 0, 2]]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
        (lambda c: c.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, dim=0)),
        (lambda c: c.crop(-3), lambda t: t[:, :, :43]),
        (lambda c: c.crop(-9), lambda t: t[:, :, :37]),  # into the pruned rows
    ],
    ids=["reorder", "select", "repeat", "crop", "crop deep"],
)
def test_every_part_follows(act, expected, tiny_model):
    cache = prefilled(tiny_model("llama"))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    channels = [layer.rows.channels for layer in cache.layers]
    act(cache)
    for layer, (keys, values), old in zip(cache.layers, before, channels, strict=True):
        assert torch.equal(layer.keys, expected(keys)) and torch.equal(layer.values, expected(values))
        assert torch.equal(layer.rows.channels, old if layer.keys.shape[2] != 46 else expected(old))
    ids = random_ids(cache.layers[0].lengths.shape[0], 9, seed=4)
    assert bool(forward_pieces(tiny_model("llama"), cache, ids, [1, 8]).isfinite().all())


def test_a_fork_goes_its_own_way(tiny_model):
    model = tiny_model("llama")
    cache = prefilled(model)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    twin, ids = cache.fork(), random_ids(3, 9, seed=5)
    found = forward_pieces(model, twin, ids, [1, 1, 7])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert torch.equal(forward_pieces(model, cache, ids, [1, 1, 7]), found)


def test_eviction_in_decode_picks_stored_keys(tiny_model):
    """What h2o keeps of the pruned rows are the very numbers that were stored, never pruned again."""
    query, key, value = random_rows(1, 4, 2, 90)
    layer = CacheLayer(Method.parse("h2o(budget=30, window=4)+think(window=8, recent=4, block=3)"))
    layer.step(query[:, :, :60], key[:, :, :60], value[:, :, :60])
    channels = layer.rows.channels
    for at in range(60, 90):
        layer.step(*(t[:, :, at : at + 1] for t in (query, key, value)))
        assert torch.equal(layer.rows.channels, channels) and bool((layer.lengths == 30).all())
    for head in range(2):
        pruned = int(layer.rows.pruned_lengths[0, head])
        tokens = layer.positions[0, head]
        kept = torch.zeros(16).scatter(0, channels[0, head], 1.0)
        assert 0 < pruned < 30
        assert torch.equal(layer.keys[0, head, :pruned], key[0, head, tokens[:pruned]] * kept)
        assert torch.equal(layer.keys[0, head, pruned:], key[0, head, tokens[pruned:]])


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_real_bytes():
    """At 4,096 tokens and head size 128: at most 0.77 of bf16, after the prompt and for a stored row in decode."""
    model = build("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=128).to(torch.bfloat16)
    cache, tokens = kvfoundry.KVCache(model, "think(ratio=0.5)"), 4096
    forward_pieces(model, cache, random_ids(1, tokens), [tokens])
    bf16 = 2 * 2 * 2 * tokens * 128 * 2
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for x in cache.layers for t in x.tensors()}
    assert cache.nbytes == sum(storages.values()) <= 0.77 * bf16
    forward_pieces(model, cache, random_ids(1, 40), [1] * 40)
    plain = kvfoundry.KVCache(model)
    forward_pieces(model, plain, random_ids(1, tokens + 40), [tokens] + [1] * 40)
    assert cache.nbytes <= 0.77 * plain.nbytes


def test_no_copy_of_the_keys_is_made_to_read_them():
    query, key, value = random_rows(1, 4, 1, 3001)
    layer = Method.parse("think(window=8)").compress(*(t[:, :, :3000] for t in (query, key, value)))
    layer.step(*(t[:, :, 3000:] for t in (query, key, value)))
    with LargestTensor() as largest:
        layer.rows.attend(query[:, :, 3000:], torch.tensor([[3000]]), Reading(backend("sdpa"), 0.25))
    assert largest.numel <= 512 * 16  # one tile, not 3,000 rows


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, message",
    [
        ("think(ratio=1.0)", "at least one channel"),
        ("think(ratio=-0.1)", "ratio must be from 0 to 1"),
        ("think(ratio=nan)", "ratio must be a finite number"),
        ("think(window=0)", "window must be a whole number of at least 1"),
        ("think(block=0)", "block must be a whole number of at least 1"),
        ("think(granularity=head)", "one of kv_head, query_head"),
        ("think+kivi", "both set codec"),
        ("think+rotate", "turned keys mean nothing"),
        ("think+quest(budget=64)", "not read by pages"),
        ("streamingllm(budget=64, positions=slot)+think", "slot positions"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused(spec, message):
    with pytest.raises(SpecError, match=message):
        Method.parse(spec)


def test_keys_that_are_not_finite_are_refused():
    query, key, value = random_rows(1, 4, 2, 40)
    key[0, 1, 3, 2] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        Method.parse("think").compress(query, key, value)


def test_pages_and_rotation_are_refused_on_the_layout_itself():
    layer = Method.parse("think").compress(*random_rows(1, 4, 2, 40))
    for call in (layer.rows.stretches, lambda: layer.rows.with_first_keys(torch.zeros(1, 2, 1, 16))):
        with pytest.raises(CacheStateError):
            call()


def test_each_row_of_a_batch_equals_its_single_run(tiny_model):
    model, spec = tiny_model("llama"), "think(window=8, recent=4, block=3)"
    ids, mask = left_padded([50, 27, 6])
    together = greedy(model, kvfoundry.KVCache(model, spec), ids, mask, steps=12)
    for row, length in enumerate([50, 27, 6]):
        alone = greedy(model, kvfoundry.KVCache(model, spec), ids[row : row + 1, 50 - length :], steps=12)
        assert torch.equal(together[row], alone[0])
