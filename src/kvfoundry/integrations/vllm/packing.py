"""Rows of a span as a chunk of the store, and back: written down by a codec where one is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfoundry.chunks.chunk import ChunkKV, ChunkLayer
from kvfoundry.codecs.base import RowsCodec, Site
from kvfoundry.errors import DataError, SpecError
from kvfoundry.layouts import DenseRows
from kvfoundry.layouts.base import position_dtype
from kvfoundry.layouts.record import Record
from kvfoundry.method import Method

# Keys and values of one layer: [heads, tokens, dim] each.
Rows = tuple[Tensor, Tensor]


def checked_method(spec: str) -> Method:
    """The method of a spec, if it says no more than how rows are written down; SpecError otherwise.

    Rows of a span are written when its tokens were read, by whatever engine: nothing can be dropped, merged or chosen
    by queries that have not come yet, and no codec can be settled by them.
    """
    method = Method.parse(spec)
    drops = method.score or method.budget or method.dispose or method.read or method.pairs or method.reconstructs
    if drops or method.prefill or method.slot_positions or method.unread_distance:
        raise SpecError(
            f"{method}: vLLM keeps every row, so the store takes codecs only, such as int8 or kivi(bits=4)."
        )
    codec = method.codec
    if codec is not None and (codec.window or codec.needs_rope):
        needed = "queries of the prompt" if codec.window else "the RoPE of a transformers model"
        raise SpecError(f"{method} needs {needed}, which vLLM does not hand out; use int8, int4 or kivi.")
    return method


@dataclass(frozen=True)
class LayerShape:
    """Rows of one layer on one worker."""

    heads: int
    key_dim: int
    value_dim: int


class Packing:
    """layers: of this worker, in order; dtype: in which vLLM holds rows; family: of the model, for messages."""

    def __init__(self, method: Method, layers: Sequence[LayerShape], dtype: torch.dtype, family: str = "the model"):
        self.method, self.layers, self.dtype = method, tuple(layers), dtype
        self._codecs = [self._codec(number, shape, family) for number, shape in enumerate(self.layers)]

    def _codec(self, number: int, shape: LayerShape, family: str) -> RowsCodec | None:
        if self.method.codec is None:
            return None
        sites = (Site(number, len(self.layers), dim, None, family) for dim in (shape.key_dim, shape.value_dim))
        return self.method.codec.at(*sites)

    def chunk(self, token_ids: Tensor, context_ids: Tensor, rows: Sequence[Rows]) -> ChunkKV:
        """The chunk of a span. rows: of every layer, on the CPU.

        Raises DataError for numbers that are not finite, which no codec can hold.
        """
        start = len(context_ids)
        where = torch.arange(start, start + len(token_ids)).to(position_dtype(start + len(token_ids)))[None, None]
        held = []
        for number, ((keys, values), codec) in enumerate(zip(rows, self._codecs, strict=True)):
            if codec is not None and not all(bool(torch.isfinite(each).all()) for each in (keys, values)):
                raise DataError(
                    f"layer {number} holds numbers that are not finite, so {self.method} cannot store them."
                )
            view = DenseRows(keys[None], values[None], where, torch.full((1, keys.shape[0]), keys.shape[1])).view()
            stored = Record.plain(view, start) if codec is None else Record.of(codec.store(view, None), start)
            held.append(ChunkLayer(stored, keys.shape[0]))
        return ChunkKV(token_ids, tuple(held), str(self.method), self.dtype, start, context_ids)

    def rows(self, chunk: ChunkKV, layer: int) -> Rows:
        """Keys and values of one layer as attention reads them; DataError unless they are those of this model."""
        held = chunk.layers[layer] if len(chunk.layers) == len(self.layers) else None
        shape = self.layers[layer]
        if held is None or held.heads != shape.heads:
            raise DataError("the entry holds rows of another model: its layers or heads are others.")
        codec = self._codecs[layer]
        if codec is None and held.record.form != "whole":
            raise DataError("the entry holds codes, and rows were stored whole.")
        view = held.record.restored(chunk.start, codec, self.dtype).view()
        keys, values = view.keys[0], view.values[0]
        wanted = [(shape.heads, len(chunk.token_ids), dim) for dim in (shape.key_dim, shape.value_dim)]
        if [tuple(keys.shape), tuple(values.shape)] != wanted:
            raise DataError("the entry holds rows of another model: their shape is another.")
        return keys, values
