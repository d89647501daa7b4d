"""KVzip: what the second pass measures, what it leaves behind, and when it is refused."""

import copy

import pytest
import torch
from tiny_models import EVICTABLE, build_tokenizer, left_padded, random_ids

import kvfoundry
from kvfoundry.errors import CacheStateError, DataError, SpecError
from kvfoundry.reconstruction import _passes
from kvfoundry.selection.pool import pooled_counts
from kvfoundry.selection.scores.reconstruction import Reconstruction

SMALL = "kvzip(budget=10, chunk=16, overlap=3, sinks=2{})"
LENGTHS = [40, 23, 9]


def compressed(model, spec, ids, mask=None):
    cache = kvfoundry.KVCache(model, spec)
    positions = None if mask is None else (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.inference_mode():
        model(ids, mask, positions, cache)
    kvfoundry.compress_by_reconstruction(model, build_tokenizer(), cache, ids, mask)
    return cache


def held(cache, row=0):
    return [[head[head >= 0].tolist() for head in layer.positions[row]] for layer in cache.attention_layers]


def test_the_pass_repeats_every_token_once_with_a_cue(tiny_model):
    tokenizer = build_tokenizer()
    text = [1, *range(3, 40)]
    passes = _passes(tiny_model("llama"), tokenizer, text, Reconstruction(chunk=16, overlap=3))
    assert [span for span, _ in passes] == [(0, 16), (16, 32), (32, 38)]
    assert passes[0][1][-15:] == text[1:16]  # the begin token is not repeated
    assert passes[1][1][-16:] == text[16:32] and passes[1][1][-19:-16] == text[13:16]
    assert passes[2][1][-6:] == text[32:]


@pytest.mark.parametrize("scope", ["model", "layer", "head"])
def test_scores_equal_attention_written_out(scope, own_model):
    """One chunk that covers the prompt: the softmax then runs over everything, as in a plain forward pass."""
    model, ids = own_model("llama"), random_ids(1, 30)
    spec = f"kvzip(budget=10, chunk=100, sinks=2, scope={scope})"
    tokenizer = build_tokenizer()
    ((_, fed),) = _passes(model, tokenizer, ids[0].tolist(), Reconstruction(chunk=100))
    reference = own_model("llama")
    with torch.inference_mode():
        weights = reference(torch.cat([ids, torch.tensor([fed])], dim=1), output_attentions=True).attentions
    scores = [w[0, :, 30:, :30].amax(dim=1).view(2, 4, 30).amax(dim=1) for w in weights]
    ranked = [s.index_fill(1, torch.tensor([0, 1]), torch.inf) for s in scores]
    cache = compressed(model, spec, ids)
    if scope == "head":
        expected = [[set(head.topk(10).indices.tolist()) for head in layer] for layer in ranked]
    else:
        pools = [torch.stack(ranked)] if scope == "model" else [layer[None] for layer in ranked]
        expected = []
        for pool in pools:
            least = pool.flatten().topk(10 * 2 * pool.shape[0]).values[-1]
            expected += [[set((head >= least).nonzero().flatten().tolist()) for head in layer] for layer in pool]
    assert [[set(head) for head in layer] for layer in held(cache)] == expected
    assert cache.kept_rows == 10


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("family", EVICTABLE)
def test_each_row_equals_its_single_run(family, granularity, tiny_model):
    """Laws 2 and 4: padding and neighbours change nothing; every row has a pool of its own and keeps its budget."""
    model, spec = tiny_model(family), SMALL.format(f", granularity={granularity}")
    ids, mask = left_padded(LENGTHS)
    together = compressed(model, spec, ids, mask)
    for row, length in enumerate(LENGTHS):
        alone = compressed(model, spec, ids[row : row + 1, -length:])
        layers = [layer for layer in together.attention_layers if layer.evicts]
        mean = torch.stack([layer.lengths[row].float().mean() for layer in layers]).mean()
        assert float(mean) == min(10, length)
        for found, expected in zip(held(together, row), held(alone), strict=True):
            assert found == [head for head in expected for _ in range(len(found) // len(expected))]


@pytest.mark.parametrize("family", EVICTABLE)
def test_the_pass_leaves_no_trace_but_the_eviction(family, tiny_model):
    """Rows that stay are bit for bit those of the prompt, and decoding goes on at the true positions."""
    model, ids = tiny_model(family), random_ids(2, 40)
    full = kvfoundry.KVCache(model)
    with torch.inference_mode():
        model(ids, None, None, full)
    cache = compressed(model, SMALL.format(""), ids)
    assert cache.seen_tokens == 40
    for layer, whole in zip(cache.attention_layers, full.attention_layers, strict=True):
        if not layer.evicts:
            assert torch.equal(layer.positions, whole.positions) and torch.equal(layer.keys, whole.keys)
            continue
        index = layer.positions.clamp(min=0)[..., None].expand_as(layer.keys)
        present = (layer.positions >= 0)[..., None]
        assert torch.equal(layer.keys, whole.keys.gather(2, index) * present)
        assert not layer.reconstructed or layer.watch is None
    with torch.inference_mode():
        logits = model(ids[:, :1], None, None, cache).logits
    assert bool(torch.isfinite(logits).all()) and cache.seen_tokens == 41


def test_memory_is_freed_in_the_ragged_layout(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 200)
    full = kvfoundry.KVCache(model)
    with torch.inference_mode():
        model(ids, None, None, full)
    cache = compressed(model, "kvzip(budget=50, chunk=64)", ids)
    lengths = torch.stack([layer.lengths for layer in cache.attention_layers])
    assert int(lengths.sum()) == 50 * lengths.numel() and len(lengths.unique()) > 1
    assert cache.nbytes <= full.nbytes * 50 / 200 * 1.02


def test_the_second_reading_leaves_no_spare_memory_behind(tiny_model):
    """Layers that keep every row, window layers above all, went through it as well."""
    model, ids = tiny_model("gemma3"), random_ids(1, 60)
    full = kvfoundry.KVCache(model)
    with torch.inference_mode():
        model(ids, None, None, full)
    cache = compressed(model, "kvzip(budget=20, chunk=16)", ids)
    # The window layer keeps all its rows, positions now head by head; the other one a third.
    window, whole = (layer.nbytes for layer in cache.attention_layers)
    plain = full.attention_layers[0].nbytes
    assert window <= plain + 2 * 60 * 2 and whole <= 0.36 * plain


def test_generate_and_prefill_run_the_pass_by_themselves(own_model):
    model, tokenizer = own_model("llama"), build_tokenizer()
    text = " ".join(f"w{i}" for i in range(3, 43))
    other = " ".join(f"w{i}" for i in range(50, 70))
    results = kvfoundry.generate(model, tokenizer, [text, other], "kvzip(budget=10)", 8, details=True)
    assert [result.kept_rows for result in results] == [10, 10]
    alone = [kvfoundry.generate(model, tokenizer, prompt, "kvzip(budget=10)", 8) for prompt in (text, other)]
    assert [result.text for result in results] == alone
    pieces = kvfoundry.generate(model, tokenizer, text, "kvzip(budget=10)", 8, prefill_chunk=7)
    assert pieces == alone[0]
    cache = kvfoundry.prefill(model, tokenizer, text, "kvzip(budget=10)")
    assert cache.kept_rows == 10
    answers = [kvfoundry.generate(model, tokenizer, "w5 w6", cache=cache.fork(), max_new_tokens=4) for _ in range(2)]
    assert answers[0] == answers[1] and cache.kept_rows == 10
    beams = kvfoundry.generate(model, tokenizer, text, "kvzip(budget=10)", 4, num_beams=2, details=True)
    assert beams.kept_rows == 10


def test_plain_generate_is_told_what_is_missing(own_model):
    model, ids = own_model("llama"), random_ids(1, 40)
    cache = kvfoundry.KVCache(model, SMALL.format(""))
    with torch.inference_mode():
        model(ids, None, None, cache)
        with pytest.raises(CacheStateError, match="read the prompt a second time"):
            model(ids[:, :1], None, None, cache)
        kvfoundry.compress_by_reconstruction(model, build_tokenizer(), cache, ids)  # and goes on from there
        model(ids[:, :1], None, None, cache)
    assert cache.seen_tokens == 41
    short = kvfoundry.KVCache(model, SMALL.format(""))
    with torch.inference_mode():
        model(ids[:, :8], None, None, short)
        for _ in range(4):  # a prompt within the budget needs no second pass, however long the answer gets
            model(ids[:, :1], None, None, short)
    assert short.kept_rows == 12


def test_refusals(own_model):
    model, tokenizer, ids = own_model("llama"), build_tokenizer(), random_ids(1, 40)
    snap = kvfoundry.KVCache(model, "snapkv(budget=20, window=4)")
    with pytest.raises(SpecError, match="does not reconstruct"):
        kvfoundry.compress_by_reconstruction(model, tokenizer, snap, ids)
    cache = compressed(model, SMALL.format(""), ids)
    with pytest.raises(CacheStateError, match="already dropped"):
        kvfoundry.compress_by_reconstruction(model, tokenizer, cache, ids)
    with pytest.raises(CacheStateError, match="already dropped"):
        kvfoundry.compress_by_reconstruction(model, tokenizer, cache.fork(), ids)
    fresh = kvfoundry.KVCache(model, SMALL.format(""))
    with torch.inference_mode():
        model(ids, None, None, fresh)
    with pytest.raises(CacheStateError, match="are not the 40 columns"):
        kvfoundry.compress_by_reconstruction(model, tokenizer, fresh, ids[:, :-1])
    with pytest.raises(CacheStateError, match="are not the 40 columns"):
        kvfoundry.compress_by_reconstruction(
            model, tokenizer, fresh, ids, torch.ones_like(ids).index_fill(1, torch.tensor(0), 0)
        )
    crowded = copy.deepcopy(model)
    crowded.config.max_position_embeddings = 60
    with pytest.raises(DataError, match="no room to repeat"):
        kvfoundry.compress_by_reconstruction(crowded, tokenizer, fresh, ids)


def test_a_pool_gives_rows_to_the_best_heads_and_holds_its_total():
    scores = torch.tensor([[[0.9, 0.8, 0.1], [0.2, 0.7, 0.3]]])
    nothing, everything = torch.zeros(1, 2, 3, dtype=torch.bool), torch.ones(1, 2, 3, dtype=torch.bool)
    (counts,) = pooled_counts([scores], [nothing], [everything], torch.tensor([3]))
    assert counts.tolist() == [[2, 1]]
    protected = nothing.clone()
    protected[0, 1, 0] = True
    (counts,) = pooled_counts([scores], [protected], [everything], torch.tensor([3]))
    assert counts.tolist() == [[2, 1]]
    first, second = pooled_counts(
        [scores[:, :1], scores[:, 1:]], [nothing[:, :1]] * 2, [everything[:, :1]] * 2, torch.tensor([4])
    )
    assert (first.tolist(), second.tolist()) == ([[2]], [[2]])
    valid = everything.clone()
    valid[0, 0, 0] = False
    (counts,) = pooled_counts([scores], [nothing], [valid], torch.tensor([6]))
    assert counts.tolist() == [[2, 3]]
