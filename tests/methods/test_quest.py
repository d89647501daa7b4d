"""quest: every row is stored, a decode step reads the pages that promise most."""

import pytest
import torch
from tiny_models import FAMILIES, left_padded, random_ids

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method
from kvfoundry.reading.pages import best_pages, factory_tokens, kernel_pages, page_bounds, page_scores

TOKENS = 90


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_bounds_and_scores_by_hand():
    keys = torch.tensor([[[[1.0, -2.0], [3.0, 0.0], [-1.0, 5.0]]]])
    low, high = page_bounds(keys, 2)
    assert low.tolist() == [[[[1.0, -2.0], [-1.0, 5.0]]]] and high.tolist() == [[[[3.0, 0.0], [-1.0, 5.0]]]]
    # q = (2, -1): 2 x 3 + -1 x -2 = 8, and 2 x -1 + -1 x 5 = -7.
    assert page_scores(torch.tensor([[[2.0, -1.0]]]), low, high).tolist() == [[[8.0, -7.0]]]


def test_a_score_bounds_every_row_of_its_page():
    keys, query = draw(1, 2, 70, 8), draw(1, 4, 8, seed=1)
    scores = page_scores(query, *page_bounds(keys, 16))
    products = torch.einsum("bhgd,bhnd->bhgn", query.view(1, 2, 2, 8), keys).reshape(1, 4, 70)
    for page in range(5):
        assert bool((products[..., page * 16 : page * 16 + 16] <= scores[..., page : page + 1] + 1e-5).all())


def test_tables_by_hand():
    scores = torch.tensor([[[4.0, 1.0, 3.0, 0.0], [0.0, 5.0, 5.0, 9.0]]])
    counts, budget = torch.tensor([[4, 3]]), torch.tensor([[2]])
    assert best_pages(scores, counts, budget).tolist() == [[[0, 2], [1, 2]]]
    assert kernel_pages(scores, counts, budget).tolist() == [[[0, 3], [1, 2]]]
    wide = best_pages(scores, torch.tensor([[4, 1]]), torch.tensor([[3]]))
    assert wide.tolist() == [[[0, 1, 2], [0, -1, -1]]]
    # 7 rows, 2 recent ones, pages of 2 before them: 3 more from pages 2 (row 4 alone) and 0 and 1.
    found = factory_tokens(
        torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([[7]]), torch.tensor([[5]]), page=2, recent=2
    )
    assert found.tolist() == [[[0, 1, 2, 5, 6]]]


@pytest.mark.parametrize("rule", ["kernel", "evaluation", "tokens"])
@pytest.mark.parametrize("length", [*range(2, 65, 7), 64])
def test_exact_while_the_budget_covers_everything(rule, length):
    """B05: page 16, budget 64, lengths to 64."""
    method = Method.parse(f"quest(budget=64, skip_layers=0, rule='{rule}')")
    query, key, value = draw(2, 4, length, 8), draw(2, 2, length, 8, seed=1), draw(2, 2, length, 8, seed=2)
    layers = [m.compress(query[:, :, :-1], key[:, :, :-1], value[:, :, :-1]) for m in (method, Method.parse("fullkv"))]
    found, dense = (layer.step(query[:, :, -1:], key[:, :, -1:], value[:, :, -1:]) for layer in layers)
    assert torch.equal(found, dense)


@pytest.mark.parametrize("rule", ["kernel", "evaluation", "tokens"])
@pytest.mark.parametrize("length", [65, 79, 80, 81])
def test_the_last_page_can_always_be_read(rule, length):
    """B05: the newest row has a key that the query cannot miss, and a value that shows.

    (KVCache-Factory's rule cuts at the newest end, so without recent rows it can lose this one: hence its default.)
    """
    method = Method.parse(f"quest(budget=64, skip_layers=0, rule='{rule}')")
    query, key, value = draw(1, 4, length, 8), draw(1, 2, length, 8, seed=1), draw(1, 2, length, 8, seed=2)
    query[:, :, -1], key[:, :, -1], value[:, :, -1] = 5.0, 5.0, 100.0
    layer = method.compress(query[:, :, :-1], key[:, :, :-1], value[:, :, :-1])
    output = layer.step(query[:, :, -1:], key[:, :, -1:], value[:, :, -1:])
    assert torch.allclose(output, torch.full_like(output, 100.0), atol=1e-2)


def feed(cache, model, ids, pieces, mask=None):
    logits, start = [], 0
    with torch.no_grad():
        for size in pieces:
            stop = start + size
            seen = None if mask is None else mask[:, :stop]
            positions = None if mask is None else (seen.cumsum(1) - 1).clamp(min=0)[:, start:stop]
            logits.append(model(ids[:, start:stop], seen, positions, cache).logits)
            start = stop
    return torch.cat(logits, dim=1)


