"""A stored chunk as bytes: a safetensors file, and a small note that says what must be in it.

Reading runs nothing and trusts nothing: sizes and checksum first, then names and shapes, and only then a chunk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save

from kvfoundry.chunks.chunk import ChunkKV
from kvfoundry.chunks.fields import text, whole_number
from kvfoundry.chunks.pieces import Bytes, Header, Source, checksum, tensors_of
from kvfoundry.errors import KVFoundryError
from kvfoundry.layouts.base import owned

VERSION = 1
# Longest note that is read: identities are a few hundred bytes.
NOTE_LIMIT = 1 << 16
_HEAD = "kvfoundry"
# What is raised over contents that nobody here has written.
_ODD = (KVFoundryError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


class Damaged(Exception):
    """What a tier holds under a name is not what was written; the message says how."""


class Unavailable(Exception):
    """A tier that cannot be asked now; the message says why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A chunk with the identity that it was stored under; `id` is the name that both have.

    ready: the CUDA event after which the rows may be read on another stream; None where the host has waited.
    """

    id: str
    identity: Mapping[str, str]
    chunk: ChunkKV
    ready: Any = None

    @property
    def tokens(self) -> int:
        """Tokens of the passage."""
        return len(self.chunk.token_ids)


@dataclass(frozen=True)
class Note:
    """What is known of an entry without opening it. size: bytes of the file; written: seconds since 1970."""

    size: int
    checksum: int
    tokens: int
    namespace: str
    method: str
    written: float

    def dumps(self) -> bytes:
        """As JSON."""
        return json.dumps({"version": VERSION, **vars(self)}).encode()

    @classmethod
    def loads(cls, data: bytes) -> Note:
        """From JSON; Damaged when it is anything else than a note of this version."""
        try:
            if len(data) > NOTE_LIMIT:
                raise ValueError("too long")
            held = json.loads(data)
            version = held["version"]
            if version != VERSION:
                raise Damaged(f"version {version!r:.20}, and this is version {VERSION}")
            counts = (whole_number(held[name], 0) for name in ("size", "checksum", "tokens"))
            size, checksum, tokens = counts
            namespace, method = text(held["namespace"]), text(held["method"])
            if not (namespace + method).isprintable():
                raise ValueError("control characters")
            return cls(size, checksum, tokens, namespace, method, float(held["written"]))
        except (KVFoundryError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise Damaged("its note cannot be read") from error


def pack(entry: Entry) -> tuple[Note, bytes]:
    """The note and the file of an entry. Tensors of any layout in memory are written in order."""
    tensors = {name: owned(tensor.cpu()) for name, tensor in entry.chunk.tensors().items()}
    head = {"id": entry.id, "identity": dict(entry.identity), "chunk": entry.chunk.metadata()}
    data = save(tensors, metadata={_HEAD: json.dumps(head)})
    parts = entry.identity
    note = Note(len(data), checksum(data), entry.tokens, parts["namespace"], parts["method"], time.time())
    return note, data


def unpack(name: str, note: Note, source: bytes | Source) -> Entry:
    """The entry in a file that was stored under the id `name`; Damaged when anything about it is odd."""
    source = Bytes(source) if isinstance(source, bytes) else source
    if source.size != note.size:
        raise Damaged(f"{source.size} bytes instead of {note.size}")
    try:
        header = Header.of(source)
        tensors, found = tensors_of(source, header)
    except _ODD as error:
        whole = bytearray(source.size)
        source.fill(0, memoryview(whole))
        if checksum(bytes(whole)) != note.checksum:
            raise Damaged("its checksum differs") from error
        raise Damaged(f"it holds no chunk ({_said(error)})") from error
    if found != note.checksum:
        raise Damaged("its checksum differs")
    try:
        head = json.loads(header.metadata[_HEAD])
        identity = {text(key): text(value) for key, value in head["identity"].items()}
        if head["id"] != name:
            raise Damaged("it was stored under another id")
        chunk = ChunkKV.from_tensors(tensors, head["chunk"])
    except _ODD as error:
        raise Damaged(f"it holds no chunk ({_said(error)})") from error
    return Entry(name, identity, chunk)


def _said(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else f"{error!r:.100}"


def in_own_memory(entry: Entry, *, pinned: bool = False) -> Entry:
    """The entry on the host, every tensor in a storage of its own. pinned: in memory that a GPU copies from."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        host = owned(tensor.cpu())
        return host.pin_memory() if pinned and host.numel() and not host.is_pinned() else host

    return Entry(entry.id, entry.identity, entry.chunk.mapped(held))
