"""Made-up chunks for tests of the store: no model computes them, and their tokens say what must be in them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfoundry.chunks import ChunkKey, ChunkKV, Identity
from kvfoundry.chunks.chunk import ChunkLayer
from kvfoundry.chunks.identity import FORMAT
from kvfoundry.chunks.packing import Entry
from kvfoundry.layouts.record import Record

DIM = 16
_NAMES = (
    "namespace", "model", "weights", "settings", "rope", "dtype", "revision", "adapter", "tokenizer", "method", "recipe"
)  # fmt: skip


def identity(**parts: str) -> Identity:
    """An identity with all parts, those that are named as given."""
    held = {"format": FORMAT} | dict.fromkeys(_NAMES, "") | {"dtype": "float32", "method": "fullkv"} | parts
    return Identity(held)


def key_of(number: int, tokens: int = 8, **parts: str) -> ChunkKey:
    """The key of chunk `number`."""
    return identity(**parts).key(torch.arange(tokens) + 1000 * number)


def rows_of(ids: Tensor, heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values [heads, tokens, DIM] that follow from the ids alone."""
    generator = torch.Generator().manual_seed(int(ids.sum()) % 2**31)
    pair = (torch.randn(heads, len(ids), DIM, generator=generator) for _ in range(2))
    keys, values = (rows.to(dtype) for rows in pair)
    return keys, values


def chunk_for(key: ChunkKey, layers: int = 2, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """The chunk that belongs to a key: token t of layer l has the same rows wherever it is made."""
    held = []
    for layer in range(layers):
        keys, values = rows_of(key.token_ids + layer, dtype=dtype)
        held.append(ChunkLayer(Record("whole", {"keys": keys, "values": values}), 2))
    return ChunkKV(key.token_ids.clone(), tuple(held), key.identity.parts["method"], dtype)


def entry_for(key: ChunkKey, **options: Any) -> Entry:
    """The entry that belongs to a key."""
    return Entry(key.id, dict(key.identity.parts), chunk_for(key, **options))


def same(one: ChunkKV | None, other: ChunkKV | None) -> bool:
    """Whether two chunks are equal bit for bit."""
    if one is None or other is None:
        return False
    left, right = one.tensors(), other.tensors()
    return (
        left.keys() == right.keys()
        and one.metadata() == other.metadata()
        and all(left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left)
    )


def room(chunk: ChunkKV, count: float) -> int:
    """Bytes for so many chunks like this one, in memory."""
    return int(chunk.nbytes * count)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, whatever vanishes meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(where, name).lstat().st_size
    return total


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """A list that holds the seconds of the block when it is over."""
    took: list[float] = []
    started = time.perf_counter()
    yield took
    took.append(time.perf_counter() - started)
