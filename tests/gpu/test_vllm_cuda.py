"""The vLLM connector's worker on a CUDA device, without vLLM: streams, blocks and repair; skipped elsewhere."""

from __future__ import annotations

import pytest
import torch
from integrations.vllm_connector.fakes import SHAPE, fill, layers
from integrations.vllm_connector.test_opening import FULL, config
from integrations.vllm_connector.test_repair import EXACT, IDS, read, run, serving
from integrations.vllm_connector.test_worker import BLOCK, ended, job, worker
from tiny_models import build

from kvfoundry.chunks.passage import read_passage
from kvfoundry.integrations.vllm.blocks import PlainBlocks
from kvfoundry.integrations.vllm.messages import Work
from kvfoundry.integrations.vllm.opening import opened_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# About a tenth of a second in which the device does nothing else.
_BUSY = 200_000_000


def stored(store: str, **settings) -> dict:
    """Caches whose rows a server has stored, while the device was still computing them and others took the blocks."""
    held, source = layers(device="cuda"), layers()
    fill(source)
    kept = {name: each.cache.cuda() for name, each in source.items()}
    saver = worker(store, held=held, **settings)
    torch.cuda._sleep(_BUSY)
    for name, each in held.items():
        each.cache.copy_(kept[name])  # behind the wait: not there yet when rows are taken
    saver.save(Work(saves=(job(range(20, 40)),)))
    for each in held.values():
        each.cache.fill_(7)  # the next owner, at once
    saver.close()
    return source


def rows_of(held, blocks, first, stop):
    places = torch.arange(first, stop)
    block = torch.tensor(list(blocks))[places // BLOCK]
    return {name: each.cache.cpu()[block, :, places % BLOCK] for name, each in held.items()}


@pytest.mark.parametrize("load", ["ahead", "layers"])
@pytest.mark.parametrize("first", [0, 16, 80])
def test_rows_wait_for_the_device_in_both_directions(tmp_path, load, first):
    store = f"disk:{tmp_path}:1GiB"
    source = stored(store)
    target = worker(store, held=layers(device="cuda"), load=load)
    for _ in range(5):
        blocks = list(range(15, 3, -1))
        for each in target.layers.values():
            each.cache.fill_(3)
        torch.cuda._sleep(_BUSY)
        before = {name: each.cache.clone() for name, each in target.layers.items()}  # what still reads the blocks
        target.start(Work(loads=(job(blocks, first=first),)))
        if load == "layers":
            found = {}
            for name, each in target.layers.items():
                target.wait_for(name)
                found[name] = PlainBlocks(each.cache.clone(), SHAPE)  # what reads them next, without another wait
            target.save(Work())
        else:
            assert ended(target)
            found = target.layers
        wanted, here = rows_of(source, range(20, 40), first, 192), rows_of(found, blocks, first, 192)
        for name in wanted:
            assert torch.equal(here[name], wanted[name]), name
            assert bool((before[name] == 3).all()), "rows were written while the device still read the blocks"
            others = [block for block in range(40) if block not in blocks[first // BLOCK :]]
            assert bool((target.layers[name].cache[others] == 3).all()), "blocks of others were written"
    assert target.loader.bad_blocks() == set()
    target.close()


@pytest.mark.parametrize("method, error", [("int8", 0.05), ("kivi(bits=4, residual=0)", 0.5)])
def test_codes_are_decoded_on_the_device(tmp_path, method, error):
    store = f"disk:{tmp_path}:1GiB"
    source = stored(store, method=method)
    target = worker(store, held=layers(device="cuda"), method=method)
    target.start(Work(loads=(job(range(12)),)))
    assert ended(target)
    for name, each in target.layers.items():
        apart = (each.cache[:12].cpu().float() - source[name].cache[20:32].float()).abs().max()
        assert 0 < float(apart) < error
    target.close()


@pytest.mark.parametrize("load", ["ahead", "layers"])
def test_documents_are_repaired_on_the_device(tmp_path, tmp_path_factory, load):
    folder, lines = tmp_path_factory.mktemp("model"), []
    build("llama").save_pretrained(folder)
    made, _ = serving(f"disk:{tmp_path}:1GiB", EXACT, folder, lines, load, device="cuda")
    run(made, load)
    assert not lines and made.loader.bad_blocks() == set()
    truth = read_passage(build("llama"), IDS)
    for (keys, values), layer in zip(read(made), truth.layers, strict=True):
        torch.testing.assert_close(keys.cpu(), layer.keys[:, :80], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(values.cpu(), layer.values[:, :80], atol=1e-4, rtol=1e-3)
    made.close()


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"])
def test_layers_of_every_back_end_are_opened(backend):
    cache = {"layer.0": torch.zeros(4, 2, 16, 16, device="cuda", dtype=torch.bfloat16)}
    opened = opened_layers(cache, config(FULL), {"layer.0": backend})
    assert isinstance(opened["layer.0"], PlainBlocks)
