"""AdaKV: how the rows of a layer are shared among its heads, by hand and as a contract."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.layouts import RaggedRows
from kvfoundry.method import Method
from kvfoundry.selection.scores.given import GivenScores

from .support import kept_under, rows, tiny_llama

# Two heads, six tokens. Joint ranking: 9 8 7 (head 0), 6 (head 1), 5 (head 0), 4 3 ...
SCORES = torch.tensor([[[9.0, 8.0, 7.0, 0.3, 5.0, 0.1], [0.2, 4.0, 6.0, 3.0, 2.0, 1.0]]])


def test_by_hand_without_floor() -> None:
    """Budget 2 per head: the best four of the layer are 9 8 7 of head 0 and 6 of head 1."""
    assert kept_under("random(budget=2)+adaptive_heads(floor=0)", SCORES) == [[[0, 1, 2], [2]]]


def test_by_hand_with_half_spread_evenly() -> None:
    """0.5 * (3, 1) + 0.5 * 2 = (2.5, 1.5): whole rows are (2, 1), and the row left goes to the first of the two."""
    assert kept_under("random(budget=2)+adaptive_heads(floor=0.5)", SCORES) == [[[0, 1, 2], [2]]]


def test_a_floor_of_one_is_uniform() -> None:
    assert kept_under("random(budget=2)+adaptive_heads(floor=1)", SCORES) == [[[0, 1], [1, 2]]]


def test_protected_rows_come_first_in_every_head() -> None:
    """One protected row each, and of the two rows left both go to head 0 (9 and 8 of the joint ranking)."""
    spec = "random(budget=2)+protect(recent=1)+adaptive_heads(floor=0)"
    assert kept_under(spec, SCORES) == [[[0, 1, 5], [5]]]


def test_the_factory_rounds_every_head_by_itself() -> None:
    """0.8 * (3, 1) + int(0.2 * 2) = (2.4, 0.8): 2 and 1 rows, one less than the budget of 4."""
    assert kept_under("random(budget=2)+adaptive_heads(rule=kvcache_factory)", SCORES) == [[[0, 1], [2]]]


def test_kvpress_makes_the_best_rows_of_every_head_safe() -> None:
    """Half of 3 rows: one safe row per head (9 and 6), then the best four others of the layer: 8 7 5 and 4."""
    assert kept_under("random(budget=3)+adaptive_heads(floor=0.5, rule=kvpress)", SCORES) == [[[0, 1, 2, 4], [1, 2]]]


def test_normalize_weighs_a_head_by_its_concentration() -> None:
    """Head 0 has 1.18 of 1.83 in its best two rows, head 1 all of its sum: 0.39 0.37 0.35 against 0.54 0.53."""
    scores = torch.tensor([[[0.6, 0.58, 0.55, 0.1], [0.54, 0.53, 0.0, 0.0]]])
    assert kept_under("random(budget=2)+adaptive_heads(floor=0)", scores) == [[[0, 1, 2], [0]]]
    assert kept_under("random(budget=2)+adaptive_heads(floor=0, normalize=True)", scores) == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize("rule", ["exact", "kvcache_factory", "kvpress"])
def test_no_head_is_left_without_a_row(rule: str) -> None:
    """Both rows of a budget of one are in head 0; head 1 gets one all the same."""
    scores = torch.tensor([[[0.6, 0.55, 0.1], [0.5, 0.01, 0.0]]])
    assert kept_under(f"random(budget=1)+adaptive_heads(floor=0, rule={rule})", scores)[0][1] == [0]


def test_equal_heads_get_equal_rows() -> None:
    """Ties are shared, so that a method with one ranking for all heads stays even."""
    for scores in (torch.zeros(1, 3, 20), torch.arange(20.0).expand(1, 3, 20)):
        assert [len(head) for head in kept_under("random(budget=7)+adaptive_heads(floor=0)", scores)[0]] == [7, 7, 7]


@settings(max_examples=150, deadline=None)
@given(
    budget=st.one_of(st.integers(1, 40), st.floats(0.02, 1.0)),
    floor=st.floats(0, 1),
    rule=st.sampled_from(["exact", "kvpress"]),
    normalize=st.booleans(),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    heads=st.integers(1, 4),
    kind=st.sampled_from(["random", "skewed", "ties", "nan", "infinite"]),
    seed=st.integers(0, 99),
)
def test_the_heads_together_keep_the_budget(budget, floor, rule, normalize, lengths, heads, kind, seed) -> None:  # type: ignore[no-untyped-def]
    """Law 4: exactly the budget over the heads of every batch row, one row at least, protected rows inside."""
    generator = torch.Generator().manual_seed(seed)
    tokens = max(lengths)
    scores = torch.randn(len(lengths), heads, tokens, generator=generator)
    if kind == "skewed":
        scores = scores.abs() * torch.tensor([10.0**head for head in range(heads)])[:, None]
    elif kind == "ties":
        scores = torch.ones_like(scores)
    elif kind == "nan":
        scores = scores.masked_fill(scores > 0, float("nan"))
    elif kind == "infinite":
        scores = scores.masked_fill(scores > 0.5, float("inf")).masked_fill(scores < -0.5, float("-inf"))
    spec = f"random(budget={budget!r})+adaptive_heads(floor={floor!r}, rule={rule}, normalize={normalize})"
    if isinstance(budget, float) or budget >= 3:
        spec += "+protect(sinks=1, recent=2)"
    method = Method.parse(spec).replace(score=GivenScores((scores,)))
    mask = torch.arange(tokens) >= torch.tensor([tokens - length for length in lengths])[:, None]
    layer = method.compress(*rows(len(lengths), heads, heads, tokens), attention_mask=mask)
    for row, length in enumerate(lengths):
        asked = min(length, budget if isinstance(budget, int) else max(1, int(budget * length)))
        kept = [[p for p in head.tolist() if p >= 0] for head in layer.positions[row]]
        assert sum(map(len, kept)) == heads * asked
        assert min(map(len, kept)) >= 1
        recent = min(method.protect.recent, asked)
        sinks = min(method.protect.sinks, asked - max(recent, 1))
        for head in kept:
            assert {*range(sinks), *range(length - recent, length)} <= set(head)


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_each_row_of_a_batch_equals_its_single_run(granularity: str) -> None:
    """B22: batches, which the published code refuses."""
    method = Method.parse(f"adakv(budget=12, window=4, normalize=True, granularity={granularity})")
    query, key, value = rows(3, 4, 2, 50)
    starts = [0, 17, 41]
    mask = torch.arange(50) >= torch.tensor(starts)[:, None]
    both = method.compress(query, key, value, attention_mask=mask)
    for row, start in enumerate(starts):
        at = (slice(row, row + 1), slice(None), slice(start, None))
        alone = method.compress(query[at], key[at], value[at]).positions
        alone = alone.repeat_interleave(both.positions.shape[1] // alone.shape[1], dim=1)
        kept = both.positions[row : row + 1, :, : alone.shape[2]]
        assert torch.equal(kept, alone) and bool((both.positions[row, :, alone.shape[2] :] == -1).all())


@pytest.mark.parametrize("rule", ["exact", "kvcache_factory", "kvpress"])
def test_a_budget_that_covers_everything_drops_nothing(rule: str) -> None:
    layer = Method.parse(f"adakv(budget=60, window=4, rule={rule})").compress(*rows(1, 4, 2, 50))
    assert layer.lengths.tolist() == [[50, 50]]


def test_over_h2o_the_budget_holds_at_every_step() -> None:
    """Rows that a head no longer has cannot come back: the other heads use its share."""
    method = Method.parse("h2o(budget=16, window=4)+adaptive_heads(floor=0.2)")
    query, key, value = rows(2, 4, 2, 60)
    layer = method.compress(query * torch.tensor([4.0, 4.0, 0.1, 0.1])[:, None, None], key, value)
    seen = []
    for step in range(12):
        layer.step(*rows(2, 4, 2, 1, seed=50 + step))
        assert layer.lengths.sum(dim=1).tolist() == [32, 32]
        assert all(set(range(69 + step - 12, 61 + step)) <= set(head.tolist()) for head in layer.positions[0])
        seen.append(layer.lengths.tolist())
    assert any(counts != [[16, 16], [16, 16]] for counts in seen)


def test_pyramid_and_adaptive_heads_compose() -> None:
    method = Method.parse("pyramidkv(budget=24, window=4)+adaptive_heads(floor=0.1, skip_layers=1)")
    lengths = torch.stack(
        [method.compress(*rows(1, 4, 2, 80, seed=i), layer_idx=i, num_layers=4).lengths[0] for i in range(4)]
    )
    assert int(lengths.sum()) == 4 * 2 * 24
    assert lengths[0, 0] == lengths[0, 1]  # skipped: uniform
    assert lengths[1, 0] != lengths[1, 1]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    "spec",
    [
        "adakv(budget=48, window=8)",
        "snapkv(budget=48, window=8)+adaptive_heads",
        "pyramidkv(budget=48, window=8)+adaptive_heads",
        "h2o(budget=48, window=8)+schedule(prefill=chunk)+adaptive_heads(floor=0.1)",
        "headkv(budget=48, window=8, table=((1, 2, 3, 9), (4, 1, 1, 0), (0, 0, 7, 1)))",
    ],
)
def test_memory_is_really_freed(spec: str, head_dim: int, batch: int) -> None:
    """At most 1.02 times the bytes of the budget's rows, for heads of very different lengths."""
    model = tiny_llama(layers=3, query_heads=4, heads=2, head_dim=head_dim)
    cache = kvfoundry.KVCache(model, spec)
    ids = torch.randint(3, 97, (batch, 160), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model(ids, None, None, cache)
    budget = batch * 3 * 2 * 48 * 2 * head_dim * 4
    assert any(isinstance(layer.rows, RaggedRows) for layer in cache.attention_layers)
    assert cache.nbytes <= 1.02 * budget
    assert cache.kept_rows <= 48


def test_statistics_for_decode_are_the_only_extra() -> None:
    """H2O goes on accumulating in decode: one float32 per row and query head, still within 1.02 at head size 64."""
    model = tiny_llama(layers=3, query_heads=4, heads=2, head_dim=64)
    cache = kvfoundry.KVCache(model, "h2o(budget=48, window=8)+adaptive_heads(floor=0.1)")
    with torch.no_grad():
        model(torch.randint(3, 97, (4, 160), generator=torch.Generator().manual_seed(5)), None, None, cache)
    assert cache.nbytes <= 1.02 * 4 * 3 * 2 * 48 * 2 * 64 * 4


@pytest.mark.parametrize(
    "spec, message",
    [
        ("adakv(budget=64, floor=1.5)", "floor must be from 0 to 1, got 1.5"),
        ("adakv(budget=64, normalize=2)", "normalize must be True or False"),
        ("adakv(budget=64, rule=fair)", "rule must be one of exact, kvcache_factory, kvpress"),
        ("adakv(budget=64, kernel=4)", "kernel must be odd"),
        ("adakv(budget=64)+adaptive_heads", "adakv and adaptive_heads both set heads"),
        ("adaptive_heads", "only refines a method"),
        ("fullkv+adaptive_heads", "drops no rows"),
        ("snapkv(budget=64)+adaptive_heads(skip_layers=-1)", "skip_layers must be a whole number"),
    ],
)
def test_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Method.parse(spec)
