"""Levels, exact numbers and low-rank parts, as pure functions."""

from __future__ import annotations

import pytest
import torch

from kvfoundry.codecs import gear, kvquant
from kvfoundry.codecs.nuq import Levels, fit_levels, mean_square, nearest, picked
from kvfoundry.codecs.sparse import SparseRows, extremes, put


def test_levels_of_separate_clusters_are_their_weighted_means():
    values = torch.tensor([0.0, 0.1, 0.2, 5.0, 5.2, 9.0])
    weights = torch.tensor([1.0, 1.0, 2.0, 3.0, 1.0, 7.0])
    expected = torch.tensor([0.125, 5.05, 9.0])
    assert torch.allclose(fit_levels(values, 3, weights), expected)
    assert not torch.allclose(fit_levels(values, 3), expected)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_fitted_levels_lose_less_than_even_steps(count):
    values = torch.randn(20_000)
    levels = fit_levels(values, count)
    assert bool((levels.diff() > 0).all())
    even = torch.linspace(float(values.min()), float(values.max()), count)
    assert mean_square(values, levels) < 0.6 * mean_square(values, even)
    # Panter and Dite's bound for a normal density, which k-means approaches: pi sqrt(3) / 2 / count^2
    assert mean_square(values, levels) < 1.1 * torch.pi * 3**0.5 / 2 / count**2


@pytest.mark.parametrize("values", [torch.zeros(50), torch.tensor([2.0]), torch.zeros(0)])
def test_few_different_numbers_still_give_a_table(values):
    levels = fit_levels(values, 8)
    assert levels.shape == (8,) and bool(torch.isfinite(levels).all())
    assert torch.equal(picked(levels, nearest(values, levels)), values)


def test_the_nearest_level_is_the_lower_of_two():
    levels = torch.tensor([-1.0, 0.0, 2.0])
    assert nearest(torch.tensor([-9.0, -0.5, -0.4, 1.0, 1.1, 9.0]), levels).tolist() == [0, 0, 1, 1, 2, 2]
    tables = torch.stack([levels, levels + 10])[:, None]
    values = torch.tensor([[[0.1, 9.0]], [[0.1, 9.0]]])
    assert nearest(values, tables).tolist() == [[[1, 2]], [[0, 0]]]
    assert picked(tables, nearest(values, tables)).tolist() == [[[0.0, 2.0]], [[9.0, 9.0]]]


def test_q_norm_restores_mean_and_deviation():
    z = torch.randn(5000) * 0.3 + 0.1
    levels = Levels.plain(fit_levels(z, 4)).normed(z)
    restored = picked(levels.value, nearest(z, levels.code))
    assert abs(float(restored.mean() - z.mean())) < 1e-4 and abs(float(restored.std() - z.std())) < 1e-4


@pytest.mark.parametrize("rows", [torch.zeros(3, 40), torch.ones(3, 40), torch.randn(3, 40).round()])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 30])
def test_ties_never_select_more_than_asked_for(rows, count):
    """B44."""
    mask = extremes(rows, count)
    assert mask.sum(-1).tolist() == [min(2 * count, 40)] * 3
    if 0 < count < 20:
        kept = rows.masked_fill(mask, 0)
        assert bool((kept.amax(-1) <= rows.sort(-1).values[:, -count]).all())
    share = 0.05
    asked = 2 * kvquant.outliers_per_side(40, share, inclusive=True)
    assert kvquant.exact_outliers(rows, share, inclusive=True).sum(-1).tolist() == [asked] * 3


@pytest.mark.parametrize("length", [32, 64, 100, 128, 1000])
@pytest.mark.parametrize("share", [0.01, 0.02, 0.1])
def test_as_many_outliers_as_lie_beyond_the_percentiles(length, share):
    rows = torch.randperm(length).float()[None]
    lower, upper = kvquant.percentile_bounds(rows, share)
    assert torch.allclose(upper, torch.quantile(rows, 1 - share / 2, dim=1))
    assert torch.allclose(lower, torch.quantile(rows, share / 2, dim=1))
    beyond = (rows <= lower + 1e-3) | (rows >= upper - 1e-3)
    assert torch.equal(kvquant.exact_outliers(rows, share, inclusive=True), beyond)


def test_sparse_rows_follow_their_rows():
    rows = torch.randn(9, 12)
    mask = torch.rand(9, 12) < 0.3
    mask[4] = False
    sparse = SparseRows.of(rows, mask)
    assert sum(t.numel() * t.element_size() for t in sparse.tensors()) == int(mask.sum()) * (4 + 1) + 9 * 2
    index = torch.tensor([[8, 4, -1], [0, 0, 3]])
    dense = put(torch.zeros(2, 3, 12), *sparse.padded(index, 12))
    expected = (rows * mask)[index.clamp(min=0)] * (index >= 0)[..., None]
    assert torch.equal(dense, expected)
    again = SparseRows.joined([sparse.rows(torch.arange(5)), sparse.rows(torch.arange(5, 9))])
    assert all(torch.equal(left, right) for left, right in zip(again.tensors(), sparse.tensors(), strict=True))


def test_a_constant_channel_comes_back_and_has_no_outliers():
    rows = torch.full((2, 50), 3.25)
    lower, upper = kvquant.percentile_bounds(rows, 0.1)
    assert not bool(kvquant.screened(rows, lower[:, None], upper[:, None]).any())
    affine = kvquant.Affine.between(lower[:, None], upper[:, None])
    levels = Levels.plain(kvquant.uniform_levels(3))
    assert torch.equal(kvquant.decode(kvquant.encode(rows, affine, levels), affine, levels), rows)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_power_iteration_comes_near_the_best_rank(rank):
    error = torch.randn(3, 64, 4) @ torch.randn(3, 4, 32) + 0.3 * torch.randn(3, 64, 32)
    start = gear.start_matrix(32, rank).expand(3, -1, -1)
    left, right = gear.low_rank(error, start, 3)
    best = torch.linalg.svdvals(error)[:, rank:].square().sum(-1).sqrt()
    assert bool(((error - left @ right.mT).norm(dim=(1, 2)) <= 1.05 * best).all())


def test_nothing_missing_leaves_nothing_behind():
    left, right = gear.low_rank(torch.zeros(2, 16, 8), gear.start_matrix(8, 2).expand(2, -1, -1), 3)
    assert bool(((left @ right.mT) == 0).all())
