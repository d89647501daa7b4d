"""Uniform quantization of groups of numbers: scale and zero point of a group, codes of `bits` bits.

With x the numbers of one group, b bits and rounding half to even:

    asymmetric      scale = (max - min) / (2^b - 1);            code = round((x - min) / scale);   x' = code scale + min
    symmetric       scale = max|x| / (2^(b-1) - 1);              code = round(x / scale);           x' = code scale
    symmetric_full  scale = max|x| / ((2^b - 1) / 2);            code = round(x / scale), clamped;  x' = code scale
    zero_point      lo = min(min, 0), hi = max(max, 0);          zero = round(-lo / scale), clamped;
                    scale = (hi - lo) / (2^b - 1), 1 where all are 0;  code = round(x / scale) + zero;
                    x' = (code - zero) scale

A group of equal numbers has scale 0 (but see zero_point) and codes 0. Scales and minima are kept in the dtype of the
rows, and all arithmetic is in that dtype, as in the reference code; but bfloat16, whose 8 bits of precision are too few
for codes of 8 bits, is computed with in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Mode = Literal["asymmetric", "symmetric", "symmetric_full", "zero_point"]
MODES: tuple[str, ...] = get_args(Mode)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that is computed with."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass(frozen=True)
class Quantized:
    """codes: uint8 like x. Symmetric codes are moved up by `offset`, so that none is negative.

    scale, minimum: one per group, like x with the grouped dimension reduced to 1. minimum: float minimum (asymmetric),
    whole zero point as uint8 (zero_point), or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


def offset(bits: int, mode: Mode) -> int:
    """What is added to symmetric codes before they are stored."""
    return {"symmetric": 2 ** (bits - 1) - 1, "symmetric_full": 2 ** (bits - 1)}.get(mode, 0)


def in_groups(rows: Tensor, group: int) -> Tensor:
    """[..., dim] as [..., groups, group]. A shorter last group is filled up with its last number: same extremes."""
    rest = -rows.shape[-1] % group
    if rest:
        filler = rows[..., -1:].expand(*rows.shape[:-1], rest)
        rows = F.pad(rows, (0, rest))
        rows[..., -rest:] = filler
    return rows.unflatten(-1, (-1, group))


def quantize(x: Tensor, bits: int, mode: Mode, dim: int) -> Quantized:
    """Quantize groups that fill the whole dimension `dim` of x."""
    levels, top = 2**bits - 1, torch.finfo(x.dtype).max
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    if mode == "asymmetric":
        scale = (high - low).clamp(max=top) / levels
        return Quantized(_codes(_wide(x) - _wide(low), scale, 0, 0, levels), scale, low)
    if mode == "zero_point":
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low).clamp(max=top) / levels
        scale = torch.where(scale == 0, 1.0, scale).to(x.dtype)
        zero = (-_wide(low) / _wide(scale)).round().clamp(0, levels)
        codes = ((_wide(x) / _wide(scale)).round() + zero).clamp(0, levels)
        return Quantized(codes.to(torch.uint8), scale, zero.to(torch.uint8))
    size = torch.maximum(high.abs(), low.abs())
    least = -(2 ** (bits - 1)) + (mode == "symmetric")
    most = 2 ** (bits - 1) - 1
    scale = size / (most if mode == "symmetric" else levels / 2)
    return Quantized(_codes(_wide(x), scale, offset(bits, mode), least, most), scale, None)


def _codes(distance: Tensor, scale: Tensor, shift: int, least: int, most: int) -> Tensor:
    steps = distance / torch.where(scale == 0, 1.0, _wide(scale))
    return (steps.round().clamp(least, most) + shift).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor | None, bits: int, mode: Mode) -> Tensor:
    """x' in the dtype that is computed with; scale and minimum broadcast against codes."""
    scale = _wide(scale)
    steps = codes.to(scale.dtype)
    if mode == "asymmetric":
        assert minimum is not None
        return steps * scale + _wide(minimum)
    if mode == "zero_point":
        assert minimum is not None
        return (steps - minimum.to(scale.dtype)) * scale
    return (steps - offset(bits, mode)) * scale
