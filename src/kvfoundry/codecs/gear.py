"""GEAR's arithmetic (arXiv 2403.05527): quantized base, low-rank residual, sparse outliers.

    x'  =  Quant(x with outliers replaced by the mean of their row)  with outliers put back  +  Q P^T

Rows of the quantizer lie along the last axis: a channel over its tokens for keys, a token over its channels for values.
Q P^T is the rank-r approximation of what the first two leave, per head, found by power iteration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfoundry.codecs.sparse import extremes


def outliers_per_side(length: int, share: float) -> int:
    """Numbers kept exactly on either side of a row of `length`: half the share, at least one where it is positive.

    The published code rounds down, which on short rows is none at all without a word.
    """
    return 0 if share <= 0 else max(1, int(length * share / 2))


def without_outliers(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows [..., n] with the `count` largest and smallest numbers replaced by the row's mean, and their mask."""
    mask = extremes(values, count)
    return torch.where(mask, values.mean(dim=-1, keepdim=True), values), mask


def start_matrix(dim: int, rank: int) -> Tensor:
    """The start of the power iteration, uniform in [0, 1), [dim, rank]: the same for every block, so that results do
    not depend on how tokens arrive."""
    return torch.rand(dim, rank, generator=torch.Generator().manual_seed(0))


def low_rank(error: Tensor, start: Tensor, loops: int) -> tuple[Tensor, Tensor]:
    """Q [..., tokens, rank] and P [..., dim, rank] with Q P^T near `error` [..., tokens, dim].

    start: [..., dim, rank]. Each of `loops` rounds sets Q = E P, P = E^T Q; in the last one P is orthonormalized
    before and Q in between, so that Q P^T is the projection of E on the span found, whatever the signs of the QR.
    """
    right = start.to(error)
    left = error @ right
    for step in range(loops):
        last = step == loops - 1
        if last:
            right = torch.linalg.qr(right).Q
        left = error @ right
        if last:
            left = torch.linalg.qr(left).Q
        right = error.transpose(-1, -2) @ left
        if not last:  # only the span matters; without this the numbers grow with the square of the error
            right = right / right.abs().amax(dim=(-1, -2), keepdim=True).clamp(min=torch.finfo(right.dtype).tiny)
    return left, right
