"""8-bit floating point (e4m3: 4 exponent bits, 3 of mantissa, largest number 448), scaled per token.

scale = max|x| / 448 over the channels of one token; the code is x / scale in e4m3, x' = code scale. Nothing overflows,
whatever the size of the keys; the relative error of a number is at most 2^-4 while it is not tiny beside the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.kernels.encode_rows import Form, encoded


@dataclass(frozen=True)
class Float8(Codec):
    """Groups of `group` consecutive channels of one token share a scale; None: all channels."""

    group: int | None = None
    waiting: int = 0
    dim: int = 0

    @property
    def residual(self) -> int:
        return self.waiting

    def at(self, site: Site) -> Float8:
        return Float8(min(self.group or site.head_dim, site.head_dim), self.waiting, site.head_dim)

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        assert self.group is not None
        codes, scale, _ = encoded(rows, Form(8, self.group, "channels", "float8", rows.shape[-1]))
        return Encoded({"codes": codes, "scale": scale})

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.group is not None
        numbers = rows["codes"].view(torch.float8_e4m3fn).float()
        scale = rows["scale"].float().repeat_interleave(self.group, dim=-1)[..., : self.dim]
        return (numbers * scale).to(dtype)
