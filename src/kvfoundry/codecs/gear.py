"""GEAR's arithmetic (arXiv 2403.05527): quantized base, low-rank residual, sparse outliers.

    x'  =  Quant(x with outliers replaced by the mean of their row)  with outliers put back  +  Q P^T

Rows of the quantizer lie along the last axis: a channel over its tokens for keys, a token over its channels for values.
Q P^T is the rank-r approximation of what the first two leave, per head, found by power iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, dtype

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.codecs.grouped import dequantize, quantize
from kvfoundry.codecs.packing import pack, unpack
from kvfoundry.codecs.sparse import column_dtype, extremes
from kvfoundry.errors import SpecError


def outliers_per_side(length: int, share: float) -> int:
    """Numbers kept exactly on either side of a row of `length`: half the share, at least one where it is positive.

    The published code rounds down, which on short rows is none at all without a word.
    """
    return 0 if share <= 0 else max(1, int(length * share / 2))


def without_outliers(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows [..., n] with the `count` largest and smallest numbers replaced by the row's mean, and their mask."""
    mask = extremes(values, count)
    return torch.where(mask, values.mean(dim=-1, keepdim=True), values), mask


def start_matrix(dim: int, rank: int) -> Tensor:
    """The start of the power iteration, uniform in [0, 1), [dim, rank]: the same for every block, so that results do
    not depend on how tokens arrive."""
    return torch.rand(dim, rank, generator=torch.Generator().manual_seed(0))


def low_rank(error: Tensor, start: Tensor, loops: int) -> tuple[Tensor, Tensor]:
    """Q [..., tokens, rank] and P [..., dim, rank] with Q P^T near `error` [..., tokens, dim].

    start: [..., dim, rank]. Each of `loops` rounds sets Q = E P, P = E^T Q; in the last one P is orthonormalized
    before and Q in between, so that Q P^T is the projection of E on the span found, whatever the signs of the QR.
    """
    right = start.to(error)
    left = error @ right
    for step in range(loops):
        last = step == loops - 1
        if last:
            right = torch.linalg.qr(right).Q
        left = error @ right
        if last:
            left = torch.linalg.qr(left).Q
        right = error.transpose(-1, -2) @ left
        if not last:  # only the span matters; without this the numbers grow with the square of the error
            right = right / right.abs().amax(dim=(-1, -2), keepdim=True).clamp(min=torch.finfo(right.dtype).tiny)
    return left, right


@dataclass(frozen=True)
class _Gear(Codec):
    """What keys and values share: blocks of `size` rows of a head, each with its own low-rank residual.

    bits: of the base. rank: of the residual, 0 for none. outlier_ratio: share of numbers kept exactly, 0 for none.
    loops: rounds of the power iteration.
    """

    bits: int = 4
    rank: int = 4
    outlier_ratio: float = 0.02
    size: int = 64
    loops: int = 3
    head_dim: int = 0

    @property
    def block(self) -> int:
        return self.size

    @property
    def stride(self) -> int:
        return self.size

    def at(self, site: Site) -> Codec:
        if self.rank > min(self.size, site.head_dim):
            raise SpecError(
                f"gear: rank={self.rank} is more than a block of {self.size} rows of {site.head_dim} numbers has."
            )
        return replace(self, head_dim=site.head_dim)

    def _residual(self, error: Tensor, dtype: dtype) -> tuple[Parts, Parts]:
        """The low-rank part of `error` [blocks, block, dim]: a factor per row, a factor per block."""
        if self.rank == 0:
            return {}, {}
        start = start_matrix(error.shape[-1], self.rank).to(error.device)
        left, right = low_rank(error, start.expand(error.shape[0], -1, -1), self.loops)
        return {"left": left.to(dtype)}, {"right": right.to(dtype)}

    def _with_residual(self, base: Tensor, rows: Parts, tables: Parts) -> Tensor:
        # One rank after the other: a product of matrices would copy the table of a block for each of its rows.
        for i in range(self.rank):
            base = torch.addcmul(base, tables["right"][..., i].float(), rows["left"][..., i : i + 1].float())
        return base


