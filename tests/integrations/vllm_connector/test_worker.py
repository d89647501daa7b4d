"""The worker's side on caches without vLLM: what one saves comes into another's blocks, and what fails is told."""

import time

import pytest
import torch

from kvfoundry.chunks import ChunkStore, Identity
from kvfoundry.integrations.vllm.messages import Job, Span, Tenant, Work, span_key
from kvfoundry.integrations.vllm.settings import connector_settings
from kvfoundry.integrations.vllm.worker import StoreWorker

from .fakes import fill, layers, request

SPAN, BLOCK = 64, 16
IDENTITY = Identity({"format": "test", "namespace": "", "method": "fullkv", "dtype": "bfloat16"})
NOBODY = Tenant()
TOKENS = torch.tensor(request("a", 200).prompt_token_ids)


class Lines(list):
    __call__ = list.append


def worker(store: str, lines=None, held=None, identity=IDENTITY, **settings) -> StoreWorker:
    told = connector_settings({"store": store, "span": SPAN, **settings})
    method = {**identity.parts, "method": told.method}
    held = layers() if held is None else held
    return StoreWorker(told, ChunkStore(told.tiers), Identity(method), held, BLOCK, Lines() if lines is None else lines)


def job(blocks, stop=192, first=0, name="a", tenant=NOBODY) -> Job:
    spans = tuple(Span(at, at + SPAN, at) for at in range(first // SPAN * SPAN, stop, SPAN))
    return Job(name, tenant, TOKENS[:stop], spans, tuple(blocks[: stop // BLOCK]), first)


def saved(store: str, **settings) -> dict:
    held = layers()
    fill(held)
    source = worker(store, held=held, **settings)
    source.save(Work(saves=(job(range(20, 40)),)))
    fill(held, seed=9)  # the blocks belong to others as soon as `save` has returned
    source.close()
    fill(held)
    return held


def ended(each: StoreWorker, name="a") -> bool:
    for _ in range(500):
        if name in each.finished(set()):
            return True
        time.sleep(0.01)
    return False


def assert_rows(found, wanted, blocks, source, first, stop) -> None:
    for name in found:
        for token in range(first, stop):
            here = found[name].cache[blocks[token // BLOCK], :, token % BLOCK]
            assert torch.equal(here, wanted[name].cache[source[token // BLOCK], :, token % BLOCK]), (name, token)


@pytest.mark.parametrize("load", ["ahead", "layers"])
@pytest.mark.parametrize("first", [0, 16, 80])
def test_rows_come_back_in_other_blocks(tmp_path, load, first):
    store = f"disk:{tmp_path}:1GiB"
    wanted = saved(store)
    target = worker(store, load=load)
    blocks = list(range(15, 3, -1))
    target.start(Work(loads=(job(blocks, first=first),)))
    if load == "layers":
        for name in target.layers:
            target.wait_for(name)
        target.save(Work())
        assert not target.finished(set())
    else:
        assert ended(target)
    assert_rows(target.layers, wanted, blocks, range(20, 40), first, 192)
    untouched = [block for block in range(40) if block not in blocks[first // BLOCK :]]
    assert all(not each.cache[untouched].any() for each in target.layers.values())
    assert target.loader.bad_blocks() == set()
    numbers = target.numbers()
    assert numbers["loaded_tokens"] == 192 - first and numbers["hits"] == {"disk": 3 - first // SPAN}
    assert target.numbers() == {}
    target.close()


@pytest.mark.parametrize("method, error", [("int8", 0.05), ("kivi(bits=4, residual=0)", 0.5)])
def test_codes_are_decoded_into_blocks(tmp_path, method, error):
    store = f"disk:{tmp_path}:1GiB"
    wanted = saved(store, method=method)
    target = worker(store, method=method)
    target.start(Work(loads=(job(range(12)),)))
    assert ended(target)
    for name, each in target.layers.items():
        apart = (each.cache[:12].float() - wanted[name].cache[20:32].float()).abs().max()
        assert 0 < float(apart) < error
    target.close()


def test_an_entry_that_is_gone_ends_the_load_there(tmp_path):
    store, lines = f"disk:{tmp_path}:1GiB", Lines()
    wanted = saved(store)
    target = worker(store, lines)
    gone = span_key(target.identity, TOKENS, Span(64, 128, 64))
    assert target.store.invalidate(gone)
    target.start(Work(loads=(job(range(12)),)))
    assert ended(target)
    assert target.loader.bad_blocks() == set(range(4, 12))
    assert_rows(target.layers, wanted, range(12), range(20, 40), 0, 64)
    assert len(lines) == 1 and "128 tokens of request a were not loaded and are computed" in lines[0]
    assert gone.id in target.held().gone
    target.close()


def test_a_damaged_entry_is_a_miss_with_its_reason(tmp_path):
    store = f"disk:{tmp_path}:1GiB"
    saved(store)
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(bytes(data))
    target = worker(store)
    target.start(Work(loads=(job(range(12)),)))
    assert ended(target) and target.loader.bad_blocks() == set(range(12))
    assert any(reason.startswith("disk: damaged") for reason in target.numbers()["misses"])
    target.close()


@pytest.mark.parametrize(
    "changed", [{"weights": "other"}, {"dtype": "float32"}, {"rope": "factor 2"}, {"namespace": "other"}]
)
def test_rows_of_another_identity_are_never_served(tmp_path, changed):
    store = f"disk:{tmp_path}:1GiB"
    saved(store)
    other = worker(store, identity=Identity({**IDENTITY.parts, **changed}))
    other.start(Work(loads=(job(range(12)),)))
    assert ended(other) and other.loader.bad_blocks() == set(range(12))
    assert not any(each.cache.any() for each in other.layers.values())
    other.close()


@pytest.mark.parametrize("tenant", [Tenant(adapter="x"), Tenant(salt="x")])
def test_adapters_and_salts_are_tenants_of_their_own(tmp_path, tenant):
    store = f"disk:{tmp_path}:1GiB"
    saved(store)
    other = worker(store)
    other.start(Work(loads=(job(range(12), tenant=tenant),)))
    assert ended(other) and other.loader.bad_blocks() == set(range(12))
    other.close()


def test_a_cancelled_load_ends_and_is_told(tmp_path):
    store, lines = f"disk:{tmp_path}:1GiB", Lines()
    saved(store)
    target = worker(store, lines)
    load = target.loader.begin(job(range(12)), by_layer=False)
    target.loader.cancel("a")
    assert ended(target) and load.done.is_set() and not lines
    target.close()


def test_rows_on_top_of_the_limit_are_not_stored(tmp_path):
    held = layers(blocks=2000, count=8)
    target = worker(f"disk:{tmp_path}:1GiB", held=held, waiting_mib=1)
    target.saver.limit = 3 * 64 * 2 * 16 * 2 * 8  # three spans
    target.saver._turn.acquire()  # the thread cannot write meanwhile
    try:
        many = tuple(job(range(12), name=str(number)) for number in range(3))
        for each in many:
            target.saver.take(each)
    finally:
        target.saver._turn.release()
    target.saver.flush()
    assert target.numbers()["dropped_tokens"] == {"too many rows wait to be written": 6 * SPAN}
    target.close()


def test_what_came_into_memory_is_told_to_the_scheduler():
    target = worker("host:1GiB")
    target.save(Work(saves=(job(range(12)),)))
    target.saver.flush()
    names = {span_key(target.identity, TOKENS, Span(at, at + SPAN, at)).id for at in (0, 64, 128)}
    assert target.held().new == names and target.held().new == frozenset()
    target.close()


def test_a_copy_of_what_was_loaded_is_told_too(tmp_path):
    saved(f"disk:{tmp_path}:1GiB")
    target = worker(f"host:1GiB,disk:{tmp_path}:1GiB")
    target.start(Work(loads=(job(range(12)),)))
    assert ended(target) and len(target.held().new) == 3
    target.close()
