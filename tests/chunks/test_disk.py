"""A folder that outlives its processes: caps over what was there before, damage, restarts, and killed writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tiny_models import random_ids
from transformers import PreTrainedModel

from kvfoundry.chunks import ChunkStore, Identity, Report
from kvfoundry.chunks.passage import read_passage
from kvfoundry.chunks.tiers.disk import DiskTier
from kvfoundry.chunks.tiers.disk_index import CHUNK, NOTE, taken
from kvfoundry.errors import StoreError

from .support import chunk_for, entry_for, key_of, same, size_of

FORK = multiprocessing.get_context("fork")
MB = 10**6


def folder_of(root: Path, name: str) -> Path:
    return root / "chunks" / name[:2] / name


def put_many(root: Path, capacity: int, numbers: range, tokens: int) -> None:
    tier = DiskTier(root, capacity)
    for number in numbers:
        tier.write(entry_for(key_of(number, tokens=tokens)))
    tier.close()


def test_B72_the_cap_counts_what_was_there(tmp_path: Path) -> None:
    """8 MB from an earlier run, a cap of 10 MB, 50 MB from two writers: never above, and evictions are counted."""
    root, tokens = tmp_path / "kv", 770  # about 0.4 MB each
    put_many(root, 20 * MB, range(20), tokens)
    assert 7.5 * MB < size_of(root) < 10 * MB
    writers = [FORK.Process(target=put_many, args=(root, 10 * MB, range(n, n + 65), tokens)) for n in (100, 200)]
    for writer in writers:
        writer.start()
    largest, samples = 0, 0
    while any(writer.is_alive() for writer in writers):
        with FileLock(root / "lock").acquire(poll_interval=0.001):  # or an entry on its way is seen twice
            largest, samples = max(largest, taken(root)), samples + 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert samples > 5 and largest <= 10 * MB
    tier = DiskTier(root, 9 * MB)  # a smaller cap than before takes effect at once
    assert tier.counters.evictions > 0 and taken(root) <= 9 * MB
    assert tier.verify() == [] and tier.nbytes > 7 * MB
    tier.close()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(folder / CHUNK, 100),
    "longer": lambda folder: (folder / CHUNK).write_bytes((folder / CHUNK).read_bytes() + b"x"),
    "flipped": lambda folder: (folder / CHUNK).write_bytes(_flipped((folder / CHUNK).read_bytes())),
    "empty": lambda folder: (folder / CHUNK).write_bytes(b""),
    "gone": lambda folder: (folder / CHUNK).unlink(),
    "note gone": lambda folder: (folder / NOTE).unlink(),
    "note empty": lambda folder: (folder / NOTE).write_bytes(b""),
    "note flipped": lambda folder: (folder / NOTE).write_bytes(_flipped((folder / NOTE).read_bytes())),
    "wrong version": lambda folder: (folder / NOTE).write_text((folder / NOTE).read_text().replace(": 1,", ": 99,", 1)),
    "unreadable": lambda folder: _as_folder(folder / CHUNK),
    "a pipe": lambda folder: ((folder / CHUNK).unlink(), os.mkfifo(folder / CHUNK)),
    "a link": lambda folder: ((folder / CHUNK).rename(folder / "real"), (folder / CHUNK).symlink_to("real")),
    "a linked note": lambda folder: ((folder / NOTE).rename(folder / "real"), (folder / NOTE).symlink_to("real")),
    "a linked folder": lambda folder: (folder.rename(folder.parent / "x"), folder.symlink_to("x")),
    "a file": lambda folder: (folder.rename(folder.parent / "x"), folder.write_text("x")),
}


def _flipped(data: bytes) -> bytes:
    return data[:60] + bytes([data[60] ^ 4]) + data[61:]


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", DAMAGE)
def test_B74_damage_is_a_miss_with_a_reason(
    damage: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Each kind of damage is a miss that says why, the entry is dropped, and the answer equals that without a store."""
    model, ids, root = tiny_model("llama"), random_ids(1, 30)[0], tmp_path / "kv"
    key, fresh = Identity.of(model).key(ids), read_passage(model, ids)
    with ChunkStore(f"disk:{root}:10MiB") as store:
        store.put(key, fresh)
        DAMAGE[damage](folder_of(root, key.id))
        report = Report()
        chunk = store.fetch(key, lambda: read_passage(model, ids), report=report)
        assert same(chunk, fresh) and report.tokens == 0
        (reason,) = report.misses
        assert reason.startswith("disk: damaged, ") and len(reason) > 20
        assert store.stats()["tiers"]["disk"]["damaged"] == 1
        again = Report()
        assert same(store.get(key, report=again), fresh) and again.hits["disk"] == 1
        assert {problem.reason.split(":")[0] for problem in store.verify()} <= {"left over"}


