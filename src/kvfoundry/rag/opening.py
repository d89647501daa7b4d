"""The store of a pipeline's folder: host memory over disk."""

from __future__ import annotations

from pathlib import Path

from kvfoundry.chunks import ChunkStore
from kvfoundry.chunks.config import DiskConfig, HostConfig, StoreConfig, parsed_size
from kvfoundry.errors import DataError, StoreError

HOST = 2 << 30


def open_store(folder: Path, size: str, *, host: int = HOST, exists: bool = False) -> ChunkStore:
    """Chunks in `folder`, at most `size`, and copies of those that were used lately in host memory.

    Raises StoreError for a size that cannot be read, DataError where the folder should exist and does not.
    """
    try:
        nbytes = parsed_size(size)
    except ValueError as error:
        raise StoreError(f"--store-size: {error}.") from error
    if exists and not folder.is_dir():
        raise DataError(f"--load-cache-dir {folder} is no folder; make one with kvfoundry rag build.")
    return ChunkStore(StoreConfig(tiers=(HostConfig(size=host), DiskConfig(path=folder, size=nbytes))))
