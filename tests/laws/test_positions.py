"""Law 3: position is not storage length. After eviction every token sits where it would sit in the full sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EVICTABLE, FAMILIES, random_ids

import kvfoundry
from kvfoundry.method import Method

from .replay import Recorder
from .support import BY_HAND, EVICTING, NAMES, crossed, greedy, kept_average, kept_positions, random_rows, small_spec

# A prompt, decode of one token, several at once in mid-decode, and decode again.
CALLS = [40, 1, 1, 1, 5, 1, 1, 5, 1]


def run(model, reference, method, calls):
    ids = random_ids(1, sum(calls), seed=3)
    cache = kvfoundry.KVCache(model, method)
    recorder, logits, start = Recorder(model, cache, sum(calls)), [], 0
    for count in calls:
        logits.append(recorder.feed(ids[:, start : start + count]))
        start += count
    return torch.cat(logits, dim=1), recorder.replayed(reference, ids), cache


def _keeps_rows_as_they_are(name):
    """Whether the replay applies: rows are kept or dropped as they are, and all attended at their own positions."""
    method = Method.parse(small_spec(name))
    mixes = method.dispose is not None and not method.dispose.parks
    reads_all = method.read is None and method.prefill is None
    return not method.slot_positions and not mixes and reads_all and not method.lossy


@pytest.mark.parametrize(("name", "family"), crossed(NAMES, FAMILIES))
def test_decode_equals_attention_by_hand_over_the_kept_rows(name, family, tiny_model, reference_model):
    """B14, B17: also with five tokens at once after an eviction."""
    if not _keeps_rows_as_they_are(name):
        pytest.skip(f"{name} moves, mixes or skips rows")
    found, expected, cache = run(tiny_model(family), reference_model(family), small_spec(name), CALLS)
    assert float((found - expected).abs().max()) < 1e-4
    if family in EVICTABLE and name in EVICTING:
        assert all(int(layer.lengths.max()) < cache.seen_tokens for layer in cache.attention_layers if layer.evicts)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", EVICTING)
def test_five_tokens_after_an_eviction_on_every_backend(name, backend, own_model, reference_model):
    """B17: prefill 60, evict to 32, then five tokens in one forward."""
    if not _keeps_rows_as_they_are(name):
        pytest.skip(f"{name} moves, mixes or skips rows")
    model = own_model("qwen3")
    kvfoundry.attach(model, attn_implementation=backend)
    found, expected, _ = run(model, reference_model("qwen3"), small_spec(name, 32), [60, 5, 5])
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", EVICTING)
def test_query_head_sets_decode_over_their_own_rows(name, tiny_model, reference_model):
    if "granularity" not in kvfoundry.methods()[name].parameters or not _keeps_rows_as_they_are(name):
        pytest.skip(f"{name} has no granularity of its own")
    spec = small_spec(name, granularity="query_head")
    found, expected, cache = run(tiny_model("llama"), reference_model("llama"), spec, CALLS)
    assert float((found - expected).abs().max()) < 1e-4
    assert cache.layers[0].lengths.shape[1] == 8


@pytest.mark.parametrize("name", EVICTING)
def test_the_next_position_is_the_number_of_tokens_seen(name, tiny_model, reference_model):
    """B14: prompt 300, budget 128, 50 decode steps."""
    model = tiny_model("llama")
    cache = kvfoundry.KVCache(model, small_spec(name, 128))
    recorder, ids = Recorder(model, cache, 350), random_ids(1, 350, seed=5)
    logits = [recorder.feed(ids[:, :300])]
    for step in range(50):
        assert cache.seen_tokens == cache.get_seq_length() == 300 + step
        logits.append(recorder.feed(ids[:, 300 + step : 301 + step]))
        for layer in cache.attention_layers:
            assert int(layer.positions.max()) == 300 + step
        assert kept_average(cache) <= 128 + step + 1
    if _keeps_rows_as_they_are(name):
        expected = recorder.replayed(reference_model("llama"), ids)
        assert float((torch.cat(logits, dim=1) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", EVICTING)
def test_the_newest_tokens_are_kept_at_every_step(name, tiny_model):
    """B19: budget equal to the prompt, 60 decode steps: the kept set holds the newest tokens and moves forward."""
    model = tiny_model("llama")
    method = Method.parse(small_spec(name, 40))
    cache = kvfoundry.KVCache(model, method)
    recorder, ids = Recorder(model, cache, 100), random_ids(1, 100, seed=6)
    recorder.feed(ids[:, :40])
    before = kept_positions(cache)
    recent = max(1, method.protect.recent)
    for seen in range(41, 101):
        recorder.feed(ids[:, seen - 1 : seen])
        for layer in kept_positions(cache):
            for head in layer:
                assert set(range(seen - recent, seen)) <= set(head)
    after = kept_positions(cache)
    for earlier, later in zip(before, after, strict=True):
        for old, new in zip(earlier, later, strict=True):
            assert max(new) == 99 and set(new) - set(old)


@pytest.mark.parametrize("name", EVICTING)
def test_a_chunked_prompt_reads_nothing_that_was_dropped_before(name, tiny_model, reference_model):
    """B11: a prompt of 4 pieces of 32 with eviction after each; what comes later depends on the kept rows alone."""
    if not _keeps_rows_as_they_are(name):
        pytest.skip(f"{name} moves, mixes or skips rows")
    model = tiny_model("llama")
    ids = random_ids(1, 132, seed=9)
    cache = kvfoundry.KVCache(model, small_spec(name, 24))
    cache.expect_prompt(128)
    recorder, logits = Recorder(model, cache, 132), []
    for start in (0, 32, 64, 96):
        logits.append(recorder.feed(ids[:, start : start + 32]))
    logits += [recorder.feed(ids[:, i : i + 1]) for i in range(128, 132)]
    expected = recorder.replayed(reference_model("llama"), ids)
    assert float((torch.cat(logits, dim=1) - expected).abs().max()) < 1e-4
    held: list[torch.Tensor] = []
    for layer, visible in zip(cache.layers, recorder.visible, strict=True):
        if layer.evicts and layer.method.schedule.prefill == "chunk":
            held.append(visible[:, :, 96, :96].sum(-1).float().mean())
    assert not held or float(torch.stack(held).mean()) <= 24


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([name for name in EVICTING if name in BY_HAND]),
    budget=st.one_of(st.integers(8, 40), st.floats(0.05, 1.0)),
    calls=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_positions_count_tokens_whatever_the_calls(name, budget, calls):
    """Positions are ascending, unique, below the tokens seen, and the newest token is always there."""
    layer = Method.parse(small_spec(name, budget, layers=1)).compress(*random_rows(2, 4, 2, calls[0]))
    seen = calls[0]
    for i, count in enumerate(calls[1:]):
        layer.step(*random_rows(2, 4, 2, count, seed=i + 1))
        seen += count
        assert layer.get_seq_length() == seen and layer.get_mask_sizes(1) == (seen + 1, 0)
    for row in layer.positions:
        for head in row:
            held = head[head >= 0]
            assert bool((held.diff() > 0).all()) and int(held.max()) < seen and len(held) >= 1


@pytest.mark.parametrize("name", EVICTING)
def test_generate_counts_positions_for_itself(name, tiny_model):
    """The tokens of plain `generate` are those of a loop that names every position."""
    model = tiny_model("gemma2")
    ids = random_ids(1, 40, seed=8)
    found = greedy(model, kvfoundry.KVCache(model, small_spec(name)), ids, steps=6)
    cache, token, by_hand = kvfoundry.KVCache(model, small_spec(name)), ids, []
    with torch.inference_mode():
        for _ in range(6):
            start = cache.seen_tokens
            positions = torch.arange(start, start + token.shape[1])[None]
            token = model(token, None, positions, cache).logits[:, -1:].argmax(-1)
            by_hand.append(token)
    assert torch.equal(found, torch.cat(by_hand, dim=1))
