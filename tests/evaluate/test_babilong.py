"""BABILong: files that are found, prompts that hold text and question, and the published way of matching."""

import gzip
import json
import os
from pathlib import Path

import pytest

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.babilong import QUESTIONS, BabilongTask, is_right, read_babilong
from kvfoundry.evaluate.tasks.base import TaskError

SHARED = Path(os.environ.get("KVFOUNDRY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "babilong"


def records(count=3, **more):
    places = ("kitchen", "office", "garden")
    return [
        {"input": f"The river rose. Anna moved to the {places[i % 3]}. The roof leaked.", "question": "Where is Anna? ",
         "target": places[i % 3]} | more
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in ("0k_qa1.jsonl", "1k_qa1.jsonl", "1k_qa2.jsonl.gz", "10k_qa1.jsonl"):
        raw = "\n".join(json.dumps(record) for record in records()).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    (tmp_path / "README.md").write_text("not data")
    return tmp_path


def test_files_are_found_by_their_names(folder):
    def found(*chosen):
        return [(file.family, file.length) for file in read_babilong(folder, *chosen)]

    assert found() == [("qa1", "0k"), ("qa1", "1k"), ("qa1", "10k"), ("qa2", "1k")]
    assert found(["qa2"]) == [("qa2", "1k")] and found([], ["1K"]) == [("qa1", "1k"), ("qa2", "1k")]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ((["qa3"],), "holds no LENGTH_qa3.jsonl"),
        (([], ["2k"]), "holds no 2k_qaN.jsonl"),
        ((["qa1", "qa2"], ["0k"]), "holds no 0k_qa2.jsonl"),
        ((["qa77"],), "unknown BABILong task 'qa77'"),
    ],
)
def test_what_is_asked_for_and_not_there_is_named(folder, chosen, message):
    with pytest.raises((DataError, TaskError), match=message):
        read_babilong(folder, *chosen)


def test_folders_without_data(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_babilong(tmp_path / "none")
    with pytest.raises(DataError, match="holds no file such as"):
        read_babilong(tmp_path)


def test_damaged_lines_are_counted(folder):
    good = [json.dumps(record) for record in records(2)]
    bad = ['{"input": "x"}', json.dumps(records(1, target="moon")[0])]
    (folder / "0k_qa1.jsonl").write_text("\n".join([*good, *bad]))
    with pytest.raises(DataError, match="line 3 has no field 'question'; line 4 has the target 'moon'"):
        read_babilong(folder)
    file = read_babilong(folder, skip_damaged=True)[0]
    assert len(file.records.rows) == 2 and len(file.records.damaged) == 2
    assert BabilongTask("qa1", (file,)).settings()["skipped_records"] == 2


def test_items_hold_text_and_question(folder, tokenizer):
    files = tuple(read_babilong(folder, ["qa1"]))
    items = BabilongTask("qa1", files, 2).items(tokenizer, True, 0)
    assert [item.item for item in items] == ["0k-0", "0k-1", "1k-0", "1k-1", "10k-0", "10k-1"]
    for item, record in zip(items, records(2) * 3, strict=True):
        assert record["input"] in item.prompt and item.prompt.endswith("\n\nQuestion: Where is Anna?")
        assert item.prompt.endswith(item.question) and item.references == (record["target"],)
    assert BabilongTask("qa1", files).score(items[1], "In the office.") == (1.0, True)
    with pytest.raises(TaskError, match="0 items"):
        BabilongTask("qa1", files, 0)


@pytest.mark.parametrize("family", sorted(QUESTIONS))
def test_the_worked_examples_are_right_by_the_metric(family):
    kind = QUESTIONS[family]
    assert is_right(kind.answer, kind.asked, kind.answer, kind.labels)
    assert not is_right(kind.answer, kind.asked, "", kind.labels)


@pytest.mark.parametrize(
    ("target", "question", "prediction", "family", "right"),
    [
        ("office", "Where is Anna?", "She is in the OFFICE now.", "qa1", True),
        ("office", "Where is Anna?", "office. Then the garden.", "qa1", True),
        ("office", "Where is Anna?", "office or garden", "qa1", False),
        ("office", "Where is Anna?", "officer", "qa1", False),
        ("office", "Where was the apple before the garden?", "It was in the office before the garden.", "qa3", True),
        ("one", "How many?", "none", "qa7", False),
        ("none", "How many?", "None", "qa7", True),
        ("milk,apple", "What is Anna carrying?", "apple, milk", "qa8", True),
        ("milk,apple", "What is Anna carrying?", "milk", "qa8", False),
        ("no", "Is Anna here?", "I do not know", "qa6", False),
    ],
)
def test_matching(target, question, prediction, family, right):
    assert is_right(target, question, prediction, QUESTIONS[family].labels) is right


def test_the_published_files_can_be_asked(tokenizer):
    if not SHARED.is_dir():
        pytest.skip(f"no data at {SHARED}; name the folder above it with KVFOUNDRY_DATA")
    files = read_babilong(SHARED)
    assert files and all(len(file.records.rows) == 50 for file in files)
    for file in files:
        task = BabilongTask(file.family, (file,), 50)
        for item in task.items(tokenizer, True, 0):
            assert task.score(item, item.references[0]) == (1.0, True), item
