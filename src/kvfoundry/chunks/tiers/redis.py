"""Entries in Redis, in parts of 1 MB, for several hosts.

    <prefix>:<id>:note            what must be there, written last; it names the parts by their checksum
    <prefix>:<id>:<checksum>:<n>  part n; it expires unless the note follows soon
    <prefix>:room                 hash id -> bytes reserved; <prefix>:used   sorted set id -> last use

Room is reserved before anything is written. Every wait is bounded by the time of one operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvfoundry.chunks.packing import Damaged, Entry, Note, Unavailable, pack, unpack
from kvfoundry.chunks.tiers.base import Listing, Problem, Tier, checked_id, is_id
from kvfoundry.chunks.tiers.guard import Deadline, Guard, first_line
from kvfoundry.errors import MissingExtraError, StoreError

PART = 1 << 20
PASSWORD = "KVFOUNDRY_REDIS_PASSWORD"
# Parts of a writer that died before its note are gone after so many seconds.
_UNFINISHED = 600

T = TypeVar("T")


class RedisTier(Tier):
    """Entries under a prefix of one database, at most `capacity` bytes of chunks.

    url: redis://[user@]host[:port][/database] or rediss:// for TLS; the password comes from the environment alone.
    timeout: seconds for one chunk to be read or written, retry: seconds without a try after a failure.
    """

    def __init__(self, url: str, capacity: int, *, timeout: float, retry: float, prefix: str = "kvfoundry"):
        super().__init__("redis", capacity)
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingExtraError("redis:// stores need redis-py: pip install 'kvfoundry[store]'.") from error
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                password=os.environ.get(PASSWORD),
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise StoreError(f"cannot read the address of the Redis store ({first_line(error)}).") from error
        self._prefix = prefix
        self._guard = Guard("redis", timeout, retry)

    def _asked(self, operation: Callable[[Deadline], T]) -> T:
        self._guard.check()
        try:
            return operation(Deadline(self._guard))
        except self._errors as error:
            self.counters.errors += 1
            raise self._guard.failed(first_line(error)) from error

    def _note_key(self, name: str) -> str:
        return f"{self._prefix}:{checked_id(name)}:note"

    def _part_keys(self, name: str, note: Note) -> list[str]:
        count = -(-note.size // PART)
        return [f"{self._prefix}:{checked_id(name)}:{note.checksum:08x}:{number}" for number in range(count)]

    def read(self, name: str) -> Entry | None:
        return self._asked(lambda deadline: self._read(name, deadline))

    def _read(self, name: str, deadline: Deadline) -> Entry | None:
        told = self._client.get(self._note_key(name))
        if told is None:
            return None
        try:
            note = Note.loads(told)
            if self.capacity is not None and note.size > self.capacity:
                raise Damaged("its note names more bytes than the store may hold")
            data = self._data(name, note, deadline)
            if data is None:
                if self._client.get(self._note_key(name)) != told:
                    return None  # dropped or replaced while it was read
                raise Damaged("a part of it is gone")
            entry = unpack(name, note, data)
        except Damaged:
            self._drop(name)
            raise
        self._client.zadd(f"{self._prefix}:used", {name: time.time()}, xx=True)
        self.counters.bytes_read += note.size
        return entry

    def _data(self, name: str, note: Note, deadline: Deadline) -> bytes | None:
        """All parts; None when one is not there."""
        parts = []
        for key in self._part_keys(name, note):
            deadline.check()
            part = self._client.get(key)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def write(self, entry: Entry) -> bool:
        note, data = pack(entry)
        if self.capacity is not None and note.size > self.capacity:
            return self.refuse(f"an entry of {note.size} bytes is larger than the tier redis")
        return self._asked(lambda deadline: self._write(entry.id, note, data, deadline))

    def _write(self, name: str, note: Note, data: bytes, deadline: Deadline) -> bool:
        old = self._note(name)
        if old is not None and (old.size, old.checksum) == (note.size, note.checksum):
            self._client.zadd(f"{self._prefix}:used", {name: time.time()}, xx=True)
            return True
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(f"{self._prefix}:room", name, note.size + (old.size if old else 0))
        pipe.zadd(f"{self._prefix}:used", {name: time.time()})
        pipe.execute()
        if not self._make_room(name, deadline):
            self._drop(name)
            return self.refuse("no room in the tier redis: too much of it is pinned or being written")
        keys = self._part_keys(name, note)
        for number, key in enumerate(keys):
            deadline.check()
            self._client.set(key, data[number * PART : (number + 1) * PART], ex=_UNFINISHED)
        pipe = self._client.pipeline(transaction=True)
        for key in keys:
            pipe.persist(key)
        pipe.set(self._note_key(name), note.dumps())
        pipe.hset(f"{self._prefix}:room", name, note.size)
        pipe.zadd(f"{self._prefix}:used", {name: time.time()})
        if old is not None and (stale := set(self._part_keys(name, old)) - set(keys)):
            pipe.delete(*stale)
        if pipe.execute()[len(keys) + 1]:  # somebody gave the reserved room away meanwhile
            self._make_room(name, deadline)
        self.counters.bytes_written += note.size
        return True

    def _make_room(self, keep: str, deadline: Deadline) -> bool:
        if self.capacity is None:
            return True
        room = {name.decode(): int(size) for name, size in self._client.hgetall(f"{self._prefix}:room").items()}
        over = sum(room.values()) - self.capacity
        oldest = self._client.zrange(f"{self._prefix}:used", 0, -1) if over > 0 else []
        for name in (each.decode() for each in oldest):
            deadline.check()
            if over <= 0:
                break
            if name != keep and not self.is_pinned(name):
                self._drop(name)
                self.counters.evictions += 1
                over -= room.get(name, 0)
        return over <= 0

    def _note(self, name: str) -> Note | None:
        told = self._client.get(self._note_key(name))
        try:
            return None if told is None else Note.loads(told)
        except Damaged:
            return None

    def holds(self, name: str) -> bool:
        return bool(self._asked(lambda _: self._client.exists(self._note_key(name))))

    def drop(self, name: str) -> bool:
        return self._asked(lambda _: self._drop(checked_id(name)))

    def _forget(self, name: str) -> None:
        self._asked(lambda _: self._drop(name))

    def _drop(self, name: str) -> bool:
        note = self._note(name) if is_id(name) else None
        pipe = self._client.pipeline(transaction=True)
        if is_id(name):
            pipe.delete(self._note_key(name), *(self._part_keys(name, note) if note else ()))
        pipe.hdel(f"{self._prefix}:room", name)
        pipe.zrem(f"{self._prefix}:used", name)
        found = pipe.execute()
        return bool(is_id(name) and found[0])

    def listing(self) -> Iterator[Listing]:
        yield from self._asked(self._listing)

    def _listing(self, deadline: Deadline) -> list[Listing]:
        found = []
        for told, used in self._client.zrange(f"{self._prefix}:used", 0, -1, withscores=True):
            deadline.check()
            name = told.decode()
            note = self._note(name) if is_id(name) else None
            if note is not None:
                found.append(Listing(name, note.size, note.tokens, note.namespace, note.method, used))
        return found

    def verify(self) -> list[Problem]:
        problems = []
        for told in self._asked(lambda _: self._client.zrange(f"{self._prefix}:used", 0, -1)):
            name = told.decode(errors="replace")
            try:
                if is_id(name) and self.read(name) is not None:
                    continue
                self._forget(name)
                problems.append(Problem(self.name, name[:64], "left over: an entry that was never complete"))
            except Damaged as error:
                self.counters.damaged += 1
                problems.append(Problem(self.name, name, str(error)))
        return problems

    def close(self) -> None:
        try:
            self._client.close()
        except self._errors as error:
            raise Unavailable(first_line(error)) from error
