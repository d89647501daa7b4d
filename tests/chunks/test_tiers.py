"""One contract for every tier: what is written comes back bit for bit, and below the cap the oldest leave first."""

from __future__ import annotations

import gc
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
import torch

from kvfoundry.chunks import ChunkKV, ChunkStore
from kvfoundry.chunks.chunk import ChunkLayer
from kvfoundry.chunks.packing import Damaged, Entry, Note, pack, unpack
from kvfoundry.chunks.pieces import checksum
from kvfoundry.chunks.tiers.base import Tier
from kvfoundry.chunks.tiers.disk import DiskTier
from kvfoundry.chunks.tiers.files import FilesTier
from kvfoundry.chunks.tiers.memory import DeviceTier, HostTier
from kvfoundry.errors import StoreError
from kvfoundry.layouts.record import Record

from .redis_server import Server, running_redis
from .support import chunk_for, entry_for, key_of, same

KINDS = ["host", "device", "disk", "file", "memory", "redis"]
Make = Callable[[int], Tier]


@pytest.fixture(scope="module")
def server() -> Iterator[Server | None]:
    with running_redis() as found:
        yield found


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, server: Server | None) -> Iterator[Make]:
    """Opens a tier of the kind with a capacity; each call a second one on the same place."""
    opened: list[Tier] = []

    def build(capacity: int) -> Tier:
        kind = request.param
        if kind == "host":
            tier: Tier = HostTier(capacity)
        elif kind == "device":
            tier = DeviceTier(capacity, torch.device("cpu"))
        elif kind == "disk":
            tier = DiskTier(tmp_path / "kv", capacity)
        elif kind == "redis":
            if server is None:
                pytest.skip("no redis-server binary or no redis-py here")
            from kvfoundry.chunks.tiers.redis import RedisTier

            tier = RedisTier(server.url, capacity, timeout=5, retry=5, prefix=tmp_path.name)
        else:
            url = f"file://{tmp_path / 'files'}" if kind == "file" else f"memory://{tmp_path.name}"
            tier = FilesTier(url, capacity, timeout=5, retry=5)
        opened.append(tier)
        return tier

    yield build
    for tier in opened:
        tier.close()
    fsspec.filesystem("memory").store.clear()


def taken_by_one(tier: Tier) -> int:
    """Bytes that one entry of 8 tokens takes there."""
    tier.write(entry_for(key_of(999)))
    size = tier.nbytes
    tier.drop(key_of(999).id)
    return size


def test_what_is_written_comes_back(make: Make) -> None:
    tier, entry = make(1 << 20), entry_for(key_of(1), layers=3)
    assert tier.read(entry.id) is None and not tier.holds(entry.id) and not tier.drop(entry.id)
    assert tier.write(entry) and tier.holds(entry.id)
    found = tier.read(entry.id)
    assert found is not None and same(found.chunk, entry.chunk) and found.identity == entry.identity
    (listed,) = tier.listing()
    assert (listed.id, listed.tokens, listed.method, listed.namespace) == (entry.id, 8, "fullkv", "")
    assert tier.nbytes >= entry.chunk.nbytes and tier.verify() == []
    assert tier.drop(entry.id) and tier.read(entry.id) is None and tier.nbytes == 0


def test_one_entry_per_id(make: Make) -> None:
    """B87: the same text twice is stored once; a newer one takes the place of the older."""
    tier, key = make(1 << 20), key_of(1)
    for layers in (2, 2, 3):
        assert tier.write(entry_for(key, layers=layers))
        assert len(list(tier.listing())) == 1
        assert same(tier.read(key.id).chunk, chunk_for(key, layers=layers))


def test_the_cap_holds_and_the_oldest_leave(make: Make) -> None:
    probe = make(1 << 20)
    one = taken_by_one(probe)
    extra = 64 << 10 if isinstance(probe, DiskTier) else 0  # its bookkeeping and one block per bucket
    tier = make(one * 5 + extra)
    for number in range(5):
        assert tier.write(entry_for(key_of(number)))
        time.sleep(0.01)
    if not isinstance(tier, FilesTier):  # which knows no order of use
        assert tier.read(key_of(0).id) is not None
        time.sleep(0.01)
    for number in range(5, 25):
        assert tier.write(entry_for(key_of(number)))
        assert tier.nbytes <= tier.capacity
        time.sleep(0.002)
        if number == 5 and not isinstance(tier, FilesTier) and not extra:
            assert tier.holds(key_of(0).id) and not tier.holds(key_of(1).id)
    assert tier.counters.evictions >= 10 and tier.holds(key_of(24).id)
    assert not tier.write(entry_for(key_of(30, tokens=4000))) and tier.counters.refused == 1
    assert tier.holds(key_of(24).id)  # a refusal costs nobody a place


