"""A server with few blocks and small steps: preempted, cut into chunks, cancelled, and still the same texts.

Needs an environment with vLLM: `make test-vllm`.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvfoundry.chunks import ChunkStore

from .figures import keep
from .prompts import QUESTIONS, prompt
from .servers import needs_vllm, wait_for

pytestmark = needs_vllm
SPAN, BLOCK = 64, 32
# 1,088 tokens for eight requests of about 250 + 80, in steps of at most 128.
ROOM = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "128")
ROOM += ("--max-num-seqs", "8", "--max-model-len", "512")
ASKED = [prompt(QUESTIONS[number], seed=number % 4, sentences=9) for number in range(8)]
TOKENS = 80


@pytest.fixture(scope="module")
def texts(start):
    """Of a server without the connector and with room enough, one request after the other."""
    server = start("room-plain", None, "--block-size", str(BLOCK))
    answers = [server.ask(each, TOKENS, ignore_eos=True).text for each in ASKED]
    server.stop()
    return answers


def all_at_once(server):
    with ThreadPoolExecutor(len(ASKED)) as clients:
        return list(clients.map(lambda each: server.ask(each, TOKENS, ignore_eos=True), ASKED))


@pytest.mark.parametrize(
    "load, caching", [("ahead", "--enable-prefix-caching"), ("layers", "--no-enable-prefix-caching")]
)
def test_texts_stay_the_same(start, folder, texts, load, caching):
    disk = f"disk:{folder / f'room-{load}'}:4GiB"
    server = start(f"room-{load}", {"store": disk, "span": SPAN, "load": load}, *ROOM, caching)
    assert [answer.text for answer in all_at_once(server)] == texts
    preempted = server.counter("vllm:num_preemptions_total")
    with ChunkStore(disk, look=True) as store:
        wait_for(lambda: len(store.listing()["disk"]) >= 4 * 3)

    # Clients that go away: while a prompt waits or is loaded, and in the middle of an answer.
    for patience in (0.0, 0.05, 0.3, 1.0):
        cancelled = server.client.with_options(timeout=30).completions.create(
            model="model", prompt=ASKED[0], max_tokens=240, temperature=0, stream=True
        )
        time.sleep(patience)
        cancelled.close()
    with contextlib.suppress(Exception):
        server.client.with_options(timeout=0.02).completions.create(model="model", prompt=ASKED[1], max_tokens=240)
    wait_for(lambda: server.counter("vllm:num_requests_running") + server.counter("vllm:num_requests_waiting") == 0)

    again = all_at_once(server)
    assert [answer.text for answer in again] == texts
    alone = server.ask(ASKED[0], TOKENS, ignore_eos=True)
    assert alone.text == texts[0] and alone.cached >= alone.prompt_tokens // SPAN * SPAN - SPAN
    keep(
        f"few blocks, load {load}, {caching[2:]}",
        preempted=server.counter("vllm:num_preemptions_total"), loaded_tokens=server.metric("loaded_tokens"),
        saved_tokens=server.metric("saved_tokens"),
    )  # fmt: skip
    assert preempted > 0 and server.metric("loaded_tokens") > 0

    if load == "layers":  # entries that are damaged, in the step that reads them
        for file in (folder / f"room-{load}").rglob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(bytes(data))
        assert [answer.text for answer in all_at_once(server)] == texts
        assert any("were not loaded and are computed" in line for line in server.lines())
    server.stop()
