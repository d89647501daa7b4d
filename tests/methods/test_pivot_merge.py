"""pivot_merge: the mean of a kept row and its midpoints with the rows that chose it."""

import pytest
import torch

from kvfoundry.errors import SpecError
from kvfoundry.merging.pivot import pivot_merged
from kvfoundry.method import Method

from .merge_cases import mask_of, rows_of

KEYS = [[1.0, 0.0], [0.0, 1.0], [0.8, 0.2], [0.6, 0.1]]
VALUES = [[2.0], [10.0], [4.0], [8.0]]


@pytest.mark.parametrize("padding", [0, 2])
def test_two_rows_fold_into_the_nearest_key(padding):
    """Rows 2 and 3 both point along row 0: v = (2 + (4 + 2) / 2 + (8 + 2) / 2) / 3."""
    rows = rows_of(KEYS, VALUES, padding)
    merged = pivot_merged(rows, mask_of(True, True, False, False, padding=padding))
    assert merged.values[0, 0, :2, 0].tolist() == pytest.approx([(2 + 3 + 5) / 3, 10.0])
    assert merged.keys[0, 0, 0].tolist() == pytest.approx([(1 + 0.9 + 0.8) / 3, (0 + 0.1 + 0.05) / 3])
    assert torch.equal(merged.keys[:, :, 1:2], rows.keys[:, :, 1:2])


def test_dropping_nothing_returns_the_rows():
    rows = rows_of(KEYS, VALUES)
    merged = pivot_merged(rows, mask_of(True, True, True, True))
    assert torch.equal(merged.keys, rows.keys) and torch.equal(merged.values, rows.values)


def test_keeping_nothing_changes_nothing():
    rows = rows_of(KEYS, VALUES)
    assert torch.equal(pivot_merged(rows, mask_of(False, False, False, False)).values, rows.values)


@pytest.mark.parametrize("piece", ["pivot_merge()", "weighted_merge()", "value_merge()", "cam_merge()"])
@pytest.mark.parametrize("method", ["fullkv", "quest(budget=64)"])
def test_a_merge_needs_a_method_that_drops_rows(method, piece):
    name = method.split("(")[0]
    for spec in (f"{method}+{piece}", f"{piece}+{method}"):
        with pytest.raises(SpecError, match=f"^{name} drops no rows, so {piece[:-2]} has nothing to act on"):
            Method.parse(spec)


def test_two_disposals_are_refused():
    with pytest.raises(SpecError, match="pivot_merge and value_merge both set dispose"):
        Method.parse("snapkv(budget=64)+pivot_merge()+value_merge()")
