"""Documents that a request marks: what is obeyed and refused, and keys that move as the model rotates them."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import build

from kvfoundry.chunks import ChunkStore, Identity
from kvfoundry.chunks.passage import read_passage
from kvfoundry.errors import UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import PlainBlocks
from kvfoundry.integrations.vllm.client import document_request, reading_requests
from kvfoundry.integrations.vllm.documents import Documents, tokens_digest
from kvfoundry.integrations.vllm.messages import Job, Span, Tenant, span_key
from kvfoundry.integrations.vllm.moving import Mover
from kvfoundry.integrations.vllm.packing import LayerShape
from kvfoundry.integrations.vllm.settings import connector_settings
from kvfoundry.integrations.vllm.worker import StoreWorker

from .fakes import request


def marked(marks, *, serves=True, caches=False, salt=None, **more):
    lines = []
    asked = request("a", 100, kv_transfer_params={"documents": marks, **more}, cache_salt=salt)
    return Documents(serves, caches, lines.append).spans(asked), lines


def test_marks_cut_the_prompt():
    spans, lines = marked([[10, 40], [40, 90]])
    assert spans == [Span(0, 10, 0), Span(10, 40, 10), Span(40, 90, 10)] and not lines
    assert [span.moves for span in spans] == [False, False, True]
    assert marked([[0, 40], [40, 90]])[0] == [Span(0, 40, 0), Span(40, 90, 0)]


@pytest.mark.parametrize(
    "marks, says",
    [
        ([[10, 40], [50, 90]], "stands between"),
        ([[10, 40], [30, 90]], "in order"),
        ([[40, 40]], "in order"),
        ([[10, 101]], "in order"),
        ([[-1, 10]], "in order"),
        ([], "not a list"),
        ([[1, 2, 3]], "not a list"),
        ([["1", 2]], "not a list"),
        ([[True, 2]], "not a list"),
        ("10", "not a list"),
    ],
)
def test_wrong_marks_are_one_line_and_a_full_computation(marks, says):
    spans, lines = marked(marks)
    assert spans == [] and len(lines) == 1 and says in lines[0]


def test_marks_that_do_not_fit_their_tokens():
    ids = request("a", 100).prompt_token_ids
    assert marked([[10, 40]], document_digests=[tokens_digest(ids[10:40])])[0]
    spans, lines = marked([[10, 40]], document_digests=[tokens_digest(ids[11:41])])
    assert spans == [] and "do not fit its tokens" in lines[0]


def test_off_by_default_and_never_mixed_with_exact_prefixes():
    assert connector_settings({"store": "host:1GiB"}).documents == "off"
    spans, lines = marked([[10, 40]], serves=False)
    assert spans is None and "ordinary text" in lines[0]
    spans, lines = marked([[10, 40]], caches=True)
    assert spans == [] and "cache_salt" in lines[0]
    assert marked([[10, 40]], caches=True, salt="documents")[0]


def test_a_copy_of_the_model_has_no_adapters():
    lines = []
    asked = request("a", 100, kv_transfer_params={"documents": [[10, 40]]}, lora_request=SimpleNamespace())
    assert Documents(True, False, lines.append, repairs=True).spans(asked) == [] and "adapter" in lines[0]
    assert Documents(True, False, pytest.fail).spans(asked)


def test_a_client_s_request_is_what_the_server_reads(tokenizer):
    made = document_request(tokenizer, ["w3 w4 w5", "w6 w7"], "w8 w9", head="w1 w2 ")
    body = made["extra_body"]
    asked = request("a", 1, **{"prompt_token_ids": made["prompt"], **body})
    spans = Documents(True, True, pytest.fail).spans(asked)
    assert len(spans) == 3 and spans[-1].moves
    _, second = reading_requests(tokenizer, ["w3 w4 w5", "w6 w7"], head="w1 w2 ")
    read = second["extra_body"]["kv_transfer_params"]["documents"][0]
    assert second["prompt"][read[0] : read[1]] == made["prompt"][spans[2].start : spans[2].stop]


def rows(model, ids):
    chunk = read_passage(model, ids)
    return [(layer.keys, layer.values) for layer in chunk.layers]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_documents_land_where_the_model_would_put_them(tmp_path, family):
    """Through the store into blocks: exact at its own place, elsewhere with the first layer's keys as computed."""
    model = build(family)
    ids = [(5 * i) % 23 + 3 for i in range(96)]
    head, one, two = ids[:8], ids[8:48], ids[48:88]
    alone = read_passage(model, two, context_ids=head)
    shape = LayerShape(alone.layers[0].heads, alone.layers[0].keys.shape[-1], alone.layers[0].values.shape[-1])
    held = {
        f"layer.{n}": PlainBlocks(torch.zeros(8, shape.heads, 16, shape.key_dim + shape.value_dim), shape)
        for n in range(len(alone.layers))
    }
    identity = Identity({"format": "test", "namespace": "", "method": "fullkv", "dtype": "float32"})
    told = connector_settings({"store": f"disk:{tmp_path}:1GiB", "documents": "approximate"})
    mover = Mover.of(model.config, torch.float32)
    worker = StoreWorker(told, ChunkStore(told.tiers), identity, held, 16, pytest.fail, mover)
    for span, chunk in (
        (Span(0, 8, 0), read_passage(model, head)),
        (Span(8, 48, 8), read_passage(model, one, context_ids=head)),
    ):
        worker.store.put(span_key(identity, ids, span), chunk)
    worker.store.put(span_key(identity, head + two, Span(8, 48, 8)), alone)
    spans = (Span(0, 8, 0), Span(8, 48, 8), Span(48, 88, 8))
    load = worker.loader.begin(Job("a", Tenant(), torch.tensor(ids[:88]), spans, (5, 4, 3, 2, 1), 0), by_layer=False)
    load.done.wait(20)
    assert worker.loader.bad_blocks() == set()
    slots = torch.tensor([(5 - t // 16) * 16 + t % 16 for t in range(80)])
    truth = rows(model, ids)
    for number, layer in enumerate(held.values()):
        keys, values = layer.read(slots)
        torch.testing.assert_close(keys[:, :48], truth[number][0][:, :48], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values[:, 48:], alone.layers[number].values[:, :32])
        if number == 0:
            torch.testing.assert_close(keys[:, 48:], truth[0][0][:, 48:80], atol=1e-5, rtol=1e-4)
    assert worker.numbers()["moved_tokens"] == 32
    worker.close()


def test_keys_that_are_held_otherwise_are_not_moved():
    model = build("llama")
    mover = Mover.of(model.config, torch.float32)
    chunk = read_passage(model, [5, 6, 7, 5, 6])
    mover.check(chunk, chunk.layers[0].keys)
    other = Mover.of(model.config, torch.float32)
    swapped = chunk.layers[0].keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    with pytest.raises(UnsupportedModelError, match="not those that the model has"):
        other.check(chunk, swapped)
    alone = read_passage(model, [5, 6, 7])
    with pytest.raises(UnsupportedModelError, match="no token of the document occurs twice"):
        other.check(alone, alone.layers[0].keys)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"no_rope_layers": [1, 0]},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_models_whose_keys_cannot_be_moved_so_are_refused(changed):
    config = build("llama").config.__class__(**{**build("llama").config.to_dict(), **changed, "num_hidden_layers": 2})
    with pytest.raises(UnsupportedModelError):
        Mover.of(config, torch.float32)


def test_something_that_is_no_configuration_is_refused():
    with pytest.raises(UnsupportedModelError, match="cannot be asked"):
        Mover.of(SimpleNamespace(), torch.float32)
