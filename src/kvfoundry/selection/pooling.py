"""Smoothing of scores along the sequence."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from kvfoundry.checks import whole
from kvfoundry.errors import SpecError

Pooling = Literal["avg", "max"]


def checked_kernel(window: object, kernel: object) -> None:
    """SpecError unless there is at least one window query and the kernel is odd."""
    whole("window", window, least=1)
    whole("kernel", kernel, least=1)
    if isinstance(kernel, int) and kernel % 2 == 0:
        raise SpecError(f"kernel must be odd, so that pooling is centred on each row, got {kernel}.")


def pooled(scores: Tensor, inside: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """Stride-1 pooling of [batch, heads, rows] over the rows that are `inside`; the others keep their own score.

    Average pooling divides by `kernel` at the borders too; max pooling ignores what lies outside.
    """
    if kernel == 1:
        return scores
    if pooling == "avg":
        smooth = F.avg_pool1d(scores.masked_fill(~inside, 0.0), kernel, stride=1, padding=kernel // 2)
    else:
        smooth = F.max_pool1d(scores.masked_fill(~inside, float("-inf")), kernel, stride=1, padding=kernel // 2)
    return smooth.where(inside, scores)
