"""Documents at other places, repaired by a copy of the model before they come into vLLM's blocks."""

import json

import pytest
import torch
from tiny_models import build

from kvfoundry.blend import Blend, blend_chunks
from kvfoundry.chunks import ChunkKV, ChunkStore, Identity
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import SpecError, UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import PlainBlocks
from kvfoundry.integrations.vllm.messages import Job, Span, Tenant, Work, span_key
from kvfoundry.integrations.vllm.packing import LayerShape, Packing, checked_method
from kvfoundry.integrations.vllm.repair import Repairer
from kvfoundry.integrations.vllm.settings import connector_settings
from kvfoundry.integrations.vllm.worker import StoreWorker

BLOCK = 16
IDS = [(5 * i) % 23 + 3 for i in range(112)]
SPANS = (Span(0, 8, 0), Span(8, 48, 8), Span(48, 88, 8))
BLOCKS = (5, 4, 3, 2, 1)
QUESTION = tuple(IDS[88:])
EXACT, SOME = "blend(ratio=1.0)", "blend(ratio=0.2, select=query_aware)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    return path


def repairer(folder, blend: str, device: str = "cpu") -> Repairer:
    return Repairer.of(folder, build("llama").config, torch.float32, torch.device(device), Blend.parse(blend))


def chunks(model):
    """Head and documents as a server stores them, each read behind the head alone."""
    head = IDS[:8]
    return [
        read_passage(model, head),
        *(read_passage(model, IDS[s.start : s.stop], context_ids=head) for s in SPANS[1:]),
    ]


def serving(store: str, blend: str, folder, lines, load="ahead", device="cpu"):
    model = build("llama")
    made = chunks(model)
    shape = LayerShape(made[0].layers[0].heads, made[0].layers[0].keys.shape[-1], made[0].layers[0].values.shape[-1])
    held = {
        f"layer.{n}": PlainBlocks(
            torch.zeros(8, shape.heads, BLOCK, shape.key_dim + shape.value_dim, device=device), shape
        )
        for n in range(len(made[0].layers))
    }
    identity = Identity({"format": "test", "namespace": "", "method": "fullkv", "dtype": "float32"})
    told = connector_settings({"store": store, "documents": "approximate", "repair": blend, "load": load})
    worker = StoreWorker(
        told, ChunkStore(told.tiers), identity, held, BLOCK, lines.append, repairer=repairer(folder, blend, device)
    )
    for span, chunk in zip(SPANS, made, strict=True):
        ids = IDS[:8] + IDS[span.start : span.stop] if span.start else IDS[:8]
        worker.store.put(
            span_key(identity, ids, Span(span.behind, span.behind + len(chunk.token_ids), span.behind)), chunk
        )
    return worker, made


def job(first: int = 0) -> Job:
    return Job("a", Tenant(), torch.tensor(IDS[:88]), SPANS, BLOCKS, first, QUESTION)


def run(worker, load: str, first: int = 0) -> None:
    worker.start(Work(loads=(job(first),)))
    if load == "layers":
        for name in worker.layers:
            worker.wait_for(name)
        worker.save(Work())
    else:
        worker.loader._running["a"].done.wait(30)


def read(worker, first: int = 0):
    slots = torch.tensor([BLOCKS[t // BLOCK] * BLOCK + t % BLOCK for t in range(first, 80)])
    return [layer.read(slots) for layer in worker.layers.values()]


@pytest.mark.parametrize("load", ["ahead", "layers"])
def test_everything_computed_again_is_a_full_prefill(tmp_path, folder, load):
    lines = []
    worker, _ = serving(f"disk:{tmp_path}:1GiB", EXACT, folder, lines, load)
    run(worker, load)
    assert not lines and worker.loader.bad_blocks() == set()
    truth = read_passage(build("llama"), IDS)
    for (keys, values), layer in zip(read(worker), truth.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[:, :80], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values, layer.values[:, :80], atol=1e-5, rtol=1e-4)
    numbers = worker.numbers()
    assert (numbers["recomputed_tokens"], numbers["loaded_tokens"], numbers["moved_tokens"]) == (88, 80, 32)
    worker.close()


def test_chosen_tokens_are_those_of_a_blend_in_one_process(tmp_path, folder):
    worker, made = serving(f"disk:{tmp_path}:1GiB", SOME, folder, [])
    run(worker, "ahead", first=16)
    wanted = ChunkKV.from_cache(blend_chunks(build("llama"), [made], [QUESTION], blend=SOME).cache, IDS[:88])
    for (keys, values), layer in zip(read(worker, 16), wanted.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[:, 16:80], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values, layer.values[:, 16:80], atol=1e-5, rtol=1e-4)
    assert not any(layer.cache[BLOCKS[0]].any() for layer in worker.layers.values()), "blocks of others are not written"
    assert 0 < worker.numbers()["recomputed_tokens"] < 40
    worker.close()


def test_codes_are_repaired_too(folder):
    made = chunks(build("llama"))
    shapes = [LayerShape(each.heads, each.keys.shape[-1], each.values.shape[-1]) for each in made[0].layers]
    packing = Packing(checked_method("int8"), shapes, torch.float32)
    coded = [packing.chunk(c.token_ids, c.context_ids, [(r.keys, r.values) for r in c.layers]) for c in made]
    assert all(layer.record.form == "coded" for chunk in coded for layer in chunk.layers)
    found = repairer(folder, "blend(ratio=0, select=none)").repaired(coded, QUESTION)
    wanted = repairer(folder, "blend(ratio=0, select=none)").repaired(made, QUESTION)
    for (keys, values), (other_keys, other_values) in zip(found.rows, wanted.rows, strict=True):
        assert float((keys - other_keys).abs().max()) < 0.1 * float(other_keys.abs().max())
        assert float((values - other_values).abs().max()) < 0.1 * float(other_values.abs().max())


def test_a_document_that_is_gone_ends_the_repair_there(tmp_path, folder):
    lines = []
    worker, _ = serving(f"disk:{tmp_path}:1GiB", EXACT, folder, lines)
    worker.store.invalidate(span_key(worker.identity, IDS[:88], SPANS[2]))
    run(worker, "ahead")
    assert worker.loader.bad_blocks() == set(BLOCKS[3:]) and len(lines) == 1 and "computed" in lines[0]
    truth = read_passage(build("llama"), IDS)
    torch.testing.assert_close(read(worker)[-1][0][:, :48], truth.layers[-1].keys[:, :48], atol=1e-5, rtol=1e-4)
    worker.close()


def test_a_copy_that_is_another_model_repairs_nothing(tmp_path, folder):
    lines = []
    worker, _ = serving(f"disk:{tmp_path}:1GiB", EXACT, folder, lines)
    with torch.no_grad():
        next(worker.loader._repairer.model.parameters()).mul_(1.5)
    run(worker, "ahead")
    assert worker.loader.bad_blocks() == set(BLOCKS) and "other rows than vLLM in layer" in lines[0]
    assert not any(layer.cache.any() for layer in worker.layers.values())
    worker.close()


def test_what_cannot_be_repaired_is_said_at_start(tmp_path, folder):
    with pytest.raises(SpecError, match="not one of the model's attention layers"):
        repairer(folder, "blend(select=query_aware, check=(2, 80))")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="second copy"):
        repairer(tmp_path, SOME)
