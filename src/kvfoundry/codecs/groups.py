"""Group-wise codes of keys or values, along the channels of a token or along the tokens of a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, dtype

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.codecs.grouped import Mode, dequantize
from kvfoundry.codecs.packing import unpack
from kvfoundry.kernels.encode_rows import Form, encoded


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
        form = Form(self.bits, self.group, "channels", self.mode, rows.shape[-1])
        codes, scale, minimum = encoded(rows, form)
        parts = {"codes": codes, "scale": scale}
        if minimum is not None:
            parts["minimum"] = minimum
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
        form = Form(self.bits, self.group, "tokens", self.mode, rows.shape[-1])
        codes, scale, minimum = encoded(rows, form)
        tables = {"scale": scale[:, 0]}
        if minimum is not None:
            tables["minimum"] = minimum[:, 0]
        return Encoded({"codes": codes}, tables)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, self.dim)
        return dequantize(codes, tables["scale"], tables.get("minimum"), self.bits, self.mode).to(dtype)


Grouping = Literal["channels", "tokens"]
