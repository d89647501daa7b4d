"""What codes of groups look like, apart from the tensors that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvfoundry.codecs.packing import WIDTHS
from kvfoundry.kernels.coded_decode.codes import CodeMode, Codes

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """Fields as of `Codes`; dim: channels of a row."""

    bits: int
    group: int
    along: Literal["channels", "tokens"]
    mode: CodeMode
    dim: int

    @classmethod
    def of(cls, codes: Codes) -> Form:
        """The form of codes in buffers."""
        return cls(codes.bits, codes.group, codes.along, codes.mode, codes.dim)

    @property
    def slices(self) -> int:
        """Groups of channels of one row."""
        return -(-self.dim // self.group)

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Why the kernel cannot write rows of a dtype in this form; None where it can."""
        if dtype not in _DTYPES:
            return f"the fused kernel encodes rows of float32, float16 and bfloat16, got {dtype}."
        if self.bits not in WIDTHS:
            return f"the fused kernel writes codes of 1, 2, 4 and 8 bits, got {self.bits}."
        apart = self.along == "channels" and self.slices > 1
        if apart and (self.group < 8 or self.group & (self.group - 1)):
            return f"groups of {self.group} channels are no power of two that is at least 8."
        return None
