"""The passage index: what is added, replaced, deleted, saved and opened again is what is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from kvfoundry.errors import DataError, SpecError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag import index as index_file
from kvfoundry.rag.encoders.base import Vectors
from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder
from kvfoundry.rag.index import PassageIndex

from .support import TOWNS, tiny_encoder_folder

QUESTION = "Where do seals rest?"
SPECS = ("bm25", "dense", "maxsim", "dense+bm25+titles", "bm25+rerank")


def found(index: PassageIndex, spec: str = "dense") -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in index.search(QUESTION, len(index), spec)]


@pytest.fixture
def towns(tmp_path: Path, encoder: MeanPooledEncoder) -> PassageIndex:
    index = PassageIndex(tmp_path / "towns", encoder)
    assert index.add(TOWNS) == 4
    return index


# --- keeping ---


@pytest.mark.parametrize("rounded", [True, False])
def test_a_reopened_index_finds_the_same(rounded: bool, tmp_path: Path, encoder: MeanPooledEncoder) -> None:
    pytest.importorskip("bm25s")
    first = PassageIndex(tmp_path, encoder, rounded=rounded)
    first.add(TOWNS)
    again = PassageIndex(tmp_path, encoder, rounded=rounded)
    assert again.ids == first.ids == tuple(TOWNS) and again["p2"] == TOWNS["p2"] and again.nbytes == first.nbytes
    for spec in SPECS:
        assert found(again, spec) == found(first, spec)


def test_a_new_process_finds_the_same(towns: PassageIndex, encoder_folder: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from kvfoundry.rag.index import PassageIndex;"
        "from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder;"
        "index = PassageIndex(sys.argv[1], MeanPooledEncoder(Path(sys.argv[2]), limit=24));"
        f"print(json.dumps([hit.id for hit in index.search({QUESTION!r}, 4, 'dense+maxsim+ranks')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(towns.folder), str(encoder_folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [name for name, _ in found(towns, "dense+maxsim+ranks")]


def test_int8_is_four_times_smaller_and_nearly_the_same(tmp_path: Path, encoder: MeanPooledEncoder) -> None:
    small, exact = (PassageIndex(tmp_path / str(rounded), encoder, rounded=rounded) for rounded in (True, False))
    small.add(TOWNS)
    exact.add(TOWNS)
    assert small.nbytes * 32 == exact.nbytes * 9, "32 numbers of four bytes against 32 of one and a scale"
    for (_, one), (_, other) in zip(sorted(found(small)), sorted(found(exact)), strict=True):
        assert one == pytest.approx(other, abs=0.01)


def test_pooled_tokens_are_fewer(tmp_path: Path, encoder: MeanPooledEncoder, towns: PassageIndex) -> None:
    pytest.importorskip("sentence_transformers")
    pooled = PassageIndex(tmp_path / "pooled", encoder, keeps=frozenset({"tokens"}), pool=3)
    pooled.add(TOWNS)
    whole = towns.collection.lengths
    assert whole is not None and pooled.collection.lengths is not None
    assert torch.equal(pooled.collection.lengths, 1 + (whole - 1) // 3)
    assert len(found(pooled, "maxsim")) == 4


def test_an_index_without_vectors_needs_no_encoder(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    index = PassageIndex(tmp_path)
    index.add(TOWNS)
    assert found(index, "bm25+titles")[0][0] == "p2" and index.nbytes == 0
    with pytest.raises(SpecError, match="dense needs pooled vectors"):
        found(index)


# --- changing ---


def test_the_same_passages_twice_are_there_once(towns: PassageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(towns.encoder, "passages", lambda *_: pytest.fail("encoded again"))
    assert towns.add(TOWNS) == 0 and len(towns) == 4


def test_a_replaced_passage_is_found_by_its_new_words_only(towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    pytest.importorskip("bm25s")
    before = dict(found(towns))
    new = Passage("Vintner", "A vintner presses grapes.")
    assert towns.replace({"p2": new}) == 1 and towns.replace({"p2": new}) == 0
    assert towns["p2"] == new and len(towns) == 4 and set(towns.ids) == set(TOWNS)
    after = dict(found(towns))
    assert after["p2"] != before["p2"]
    assert {name: score for name, score in after.items() if name != "p2"} == pytest.approx(
        {name: score for name, score in before.items() if name != "p2"}
    )
    assert found(towns, "bm25") and dict(found(towns, "bm25"))["p2"] == 0.0
    again = PassageIndex(towns.folder, encoder)
    assert again["p2"] == new and dict(found(again)) == after


def test_ids_do_not_shift_when_others_leave(towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    before = dict(found(towns, "maxsim"))
    assert towns.delete(["p1", "p3"]) == 2
    assert set(towns.ids) == {"p2", "p4"}
    for index in (towns, PassageIndex(towns.folder, encoder)):
        assert dict(found(index, "maxsim")) == pytest.approx({name: before[name] for name in ("p2", "p4")})
        assert index["p4"] == TOWNS["p4"]
    assert towns.add({"p1": TOWNS["p1"]}) == 1
    assert dict(found(towns, "maxsim"))["p1"] == pytest.approx(before["p1"])


def test_many_changes_leave_few_files(tmp_path: Path, encoder: MeanPooledEncoder) -> None:
    index, truth = PassageIndex(tmp_path, encoder), {}
    for step in range(60):
        name, passage = f"n{step % 7}", Passage("", f"seals rest {'new ' * (step % 5)}words {step}")
        if name in truth and step % 4 == 0:
            index.delete([name])
            del truth[name]
        elif name in truth:
            index.replace({name: passage})
            truth[name] = passage
        else:
            index.add({name: passage})
            truth[name] = passage
    fresh = PassageIndex(tmp_path / "fresh", encoder)
    fresh.add(truth)
    for held in (index, PassageIndex(tmp_path, encoder)):
        assert {name: held[name] for name in held.ids} == truth
        assert dict(found(held, "dense+maxsim")) == pytest.approx(dict(found(fresh, "dense+maxsim")), abs=1e-4)
    files = list(tmp_path.glob("segment-*"))
    assert len(files) <= 2 * (index_file._SEGMENTS + 1)
    assert {file for note in index._manifest.segments for file in note.files} == {path.name for path in files}


def test_all_can_leave_and_others_come(towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    towns.delete(list(TOWNS))
    assert len(towns) == 0 and not list(towns.folder.glob("segment-*"))
    with pytest.raises(DataError, match="there are 0 candidates"):
        towns.search(QUESTION, 1, "dense")
    assert len(PassageIndex(towns.folder, encoder)) == 0
    towns.add({"p1": TOWNS["p1"]})
    assert [name for name, _ in found(towns, "maxsim")] == ["p1"]


def test_a_search_among_some_knows_no_others(towns: PassageIndex) -> None:
    hits = towns.search(QUESTION, 2, "dense", among=["p4", "p1"])
    assert {hit.id for hit in hits} == {"p4", "p1"} and hits[0].score >= hits[1].score
    whole = dict(found(towns))
    assert {hit.id: hit.score for hit in hits} == pytest.approx({name: whole[name] for name in ("p4", "p1")})


# --- trouble ---


class Stopping:
    """An encoder that is interrupted after so many passages."""

    def __init__(self, encoder: MeanPooledEncoder, after: int):
        self._encoder, self._left = encoder, after
        self.name, self.digest, self.limit, self.makes = encoder.name, encoder.digest, encoder.limit, encoder.makes

    def passages(self, passages: Sequence[Passage], want: frozenset[str]) -> Iterator[Vectors]:
        for vectors in self._encoder.passages(passages, want):
            if self._left == 0:
                raise KeyboardInterrupt
            self._left -= 1
            yield vectors

    def question(self, text: str, want: frozenset[str]) -> Vectors:
        return self._encoder.question(text, want)


def test_what_was_indexed_before_a_kill_stays(
    tmp_path: Path, encoder: MeanPooledEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "_BATCH", 2)
    told: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        PassageIndex(tmp_path, Stopping(encoder, 3)).add(TOWNS, lambda *state: told.append(state))
    again = PassageIndex(tmp_path, encoder)
    assert told == [(2, 4)] and again.ids == ("p1", "p2")
    assert again.add(TOWNS) == 2 and again.ids == tuple(TOWNS)


def test_a_kill_before_the_manifest_costs_only_the_batch(
    towns: PassageIndex, encoder: MeanPooledEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index_file.Manifest, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            towns.replace({"p1": Passage("", "new words")})
    again = PassageIndex(towns.folder, encoder)
    assert again["p1"] == TOWNS["p1"] and len(again) == 4
    again.replace({"p1": Passage("", "new words")})
    assert PassageIndex(towns.folder, encoder)["p1"].text == "new words"


def test_two_writers_see_each_other(towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    other = PassageIndex(towns.folder, encoder)
    towns.add({"p5": Passage("", "one")})
    other.add({"p6": Passage("", "two")})
    assert set(other.ids) == set(PassageIndex(towns.folder, encoder).ids) == {*TOWNS, "p5", "p6"}
    with FileLock(towns.folder / ".lock"), pytest.raises(DataError, match="being written by another process"):
        towns.delete(["p1"])


def test_a_reader_survives_a_rewrite_under_it(
    towns: PassageIndex, encoder: MeanPooledEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, calls = index_file.Segment.load, []

    def rewritten_first(folder: Path, note: Any) -> Any:
        if not calls:
            calls.append(note)
            towns.delete(["p1", "p2", "p3"])  # mostly dead: the segment is rewritten and its file removed
        return load(folder, note)

    monkeypatch.setattr(index_file.Segment, "load", rewritten_first)
    assert PassageIndex(towns.folder, encoder).ids == ("p4",) and calls


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "index.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "index.json").write_text("{}"), "no passage index of ours"),
        (lambda folder: (folder / "index.json").write_text('{"format": "kvfoundry passage index"}'), "version None"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "is damaged.*No such file"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"x"), "has changed since it was written"),
        (lambda folder: next(folder.glob("segment-*.json")).write_text("[]"), "has changed since it was written"),
    ],
)
def test_damage_is_one_line(change: Any, why: str, towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    change(towns.folder)
    with pytest.raises(DataError, match=why) as caught:
        PassageIndex(towns.folder, encoder)
    assert "\n" not in str(caught.value)


def test_an_index_of_other_settings_is_refused_by_name(
    towns: PassageIndex, encoder: MeanPooledEncoder, tmp_path: Path
) -> None:
    other = MeanPooledEncoder(tiny_encoder_folder(tmp_path / "other", seed=1), limit=24, name="other")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (other, {}, "was made with the encoder 'tiny'"),
        (encoder, {"rounded": False}, "keeps int8 vectors"),
        (encoder, {"pool": 2}, "pools 1 token vectors into one, not 2"),
    ]
    for used, settings, why in cases:
        with pytest.raises(DataError, match=why):
            PassageIndex(towns.folder, used, **settings)
    few = PassageIndex(tmp_path / "few", encoder, keeps=frozenset({"pooled"}))
    with pytest.raises(DataError, match="keeps no tokens vectors"):
        PassageIndex(few.folder, encoder)
    assert len(PassageIndex(towns.folder, encoder, keeps=frozenset({"pooled"}))) == 4, "more than is asked for serves"


def test_refusals_change_nothing(towns: PassageIndex, encoder: MeanPooledEncoder, tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: towns.add({"p1": Passage("", "other words")}), "use replace"),
        (lambda: towns.add({"p9": Passage("", " ")}), "'p9' has no text"),
        (lambda: towns.add({"": Passage("", "x")}), "an id must be text"),
        (lambda: towns.replace({"p9": Passage("", "x")}), "holds no passage 'p9'"),
        (lambda: towns.delete(["p1", "p9"]), "holds no passage 'p9'"),
        (lambda: towns["p9"], "holds no passage 'p9'"),
        (lambda: towns.search(QUESTION, 5, "dense"), "k=5 passages are asked for, and there are 4"),
        (lambda: towns.search(QUESTION, 3, "dense", among=["p1", "p2"]), "there are 2 candidates"),
        (lambda: towns.search(QUESTION, 0, "dense"), "k must be a whole number of at least 1"),
        (lambda: towns.search(QUESTION, 1, "dense", among=["p9"]), "holds no passage 'p9'"),
        (lambda: PassageIndex(tmp_path / "x", encoder, pool=0), "pool must be a whole number"),
        (lambda: PassageIndex(tmp_path / "x", None, keeps=frozenset({"pooled"})), "no encoder makes no pooled"),
    ]
    for action, why in wrong:
        with pytest.raises((DataError, SpecError), match=why):
            action()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        PassageIndex(tmp_path / "file", encoder)
    assert towns.ids == PassageIndex(towns.folder, encoder).ids == tuple(TOWNS)


def test_passages_that_are_cut_are_known_also_later(towns: PassageIndex, encoder: MeanPooledEncoder) -> None:
    long = replace(TOWNS["p1"], text="seals " * 40)
    towns.add({"long": long})
    assert towns.cut == PassageIndex(towns.folder, encoder).cut == ("long",)
