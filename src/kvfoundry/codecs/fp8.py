"""8-bit floating point (e4m3: 4 exponent bits, 3 of mantissa, largest number 448), scaled per token.

scale = max|x| / 448 over the channels of one token; the code is x / scale in e4m3, x' = code scale. Nothing overflows,
whatever the size of the keys; the relative error of a number is at most 2^-4 while it is not tiny beside the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.codecs.groups import in_groups

_LARGEST = 448.0


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
        groups = in_groups(rows, self.group)
        # Rounding the scale down to the dtype of the rows must not push the largest number beyond 448: it is clamped.
        scale = groups.abs().amax(dim=-1, keepdim=True) / _LARGEST
        steps = groups.float() / torch.where(scale == 0, 1.0, scale.float())
        codes = steps.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        return Encoded({"codes": codes.flatten(-2)[..., : self.dim].contiguous(), "scale": scale[..., 0]})

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.group is not None
        numbers = rows["codes"].view(torch.float8_e4m3fn).float()
        scale = rows["scale"].float().repeat_interleave(self.group, dim=-1)[..., : self.dim]
        return (numbers * scale).to(dtype)
