"""Drivers for recordings of pruned key channels: one layer from tensors, and a tiny model."""

import json

import torch
from safetensors.torch import load_file
from torch import Tensor

import kvfoundry
from kvfoundry.codecs.think import channel_scores
from kvfoundry.layouts.channel_pruned import ChannelPrunedRows

from .cases import Case
from .mapping import Claim, Unmapped, recipe_for
from .replay import _by_position, _compare_gather, _load


def replay_tensors(case: Case, claim: Claim) -> None:
    """Channels, and every recorded row: which token it is follows from its content, bit for bit."""
    inputs = case.inputs()
    if inputs is None:
        raise Unmapped("the recording names no input tensors")
    query, key, value = inputs["q"], inputs["k"], inputs["v"]
    recipe = recipe_for(case, claim, key.shape[2])
    method = kvfoundry.Method.parse(recipe.spec)
    keep, pruned, recent = (case.tensor(name) for name in ("channel_keep", "keys_pruned", "keys_recent"))
    if keep is None or pruned is None or recent is None:
        raise Unmapped("the recording needs channel_keep, keys_pruned and keys_recent")
    query, key, value = (tensor[: keep.shape[0]] for tensor in (query, key, value))  # recorded for the first batch row
    layer = method.compress(query, key, value)
    rows = layer.rows
    assert isinstance(rows, ChannelPrunedRows)
    key = key.repeat_interleave(keep.shape[1] // key.shape[1], dim=1)
    ours = torch.zeros_like(keep, dtype=torch.bool).scatter(2, rows.channels, True)
    assert torch.equal(ours, keep.bool()), f"{recipe.spec}: channels"
    assert torch.equal(rows.pruned_lengths, torch.full(keep.shape[:2], pruned.shape[2])), recipe.spec
    view, positions = rows.view(), layer.positions
    for head in range(keep.shape[1]):
        channels = rows.channels[0, head]
        found = _tokens_of(pruned[0, head], key[0, head][:, channels]) + _tokens_of(recent[0, head], key[0, head])
        where = f"{recipe.spec}, head {head}"
        assert sorted(found) == positions[0, head].tolist(), f"{where}: kept tokens"
        # The reference stores its rows by score, so "recent" can hold others than the newest tokens; the channels that
        # both have are the same for every row.
        stored = view.keys[0, head][:, channels]
        assert torch.equal(stored, key[0, head][positions[0, head]][:, channels]), where
        newest = view.keys[0, head][pruned.shape[2] :]
        assert torch.equal(newest, key[0, head][positions[0, head][pruned.shape[2] :]]), f"{where}: newest rows whole"
    _compare_gather(positions, view.values, value, f"values of {recipe.spec}")
    _compare_scores(case, query, key, positions)


def _tokens_of(rows: Tensor, source: Tensor) -> list[int]:
    """The token that each row [rows, dim] is a copy of."""
    same = (rows[:, None] == source[None]).all(dim=-1)
    assert bool((same.sum(dim=1) == 1).all()), "a recorded row is no copy of a key in the channels that we keep"
    return same.int().argmax(dim=1).tolist()


def _compare_scores(case: Case, query: Tensor, key: Tensor, positions: Tensor) -> None:
    wanted = case.tensor("channel_scores")
    if wanted is None:
        return
    last = query[:, :, -32:]
    kept = key.gather(2, positions[..., None].expand(-1, -1, -1, key.shape[3]))
    everything = torch.ones(kept.shape[:3], dtype=torch.bool)
    scores = channel_scores(last, kept, everything)
    torch.testing.assert_close(scores, wanted, **case.tolerance("scores"))


def replay_model(case: Case, claim: Claim) -> None:
    """The prompt's keys with zeros in the channels that are gone, then logits of teacher-forced steps."""
    folder = case.folder.parent / "_models" / case.entry["model"]
    info = json.loads((folder / "model_info.json").read_text(encoding="utf-8"))
    tokens, wanted = case.entry["seq_len"], case.tensor("decode_logits")
    assert tokens == info["prefill_len"] and wanted is not None
    ids = load_file(folder / "baseline.safetensors")["input_ids"].long()[: case.entry["batch"]]
    model = _load(folder)
    cache = kvfoundry.KVCache(model, recipe_for(case, claim, tokens).spec)
    with torch.no_grad():
        model(ids[:, :tokens], None, None, cache)
        for number, layer in enumerate(cache.attention_layers):
            indices = case.tensor(f"l{number}.indices")
            order = layer.positions if indices is None else indices.long()
            assert torch.equal(layer.positions, order.sort(dim=-1).values), f"kept tokens of layer {number}"
            for name in ("keys", "values"):
                recorded = case.tensor(f"l{number}.{name}")
                if recorded is not None:
                    wanted_rows = _by_position(recorded, order)
                    torch.testing.assert_close(getattr(layer, name), wanted_rows, **case.tolerance("scores"))
        steps = [
            model(ids[:, at : at + 1], None, None, cache).logits[:, -1]
            for at in range(tokens, tokens + wanted.shape[1])
        ]
    torch.testing.assert_close(torch.stack(steps, dim=1), wanted, **case.tolerance("logits"))
