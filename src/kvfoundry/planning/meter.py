"""Bytes that a cache will hold, predicted by the code that will hold them.

There is no second set of formulas. Layers of the very cache that would serve the model are fed a few hundred rows of
random numbers in the true shapes and dtype, and the storages behind them are counted. What a layer keeps of a longer
text is known from the method's own budget; from small to large the bytes grow along a straight line whose steps are the
codec's strides, so two trials one step apart give every length exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.codecs.base import KVCodec, RowsCodec
from kvfoundry.codecs.think import KeyChannels
from kvfoundry.layer import CacheLayer
from kvfoundry.layer_state import ROLLBACK, storage_bytes
from kvfoundry.layouts import DenseRows
from kvfoundry.layouts.placement import HeadStreaming
from kvfoundry.layouts.ring import SLOTS
from kvfoundry.method import Method
from kvfoundry.planning.geometry import LayerGeometry, geometry
from kvfoundry.rope import Rope
from kvfoundry.selection.budgets import Amount, LayerBudget, ModelShape
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores.uniform_random import UniformRandom
from kvfoundry.visibility import WindowRule

# Rows of a trial, at least; fewer rows than this are tried as they are.
_TRIAL = 192
# Tokens beyond the rows that stay, so that a trial of an evicting method really drops some.
_DROPPED = 64
# The positions of so many tokens fit into two bytes each; a trial for a longer text ends this far behind its start.
_NARROW, _FAR = 2**15, 2**17
# Rows between two trials where a share of the rows is stored apart (minicache), so that rounding does not show.
_PAIR_STEP = 400


@dataclass(frozen=True)
class Size:
    """Bytes of one sequence after its prompt.

    stored: what `KVCache.nbytes` will be; parked: rows on the host (`host_nbytes`, less the room for further ones that
    streamed rows have there); peak: while the prompt is read in one piece, one layer at a time before its rows are
    dropped, coded or moved, or in decode with the buffers that rows stream through. rows: kept per KV head and
    layer, on average over the full-attention layers.
    """

    stored: int
    parked: int
    peak: int
    rows: float


class _Granted(LayerBudget):
    """A budget that grants what the trial at hand asks for, and remembers what it stands for."""

    def __init__(self, inner: LayerBudget):
        self.inner, self.now = inner, 1

    @property
    def amount(self) -> Amount:
        return self.inner.amount

    def rows(self, seen: Tensor, layer_idx: int, num_layers: int) -> Tensor:
        return torch.full_like(seen, self.now)

    def fitted(self, shape: ModelShape) -> _Granted:
        return _Granted(self.inner.fitted(shape))


class _TrialCache(KVCache):
    """The cache of an outline: there are no weights whose rotation could be read, and bytes do not depend on it."""

    @staticmethod
    def _rope_of(model: PreTrainedModel, layer_idx: int) -> Rope:
        return Rope(torch.nn.Identity(), None, None, depends_on_length=False)


def _tried(method: Method) -> Method:
    """The method with pieces that would ask for the model's weights exchanged for others that keep as many rows."""
    changes: dict[str, Any] = {}
    if method.budget is not None:
        changes["budget"] = _Granted(method.budget)
    if method.refine is not None and method.refine.needs_module:
        changes["refine"] = None
    if method.reconstructs is not None:
        changes |= {"reconstructs": None, "score": UniformRandom(), "schedule": Schedule(prefill="end")}
    return method.replace(**changes)


def _step(codec: RowsCodec | None) -> int:
    """Rows after which the bytes of a codec repeat themselves."""
    if isinstance(codec, KVCodec):
        sides = (codec.keys, codec.values)
        strides = [side.stride for side in sides]
        # A share of the rows of a channel is kept exactly: so many rows apart, the count is whole.
        shares = [getattr(side, "outliers", 0.0) for side in sides if side.fits]
        return math.lcm(*strides, *(round(2 / share) for share in shares if share > 0))
    return codec.block if isinstance(codec, KeyChannels) else 1


