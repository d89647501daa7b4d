"""A safetensors file in its pieces, the header and each tensor: read and checked side by side by several threads.

On a GPU machine a chunk is hundreds of megabytes, and one thread that reads, checks and copies it takes longer than the
GPU takes to read the passage again. Every tensor goes straight into memory of its own, pinned where there is a GPU.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_THREADS = 8
# Below so many bytes threads cost more than they save.
_SMALL = 8 << 20
# A thread reads and checks so many bytes at a time: what was read is still in its cache when it is checked.
_STRIDE = 1 << 20


class Source(Protocol):
    """Where a file's bytes come from."""

    size: int

    def fill(self, offset: int, target: memoryview) -> None:
        """Bytes from `offset` on into `target`, from any thread."""


class Bytes:
    """A file that is in memory already."""

    def __init__(self, data: bytes):
        self._data, self.size = memoryview(data), len(data)

    def fill(self, offset: int, target: memoryview) -> None:
        target[:] = self._data[offset : offset + len(target)]


@dataclass(frozen=True)
class Piece:
    """One tensor of a file: its name, dtype and shape, and where its bytes begin and end."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The header of a file, checked: the pieces lie one behind the other and fill the file."""

    data: bytes
    metadata: dict[str, Any]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, source: Source) -> Header:
        """ValueError, KeyError or TypeError for anything else than a safetensors file."""
        length = int.from_bytes(_read(source, 0, 8), "little") if source.size >= 8 else 0
        if not 0 < length <= source.size - 8:
            raise ValueError("no header")
        data = _read(source, 0, 8 + length)
        told = json.loads(data[8:])
        metadata, pieces = told.pop("__metadata__"), []
        for name, about in told.items():
            shape = tuple(about["shape"])
            start, stop = about["data_offsets"]
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, stop))
            dtype = _DTYPES[about["dtype"]]
            if not whole or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name:.40} has another size than its shape")
            pieces.append(Piece(name, dtype, shape, start + len(data), stop + len(data)))
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        ends = [len(data), *(piece.stop for piece in pieces)]
        if [piece.start for piece in pieces] != ends[:-1] or ends[-1] != source.size:
            raise ValueError("its tensors do not fill it")
        return cls(data, metadata, tuple(pieces))


def checksum(data: bytes) -> int:
    """The checksum of a file: of the checksums of its pieces, in order; of all bytes where it has none."""
    try:
        header = Header.of(Bytes(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return zlib.crc32(data)
    view = memoryview(data)
    return _joined(header, _side_by_side(lambda piece: zlib.crc32(view[piece.start : piece.stop]), header.pieces))


def tensors_of(source: Source, header: Header) -> tuple[dict[str, Tensor], int]:
    """Every tensor of a file in memory of its own, and the checksum of what was read."""
    pinned = torch.cuda.is_available()

    def read(piece: Piece) -> tuple[Tensor, int]:
        tensor = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=pinned and piece.stop > piece.start)
        target = tensor.reshape(-1).view(torch.uint8).numpy().data
        found = 0
        for start in range(0, len(target), _STRIDE):
            part = target[start : start + _STRIDE]
            source.fill(piece.start + start, part)
            found = zlib.crc32(part, found)
        return tensor, found

    found = _side_by_side(read, header.pieces)
    named = {piece.name: tensor for piece, (tensor, _) in zip(header.pieces, found, strict=True)}
    return named, _joined(header, (one for _, one in found))


def _read(source: Source, offset: int, size: int) -> bytes:
    data = bytearray(size)
    source.fill(offset, memoryview(data))
    return bytes(data)


def _joined(header: Header, parts: Iterable[int]) -> int:
    return zlib.crc32(b"".join(part.to_bytes(4, "little") for part in (zlib.crc32(header.data), *parts)))


def _side_by_side(action: Callable[[Piece], R], pieces: tuple[Piece, ...]) -> list[R]:
    threads = min(_THREADS, len(pieces), os.cpu_count() or 1)
    if threads < 2 or pieces[-1].stop < _SMALL:
        return [action(piece) for piece in pieces]
    with ThreadPoolExecutor(threads, thread_name_prefix="kvfoundry-pieces") as pool:
        return list(pool.map(action, pieces))
