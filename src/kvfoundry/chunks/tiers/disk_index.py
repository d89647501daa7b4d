"""Which entries lie in a folder that several processes write: the folder is the truth, and this is what was seen of it.

Under the root there are 256 buckets. A file holds one counter per bucket; whoever is about to change a bucket raises
its counter first, under the lock. A process that takes the lock reads again only the buckets whose counters moved.
"""

from __future__ import annotations

import heapq
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfoundry.chunks.packing import NOTE_LIMIT, Damaged, Note
from kvfoundry.chunks.tiers.base import is_id
from kvfoundry.chunks.tiers.folders import opened

CHUNK, NOTE = "chunk.safetensors", "entry.json"
BUCKETS = 256
# File systems give out blocks; a folder takes one too. Counting so, the cap holds for `du` as well.
_BLOCK = 4096


def room_for(*sizes: int) -> int:
    """Bytes that a folder with files of these sizes takes on disk."""
    return _BLOCK + sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


def entry_folder(name: str) -> tuple[str, str, str]:
    """The parts of the path of an entry below the root."""
    return "chunks", name[:2], name


@dataclass
class Seen:
    """One entry as it was seen: bytes that it takes, and when it was last used (seconds since 1970)."""

    room: int
    used: float


class DiskIndex:
    """Entries below `root`. All methods but `read_note` want the lock of the folder."""

    def __init__(self, root: Path):
        self.root = root
        self._counters = np.full(BUCKETS, -1, dtype="<i8")
        self._buckets: list[dict[str, Seen]] = [{} for _ in range(BUCKETS)]

    def __contains__(self, name: str) -> bool:
        return name in self._buckets[int(name[:2], 16)]

    def seen(self) -> Iterator[tuple[str, Seen]]:
        """All entries."""
        for bucket in self._buckets:
            yield from bucket.items()

    def held(self, name: str) -> Seen:
        """One entry that is there."""
        return self._buckets[int(name[:2], 16)][name]

    @property
    def room(self) -> int:
        """Bytes that all entries, the buckets and the bookkeeping of the folder take."""
        used = sum(bool(bucket) for bucket in self._buckets)
        return sum(held.room for _, held in self.seen()) + (used + 6) * _BLOCK

    def sync(self) -> None:
        """Look again where another process has changed something."""
        told = self._told()
        for bucket in np.flatnonzero(told != self._counters):
            self._buckets[bucket] = dict(self._scan(int(bucket)))
        self._counters = told

    def changing(self, name: str) -> None:
        """Say that the bucket of an entry is about to change; called after `sync`, before the change."""
        bucket = int(name[:2], 16)
        self._counters[bucket] += 1
        path = self.root / "changes"
        if not path.exists():
            path.write_bytes(bytes(8 * BUCKETS))
        with path.open("r+b") as file:
            file.seek(8 * bucket)
            file.write(self._counters[bucket : bucket + 1].tobytes())

    def put(self, name: str, room: int, used: float) -> None:
        """An entry is there now."""
        self._buckets[int(name[:2], 16)][name] = Seen(room, used)

    def forget(self, name: str) -> None:
        """An entry is gone now."""
        self._buckets[int(name[:2], 16)].pop(name, None)

    def oldest(self) -> Iterator[str]:
        """Entries by last use, the longest ago first. Uses by other processes are looked up, when it matters."""
        waiting = [(held.used, name) for name, held in self.seen()]
        heapq.heapify(waiting)
        while waiting:
            used, name = heapq.heappop(waiting)
            now = self._used(name)
            if now is not None and now > used:
                self.put(name, self.held(name).room, now)
                heapq.heappush(waiting, (now, name))
            else:
                yield name

    def _used(self, name: str) -> float | None:
        try:
            return self.root.joinpath(*entry_folder(name), NOTE).lstat().st_mtime
        except OSError:
            return None

    def _told(self) -> np.ndarray:
        try:
            data = (self.root / "changes").read_bytes()
        except OSError:
            data = b""
        if len(data) != 8 * BUCKETS:
            return np.zeros(BUCKETS, dtype="<i8")
        return np.frombuffer(data, dtype="<i8").copy()

    def _scan(self, bucket: int) -> Iterator[tuple[str, Seen]]:
        folder = self.root / "chunks" / f"{bucket:02x}"
        if folder.is_symlink() or not folder.is_dir():
            return
        for each in os.scandir(folder):
            if is_id(each.name) and each.is_dir(follow_symlinks=False):
                held = _files(Path(each.path))
                note = held.get(NOTE)
                yield each.name, Seen(room_for(*(file.st_size for file in held.values())), note.st_mtime if note else 0)

    def read_note(self, name: str) -> Note:
        """The note of an entry; Damaged or FileNotFoundError."""
        with opened(self.root, *entry_folder(name)) as folder:
            size = folder.size(NOTE)
            if size > NOTE_LIMIT:
                raise Damaged("its note is too long")
            return Note.loads(folder.read(NOTE, size))


def _files(folder: Path) -> dict[str, os.stat_result]:
    try:
        found = {each.name: each.stat(follow_symlinks=False) for each in os.scandir(folder)}
    except OSError:
        return {}
    return {name: held for name, held in found.items() if stat.S_ISREG(held.st_mode)}


def removed(path: Path) -> None:
    """Delete a folder, a file or a link, whatever it is; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def taken(folder: Path) -> int:
    """Bytes that everything below a folder takes on disk."""
    total = 0
    for where, _, names in os.walk(folder):
        sizes = []
        for name in names:
            try:
                sizes.append(Path(where, name).lstat().st_size)
            except OSError:
                continue
        total += room_for(*sizes)
    return total