def _waiting(codec: RowsCodec | None) -> int:
    """Rows up to which nothing is coded yet."""
    if isinstance(codec, KVCodec):
        return max(side.first + side.residual + side.stride for side in (codec.keys, codec.values))
    return codec.recent + codec.block if isinstance(codec, KeyChannels) else 0


class Meter:
    """Predicts the bytes of one method on one model in one dtype.

    model: an outline (`kvfoundry.models.architecture`) or a loaded model; only its code and config are used.
    Raises SpecError or UnsupportedModelError for what a real cache would refuse.
    """

    def __init__(self, model: PreTrainedModel, method: str | Method, dtype: torch.dtype):
        self.method, self.dtype = Method.parse(method), dtype
        self._geometry = geometry(model)
        self._cache = _TrialCache(model, _tried(self.method))
        self._seen: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        self._units = self._grouped()

    def _grouped(self) -> list[tuple[int, ...]]:
        """Layers of the model that are sized together: pairs that share their rows, and single ones."""
        pairs = [pair.numbers for pair in self._cache.pairs]
        paired = {number for pair in pairs for number in pair}
        return sorted(pairs + [(i,) for i in self._geometry if i not in paired])

    def size(self, tokens: int) -> Size:
        """Bytes of one sequence of `tokens` tokens, its prompt read in one piece."""
        stored = parked = peak = 0
        kept: list[int] = []
        twice = self.method.reconstructs is not None  # then full layers hold the whole prompt until the second reading
        waiting = largest = 0
        for unit in self._units:
            rows = [self._rows(i, tokens) for i in unit]
            whole = sum(self._whole(self._geometry[i], tokens) for i in unit)
            held, aside, streamed = self._unit_bytes(unit, tokens, rows[0])
            largest = max(largest, self._unit_of_a_ring(unit[0], streamed))
            full = self._geometry[unit[0]].rule.span is None
            peak = max(peak, waiting + whole)
            stored, parked = stored + held, parked + aside + streamed
            waiting += whole if twice and full else held
            kept += rows if full else []
        peak = max(peak, stored + SLOTS * largest)
        return Size(stored, parked, peak, sum(kept) / len(kept) if kept else 0.0)

    def _unit_of_a_ring(self, i: int, streamed: int) -> int:
        """Bytes of the heads that are copied together, of a layer with so many bytes on the host."""
        group = self.method.placement.group if isinstance(self.method.placement, HeadStreaming) else 1
        return -(-streamed * min(group, self._geometry[i].kv_heads) // self._geometry[i].kv_heads)

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of the chunk of a passage of `tokens` tokens, read alone: windows keep every row of a chunk."""
        total = 0
        for unit in self._units:
            stored, _, streamed = self._unit_bytes(unit, tokens, self._rows(unit[0], tokens, chunk=True))
            total += stored + streamed
        return total

    def _layer(self, i: int) -> CacheLayer:
        layer = self._cache.layers[i]
        assert isinstance(layer, CacheLayer)
        return layer

    def _rows(self, i: int, tokens: int, *, chunk: bool = False) -> int:
        """Rows per KV head that layer i keeps of so many tokens."""
        layer, span = self._layer(i), self._geometry[i].rule.span
        if span is not None and chunk:
            return tokens
        if span is not None:
            return min(tokens, span - 1 + ROLLBACK)
        if not layer.evicts or (self.method.schedule.prefill == "never" and self.method.reconstructs is None):
            return tokens
        budget = self._cache.method.budget
        assert isinstance(budget, _Granted)
        return min(tokens, int(budget.inner.rows(torch.tensor([tokens]), layer.layer_idx, layer.num_layers)[0]))

    def _unit_bytes(self, unit: tuple[int, ...], tokens: int, rows: int) -> tuple[int, int, int]:
        """Bytes stored, parked and streamed by the layers of a unit that keep `rows` of `tokens` tokens."""
        step, least = self._line(unit)
        far, lost = tokens > _NARROW, rows < tokens
        if rows < least + 2 * step:
            stored, parked, streamed = self._tried(unit, rows, lost, far)
        else:
            first = least + (rows - least) % step
            (low, parked, small), (high, _, large) = (self._tried(unit, n, lost, far) for n in (first, first + step))
            steps = (rows - first) // step
            stored, streamed = low + steps * (high - low), small + steps * (large - small)
        dropped = tokens - rows
        return stored, round(parked / _DROPPED * dropped) if lost and parked else 0, streamed

    def _line(self, unit: tuple[int, ...]) -> tuple[int, int]:
        """Rows between two trials, and the smallest number of rows from which bytes grow evenly."""
        layer = self._layer(unit[0])
        if len(unit) > 1:
            return _PAIR_STEP, _TRIAL
        if layer.rule.span is not None:
            return 1, _TRIAL
        codec, protect, score = self.method.codec, self.method.protect, self.method.score
        needed = protect.sinks + protect.recent + (0 if score is None else score.window) if layer.evicts else 0
        return _step(codec), max(_TRIAL, _waiting(codec), needed)

    def _tried(self, unit: tuple[int, ...], rows: int, lost: bool, far: bool) -> tuple[int, int, int]:
        key = (tuple((self._geometry[i], self._layer(i).evicts) for i in unit), rows, lost, far)
        if key not in self._seen:
            self._seen[key] = self._trial(unit, rows, lost, far)
        return self._seen[key]

    @torch.inference_mode()
    def _trial(self, unit: tuple[int, ...], rows: int, lost: bool, far: bool) -> tuple[int, int, int]:
        """Bytes stored, parked and streamed when the layers keep `rows` rows.

        lost: others are dropped at the end of the prompt; far: the text before it is so long that positions are wide.
        """
        self._cache.reset()
        budget = self._cache.method.budget
        if isinstance(budget, _Granted):
            budget.now = rows
        fed = rows + _DROPPED if lost else rows
        # Random keys do not look like any model's, so what a codec would lose of them means nothing.
        self._cache.prompt.losses.warned = True
        layers = [self._layer(i) for i in unit]
        asks = self.method.score is not None or (self.method.codec is not None and self.method.codec.window)
        for i, layer in zip(unit, layers, strict=True):
            shape = self._geometry[i]
            if shape.rule.span is not None:  # a window that keeps just so many rows
                layer.rule = WindowRule(sliding=rows - ROLLBACK + 1 if lost else fed + 1)
            if far:
                layer.begin_behind(_FAR - fed)
            generator = torch.Generator().manual_seed(i)
            query, keys, values = (
                torch.randn(1, heads, fed, dim, generator=generator).to(self.dtype)
                for heads, dim in (
                    (shape.query_heads if asks else shape.kv_heads, shape.key_dim),
                    (shape.kv_heads, shape.key_dim),
                    (shape.kv_heads, shape.value_dim),
                )
            )
            layer.step(query, keys, values)
        sizes = (
            storage_bytes(tensor for layer in layers for tensor in layer.tensors()),
            storage_bytes(tensor for layer in layers for tensor in layer.parked_tensors()),
            sum(layer.rows.hosted_nbytes for layer in layers if layer.rows is not None),
        )
        self._cache.reset()
        return sizes

    def _whole(self, shape: LayerGeometry, tokens: int) -> int:
        """Bytes of a layer that has just stored a prompt; the rows have a shape and no memory."""
        keys, values = (
            torch.empty(1, shape.kv_heads, tokens, dim, dtype=self.dtype, device="meta")
            for dim in (shape.key_dim, shape.value_dim)
        )
        positions = torch.empty(1, tokens, dtype=torch.long, device="meta")
        return _bytes(DenseRows.of_tokens(keys, values, positions, None, tokens - 1).tensors())


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share no storage; on the meta device storages have no address to be told apart by."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
