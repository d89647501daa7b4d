"""Law 7: approximations are anchored by equalities."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EVICTABLE, random_ids
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import kvfoundry
import kvfoundry.acting as acting_module
from kvfoundry.kernels.attention import naive, sdpa
from kvfoundry.kernels.column_sums import column_sums
from kvfoundry.layer import CacheLayer
from kvfoundry.method import Method
from kvfoundry.selection.evidence import Evidence
from kvfoundry.visibility import Visibility, WindowRule

from .support import BY_HAND, EVICTING, forward_pieces, greedy, kept_positions, random_rows, small_spec


@pytest.mark.parametrize("pieces", [[1] * 24, [24], [7, 1, 1, 10, 5]])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_streaming_accumulates_what_one_block_accumulates(pieces, granularity, group):
    """Attention sums of one call, and of any division into calls, equal the column sums written out."""
    method = Method.parse(f"h2o(budget=24, window=4, granularity={granularity}, group={group})")
    query, key, value = random_rows(2, 8, 2, 24)
    layer, start = CacheLayer(method), 0
    for size in pieces:
        part = slice(start, start + size)
        layer.step(query[:, :, part], key[:, :, part], value[:, :, part])
        start += size
    logits = query @ key.repeat_interleave(4, dim=1).transpose(2, 3) / 4.0
    weights = logits.masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    sums = weights.sum(dim=2).view(2, 2, 4, 24)
    found = layer.rows.view().columns["attention_sum"]
    if found.dim() == 4:
        assert torch.allclose(found.transpose(2, 3), sums, atol=1e-5)
    else:
        assert torch.allclose(found, sums.mean(dim=2) if group == "mean" else sums.sum(dim=2), atol=1e-5)


@pytest.mark.parametrize("name", ["h2o", "streamingllm", "l2norm", "random", "tova"])
def test_a_prompt_streamed_one_by_one_keeps_what_one_block_keeps_while_nothing_is_dropped(name, tiny_model):
    """The first eviction after 24 tokens sees the same evidence, whether they came at once or one by one."""
    # No word twice: the first layer's key norms would tie, up to rounding.
    model, ids = tiny_model("llama"), torch.randperm(100, generator=torch.Generator().manual_seed(1))[None, :25] + 10
    spec = f"{small_spec(name, 24)}+schedule(every=1)"
    kept = []
    for pieces in ([24, 1], [1] * 25, [10, 5, 9, 1]):
        cache = kvfoundry.KVCache(model, spec)
        cache.expect_prompt(24)
        forward_pieces(model, cache, ids, pieces)
        kept.append(kept_positions(cache))
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_granularities_are_equal_without_grouped_heads(name, family, tiny_model):
    """One KV head per query head: kv_head, query_head and every reduction are the same method."""
    if "granularity" not in kvfoundry.methods()[name].parameters:
        pytest.skip(f"{name} has no granularity of its own")
    model, ids = tiny_model(family, num_key_value_heads=8), random_ids(2, 40)
    results = []
    for granularity, group in (("kv_head", "mean"), ("query_head", "mean"), ("kv_head", "max"), ("kv_head", "sum")):
        cache = kvfoundry.KVCache(model, small_spec(name, heads=8, granularity=granularity, group=group))
        results.append((greedy(model, cache, ids).tolist(), kept_positions(cache, 0), kept_positions(cache, 1)))
    assert results[0] == results[1] == results[2] == results[3]


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 6),
    before=st.integers(0, 20),
    sliding=st.one_of(st.none(), st.integers(1, 12)),
    chunked=st.one_of(st.none(), st.integers(2, 12)),
    dropped=st.sets(st.integers(0, 19), max_size=15),
    seed=st.integers(0, 99),
)
def test_kernels_equal_attention_written_out(queries, before, sliding, chunked, dropped, seed):
    """Both kernels, any stored positions, windows and chunks: softmax over the rows that each query may see."""
    positions = torch.tensor([p for p in range(before) if p not in dropped] + [before + i for i in range(queries)])
    query, key, value = random_rows(2, 4, 2, len(positions), seed=seed)
    query = query[:, :, -queries:]
    query_positions = positions[-queries:].expand(2, -1)
    rule = WindowRule(sliding=sliding, chunked=None if sliding else chunked)
    visibility = Visibility(query_positions, positions.expand(2, 1, -1), "masked", rule)
    seen = torch.zeros(queries, len(positions), dtype=torch.bool)
    for i in range(queries):
        for j, position in enumerate(positions.tolist()):
            own = before + i
            near = rule.sliding is None or own - position < rule.sliding
            same = rule.chunked is None or own // rule.chunked == position // rule.chunked
            seen[i, j] = position <= own and near and same
    logits = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * 0.3
    expected = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    for kernel in (naive, sdpa):
        found = kernel.attend(query, key, value, visibility, scaling=0.3)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 100, 1 << 24])
def test_blocks_of_queries_change_nothing(limit, monkeypatch):
    """Attention and column sums in small blocks equal one block, so memory can stay linear in the rows."""
    query, key, value = random_rows(2, 4, 2, 30)
    positions = torch.arange(30).expand(2, -1)
    visibility = Visibility(positions, positions[:, None], "causal")
    whole = naive.attend(query, key, value, visibility, scaling=0.25)
    sums = column_sums(query, key, visibility, scaling=0.25)
    monkeypatch.setattr(naive, "_BLOCK_ELEMENTS", limit)
    for pattern in ("causal", "masked"):
        view = Visibility(positions, positions[:, None], pattern)
        assert torch.allclose(naive.attend(query, key, value, view, scaling=0.25), whole, atol=1e-6)
        assert torch.allclose(sdpa.attend(query, key, value, view, scaling=0.25), whole, atol=1e-5)
        assert torch.allclose(column_sums(query, key, view, scaling=0.25), sums, atol=1e-4)


@pytest.mark.parametrize("family", EVICTABLE)
def test_the_attention_that_scores_see_is_the_models_own(family, tiny_model, reference_model, monkeypatch):
    """B12: window attention and column sums equal the eager weights of the model: norms, soft-cap, sinks, scaling."""
    weights = []

    def keep(module, query, key, value, mask, **kwargs):
        eager = importlib.import_module(type(module).__module__).eager_attention_forward
        output, attention = eager(module, query, key, value, mask, **kwargs)
        weights.append(attention)
        return output, attention

    reference, ids = reference_model(family), random_ids(2, 40)
    AttentionInterface.register("keep", keep)
    AttentionMaskInterface.register("keep", eager_mask)
    reference.set_attn_implementation("keep")
    try:
        forward_pieces(reference, None, ids, [40])
    finally:
        reference.set_attn_implementation("eager")
    seen: list[Evidence] = []
    evict = acting_module.evict
    monkeypatch.setattr(acting_module, "evict", lambda *args: seen.append(args[2]) or evict(*args))
    model = tiny_model(family)
    cache = kvfoundry.KVCache(model, "snapkv(budget=39, window=8)")
    forward_pieces(model, cache, ids, [40])
    full = [i for i, layer in enumerate(cache.layers) if layer.evicts]
    assert len(seen) == len(full) > 0
    for i, evidence in zip(full, seen, strict=True):
        assert torch.allclose(evidence.window_attention, weights[i][:, :, -8:], atol=1e-5)
        assert torch.allclose(evidence.column_sums, weights[i].sum(dim=2), atol=1e-4)


@pytest.mark.parametrize("name", BY_HAND)
def test_compress_by_hand_is_what_the_cache_does(name, tiny_model, monkeypatch):
    """`Method.compress` on the tensors of a layer keeps the rows that the cache keeps."""
    fed = []
    attend = CacheLayer.attend

    def noted(layer, query, *args, **kwargs):
        fed.append((query.clone(), *(tensor.clone() for tensor in layer._pending), kwargs.get("scaling")))
        return attend(layer, query, *args, **kwargs)

    model, method = tiny_model("llama"), Method.parse(small_spec(name))
    with monkeypatch.context() as patch:
        patch.setattr(CacheLayer, "attend", noted)
        cache = kvfoundry.KVCache(model, method)
        forward_pieces(model, cache, random_ids(2, 40), [40])
    for i, (query, key, value, scaling) in enumerate(fed):
        assert scaling == query.shape[-1] ** -0.5
        layer = method.compress(query, key, value, layer_idx=i, num_layers=len(fed))
        assert torch.equal(layer.positions, cache.layers[i].positions)
        assert torch.equal(layer.keys, cache.layers[i].keys) and torch.equal(layer.values, cache.layers[i].values)
        assert layer.nbytes + layer.host_nbytes > 0
