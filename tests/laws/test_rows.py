"""Law 2: rows of a batch are independent, and padding is never stored, scored or counted."""

import pytest
import torch
from tiny_models import EVICTABLE, FAMILIES, PAD, left_padded, random_ids

import kvfoundry
from kvfoundry.method import Method

from .support import EVICTING, NAMES, crossed, forward_pieces, greedy, kept_positions, small_spec

LENGTHS = [40, 23, 9]


@pytest.mark.parametrize(("name", "family"), crossed(NAMES, FAMILIES))
def test_each_row_equals_its_single_run(name, family, tiny_model):
    """B23, B24: tokens and kept positions of a left-padded row are those of the row alone."""
    model, spec = tiny_model(family), small_spec(name)
    ids, mask = left_padded(LENGTHS)
    together = kvfoundry.KVCache(model, spec)
    tokens = greedy(model, together, ids, mask)
    for row, length in enumerate(LENGTHS):
        alone = kvfoundry.KVCache(model, spec)
        expected = greedy(model, alone, ids[row : row + 1, -length:])
        assert torch.equal(tokens[row], expected[0])
        assert kept_positions(together, row) == kept_positions(alone)


@pytest.mark.parametrize("name", EVICTING)
def test_each_row_equals_its_single_run_per_query_head(name, tiny_model):
    if "granularity" not in kvfoundry.methods()[name].parameters:
        pytest.skip(f"{name} has no granularity of its own")
    model, spec = tiny_model("llama"), small_spec(name, granularity="query_head")
    ids, mask = left_padded(LENGTHS)
    together = kvfoundry.KVCache(model, spec)
    tokens = greedy(model, together, ids, mask)
    for row, length in enumerate(LENGTHS):
        alone = kvfoundry.KVCache(model, spec)
        assert torch.equal(tokens[row], greedy(model, alone, ids[row : row + 1, -length:])[0])
        for found, expected in zip(kept_positions(together, row), kept_positions(alone), strict=True):
            # A row that never had to drop anything alone still has one set per KV head.
            assert found == [head for head in expected for _ in range(len(found) // len(expected))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_stands_in_the_padding_changes_nothing(name, family, tiny_model):
    model, spec = tiny_model(family), small_spec(name)
    ids, mask = left_padded(LENGTHS)
    other = ids.masked_fill(mask == 0, 77)
    logits, rows = [], []
    for variant in (ids, other):
        cache = kvfoundry.KVCache(model, spec)
        logits.append(forward_pieces(model, cache, variant, [40], mask)[mask.bool()])
        rows.append([(layer.keys, layer.values) for layer in cache.attention_layers])
    assert torch.equal(*logits)
    for (keys, values), (other_keys, other_values) in zip(*rows, strict=True):
        assert torch.equal(keys, other_keys) and torch.equal(values, other_values)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_stored(name, tiny_model):
    """B24: lengths count real tokens, and slots behind them hold nothing."""
    model = tiny_model("llama")
    ids, mask = left_padded(LENGTHS)
    ids = ids.masked_fill(mask == 0, 77)  # the embedding of a padding token may be zero
    cache = kvfoundry.KVCache(model, small_spec(name))
    forward_pieces(model, cache, ids, [40], mask)
    real = torch.tensor(LENGTHS)[:, None]
    for layer in cache.attention_layers:
        assert bool((layer.lengths <= real).all())
        assert bool((layer.positions < real[..., None]).all())
        empty = layer.positions < 0
        assert float(layer.keys[empty].abs().sum()) == 0.0
        assert float(layer.values[empty].abs().sum()) == 0.0


def test_padding_takes_no_budget(tiny_model, reference_model):
    """B24: a budget above the shorter prompt leaves that row uncompressed."""
    ids, mask = left_padded([60, 20])
    expected = greedy(reference_model("llama"), None, ids[1:, 40:])
    model = tiny_model("llama")
    cache = kvfoundry.KVCache(model, "snapkv(budget=24, window=8)")
    assert torch.equal(greedy(model, cache, ids, mask)[1:], expected)
    assert cache.layers[0].lengths.tolist() == [[24 + 7] * 2, [20 + 7] * 2]


def test_sinks_are_the_first_real_tokens(tiny_model):
    """B24: sinks are never pads; the kept keys are those of the row alone."""
    model, spec = tiny_model("llama"), "streamingllm(budget=8, sinks=3)"
    ids, mask = left_padded([40, 17])
    together, alone = kvfoundry.KVCache(model, spec), kvfoundry.KVCache(model, spec)
    forward_pieces(model, together, ids, [40], mask)
    forward_pieces(model, alone, ids[1:, 23:], [17])
    assert kept_positions(together, 1)[0][0] == [0, 1, 2, 12, 13, 14, 15, 16]
    assert torch.allclose(together.layers[0].keys[1], alone.layers[0].keys[0], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_share_is_of_the_real_tokens_of_each_row(name, tiny_model):
    method = Method.parse(small_spec(name))
    if not (method.evicts and method.takes_budget):
        pytest.skip(f"{name} stores no budget of rows")
    model = tiny_model("llama")
    ids, mask = left_padded(LENGTHS)
    cache = kvfoundry.KVCache(model, small_spec(name, 0.5))
    forward_pieces(model, cache, ids, [40], mask)
    mean = torch.stack([layer.lengths.float().mean(dim=1) for layer in cache.attention_layers]).mean(dim=0)
    assert mean.tolist() == pytest.approx([20, 11, 4], abs=1 if cache.method.unit is None else 4)


@pytest.mark.parametrize("family", EVICTABLE)
def test_padding_may_fill_a_whole_piece_of_the_prompt(family, tiny_model):
    """A piece in which one row has no real token at all stores nothing for it and disturbs nobody."""
    model = tiny_model(family)
    ids, mask = left_padded([40, 9])
    for spec in ("fullkv", "streamingllm(budget=12, sinks=2)", "h2o(budget=12, window=4)"):
        cache = kvfoundry.KVCache(model, spec)
        cache.expect_prompt(40)
        logits = forward_pieces(model, cache, ids, [16, 16, 8], mask)
        alone = kvfoundry.KVCache(model, spec)
        alone.expect_prompt(9)
        expected = forward_pieces(model, alone, ids[1:, 31:], [1, 8])
        assert torch.allclose(logits[1, 31:], expected[0], atol=1e-4)
        assert kept_positions(cache, 1) == kept_positions(alone)


def test_a_batch_of_nothing_but_equal_lengths_needs_no_mask(tiny_model):
    model = tiny_model("qwen3")
    ids = random_ids(3, 30)
    ids[ids == PAD] = 5
    for name in EVICTING:
        cache = kvfoundry.KVCache(model, small_spec(name))
        tokens = greedy(model, cache, ids)
        for row in range(3):
            assert torch.equal(
                tokens[row], greedy(model, kvfoundry.KVCache(model, small_spec(name)), ids[row : row + 1])[0]
            )


@pytest.mark.parametrize("budget", [12, 0.5])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_slot_positions_follow_each_row(budget, granularity, tiny_model):
    """B21, B24: a row shorter than its sinks when the others already drop rows still moves its own keys."""
    spec = f"streamingllm(budget={budget}, sinks=4, positions=slot, granularity={granularity})"
    model, lengths = tiny_model("llama"), [40, 13, 2]
    ids, mask = left_padded(lengths)
    together = kvfoundry.KVCache(model, spec)
    tokens = greedy(model, together, ids, mask, steps=24)
    for row, length in enumerate(lengths):
        alone = kvfoundry.KVCache(model, spec)
        assert torch.equal(tokens[row], greedy(model, alone, ids[row : row + 1, -length:], steps=24)[0])
        held = alone.layers[0].keys[0]
        assert torch.allclose(together.layers[0].keys[row, :, : held.shape[1]], held, atol=1e-4)
