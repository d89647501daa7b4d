"""Codes of a few bits side by side in bytes, along the last axis: a row is read and moved without its neighbours."""

import torch
from torch import Tensor

# Widths that fill a byte evenly.
WIDTHS = (1, 2, 4, 8)


def packed_bytes(width: int, bits: int) -> int:
    """Bytes of `width` codes: eight codes take `bits` bytes, a last group may be cut short."""
    return -(-width * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., bytes] of codes [..., width] below 2^bits, the first code in the lowest bits of the first byte."""
    width = codes.shape[-1]
    if bits == 8:
        return codes.to(torch.uint8)
    if 8 % bits == 0:
        parts = _filled(codes.to(torch.uint8), 8 // bits).unflatten(-1, (-1, 8 // bits))
        packed = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            packed |= parts[..., place] << (place * bits)
        return packed
    parts = _filled(codes, 8).to(torch.int64).unflatten(-1, (-1, 8))
    word = (parts << (torch.arange(8, device=codes.device) * bits)).sum(dim=-1)
    split = (word[..., None] >> (torch.arange(bits, device=codes.device) * 8)) & 255
    return split.to(torch.uint8).flatten(-2)[..., : packed_bytes(width, bits)].contiguous()


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The codes [..., width], uint8, behind `pack`."""
    if bits == 8:
        return packed
    if 8 % bits == 0:
        most = 2**bits - 1
        return torch.stack([(packed >> (place * bits)) & most for place in range(8 // bits)], -1).flatten(-2)[
            ..., :width
        ]
    parts = _filled(packed, bits).to(torch.int32).unflatten(-1, (-1, bits))
    codes = []
    for place in range(8):  # a code lies in one byte or across two
        byte, shift = divmod(place * bits, 8)
        code = parts[..., byte] >> shift
        if shift + bits > 8:
            code = code | parts[..., byte + 1] << (8 - shift)
        codes.append(code & (2**bits - 1))
    return torch.stack(codes, dim=-1).flatten(-2)[..., :width].to(torch.uint8)


def _filled(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