SPECS = [
    "quest(budget=24, page=4, skip_layers=0{})",
    "quest(budget=24, page=4, skip_layers=1{})",
    "snapkv(budget=40, window=4)+quest(budget=16, page=4, skip_layers=0{})",
    "snapkv(budget=40, window=4, granularity='query_head')+quest(budget=16, page=4, skip_layers=0{})",
    "adakv(budget=40, window=4)+quest(budget=16, page=4, skip_layers=0{})",
    "h2o(budget=40, window=4)+quest(budget=16, page=4, skip_layers=0{})",
    "quest(budget=0.3, page=4, skip_layers=0{})",
]
RULES = ["", ", rule='evaluation'", ", rule='tokens', recent=3", ", granularity='query_head'"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_independent_and_several_tokens_equal_one_by_one(spec, rule, tiny_model):
    model, spec = tiny_model("qwen3"), spec.format(rule)
    if "h2o" in spec:
        pytest.skip("eviction after every call: one by one drops other rows than several at once")
    ids, mask = left_padded([TOKENS, 61, 30])
    ids = torch.cat([ids, random_ids(3, 12, seed=9)], dim=1)
    mask = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], dim=1)
    together = feed(kvfoundry.KVCache(model, spec), model, ids, [TOKENS, 5, 1, 6], mask)
    singly = feed(kvfoundry.KVCache(model, spec), model, ids, [TOKENS] + [1] * 12, mask)
    assert torch.allclose(together[:, TOKENS:], singly[:, TOKENS:], atol=1e-4)
    for row, length in enumerate([TOKENS, 61, 30]):
        alone = feed(kvfoundry.KVCache(model, spec), model, ids[row : row + 1, TOKENS - length :], [length] + [1] * 12)
        assert torch.allclose(together[row, TOKENS:], alone[0, length:], atol=1e-4), row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[4], SPECS[5]])
def test_a_large_budget_equals_reading_everything(spec, family, tiny_model):
    """Over an evicting method too: pages that cover all that was kept change nothing."""
    model, ids = tiny_model(family), random_ids(2, 110)
    everything = spec.format("").replace("budget=24", "budget=4096").replace("quest(budget=16", "quest(budget=4096")
    base = spec.split("+")[0] if "+" in spec else "fullkv"
    found, expected = (
        feed(kvfoundry.KVCache(model, s), model, ids, [TOKENS, 5] + [1] * 15) for s in (everything, base)
    )
    assert torch.equal(found, expected)


def test_few_pages_differ_from_reading_everything(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    full, few = (
        feed(kvfoundry.KVCache(model, s), model, ids, [TOKENS] + [1] * 10) for s in ("fullkv", SPECS[0].format(""))
    )
    assert torch.equal(full[:, :TOKENS], few[:, :TOKENS])
    assert not torch.allclose(full[:, TOKENS:], few[:, TOKENS:], atol=1e-3)


def test_bytes_are_the_full_cache_and_the_bounds(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 101)
    full, paged = (kvfoundry.KVCache(model, s) for s in ("fullkv", "quest(budget=32, skip_layers=0)"))
    for cache in (full, paged):
        feed(cache, model, ids, [100, 1])
    bounds = sum(t.numel() * t.element_size() for layer in paged.layers for t in layer._pages.tensors())
    assert bounds > 0 and paged.nbytes == full.nbytes + bounds
    assert "drops nothing" in paged.notes[0]


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[4]])
def test_state_follows_the_rows(spec, tiny_model):
    """Fork, selection of batch rows and reset: as a cache that was fed alone."""
    model, spec = tiny_model("llama"), spec.format("")
    ids, more = random_ids(3, 96), random_ids(3, 9, seed=4)
    cache = kvfoundry.KVCache(model, spec)
    feed(cache, model, ids, [TOKENS] + [1] * 6)
    twin = cache.fork()
    expected = feed(twin, model, more, [1] * 9)
    other = feed(cache.fork(), model, more.flip(0), [1] * 9)
    assert not torch.equal(other, expected)
    order = torch.tensor([2, 0])
    picked = cache.fork()
    picked.batch_select_indices(order)
    assert torch.allclose(feed(picked, model, more[order], [1] * 9), expected[order], atol=1e-5)
    assert torch.equal(feed(cache, model, more, [1] * 9), expected)
    cache.reset()
    feed(cache, model, ids, [TOKENS] + [1] * 6)
    assert torch.equal(feed(cache, model, more, [1] * 9), expected)


def test_tokens_taken_back_leave_no_bound_behind(tiny_model):
    model, spec, ids = tiny_model("llama"), SPECS[0].format(""), random_ids(1, 110)
    cache, straight = kvfoundry.KVCache(model, spec), kvfoundry.KVCache(model, spec)
    feed(cache, model, ids, [TOKENS] + [1] * 9)
    cache.crop(TOKENS + 2)
    feed(straight, model, ids, [TOKENS, 1, 1])
    other = random_ids(1, 12, seed=8)
    assert torch.allclose(feed(cache, model, other, [1] * 12), feed(straight, model, other, [1] * 12), atol=1e-5)


def test_the_budget_that_changes_is_that_of_the_stored_rows():
    assert str(Method.parse("snapkv(budget=1024)+quest(budget=256)").with_budget(512)) == (
        "snapkv(budget=512)+quest(budget=256)"
    )
    assert str(Method.parse("quest(budget=256)").with_budget(64)) == "quest(budget=64)"
    with pytest.raises(SpecError, match="a page of 16 rows does not fit"):
        Method.parse("quest(budget=256)").with_budget(8)


@pytest.mark.parametrize(
    "spec",
    [
        "quest(budget=8)",
        "quest(budget=64, page=65)",
        "quest(budget=64, page=0)",
        "quest(budget=64, rule='best')",
        "h2o(budget=64, leaving='skip')+quest(budget=32)",
        "quest(budget=64)+quest(budget=32)",
    ],
)
def test_impossible_recipes_are_refused(spec):
    with pytest.raises(SpecError):
        Method.parse(spec)
