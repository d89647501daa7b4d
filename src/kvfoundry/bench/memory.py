"""Bytes of a run: the peak above the weights, what is stored behind a prompt, and what a decode step reads of it."""

from __future__ import annotations

import torch

from kvfoundry.cache import KVCache
from kvfoundry.layer import CacheLayer
from kvfoundry.layer_state import storage_bytes
from kvfoundry.planning.geometry import LayerGeometry
from kvfoundry.reading.reader import PageReader


class Peak:
    """The most memory that a device held above `base` since this was made; 0 where the device does not count it."""

    def __init__(self, device: torch.device, base: int):
        self._device, self._base = device if device.type == "cuda" else None, base
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes so far."""
        return 0 if self._device is None else torch.cuda.max_memory_allocated(self._device) - self._base


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold there now; 0 where the device does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def read_bytes(cache: KVCache, layers: dict[int, LayerGeometry], itemsize: int) -> int:
    """Bytes of the rows that a decode step cannot do without, of all sequences: what the method has made of the prompt.

    Rows as they are kept, without spare slots; codes, and rows that two layers share, with all that is stored for them;
    of a method that reads pages, a bound (of the size of a row) for each page, and the pages that it may read.
    """
    total = 0
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayer) and layer.rows is not None:
            total += _of_layer(layer, layers[number], itemsize)
    return total


def _of_layer(layer: CacheLayer, geometry: LayerGeometry, itemsize: int) -> int:
    rows = layer.rows
    assert rows is not None
    if layer.rule.span is None and (layer.method.codec is not None or layer.method.pairs is not None):
        return storage_bytes(layer.tensors())
    lengths = rows.lengths
    if layer.reads_pages is not None:
        reader, budget = layer.reads_pages
        page = reader.page if isinstance(reader, PageReader) else 1
        lengths = torch.minimum(lengths, budget[:, None].to(lengths.device) + lengths // page)
    return int(lengths.sum()) * (geometry.key_dim + geometry.value_dim) * itemsize
