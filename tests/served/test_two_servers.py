"""Two vLLM servers and one Redis, over HTTP: what one has read the other does not read again, and says the same.

Needs an environment with vLLM: `make test-vllm`. A few minutes.
"""

from __future__ import annotations

import json
import shutil
from itertools import permutations

import pytest

from kvfoundry.chunks import ChunkStore
from kvfoundry.integrations.vllm.client import document_request, reading_requests
from kvfoundry.integrations.vllm.settings import connector_settings

from .figures import keep
from .load import measured_load
from .prompts import QUESTIONS, document, prompt
from .servers import divergence, needs_vllm, wait_for

pytestmark = needs_vllm
SPAN = 256


@pytest.fixture(scope="module")
def plain(start):
    """What a server without the connector answers: question number -> answer."""
    server = start("plain", None, "--enable-prefix-caching")  # or each question would take a whole prefill
    answers = [server.ask(prompt(question)) for question in QUESTIONS]
    answers.append(server.ask(prompt(QUESTIONS[0], seed=1)))
    server.stop()
    return answers


def entries(source: str) -> int:
    """What a store holds. vLLM hands counters on only with a step, so an idle server's stand still."""
    with ChunkStore(source, look=True) as store:
        return min(len(held) for held in store.listing().values())


def whole_spans(tokens: int) -> int:
    return (tokens - 1) // SPAN * SPAN


def test_what_one_server_read_another_loads(plain, start, redis, folder):
    shared, disk = f"redis://127.0.0.1:{redis.port}/0?timeout=20", f"disk:{folder / 'disk'}:4GiB"
    a = start("a", {"store": f"{disk},{shared}"})
    other_disk = f"disk:{folder / 'other-disk'}:4GiB"
    b = start("b", {"store": f"host:1GiB,{other_disk},{shared}"})
    miss = a.ask(prompt(QUESTIONS[0]))
    assert miss.text == plain[0].text and miss.cached == 0 and 2900 <= miss.prompt_tokens <= 3200
    spans = whole_spans(miss.prompt_tokens)
    wait_for(lambda: entries(f"{disk},{shared}") >= spans / SPAN)

    hit = b.ask(prompt(QUESTIONS[1]))
    assert hit.text == plain[1].text
    assert hit.cached == whole_spans(hit.prompt_tokens) == spans
    wait_for(lambda: b.metric("loaded_tokens") == hit.cached and b.metric("hits", tier="redis") == spans / SPAN)
    # One request is a coin that other work on the machine tosses: three documents, and the middle one of their ratios.
    ratios = [hit.first / min(miss.first, plain[0].first)]
    for seed in (2, 3):
        read = a.ask(prompt(QUESTIONS[0], seed))
        wait_for(lambda seed=seed: entries(f"{disk},{shared}") >= seed * spans / SPAN)
        found = b.ask(prompt(QUESTIONS[1], seed))
        assert read.cached == 0 and found.cached == whole_spans(found.prompt_tokens)
        ratios.append(found.first / min(read.first, plain[0].first))
    keep(
        "first token, seconds",
        tokens=miss.prompt_tokens, loaded=hit.cached, without_connector=plain[0].first, miss=miss.first, hit=hit.first,
        hit_over_faster_miss=ratios, load=b.metric("load_seconds"),
    )  # fmt: skip
    assert sorted(ratios)[1] <= 0.35

    # Redis is gone: B has a copy in memory, and what is new is computed, with one bounded wait.
    redis.stop()
    kept = b.ask(prompt(QUESTIONS[2]))
    assert kept.text == plain[2].text and kept.cached == spans
    computed = a.ask(prompt(QUESTIONS[0], seed=1))
    assert computed.text == plain[-1].text and computed.cached == 0
    assert computed.first < plain[0].first * 2 + 10
    keep("first token with Redis stopped, seconds", held_in_memory=kept.first, computed=computed.first)
    b.stop()
    a.stop()

    # Both were restarted, without Redis: each goes on from its disk, and says what is away.
    again, other = start("again", {"store": f"{disk},{shared}"}), start("b-again", {"store": f"{other_disk},{shared}"})
    for number, server in ((3, again), (5, other)):
        assert any("a tier is away" in line for line in server.lines())
        from_disk = server.ask(prompt(QUESTIONS[number]))
        assert from_disk.text == plain[number].text and from_disk.cached == spans
        wait_for(lambda server=server: server.metric("hits", tier="disk") == spans / SPAN)
    other.stop()

    # Entries that are damaged: one line, the same text, and whole again afterwards.
    for file in (folder / "disk").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(bytes(data))
    assert again.ask(prompt(QUESTIONS[4])).text == plain[4].text
    assert any("were not loaded and are computed" in line for line in again.lines())
    wait_for(lambda: entries(disk) >= spans / SPAN)
    whole = again.ask(prompt(QUESTIONS[4]))
    assert whole.text == plain[4].text and whole.cached == spans
    again.stop()


