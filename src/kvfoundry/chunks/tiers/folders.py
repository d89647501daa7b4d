"""Files of a folder that strangers may have touched: no symbolic link is followed, nothing but plain files is read."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kvfoundry.chunks.packing import Damaged

# Systems without these (Windows) fall back to a look at each part of the path before it is used.
_BY_HANDLE = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


@contextmanager
def opened(root: Path, *parts: str) -> Iterator[Folder]:
    """A folder below `root`, reached without a link: one version of it, even when another takes its name meanwhile.

    FileNotFoundError when it is not there; Damaged when a part is no folder.
    """
    if not _BY_HANDLE:
        path = root
        for part in parts:
            path = path / part
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise Damaged("its folder cannot be opened (a link, or no folder)")
        if not path.exists():
            raise FileNotFoundError(path)
        yield Folder(path, None)
        return
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise Damaged(f"its folder cannot be opened ({error.strerror})") from error
            os.close(handle)
            handle = inner
        yield Folder(root.joinpath(*parts), handle)
    finally:
        os.close(handle)


class FileSource:
    """An open file that several threads read at once; a `kvfoundry.chunks.pieces.Source`."""

    def __init__(self, file: FileIO, size: int):
        self._file, self.size = file, size
        self._seeking = threading.Lock()

    def fill(self, offset: int, target: memoryview) -> None:
        """Bytes from `offset` on into `target`; Damaged when there are not so many."""
        at = 0
        while at < len(target):
            count = self._some(offset + at, target[at:])
            if not count:
                raise Damaged("it was cut short while it was read")
            at += count

    def _some(self, offset: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], offset)
        with self._seeking:
            self._file.seek(offset)
            return self._file.readinto(target) or 0


class Folder:
    """An open folder."""

    def __init__(self, path: Path, handle: int | None):
        self.path, self._handle = path, handle

    def is_in_place(self) -> bool:
        """Whether the path still leads to this folder."""
        if self._handle is None:
            return self.path.is_dir()
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._handle))
        except OSError:
            return False

    def size(self, name: str) -> int:
        """Bytes of a plain file; Damaged when it is none or is not there."""
        try:
            held = (
                os.stat(name, dir_fd=self._handle, follow_symlinks=False)
                if self._handle
                else (self.path / name).lstat()
            )
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(held.st_mode):
            raise Damaged(f"{name} is no plain file")
        return held.st_size

    def read(self, name: str, size: int) -> bytes:
        """The file, which must have `size` bytes; nothing is read of one that has another size."""
        with self.source(name, size) as source:
            data = bytearray(size)
            source.fill(0, memoryview(data))
            return bytes(data)

    @contextmanager
    def source(self, name: str, size: int) -> Iterator[FileSource]:
        """The open file, which must have `size` bytes; Damaged when it has others, is none, or cannot be read."""
        found = self.size(name)
        if found != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            if self._handle is None:
                handle = os.open(self.path / name, flags)
            else:
                handle = os.open(name, flags, dir_fd=self._handle)
            with os.fdopen(handle, "rb", buffering=0) as file:
                yield FileSource(file, size)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        try:
            if self._handle is None:
                os.utime(self.path / name)
            else:
                os.utime(name, dir_fd=self._handle, follow_symlinks=False)
        except OSError:
            pass  # a folder that is only readable keeps no order of use
