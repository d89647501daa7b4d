"""A remote tier that is away: bounded waits, the next tier or a recompute, the same answer, no thread left behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import random_ids
from transformers import PreTrainedModel

from kvfoundry.chunks import ChunkKV, ChunkStore, Identity, Report
from kvfoundry.chunks.identity import ChunkKey
from kvfoundry.chunks.passage import read_passage
from kvfoundry.chunks.tiers.files import FilesTier
from kvfoundry.errors import StoreError

from .redis_server import Server, free_port, redis_is_here, running_redis
from .support import chunk_for, key_of, same, timed

needs_redis = pytest.mark.skipif(not redis_is_here(), reason="no redis-server binary or no redis-py here")
pytestmark = needs_redis
Models = Callable[..., PreTrainedModel]
QUICK = "timeout=0.3&retry=0.2"


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running_redis() as server:
        assert server is not None
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with running_redis() as found:
        assert found is not None
        yield found


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    time.sleep(0.05)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def answered(store: ChunkStore, key: ChunkKey, model: PreTrainedModel, fresh: ChunkKV, within: float) -> Report:
    """A request through the store gives what no store would give, in bounded time."""
    report = Report()
    with timed() as took:
        chunk = store.fetch(key, lambda: read_passage(model, key.token_ids), report=report)
    assert same(chunk, fresh) and took[0] < within, took
    return report


def test_B84_a_remote_tier_that_goes_and_comes_back(server: Server, tiny_model: Models, tmp_path: Path) -> None:
    """Hung, stopped and restarted in mid-run, and refusing from the start: bounded waits, answers as without it."""
    model, ids = tiny_model("llama"), [random_ids(1, 200, seed=n)[0] for n in range(6)]
    who = Identity.of(model)
    keys, fresh = [who.key(each) for each in ids], [read_passage(model, each) for each in ids]
    with no_thread_left(), ChunkStore(f"{server.url}?{QUICK}") as store:
        assert answered(store, keys[0], model, fresh[0], 2).misses == {"not stored": 1}
        assert answered(store, keys[0], model, fresh[0], 2).hits == {"redis": 1}
        server.hang()
        report = answered(store, keys[0], model, fresh[0], 2)
        assert report.tokens == 0 and "redis: unavailable" in next(iter(report.misses))
        with timed() as took:  # left alone: nobody waits again
            assert store.get(keys[0]) is None
        assert took[0] < 0.1
        server.wake()
        time.sleep(0.25)
        assert answered(store, keys[0], model, fresh[0], 2).hits == {"redis": 1}
        server.stop()
        for key, chunk in zip(keys[1:3], fresh[1:3], strict=True):
            assert answered(store, key, model, chunk, 2).tokens == 0
        server.start()  # empty now
        time.sleep(0.25)
        assert answered(store, keys[0], model, fresh[0], 2).misses == {"not stored": 1}
        assert answered(store, keys[0], model, fresh[0], 2).hits == {"redis": 1}
        assert store.verify() == []
    with no_thread_left(), ChunkStore(f"host:1MiB,redis://127.0.0.1:{free_port()}/0?{QUICK}") as store:
        assert answered(store, keys[3], model, fresh[3], 2).tokens == 0
        assert answered(store, keys[3], model, fresh[3], 2).hits == {"host": 1}  # the next tier serves


class Gate:
    """Passes bytes between a client and a server, and stops after so many from the server: hung, or cut."""

    def __init__(self, target: int, budget: int, cut: bool):
        self._target, self._budget, self._cut = target, budget, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                upstream = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, upstream]
                for source, sink, counts in ((client, upstream, False), (upstream, client, True)):
                    self._threads.append(threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counts:
                    self._budget -= len(data)
                    if self._budget < 0:
                        if self._cut:
                            sink.close()
                        return
                sink.sendall(data)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(2)


@pytest.mark.parametrize("cut", [True, False], ids=["drops", "hangs"])
def test_B84_gone_in_the_middle_of_a_transfer(cut: bool, shared: Server) -> None:
    """The connection breaks, or falls silent, half way through a chunk: a miss in bounded time, and no half chunk."""
    key = key_of(1, tokens=9000)  # 4.6 MB, five parts
    chunk = chunk_for(key)
    with ChunkStore(shared.url) as store:
        store.put(key, chunk)
    gate = Gate(shared.port, 2_500_000, cut)
    with no_thread_left(), ChunkStore(f"redis://127.0.0.1:{gate.port}/0?timeout=0.5&retry=0.1") as store:
        report = Report()
        with timed() as took:
            assert store.get(key, report=report) is None
        assert took[0] < 2 and report.tokens == 0 and "unavailable" in next(iter(report.misses))
        gate.close()
    with ChunkStore(shared.url) as store:
        assert same(store.get(key), chunk)
        store.clear()


def test_a_trickle_is_not_waited_for(shared: Server) -> None:
    """Every single answer is in time, all together are not: the bound is for the chunk."""
    key = key_of(2, tokens=9000)
    with ChunkStore(f"{shared.url}?timeout=0.4") as store:
        store.put(key, chunk_for(key))
        tier = store.tiers[0]
        get = tier._client.get

        def slow(name: str) -> object:
            time.sleep(0.15)
            return get(name)

        tier._client.get = slow
        report = Report()
        with timed() as took:
            assert store.get(key, report=report) is None
        assert took[0] < 1.2 and "no complete answer within 0.4 s" in next(iter(report.misses))


def test_parts_are_one_megabyte_and_writers_leave_nothing(shared: Server) -> None:
    import redis

    key = key_of(3, tokens=9000)
    client = redis.Redis(port=shared.port)
    client.flushall()
    with ChunkStore(f"{shared.url}?size=50MB") as store:
        store.put(key, chunk_for(key))
        parts = [name for name in client.keys("kvfoundry:*") if name.count(b":") == 3]
        sizes = sorted(client.strlen(name) for name in parts)
        assert len(sizes) == 5 and sizes[-1] == 1 << 20 and all(client.ttl(name) == -1 for name in parts)
        note = next(name for name in client.keys("*") if name.endswith(b":note"))
        client.delete(note)  # a writer that died before its note
        assert store.get(key) is None
        assert [problem.reason for problem in store.verify()] == ["left over: an entry that was never complete"]
        store.put(key, chunk_for(key))
        client.delete(parts[2])
        report = Report()
        assert store.get(key, report=report) is None and report.misses == {"redis: damaged, a part of it is gone": 1}
        store.put(key, chunk_for(key))
        client.setrange(parts[1], 1000, b"xyz")
        assert store.get(key, report=report) is None and "redis: damaged, its checksum differs" in report.misses
        assert store.stats()["tiers"]["redis"]["entries"] == 0
        assert [name for name in client.keys("*") if name.endswith(b":note")] == []


def test_a_store_of_two_hosts_keeps_its_cap(shared: Server) -> None:
    """Two clients write at once; the bytes of chunks in Redis stay below the cap, by Redis' own count of the values."""
    import redis

    client = redis.Redis(port=shared.port)
    client.flushall()
    stop, largest = threading.Event(), [0]

    def watch() -> None:
        while not stop.is_set():
            names = [name for name in client.keys("kvfoundry:*") if name.count(b":") == 3]
            pipe = client.pipeline()
            for name in names:
                pipe.strlen(name)
            largest[0] = max(largest[0], sum(pipe.execute()))

    def write(first: int) -> None:
        with ChunkStore(f"{shared.url}?size=600kB&timeout=10") as store:
            for number in range(first, first + 60):
                store.put(key_of(number, tokens=40), chunk_for(key_of(number, tokens=40)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    watcher.join()
    with ChunkStore(f"{shared.url}?size=600kB") as store:
        assert 300_000 < largest[0] <= 600_000 and store.verify() == []
        store.clear()
    assert client.keys("kvfoundry:*:*:*") == []


def test_the_password_comes_from_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_redis("--requirepass", "s3cret") as locked:
        assert locked is not None
        with ChunkStore(f"{locked.url}?{QUICK}") as store:
            report = Report()
            assert store.get(key_of(1), report=report) is None and "unavailable" in next(iter(report.misses))
        monkeypatch.setenv("KVFOUNDRY_REDIS_PASSWORD", "s3cret")
        with ChunkStore(f"{locked.url}?{QUICK}") as store:
            assert store.put(key_of(1), chunk_for(key_of(1))) == ["redis"] and store.get(key_of(1)) is not None
            assert "s3cret" not in str(store.stats()) + repr(store.config)
        with pytest.raises(StoreError) as refused:
            ChunkStore(f"redis://:s3cret@127.0.0.1:{locked.port}/0")
        assert "KVFOUNDRY_REDIS_PASSWORD" in str(refused.value) and "s3cret" not in str(refused.value)


def test_forgetting_says_when_it_could_not(server: Server) -> None:
    with ChunkStore(f"host:1MiB,{server.url}?{QUICK}") as store:
        store.put(key_of(1), chunk_for(key_of(1)))
        server.hang()
        with pytest.raises(StoreError, match="not everything could be forgotten"):
            store.invalidate(key_of(1))
        with pytest.raises(StoreError, match="cannot list"):
            store.listing()
        assert "unavailable" in store.stats()["tiers"]["redis"]
        assert "cannot be checked" in store.verify()[0].reason
        server.wake()


def test_a_file_system_that_hangs_leaves_at_most_one_thread(tmp_path: Path) -> None:
    tier = FilesTier(f"file://{tmp_path / 'files'}", 1 << 20, timeout=0.2, retry=60)
    release, before = threading.Event(), threading.active_count()
    tier._fs = type("Hangs", (), {"info": lambda *_: {}, "cat_file": lambda *_, **__: release.wait(20)})()
    with ChunkStore("host:1MiB") as store:
        store.tiers.append(tier)
        for _ in range(5):
            report = Report()
            with timed() as took:
                assert store.get(key_of(1), report=report) is None
            assert took[0] < 0.5 and "unavailable" in next(iter(report.misses))
        assert threading.active_count() <= before + 1
        release.set()
