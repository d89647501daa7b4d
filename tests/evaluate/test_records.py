"""Data files: every form is read, and what is damaged is named, counted, refused or left out."""

import gzip
import json

import pytest

from kvfoundry.errors import DataError
from kvfoundry.evaluate.tasks.records import read_records, text_fault

GOOD = [{"input": "a\u2028b", "target": "x"}, {"input": "c", "target": "y"}]
FAULT = text_fault("input", "target")


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.jsonl.gz", "d.json.gz"])
def test_every_form_is_read(tmp_path, name):
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in GOOD) + "\n\n"
    raw = (lines if "jsonl" in name else json.dumps(GOOD)).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    records = read_records(tmp_path / name, FAULT)
    assert records.rows == tuple(GOOD) and records.damaged == ()


def test_damaged_lines_are_named_counted_and_skipped_on_demand(tmp_path):
    bad = ['{"input": "torn', '["list"]', '{"input": "a"}', '{"input": 3, "target": "x"}']
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([json.dumps(GOOD[0]), *bad, json.dumps(GOOD[1])]))
    with pytest.raises(
        DataError,
        match=r"line 2 is not JSON; line 3 is no object; line 4 has no .* and 1 more; .*--skip-damaged",
    ):
        read_records(path, FAULT)
    records = read_records(path, FAULT, skip_damaged=True)
    assert records.rows == tuple(GOOD) and len(records.damaged) == 4
    assert "line 5 has no text in field 'input'" in records.damaged


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("none.jsonl", None, "cannot be read"),
        ("d.jsonl.gz", b"no gzip", "damaged gzip"),
        ("d.jsonl.gz", gzip.compress(b"{}" * 400, mtime=0)[:-9], "damaged gzip"),
        ("d.jsonl", b"\xff", "not UTF-8"),
        ("d.jsonl", b"\n", "no usable record"),
        ("d.json", b"{", "is not JSON"),
        ("d.json", b"{}", "no list"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, raw, message):
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=message):
        read_records(tmp_path / name, FAULT)