def test_a_link_to_a_bucket_is_not_followed(tmp_path: Path) -> None:
    """Neither read through nor written through, whatever lies behind it."""
    key, other = key_of(1), tmp_path / "elsewhere"
    with ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB") as store, ChunkStore(f"disk:{other}:10MiB") as there:
        there.put(key, chunk_for(key))
        bucket = folder_of(tmp_path / "kv", key.id).parent
        bucket.symlink_to(folder_of(other, key.id).parent, target_is_directory=True)
        before = sorted(path for path in other.rglob("*") if "tmp" not in path.parts)
        assert store.get(key) is None
        assert store.put(key, chunk_for(key)) in ([], ["disk"])
        store.verify()
        assert sorted(path for path in other.rglob("*") if "tmp" not in path.parts) == before
        assert same(there.get(key), chunk_for(key)) and not bucket.is_symlink()


def test_B75_restart_finds_everything_and_clear_leaves_nothing(tmp_path: Path) -> None:
    """All entries hit after a restart; what a killed run left behind is gone; clear removes all bytes."""
    root = tmp_path / "kv"
    put_many(root, 10 * MB, range(20), 8)
    ready = FORK.Event()

    def die_while_writing() -> None:
        tier = DiskTier(root, 10 * MB)
        tier._reserve(key_of(500).id, 300_000, b"{}", tier._own / "half", 310_000)
        ready.set()
        time.sleep(60)

    writer = FORK.Process(target=die_while_writing)
    writer.start()
    assert ready.wait(30)
    with ChunkStore(f"disk:{root}:10MB") as store:  # the writer lives: what it writes is its own
        assert any(path.is_dir() for path in (root / "tmp").glob("*/half"))
        assert store.verify() == []
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    with ChunkStore(f"disk:{root}:10MB") as store:
        assert not list((root / "tmp").glob("*/*"))
        for number in range(20):
            assert same(store.get(key_of(number)), chunk_for(key_of(number)))
        assert store.get(key_of(500, tokens=2000)) is None
        assert store.clear() == 20
    left = {path.name for path in root.rglob("*") if path.is_file()}
    assert left <= {"lock", "changes", "store.json"} and size_of(root) < 4096


