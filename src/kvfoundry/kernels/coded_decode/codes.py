"""Keys or values of all heads as codes in preallocated buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfoundry.codecs.grouped import Mode, dequantize
from kvfoundry.codecs.packing import unpack

CodeMode = Mode | Literal["float8"]


@dataclass(frozen=True)
class Codes:
    """One side of a layer. The codes are those of `codecs.packing`, the arithmetic that of `codecs.grouped`.

    codes: uint8 [batch, heads, capacity, bytes], a row's codes side by side, the first in the lowest bits.
    along: "channels", groups of `group` channels of one token: scale [batch, heads, capacity, groups] (per token);
        "tokens", groups of `group` tokens of one channel: scale [batch, heads, tables, dim] (per channel), row r under
        table r // group.
    minimum: like scale, minimum or whole zero point of a group; None for modes without one.
    mode: one of `codecs.grouped`, or "float8" (8 bits e4m3, per token). bits: 1, 2, 4 or 8. dim: channels of a row.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    bits: int
    group: int
    along: Literal["channels", "tokens"]
    mode: CodeMode
    dim: int

    def decoded(self, rows: int, dtype: torch.dtype) -> Tensor:
        """The first `rows` rows of every head, [batch, heads, rows, dim]; the reference way of reading them."""
        numbers: Tensor
        scale, minimum = (self._spread(part, rows) for part in (self.scale, self.minimum))
        assert scale is not None
        if self.mode == "float8":
            numbers = self.codes[:, :, :rows].contiguous().view(torch.float8_e4m3fn).float() * scale.float()
        else:
            codes = unpack(self.codes[:, :, :rows], self.bits, self.dim)
            numbers = dequantize(codes, scale, minimum, self.bits, self.mode)
        return numbers.to(dtype)

    def _spread(self, part: Tensor | None, rows: int) -> Tensor | None:
        """One entry per row and channel."""
        if part is None:
            return None
        if self.along == "tokens":
            return part.repeat_interleave(self.group, dim=2)[:, :, :rows]
        return part[:, :, :rows].repeat_interleave(self.group, dim=3)[..., : self.dim]
