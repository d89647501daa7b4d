"""Hadamard rotation of queries and keys: outlier channels are spread over all channels before low-bit storage.

q.k = (q R).(k R) for any orthogonal R, so attention logits stay what they are. With R = H / sqrt(n), H the Hadamard
matrix, a channel c times larger than the rest becomes n channels that are each larger by c / sqrt(n): groups share the
burden (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@cache
def rotation_matrix(dim: int) -> Tensor:
    """Orthogonal [dim, dim], float32: the Kronecker product of a Hadamard matrix and a discrete cosine transform.

    dim = 2^a m with m odd: Hadamard (Sylvester's, symmetric) of size 2^a, cosine transform of size m. So every head
    size is served, and every output channel mixes all input channels; powers of two are Hadamard alone.
    """
    two = dim & -dim
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < two:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    odd = dim // two
    k, n = torch.arange(odd, dtype=torch.float64)[:, None], torch.arange(odd, dtype=torch.float64)
    cosine = torch.cos(torch.pi * (n + 0.5) * k / odd) * (2.0 / odd) ** 0.5
    cosine[0] /= 2.0**0.5
    return torch.kron(hadamard / two**0.5, cosine).float()


@dataclass(frozen=True)
class Rotation:
    """x R of the last dimension, computed in float32 and returned in the dtype of x."""

    def turn(self, rows: Tensor) -> Tensor:
        """Into the space in which keys are stored: [..., dim]."""
        return (rows.float() @ rotation_matrix(rows.shape[-1]).to(rows.device)).to(rows.dtype)

    def turn_back(self, rows: Tensor) -> Tensor:
        """The inverse of `turn`."""
        return (rows.float() @ rotation_matrix(rows.shape[-1]).T.to(rows.device)).to(rows.dtype)
