"""The results folder survives a kill at any byte, and never mixes two runs."""

import json

import pytest

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import FORMAT, META, REPORT, RESULTS, ResultsFolder, check_folder, read_lines

ARGUMENTS = {"model": "tiny", "methods": ["a", "b"], "seed": 0}


def line(item, **more):
    return {"task": "t", "item": item, "method": "m", "score": 1.0} | more


def written(folder, count, **more):
    with ResultsFolder(folder, ARGUMENTS, resume=False) as results:
        results.write_json(META, {"format": FORMAT, "arguments": ARGUMENTS})
        for number in range(count):
            results.append([line(f"i{number}", **more)])
    return folder / RESULTS


def test_every_cut_of_the_file_can_be_resumed(tmp_path):
    path = written(tmp_path, 3, prediction="zwölf\nlines")
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 3
    for cut in range(1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        with ResultsFolder(tmp_path, ARGUMENTS, resume=True) as results:
            kept = sum(end <= cut for end in ends)
            assert results.finished == {("t", f"i{number}", "m") for number in range(kept)}
            results.append([line(f"i{number}", prediction="zwölf\nlines") for number in range(kept, 3)])
        assert path.read_bytes() == whole


def test_failed_items_are_asked_again(tmp_path):
    path = written(tmp_path, 2)
    with ResultsFolder(tmp_path, ARGUMENTS, resume=True) as results:
        results.append([line("i2", error="RuntimeError: no")])
    with ResultsFolder(tmp_path, ARGUMENTS, resume=True) as results:
        assert ("t", "i2", "m") not in results.finished
    assert len(read_lines(path)) == 2


def test_old_results_are_not_touched_without_resume(tmp_path):
    path = written(tmp_path, 2)
    before = path.read_bytes()
    with pytest.raises(DataError, match="already holds results; add --resume"):
        ResultsFolder(tmp_path, ARGUMENTS, resume=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"methods": ["a"]}, r'methods was \["a", "b"\] and is now \["a"\]'),
        ({"limit": 3}, "limit was null and is now 3"),
    ],
)
def test_other_arguments_are_refused_by_name(tmp_path, change, message):
    path = written(tmp_path, 2)
    before = path.read_bytes()
    with pytest.raises(DataError, match=message):
        ResultsFolder(tmp_path, ARGUMENTS | change, resume=True)
    assert path.read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = written(tmp_path, 2)
    path.write_bytes(b"{broken\n" + path.read_bytes())
    with pytest.raises(DataError, match="line 1 of"):
        ResultsFolder(tmp_path, ARGUMENTS, resume=True)


@pytest.mark.parametrize("meta", [None, "{", "[]", '{"format": 2}', '{"format": 2, "arguments": null}'])
def test_missing_or_damaged_meta_cannot_be_resumed(tmp_path, meta):
    written(tmp_path, 1)
    (tmp_path / META).unlink()
    if meta is not None:
        (tmp_path / META).write_text(meta)
    with pytest.raises(DataError, match=rf"{META} (cannot be read|is damaged).* results without it mean nothing"):
        ResultsFolder(tmp_path, ARGUMENTS, resume=True)


@pytest.mark.parametrize("found", [1, FORMAT + 1])
def test_another_format_is_refused_before_anything_is_loaded(tmp_path, found):
    path = written(tmp_path, 1)
    before = path.read_bytes()
    meta = {"arguments": ARGUMENTS, "versions": {"kvfoundry": "7.7"}} | ({} if found == 1 else {"format": found})
    (tmp_path / META).write_text(json.dumps(meta))
    with pytest.raises(DataError, match=f"has format {found}, written by kvfoundry 7.7; .* format {FORMAT}"):
        check_folder(tmp_path, resume=True)
    assert path.read_bytes() == before


def test_files_that_a_kill_left_half_written_are_swept_away(tmp_path):
    written(tmp_path, 1)
    torn = [tmp_path / f"{name}x7.tmp" for name in (RESULTS, REPORT, META)]
    for path in [*torn, tmp_path / "notes.tmp"]:
        path.write_text("half")
    with ResultsFolder(tmp_path, ARGUMENTS, resume=True):
        pass
    assert not any(path.exists() for path in torn) and (tmp_path / "notes.tmp").exists()


def test_two_runs_do_not_write_one_folder(tmp_path):
    with ResultsFolder(tmp_path, {}, resume=False), pytest.raises(DataError, match="another run is writing"):
        ResultsFolder(tmp_path, {}, resume=True)
    with ResultsFolder(tmp_path, {}, resume=True):
        pass


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written .*--out"):
        ResultsFolder(tmp_path / "file" / "out", ARGUMENTS, resume=False)


def test_lines_are_plain_json(tmp_path):
    path = written(tmp_path, 1, prediction="ünï")
    assert json.loads(path.read_text(encoding="utf-8"))["prediction"] == "ünï"
