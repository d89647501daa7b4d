"""Codes follow their rows: streaming, padding, reordering, cropping, forks and eviction."""

from __future__ import annotations

import copy

import pytest
import torch

from kvfoundry.kernels.attention import naive
from kvfoundry.layouts.base import Reading
from kvfoundry.method import Method

from .support import HEAD_BY_HEAD, SPECS, assert_same_parts, feed, parts, prompt_of, rows_of

TOKENS = 120


@pytest.mark.parametrize("spec", SPECS)
def test_one_at_a_time_in_pieces_and_at_once_write_the_same(spec):
    rows = rows_of(2, TOKENS)
    prompt = prompt_of(spec, TOKENS)
    whole = feed(spec, rows, [TOKENS])
    assert any(part.numel() for name, part in parts(whole).items() if ".rows." in name)
    for pieces in ([1] * TOKENS, [7] * 17 + [1], [50, 1, 1, 30, 38]):
        assert_same_parts(feed(spec, rows, pieces, prompt=prompt), whole)
    if prompt is not None:  # and in decode, after the prompt has settled what it settles
        first = feed(spec, rows, [60, 60])
        for pieces in ([60] + [1] * 60, [60] + [7] * 8 + [4]):
            assert_same_parts(feed(spec, rows, pieces), first)


@pytest.mark.parametrize("pieces", [[TOKENS], [7] * 17 + [1], [100] + [1] * 20])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_enters_no_statistics(spec, pieces):
    """B23: each row of a left-padded batch writes what it writes alone."""
    lengths = [TOKENS, 20, 77]
    mask = torch.zeros(3, TOKENS, dtype=torch.long)
    rows = rows_of(3, TOKENS)
    for b, length in enumerate(lengths):
        mask[b, TOKENS - length :] = 1
        for tensor in rows:
            tensor[b, :, : TOKENS - length] = 1e4  # what a model computes for padding may be anything
    together = feed(spec, rows, pieces, mask, prompt_of(spec, TOKENS))
    for b, length in enumerate(lengths):
        alone = feed(spec, [tensor[b : b + 1, :, TOKENS - length :] for tensor in rows], [length])
        picked = copy.deepcopy(together)
        picked.batch_select_indices(torch.tensor([b]))
        assert_same_parts(picked, alone)


