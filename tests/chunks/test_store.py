"""What the store promises over all tiers: promotion, pins, single reads, honest reports, and recovery under load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import random_ids
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry import compat
from kvfoundry.chunks import ChunkStore, Identity, Report
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import StoreError

from .support import chunk_for, key_of, room, same

Models = Callable[..., PreTrainedModel]


def slowed(store: ChunkStore, seconds: float, reads: list[str] | None = None) -> None:
    """The slowest tier takes `seconds` for a read; `reads` gets the ids that are read there."""
    tier = store.tiers[-1]
    read = tier.read

    def slow(name: str) -> Any:
        if reads is not None:
            reads.append(name)
        time.sleep(seconds)
        return read(name)

    tier.read = slow


@torch.no_grad()
def decode(
    model: PreTrainedModel, cache: kvfoundry.KVCache, steps: int, each: Callable[[], object] = list
) -> list[int]:
    """Greedy tokens behind a cache; `each` is called at every step."""
    token, out = torch.tensor([[5]]), []
    for _ in range(steps):
        token = model(token, use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        out.append(int(token))
    return out


def test_B80_what_is_reported_was_loaded(tiny_model: Models, tmp_path: Path) -> None:
    """Disk holds 64 chunks and the host has room for 10: reported tokens are loaded tokens, the rest is computed."""
    model, ids = tiny_model("llama"), [random_ids(1, 12 + n % 5, seed=n)[0] for n in range(70)]
    who = Identity.of(model)
    one = read_passage(model, ids[0])
    with ChunkStore(f"host:{room(one, 10)},disk:{tmp_path / 'kv'}:10MiB") as store:
        for each in ids[:64]:
            made = read_passage(model, each)
            store.put(who.key(each), made)
    with ChunkStore(f"host:{room(one, 10)},disk:{tmp_path / 'kv'}:10MiB") as store:
        report, loaded, computed = Report(), 0, 0
        for each in ids:
            chunk = store.get(who.key(each), report=report)
            if chunk is None:
                computed += len(each)
                chunk = read_passage(model, each)
            else:
                loaded += len(chunk.token_ids)
                assert all(int(layer.lengths.min()) == len(each) for layer in chunk.layers)
            fresh = read_passage(model, each)
            assert same(chunk, fresh)
        assert report.tokens == loaded == sum(len(each) for each in ids[:64])
        assert report.missed_tokens == computed == sum(len(each) for each in ids[64:])
        assert report.misses == {"not stored": 6} and store.stats()["tiers"]["host"]["entries"] <= 10


def test_B82_nothing_is_read_twice(tmp_path: Path) -> None:
    """On the device already: promotion reads nothing. Two requests for one chunk at a time: one read."""
    key, other = key_of(1), key_of(2)
    with ChunkStore(f"device:1MiB,host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        reads: list[str] = []
        slowed(store, 0.05, reads)
        for each in (key, other):
            store.put(each, chunk_for(each))
        coming = store.promote(key)
        assert coming.done() and same(coming.result(), chunk_for(key)) and reads == []
        assert store.evict(key) and not store.evict(key)
        both = [store.promote(key), store.promote(key)]
        chunks = [each.result() for each in both] + [store.get(key)]
        assert reads == [key.id] and all(same(chunk, chunk_for(key)) for chunk in chunks)
        store.evict(other)
        got: list[Any] = []
        threads = [threading.Thread(target=lambda: got.append(store.get(other))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reads == [key.id, other.id] and all(same(chunk, chunk_for(other)) for chunk in got)


def test_B83_promotion_while_decoding_saves_the_wait(tiny_model: Models, tmp_path: Path) -> None:
    """A tier of 50 ms per chunk: with promotion while decoding the stall is lower; wrong guesses change no text."""
    model, ids = tiny_model("llama"), random_ids(1, 24)[0]
    key, wrong = Identity.of(model).key(ids), key_of(7)
    with ChunkStore(f"host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        store.put(key, read_passage(model, ids))
        store.put(wrong, chunk_for(wrong))
        slowed(store, 0.05)
        expected = decode(model, read_passage(model, ids).to_cache(model), 4)
        lower = 0
        for _ in range(10):
            stalls = []
            for promoted in (False, True):
                store.evict(key), store.evict(wrong)
                report = Report()
                coming = [store.promote(each, report=report) for each in (key, wrong) if promoted]
                decode(model, read_passage(model, ids[:4]).to_cache(model), 12)
                chunk = coming[0].result() if promoted else store.get(key, report=report)
                assert decode(model, chunk.to_cache(model), 4) == expected
                stalls.append(report.stall_seconds)
            lower += stalls[1] < stalls[0]
            assert stalls[0] >= 0.05
        assert lower >= 9


def test_B53_a_cancelled_promotion_touches_nothing(tiny_model: Models, tmp_path: Path) -> None:
    """Cancel, or an exception while decoding: memory that is used at once keeps its contents, and no pin remains."""
    model = tiny_model("llama")
    keys = [key_of(number, tokens=64) for number in range(6)]
    with ChunkStore(f"device:{room(chunk_for(keys[0]), 2)},host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        slowed(store, 0.01)
        for key in keys:
            store.put(key, chunk_for(key))
        for round_number in range(10):
            for key in keys:
                store.evict(key)
            coming = [store.promote(key) for key in keys]
            try:
                with store.pin(*keys):
                    decode(model, read_passage(model, random_ids(1, 8)[0]).to_cache(model), round_number % 4 + 1)
                    raise RuntimeError("the request was dropped")
            except RuntimeError:
                for each in coming:
                    each.cancel()
            fresh = [torch.full_like(tensor, 3) for tensor in chunk_for(keys[0]).tensors().values()]
            assert all(each.done() and each.result() is None for each in coming)
            assert store.stats()["pinned_bytes"] == 0
            del coming
            time.sleep(0.03)
            assert all(bool((tensor == 3).all()) for tensor in fresh)
        for key in keys:
            assert same(store.get(key), chunk_for(key))


def test_B77_ten_thousand_operations_at_the_brim(tmp_path: Path) -> None:
    """10,000 mixed operations of mixed sizes from four threads at 95 % fill: afterwards no byte is lost or pinned."""
    sizes = [4, 8, 16, 32, 64]
    keys = [key_of(number, tokens=sizes[number % 5]) for number in range(120)]
    chunks = {key.id: chunk_for(key) for key in keys}
    capacity = int(sum(chunk.nbytes for chunk in chunks.values()) * 0.4)
    errors: list[BaseException] = []
    with ChunkStore(f"device:{capacity},host:{capacity},disk:{tmp_path / 'kv'}:{capacity + 200_000}") as store:
        for key in keys:  # full before it begins
            store.put(key, chunks[key.id])

        fills = [tier.nbytes / capacity for tier in store.tiers[:2]]

        def work(seed: int) -> None:
            draw = random.Random(seed)
            try:
                for step in range(2500):
                    if step % 50 == 0:  # at the end the last draws may just have emptied it
                        fills.extend(tier.nbytes / capacity for tier in store.tiers[:2])
                    key = draw.choice(keys)
                    what = draw.random()
                    if what < 0.5:
                        found = store.get(key)
                        assert found is None or torch.equal(found.token_ids, key.token_ids)
                        if found is not None and step % 50 == 0:
                            assert same(found, chunks[key.id])
                    elif what < 0.55:
                        store.put(key, chunks[key.id])
                    elif what < 0.75:
                        with store.pin(key, draw.choice(keys)):
                            store.get(key)
                    elif what < 0.9:
                        coming = store.promote(key)
                        if draw.random() < 0.5:
                            coming.cancel()
                        else:
                            assert coming.result(30) is None or True
                    elif what < 0.98:
                        store.evict(key)
                    else:
                        store.invalidate(key)
            except BaseException as error:  # reported below, in the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        stats = store.stats()
        assert stats["pinned_bytes"] == 0 and store.verify() == []
        for tier in store.tiers[:2]:
            assert tier.nbytes == sum(each.size for each in tier.listing()) <= capacity
        assert 0.8 < max(fills) <= 1
        tokens = (capacity - 1000) // chunk_for(key_of(1, tokens=1)).nbytes  # as large as can be, in rows
        large = key_of(777, tokens=tokens)
        assert store.put(large, chunk_for(large))[:2] == ["device", "host"]
        assert same(store.get(large), chunk_for(large))


def test_pins_keep_chunks_where_they_are() -> None:
    keys = [key_of(number) for number in range(8)]
    with ChunkStore(f"host:{room(chunk_for(keys[0]), 3)}") as store:
        store.put(keys[0], chunk_for(keys[0]))
        with store.pin(keys[0]), store.pin(keys[0], keys[1]):
            assert store.stats()["pinned_bytes"] == chunk_for(keys[0]).nbytes
            assert not store.evict(keys[0])
            for key in keys[1:]:
                store.put(key, chunk_for(key))
            assert store.contains(keys[0]) and store.contains(keys[1]) and not store.contains(keys[2])
        assert store.stats()["pinned_bytes"] == 0
        for key in keys[3:6]:
            store.put(key, chunk_for(key))
        assert not store.contains(keys[0])


def test_what_is_full_of_pins_still_serves(tmp_path: Path) -> None:
    """No room in memory: the chunk comes from disk all the same."""
    keys = [key_of(number) for number in range(4)]
    with ChunkStore(f"host:{room(chunk_for(keys[0]), 1)},disk:{tmp_path / 'kv'}:10MiB") as store:
        for key in keys:
            store.put(key, chunk_for(key))
        with store.pin(keys[3]):
            for key in keys:
                assert same(store.get(key), chunk_for(key))
            assert "pinned" in store.stats()["tiers"]["host"]["problems"][-1]


@pytest.mark.parametrize("write", ["through", "back"])
def test_writing_reaches_every_tier(write: str, tmp_path: Path) -> None:
    """Through: when put returns. Back: soon, before close returns at the latest; found at any time in between."""
    keys = [key_of(number) for number in range(60)]
    one = chunk_for(keys[0])
    spec = f"host:{room(one, 3)},disk:{tmp_path / 'kv'}:10MiB,memory://{tmp_path.name}"
    with ChunkStore(spec, write=write) as store:
        report = Report()
        for key in keys:
            there = store.put(key, chunk_for(key), report=report)
            assert there == (["host", "disk", "memory"] if write == "through" else ["host"])
        for key in random.Random(0).sample(keys, 20):
            assert same(store.get(key), chunk_for(key))
    assert report.bytes_written == dict.fromkeys(("host", "disk", "memory"), one.nbytes * 60)
    for tier in (f"disk:{tmp_path / 'kv'}:10MiB", f"memory://{tmp_path.name}"):
        with ChunkStore(tier) as store:
            assert all(same(store.get(key), chunk_for(key)) for key in keys)
            assert store.clear() == 60


def test_a_hit_below_is_copied_to_every_faster_tier(tmp_path: Path) -> None:
    key = key_of(1)
    far, near = f"memory://{tmp_path.name}", f"disk:{tmp_path / 'kv'}:10MiB"
    with ChunkStore(far) as store:
        store.put(key, chunk_for(key))
    with ChunkStore(f"device:1MiB,host:1MiB,{near},{far}") as store:
        for tier in ("memory", "device"):
            report = Report()
            assert same(store.get(key, report=report), chunk_for(key)) and report.hits == {tier: 1}
            assert report.hit_tokens == {tier: 8}
        assert [tier.holds(key.id) for tier in store.tiers] == [True] * 4
        assert store.invalidate(key) and store.get(key) is None
        assert [tier.holds(key.id) for tier in store.tiers] == [False] * 4


def test_B62_what_was_computed_is_found_next_time(tiny_model: Models) -> None:
    """B62, B64, B87: a partial hit is completed and stored, however short; the same text twice is one entry."""
    model, who = tiny_model("llama"), Identity.of(tiny_model("llama"))
    documents = [random_ids(1, n, seed=n)[0] for n in (12, 1, 40)]
    with ChunkStore("host:1MiB") as store:
        for asked, expected in ((documents[:2], (0, 2)), (documents, (2, 1)), (documents[::-1], (3, 0))):
            report = Report()
            for ids in asked:
                store.fetch(who.key(ids), lambda ids=ids: read_passage(model, ids), report=report)
            assert (report.hits.total(), report.misses.total()) == expected
        assert store.stats()["tiers"]["host"]["entries"] == 3


def test_namespaces_and_updates(tmp_path: Path) -> None:
    """B87: a changed document has other tokens, so its old KV is never served; one namespace cannot see another's."""
    with ChunkStore(f"host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        old, new = key_of(1, namespace="a"), key_of(2, namespace="a")
        store.put(old, chunk_for(old))
        assert store.get(new) is None and store.get(key_of(1, namespace="b")) is None and store.get(key_of(1)) is None
        store.put(key_of(1, namespace="b"), chunk_for(key_of(1, namespace="b")))
        assert store.clear("a") == 2 and store.get(old) is None
        assert store.get(key_of(1, namespace="b")) is not None


@pytest.mark.filterwarnings("ignore::kvfoundry.coding.LossyCodecWarning")
@pytest.mark.parametrize(
    "spec",
    ["l2norm(budget=0.5, skip_layers=0)", "keydiff(budget=16)+kivi(bits=2, group=8, residual=8)", "kvquant(bits=3)",
     "gear", "think", "rotate()+int4", "kvzip(budget=0.4)", "kvzip(budget=0.4)+int8", "minicache(start=0.0)"],
)  # fmt: skip
def test_compressed_chunks_come_back_bit_for_bit(spec: str, tiny_model: Models, tokenizer: Any, tmp_path: Path) -> None:
    """Evicting methods that need no question, and every codec: from disk and through Redis' form, the same answers."""
    model, ids = tiny_model("llama"), random_ids(1, 60)[0]
    key = Identity.of(model, tokenizer, spec).key(ids)
    fresh = read_passage(model, ids, spec, tokenizer=tokenizer)
    with ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB,memory://{tmp_path.name}") as store:
        store.put(key, fresh)
        for _ in range(2):
            found = store.get(key)
            assert same(found, fresh)
            assert decode(model, found.to_cache(model), 8) == decode(model, fresh.to_cache(model), 8)
            store.tiers[0].drop(key.id)
    full = read_passage(model, ids)
    # gear's low-rank parts and minicache's exact rows need longer passages to pay
    assert fresh.nbytes < 0.9 * full.nbytes or spec in ("gear", "minicache(start=0.0)")


def test_closing_ends_every_thread_and_writes_what_waits(tmp_path: Path) -> None:
    before = threading.active_count()
    store = ChunkStore(f"host:1MiB,disk:{tmp_path / 'kv'}:10MiB", write="back", workers=4)
    slow = store.tiers[1].write
    store.tiers[1].write = lambda entry: (time.sleep(0.01), slow(entry))[1]
    for number in range(20):
        store.put(key_of(number), chunk_for(key_of(number)))
        store.promote(key_of(number + 50))
    store.close()
    assert threading.active_count() == before
    with ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB") as again:
        assert len(again.listing()["disk"]) == 20


def test_a_promotion_that_is_late_says_so(tmp_path: Path) -> None:
    key = key_of(1)
    with ChunkStore(f"disk:{tmp_path / 'kv'}:10MiB") as store:
        store.put(key, chunk_for(key))
        slowed(store, 0.3)
        coming = store.promote(key)
        with pytest.raises(StoreError, match="did not arrive"):
            coming.result(timeout=0.01)
        assert same(coming.result(), chunk_for(key)) and store.report.stall_seconds > 0.1


def test_asking_for_a_device_that_is_not_there() -> None:
    with ChunkStore("host:1MiB") as store, pytest.raises(StoreError, match="is not there"):
        store.get(key_of(1), device="cuda:77")


def test_reports_are_ready_for_json(tmp_path: Path) -> None:
    import json

    with ChunkStore(f"device:1MiB,host:1MiB,disk:{tmp_path / 'kv'}:10MiB") as store:
        store.fetch(key_of(1), lambda: chunk_for(key_of(1)))
        told = json.loads(json.dumps(store.stats()))
        assert told["requests"]["misses"] == {"not stored": 1} and told["tiers"]["disk"]["entries"] == 1


def test_a_chunk_of_someone_else_is_never_the_answer(tmp_path: Path) -> None:
    """A file that was renamed to another id is damage, not a hit."""
    mine, other = key_of(1), key_of(2)
    root = tmp_path / "kv"
    with ChunkStore(f"disk:{root}:10MiB") as store:
        store.put(mine, chunk_for(mine))
        target = root / "chunks" / other.id[:2]
        target.mkdir(exist_ok=True)
        (root / "chunks" / mine.id[:2] / mine.id).rename(target / other.id)
        report = Report()
        assert store.get(other, report=report) is None and "another id" in next(iter(report.misses))
