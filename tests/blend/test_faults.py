"""What goes wrong in a store while prompts are answered: the report says it, and the answer is that without a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks.redis_server import Server, running_redis
from tiny_models import random_ids
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import kvfoundry
from kvfoundry.errors import DataError

Models = Callable[..., PreTrainedModel]
QUICK = "timeout=0.4&retry=0.2"


def words(count: int, seed: int) -> str:
    return " ".join(f"w{token}" for token in random_ids(count, seed=seed).tolist())


DOCUMENTS = [words(30, 1), words(17, 2), words(22, 3)]


class Asker:
    """The same question over the same documents, with a store and without."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
        self.model, self.tokenizer = model, tokenizer
        self.alone = self(None).text

    def __call__(self, store: kvfoundry.ChunkStore | None, **options: Any) -> kvfoundry.Generation:
        return kvfoundry.generate(
            self.model, self.tokenizer, "w5 w6 w7", documents=DOCUMENTS, store=store, max_new_tokens=8,
            blend="blend(ratio=0.2)", details=True, **options,
        )  # fmt: skip


@pytest.fixture
def server() -> Iterator[Server]:
    with running_redis() as found:
        if found is None:
            pytest.skip("redis-server is not installed")
        yield found


def test_every_request_says_what_it_found(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Hits by tier, reasons of misses, bytes read and written, and stalls, of this request alone."""
    ask = Asker(tiny_model("llama"), tokenizer)
    assert ask(None).store_report is None
    with kvfoundry.ChunkStore(f"host:8MiB,disk:{tmp_path / 'kv'}:8MiB") as store:
        first, second = ask(store), ask(store)
        for key in [listing.id for listing in store.listing()["host"]]:
            store.tiers[0].drop(key)
        third = ask(store)
    reports = [answer.store_report for answer in (first, second, third)]
    assert [report["hits"] for report in reports] == [{}, {"host": 3}, {"disk": 3}]
    assert [report["hit_tokens"] for report in reports] == [{}, {"host": 69}, {"disk": 69}]
    assert [report["misses"] for report in reports] == [{"not stored": 3}, {}, {}]
    assert [report["missed_tokens"] for report in reports] == [69, 0, 0]
    assert set(reports[0]["bytes_written"]) == {"host", "disk"} and not reports[1]["bytes_written"]
    assert reports[2]["bytes_read"]["disk"] > 0 and reports[2]["stall_seconds"] > 0
    assert {first.text, second.text, third.text} == {ask.alone}
    assert first.notes[-1] == "0 of 3 documents were in the store."


def test_namespaces_are_kept_apart(tiny_model: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    ask = Asker(tiny_model("llama"), tokenizer)
    with kvfoundry.ChunkStore("host:8MiB") as store:
        found = [ask(store, namespace=name).reused_tokens for name in ("a", "a", "b", "", "b", "a")]
    assert found == [0, 69, 0, 0, 69, 69]


def test_a_store_without_documents_is_refused(tiny_model: Models, tokenizer: PreTrainedTokenizerFast) -> None:
    with kvfoundry.ChunkStore("host:1MiB") as store, pytest.raises(DataError, match="give documents"):
        kvfoundry.generate(tiny_model("llama"), tokenizer, "w5", store=store)


def test_a_flipped_byte_is_read_again_and_said(
    tiny_model: Models, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    ask = Asker(tiny_model("llama"), tokenizer)
    with kvfoundry.ChunkStore(f"disk:{tmp_path / 'kv'}:8MiB") as store:
        ask(store)
        victim = sorted(tmp_path.rglob("chunk.safetensors"))[0]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
        answer, again = ask(store), ask(store)
    assert list(answer.store_report["misses"]) == ["disk: damaged, its checksum differs"]
    assert answer.notes[-2:] == [
        "2 of 3 documents were in the store.",
        "Missed in the store: disk: damaged, its checksum differs.",
    ]
    assert answer.text == again.text == ask.alone and again.store_report["hits"] == {"disk": 3}


def test_b84_a_redis_that_hangs_stops_and_comes_back(
    server: Server, tiny_model: Models, tokenizer: PreTrainedTokenizerFast
) -> None:
    """In the middle of a run: bounded waits, reasons, and always the answer that is given without a store."""
    ask = Asker(tiny_model("llama"), tokenizer)

    def within(seconds: float) -> kvfoundry.Generation:
        began = time.perf_counter()
        answer = ask(store)
        assert time.perf_counter() - began < seconds and answer.text == ask.alone
        return answer

    with kvfoundry.ChunkStore(f"{server.url}?{QUICK}") as store:
        assert [within(5).store_report["hits"] for _ in range(2)] == [{}, {"redis": 3}]
        server.hang()
        hung = within(5)
        assert hung.reused_tokens == 0 and "redis: unavailable" in hung.notes[-1]
        server.wake()
        time.sleep(0.25)
        assert within(5).store_report["hits"] == {"redis": 3}
        server.stop()
        assert within(5).reused_tokens == 0
        server.start()  # empty now
        time.sleep(0.25)
        assert within(5).store_report["misses"] == {"not stored": 3}
        assert within(5).store_report["hits"] == {"redis": 3}
