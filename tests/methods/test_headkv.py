"""HeadKV: rows by a table of head importance, by hand and as a contract."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method

from .support import rows, tiny_llama

TABLE = ((1.0, 3.0), (2.0, 2.0))


def lengths(spec: str, layer_idx: int, tokens: int = 200, heads: int = 2, num_layers: int = 2) -> list[int]:
    layer = Method.parse(spec).compress(*rows(1, heads, heads, tokens), layer_idx=layer_idx, num_layers=num_layers)
    counts: list[int] = layer.lengths[0].tolist()
    return counts


def test_by_hand() -> None:
    """Mean above the window 16, half of it in the pool: 32 rows by share (1/8 is 4, 3/8 is 12), 8 for each head."""
    spec = f"headkv(budget=20, window=4, beta=2, table={TABLE})"
    assert lengths(spec, 0) == [4 + 4 + 8, 4 + 12 + 8]
    assert lengths(spec, 1) == [4 + 8 + 8, 4 + 8 + 8]


def test_temperature_sharpens_or_levels_the_shares() -> None:
    """Squared shares are 1, 9, 4, 4 of 18; to the power 0 they are equal."""
    spec = f"headkv(budget=22, window=4, beta=1, rule=authors, table={TABLE}, temperature={{}})"
    assert lengths(spec.format(2.0), 0) == [4 + 4, 4 + 36]
    assert lengths(spec.format(0.0), 0) == [22, 22]


def test_the_published_rules() -> None:
    """KVCache-Factory leaves the window in the mean: (20 - 20 // 2) + 4 * 10 / 8."""
    spec = f"headkv(budget=20, window=4, beta=2, table={TABLE}, rule={{}})"
    assert lengths(spec.format("kvcache_factory"), 0) == [4 + 10 + 5, 4 + 10 + 15]
    assert lengths(spec.format("authors"), 0) == [4 + 8 + 4, 4 + 8 + 12]


def test_a_kv_head_has_the_mean_of_its_query_heads() -> None:
    """Shares 1/16 and 5/16 in head 0, 3/16 and 7/16 in head 1; 64 rows in all: (4 + 20) / 2 and (12 + 28) / 2."""
    spec = "headkv(budget=20, window=4, beta=1, table=((1, 5, 3, 7),))"
    query, key, value = rows(1, 4, 2, 100)
    assert Method.parse(spec).compress(query, key, value).lengths.tolist() == [[4 + 12, 4 + 20]]
    per_query = Method.parse(spec[:-1] + ", granularity=query_head)").compress(query, key, value)
    assert per_query.lengths.tolist() == [[4 + 4, 4 + 20, 4 + 12, 4 + 28]]


def test_what_a_short_head_cannot_use_goes_to_the_others() -> None:
    """Head 1 wants 30 of its 16 rows outside the window: 14 go to head 0."""
    spec = "headkv(budget=19, window=4, beta=1, table=((0, 1),))"
    assert lengths(spec, 0, tokens=20, num_layers=1) == [18, 20]


def test_a_head_that_is_worth_nothing_keeps_its_window() -> None:
    spec = "headkv(budget=20, window=4, beta=1, table=((0, 1), (1, 0)))"
    assert lengths(spec, 0) == [4, 36]


@settings(max_examples=100, deadline=None)
@given(
    budget=st.one_of(st.integers(5, 60), st.floats(0.05, 1.0)),
    beta=st.floats(1, 20),
    temperature=st.floats(0, 3),
    layers=st.integers(1, 5),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_the_model_keeps_no_more_than_the_budget(budget, beta, temperature, layers, tokens, seed) -> None:  # type: ignore[no-untyped-def]
    """Law 4: never above the budget over layers and heads, below by less than a row per head where no head is short."""
    scores = np.random.default_rng(seed).gamma(0.3, size=(layers, 4)).tolist()
    spec = f"headkv(budget={budget!r}, window=3, beta={beta!r}, temperature={temperature!r}, table={scores})"
    asked = min(tokens, budget if isinstance(budget, int) else max(1, int(budget * tokens)))
    counts = []
    for layer_idx in range(layers):
        inputs = rows(1, 4, 2, tokens, seed=layer_idx)
        layer = Method.parse(spec).compress(*inputs, layer_idx=layer_idx, num_layers=layers)
        counts += layer.lengths[0].tolist()
        recent = min(3, asked)
        assert all(set(range(tokens - recent, tokens)) <= set(head.tolist()) for head in layer.positions[0])
    assert sum(counts) <= asked * len(counts)
    assert max(counts) == tokens or sum(counts) > (asked - 1) * len(counts)
    assert min(counts) >= 1


def test_a_prompt_within_the_budget_is_untouched() -> None:
    for rule in ("exact", "authors", "kvcache_factory"):
        assert lengths(f"headkv(budget=50, window=4, table={TABLE}, rule={rule})", 0, tokens=50) == [50, 50]


def test_each_row_of_a_batch_equals_its_single_run() -> None:
    method = Method.parse("headkv(budget=12, window=4, table=((1, 5, 3, 7),))")
    query, key, value = rows(3, 4, 2, 50)
    starts = [0, 17, 41]
    mask = torch.arange(50) >= torch.tensor(starts)[:, None]
    both = method.compress(query, key, value, attention_mask=mask)
    for row, start in enumerate(starts):
        at = (slice(row, row + 1), slice(None), slice(start, None))
        alone = method.compress(query[at], key[at], value[at]).positions
        kept = both.positions[row : row + 1, :, : alone.shape[2]]
        assert torch.equal(kept, alone) and bool((both.positions[row, :, alone.shape[2] :] == -1).all())


def test_the_published_file_form(tmp_path: Path) -> None:
    """Means and lists of scores, in any order, are the same table as nested tuples."""
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"1-1": [1, 3], "0-1": 3, "0-0": [0.5, 1.5], "1-0": 2.0}))
    from_file, inline = (f"headkv(budget=20, window=4, beta=2, table={table})" for table in (repr(str(path)), TABLE))
    assert [lengths(from_file, layer) for layer in (0, 1)] == [lengths(inline, layer) for layer in (0, 1)]
    assert str(Method.parse(from_file)).count(str(path)) == 1
    assert Method.parse(str(Method.parse(inline))) == Method.parse(inline)
    assert Method.parse(from_file).with_budget(40).budget.amount == 40  # type: ignore[union-attr]


