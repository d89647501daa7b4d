"""KVQuant's arithmetic (arXiv 2401.18079): keys before RoPE per channel, values per token, non-uniform levels.

Everything works on the last axis of rows [..., n]: a channel over its tokens for keys, a token over its channels for
values. With an outlier share s, t = 1 - s/2:

    lower, upper   the percentiles 1-t and t of a row; what lies outside is an outlier and stays exact
    offset, range  (upper + lower) / 2, (upper - lower) / 2
    z              (x - offset) / range, coded as the nearest of 2^bits levels
    x'             level * range + offset

The levels are one table per layer and tensor, made by weighted k-means on z (`nuq.fit_levels`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.codecs.nuq import nearest
from kvfoundry.codecs.sparse import extremes


def percentile_bounds(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """lower and upper [...] of rows [..., n]: linear percentiles at share/2 and 1 - share/2; float32."""
    # torch.quantile refuses long rows; sorting does not.
    ordered = values.float().sort(dim=-1).values
    place = (1 - share / 2) * (values.shape[-1] - 1)
    below = min(math.floor(place), values.shape[-1] - 1)
    above = min(below + 1, values.shape[-1] - 1)
    last = values.shape[-1] - 1

    def between(first: Tensor, second: Tensor) -> Tensor:
        return first + (second - first) * (place - below)

    upper = between(ordered[..., below], ordered[..., above])
    lower = between(ordered[..., last - below], ordered[..., last - above])
    return lower, upper


def outliers_per_side(length: int, share: float, *, inclusive: bool) -> int:
    """How many of `length` different numbers lie beyond the percentile of either side.

    inclusive: the number on the percentile counts, so there is always one (KVQuant's rule for values).
    """
    if share <= 0:
        return 0
    # (1 - t)(n - 1) places are beyond the percentile; rounding keeps 0.005 * 200 at 1.
    beyond = round(share / 2 * (length - 1), 9)
    return math.floor(beyond) + 1 if inclusive else math.ceil(beyond)


def exact_outliers(values: Tensor, share: float, *, inclusive: bool) -> Tensor:
    """Mask of the numbers of rows [..., n] beyond the percentiles: the same number in every row, whatever ties."""
    return extremes(values, outliers_per_side(values.shape[-1], share, inclusive=inclusive))


def screened(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Mask of the numbers strictly outside frozen thresholds, which broadcast."""
    return (values < lower) | (values > upper)


def inner_bounds(values: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of rows [..., n] after outliers were replaced by the (lower) median of the row."""
    median = values.median(dim=-1, keepdim=True).values
    inner = torch.where(outliers, median, values)
    return inner.amin(dim=-1), inner.amax(dim=-1)


@dataclass(frozen=True)
class Affine:
    """offset and range of rows; broadcast against the numbers."""

    offset: Tensor
    range: Tensor

    @classmethod
    def between(cls, lower: Tensor, upper: Tensor) -> Affine:
        """Computed in the dtype of the bounds; in half precision by halving the sum, as KVQuant does."""
        return cls((upper + lower) / 2, (upper - lower) / 2)

    def normalized(self, values: Tensor) -> Tensor:
        """z; 0 where the row is constant, so that it comes back as its constant."""
        return (values - self.offset) / torch.where(self.range > 0, self.range, torch.ones_like(self.range))

    def restored(self, z: Tensor) -> Tensor:
        return z * self.range + self.offset


@dataclass(frozen=True)
class Levels:
    """One table for a layer and tensor: `code` chooses, `value` restores. Both [2^bits], code ascending.

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


def encode(values: Tensor, affine: Affine, levels: Levels) -> Tensor:
    """Codes, uint8, of numbers against a table; outliers get a code too, which nobody reads."""
    return nearest(affine.normalized(values.float()), levels.code)


def decode(codes: Tensor, affine: Affine, levels: Levels) -> Tensor:
    """Numbers, float32, of codes."""
    return affine.restored(levels.value[codes.long()])


def uniform_levels(bits: int) -> Tensor:
    """Even steps from -1 to 1: the integer data types, with the zero point where the minimum is."""
    return torch.linspace(-1, 1, 2**bits)


def whole_zero_point(affine: Affine, bits: int) -> Affine:
    """The affine whose zero is a code of `uniform_levels`: minimum rounded to the grid and kept within it."""
    most = 2**bits - 1
    step = affine.range * 2 / most
    zero = (affine.offset - affine.range) / torch.where(step > 0, step, torch.ones_like(step))
    return Affine(zero.round().clamp(-most, 0) * step + affine.range, affine.range)
