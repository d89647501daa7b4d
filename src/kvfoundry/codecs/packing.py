"""Small whole numbers in bytes: 8 / bits codes in each, the first in the lowest bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Widths that fill a byte evenly.
WIDTHS = (1, 2, 4, 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., n] codes below 2^bits as uint8 [..., ceil(n bits / 8)]; the last byte is filled up with zeros."""
    if bits == 8:
        return codes.to(torch.uint8)
    per_byte = 8 // bits
    rest = -codes.shape[-1] % per_byte
    parts = F.pad(codes.to(torch.uint8), (0, rest)).unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for i in range(1, per_byte):
        packed |= parts[..., i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse: uint8 [..., count]."""
    if bits == 8:
        return packed
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed[..., None] >> shift) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]
