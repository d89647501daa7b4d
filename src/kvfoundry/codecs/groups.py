"""Group-wise codes of keys or values, along the channels of a token or along the tokens of a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, dtype

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.codecs.grouped import Mode, dequantize, quantize
from kvfoundry.codecs.packing import pack, unpack


def in_groups(rows: Tensor, group: int) -> Tensor:
    """[..., dim] as [..., groups, group]. A shorter last group is filled up with its last number: same extremes."""
    rest = -rows.shape[-1] % group
    if rest:
        filler = rows[..., -1:].expand(*rows.shape[:-1], rest)
        rows = F.pad(rows, (0, rest))
        rows[..., -rest:] = filler
    return rows.unflatten(-1, (-1, group))


@dataclass(frozen=True)
class PerToken(Codec):
    """Groups of `group` consecutive channels of one token. Every row stands alone.

    Where `group` does not divide the head size the last group is shorter; a group larger than the head is the head.
    """

    bits: int
    group: int
    mode: Mode = "asymmetric"
    waiting: int = 0
    together: int = 32
    dim: int = 0

    @property
    def residual(self) -> int:
        return self.waiting

    @property
    def stride(self) -> int:
        return self.together

    def at(self, site: Site) -> PerToken:
        return PerToken(
            self.bits, min(self.group, site.head_dim), self.mode, self.waiting, self.together, site.head_dim
        )

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        found = quantize(in_groups(rows, self.group), self.bits, self.mode, dim=-1)
        parts = {"codes": pack(found.codes.flatten(-2)[..., : rows.shape[-1]], self.bits), "scale": found.scale[..., 0]}
        if found.minimum is not None:
            parts["minimum"] = found.minimum[..., 0]
        return Encoded(parts)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, self.dim)
        whole = codes.shape[-1] // self.group * self.group
        scale, minimum = rows["scale"], rows.get("minimum")
        if whole == codes.shape[-1]:  # the common case: broadcast over the groups
            codes = codes.unflatten(-1, (-1, self.group))
            scale = scale[..., None]
            minimum = None if minimum is None else minimum[..., None]
            return dequantize(codes, scale, minimum, self.bits, self.mode).flatten(-2).to(dtype)
        spread = [
            None if part is None else part.repeat_interleave(self.group, dim=-1)[..., : self.dim]
            for part in (scale, minimum)
        ]
        assert spread[0] is not None
        return dequantize(codes, spread[0], spread[1], self.bits, self.mode).to(dtype)


@dataclass(frozen=True)
class PerChannel(Codec):
    """Groups of `group` consecutive tokens of one channel: the tokens of a group share a scale for every channel.

    A channel that is much larger than the others only spoils itself.
    """

    bits: int
    group: int
    mode: Mode = "asymmetric"
    waiting: int = 0
    together: int | None = None
    dim: int = 0

    @property
    def block(self) -> int:
        return self.group

    @property
    def residual(self) -> int:
        return self.waiting

    @property
    def stride(self) -> int:
        return self.together or self.group

    def at(self, site: Site) -> PerChannel:
        return PerChannel(self.bits, self.group, self.mode, self.waiting, self.together, site.head_dim)

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        found = quantize(rows, self.bits, self.mode, dim=-2)
        tables = {"scale": found.scale[..., 0, :]}
        if found.minimum is not None:
            tables["minimum"] = found.minimum[..., 0, :]
        return Encoded({"codes": pack(found.codes, self.bits)}, tables)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, self.dim)
        return dequantize(codes, tables["scale"], tables.get("minimum"), self.bits, self.mode).to(dtype)


Grouping = Literal["channels", "tokens"]
