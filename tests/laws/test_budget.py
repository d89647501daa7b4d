"""Law 4: a budget is a contract, whatever the scores are."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import random_ids

import kvfoundry
from kvfoundry.method import Method
from kvfoundry.selection.scores.given import GivenScores

from .support import BUDGETED, BY_HAND, SMALL, forward_pieces, keeps_exactly, random_rows, small_spec

BATCH, HEADS, QUERY_HEADS = 2, 2, 4

budgets = st.one_of(st.integers(1, 60), st.floats(0.01, 1.0))
kinds = st.sampled_from(["random", "ties", "zeros", "nan", "some nan", "infinite", "few values"])


def hostile_scores(kind: str, tokens: int, seed: int) -> torch.Tensor:
    """[batch, heads, tokens] scores of the kinds that have broken top-k selections."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(BATCH, HEADS, tokens, generator=generator)
    if kind == "ties":
        return torch.full_like(scores, 3.5)
    if kind == "zeros":
        return torch.zeros_like(scores)
    if kind == "nan":
        return torch.full_like(scores, math.nan)
    if kind == "some nan":
        return scores.masked_fill(scores > 0.3, math.nan)
    if kind == "infinite":
        return scores.masked_fill(scores > 0.5, math.inf).masked_fill(scores < -0.5, -math.inf)
    return (scores * 2).round() if kind == "few values" else scores


def rows_asked(budget: int | float, tokens: int) -> int:
    return min(tokens, budget if isinstance(budget, int) else max(1, int(budget * tokens)))


