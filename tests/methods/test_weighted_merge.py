"""weighted_merge: merging sets of similar neighbours with Gaussian weights, and the nearest-neighbour form."""

import math

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.merging.weighted import merging_sets, neighbour_merged, pivots, sets_merged
from kvfoundry.method import Method

from .merge_cases import mask_of, rows_of, scores_of

# Two runs of similar neighbours, 0-2 and 3-4, and row 5, which is like row 0 but far from it.
KEYS = [[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0], [1.0, 0.0]]
VALUES = [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]


def test_sets_are_runs_of_similar_neighbours():
    rows = rows_of(KEYS, VALUES)
    assert merging_sets(rows, 0.75)[0, 0].tolist() == [0, 0, 0, 1, 1, 2]
    assert merging_sets(rows, 1.0)[0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert merging_sets(rows, -1.0)[0, 0].tolist() == [0] * 6


def test_the_pivot_is_the_kept_row_with_the_best_score():
    rows = rows_of(KEYS, VALUES)
    kept = mask_of(True, False, True, False, False, True)
    found = pivots(merging_sets(rows, 0.75), kept, scores_of(1.0, 9.0, 2.0, 5.0, 5.0, 0.0))
    assert found[0, 0].tolist() == [2, 2, 2, -1, -1, 5]
    hopeless = pivots(merging_sets(rows, 0.75), kept, torch.full((1, 1, 6), -math.inf))
    assert hopeless[0, 0].tolist() == [0, 0, 0, -1, -1, 5]


@pytest.mark.parametrize("padding", [0, 3])
def test_gaussian_weights_by_hand(padding):
    """Pivot 0 takes rows 1 and 2 at distances 0.1 and 0.2, mean 0.15; the set of 3 and 4 keeps nothing and is lost."""
    rows = rows_of(KEYS, VALUES, padding)
    kept = mask_of(True, False, False, False, False, True, padding=padding)
    merged = sets_merged(rows, kept, torch.zeros(1, 1, 6 + padding), 0.75, None)
    near, far = math.exp(-((0.1 / 0.15) ** 2) / 2), math.exp(-((0.2 / 0.15) ** 2) / 2)
    total = 1 + near + far
    assert float(merged.values[0, 0, 0, 0]) == pytest.approx((near * 1 + far * 2) / total, rel=1e-4)
    assert float(merged.keys[0, 0, 0, 1]) == pytest.approx((near * 0.1 + far * 0.2) / total, rel=1e-4)
    assert torch.equal(merged.values[:, :, 3:], rows.values[:, :, 3:])


def test_a_given_sigma_is_used():
    rows = rows_of(KEYS[:2], VALUES[:2])
    merged = sets_merged(rows, mask_of(True, False), scores_of(0.0, 0.0), 0.75, 0.1)
    weight = math.exp(-0.5)
    assert float(merged.values[0, 0, 0, 0]) == pytest.approx(weight / (1 + weight), rel=1e-4)


def test_the_neighbour_form_reaches_over_distance():
    """Row 5 equals row 0: weight 1 to the target's 1."""
    rows = rows_of(KEYS, VALUES)
    merged = neighbour_merged(rows, mask_of(True, True, True, True, True, False))
    assert float(merged.values[0, 0, 0, 0]) == pytest.approx(2.5)


@pytest.mark.parametrize("form", ["sets", "neighbour"])
def test_dropping_nothing_returns_the_rows(form):
    rows = rows_of(KEYS, VALUES)
    kept = mask_of(*[True] * 6)
    merged = neighbour_merged(rows, kept) if form == "neighbour" else sets_merged(rows, kept, kept, 0.75, None)
    assert torch.equal(merged.keys, rows.keys) and torch.equal(merged.values, rows.values)


@pytest.mark.parametrize("given", ["form='best'", "threshold=1.5", "threshold=nan", "sigma=0", "sigma=-1.0"])
def test_impossible_values_are_refused(given):
    with pytest.raises(SpecError):
        Method.parse(f"snapkv(budget=64)+weighted_merge({given})")