def test_two_processes_see_each_other(tmp_path: Path) -> None:
    """What one writes, the other finds, evicts by order of use of both, and clears."""
    one, other = (ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB") for _ in range(2))
    with one, other:
        for number in range(30):
            (one if number % 2 else other).put(key_of(number), chunk_for(key_of(number)))
        for number in range(30):
            assert same((other if number % 2 else one).get(key_of(number)), chunk_for(key_of(number)))
        assert len(one.listing()["disk"]) == len(other.listing()["disk"]) == 30
        assert one.invalidate(key_of(3)) and other.get(key_of(3)) is None
        assert other.clear() == 29 and one.get(key_of(4)) is None and one.listing() == {"disk": []}


def test_use_by_another_process_keeps_an_entry(tmp_path: Path) -> None:
    key = key_of(0)
    one, other = DiskTier(tmp_path / "kv", 10 * MB), DiskTier(tmp_path / "kv", 10 * MB)
    for number in range(6):
        one.write(entry_for(key_of(number)))
        time.sleep(0.01)
    assert other.read(key.id) is not None  # the oldest was used just now, elsewhere
    one.capacity = one._index.room + one.nbytes // 12
    one.write(entry_for(key_of(50)))
    assert one.holds(key.id) and not one.holds(key_of(1).id)
    for tier in (one, other):
        tier.close()


def _killed_writer(root: Path, first: int) -> None:
    put_many(root, 600_000, range(first, first + 200), 40)


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.3, 0.5])
def test_kill_in_the_middle_of_two_hundred_puts(delay: float, tmp_path: Path) -> None:
    """kill -9 of two writers at any moment: no damaged entry counts, the cap holds, and the store goes on."""
    root = tmp_path / "kv"
    writers = [FORK.Process(target=_killed_writer, args=(root, first)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    time.sleep(delay)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
    for writer in writers:
        writer.join()
    with ChunkStore(f"disk:{root}:600kB") as store:
        assert taken(root) <= 600_000
        assert [problem for problem in store.verify() if problem.id] == []
        held = {each.id for each in store.listing()["disk"]}
        keys = [key_of(number, tokens=40) for first in (0, 1000) for number in range(first, first + 200)]
        found = [key for key in keys if store.get(key) is not None]
        assert {key.id for key in found} == held
        assert all(same(store.get(key), chunk_for(key)) for key in found[:40])
        for number in range(5000, 5030):
            assert store.put(key_of(number), chunk_for(key_of(number))) == ["disk"]
        assert taken(root) <= 600_000


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore(f"host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            assert store.put(key_of(1), chunk_for(key_of(1))) == ["host"]
        assert "No space left" in store.stats()["tiers"]["disk"]["problems"][-1]
        assert store.put(key_of(1), chunk_for(key_of(1))) == ["host", "disk"] and store.verify() == []


@pytest.mark.parametrize(
    "prepare",
    [
        lambda root: root.write_text("a file"),
        lambda root: (root.mkdir(), (root / "thesis.tex").write_text("x")),
        lambda root: (root.mkdir(), (root / "store.json").write_text(json.dumps({"format": "kvfoundry-store-99"}))),
        lambda root: (root.mkdir(), (root / "store.json").symlink_to("/etc/hostname")),
        lambda root: (root.mkdir(), (root / "chunks").symlink_to("/tmp")),
    ],
)
def test_folders_that_are_no_store_are_refused(prepare: Callable[[Path], object], tmp_path: Path) -> None:
    root = tmp_path / "kv"
    prepare(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError):
        ChunkStore(f"disk:{root}:10MiB")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name not in ("lock", "tmp")] == before


def test_strangers_in_the_folder_are_swept_by_verify(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with ChunkStore(f"disk:{root}:10MiB") as store:
        store.put(key_of(1), chunk_for(key_of(1)))
        (root / "chunks" / "zz").mkdir()
        (root / "chunks" / "notes.txt").write_text("x")
        (folder_of(root, key_of(1).id).parent / "..x").symlink_to("/etc")
        assert len(store.verify()) == 3 and store.verify() == []
        assert Path("/etc").is_dir() and same(store.get(key_of(1)), chunk_for(key_of(1)))


def test_readers_never_meet_half_an_entry(tmp_path: Path) -> None:
    """One thread replaces and drops, others read: they get one version or none, and nothing counts as damaged."""
    key, tier = key_of(1, tokens=200), DiskTier(tmp_path / "kv", 10 * MB)
    versions, seen, stop = [entry_for(key, layers=layers) for layers in (1, 2, 3)], set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            found = tier.read(key.id)
            seen.add(0 if found is None else len(found.chunk.layers))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(120):
        tier.write(versions[step % 3])
        if step % 10 == 9:
            tier.drop(key.id)
    stop.set()
    for reader in readers:
        reader.join()
    assert seen <= {0, 1, 2, 3} and len(seen) >= 3 and tier.verify() == []
    tier.close()


def test_tensors_from_disk_own_their_storage(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", 10 * MB)
    tier.write(entry_for(key_of(1)))
    for tensor in tier.read(key_of(1).id).chunk.tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()  # not a map of the file
    assert torch.equal(tier.read(key_of(1).id).chunk.token_ids, key_of(1).token_ids)
    tier.close()
