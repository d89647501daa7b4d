"""MInference in a model: exact where it covers everything, dense in decode, and what it says about its work."""

from __future__ import annotations

import json

import pytest
import torch
from laws.support import forward_pieces, greedy, kept_positions, small_spec
from tiny_models import FAMILIES, left_padded, random_ids

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.evaluate.board import columns_of
from kvfoundry.evaluate.results import RESULTS, read_lines
from kvfoundry.evaluate.runner import evaluate
from kvfoundry.evaluate.tasks.niah import NeedleTask
from kvfoundry.kernels.attention import backend
from kvfoundry.kernels.sparse_prefill import naive
from kvfoundry.layouts import DenseRows
from kvfoundry.method import Method
from kvfoundry.sparse_prefill.block_sparse import BlockSparse

SMALL = small_spec("minference")
# Every pattern, wide enough for the prompts below and not so wide that it is known without looking.
COVERING = ("minference(vertical=48, slash=1, window=4, sinks=0, recent=1, tile=4, block=2)",
            "minference(pattern=a_shape, first=48, local=1, tile=4, block=2)",
            "minference(pattern=block_sparse, blocks=24, tile=4, block=2)")  # fmt: skip


@pytest.mark.parametrize("spec", [*COVERING, "minference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_that_cover_the_prompt_give_the_models_own_logits(
    spec, family, tiny_model, reference_model, monkeypatch
):
    """At once and in pieces, padded: by the index, and for the defaults by dense attention itself."""
    ids, mask = left_padded([46, 31])
    expected = forward_pieces(reference_model(family), None, ids, [46], mask)
    model, calls = tiny_model(family), []
    attend = naive.attend
    monkeypatch.setattr(BlockSparse, "whole", lambda *_: False)  # it is whole or not, and never covers by chance
    monkeypatch.setattr(naive, "attend", lambda *args, **terms: calls.append(1) or attend(*args, **terms))
    for pieces in ([46], [20, 15, 11]):
        cache = kvfoundry.KVCache(model, spec)
        cache.expect_prompt(46)
        found = forward_pieces(model, cache, ids, pieces, mask)
        assert float(((found - expected).abs().amax(dim=-1) * mask).max()) < 1e-4
        if any(layer.rule.span is None for layer in cache.attention_layers):
            assert cache.prefill_share == 1.0 and cache.notes[0].endswith("its patterns cover a prompt of this length.")
    assert bool(calls) == (spec != "minference" and any(layer.rule.span is None for layer in cache.attention_layers))


def test_the_prompt_is_attention_over_the_index_and_decode_is_dense(tiny_model):
    """One layer by hand: the output of the prompt is the masked softmax, that of later tokens sees every row."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 44, 16, generator=generator) for heads in (8, 2, 2))
    layer = Method.parse(SMALL).compress(query[:, :, :40], key[:, :, :40], value[:, :, :40])
    assert layer.lengths.tolist() == [[40, 40]] * 2 and torch.equal(layer.keys, key[:, :, :40])
    assert 0 < layer.prompt.work.share < 1
    found = layer.step(query[:, :, 40:], key[:, :, 40:], value[:, :, 40:])
    logits = query[:, :, 40:] @ key.repeat_interleave(4, dim=1).transpose(2, 3) / 4
    seen = torch.ones(4, 44, dtype=torch.bool).tril(40)
    expected = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(4, dim=1)
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_share_is_that_of_the_blocks_that_are_computed(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 66)
    cache = kvfoundry.KVCache(model, "minference(pattern=a_shape, first=0, local=1, tile=4, block=4)")
    forward_pieces(model, cache, ids, [64, 1, 1])
    # 16 tiles of 1 to 16 blocks; a window of one row lies in the block of its own tile
    assert cache.prefill_share == pytest.approx(16 / 136)
    assert cache.notes == [f"{cache.method} computed 11.8% of the prompt's attention."]
    assert cache.fork().prefill_share == cache.prefill_share
    cache.reset()
    assert cache.prefill_share is None and cache.notes == []
    full = kvfoundry.KVCache(model)
    forward_pieces(model, full, ids, [66])
    assert full.prefill_share is None


@pytest.mark.parametrize("pieces", [[40], [16, 16, 8], [30, 1, 9]])
@pytest.mark.parametrize(
    "other",
    ["snapkv(budget=12, window=4)", "adakv(budget=12, window=4)", "streamingllm(budget=12, sinks=2)",
     "tova(budget=12)", "quest(budget=8, page=4, skip_layers=0)", "int4(group=4, residual=8)",
     "think(window=4, recent=3)",
     "minicache(start=0)", "snapkv(budget=12, window=4)+park()", "snapkv(budget=12, window=4, granularity=query_head)",
     "scissorhands(budget=12, history=4, recent=3)", "expected_attention(budget=12, sinks=2)"],
)  # fmt: skip
def test_it_goes_with_methods_that_act_on_the_rows(other, pieces, tiny_model):
    """Left padding, a prompt in pieces, decode; and every batch row is what it is alone."""
    model, spec = tiny_model("llama"), f"{SMALL}+{other}"
    assert Method.parse(f"{other}+{SMALL}").prefill == Method.parse(spec).prefill
    ids, mask = left_padded([40, 23])
    together = kvfoundry.KVCache(model, spec)
    together.expect_prompt(40)
    forward_pieces(model, together, ids, pieces, mask)
    assert 0 < together.prefill_share < 1
    if pieces == [40]:
        alone = kvfoundry.KVCache(model, spec)
        tokens = greedy(model, alone, ids[1:, 17:])
        fresh = kvfoundry.KVCache(model, spec)
        assert torch.equal(greedy(model, fresh, ids, mask)[1], tokens[0])
        assert kept_positions(fresh, 1) == kept_positions(alone)


@pytest.mark.parametrize("spec", ["h2o(budget=64)", "h2o(budget=0.5, window=8)+protect(sinks=2)"])
def test_sums_over_the_whole_prompt_are_refused_by_name(spec):
    for both in (f"{spec}+minference", f"minference+{spec}"):
        with pytest.raises(
            SpecError, match=rf"{spec[:3]}\w* adds up the attention of every query of the prompt, and min"
        ):
            Method.parse(both)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("minference(pattern=diagonal)", "pattern must be one of"),
        ("minference(tile=100)", "tile must be a power of two"),
        ("minference(tile=32)", "must not be smaller than a block of 64"),
        ("minference(patterns=3)", "patterns must be the path"),
        ("minference(patterns='nowhere.json')", "cannot read the patterns 'nowhere.json'"),
        ("minference(slash=0)", "slash must be a whole number of at least 1"),
        ("minference+minference", "given twice"),
    ],
)
def test_bad_specs_are_refused_in_one_line(spec, words):
    with pytest.raises(SpecError, match=words) as caught:
        Method.parse(spec)
    assert "\n" not in str(caught.value)


def test_a_dense_reading_is_the_layouts_own(tiny_model, monkeypatch):
    """What covers everything is computed by the backend that the model was attached with."""
    called = []
    attend = DenseRows.attend
    monkeypatch.setattr(
        DenseRows,
        "attend",
        lambda rows, query, at, reading: called.append(reading.kernel) or attend(rows, query, at, reading),
    )
    forward_pieces(tiny_model("llama"), kvfoundry.KVCache(tiny_model("llama"), "minference"), random_ids(1, 40), [40])
    assert set(called) <= {backend("sdpa"), backend("eager")} and len(called) == 2


def test_methods_that_read_a_prompt_in_different_ways_do_not_share_one(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(SpecError, match=r"fullkv and minference.* read a prompt in different ways"):
        kvfoundry.SharedPrompt(model, ["fullkv", SMALL])
    shared = kvfoundry.SharedPrompt(model, [SMALL, f"{SMALL}+snapkv(budget=12, window=4)"])
    ids = random_ids(1, 40)
    with torch.inference_mode():
        logits = model(ids, past_key_values=shared).logits
    alone = kvfoundry.KVCache(model, SMALL)
    assert torch.equal(logits, forward_pieces(model, alone, ids, [40]))
    assert [cache.prefill_share for cache in shared.caches] == [alone.prefill_share] * 2


def test_the_share_is_in_the_results_of_a_run(tiny_model, tokenizer, tmp_path):
    task = NeedleTask(lengths=(120,), depths=(50.0,), max_new_tokens=3)
    evaluate(tiny_model("llama"), tokenizer, [task], ["fullkv", SMALL], out=tmp_path / "out")
    lines = {line["method"]: line for line in read_lines(tmp_path / "out" / RESULTS)}
    assert lines["fullkv"]["prefill_share"] is None and 0 < lines[str(Method.parse(SMALL))]["prefill_share"] < 1
    shown = [column.name for column in columns_of(list(lines.values()))]
    assert "prefill_share" in shown and "prefill_share" not in [c.name for c in columns_of([lines["fullkv"]])]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["prefill_share"] for row in summary["rows"]] == [
        None, lines[str(Method.parse(SMALL))]["prefill_share"],
    ]  # fmt: skip
