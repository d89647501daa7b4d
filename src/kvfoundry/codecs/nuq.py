"""Non-uniform quantization levels: weighted k-means on a line (KVQuant's nuq data type)."""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 100


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest level of every value, uint8, shaped as `values`; halfway goes to the lower level.

    levels: [n] ascending, n <= 256.
    """
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values, middles).to(torch.uint8)


def fit_levels(values: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """The `count` levels c that make sum_i w_i min_j (x_i - c_j)^2 small, ascending, float32 [count].

    values: finite numbers of any shape; weights: not negative, same shape, None for all equal. Lloyd's algorithm from
    three starts (even steps over the range, equal counts, equal weighted cube-root density), of which the best is taken;
    on sorted numbers a cell is a stretch, so an iteration costs one search and two prefix sums. Deterministic.
    Fewer different values than levels leave levels unused, which keep their places.
    """
    ordered, order = values.flatten().double().sort()
    if ordered.numel() == 0:
        return torch.linspace(-1, 1, count)
    weight = torch.ones_like(ordered) if weights is None else weights.flatten().double()[order]
    if float(weight.sum()) <= 0:
        weight = torch.ones_like(ordered)
    sums = _Prefix(ordered, weight)
    fitted = [_lloyd(start, sums) for start in _starts(ordered, weight, count)]
    return min(fitted, key=sums.objective).float()


def mean_square(values: Tensor, levels: Tensor, weights: Tensor | None = None) -> float:
    """The objective of `fit_levels` over the sum of the weights."""
    distance = (values - levels[nearest(values, levels).long()]).double() ** 2
    if weights is None:
        return float(distance.mean())
    return float((distance * weights).sum() / weights.double().sum())


class _Prefix:
    """Prefix sums of w, w x and w x^2 over sorted numbers."""

    def __init__(self, ordered: Tensor, weight: Tensor):
        self.ordered = ordered
        zero = ordered.new_zeros(1)
        self.sums = [torch.cat([zero, (weight * ordered**power).cumsum(0)]) for power in range(3)]

    def cells(self, levels: Tensor) -> list[Tensor]:
        """Sums of w, w x and w x^2 over the cell of every level."""
        middles = (levels[1:] + levels[:-1]) / 2
        cuts = torch.searchsorted(self.ordered, middles, right=True)
        edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), self.ordered.numel())])
        return [total[edges[1:]] - total[edges[:-1]] for total in self.sums]

    def objective(self, levels: Tensor) -> float:
        weight, first, second = self.cells(levels)
        return float((second - 2 * levels * first + levels**2 * weight).sum())


def _lloyd(levels: Tensor, sums: _Prefix) -> Tensor:
    for _ in range(_ITERATIONS):
        weight, first, _ = sums.cells(levels)
        moved = torch.where(weight > 0, first / weight.clamp(min=1e-300), levels).sort().values
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels


def _starts(ordered: Tensor, weight: Tensor, count: int) -> list[Tensor]:
    lowest, highest = ordered[0], ordered[-1]
    even = lowest + (highest - lowest) * (torch.arange(count, dtype=ordered.dtype, device=ordered.device) + 0.5) / count
    shares = (torch.arange(count, dtype=ordered.dtype, device=ordered.device) + 0.5) / count
    starts = [even, _at_shares(ordered, weight, shares)]
    if highest > lowest:
        # The best density of levels is the cube root of the density of values (Panter and Dite).
        bins = 256
        place = ((ordered - lowest) / (highest - lowest) * bins).long().clamp(max=bins - 1)
        density = ordered.new_zeros(bins).index_add_(0, place, weight) ** (1 / 3)
        middles = lowest + (highest - lowest) * (torch.arange(bins, dtype=ordered.dtype, device=ordered.device) + 0.5) / bins
        starts.append(_at_shares(middles, density, shares))
    return starts


def _at_shares(ordered: Tensor, weight: Tensor, shares: Tensor) -> Tensor:
    """The numbers at these shares of the total weight."""
    total = weight.cumsum(0)
    return ordered[torch.searchsorted(total, shares * total[-1]).clamp(max=ordered.numel() - 1)]