@dataclass(frozen=True)
class GearKeys(_Gear):
    """Quantized per channel over the rows of a block.

    Row entries: codes, left [rank], and the row's number in its block. Tables: scale, minimum [dim], right [dim, rank],
    and 2k exact numbers of every channel with the number of their row, [dim, 2k].
    """

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        channels = rows.transpose(1, 2)
        base, outliers = without_outliers(channels, outliers_per_side(self.size, self.outlier_ratio))
        found = quantize(base, self.bits, "asymmetric", dim=-1)
        assert found.minimum is not None
        restored = dequantize(found.codes, found.scale, found.minimum, self.bits, "asymmetric")
        error = torch.where(outliers, 0.0, channels.float() - restored)
        left, right = self._residual(error.transpose(1, 2), rows.dtype)
        tables = {"scale": found.scale[..., 0], "minimum": found.minimum[..., 0], **right}
        entries = {"codes": pack(found.codes.transpose(1, 2), self.bits), **left}
        if self.outlier_ratio > 0:
            blocks, dim, _ = channels.shape
            place = outliers.nonzero()[:, 2].view(blocks, dim, -1)
            tables |= {"outliers": channels.gather(2, place), "outlier_rows": place.to(torch.uint8)}
            number = torch.arange(self.size, device=rows.device).to(torch.uint8)
            entries["number"] = number.expand(blocks, -1).contiguous()
        return Encoded(entries, tables)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, tables["scale"].shape[-1])
        result = dequantize(codes, tables["scale"], tables["minimum"], self.bits, "asymmetric")
        if self.outlier_ratio > 0:
            for place, exact in zip(tables["outlier_rows"].unbind(-1), tables["outliers"].unbind(-1), strict=True):
                result = torch.where(place == rows["number"][..., None], exact.float(), result)
        return self._with_residual(result, rows, tables).to(dtype)


@dataclass(frozen=True)
class GearValues(_Gear):
    """Quantized per row over groups of its channels.

    Row entries: codes, left [rank], scale and minimum per group, and 2k exact numbers with their channels. Table: right
    [dim, rank]. group: channels of a group; a row that it does not divide is one group.
    """

    group: int = 64

    @property
    def groups(self) -> int:
        return self.head_dim // self.group if self.head_dim % self.group == 0 else 1

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        base, outliers = without_outliers(rows, outliers_per_side(rows.shape[-1], self.outlier_ratio))
        found = quantize(base.unflatten(-1, (self.groups, -1)), self.bits, "asymmetric", dim=-1)
        assert found.minimum is not None
        restored = dequantize(found.codes, found.scale, found.minimum, self.bits, "asymmetric").flatten(-2)
        left, right = self._residual(torch.where(outliers, 0.0, rows.float() - restored), rows.dtype)
        entries = {"codes": pack(found.codes.flatten(-2), self.bits), **left}
        entries |= {"scale": found.scale[..., 0], "minimum": found.minimum[..., 0]}
        if self.outlier_ratio > 0:
            place = outliers.nonzero()[:, 2].view(*rows.shape[:2], -1)
            entries["outliers"] = rows.gather(2, place)
            entries["outlier_columns"] = place.to(column_dtype(rows.shape[-1]))
        return Encoded(entries, right)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, self.head_dim).unflatten(-1, (self.groups, -1))
        scale, minimum = rows["scale"][..., None], rows["minimum"][..., None]
        result = dequantize(codes, scale, minimum, self.bits, "asymmetric").flatten(-2)
        if self.outlier_ratio > 0:
            result = result.scatter(-1, rows["outlier_columns"].long(), rows["outliers"].float())
        return self._with_residual(result, rows, tables).to(dtype)
