"""Uniform quantization of groups of numbers: scale and zero point of a group, codes of `bits` bits.

With x the numbers of one group, b bits and rounding half to even:

    asymmetric      scale = (max - min) / (2^b - 1);            code = round((x - min) / scale);   x' = code scale + min
    symmetric       scale = max|x| / (2^(b-1) - 1);              code = round(x / scale);           x' = code scale
    symmetric_full  scale = max|x| / ((2^b - 1) / 2);            code = round(x / scale), clamped;  x' = code scale
    zero_point      lo = min(min, 0), hi = max(max, 0);          zero = round(-lo / scale), clamped;
                    scale = (hi - lo) / (2^b - 1), 1 where all are 0;  code = round(x / scale) + zero;
                    x' = (code - zero) scale

A group of equal numbers has scale 0 (but see zero_point) and codes 0. Scales and minima are computed and kept in the
dtype of the rows, codes in float32 with the scale as it is kept: what is decoded is nearest for what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["asymmetric", "symmetric", "symmetric_full", "zero_point"]
MODES: tuple[str, ...] = get_args(Mode)


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


def quantize(x: Tensor, bits: int, mode: Mode, dim: int) -> Quantized:
    """Quantize groups that fill the whole dimension `dim` of x."""
    levels, top = 2**bits - 1, torch.finfo(x.dtype).max
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    if mode == "asymmetric":
        scale = (high - low).clamp(max=top) / levels
        return Quantized(_codes(x.float() - low.float(), scale, 0, 0, levels), scale, low)
    if mode == "zero_point":
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low).clamp(max=top) / levels
        scale = torch.where(scale == 0, 1.0, scale).to(x.dtype)
        zero = (-low.float() / scale.float()).round().clamp(0, levels)
        codes = ((x.float() / scale.float()).round() + zero).clamp(0, levels)
        return Quantized(codes.to(torch.uint8), scale, zero.to(torch.uint8))
    size = torch.maximum(high.abs(), low.abs())
    least = -(2 ** (bits - 1)) + (mode == "symmetric")
    most = 2 ** (bits - 1) - 1
    scale = size / (most if mode == "symmetric" else levels / 2)
    return Quantized(_codes(x.float(), scale, offset(bits, mode), least, most), scale, None)


def _codes(distance: Tensor, scale: Tensor, shift: int, least: int, most: int) -> Tensor:
    steps = distance / torch.where(scale == 0, 1.0, scale.float())
    return (steps.round().clamp(least, most) + shift).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor | None, bits: int, mode: Mode) -> Tensor:
    """x' in float32; scale and minimum broadcast against codes."""
    if mode == "asymmetric":
        assert minimum is not None
        return torch.addcmul(minimum.float(), codes.float(), scale.float())
    if mode == "zero_point":
        assert minimum is not None
        return (codes.float() - minimum.float()) * scale.float()
    return (codes.float() - offset(bits, mode)) * scale.float()
