"""Entries as objects of any file system that fsspec knows: s3://, gs://, file://, memory:// and many more.

    <root>/<id>.<checksum>-<size>.safetensors, then <root>/<id>.json, which names it

A file system of this kind has no order of use and no locks: the oldest written entry leaves first, and two writers at
the same time may pass the cap by what each is writing.
"""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from kvfoundry.chunks.packing import NOTE_LIMIT, Damaged, Entry, Note, pack, unpack
from kvfoundry.chunks.tiers.base import Listing, Problem, Tier, checked_id, is_id
from kvfoundry.chunks.tiers.guard import Guard, first_line
from kvfoundry.errors import MissingExtraError, StoreError

NOTE = "json"
T = TypeVar("T")


class FilesTier(Tier):
    """Entries below a URL, at most `capacity` bytes. timeout, retry: as of `RedisTier`.

    Credentials are the file system's own affair (environment, configuration files), never part of the URL.
    """

    def __init__(self, url: str, capacity: int, *, timeout: float, retry: float):
        scheme = url.partition("://")[0]
        super().__init__(scheme, capacity)
        self._guard = Guard(scheme, timeout, retry)
        self._changing = threading.RLock()
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtraError(f"{scheme}:// stores need fsspec: pip install fsspec.") from error
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise MissingExtraError(f"{scheme}:// stores need another package ({first_line(error)}).") from error
        except (ValueError, OSError) as error:
            raise StoreError(f"cannot open the store {scheme}:// ({first_line(error)}).") from error
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def _asked(self, operation: Callable[[], T]) -> T:
        try:
            return self._guard.bounded(operation)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            self.counters.errors += 1
            raise self._guard.failed(first_line(error)) from error

    def _path(self, name: str, kind: str) -> str:
        return f"{self._root}/{name}.{kind}"

    def read(self, name: str) -> Entry | None:
        checked_id(name)
        try:
            note = self._note(name)
            data = self._data(name, note)
            entry = None if data is None else unpack(name, note, data)
        except FileNotFoundError:
            return None
        except Damaged:
            self.drop(name)
            raise
        self.counters.bytes_read += note.size
        return entry

    def _data(self, name: str, note: Note) -> bytes | None:
        """The file of a note; None when the entry was dropped or replaced meanwhile."""
        try:
            return self._asked(lambda: self._content(name, _kind(note), note.size))
        except FileNotFoundError as error:
            if self._note(name) != note:
                return None
            raise Damaged("its file is gone") from error

    def _note(self, name: str) -> Note:
        return Note.loads(self._asked(lambda: self._content(name, NOTE, NOTE_LIMIT)))

    def _content(self, name: str, kind: str, limit: int) -> bytes:
        """A file, of which at most one byte more than `limit` is read."""
        path = self._path(name, kind)
        if self._is_local and self._fs.info(path).get("islink"):
            raise Damaged("it is a symbolic link")
        return self._fs.cat_file(path, start=0, end=limit + 1)

    def write(self, entry: Entry) -> bool:
        note, data = pack(entry)
        written = note.dumps()
        size = len(data) + len(written)
        with self._changing:
            held = self._asked(self._held)
            old = held.pop(entry.id, {})
            if NOTE in old and _kind(note) in old:
                return True
            if not self._make_room(held, size + sum(each["size"] for each in old.values())):
                return self.refuse(f"no room for {size} bytes in the tier {self.name}: the cap is {self.capacity}")
            self._asked(lambda: self._put(entry.id, _kind(note), data, written, old))
        self.counters.bytes_written += len(data)
        return True

    def _make_room(self, held: dict[str, dict[str, Any]], size: int) -> bool:
        if self.capacity is None:
            return True
        sizes = {name: sum(file["size"] for file in files.values()) for name, files in held.items()}
        room, total = self.capacity - size, sum(sizes.values())
        if sum(taken for name, taken in sizes.items() if self.is_pinned(name)) > room:
            return False
        for name in sorted(held, key=lambda name: _written(held[name])):
            if total <= room:
                break
            if not self.is_pinned(name):
                self._remove(name, held[name])
                self.counters.evictions += 1
                total -= sizes[name]
        return True

    def _put(self, name: str, kind: str, data: bytes, note: bytes, old: dict[str, Any]) -> bool:
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._path(name, kind), data)
        self._fs.pipe_file(self._path(name, NOTE), note)
        for left in old.keys() - {kind, NOTE}:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name, left))
        return True

    def _remove(self, name: str, kinds: Any) -> bool:
        """The note first, so that nobody begins to read."""

        def remove() -> bool:
            for kind in sorted(kinds, key=lambda kind: kind != NOTE):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name, kind))
            return True

        return self._asked(remove)

    def _held(self) -> dict[str, dict[str, Any]]:
        """Files of every entry: id -> kind -> what the file system says of it."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, maxdepth=1, detail=True)
        except FileNotFoundError:
            return {}
        held: dict[str, dict[str, Any]] = {}
        for path, about in found.items():
            name, _, kind = path.rpartition("/")[2].partition(".")
            if is_id(name) and about.get("type") in ("file", "link"):
                held.setdefault(name, {})[kind] = about
        return held

    def holds(self, name: str) -> bool:
        path = self._path(checked_id(name), NOTE)
        return self._asked(lambda: bool(self._fs.exists(path)))

    def drop(self, name: str) -> bool:
        pattern = f"{glob.escape(self._root)}/{checked_id(name)}.*"
        with self._changing:
            found = self._asked(lambda: self._fs.glob(pattern))
            return bool(found) and self._remove(name, [path.rpartition("/")[2].partition(".")[2] for path in found])

    def listing(self) -> Iterator[Listing]:
        for name, files in self._asked(self._held).items():
            try:
                note = self._note(name)
            except (FileNotFoundError, Damaged):
                continue
            size = sum(file["size"] for file in files.values())
            yield Listing(name, size, note.tokens, note.namespace, note.method, note.written)

    def verify(self) -> list[Problem]:
        problems = []
        for name, files in self._asked(self._held).items():
            try:
                if NOTE in files and self.read(name) is not None:
                    continue
                self.drop(name)
                problems.append(Problem(self.name, name, "left over: an entry that was never complete"))
            except Damaged as error:
                self.counters.damaged += 1
                problems.append(Problem(self.name, name, str(error)))
        return problems


def _kind(note: Note) -> str:
    return f"{note.checksum:08x}-{note.size}.safetensors"


def _written(files: dict[str, Any]) -> float:
    """When the newest file of an entry was written, as far as the file system says."""
    times = [about.get("mtime") or about.get("LastModified") or about.get("created") or 0 for about in files.values()]
    return max((each.timestamp() if hasattr(each, "timestamp") else float(each) for each in times), default=0.0)
