"""`kvfoundry rag retrieve`: questions in, passages out, again and again, and one line for bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvfoundry.cli import main
from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag import Retrieval, encoders, extra, load_dataset, passage_id
from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder

from .support import TOWNS, sample, saved, tiny_encoder_folder

P1, P2, P3, P4 = TOWNS.values()
pytest.importorskip("bm25s")


@pytest.fixture(autouse=True)
def _tiny_minilm(encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "minilm_folder", lambda: encoder_folder)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return saved(
        tmp_path,
        sample("a", "Where do seals rest?", P1, P2, P4, gold=(1,)),
        sample("b", "What is Grauwick known for?", P1, P3, gold=(0,)),
        sample("c", "Who reports the wind?", P3, P4, P2, gold=(1,)),
    )


def retrieved(*arguments: Any) -> int:
    return main(["rag", "retrieve", *map(str, arguments)])


def test_a_file_of_questions_becomes_a_file_of_passages(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert retrieved("--data", data, "--k", 2, "--retriever", "bm25") == 0
    out = capsys.readouterr().out
    path = Path("results/retrieval/towns_rag_both_k2.json")
    assert str(path) in out and "recall@2, own passages: 100.0%" in out and "recall@2, whole corpus: 100.0%" in out
    record = json.loads(path.read_text())
    assert record["recall"]["own"] == {"samples": 3, "recall": 1.0, "complete": 1.0}
    first = record["samples"][0]
    assert (first["item"], first["gold"], first["answers"]) == ("a", [passage_id(P2)], ["an answer"])
    assert first["own"][0]["id"] == first["corpus"][0]["id"] == passage_id(P2)
    assert first["own"][0]["score"] > first["own"][1]["score"]

    found, dataset = Retrieval.load(path), load_dataset(data)
    passages = found.passages(dataset)
    assert passages[passage_id(P2)].text == P2.text
    for answered, asked in zip(found.samples, dataset.samples, strict=True):
        assert answered.own is not None and answered.corpus is not None
        assert {each.id for each in answered.own} <= {each.id for each in asked.candidates}
        assert len(answered.own) == len(answered.corpus) == 2


def test_every_retriever_runs_and_the_default_is_written_out(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec in ("dense", "maxsim", "dense+bm25+ranks", "bm25+rerank(top=2)"):
        assert retrieved("--data", data, "--k", 2, "--retriever", spec, "--json") == 0
        assert json.loads(capsys.readouterr().out)["retriever"] == spec
    assert retrieved("--data", data, "--k", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["retriever"] == "dense(weight=0.8)+bm25(weight=0.2)+titles" and told["vectors"] == "int8"
    assert told["passages"] == 4 and told["indexed"] == 0, "dense alone has indexed them before"


@pytest.mark.parametrize("mode", ["own", "corpus"])
def test_one_mode_leaves_the_other_out(mode: str, data: Path) -> None:
    assert retrieved("--data", data, "--k", 2, "--retriever", "bm25", "--mode", mode) == 0
    found = Retrieval.load(Path(f"results/retrieval/towns_rag_{mode}_k2.json"))
    other = {"own": "corpus", "corpus": "own"}[mode]
    assert found.recall(mode) is not None and found.recall(other) is None
    assert all(getattr(each, other) is None for each in found.samples)


def test_a_second_run_does_nothing_and_a_change_does(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--data", data, "--k", 2, "--retriever", "dense", "--json")
    assert retrieved(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["indexed"] == 4
    path = Path("results/retrieval/towns_rag_both_k2.json")
    before = path.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(MeanPooledEncoder, "passages", lambda *_: pytest.fail("encoded again"))
        patch.setattr(MeanPooledEncoder, "question", lambda *_: pytest.fail("searched again"))
        assert retrieved(*arguments) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["written"], told["indexed"]) == (False, 0) and path.read_bytes() == before

    records = json.loads(data.read_text())
    records[0]["ctxs"][1]["text"] = "Oskholm has new words."
    saved(data.parent, *records)
    assert retrieved(*arguments) == 0
    told = json.loads(capsys.readouterr().out)
    # the old text still stands in sample c
    assert (told["written"], told["indexed"], told["passages"]) == (True, 1, 5)
    saved(data.parent, *records[:2])
    assert retrieved(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["passages"] == 4, "what the file no longer holds is not searched"


def test_an_interrupted_run_goes_on(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(MeanPooledEncoder, "question", interrupted)
        assert retrieved("--data", data, "--k", 2, "--retriever", "dense") == 130
        assert "interrupted; indexed passages are kept. Go on with: kvfoundry" in capsys.readouterr().err
    assert retrieved("--data", data, "--k", 2, "--retriever", "dense", "--json") == 0
    assert json.loads(capsys.readouterr().out)["indexed"] == 0


def test_a_given_index_may_hold_more(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = saved(
        tmp_path, sample("x", "Where?", Passage("Seal", "Seals rest and seals rest and seals do.")), name="more.json"
    )
    common = ("--index", tmp_path / "all", "--retriever", "bm25")
    assert retrieved("--data", more, "--k", 1, *common) == 0
    assert retrieved("--data", data, "--k", 2, *common) == 0
    found = Retrieval.load(Path("results/retrieval/towns_rag_both_k2.json"))
    assert found.about["passages"] == 5
    top = found.samples[0].corpus
    assert top is not None and top[0].id not in load_dataset(data).passages
    assert found.passages(load_dataset(data))[top[0].id].title == "Seal"
    capsys.readouterr()
    assert retrieved("--data", data, "--k", 6, *common, "--mode", "corpus") == 2
    assert "k=6 is more than the 5 passages of the index" in capsys.readouterr().err


def test_troubled_samples_are_told_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = Passage("Long", "seals " * 70)
    path = saved(
        tmp_path, sample("a", "Where do seals rest?", P1, P2, P1), {"id": "b", "question": "No passages?"},
        sample("c", "Who?", P3), sample("d", "Who?", long, P4),
    )  # fmt: skip
    assert retrieved("--data", path, "--k", 2, "--retriever", "dense") == 0
    told = capsys.readouterr()
    notes = [line for line in told.err.replace("\n    ", " ").splitlines() if line.startswith("note")]
    assert len(notes) == 4
    assert "(b)" in notes[0] and "left out" in notes[0]
    assert "sample a: passage 3 is 1 again" in notes[1]
    assert "fewer than k=2 passages: sample c has 1" in notes[2]
    assert "1 passages are longer than the 64 tokens that the encoder reads" in notes[3]
    found = Retrieval.load(Path("results/retrieval/towns_rag_both_k2.json"))
    assert [each.item for each in found.samples] == ["a", "c", "d"] and "(b)" in found.skipped[0]
    assert [len(each.own or ()) for each in found.samples] == [2, 1, 2]
    assert "no recall" in told.out


BAD: list[tuple[str, list[str], str]] = [
    ("no file", ["--data", "absent.json"], "cannot be read"),
    ("no usable sample", ["--data", "EMPTY"], "holds no usable record: record 1 (a) has no passages"),
    ("k of zero", ["--data", "DATA", "--k", "0"], "k must be at least 1"),
    ("k past the sample", ["--data", "DATA", "--k", "4"], "k=4 is more than the 3 passages that a sample of"),
    ("k past the corpus", ["--data", "DATA", "--k", "5", "--mode", "corpus"], "k=5 is more than the 4 passages"),
    ("mode", ["--data", "DATA", "--k", "2", "--mode", "all"], "unknown mode 'all'. Known: both, own, corpus"),
    ("retriever", ["--data", "DATA", "--k", "2", "--retriever", "colbert"], "unknown retriever 'colbert'"),
    ("parameter", ["--data", "DATA", "--k", "2", "--retriever", "bm25(k=2)"], "unknown parameter of bm25"),
    ("device", ["--data", "DATA", "--k", "2", "--device", "gpu"], "unknown device 'gpu'"),
    ("limit", ["--data", "DATA", "--k", "2", "--limit", "0"], "--limit must be at least 1"),
    ("pool", ["--data", "DATA", "--k", "2", "--pool", "0"], "pool must be a whole number of at least 1"),
    ("encoder", ["--data", "DATA", "--k", "2", "--encoder", "./absent"], "cannot load the encoder './absent'"),
    ("index in the way", ["--data", "DATA", "--k", "2", "--index", "FILE"], "cannot be written"),
    ("index of others", ["--data", "DATA", "--k", "2", "--index", "OTHER"], "was made with the encoder"),
    ("out in the way", ["--data", "DATA", "--k", "2", "--retriever", "bm25", "--out", "FILE/x"], "cannot be written"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "why"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_line(
    arguments: list[str], why: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "OTHER" in arguments:
        from kvfoundry.rag.index import PassageIndex

        PassageIndex(tmp_path / "other", MeanPooledEncoder(tiny_encoder_folder(tmp_path / "weights", seed=3)))
    (tmp_path / "file").write_text("in the way")
    empty = saved(tmp_path, {"id": "a", "question": "Where?", "answers": ["x"]}, name="empty.json")
    places = {"DATA": data, "EMPTY": empty, "FILE": tmp_path / "file", "OTHER": tmp_path / "other"}
    words = [str(places.get(word, word)).replace("FILE", str(tmp_path / "file")) for word in arguments]
    capsys.readouterr()
    assert retrieved(*words) == 2
    told = capsys.readouterr()
    assert told.out == "" and why in told.err and told.err.startswith("error: ") and told.err.count("\n") == 1
    shutil.rmtree("results", ignore_errors=True)


def test_without_the_extra_it_is_named(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    assert retrieved("--data", data, "--k", 2, "--retriever", "bm25") == 2
    assert "pip install 'kvfoundry[rag]'" in capsys.readouterr().err
    assert retrieved("--data", data, "--k", 2, "--retriever", "dense") == 0, "the embedded encoder needs no extra"


def test_a_file_that_is_not_ours_is_not_written_over(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("results/retrieval/towns_rag_both_k2.json")
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    assert retrieved("--data", data, "--k", 2, "--retriever", "bm25") == 2
    assert "is no retrieval file" in capsys.readouterr().err and path.read_text() == '{"mine": 1}'


def test_a_retrieval_file_of_another_dataset_is_refused(data: Path, tmp_path: Path) -> None:
    assert retrieved("--data", data, "--k", 2, "--retriever", "bm25") == 0
    path = Path("results/retrieval/towns_rag_both_k2.json")
    other = load_dataset(saved(tmp_path, sample("a", "Where?", P1), name="other.json"))
    with pytest.raises(DataError, match=r"was made for .*towns.json .* not for .*other.json"):
        Retrieval.load(path).passages(other)
    text = path.read_text()
    changes = {
        "{": "is not JSON",
        "[]": "is no retrieval file",
        text.replace('"k": 2', '"k": "x"'): "damaged",
        text.replace('"version": 1', '"version": 9'): "has version 9",
    }
    for change, why in changes.items():
        path.write_text(change)
        with pytest.raises(DataError, match=why):
            Retrieval.load(path)
    with pytest.raises(DataError, match="cannot be read"):
        Retrieval.load(tmp_path / "absent.json")


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert retrieved("--help") == 0
    assert "--retriever" in capsys.readouterr().out
