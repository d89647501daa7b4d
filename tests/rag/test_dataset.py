"""Files of questions as retrieval sees them: ids, duplicates, bad samples by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag.dataset import dataset_name, limited, load_dataset, passage_id, text_hash, told

from .support import TOWNS, sample, saved

P1, P2, P3 = TOWNS["p1"], TOWNS["p2"], TOWNS["p3"]


def test_passages_are_known_by_what_they_say(tmp_path: Path) -> None:
    path = saved(tmp_path, sample("a", "Where?", P1, P2), sample("b", "What?", P2, P3))
    data = load_dataset(path)
    assert data.name == "towns"
    assert list(data.passages.values()) == [P1, P2, P3], "a passage of two samples is one passage"
    assert data.places[passage_id(P2)] == ("a", 1)
    assert passage_id(P1) == passage_id(Passage("Grauwick", P1.text, gold=True)), "labels are no part of a passage"
    assert passage_id(P1) != passage_id(Passage("Other", P1.text)), "but the title is"
    assert passage_id(Passage("ab", "c")) != passage_id(Passage("a", "bc"))
    assert text_hash(P1) == text_hash(Passage("Other", P1.text))


def test_gold_is_by_id_and_empty_without_labels(tmp_path: Path) -> None:
    data = load_dataset(saved(tmp_path, sample("a", "Where?", P1, P2, gold=(1,)), sample("b", "What?", P1, P2)))
    assert [asked.gold for asked in data.samples] == [{passage_id(P2)}, frozenset()]


@pytest.mark.parametrize("name", ["towns.json", "towns.json.gz", "towns.jsonl", "towns.jsonl.gz"])
def test_every_form_of_file(name: str, tmp_path: Path) -> None:
    records = [sample("a", "Where?", P1, P2), sample("b", "What?", P3)]
    text = "\n".join(map(json.dumps, records)) if "jsonl" in name else json.dumps(records)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    data = load_dataset(path)
    assert data.name == "towns" and [asked.item for asked in data.samples] == ["a", "b"]


def test_a_name_without_a_known_ending_stays() -> None:
    assert dataset_name(Path("a/b.txt")) == "b.txt"
    assert dataset_name(Path(".json")) == ".json"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"id": "bad", "question": "Where?", "answers": ["x"]}, "(bad) has no passages"),
        ({"id": "bad", "question": "Where?", "answers": ["x"], "ctxs": []}, "(bad) has no passages"),
        ({"id": "bad", "answers": ["x"], "ctxs": [{"title": "", "text": "t"}]}, "(bad) has no question"),
        ({"id": "bad", "question": " ", "answers": ["x"], "ctxs": [{"text": "t"}]}, "(bad) has no question"),
        (
            {"id": "bad", "question": "Where?", "answers": ["x"], "ctxs": [{"text": " "}]},
            "(bad) has no text in passage 1",
        ),
        ({"id": "bad", "question": "Where?", "answers": ["x"], "ctxs": ["t"]}, "(bad) is built in no known form"),
        ([], "is no object"),
    ],
)
def test_a_bad_sample_is_named_and_the_rest_goes_on(bad: Any, why: str, tmp_path: Path) -> None:
    data = load_dataset(saved(tmp_path, sample("a", "Where?", P1), bad, sample("c", "What?", P2)))
    assert [asked.item for asked in data.samples] == ["a", "c"]
    assert len(data.skipped) == 1 and "record 2" in data.skipped[0] and why in data.skipped[0]
    (line,) = told(data)
    assert line.startswith("1 sample of") and "left out" in line and why in line and "\n" not in line


def test_a_file_without_a_usable_sample_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no usable record.*\(a\) has no passages"):
        load_dataset(saved(tmp_path, {"id": "a", "question": "Where?", "answers": ["x"]}))
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset(tmp_path / "absent.json")


def test_a_passage_that_comes_twice_is_one_candidate(tmp_path: Path) -> None:
    data = load_dataset(saved(tmp_path, sample("a", "Where?", P1, P2, P1, gold=(1,))))
    (asked,) = data.samples
    assert [(each.id, each.place) for each in asked.candidates] == [(passage_id(P1), 0), (passage_id(P2), 1)]
    assert data.duplicates == ("sample a: passage 3 is 1 again",)


def test_a_label_on_either_of_two_equal_passages_counts(tmp_path: Path) -> None:
    data = load_dataset(saved(tmp_path, sample("a", "Where?", P1, P2, P1, gold=(2,))))
    assert data.samples[0].gold == {passage_id(P1)}


def test_a_limit_takes_the_first_samples(tmp_path: Path) -> None:
    data = load_dataset(saved(tmp_path, sample("a", "Where?", P1), sample("b", "What?", P2)))
    assert [asked.item for asked in limited(data, 1).samples] == ["a"]
    assert list(limited(data, 1).passages.values()) == [P1]
    assert limited(data, None) is data
    with pytest.raises(DataError, match="--limit must be at least 1"):
        limited(data, 0)
