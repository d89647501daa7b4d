"""Chunks to and from a CUDA device: in order with what computes and reads them; skipped where there is none."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from chunks.support import chunk_for, key_of, room, same

from kvfoundry.chunks import ChunkKV, ChunkStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda:0"


def on_host(chunk: ChunkKV) -> ChunkKV:
    return chunk.to("cpu")


def work(size: int = 2048) -> torch.Tensor:
    """A large product on the present stream."""
    left = torch.randn(size, size, device=DEVICE)
    return left @ left


def test_device_and_host_tiers(tmp_path: Path) -> None:
    key = key_of(1, tokens=64)
    with ChunkStore(f"device:8MiB,host:8MiB,disk:{tmp_path / 'kv'}:32MiB") as store:
        assert store.put(key, chunk_for(key).to(DEVICE)) == ["device", "host", "disk"]
        held = store.tiers[1].read(key.id).chunk
        assert all(tensor.is_pinned() for tensor in held.tensors().values() if tensor.numel())
        for _ in range(2):
            found = store.get(key)
            assert found.device.type == "cuda" and same(on_host(found), chunk_for(key))
            store.evict(key)
        assert store.promote(key).result().device.type == "cuda"
        assert same(store.get(key, device="cpu"), chunk_for(key))


@pytest.mark.parametrize("direction", ["load", "store"])
def test_B52_copies_are_ordered_with_computation(direction: str) -> None:
    """A delayed copy stream and a busy main one: 1,000 rounds with checksums, both directions, zero mismatches."""
    keys = [key_of(number, tokens=64) for number in range(8)]
    expected = {key.id: chunk_for(key) for key in keys}
    with ChunkStore(f"device:{room(expected[keys[0].id], 3)},host:64MiB") as store:
        for key in keys:
            store.put(key, expected[key.id])
        mismatches = 0
        for step in range(1000):
            key = keys[step % len(keys)]
            want = expected[key.id]
            if direction == "load":
                stream = store._mover._streams.get(torch.device(DEVICE))
                if stream is not None:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(20_000)
                coming = store.promote(key)
                work(512)
                got = coming.result()
                store.tiers[0].drop(key.id)
                # read on the main stream, and its memory is free for the next copy at once
                sums = [float(layer.keys.double().sum()) for layer in got.layers]
                mismatches += sums != [float(layer.keys.double().sum()) for layer in want.layers] and not same(
                    on_host(got), want
                )
            else:
                torch.cuda._sleep(20_000)
                fresh = want.to(DEVICE).mapped(lambda tensor: tensor + 0 if tensor.is_cuda else tensor)
                store.put(key, fresh)
                for layer in fresh.layers:
                    layer.record.tensors["keys"].fill_(float("nan"))  # behind the copy, on the same stream
                del fresh
                mismatches += not same(store.tiers[1].read(key.id).chunk, want)
                store.tiers[0].drop(key.id)
        torch.cuda.synchronize()
        assert mismatches == 0


def test_B53_cancelled_promotions_write_into_nobody() -> None:
    """Cancel while copies are in flight and use the memory at once: its new contents hold, no pins remain."""
    keys = [key_of(number, tokens=512) for number in range(4)]
    with ChunkStore(f"device:{room(chunk_for(keys[0]), 2)},host:64MiB") as store:
        for key in keys:
            store.put(key, chunk_for(key))
        for _ in range(100):
            coming = [store.promote(key) for key in keys]
            with contextlib.suppress(RuntimeError), store.pin(*keys):
                work(512)
                raise RuntimeError("the request was dropped")
            for each in coming:
                each.cancel()
            del coming
            for key in keys:
                store.tiers[0].drop(key.id)
            fresh = [torch.full((4, 512, 16), 3.0, device=DEVICE) for _ in range(16)]
            work(512)
            assert all(bool((tensor == 3).all()) for tensor in fresh)
        assert store.stats()["pinned_bytes"] == 0


def test_readers_on_other_streams_see_whole_rows() -> None:
    key = key_of(1, tokens=4096)
    want = chunk_for(key)
    with ChunkStore("device:64MiB,host:64MiB") as store:
        store.put(key, want)
        wrong = []

        def read() -> None:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                for _ in range(50):
                    wrong.append(not same(on_host(store.get(key)), want))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for _ in range(50):
            store.tiers[0].drop(key.id)
        for reader in readers:
            reader.join()
        assert wrong and not any(wrong)
