"""cam and cam_merge: dropped values added by lot to the rows behind them."""

import pytest
import torch
from tiny_models import random_ids

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.merging.cam import CamMerge, cascaded, merge_probability, prefill_probability, spread
from kvfoundry.method import Method
from kvfoundry.selection.draws import GivenDraws

from .merge_cases import evidence_of, mask_of, rows_of, scores_of

VALUES = [[1.0], [8.0], [2.0], [3.0], [4.0]]
KEPT = mask_of(True, False, True, True, True)
DROPPED = mask_of(False, True, False, False, False)


def test_the_probability_is_a_share_of_the_mean_behind():
    received = torch.tensor([[[0.5, 0.06, 0.1, 0.2, 0.0]]])
    assert float(merge_probability(received, KEPT, DROPPED, None)[0, 0, 1]) == pytest.approx(0.6)
    assert float(merge_probability(received, KEPT, DROPPED, 1)[0, 0, 1]) == pytest.approx(0.6)
    assert float(merge_probability(received, KEPT, DROPPED, 2)[0, 0, 1]) == pytest.approx(0.4)
    nothing_behind = merge_probability(received, mask_of(True, *[False] * 4), mask_of(False, *[True] * 4), None)
    assert nothing_behind.sum() == 0
    no_attention = merge_probability(torch.zeros(1, 1, 5), KEPT, DROPPED, None)
    assert float(no_attention.sum()) == 0.0


def test_a_value_is_spread_over_the_next_kept_rows():
    values = rows_of(VALUES, VALUES).values
    assert spread(values, KEPT, DROPPED, 2)[0, 0, :, 0].tolist() == [1, 8, 2 + 4, 3 + 4, 4]
    # Fewer rows follow than parts: divided by all the same, or by their number.
    late = mask_of(False, False, False, True, False)
    kept = mask_of(True, True, True, False, True)
    assert spread(values, kept, late, 4)[0, 0, 4, 0].item() == pytest.approx(4 + 3 / 4)
    assert spread(values, kept, late, 4, True)[0, 0, 4, 0].item() == pytest.approx(4 + 3)


def test_rows_that_take_nothing_in_stay_bit_for_bit():
    values = torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(0))
    kept = torch.arange(40).expand(2, 3, 40) != 20
    out = spread(values, kept, ~kept, 4)
    assert torch.equal(out[:, :, :21], values[:, :, :21]) and torch.equal(out[:, :, 25:], values[:, :, 25:])
    assert not torch.equal(out[:, :, 21:25], values[:, :, 21:25])


@pytest.mark.parametrize("padding", [0, 2])
def test_the_disposal_follows_the_draw(padding):
    """Keys of zeros: every row has attention 1/5, so the row merges for certain; a draw of 1 is never below it."""
    rows = rows_of([[0.0]] * 5, VALUES, padding)
    kept = mask_of(True, False, True, True, True, padding=padding)
    for uniform, expected in ((0.99, [1.0, 8.0, 6.0, 7.0, 4.0]), (1.0, [1.0, 8.0, 2.0, 3.0, 4.0])):
        dispose = CamMerge(merge=2, draws=GivenDraws((torch.full((1, 1, 5), uniform),)))
        merged = dispose(evidence_of(rows), kept, torch.zeros(1, 1, 5 + padding))
        assert merged.values[0, 0, :5, 0].tolist() == expected
    prompt = CamMerge(merge=2, prompt=False)(evidence_of(rows, decoding=False), kept, scores_of(*[0.0] * 5))
    assert torch.equal(prompt.values, rows.values)


def test_only_the_best_of_the_dropped_rows_merge():
    rows = rows_of([[0.0]] * 5, VALUES)
    kept = mask_of(False, False, True, True, True)
    dispose = CamMerge(merge=1, most=1, draws=GivenDraws((torch.zeros(1, 1, 5),)))
    merged = dispose(evidence_of(rows), kept, scores_of(5.0, 1.0, 0.0, 0.0, 0.0))
    assert merged.values[0, 0, 2, 0].item() == 2 + 1


def test_the_prefill_form_passes_on_what_it_took_in():
    """Rows 1 and 2 are spread over two rows each: row 2 takes 4, and passes on 3 of its 6."""
    values = rows_of(VALUES, VALUES).values
    merges = mask_of(False, True, True, False, False)
    out = cascaded(values, merges, torch.tensor([[5]]), 2)
    assert out[0, 0, :, 0].tolist() == [1, 8, 2 + 4, 3 + 4 + 3, 4 + 3]
    received = torch.tensor([[[0.4, 0.1, 0.2, 0.1, 0.2]]])
    probability = prefill_probability(received, torch.tensor([[1]]), torch.tensor([[5]]), 2)
    assert probability[0, 0].tolist() == pytest.approx([0, 0.25, 0.5, 0, 0])


def test_cam_keeps_what_streamingllm_keeps_and_other_values(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 50)
    caches = {spec: kvfoundry.KVCache(model, spec) for spec in ("cam(budget=16, merge=4)", "streamingllm(budget=16)")}
    for cache in caches.values():
        with torch.no_grad():
            model(ids[:, :40], None, None, cache)
            for at in range(40, 50):
                model(ids[:, at : at + 1], None, None, cache)
    ours, plain = (cache.layers[0] for cache in caches.values())
    assert torch.equal(ours.positions, plain.positions) and torch.equal(ours.keys, plain.keys)
    assert not torch.equal(ours.values, plain.values)


@pytest.mark.parametrize("given", ["merge=0", "form='post'", "start=1.5", "start=nan", "window=0", "seed=-1"])
def test_impossible_values_are_refused(given):
    with pytest.raises(SpecError):
        Method.parse(f"cam(budget=64, {given})")
