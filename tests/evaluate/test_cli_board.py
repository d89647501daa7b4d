"""`kvfoundry report` and `kvfoundry pick` as commands: what they print and write, and one line for every bad input."""

import csv
import io
import json

import pytest
from made import line, lines, run_of, write

from kvfoundry.cli import main
from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.results import META, REPORT, RESULTS


@pytest.fixture
def call(capsys):
    """Run a command in this process; (status, stdout, stderr)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def board(score=0.5):
    return run_of(
        *lines("fullkv", [1.0] * 8, stored_bytes=4 * MIB),
        *lines("h2o(budget=8)", [score] * 8, stored_bytes=MIB),
        *lines("h2o(budget=16)", [1.0] * 8, stored_bytes=2 * MIB),
    )


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run", board())


def test_report_writes_the_page_and_prints_the_board(call, folder):
    status, out, err = call("report", folder, "--sort", "stored_bytes")
    assert status == 0 and err == "" and str(folder / REPORT) in "".join(out.split("\n"))
    assert out.index("h2o(budget=8)") < out.index("fullkv")
    assert (folder / REPORT).read_text().startswith("<!doctype html>")


def test_report_prints_the_guards(call, tmp_path):
    flat = write(tmp_path / "flat", run_of(*lines("fullkv", [0.0] * 3)))
    status, out, err = call("report", flat)
    assert status == 0 and err.startswith("warning: niah: the full cache itself scores 0.00") and err.count("\n") == 1
    status, out, err = call("report", flat, "--json")
    assert status == 0 and err == ""
    made = json.loads(out)
    assert [flag["kind"] for flag in made["warnings"]] == ["baseline"] and made["board"][0]["method"] == "fullkv"


def test_report_as_csv_and_markdown(call, folder, tmp_path):
    status, out, _ = call("report", folder, "--csv", "-", "--columns", "method,stored_bytes", "--columns", "score")
    read = list(csv.reader(io.StringIO(out)))
    assert status == 0 and read[0] == ["method", "stored_bytes", "score"]
    assert read[2] == ["h2o(budget=8)", f"{MIB}.0", "0.5"]
    page, table = tmp_path / "page.html", tmp_path / "board.md"
    assert call("report", folder, "--md", table, "--html", page)[0] == 0
    assert table.read_text().splitlines()[2].startswith("| `fullkv` | 8 | 1.000 |") and page.exists()
    (folder / REPORT).unlink()
    assert call("report", folder, "--html", page)[0] == 0 and not (folder / REPORT).exists()


def test_report_of_two_runs(call, folder, tmp_path):
    other = write(tmp_path / "other", board(score=1.0))
    status, out, err = call("report", folder, other, "--html", tmp_path / "both.html", "--csv", tmp_path / "both.csv")
    assert status == 0 and "better" in out and "equal" in out and err == ""
    assert "Two runs, item by item" in (tmp_path / "both.html").read_text()
    assert "h2o(budget=8),h2o(budget=8),8,0.5,1.0,0.5,0.5,0.5,better" in (tmp_path / "both.csv").read_text()
    status, out, _ = call("report", folder, other, "--json")
    rows = json.loads(out)["rows"]
    assert [row["difference"]["verdict"] for row in rows] == ["equal", "better", "equal"]
    status, out, _ = call("report", folder, other, "--md", "-")
    assert status == 0 and out.startswith("| task | first | second |")


def test_pick_names_the_recipe_and_why_not_the_others(call, folder):
    status, out, err = call("pick", folder, "--memory", "3MiB")
    assert status == 0 and err == ""
    assert "use       h2o(budget=16)" in out and "stores at most 2.00 MiB a prompt, 50.0% of the full cache" in out
    assert "fullkv: stores 4.00 MiB, over the limit of 3.00 MiB" in out
    assert "h2o(budget=8): loses 50.0% of the full cache's score, more than 2.0%" in out
    limits = ("--share", "0.3", "--loss", "0.5", "--task", "niah", "--model", "tiny")
    status, out, _ = call("pick", folder, *limits, "--json")
    made = json.loads(out)
    assert status == 0 and made["best"]["method"] == "h2o(budget=8)" and made["runner_up"] is None
    assert {one["method"]: one["refused"] for one in made["refused"]}.keys() == {"fullkv", "h2o(budget=16)"}


def test_pick_shows_the_runner_up_and_whether_it_is_worse(call, folder):
    status, out, _ = call("pick", folder)
    assert status == 0 and "use       h2o(budget=16)" in out and "runner-up fullkv" in out
    assert "against the first: +0.000 (equal on all 8 items)" in out


def test_pick_leaves_with_1_when_nothing_fits(call, folder):
    status, out, _ = call("pick", folder, "--memory", "1.5MiB")
    assert status == 1 and "nothing that was measured fits" in out and "nearest   h2o(budget=16)" in out
    status, out, _ = call("pick", folder, "--memory", "1.5MiB", "--json")
    assert status == 1 and json.loads(out)["best"] is None and json.loads(out)["nearest"]["method"] == "h2o(budget=16)"


def bad(name, message, *arguments):
    return pytest.param(arguments, message, id=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(bad(f"{command} nowhere", "does not exist", command, "TMP/none") for command in ("report", "pick")),
        *(bad(f"{command} empty", "holds no results", command, "TMP/empty") for command in ("report", "pick")),
        *(bad(f"{command} damaged", "line 2 of", command, "TMP/damaged") for command in ("report", "pick")),
        *(bad(f"{command} no line", "no finished result", command, "TMP/begun") for command in ("report", "pick")),
        *(bad(f"{command} format", "has format 9", command, "TMP/format") for command in ("report", "pick")),
        *(bad(f"{command} no folder", "Missing argument", command) for command in ("report", "pick")),
        bad("three folders", "3 folders are given", "report", "RUN", "RUN", "RUN"),
        bad("nothing shared", "share no answered item", "report", "RUN", "TMP/other"),
        bad("unknown column", "did you mean 'score'", "report", "RUN", "--columns", "method,scroe"),
        bad("unknown order", "did you mean 'stored_bytes'", "report", "RUN", "--sort", "stored_byte"),
        bad("columns of two", "leave them out to compare two", "report", "RUN", "RUN", "--sort", "score"),
        bad("unwritable page", "cannot be written", "report", "RUN", "--html", "TMP/none/page.html"),
        bad("unwritable table", "cannot be written", "report", "RUN", "--csv", "TMP/empty"),
        bad("memory word", "--memory 'lots' is not a size", "pick", "RUN", "--memory", "lots"),
        bad("memory negative", "is not a size", "pick", "RUN", "--memory=-3MiB"),
        bad("memory zero", "is not a size", "pick", "RUN", "--memory", "0MiB"),
        bad("share above one", "share 30 is out of range", "pick", "RUN", "--share", "30"),
        bad("share word", "--share", "pick", "RUN", "--share", "third"),
        bad("loss above one", "loss 2 is out of range", "pick", "RUN", "--loss", "2"),
        bad("unknown task", "did you mean 'niah'", "pick", "RUN", "--task", "naih"),
        bad("unknown model", "unknown model 'huge'", "pick", "RUN", "--model", "huge"),
        bad("no full cache", "fullkv was not measured", "pick", "TMP/other"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(call, folder, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    damaged = write(tmp_path / "damaged", run_of(line()))
    with (damaged / RESULTS).open("a") as file:
        file.write("{broken\n")
    write(tmp_path / "begun", run_of())
    other = write(tmp_path / "format", run_of(line()))
    (other / META).write_text(json.dumps({"format": 9, "arguments": {}}))
    write(tmp_path / "other", run_of(line("tova(budget=8)", "elsewhere")))
    words = {"RUN": str(folder)}
    status, out, err = call(*(words.get(argument, argument.replace("TMP", str(tmp_path))) for argument in arguments))
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
