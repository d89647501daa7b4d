"""KVQuant's arithmetic (arXiv 2401.18079): keys before RoPE per channel, values per token, non-uniform levels.

Everything works on the last axis of rows [..., n]: a channel over its tokens for keys, a token over its channels for
values. With an outlier share s, t = 1 - s/2:

    lower, upper   the percentiles 1-t and t of a row; what lies outside is an outlier and stays exact
    offset, range  (upper + lower) / 2, (upper - lower) / 2
    z              (x - offset) / range, coded as the nearest of 2^bits levels
    x'             level * range + offset

The levels are one table per layer and tensor, made by weighted k-means on z (`nuq.fit_levels`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, dtype

from kvfoundry.codecs.base import Codec, Encoded, Parts, Site
from kvfoundry.codecs.calibrated import Calibration, LayerTables
from kvfoundry.codecs.nuq import Levels, fit_levels, nearest, picked
from kvfoundry.codecs.packing import pack, unpack
from kvfoundry.codecs.sparse import SparseRows, column_dtype, extremes, put
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.rope import Rope

if TYPE_CHECKING:
    from kvfoundry.selection.budgets import ModelShape


def percentile_bounds(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """lower and upper [...] of rows [..., n]: linear percentiles at share/2 and 1 - share/2; float32."""
    # torch.quantile refuses long rows; sorting does not.
    ordered = values.float().sort(dim=-1).values
    place = (1 - share / 2) * (values.shape[-1] - 1)
    below = min(math.floor(place), values.shape[-1] - 1)
    above = min(below + 1, values.shape[-1] - 1)
    last = values.shape[-1] - 1

    def between(first: Tensor, second: Tensor) -> Tensor:
        return first + (second - first) * (place - below)

    upper = between(ordered[..., below], ordered[..., above])
    lower = between(ordered[..., last - below], ordered[..., last - above])
    return lower, upper


def outliers_per_side(length: int, share: float, *, inclusive: bool) -> int:
    """How many of `length` different numbers lie beyond the percentile of either side.

    inclusive: the number on the percentile counts, so there is always one (KVQuant's rule for values).
    """
    if share <= 0:
        return 0
    # (1 - t)(n - 1) places are beyond the percentile; rounding keeps 0.005 * 200 at 1.
    beyond = round(share / 2 * (length - 1), 9)
    return math.floor(beyond) + 1 if inclusive else math.ceil(beyond)


def exact_outliers(values: Tensor, share: float, *, inclusive: bool) -> Tensor:
    """Mask of the numbers of rows [..., n] beyond the percentiles: the same number in every row, whatever ties."""
    return extremes(values, outliers_per_side(values.shape[-1], share, inclusive=inclusive))


def screened(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Mask of the numbers strictly outside frozen thresholds, which broadcast."""
    return (values < lower) | (values > upper)


def inner_bounds(values: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of rows [..., n] after outliers were replaced by the (lower) median of the row."""
    median = values.median(dim=-1, keepdim=True).values
    inner = torch.where(outliers, median, values)
    return inner.amin(dim=-1), inner.amax(dim=-1)


@dataclass(frozen=True)
class Affine:
    """offset and range of rows, float32 unless said otherwise; broadcast against the numbers."""

    offset: Tensor
    range: Tensor

    @classmethod
    def between(cls, lower: Tensor, upper: Tensor) -> Affine:
        """Computed in the dtype of the bounds; in half precision by halving the sum, as KVQuant does."""
        return cls((upper + lower) / 2, (upper - lower) / 2)

    def normalized(self, values: Tensor) -> Tensor:
        """z; 0 where the row is constant, so that it comes back as its constant."""
        return (values - self.offset) / torch.where(self.range > 0, self.range, torch.ones_like(self.range))

    def restored(self, z: Tensor) -> Tensor:
        return z * self.range + self.offset


def encode(values: Tensor, affine: Affine, levels: Levels) -> Tensor:
    """Codes, uint8, of numbers against a table; outliers get a code too, which nobody reads."""
    return nearest(affine.normalized(values.float()), levels.code)


def decode(codes: Tensor, affine: Affine, levels: Levels) -> Tensor:
    """Numbers, float32, of codes."""
    return affine.restored(picked(levels.value, codes))


def uniform_levels(bits: int) -> Tensor:
    """Even steps from -1 to 1: the integer data types, with the zero point where the minimum is."""
    return torch.linspace(-1, 1, 2**bits)


def whole_zero_point(affine: Affine, bits: int) -> Affine:
    """The affine whose zero is a code of `uniform_levels`: minimum rounded to the grid and kept within it."""
    most = 2**bits - 1
    step = affine.range * 2 / most
    zero = (affine.offset - affine.range) / torch.where(step > 0, step, torch.ones_like(step))
    return Affine(zero.round().clamp(-most, 0) * step + affine.range, affine.range)


LevelKind = Literal["fitted", "uniform", "grid"]

# Numbers of a prompt that levels are fitted to, and the prompt below which single channels say little.
_SAMPLE = 1 << 15
_FEW_ROWS = 32


@dataclass(frozen=True)
class _KVQuant(Codec):
    """What keys and values share.

    bits: of a code. outliers: share of numbers kept exactly. levels: "fitted" by k-means, "uniform" steps, or "grid",
    uniform steps of which one is zero. q_norm: restored numbers keep mean and deviation. whole: first rows that are
    never encoded. calibrated: tables measured on the model; None to settle them on the prompt.
    """

    bits: int = 3
    outliers: float = 0.01
    levels: LevelKind = "fitted"
    q_norm: bool = False
    whole: int = 1
    calibrated: Calibration | None = None
    tables: LayerTables | None = None
    head_dim: int = 0

    @property
    def first(self) -> int:
        return self.whole

    @property
    def fits(self) -> bool:
        return True

    def fitted(self, shape: ModelShape) -> Codec:
        if self.calibrated is not None:
            self.calibrated.check(shape)
        return self

    def at(self, site: Site) -> Codec:
        tables = None if self.calibrated is None else self.calibrated.layers[site.layer_idx].at(self.bits)
        return replace(self, calibrated=None, tables=tables, head_dim=site.head_dim)

    def _affine(self, lower: Tensor, upper: Tensor) -> Affine:
        affine = Affine.between(lower.float(), upper.float())
        return whole_zero_point(affine, self.bits) if self.levels == "grid" else affine

    def _levels(self, z: list[Tensor]) -> Levels:
        """The table for the numbers of one batch row, a list of flat tensors, one per head."""
        numbers = torch.cat(z).cpu()
        numbers = numbers[:: max(1, numbers.numel() // _SAMPLE)]
        if self.levels == "fitted":
            table = Levels.plain(fit_levels(numbers, 2**self.bits))
        else:
            table = Levels.plain(uniform_levels(self.bits))
        return table.normed(numbers) if self.q_norm and numbers.numel() > 1 else table

    def _spread(self, tables: list[Levels], heads: int, device: torch.device) -> Parts:
        """Levels of every batch row as fixed parts, repeated for its heads."""
        pairs = {"code": [table.code for table in tables], "level": [table.value for table in tables]}
        return {
            name: torch.stack(rows)[:, None].expand(-1, heads, -1).to(device).contiguous()
            for name, rows in pairs.items()
        }


def _fixed_levels(fixed: Parts) -> Levels:
    return Levels(fixed["code"], fixed["level"])


@dataclass(frozen=True)
class KVQuantKeys(_KVQuant):
    """Keys, turned back to before RoPE, per channel under frozen thresholds.

    Row entry: codes. Sparse: outliers. Fixed: lower, upper [head_dim] and levels.
    """

    rope: Rope | None = None

    @property
    def needs_rope(self) -> bool:
        return True

    @property
    def sets_aside(self) -> bool:
        return True

    def at(self, site: Site) -> Codec:
        if site.rope is not None and site.rope.depends_on_length:
            raise UnsupportedModelError(
                f"kvquant: the RoPE frequencies of {site.family} depend on the length of the text, so keys cannot be "
                "turned back row by row; use kivi or gear."
            )
        codec = super().at(site)
        assert isinstance(codec, KVQuantKeys)
        return replace(codec, rope=site.rope)

    def prepared(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows.float() if self.rope is None else self.rope.unrotate(rows.float(), positions)

    def fit(self, rows: Tensor, valid: Tensor, query: Tensor | None) -> Parts:
        batch, heads, _, dim = rows.shape
        lower, upper = (torch.zeros(batch, heads, dim, device=rows.device) for _ in range(2))
        tables = []
        for row in range(batch):
            normalized = []
            for head in range(heads):
                channels = rows[row, head][valid[row, head]].float().T
                if self.tables is not None:
                    bounds = self.tables.lower[head], self.tables.upper[head]
                elif channels.shape[1] == 0:
                    continue
                else:
                    bounds = channel_bounds(channels, self.outliers)
                lower[row, head], upper[row, head] = bounds
                low, high = lower[row, head][:, None], upper[row, head][:, None]
                normalized.append(self._affine(low, high).normalized(channels)[~screened(channels, low, high)])
            table = self.tables.keys if self.tables is not None else self._levels(normalized or [rows.new_zeros(0)])
            tables.append(table)
        return {"lower": lower, "upper": upper, **self._spread(tables, heads, rows.device)}

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        flat = rows.reshape(1, 1, -1, rows.shape[-1])
        raw = self.prepared(flat, positions.reshape(1, 1, -1)).view(rows.shape)
        outliers = screened(raw, fixed["lower"], fixed["upper"])
        codes = encode(raw, self._affine(fixed["lower"], fixed["upper"]), _fixed_levels(fixed))
        sparse = SparseRows.of(raw.flatten(0, 1).to(rows.dtype), outliers.flatten(0, 1))
        return Encoded({"codes": pack(codes, self.bits)}, sparse={"outliers": sparse})

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        codes = unpack(rows["codes"], self.bits, self.head_dim)
        raw = decode(codes, self._affine(fixed["lower"], fixed["upper"]), _fixed_levels(fixed))
        raw = put(raw, rows["outliers.values"], rows["outliers.columns"])
        if self.rope is None:
            return raw.to(dtype)
        flat, where = raw.flatten(2, -2), positions.flatten(2)
        return self.rope.rotate(flat, where).view(raw.shape).to(dtype)


@dataclass(frozen=True)
class KVQuantValues(_KVQuant):
    """Values per token: thresholds, offset and range of every row are its own.

    Row entries: codes, offset, range, and the same number of exact numbers in every row with their channels. Fixed:
    levels.
    """

    def _outliers(self, rows: Tensor) -> Tensor:
        return exact_outliers(rows, self.outliers, inclusive=True)

    def _row_affine(self, rows: Tensor, outliers: Tensor, dtype: dtype) -> Affine:
        """Offset and range [..., 1], rounded to what is stored."""
        affine = self._affine(*inner_bounds(rows, outliers))
        return Affine(*(part.to(dtype).float()[..., None] for part in (affine.offset, affine.range)))

    def fit(self, rows: Tensor, valid: Tensor, query: Tensor | None) -> Parts:
        batch, heads, _, _ = rows.shape
        if self.tables is not None:
            return self._spread([self.tables.values] * batch, heads, rows.device)
        tables = []
        for row in range(batch):
            numbers = rows[row][valid[row]].float()
            outliers = self._outliers(numbers)
            affine = self._row_affine(numbers, outliers, rows.dtype)
            tables.append(self._levels([affine.normalized(numbers)[~outliers]]))
        return self._spread(tables, heads, rows.device)

    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        numbers = rows.float()
        outliers = self._outliers(numbers)
        affine = self._row_affine(numbers, outliers, rows.dtype)
        place = outliers.nonzero()[:, 2].view(*rows.shape[:2], -1)
        entries = {
            "codes": pack(encode(numbers, affine, _fixed_levels(fixed)), self.bits),
            "offset": affine.offset[..., 0].to(rows.dtype),
            "range": affine.range[..., 0].to(rows.dtype),
            "outliers": rows.gather(2, place),
            "columns": place.to(column_dtype(rows.shape[-1])),
        }
        return Encoded(entries)

    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        affine = Affine(rows["offset"].float()[..., None], rows["range"].float()[..., None])
        result = decode(unpack(rows["codes"], self.bits, self.head_dim), affine, _fixed_levels(fixed))
        return put(result, rows["outliers"], rows["columns"]).to(dtype)


def channel_bounds(channels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Thresholds [channels] of raw keys [channels, rows].

    A handful of rows says little of a single channel, and thresholds that are too tight would make outliers of most
    numbers to come: under 32 rows they are no tighter than those of all channels together.
    """
    lower, upper = percentile_bounds(channels, share)
    if channels.shape[1] < _FEW_ROWS:
        low, high = percentile_bounds(channels.flatten(), share)
        lower, upper = torch.minimum(lower, low), torch.maximum(upper, high)
    return lower, upper
