"""Reading a results folder: what is there, and one sentence for every kind of damage."""

import json

import pytest
from made import line, run_of, write

from kvfoundry.errors import DataError
from kvfoundry.evaluate.results import META, PROMPTS, RESULTS, dump_lines
from kvfoundry.evaluate.runs import read_run

PROMPT = {"task": "niah", "item": "L128-D0", "prompt_tokens": 3, "head": "a b c", "head_sizes": [1, 2, 2], "tail": ""}


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = run_of(
        line(), line("h2o(budget=8)"), prompts=(PROMPT,), methods=["fullkv", "h2o(budget=8)", "tova(budget=8)"]
    )
    found = read_run(write(tmp_path, run))
    assert found.lines == run.lines and found.prompts == [PROMPT] and found.methods == ["fullkv", "h2o(budget=8)"]
    assert found.missing == 1 and found.arguments["model"] == "tiny"
    (tmp_path / PROMPTS).unlink()
    assert read_run(tmp_path).prompts == [] and read_run(tmp_path).missing == 0


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = write(tmp_path, run_of(line(), line("h2o(budget=8)")))
    (folder / RESULTS).write_bytes((folder / RESULTS).read_bytes()[:-20])
    assert read_run(folder).methods == ["fullkv"]


def test_chance_is_what_the_task_declares():
    run = run_of(line(), tasks=[{"task": "niah", "chance": 0.25}, {"task": "other"}])
    assert run.chance("niah") == 0.25 and run.chance("other") == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "1"}, "score is not a number"),
        ({"score": True}, "score is not a number"),
        ({"score": float("nan")}, "score is nan"),
        ({"stored_bytes": float("inf")}, "stored_bytes is inf"),
        ({"method": 3}, "method is not a text"),
        ({"prompt_hash": None}, "prompt_hash is not a text"),
        ({"references": "tiger"}, "references are not a list of texts"),
        ({"score": None}, "it has neither a scored prediction nor an error"),
        ({"kept_rows": None}, "kept_rows is missing"),
        ({"prediction": None}, "it has neither a scored prediction nor an error"),
        ({}, "it repeats an earlier line"),
    ],
)
def test_damaged_lines_are_named(tmp_path, change, message):
    folder = write(tmp_path, run_of(line(), {**line(), **({"depth": 50.0, "item": "x"} if change else {}), **change}))
    with pytest.raises(DataError, match=f"line 2 of .*{RESULTS} is damaged: {message}"):
        read_run(folder)


def test_what_is_no_results_folder(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match="holds no results"):
        read_run(tmp_path)
    folder = write(tmp_path / "empty", run_of())
    with pytest.raises(DataError, match="holds no finished result yet"):
        read_run(folder)
    folder = write(tmp_path / "old", run_of(line()))
    (folder / META).write_text(json.dumps({"arguments": {}}))
    with pytest.raises(DataError, match="has format 1"):
        read_run(folder)


@pytest.mark.parametrize("text", ["{", dump_lines([{"task": "niah"}]), dump_lines([{**PROMPT, "head": 3}])])
def test_damaged_prompts_are_named(tmp_path, text):
    folder = write(tmp_path, run_of(line()))
    (folder / PROMPTS).write_text(text)
    with pytest.raises(DataError, match=f"{PROMPTS} is damaged; remove it"):
        read_run(folder)