def test_pinned_entries_stay(make: Make) -> None:
    one = taken_by_one(make(1 << 20))
    tier = make(one * 4 + (64 << 10 if isinstance(make(1 << 20), DiskTier) else 0))
    pinned = {key_of(number).id for number in range(3)}
    tier.is_pinned = pinned.__contains__
    for number in range(40):
        tier.write(entry_for(key_of(number)))
    assert all(tier.holds(name) for name in pinned)
    pinned |= {each.id for each in tier.listing()}
    written = [tier.write(entry_for(key_of(number))) for number in range(50, 90)]
    assert not all(written) and all(tier.holds(name) for name in pinned)
    pinned.clear()
    assert tier.write(entry_for(key_of(99)))


def test_clear_is_by_namespace(make: Make) -> None:
    tier = make(1 << 20)
    for space in ("a", "b"):
        for number in range(3):
            tier.write(entry_for(key_of(number, namespace=space)))
    assert len(list(tier.listing())) == 6 and tier.clear("a") == 3
    assert {each.namespace for each in tier.listing()} == {"b"}
    assert tier.clear() == 3 and tier.nbytes == 0


def test_names_from_outside_reach_nothing(make: Make) -> None:
    tier = make(1 << 20)
    if tier.in_memory:
        pytest.skip("memory has no paths")
    for name in ("../../etc/passwd", "a" * 63, "A" * 64, "g" * 64, "", "ab/" + "a" * 61, "a" * 64 + "\n"):
        for operation in (tier.read, tier.holds, tier.drop):
            with pytest.raises(StoreError, match="64 hex"):
                operation(name)


def test_many_threads(make: Make) -> None:
    one = taken_by_one(make(1 << 20))
    tier, errors = make(one * 6 + (64 << 10 if isinstance(make(1 << 20), DiskTier) else 0)), []

    def work(seed: int) -> None:
        try:
            for step in range(25):
                key = key_of((seed * 7 + step * 3) % 11)
                if step % 3 == 2:
                    tier.drop(key.id)
                elif step % 3:
                    tier.write(entry_for(key))
                else:
                    found = tier.read(key.id)
                    assert found is None or same(found.chunk, chunk_for(key))
        except BaseException as error:  # reported below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tier.nbytes <= tier.capacity and tier.verify() == []
    assert tier.nbytes == sum(each.size for each in tier.listing()) or isinstance(tier, DiskTier)


# What is stored, not where.