@settings(max_examples=150, deadline=None)
@given(
    budget=budgets,
    sinks=st.integers(0, 6),
    recent=st.integers(0, 12),
    tokens=st.integers(1, 60),
    shorter=st.integers(0, 59),
    kind=kinds,
    seed=st.integers(0, 99),
)
def test_kept_rows_are_what_was_asked_whatever_the_scores(budget, sinks, recent, tokens, shorter, kind, seed):
    """B01: ties, zeros and NaN cannot push a protected row out, and every head keeps exactly its rows."""
    assume(isinstance(budget, float) or budget >= sinks + recent)
    method = Method.parse(f"random(budget={budget!r})+protect(sinks={sinks}, recent={recent})")
    method = method.replace(score=GivenScores((hostile_scores(kind, tokens, seed),)))
    lengths = [tokens, max(1, tokens - shorter)]
    mask = torch.arange(tokens) >= torch.tensor([tokens - length for length in lengths])[:, None]
    query, key, value = random_rows(BATCH, QUERY_HEADS, HEADS, tokens, seed=seed)
    layer = method.compress(query, key, value, attention_mask=mask)
    for row, length in enumerate(lengths):
        asked = rows_asked(budget, length)
        kept_recent = min(recent, asked)
        kept_sinks = min(sinks, asked - max(kept_recent, 1))
        protected = {*range(min(kept_sinks, length)), *range(length - kept_recent, length)}
        for head in range(HEADS):
            held = [p for p in layer.positions[row, head].tolist() if p >= 0]
            assert len(held) == int(layer.lengths[row, head]) == asked
            assert held == sorted(set(held)) and held[0] >= 0 and held[-1] < length
            assert protected <= set(held)
            # Kept rows are the rows themselves, in order.
            original = key[row, head, tokens - length :]
            assert torch.equal(layer.keys[row, head, :asked], original[held])
            assert torch.equal(layer.values[row, head, :asked], value[row, head, tokens - length :][held])


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(1, 20), tokens=st.integers(21, 60), seed=st.integers(0, 999))
def test_the_highest_scores_stay(budget, tokens, seed):
    scores = hostile_scores("random", tokens, seed)
    method = Method.parse(f"random(budget={budget})").replace(score=GivenScores((scores,)))
    layer = method.compress(*random_rows(BATCH, QUERY_HEADS, HEADS, tokens))
    assert torch.equal(layer.positions, scores.topk(budget).indices.sort().values)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([name for name in BUDGETED if name in BY_HAND]),
    budget=st.one_of(st.integers(6, 50), st.floats(0.01, 1.0)),
    tokens=st.integers(1, 60),
    steps=st.integers(0, 4),
    layers=st.integers(1, 6),
)
def test_every_method_keeps_its_budget_in_prompt_and_decode(name, budget, tokens, steps, layers):
    """Averaged over heads, within one row per head; never none; decode keeps to it or grows by the new tokens."""
    method = Method.parse(small_spec(name, budget, layers=layers))
    asked, kept = rows_asked(budget, tokens), []
    for layer_idx in range(layers):
        rows = random_rows(BATCH, QUERY_HEADS, HEADS, tokens, seed=layer_idx)
        layer = method.compress(*rows, layer_idx=layer_idx, num_layers=layers)
        kept.append(layer.lengths.float().mean(dim=1))
        assert int(layer.lengths.min()) >= 1
        for step in range(steps):
            layer.step(*random_rows(BATCH, QUERY_HEADS, HEADS, 1, seed=100 + step))
        if method.schedule.every == 1 and keeps_exactly(method):
            whole = budget if isinstance(budget, int) else asked  # a share stays what it was for the prompt
            assert layer.lengths.tolist() == [[min(whole, tokens + steps)] * HEADS] * BATCH
        if tokens > 1:
            assert bool(torch.isfinite(layer.keys).all())
    average = torch.stack(kept).mean(dim=0)
    # Whole chunks, of which the last may be short, may leave less than two of them unused.
    unused = 1 if method.unit is None else 2 * SMALL["size"]
    assert bool((average <= asked).all()) and bool((average > asked - unused).all())


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", [name for name in BUDGETED if name in BY_HAND])
def test_ties_cannot_push_protected_rows_out(name, zero):
    """B01: all scores equal, and all zero; budget = window + sinks + 4."""
    spec = small_spec(name, 4 + 2 + 4, layers=1)
    method = Method.parse(spec if "+" in spec else f"{spec}+protect(sinks=2)")
    query, key, value = random_rows(1, QUERY_HEADS, HEADS, 50)
    key = torch.zeros_like(key) if zero else key[:, :, :1].expand_as(key)
    layer = method.compress(torch.zeros_like(query), key, value)
    protect = method.protect
    protected = {*range(protect.sinks), *range(50 - protect.recent, 50)}
    for head in layer.positions[0]:
        assert protected <= set(head.tolist())


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 1.0])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_a_share_of_a_short_prompt_keeps_a_row(tokens, share, tiny_model):
    """B02: at least one row, finite logits, and a share of 1.0 keeps everything and says so."""
    model, ids = tiny_model("qwen2"), random_ids(1, tokens)
    for name in BUDGETED:
        cache = kvfoundry.KVCache(model, small_spec(name, share))
        logits = forward_pieces(model, cache, ids, [tokens])
        logits = torch.cat([logits, forward_pieces(model, cache, ids[:, :1], [1])], dim=1)
        assert bool(torch.isfinite(logits).all())
        assert all(int(layer.lengths.min()) >= 1 for layer in cache.attention_layers)
        if share == 1.0 and cache.method.schedule.every is None:
            assert cache.layers[0].lengths.tolist() == [[tokens + 1] * 2]
            assert "dropped nothing" in cache.notes[0]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(BUDGETED),
    budget=st.one_of(st.integers(8, 4096), st.floats(0.01, 1.0)),
    layers=st.integers(1, 80),
    tokens=st.integers(1, 5000),
)
def test_layer_budgets_never_exceed_the_requested_average(name, budget, layers, tokens):
    """B04, over every method: the sum over layers stays within the request, and no layer gets nothing."""
    method = Method.parse(small_spec(name, budget, layers=layers))
    seen = torch.tensor([tokens])
    rows = [int(method.budget.rows(seen, layer, layers)) for layer in range(layers)]
    asked = budget if isinstance(budget, int) else max(1, int(budget * tokens))
    assert sum(rows) <= asked * layers and min(rows) >= 1


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_holds_when_the_prompt_comes_in_pieces(name, tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 80)
    cache = kvfoundry.KVCache(model, small_spec(name, 20))
    cache.expect_prompt(80)
    for start in range(0, 80, 16):
        forward_pieces(model, cache, ids[:, start : start + 16], [16])
        lengths = torch.stack([layer.lengths.float().mean() for layer in cache.attention_layers])
        assert float(lengths.mean()) <= 20
    assert cache.kept_rows == pytest.approx(20, abs=1 if cache.method.unit is None else 4)
    assert cache.kept_share == pytest.approx(cache.kept_rows / 80)


def test_a_skipped_layer_keeps_everything_and_the_others_their_budget(tiny_model):
    cache = kvfoundry.KVCache(tiny_model("llama"), "l2norm(budget=8, skip_layers=1)")
    forward_pieces(tiny_model("llama"), cache, random_ids(1, 30), [30])
    assert [layer.lengths.tolist() for layer in cache.attention_layers] == [[[30, 30]], [[8, 8]]]