def test_a_table_of_another_model_is_refused_before_anything_is_computed() -> None:
    model = tiny_llama(layers=3)
    for table, found in ((TABLE, "2 layers of 2 heads"), (((1.0,) * 6,) * 3, "3 layers of 6 heads")):
        with pytest.raises(SpecError, match=f"the head table has {found}, LlamaForCausalLM.*3 layers of 4 or 2 heads"):
            kvfoundry.KVCache(model, f"headkv(budget=40, table={table})")
    with pytest.raises(SpecError, match="2 layers of 2 heads"):
        Method.parse(f"headkv(budget=40, table={TABLE})").compress(*rows(1, 4, 2, 60), num_layers=3)


def test_a_table_of_kv_heads_is_taken_too() -> None:
    model, ids = tiny_llama(layers=2), torch.arange(3, 93)[None]
    kept = []
    for table in ("((1, 3), (2, 2))", "((1, 1, 3, 3), (2, 2, 2, 2))"):
        for granularity in ("kv_head", "query_head"):
            spec = f"headkv(budget=20, window=4, table={table}, granularity={granularity})"
            cache = kvfoundry.KVCache(model, spec)
            with torch.no_grad():
                model(ids, None, None, cache)
            kept.append([layer.lengths[0].tolist()[:: 1 if granularity == "kv_head" else 2] for layer in cache.layers])
    assert kept[0] == kept[1] == kept[2] == kept[3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("nothing", "it is not JSON"),
        ("[1, 2]", 'must map "layer-head" to a score'),
        ('{"0-0": 1, "zero-1": 2}', "it has 'zero-1': 2"),
        ('{"0-0": 1, "0-1": []}', "it has '0-1'"),
        ('{"0-0": 1, "0-1": 2, "1-1": 2}', "no score for head 0 of layer 1"),
        ('{"0-0": -1}', "finite and not negative"),
        ('{"0-0": NaN}', "finite and not negative"),
        ('{"0-0": 0, "0-1": 0}', "ranks no head"),
    ],
)
def test_a_file_that_is_no_table(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=message):
        Method.parse(f"headkv(budget=64, table={str(path)!r})")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("headkv(budget=64)", "table must be given"),
        ("headkv(budget=64, table='nowhere.json')", "cannot read the head table 'nowhere.json': No such file"),
        ("headkv(budget=64, table=(1, 2))", "table must be a path"),
        ("headkv(budget=64, table=((1, 2), (1,)))", "same number of heads"),
        ("headkv(budget=64, table=(('a', 2),))", "must be numbers"),
        ("headkv(budget=64, table=((1, 2),), beta=0.5)", "beta must be at least 1"),
        ("headkv(budget=64, table=((1, 2),), temperature=-1)", "temperature must be at least 0"),
        ("headkv(budget=64, table=((1, 2),), rule=mine)", "rule must be one of exact, authors, kvcache_factory"),
        ("headkv(budget=64, table=((1, 2),))+adaptive_heads", "both set heads"),
    ],
)
def test_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Method.parse(spec)
