"""What of a cache makes up a chunk: which caches can leave one, and which rows belong to the passage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfoundry.cache import KVCache
from kvfoundry.errors import CacheStateError
from kvfoundry.layer import CacheLayer
from kvfoundry.layouts import CodedRows, Layout
from kvfoundry.layouts.merged_record import record_of_pair
from kvfoundry.layouts.paired import PairedRows
from kvfoundry.layouts.record import Record


def check_source(cache: KVCache, layers: Sequence[CacheLayer]) -> None:
    """CacheStateError for a cache whose rows are no chunk of one passage."""
    stateless = sum(type(layer).__name__ != "DummyLayer" for layer in cache.layers)
    if len(layers) != stateless:
        raise CacheStateError("a model with recurrent-state layers cannot leave a passage's rows alone as a chunk.")
    if cache.method.slot_positions:
        raise CacheStateError(f"{cache.method} moves keys while it streams, so they are no chunk of one passage.")
    if cache.parked_nbytes:
        raise CacheStateError("some rows are parked on the host; recall() them, or leave park() out of the method.")
    if any(layer.is_interrupted for layer in layers):
        raise CacheStateError("the last forward pass was interrupted; a chunk is made from a complete one.")


def recorded(layer: CacheLayer, row: int, start: int) -> Record:
    """A copy of the rows of one batch row from position `start` on."""
    assert layer.rows is not None
    if isinstance(layer.rows, PairedRows):
        if start or layer.rows.lengths.shape[0] > 1:
            raise CacheStateError(
                f"{layer.method} merges rows of two layers: read its passages alone and without a context in front."
            )
        return record_of_pair(layer.rows)
    return Record.of(_passage(layer.rows, row, start), start)


def _passage(rows: Layout, row: int, start: int) -> Layout:
    if rows.lengths.shape[0] > 1:
        rows = rows.select_batch(torch.tensor([row]))
    if start == 0:
        return rows
    view = rows.view()
    inside = view.head_positions >= start
    counts = inside.sum(dim=-1)
    width = int(counts.max())
    slots = (~inside).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]
    beyond = torch.arange(width, device=slots.device) >= counts[..., None]
    return rows.kept(view, slots.masked_fill(beyond, -1), counts.cpu())


def row_dtype(layer: CacheLayer) -> torch.dtype:
    """In which attention reads the rows of a layer."""
    rows = layer.rows
    assert rows is not None
    if isinstance(rows, PairedRows):
        rows = rows.fresh
    return rows.dtype if isinstance(rows, CodedRows) else rows.view().values.dtype