@pytest.mark.parametrize("changed", ["dtype", "rope", "weights"])
def test_another_model_misses(plain, start, folder, model, changed):
    """The folder that the test before filled, under a server that computes other rows."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    more = ["--hf-overrides", json.dumps(rope)] if changed == "rope" else []
    copy, served = folder / f"disk-{changed}", model
    shutil.copytree(folder / "disk", copy)
    if changed == "weights":
        served = folder / "other-model"
        shutil.copytree(model, served)
        (file,) = served.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-2] ^= 1  # one bit of one weight
        file.write_bytes(bytes(data))
    dtype = "bfloat16" if changed == "dtype" else "float32"
    other = start(changed, {"store": f"disk:{copy}:4GiB"}, *more, dtype=dtype, other=served)
    assert other.ask(prompt(QUESTIONS[0])).cached == 0
    wait_for(lambda: other.metric("absent_tokens") > 0)
    assert other.metric("found_tokens") == 0
    other.stop()


def test_codes_in_half_the_bytes(plain, start, folder):
    coded = start("int8", {"store": f"host:1GiB,disk:{folder / 'int8'}:4GiB", "method": "int8"})
    first = coded.ask(prompt(QUESTIONS[0]))
    spans = whole_spans(first.prompt_tokens)
    wait_for(lambda: entries(f"disk:{folder / 'int8'}") >= spans / SPAN)
    answers = [coded.ask(prompt(question)) for question in QUESTIONS]
    assert all(answer.cached == spans for answer in answers)
    same = sum(answer.text == wanted.text for answer, wanted in zip(answers, plain, strict=False))
    whole = 2 * 30 * 3 * 64 * 4 * spans  # float32 rows of this model
    share = coded.metric("written_bytes", tier="disk") / whole
    apart = [divergence(wanted.logprobs, answer.logprobs) for answer, wanted in zip(answers, plain, strict=False)]
    keep(
        "int8",
        same_texts=same, of=len(answers), share_of_float32_bytes=share, kl_mean=sum(apart) / len(apart),
        kl_worst=max(apart), kl_of="the first token, over the 20 likeliest that vLLM names",
    )  # fmt: skip
    assert same >= 9 and share <= 0.55 and max(apart) < 0.05
    coded.stop()


@pytest.mark.parametrize("repair", ["none", "blend(ratio=0.15, select=query_aware)"])
def test_documents_in_every_order(start, folder, model, repair):
    """Each is read once behind the head; any order of them is then found whole, and said to be approximate."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = [document(seed, 6) for seed in range(4)]
    head = "Answer the question from the reports.\n\n"
    disk = folder / f"documents-{repair[:5]}"
    settings = {"store": f"disk:{disk}:4GiB", "documents": "approximate", "repair": repair}
    server = start(disk.name, settings, "--enable-prefix-caching")
    for request in reading_requests(tokenizer, documents, head=head):
        server.send(request)
    wait_for(lambda: entries(f"disk:{disk}:4GiB") == 5)  # the head, and four documents
    moved = 0
    for order in permutations(range(4)):
        made = document_request(tokenizer, [documents[i] for i in order], "Question: When?\nAnswer:", head=head)
        marks = made["extra_body"]["kv_transfer_params"]["documents"]
        answer = server.send(made)
        assert answer.usage.prompt_tokens_details.cached_tokens >= marks[-1][1] // 128 * 128, order
        told = (answer.model_dump().get("kv_transfer_params") or {}).get("kvfoundry", {})
        cached = answer.usage.prompt_tokens_details.cached_tokens
        inexact = sum(max(0, min(stop, cached) - begin) for begin, stop in marks[1:])
        assert told == {"approximate_tokens": inexact, "repair": connector_settings(settings).repair}
        moved += inexact
        ordinary = server.send({"prompt": made["prompt"]}, 1)
        assert not (ordinary.model_dump().get("kv_transfer_params") or {}), "an ordinary request is read as it is"
    assert moved > 0 and (server.metric("recomputed_tokens") > 0) == (repair != "none")
    exact = server.send({"prompt": made["prompt"]})
    keep(f"documents, repair {repair}", approximate=answer.choices[0].text, exact=exact.choices[0].text)
    wrong = {**made["extra_body"]["kv_transfer_params"], "documents": [[0, 9999]]}
    refused = server.send(
        {"prompt": made["prompt"], "extra_body": {"kv_transfer_params": wrong, "cache_salt": "other"}}
    )
    assert refused.choices[0].text == exact.choices[0].text
    assert any("computed in full" in line for line in server.lines())
    server.stop()


def test_many_clients_and_a_server_that_is_killed(start, folder, model):
    """60 requests of 8 clients over 8 documents; killed in the middle, a new server goes on from the disk.

    The whole load is `benchmarks/vllm_load.py`.
    """
    from transformers import AutoTokenizer

    told = measured_load(start, folder, AutoTokenizer.from_pretrained(model), requests=60, documents=8)
    keep("many clients", **told)
    for load in told.values():
        assert load["wrong_texts"] == load["out_of_bounds"] == 0
        assert load["hit_rate_sure"] > 0.3
    assert told["undisturbed"]["broken"] == 0 < told["killed once"]["broken"]
