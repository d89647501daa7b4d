"""A chunk of KV: the rows of one passage in every attention layer, with everything that is needed to place them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfoundry.cache import KVCache
from kvfoundry.chunks.fields import text, whole_number, word
from kvfoundry.chunks.taking import check_source, recorded, row_dtype
from kvfoundry.errors import CacheStateError, DataError, SpecError
from kvfoundry.layer import CacheLayer
from kvfoundry.layer_state import storage_bytes
from kvfoundry.layouts import Layout, RowsView
from kvfoundry.layouts.merged_record import restored_half
from kvfoundry.layouts.pair_store import Half
from kvfoundry.layouts.record import Form, Record, is_count
from kvfoundry.method import Method

FORMAT = "kvfoundry-chunk-1"
_FORMS: tuple[Form, ...] = ("whole", "ragged", "coded", "pruned", "merged", "partner")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, eq=False)
class ChunkLayer:
    """Rows of one attention layer. record: as they are stored; heads: KV heads of the model (a method may keep more).

    `keys`, `values` and `positions` are there for rows that are not compressed (`is_plain`); see `ChunkKV.plain`.
    """

    record: Record
    heads: int

    @property
    def is_plain(self) -> bool:
        """Whether rows are stored as they were computed, all of them or some of every head."""
        return self.record.form in ("whole", "ragged")

    @property
    def is_whole(self) -> bool:
        """Whether every head holds every token of the passage from the first stored one on, in order."""
        return self.record.form == "whole" and "positions" not in self.record.tensors

    @property
    def lengths(self) -> Tensor:
        """Rows of every head: [heads], on the CPU."""
        return self.record.lengths

    def rows(self) -> RowsView:
        """Plain rows as rectangles with a batch dimension of 1, positions counted within the passage.

        No copy unless heads hold different numbers of rows. CacheStateError for compressed rows.
        """
        if not self.is_plain:
            raise CacheStateError("these rows are compressed; chunk.plain(model) reads them.")
        return self.record.view()

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return next(tensor.device for name, tensor in self.record.tensors.items() if not is_count(name))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> ChunkLayer:
        """The layer with its rows on a device; itself when they are there."""
        if self.device == device:
            return self
        return replace(self, record=self.record.to(device, non_blocking=non_blocking))

    @property
    def keys(self) -> Tensor:
        """[heads, rows, head_dim], rotated for their place behind `ChunkKV.start`; zeros behind a shorter head."""
        return self.rows().keys[0]

    @property
    def values(self) -> Tensor:
        """[heads, rows, value_dim]."""
        return self.rows().values[0]

    @property
    def positions(self) -> Tensor:
        """Which token of the passage a row is, 0 for the first: [heads or 1, rows], -1 where a head has no row."""
        return self.rows().positions[0]


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """What a passage leaves in a model: never written again, so caches and readers may share it.

    token_ids: [tokens] of the passage, int64 on the CPU. context_ids: [n] of what stood in front of it when it was
    computed; empty for a passage that was read alone. start: the absolute position at which the key of its first token
    is rotated. layers: one per attention layer of the model, in order. method: the canonical spec it was read under.
    dtype: of the rows as attention reads them.
    """

    token_ids: Tensor
    layers: tuple[ChunkLayer, ...]
    method: str
    dtype: torch.dtype
    start: int = 0
    context_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    @classmethod
    def from_cache(cls, cache: KVCache, token_ids: Tensor | Sequence[int], *, start: int = 0, row: int = 0) -> ChunkKV:
        """A copy of what a cache holds of one sequence.

        token_ids: all real tokens that the cache has seen in batch row `row`. start: how many of them stand in front
        of the passage (a BOS, say); their rows stay behind. Raises DataError when the ids do not fit the cache, and
        CacheStateError for rows that cannot be taken out of it: parked ones, streams, recurrent state.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.long).flatten().cpu()
        layers = cache.attention_layers
        check_source(cache, layers)
        real = layers[0].real
        if real is None or not 0 <= row < len(real) or int(real[row]) != len(ids):
            seen = "nothing" if real is None else f"{real.tolist()} tokens in its batch rows"
            raise DataError(f"{len(ids)} token ids for row {row}, but the cache has seen {seen}; give an id per token.")
        if not 0 <= start < len(ids):
            raise DataError(f"start={start} leaves nothing of a passage of {len(ids)} tokens.")
        taken = tuple(ChunkLayer(recorded(layer, row, start), layer.stored_heads) for layer in layers)
        return cls(ids[start:].clone(), taken, str(cache.method), row_dtype(layers[0]), start, ids[:start].clone())

    def to_cache(self, model: PreTrainedModel, method: str | Method | None = None) -> KVCache:
        """A cache that has read the passage, over this chunk's memory; the first write on its side copies.

        Rows that are not where their layer of the model is are copied there.
        method: what happens to the rows that follow, as in decode. By default nothing is dropped any more, and a codec
        of the chunk's method goes on. Rows before `start` are not there, though positions count them.
        Raises SpecError for another method over compressed rows, DataError when the model has other layers.
        """
        if method is not None and not all(layer.is_plain for layer in self.layers):
            raise SpecError(f"rows stored under {self.method} go on under it; chunk.plain(model) suits other methods.")
        goes_on = _without_eviction(self.method) if method is None else Method.parse(method)
        cache = KVCache(model, goes_on)
        layers = cache.attention_layers
        if len(layers) != len(self.layers):
            raise DataError(f"the chunk has {len(self.layers)} attention layers, and the model {len(layers)}.")
        tokens = self.start + len(self.token_ids)
        for layer, held, device in zip(layers, self.layers, cache.devices(model), strict=True):
            layer.hold(self._restored(layer, held.to(device)), tokens, held.heads)
        cache.expect_prompt(tokens)
        return cache

    def plain(self, model: PreTrainedModel) -> ChunkKV:
        """The chunk with its rows as attention reads them: decoded where codes are stored. Itself when it is plain."""
        if all(layer.is_plain for layer in self.layers):
            return self
        layers = KVCache(model, _without_eviction(self.method)).attention_layers
        read = tuple(
            ChunkLayer(Record.plain(self._restored(layer, held).view(), self.start), held.heads)
            for layer, held in zip(layers, self.layers, strict=True)
        )
        return replace(self, layers=read)

    def _restored(self, layer: CacheLayer, held: ChunkLayer) -> Layout:
        record = held.record
        if record.form in ("merged", "partner"):
            if layer.pair is None:
                raise DataError("the chunk's layers were merged in pairs, and the model's are not.")
            half: Half = "earlier" if record.form == "merged" else "later"
            return restored_half(record, half, layer.pair.store, layer.pair.numbers)
        if held.is_plain:
            return record.restored(self.start, None, self.dtype)
        tail = "keys.tail" if record.form == "coded" else "tail.keys"
        dims = (record.tensors[name].shape[-1] for name in (tail, tail.replace("keys", "values")))
        return record.restored(self.start, layer.codec_for(*dims), self.dtype)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> ChunkKV:
        """The chunk with its rows on a device; itself when they are there. Token ids stay on the CPU."""
        target = torch.device(device)
        if self.devices == {target}:
            return self
        return replace(self, layers=tuple(each.to(target, non_blocking=non_blocking) for each in self.layers))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkKV:
        """The chunk with `change` applied to every tensor; it must keep shape, dtype and contents."""
        layers = tuple(
            replace(each, record=Record(each.record.form, {n: change(t) for n, t in each.record.tensors.items()}))
            for each in self.layers
        )
        return replace(self, token_ids=change(self.token_ids), context_ids=change(self.context_ids), layers=layers)

    @property
    def device(self) -> torch.device:
        """Where the rows of the first layer are."""
        return self.layers[0].device

    @property
    def devices(self) -> set[torch.device]:
        """Where the rows of all layers are; several for a model that is split."""
        return {layer.device for layer in self.layers}

    @property
    def nbytes(self) -> int:
        """Bytes of all storages behind the chunk, token ids included."""
        return storage_bytes(iter(self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: `token_ids`, `context_ids`, and `<layer>.<name>` as in `Record`."""
        named = {"token_ids": self.token_ids, "context_ids": self.context_ids}
        for number, layer in enumerate(self.layers):
            named |= {f"{number}.{name}": tensor for name, tensor in layer.record.tensors.items()}
        return named

    def metadata(self) -> dict[str, Any]:
        """What `from_tensors` needs beside the tensors, ready for JSON."""
        return {
            "format": FORMAT,
            "method": self.method,
            "dtype": str(self.dtype).removeprefix("torch."),
            "start": self.start,
            "layers": [{"form": layer.record.form, "heads": layer.heads} for layer in self.layers],
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> ChunkKV:
        """The chunk of `tensors` and `metadata`. Nothing in either is run; DataError for what is odd."""
        try:
            if metadata["format"] != FORMAT:
                raise DataError(f"the chunk has the format {metadata['format']!r}, not {FORMAT!r}.")
            dtype = getattr(torch, word(metadata["dtype"], _DTYPES))
            layers = tuple(
                ChunkLayer(Record(word(entry["form"], _FORMS), _of_layer(tensors, i)), whole_number(entry["heads"], 1))
                for i, entry in enumerate(metadata["layers"])
            )
            chunk = cls(
                tensors["token_ids"],
                layers,
                text(metadata["method"]),
                dtype,
                whole_number(metadata["start"], 0),
                tensors["context_ids"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"the chunk lacks {error}, or holds it in another kind than is stored.") from error
        chunk._check()
        return chunk

    def _check(self) -> None:
        for ids in (self.token_ids, self.context_ids):
            if ids.dim() != 1 or ids.dtype != torch.long:
                raise DataError("the chunk's token ids are not a row of whole numbers.")
        if not self.layers or not len(self.token_ids):
            raise DataError("the chunk has no layer or no token.")
        for layer in self.layers:
            layer.record.check(len(self.token_ids))


def _without_eviction(spec: str) -> Method:
    """The method with nothing dropped any more: its codec and its way of reading go on."""
    return Method.parse(spec).replace(score=None, budget=None, reconstructs=None, dispose=None)


def _of_layer(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
