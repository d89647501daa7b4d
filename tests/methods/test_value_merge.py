"""value_merge: values alone, weighted by cosine and by their share of the norms."""

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.merging.value import value_merged
from kvfoundry.method import Method

from .merge_cases import mask_of, rows_of

KEYS = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [1.0, 0.0], [-1.0, -1.0]]
VALUES = [[3.0], [1.0], [4.0], [1.0], [5.0]]
KEPT = (True, True, False, False, False)


@pytest.mark.parametrize("padding", [0, 2])
def test_weights_by_hand(padding):
    """Row 2 joins row 1 with 0.8 x 4/5, row 3 joins row 0 with 1 x 1/4, row 4 points away from all."""
    rows = rows_of(KEYS, VALUES, padding)
    merged = value_merged(rows, mask_of(*KEPT, padding=padding))
    first, second = 0.25, 0.64
    expected = [(3 + first * 1) / (1 + first), (1 + second * 4) / (1 + second)]
    assert merged.values[0, 0, :2, 0].tolist() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(merged.keys, rows.keys)


def test_a_threshold_leaves_the_others_out():
    rows = rows_of(KEYS, VALUES)
    merged = value_merged(rows, mask_of(*KEPT), threshold=0.9)
    assert merged.values[0, 0, :2, 0].tolist() == pytest.approx([3.25 / 1.25, 1.0], rel=1e-4)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_fraction_counts_the_dropped_rows_of_the_head_alone(padding):
    """Cosines 0.8 and 1 pass, the third counts as failing: the 2/3 quantile lies between 0.8 and 1."""
    rows = rows_of(KEYS, VALUES, padding)
    merged = value_merged(rows, mask_of(*KEPT, padding=padding), fraction=0.34)
    assert float(merged.values[0, 0, 1, 0]) == 1.0
    assert float(merged.values[0, 0, 0, 0]) == pytest.approx(3.25 / 1.25, rel=1e-4)


def test_dropping_nothing_returns_the_rows():
    rows = rows_of(KEYS, VALUES)
    assert torch.equal(value_merged(rows, mask_of(*[True] * 5), fraction=0.5).values, rows.values)


@pytest.mark.parametrize("given", ["threshold=2", "fraction=0", "fraction=1.5", "fraction=nan"])
def test_impossible_values_are_refused(given):
    with pytest.raises(SpecError):
        Method.parse(f"snapkv(budget=64)+value_merge({given})")