@pytest.mark.parametrize("spec", SPECS)
def test_reordering_repeating_and_selecting_act_on_every_part(spec):
    """B33: against copies of the layers that each row would be alone; and all go on alike."""
    rows, later = rows_of(3, TOKENS), rows_of(1, 60, seed=1)
    layer = feed(spec, rows, [70] + [1] * 50)
    layer.reorder_cache(torch.tensor([2, 0, 2]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([5, 0, 3]))
    source = [2, 2, 0]
    for start in range(60):
        part = [tensor[:, :, start : start + 1].expand(3, -1, -1, -1) for tensor in later]
        output = layer.step(*part)
    for b, origin in enumerate(source):
        alone = feed(spec, [torch.cat([t[origin : origin + 1], u], 2) for t, u in zip(rows, later, strict=True)],
                     [70] + [1] * 110)  # fmt: skip
        picked = copy.deepcopy(layer)
        picked.batch_select_indices(torch.tensor([b]))
        assert_same_parts(picked, alone)
    assert torch.allclose(output[0], output[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("back", [3, 40, 90])
def test_a_crop_takes_rows_from_every_part_and_generation_goes_on(spec, back):
    layer, later = feed(spec, rows_of(2, TOKENS), [TOKENS]), rows_of(2, 100, seed=1)
    keys, values = layer.keys[:, :, :-back], layer.values[:, :, :-back]
    before = layer.nbytes
    layer.crop(-back)
    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values) and layer.nbytes < before
    for start in range(100):
        part = [tensor[:, :, start : start + 1] for tensor in later]
        output = layer.step(*part)
    assert layer.positions[0, 0].tolist() == list(range(TOKENS - back + 100))
    expected = _by_hand(layer, *[tensor[:, :, -1:] for tensor in later])
    again = layer.rows.attend(later[0][:, :, -1:], torch.full((2, 1), layer.seen - 1), Reading(naive.attend, 32**-0.5))
    assert torch.allclose(again, expected, atol=1e-5) and output.shape == again.shape


def _by_hand(layer, query, key, value):
    keys, values = layer.keys.repeat_interleave(2, dim=1), layer.values.repeat_interleave(2, dim=1)
    return (query @ keys.transpose(2, 3) * 32**-0.5).softmax(-1) @ values


@pytest.mark.parametrize("spec", SPECS)
def test_a_fork_and_its_origin_do_not_disturb_each_other(spec):
    rows = rows_of(1, TOKENS)
    first = feed(spec, [t[:, :, :80] for t in rows], [80])
    second = first.fork(copy.copy(first.prompt))
    for layer, order in ((first, range(80, TOKENS)), (second, range(TOKENS - 1, 79, -1))):
        for at in order:
            layer.step(*[t[:, :, at : at + 1] for t in rows])
    assert_same_parts(first, feed(spec, rows, [80, 40]))
    turned = [torch.cat([t[:, :, :80], t[:, :, 80:].flip(2)], 2) for t in rows]
    assert_same_parts(second, feed(spec, turned, [80, 40]))


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_is_evicted_first_and_then_written(spec):
    """What stays is encoded as if it had come alone: the same codes in every head."""
    rows = rows_of(1, TOKENS)
    layer = feed(f"snapkv(budget=90, window=8)+{spec}", rows, [TOKENS])
    bare = feed("snapkv(budget=90, window=8)", rows, [TOKENS])
    alone = feed(spec, (rows[0][:, :, :90], bare.keys, bare.values), [90])
    assert torch.equal(layer.positions, bare.positions)
    for name, tensor in parts(layer).items():
        assert name == "positions" or torch.equal(tensor, parts(alone)[name]), name


@pytest.mark.parametrize(
    "evicting", ["h2o(budget=60, window=8)", "tova(budget=60)", "streamingllm(budget=60, sinks=2)"]
)
@pytest.mark.parametrize("spec", SPECS)
def test_eviction_in_decode_picks_codes_and_never_writes_them_again(spec, evicting):
    """A row that stays coded keeps bitwise the value it had; lengths are those of the budget."""
    method, rows = Method.parse(f"{evicting}+{spec}"), rows_of(2, TOKENS + 60)
    layer = feed(method, rows, [TOKENS])
    for at in range(TOKENS, TOKENS + 60):
        before, positions = parts(layer), layer.positions
        stored = {"keys": layer.keys, "values": layer.values}
        layer.step(*[t[:, :, at : at + 1] for t in rows])
        assert layer.lengths.unique().tolist() == [60]
        for name, old in stored.items():
            counts, new = before[f"{name}.counts"], getattr(layer, name)
            for b in range(2):
                for h in range(2):
                    coded = {p: i for i, p in enumerate(positions[b, h, : int(counts[b, h])].tolist())}
                    stayed = [(i, coded[p]) for i, p in enumerate(layer.positions[b, h].tolist()) if p in coded]
                    now, then = torch.tensor(stayed, dtype=torch.long).view(-1, 2).unbind(1)
                    assert torch.equal(new[b, h, now], old[b, h, then])
    held = sum(t.untyped_storage().nbytes() for name, t in parts(layer).items() if ".tables." in name)
    assert int(parts(layer)["keys.blocks"].max()) <= 60 and held < 60 * 4 * 32 * 4 * 4


@pytest.mark.parametrize("spec", HEAD_BY_HEAD)
def test_ragged_heads_are_written_head_by_head(spec):
    rows = rows_of(2, TOKENS)
    method = f"adakv(budget=80, window=8, floor=0.1)+{spec}"
    layer, bare = feed(method, rows, [TOKENS]), feed(method.split("+")[0], rows, [TOKENS])
    assert torch.equal(layer.positions, bare.positions) and layer.lengths.unique().numel() > 1
    for b in range(2):
        for h in range(2):
            length = int(bare.lengths[b, h])
            own = [t[b : b + 1, h : h + 1, :length] for t in (bare.keys, bare.values)]
            alone = feed(spec, (torch.zeros_like(own[0]), *own), [length])
            assert torch.equal(layer.keys[b, h, :length], alone.keys[0, 0])
            assert torch.equal(layer.values[b, h, :length], alone.values[0, 0])
    for at in range(40):
        output = layer.step(*rows_of(2, 1, seed=at))
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("spec", SPECS)
def test_pages_that_cover_everything_equal_dense_reading(spec):
    """codec + Quest."""
    rows, later = rows_of(2, TOKENS), rows_of(2, 30, seed=3)
    dense, paged = feed(spec, rows, [TOKENS]), feed(f"quest(budget=400, page=8, skip_layers=0)+{spec}", rows, [TOKENS])
    few = feed(f"quest(budget=40, page=8, skip_layers=0)+{spec}", rows, [TOKENS])
    for at in range(30):
        part = [t[:, :, at : at + 1] for t in later]
        expected = dense.step(*part)
        assert torch.allclose(paged.step(*part), expected, atol=1e-5)
        some = few.step(*part)
    assert not torch.allclose(some, expected, atol=1e-3)
    # Every page but none left out: the reader itself, over decoded rows.
    paged._read_budget = torch.full((2,), int(paged.lengths.max()) - 1)
    part = rows_of(2, 1, seed=9)
    close = paged.step(*part)
    assert torch.isfinite(close).all() and float((close - dense.step(*part)).abs().mean()) < 0.1


@pytest.mark.parametrize("merge", ["pivot_merge()", "weighted_merge()", "value_merge()"])
def test_a_prompt_is_merged_first_and_then_written(merge):
    rows = rows_of(1, TOKENS)
    method = f"snapkv(budget=90, window=8)+{merge}"
    bare = feed(method, rows, [TOKENS])
    alone = feed("int8(group=16)", (rows[0][:, :, :90], bare.keys, bare.values), [90])
    layer = feed(f"{method}+int8(group=16)", rows, [TOKENS])
    assert torch.equal(layer.keys, alone.keys) and torch.equal(layer.values, alone.values)


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_in_pieces_is_written_after_each_unless_rows_may_still_go(spec):
    rows = rows_of(1, TOKENS)
    early = feed(spec, rows, [60], prompt=TOKENS).rows
    if prompt_of(spec, 1) is None:
        assert int(early.keys.counts.max()) > 0
    else:  # it has not seen yet what it settles on
        assert not hasattr(early, "codec")
    waiting = feed(f"snapkv(budget=90, window=8)+{spec}", rows, [60], prompt=TOKENS)
    assert not hasattr(waiting.rows, "codec")
