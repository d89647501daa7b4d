"""Entries in a folder: one folder per chunk, written aside and renamed into place, shared by several processes.

    <root>/chunks/<2 hex>/<id>/chunk.safetensors, entry.json
    <root>/tmp/<writer>/...          what is being written or removed; <writer>.lock is held as long as the writer lives
    <root>/lock, changes, store.json

The cap counts everything below the root, what was there before included. Room is reserved by a file of the final size
before anything is written, so writers that run at the same time stay below it together.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvfoundry.chunks.packing import NOTE_LIMIT, Damaged, Entry, Note, Unavailable, pack, unpack
from kvfoundry.chunks.tiers.base import Listing, Problem, Tier, checked_id, is_id
from kvfoundry.chunks.tiers.disk_index import CHUNK, NOTE, DiskIndex, entry_folder, removed, room_for, taken
from kvfoundry.chunks.tiers.folders import opened
from kvfoundry.errors import StoreError

_MARK = {"format": "kvfoundry-store-1"}
# How long a process waits for others that change the folder; they hold the lock for milliseconds.
_PATIENCE = 30.0


class DiskTier(Tier):
    """Entries below a folder, at most `capacity` bytes in all; None only to look at a folder that is there."""

    def __init__(self, root: str | Path, capacity: int | None):
        super().__init__("disk", capacity)
        self.root = Path(root).expanduser().resolve()
        self._index = DiskIndex(self.root)
        self._mutex = threading.Lock()
        self._writer = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._alive: FileLock | None = None
        try:
            self._open()
        except OSError as error:
            raise StoreError(
                f"cannot open the store {self.root} ({error.strerror}); name a writable folder."
            ) from error

    def _open(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"cannot open the store {self.root}: it is no folder.")
        mark = self.root / "store.json"
        if self.capacity is None and not mark.exists():
            raise StoreError(f"there is no store in {self.root}.")
        if os.path.lexists(mark) and (mark.is_symlink() or mark.read_text()[:200] != json.dumps(_MARK)):
            raise StoreError(f"the folder {self.root} is no store of this version; name another one.")
        if self.root.exists() and not mark.exists() and any(p.name not in ("lock", "tmp") for p in self.root.iterdir()):
            raise StoreError(f"the folder {self.root} holds other things than a store; name an empty or a new one.")
        for folder in (self.root, self.root / "chunks", self.root / "tmp"):
            if folder.is_symlink() and folder != self.root:
                raise StoreError(f"{folder} is a symbolic link; a store does not follow it.")
            folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not mark.exists():
                mark.write_text(json.dumps(_MARK))
            self._alive = FileLock(self._own.with_suffix(".lock"), thread_local=False)
            self._alive.acquire(timeout=_PATIENCE)
            self._own.mkdir()
            self._sweep()
            self._index.sync()
            if self.capacity is not None:
                self._make_room(0)

    @property
    def _own(self) -> Path:
        return self.root / "tmp" / self._writer

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.root / "lock", thread_local=False)
        with self._mutex:
            try:
                lock.acquire(timeout=_PATIENCE, poll_interval=0.002)
            except Timeout as error:
                raise Unavailable(f"another process holds {self.root} for more than {_PATIENCE:.0f} s") from error
            try:
                yield
            finally:
                lock.release()

    def _folder(self, name: str) -> Path:
        return self.root.joinpath(*entry_folder(checked_id(name)))

    # Reading takes no lock: an open folder stays what it was.

    def read(self, name: str) -> Entry | None:
        try:
            with opened(self.root, *entry_folder(checked_id(name))) as folder:
                try:
                    note = Note.loads(folder.read(NOTE, min(folder.size(NOTE), NOTE_LIMIT)))
                    with folder.source(CHUNK, note.size) as source:
                        entry = unpack(name, note, source)
                except Damaged:
                    if not folder.is_in_place():
                        return None  # dropped or replaced while it was read
                    raise
                folder.touch(NOTE)
        except FileNotFoundError:
            return None
        except Damaged:
            with suppress(Unavailable):
                self.drop(name)
            raise
        self.counters.bytes_read += note.size
        return entry

    def holds(self, name: str) -> bool:
        return (self._folder(name) / NOTE).is_file()

    # Writing.

    def write(self, entry: Entry) -> bool:
        note, data = pack(entry)
        written = note.dumps()
        room = room_for(len(data), len(written))
        target, work = self._folder(entry.id), self._own / uuid.uuid4().hex
        if self._has(entry.id, note):
            return True
        try:
            if not self._reserve(entry.id, note.size, written, work, room):
                return False
            with (work / CHUNK).open("r+b") as file:
                file.write(data)
            with self._locked():
                self._index.sync()
                self._index.changing(entry.id)
                self._remove(entry.id)
                target.parent.mkdir(exist_ok=True)
                work.rename(target)
                self._index.put(entry.id, room, time.time())
        except OSError as error:
            self.counters.errors += 1
            shutil.rmtree(work, ignore_errors=True)
            raise Unavailable(f"cannot write to {self.root} ({error.strerror})") from error
        self.counters.bytes_written += len(data)
        return True

    def _has(self, name: str, note: Note) -> bool:
        """Whether exactly these bytes are there already; then they count as used now."""
        try:
            held = self._index.read_note(name)
            with opened(self.root, *entry_folder(name)) as folder:
                same = (held.size, held.checksum) == (note.size, note.checksum) and folder.size(CHUNK) == note.size
                if same:
                    folder.touch(NOTE)
                return same
        except (Damaged, OSError):
            return False

    def _reserve(self, name: str, size: int, note: bytes, work: Path, room: int) -> bool:
        """Make room and hold it by files of the final size."""
        with self._locked():
            self._index.sync()
            if not self._make_room(room, keep=name):
                return self.refuse(f"no room for {room} bytes on disk: the cap is {self.capacity}")
            work.mkdir()
            with (work / CHUNK).open("wb") as file:
                file.truncate(size)
            (work / NOTE).write_bytes(note)
            return True

    def _make_room(self, room: int, keep: str | None = None) -> bool:
        """Evict until `room` more bytes fit below the cap; false, with nothing evicted, when they never will."""
        if self.capacity is None:
            return True
        others = taken(self.root / "tmp")
        fixed = others + self._index.room - sum(held.room for _, held in self._index.seen())
        kept = sum(held.room for name, held in self._index.seen() if name == keep or self.is_pinned(name))
        # A bucket that is opened for the entry takes a block too.
        room = room + 4096 if room else 0
        if fixed + kept + room > self.capacity:
            return room == 0
        over = others + self._index.room + room - self.capacity
        for name in self._index.oldest() if over > 0 else ():
            if name == keep or self.is_pinned(name):
                continue
            freed = self._index.held(name).room
            self._index.changing(name)
            self._remove(name)
            self.counters.evictions += 1
            over -= freed
            if over <= 0:
                break
        return True

    def _remove(self, name: str) -> bool:
        """Take an entry out of sight by one rename, then delete it. Under the lock, after `changing`."""
        self._index.forget(name)
        if self._folder(name).parent.is_symlink():  # what lies behind it is not ours
            removed(self._folder(name).parent)
            return False
        aside = self._own / f"gone-{uuid.uuid4().hex}"
        try:
            self._folder(name).rename(aside)
        except FileNotFoundError:
            return False
        except OSError:  # not ours to move, a link for example
            removed(self._folder(name))
            return True
        removed(aside)
        with suppress(OSError):  # not empty, as a rule
            self._folder(name).parent.rmdir()
        return True

    def drop(self, name: str) -> bool:
        with self._locked():
            self._index.sync()
            if not os.path.lexists(self._folder(name)):
                return False
            self._index.changing(name)
            return self._remove(name)

    # Upkeep.

    def listing(self) -> Iterator[Listing]:
        with self._locked():
            self._index.sync()
            names = [(name, held.used) for name, held in self._index.seen()]
        for name, used in names:
            with suppress(Damaged, FileNotFoundError):
                note = self._index.read_note(name)
                yield Listing(name, note.size, note.tokens, note.namespace, note.method, used)

    @property
    def nbytes(self) -> int:
        with self._locked():
            self._index.sync()
            return sum(held.room for _, held in self._index.seen())

    def verify(self) -> list[Problem]:
        problems = []
        with self._locked():
            self._index.sync()
            names = [name for name, _ in self._index.seen()]
            problems += [Problem(self.name, "", f"left over: {path}") for path in [*self._strangers(), *self._sweep()]]
        for name in names:
            try:
                self.read(name)
            except Damaged as error:
                self.counters.damaged += 1
                problems.append(Problem(self.name, name, str(error)))
        return problems

    def _strangers(self) -> list[str]:
        """Remove what is below `chunks` and no entry."""
        found = []
        for bucket in (self.root / "chunks").iterdir():
            inside = [] if bucket.is_symlink() or not bucket.is_dir() else list(bucket.iterdir())
            strange = [path for path in inside if not is_id(path.name) or path.is_symlink() or not path.is_dir()]
            if not inside or len(bucket.name) != 2:
                strange = [bucket]
            for path in strange:
                removed(path)
                found.append(str(path.relative_to(self.root))[:120])
        return found

    def _sweep(self) -> list[str]:
        """Remove what writers left behind that do not live any more. Under the lock."""
        found = []
        for path in (self.root / "tmp").iterdir():
            owner = path.name.removesuffix(".lock")
            if owner == self._writer or (path.suffix != ".lock" and path.with_suffix(".lock").exists()):
                continue
            folder = path.with_suffix("") if path.suffix == ".lock" else path
            lock = FileLock(folder.with_suffix(".lock"), thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            left = folder.is_dir() and any(folder.iterdir())
            removed(folder)
            lock.release()
            removed(folder.with_suffix(".lock"))
            if left:
                found.append(str(folder.relative_to(self.root)))
        return found

    def close(self) -> None:
        if self._alive is None:
            return
        with self._locked():
            removed(self._own)
            self._alive.release()
            removed(self._own.with_suffix(".lock"))
            self._alive = None
