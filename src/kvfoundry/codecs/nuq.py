"""Non-uniform quantization levels: weighted k-means on a line (KVQuant's nuq data type)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ITERATIONS = 100


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest level of every number, uint8, shaped as `values`; halfway goes to the lower level.

    values: [..., m]. levels: [n] ascending, n <= 256, or a table of its own for every row, [..., n].
    """
    middles = (levels[..., 1:] + levels[..., :-1]) / 2
    if middles.dim() > 1:
        middles = middles.expand(*values.shape[:-1], -1).contiguous()
    return torch.searchsorted(middles.to(values.dtype), values.contiguous()).to(torch.uint8)


def picked(levels: Tensor, codes: Tensor) -> Tensor:
    """The levels of codes [..., m]; levels: [n] or [..., n] as in `nearest`, the leading dimensions broadcast."""
    if levels.dim() == 1:
        return levels[codes.long()]
    return levels.expand(*codes.shape[:-1], -1).gather(-1, codes.long())


@dataclass(frozen=True)
class Levels:
    """One table for a layer and tensor: `code` chooses, `value` restores. Both [2^bits], code ascending; or with
    leading dimensions, a table for every row.

    They differ under Q-Norm, which scales and shifts what comes back so that mean and deviation of z survive.
    """

    code: Tensor
    value: Tensor

    @classmethod
    def plain(cls, levels: Tensor) -> Levels:
        ordered = levels.sort().values
        return cls(ordered, ordered)

    def normed(self, z: Tensor) -> Levels:
        """With Q-Norm: value * std(z) / std(z') + mean(z) - mean(z') std(z) / std(z'), z' the quantized z."""
        scale, shift = q_norm(z, self.code[nearest(z, self.code).long()])
        return Levels(self.code, self.code * scale + shift)


def q_norm(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift that give the quantized numbers the mean and deviation of the original ones."""
    spread = after.std()
    scale = before.std() / spread if float(spread) > 0 else torch.ones_like(spread)
    return scale, before.mean() - after.mean() * scale


def fit_levels(values: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """The `count` levels c that make sum_i w_i min_j (x_i - c_j)^2 small, ascending, float32 [count].

    values: finite numbers of any shape; weights: not negative, same shape, None for all equal. Lloyd's algorithm from
    three starts (even steps over the range, equal counts, cube root of the density), of which the best is taken. On
    sorted numbers a cell is a stretch, so an iteration costs one search in prefix sums. Deterministic; on the CPU,
    where so many small steps are fast.
    Fewer different values than levels leave levels unused, which keep their places.
    """
    ordered, order = values.flatten().cpu().double().sort()
    if ordered.numel() == 0:
        return torch.linspace(-1, 1, count)
    weight = torch.ones_like(ordered) if weights is None else weights.flatten().cpu().double()[order]
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
    even = lowest + (highest - lowest) * (torch.arange(count, dtype=ordered.dtype) + 0.5) / count
    shares = (torch.arange(count, dtype=ordered.dtype) + 0.5) / count
    starts = [even, _at_shares(ordered, weight, shares)]
    if highest > lowest:
        # The best density of levels is the cube root of the density of values (Panter and Dite).
        bins = 256
        place = ((ordered - lowest) / (highest - lowest) * bins).long().clamp(max=bins - 1)
        density = ordered.new_zeros(bins).index_add_(0, place, weight) ** (1 / 3)
        middles = lowest + (highest - lowest) * (torch.arange(bins, dtype=ordered.dtype) + 0.5) / bins
        starts.append(_at_shares(middles, density, shares))
    return starts


def _at_shares(ordered: Tensor, weight: Tensor, shares: Tensor) -> Tensor:
    """The numbers at these shares of the total weight."""
    total = weight.cumsum(0)
    return ordered[torch.searchsorted(total, shares * total[-1]).clamp(max=ordered.numel() - 1)]
