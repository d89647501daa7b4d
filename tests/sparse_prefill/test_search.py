"""The search for patterns: equal cost, the right kind for heads that were made for one, and the table's files."""

from __future__ import annotations

import json
import sys

import huggingface_hub
import pytest
import torch
from tiny_models import random_ids

import kvfoundry
from kvfoundry.analysis.patterns import search_patterns
from kvfoundry.cli import main
from kvfoundry.errors import DataError, SpecError
from kvfoundry.kernels.sparse_prefill import Tiles, naive
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.patterns import Sight
from kvfoundry.sparse_prefill.prefill import index_of
from kvfoundry.sparse_prefill.search import candidates, output_errors
from kvfoundry.sparse_prefill.table import PatternTable, counts_of
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash

from .support import pointing, sight_of

DEFAULT = VerticalSlash()
HEAD = '{"format": "kvfoundry-minference-1", "model": {}, "about": {}, "patterns": '
TEXT = " ".join(f"w{3 + (7 * i * i + i) % 120}" for i in range(400))


def test_every_candidate_costs_the_same():
    sight = sight_of(rows=512, tile=16, block=8)
    for pattern in candidates(128, 16, 8, VerticalSlash(window=4, sinks=2, recent=3)):
        index = index_of(sight, (pattern,) * 4)
        work = index.counts + -(-index.column_counts // 8)
        assert work[..., -1].tolist() == [[16] * 4], pattern


def test_errors_are_those_of_the_outputs():
    sight = sight_of(softcap=3.0, sinks=torch.linspace(-1, 1, 4))
    value = torch.randn(sight.key.shape, generator=torch.Generator().manual_seed(5))
    patterns = [AShape(4, 8), VerticalSlash(4, 8, 4, 2, 3), BlockSparse(3), AShape(0, 500)]
    found = output_errors(sight, value, patterns, torch.arange(0, 96, 5))
    outputs = [
        naive.attend(
            sight.query, sight.key, value, index_of(sight, (pattern,) * 4), scaling=0.25, softcap=3.0,
            sinks=sight.sinks,
        )[0, :, ::5]
        for pattern in patterns
    ]  # fmt: skip
    for number, output in enumerate(outputs):
        wrong = (output - outputs[-1]).square().sum(dim=(1, 2)) / outputs[-1].square().sum(dim=(1, 2))
        assert torch.allclose(found[number], wrong, atol=1e-5)
    assert float(found[-1].max()) < 1e-10 < float(found[:-1].min())


def test_heads_get_the_pattern_that_they_follow():
    rows, strength = 512, 30.0
    lines = pointing(rows, columns=[40, 301], offsets=[77, 260])
    near = pointing(rows, columns=[], offsets=[3, 5], seed=1)
    # the last queries look elsewhere: lines that are estimated from them are the wrong ones, a window is right
    looking = near.query[0, 0].clone()
    looking[-16:] = near.key[0, 0, 20:340:20]
    # and blocks that are like the queries on average, though nobody looks there, are what block-sparse takes
    held = near.key[0, 0].clone()
    held[:96] += 0.35 * near.query[0, 0, 0]
    # tiles of queries that look at one block each, here and there
    generator = torch.Generator().manual_seed(2)
    topics = torch.nn.functional.normalize(torch.randn(rows // 8, 256, generator=generator), dim=-1)
    key = topics.repeat_interleave(8, dim=0)
    place = torch.tensor([int(torch.randint(0, max(1, tile), (1,), generator=generator)) for tile in range(rows // 8)])
    query = topics[place].repeat_interleave(8, dim=0)
    sight = Sight(
        torch.stack([lines.query[0, 0], looking, query])[None],
        torch.stack([lines.key[0, 0], held, key])[None],
        Tiles.of(torch.tensor([[rows] * 3]), torch.tensor([rows]), 8, 8, "cpu"),
        strength,
    )
    value = torch.randn(1, 3, rows, 8, generator=generator)
    chosen = candidates(48, 8, 8, VerticalSlash(window=16, sinks=0, recent=1))
    errors = output_errors(sight, value, chosen, torch.arange(0, rows - 16, 3))
    best = errors.argmin(dim=0)
    assert [type(chosen[number]) for number in best] == [VerticalSlash, AShape, BlockSparse]


def test_a_table_serves_its_model_and_no_other(own_model, tokenizer, tmp_path):
    model, path, seen = own_model("llama"), tmp_path / "patterns.json", []
    options = dict(tokens=256, cost=48, samples=32, tile=8, block=8)
    found = search_patterns(model, tokenizer, TEXT, on_layer=lambda *at: seen.append(at), **options)
    assert seen == [(1, 2), (2, 2)] and found.about["mean_error"] > 0
    assert [len(row) for row in found.patterns] == [8, 8] and sum(counts_of(found).values()) == 16
    found.save(path)
    assert PatternTable.read(path, DEFAULT) == found
    spec = f"minference(patterns={str(path)!r}, window=7, tile=8, block=8)"
    method = kvfoundry.Method.parse(spec)
    assert str(method) == spec
    vertical = [pattern for pattern in method.prefill.table.patterns[0] if isinstance(pattern, VerticalSlash)]
    assert all(pattern.window == 7 for pattern in vertical)
    cache = kvfoundry.KVCache(model, spec)
    with torch.inference_mode():
        model(random_ids(1, 200), past_key_values=cache)
    assert 0 < cache.prefill_share < 1
    other = own_model("llama")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with pytest.raises(SpecError, match=r"another model \(weights"):
        kvfoundry.KVCache(other, spec)
    with pytest.raises(SpecError, match=r"another model \(family 'llama', here 'qwen3'"):
        kvfoundry.KVCache(own_model("qwen3"), spec)


def test_the_authors_tables_are_read(own_model, tmp_path):
    path = tmp_path / "published.json"
    row = {str(head): ["vertical_and_slash", 1000, 6096, 336379.7] for head in range(6)}
    row |= {"6": ["block_sparse", 1000, 1024, 0.5], "7": ["stream_llm", 100, 800, 0.5]}
    path.write_text(json.dumps([row, row]))
    table = PatternTable.read(path, DEFAULT)
    assert table.patterns[1] == (*[VerticalSlash(1000, 6096)] * 6, BlockSparse(100), AShape(100, 800))
    kvfoundry.KVCache(own_model("llama"), f"minference(patterns={str(path)!r})")
    path.write_text(json.dumps([row]))
    with pytest.raises(SpecError, match=r"are of 1 layers of 8 heads, .* has 2 full-attention layers of 8"):
        kvfoundry.KVCache(own_model("llama"), f"minference(patterns={str(path)!r})")


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[{}]", "3", '[{"0": ["diagonal", 1, 2]}]', '[{"1": ["block_sparse", 1, 2]}]',
     HEAD + '{"0-0": {"pattern": "a_shape"}}}', HEAD + "{}}",
     HEAD + '{"0-0": {"pattern": "block_sparse", "blocks": 0}}}'],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"is no table of patterns|it is not JSON") as caught:
        kvfoundry.Method.parse(f"minference(patterns={str(path)!r})")
    assert "\n" not in str(caught.value)


def test_texts_and_costs_that_do_not_fit_are_refused(own_model, tokenizer):
    model = own_model("llama")
    with pytest.raises(DataError, match="fewer than 4096"):
        search_patterns(model, tokenizer, TEXT)
    with pytest.raises(DataError, match="is read whole at a cost of 1024 rows"):
        search_patterns(model, tokenizer, TEXT, tokens=300)
    with pytest.raises(SpecError, match="leaves nothing to choose beside a tile's own 128"):
        search_patterns(model, tokenizer, TEXT, tokens=300, cost=128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--for", "snapkv"], "unknown method of calibrate 'snapkv'"),
        (["--for", "minference", "--outliers", "0.1"], "--outliers means nothing to minference"),
        (["--for", "kvquant", "--cost", "512"], "--cost means nothing to kvquant"),
        (["--for", "minference", "--cost", "100"], "leaves nothing to choose"),
        (["--for", "minference", "--out", "nowhere/patterns.json"], "its folder does not exist"),
        (["--for", "minference", "--model", "nowhere/model"], "nowhere/model"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_writes_a_table(own_model, tokenizer, tmp_path, monkeypatch, capsys):
    model = own_model("llama")
    monkeypatch.setattr(sys.modules["kvfoundry.cli.calibrate"], "load_model", lambda *_: (model, tokenizer))
    text, out = tmp_path / "text.txt", tmp_path / "patterns.json"
    text.write_text(TEXT)
    arguments = ["--tokens", "380", "--cost", "256", "--samples", "16", "--text", str(text), "--out", str(out)]
    assert main(["calibrate", "--for", "minference", *arguments]) == 0
    assert "2 layers, heads by pattern" in capsys.readouterr().out
    assert len(PatternTable.read(out, DEFAULT).patterns) == 2
