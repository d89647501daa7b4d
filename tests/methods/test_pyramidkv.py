"""PyramidKV: what every layer keeps, by hand and as a contract."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method

from .support import rows, tiny_llama


def layer_rows(spec: str, layers: int, tokens: int) -> list[int]:
    budget = Method.parse(spec).budget
    assert budget is not None
    return [int(budget.rows(torch.tensor([tokens]), layer, layers)) for layer in range(layers)]


def test_by_hand() -> None:
    """Mean above the window 24, low 24 / 20 = 1.2, high 46.8, step 15.2: 46.8, 31.6, 16.4, 1.2."""
    assert layer_rows("pyramidkv(budget=32, window=8)", 4, 96) == [8 + 47, 8 + 32, 8 + 16, 8 + 1]


def test_a_line_that_starts_above_the_prompt_is_flattened_around_the_same_mean() -> None:
    """Mean 48 of 88 possible: 88 down to 8, step 26.67."""
    assert layer_rows("pyramidkv(budget=56, window=8)", 4, 96) == [8 + 88, 8 + 62, 8 + 34, 8 + 8]


def test_steepness_one_is_snapkv() -> None:
    assert layer_rows("pyramidkv(budget=40, window=8, beta=1)", 5, 300) == [40] * 5


def test_the_published_rules() -> None:
    """The tables that were recorded from their code."""
    factory = "pyramidkv(budget={}, window={}, beta={}, rule=kvcache_factory)"
    assert layer_rows(factory.format(40, 16, 8), 6, 160) == [16 + past for past in (45, 37, 29, 21, 13, 5)]
    assert layer_rows(factory.format(64, 8, 20), 4, 96) == [64] * 4
    long = layer_rows(factory.format(2048, 8, 20), 32, 8000)
    assert (long[0], long[1], long[-1]) == (3978 + 8, 3853 + 8, 103 + 8)
    assert sum(long) > 32 * 2048  # the overrun that the default rule does not have
    assert layer_rows("pyramidkv(budget=64, window=8, rule=adakv)", 4, 96) == [8 + past for past in (88, 67, 46, 25)]
    press = "pyramidkv(budget={}, window={}, beta={}, rule=kvpress)"
    assert layer_rows(press.format(0.25, 8, 3), 3, 128) == [53, 32, 11]
    assert layer_rows(press.format(0.5, 64, 20), 3, 128) == [64] * 3


@settings(max_examples=400, deadline=None)
@given(
    beta=st.floats(1, 20),
    layers=st.integers(1, 80),
    average=st.one_of(st.integers(8, 4096), st.floats(0.01, 1.0)),
    window=st.sampled_from([0, 1, 4, 8]),
    tokens=st.integers(1, 20000),
)
def test_the_layers_together_keep_what_was_asked(
    beta: float, layers: int, average: float, window: int, tokens: int
) -> None:
    """B04: the sum is the request, each layer has the protected rows and one, and budgets never rise."""
    spec = f"random(budget={average!r})+protect(recent={window})+pyramid_layers(beta={beta!r})"
    kept = layer_rows(spec, layers, tokens)
    asked = average if isinstance(average, int) else max(1, int(average * tokens))
    assert sum(kept) == layers * asked
    assert min(kept) >= min(asked, max(window, 1))
    assert kept == sorted(kept, reverse=True)
    assert max(kept) <= max(tokens, asked)


def test_every_steepness_and_depth() -> None:
    """B04 over the whole grid of steepness and depth that the fault was seen in."""
    for beta in range(1, 21):
        for layers in (1, 2, 3, 17, 32, 80):
            for average in (8, 9, 63, 512, 4096):
                kept = layer_rows(f"pyramidkv(budget={average}, window=4, beta={beta})", layers, 2 * average + 11)
                assert sum(kept) == layers * average and min(kept) >= 4 and kept == sorted(kept, reverse=True)


def test_a_pyramid_over_another_method_protects_its_rows_in_every_layer() -> None:
    method = Method.parse("h2o(budget=20, window=6)+pyramid_layers(beta=20)+protect(sinks=3)")
    kept = [
        method.compress(*rows(1, 4, 2, 90, seed=layer), layer_idx=layer, num_layers=5).positions[0]
        for layer in range(5)
    ]
    assert sum(layer.shape[1] for layer in kept) == 5 * 20
    for layer in kept:
        assert all({0, 1, 2, *range(84, 90)} <= set(head.tolist()) for head in layer)


def test_each_row_of_a_batch_has_its_own_pyramid() -> None:
    method, (query, key, value) = Method.parse("pyramidkv(budget=0.5, window=4)"), rows(2, 4, 2, 60)
    mask = torch.arange(60) >= torch.tensor([[0], [25]])
    both = method.compress(query, key, value, layer_idx=2, num_layers=4, attention_mask=mask)
    alone = method.compress(query[1:, :, 25:], key[1:, :, 25:], value[1:, :, 25:], layer_idx=2, num_layers=4)
    assert torch.equal(both.lengths[1:], alone.lengths)
    assert torch.equal(both.positions[1:, :, : alone.positions.shape[2]], alone.positions)


def test_the_model_keeps_the_budget_on_average() -> None:
    """Mean above the window 16: 31.2, 21.07, 10.93 and 0.8, and the two rows left by rounding go to the front."""
    model = tiny_llama(layers=4)
    cache = kvfoundry.KVCache(model, "pyramidkv(budget=24, window=8)")
    with torch.no_grad():
        model(torch.arange(90)[None] % 90 + 3, None, None, cache)
    assert cache.kept_rows == 24
    assert [int(layer.lengths[0, 0]) for layer in cache.attention_layers] == [8 + 32, 8 + 22, 8 + 10, 8 + 0]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("pyramidkv(budget=64, beta=0.5)", "beta must be at least 1, got 0.5"),
        ("pyramidkv(budget=64, beta=nan)", "beta must be a finite number"),
        ("pyramidkv(budget=64, rule=steep)", "rule must be one of exact, kvcache_factory, adakv, kvpress"),
        ("pyramidkv(budget=8)", "a budget of 8 rows cannot hold"),
        ("pyramidkv(budget=64)+pyramid_layers(beta=2)", "pyramidkv and pyramid_layers both share the budget"),
        ("fullkv+pyramid_layers", "drops no rows"),
    ],
)
def test_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Method.parse(spec)
