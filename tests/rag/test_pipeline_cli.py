"""`kvfoundry rag build` and `rag decode`: from a retrieval file to answers, again, and one line for bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tokenizer
from transformers import PreTrainedModel

from kvfoundry.cli import main, options
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag import Retrieval, load_dataset, passage_id
from kvfoundry.rag.dataset import text_hash
from kvfoundry.rag.making import Maker
from kvfoundry.rag.retrieval_file import Answered, Found

from .support import sample, saved

WORDS = [" ".join(f"w{3 + (7 * number + 5 * i) % 120}" for i in range(8 + number)) for number in range(6)]
PASSAGES = [Passage(f"w{90 + number}", text) for number, text in enumerate(WORDS)]
RETRIEVAL, KV = Path("found.json"), Path("results/kv_caches/towns_kv_top2.json")
TRACE = Path("results/decoding/speculative_trace.json")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_model: Callable[..., PreTrainedModel]) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = own_model("llama"), build_tokenizer()
    monkeypatch.setattr(options, "load_model", lambda *_: loaded)
    retrieved(
        saved(
            tmp_path,
            sample("a", "w5 w6", *PASSAGES[:4]),
            sample("b", "w7 w8", *PASSAGES[2:6]),
            sample("c", "w9", *PASSAGES[:2]),
        )
    )


def retrieved(data: Path, path: Path = RETRIEVAL, k: int = 2) -> None:
    """A retrieval file that finds the first passages of every sample."""
    dataset = load_dataset(data)

    def found(passages: Any) -> tuple[Found, ...]:
        return tuple(Found(passage_id(each), 1.0 / place, text_hash(each)) for place, each in enumerate(passages, 1))

    samples = tuple(
        Answered(asked.item, asked.sample.question, asked.sample.answers, found(asked.sample.passages[:k]), None, ())
        for asked in dataset.samples
    )
    about = {"name": dataset.name, "path": str(data), "sha256": dataset.digest, "samples": len(samples)}
    Retrieval(about, "own", k, {"retriever": "by hand"}, samples, dataset.skipped, {}).save(path)


def run(step: str, *words: Any) -> int:
    common = ["--data", "towns.json", "--retrieval", str(RETRIEVAL), "--max-new-tokens", "4"]
    more = ["--kv", str(KV)] if step == "decode" else []
    return main(["rag", step, *common, *more, *map(str, words)])


def test_build_stores_once_and_decode_answers_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("build", "--device-size", "50%") == 0
    assert str(KV) in capsys.readouterr().out
    record = json.loads(KV.read_text())
    first = record["samples"][0]["chunks"]
    assert [chunk["tier"] for chunk in first] == ["host", "host", "device", "device"], "the best stand last"
    assert all(chunk["seconds"] > 0 and chunk["bytes"] == chunk["tokens"] * 2 * 2 * 2 * 16 * 4 for chunk in first)
    with monkeypatch.context() as patch:
        patch.setattr(Maker, "read", lambda *_: pytest.fail("computed again"))
        assert run("build", "--device-size", "50%", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["totals"] == record["totals"] and told["samples"] == 3
        assert run("decode", "--measure", "--transfer-delay", "1ms", "--wait", "--policy", "bandit") == 0
    out = capsys.readouterr().out
    assert "3 answers, F1" in out and "of the attention for passages" in out and str(TRACE) in out
    trace = json.loads(TRACE.read_text())
    assert [each["item"] for each in trace["samples"]] == ["a", "b", "c"]
    assert trace["arguments"]["transfer_delay"] == 0.001 and trace["totals"]["resident_share"] > 0
    before = TRACE.read_bytes()
    words = ("--measure", "--transfer-delay", "1ms", "--wait", "--policy", "bandit")
    assert run("decode", *words) == 2 and "add --resume" in capsys.readouterr().err
    assert run("decode", *words, "--resume") == 0 and TRACE.read_bytes() == before
    assert run("decode", "--speculate", "2", "--out", "other", "--json") == 0
    told = json.loads((Path("other") / TRACE.name).read_text())
    assert all(each["speculation"]["rounds"] for each in told["samples"])


@pytest.mark.parametrize("behind", ["head", "sample"])
def test_placeholders_of_text_are_computed_when_they_are_wanted(behind: str) -> None:
    assert run("build", "--device-size", "50%", "--placeholders", "text", "--behind", behind) == 0
    chunks = json.loads(KV.read_text())["samples"][0]["chunks"]
    assert [chunk["tier"] for chunk in chunks] == ["text", "text", "device", "device"]
    stored = {path.name for path in Path("results/kv_caches/store/chunks").glob("*/*")}
    first = [chunk["key"] in stored for chunk in chunks]
    shared = behind != "sample"  # then another sample, which begins with these passages, has stored them
    assert first == [shared, shared, True, True]
    assert run("decode", "--policy", "attention_mass", "--wait", "--horizon", "0", "--margin", "0") == 0
    text = json.loads(TRACE.read_text())
    shutil.rmtree("results")
    assert run("build", "--device-size", "50%", "--behind", behind) == 0
    assert run("decode", "--policy", "attention_mass", "--wait", "--horizon", "0", "--margin", "0") == 0
    kept = json.loads(TRACE.read_text())
    assert [each["token_ids"] for each in text["samples"]] == [each["token_ids"] for each in kept["samples"]]
    assert text["totals"]["promotions"] == kept["totals"]["promotions"] > 0


def test_an_interrupted_build_and_decode_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfoundry.rag.decode import Decoder

    def after(calls: int, owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        real, count = getattr(owner, name), [0]

        def counted(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] > calls:
                raise KeyboardInterrupt
            return real(*arguments)

        patch.setattr(owner, name, counted)

    with monkeypatch.context() as patch:
        after(3, Maker, "read", patch)
        assert run("build") == 130 and "Go on with: kvfoundry" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        after(4, Maker, "read", patch)  # head and two passages are there already
        assert run("build") == 0
    with monkeypatch.context() as patch:
        after(1, Decoder, "answer", patch)
        assert run("decode") == 130 and "--resume" in capsys.readouterr().err
    assert len(json.loads(TRACE.read_text())["samples"]) == 1
    assert run("decode", "--resume") == 0 and len(json.loads(TRACE.read_text())["samples"]) == 3


def test_chunks_of_before_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("build", "--save-cache-dir", "before") == 0
    shutil.rmtree("before/summaries")
    monkeypatch.setattr(Maker, "read", lambda *_: pytest.fail("computed again"))
    assert run("build", "--save-cache-dir", "after", "--load-cache-dir", "before") == 0
    shutil.rmtree("before")
    assert run("decode") == 0


def test_bad_samples_are_named_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = Passage("", " ".join(["w9"] * 1100))
    retrieved(
        saved(
            tmp_path, sample("a", "w5 w6", *PASSAGES[:4]), sample("b", "w7", long, PASSAGES[1]),
            {"id": "c", "question": "w5"}, {"id": "d", "ctxs": [{"text": "w5"}], "answers": ["w5"]},
        )
    )  # fmt: skip
    assert run("build") == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "(b) has" in err and "the model has 1024 positions" in err and "(c)" in err and "(d)" in err
    assert run("decode") == 0
    trace = json.loads(TRACE.read_text())
    assert [each["item"] for each in trace["samples"]] == ["a"] and len(trace["skipped"]) == 3


BAD: list[tuple[str, str, list[str], str]] = [
    ("k larger than the list", "build", ["--top-k", "3"], "--top-k 3 is not one of 1 to 2"),
    ("k of zero", "build", ["--top-k", "0"], "--top-k 0 is not one of 1 to 2"),
    ("another dataset", "build", ["--data", "OTHER"], "was made for /"),
    ("a mode that the file lacks", "build", ["--from", "corpus"], "no list 'corpus'"),
    ("no such mode", "build", ["--from", "moon"], "--from must be one of"),
    ("a room that is none", "build", ["--device-size", "lots"], "a size such as 64MiB, a share such as 50%, or all"),
    ("an evicting method", "build", ["--chunk-method", "l2norm(budget=4)"], "leaves gaps"),
    ("no retrieval file", "build", ["--retrieval", "absent.json"], "cannot be read"),
    ("no folder to load from", "build", ["--load-cache-dir", "absent"], "is no folder"),
    ("limit of zero", "build", ["--limit", "0"], "--limit must be at least 1"),
    ("not built", "decode", ["--kv", "absent.json"], "make it with kvfoundry rag build"),
    ("a file of something else", "decode", ["--kv", "found.json"], "was not made by this version's"),
    ("another dataset", "decode", ["--data", "OTHER"], "was made for /"),
    ("another retrieval file", "decode", ["--retrieval", "SHUFFLED"], "was made of another retrieval file"),
    ("an unknown policy", "decode", ["--policy", "luck"], "unknown policy 'luck'"),
    ("a delay that is none", "decode", ["--transfer-delay", "soon"], "is a time such as 50ms"),
    ("a store that is gone", "decode", ["--load-cache-dir", "absent"], "is no folder"),
    ("a horizon below zero", "decode", ["--horizon", "-1"], "horizon must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "words", "why"), [case[1:] for case in BAD], ids=[f"{c[1]}: {c[0]}" for c in BAD])
def test_bad_input_is_one_line(
    step: str, words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step == "build" or run("build") == 0
    other = saved(tmp_path, sample("a", "w5 w6", *PASSAGES[:3]), name="other.json")
    shuffled = tmp_path / "shuffled.json"
    found = json.loads(RETRIEVAL.read_text())
    found["samples"][0]["own"].reverse()
    shuffled.write_text(json.dumps(found))
    capsys.readouterr()
    named = {"OTHER": str(other), "SHUFFLED": str(shuffled)}
    assert run(step, *[named.get(word, word) for word in words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1 and why in told.err


def test_a_store_of_another_model_is_refused(
    own_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build") == 0
    other = own_model("llama")
    other.lm_head.weight.data[0, 0] += 1
    monkeypatch.setattr(options, "load_model", lambda *_: (other, build_tokenizer()))
    capsys.readouterr()
    assert run("decode") == 2
    assert "were made with another model, tokenizer or dtype; build again" in capsys.readouterr().err