def strided(rows: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed":
        return rows.transpose(0, 2).contiguous().transpose(0, 2)
    if how == "sliced":
        return torch.cat([rows, rows, rows], dim=1)[:, rows.shape[1] : 2 * rows.shape[1]]
    return rows if how == "contiguous" else rows[:1].expand_as(rows)


@pytest.mark.parametrize("how", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_B49_keys_and_values_keep_their_places(make: Make, how: str, dtype: torch.dtype) -> None:
    """Every dtype, and tensors of any layout in memory: keys and values of every layer have their own checksums."""
    key = key_of(3, dtype=str(dtype).removeprefix("torch."))
    plain = chunk_for(key, dtype=dtype)
    layers = tuple(
        ChunkLayer(Record("whole", {name: strided(rows, how) for name, rows in layer.record.tensors.items()}), 2)
        for layer in plain.layers
    )
    chunk = ChunkKV(plain.token_ids, layers, "fullkv", dtype)

    def checksums(of: ChunkKV) -> list[int]:
        held = (getattr(layer, name).contiguous() for layer in of.layers for name in ("keys", "values"))
        return [zlib.crc32(rows.view(torch.uint8).numpy().tobytes()) for rows in held]

    tier = make(1 << 20)
    tier.write(Entry(key.id, dict(key.identity.parts), chunk))
    found = tier.read(key.id)
    assert checksums(found.chunk) == checksums(chunk) and len(set(checksums(chunk))) == 4
    for tensor in found.chunk.tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_B78_views_keep_no_large_storage_alive() -> None:
    """5,000 rounds of store and evict from slices of one large tensor: memory of the process grows by less than 5%."""
    tier, process = HostTier(1 << 18), psutil.Process()
    ids = torch.arange(64)
    identity = dict(key_of(1).identity.parts)

    def round_of(number: int) -> None:
        pool = torch.empty(64, 64, 64)  # 1 MB, of which the entry takes a 16th
        record = Record("whole", {"keys": pool[:2, :, :32], "values": pool[2:4, :, :32]})
        chunk = ChunkKV(ids, (ChunkLayer(record, 2),), "fullkv", torch.float32)
        tier.write(Entry(f"{number:064x}", identity, chunk))

    for number in range(200):
        round_of(number)
    gc.collect()
    before = process.memory_info().rss
    for number in range(200, 5200):
        round_of(number)
    gc.collect()
    assert process.memory_info().rss < 1.05 * before
    assert tier.nbytes <= tier.capacity and tier.counters.evictions > 5000


def test_a_store_holds_no_view_of_what_was_put() -> None:
    key = key_of(1)
    big = torch.zeros(2, 800, 16)
    record = Record("whole", {"keys": big[:, 8:16], "values": big[:, :8]})
    chunk = ChunkKV(key.token_ids, (ChunkLayer(record, 2),), "fullkv", torch.float32)
    with ChunkStore("device:1MiB,host:1MiB") as store:
        store.put(key, chunk)
        big.fill_(7)
        for tier in store.tiers:
            held = tier.read(key.id).chunk
            assert float(held.layers[0].keys.abs().max()) == 0
            assert tier.nbytes == held.nbytes == sum(tensor.nbytes for tensor in held.tensors().values())


NOTE = Note(10, 1, 8, "", "fullkv", 1.0)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b"null", b"[" * 5000, b"x" * (1 << 17), b'{"version": 1}', NOTE.dumps()[:-1]]
    + [NOTE.dumps().replace(old, new) for old, new in [
        (b'"size": 10', b'"size": -1'), (b'"size": 10', b'"size": "10"'), (b'"size": 10', b'"size": true'),
        (b'"version": 1', b'"version": 2'), (b'"namespace": ""', b'"namespace": 3'), (b'1.0', b'"x"'),
        (b'"namespace": ""', b'"namespace": "\\u001b[2J"'),
    ]],
)  # fmt: skip
def test_odd_notes_are_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        Note.loads(data)
    assert Note.loads(NOTE.dumps()) == NOTE


def test_every_flipped_byte_shows() -> None:
    entry = entry_for(key_of(1), layers=1)
    note, data = pack(entry)
    assert same(unpack(entry.id, note, data).chunk, entry.chunk)
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(Damaged, match="checksum"):
            unpack(entry.id, note, bytes(flipped))
    with pytest.raises(Damaged, match="another id"):
        unpack(key_of(2).id, note, data)


@pytest.mark.parametrize("part", ["header", "length", "json", "tensors", "no head", "pickle"])
def test_a_right_checksum_over_odd_contents_is_refused(part: str) -> None:
    """What a stranger writes with a note that fits: nothing of it is run, and it is no chunk."""
    import pickle

    from safetensors.torch import save

    entry = entry_for(key_of(1), layers=1)
    data: Any = bytearray(pack(entry)[1])
    if part == "header":
        data[10] = ord("#")
    elif part == "length":
        data[:8] = (1 << 60).to_bytes(8, "little")
    elif part == "json":
        data = data.replace(b'\\"heads\\": 2', b'\\"heads\\": []')
    elif part == "tensors":
        data = data.replace(b'"0.values"', b'"9.values"')
    elif part == "no head":
        data = save({"token_ids": torch.arange(3)}, metadata={"a": "b"})
    else:
        data = pickle.dumps({"a": 1})
    note = Note(len(data), checksum(bytes(data)), 8, "", "fullkv", 1.0)
    with pytest.raises(Damaged, match="no chunk"):
        unpack(entry.id, note, bytes(data))
