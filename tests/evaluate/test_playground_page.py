"""Every command of docs/from_the_playground.md runs, in its order, and the page names every flag and method."""

import json
from dataclasses import fields

from pages import DOCS, commands_of, out_of, run_on_tiny_model

from kvfoundry.cli.evaluation.playground import _METHODS, PlaygroundWords
from kvfoundry.evaluate.results import META, RESULTS, read_lines

PAGE = "from_the_playground.md"


def test_every_command_runs(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    seen = set()
    for command in commands_of(PAGE):
        words = run_on_tiny_model(command)
        printed = capsys.readouterr().out
        if words[0] == "eval":
            out = out_of(words)
            lines, meta = read_lines(out / RESULTS), json.loads((out / META).read_text())
            assert lines and not any(line.get("error") for line in lines), command
            assert {line["method"] for line in lines} == set(meta["arguments"]["methods"])
            seen |= set(meta["arguments"]["methods"])
        elif words[0] == "run":
            (full, smaller) = json.loads(printed)
            assert smaller["stored_bytes"] < full["stored_bytes"] and full["ms_per_token"] > 0
    # What the flags of the page stand for.
    assert seen >= {
        "fullkv",
        "pyramidkv(budget=512)",
        "snapkv(budget=64, group='max')",
        "snapkv(budget=64, granularity='query_head')",
        "h2o(budget=64)+pivot_merge",
        "kivi",
        "snapkv(budget=64)+kvquant(bits=4)",
        "gear(rank=2)",
        "headkv(budget=64, table='heads.json')",
        "streamingllm(budget=64, granularity='query_head')+schedule",
        "cam(budget=64, form='prefill', granularity='query_head')",
    }


def test_the_page_names_every_flag_and_method():
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    assert [field.name for field in fields(PlaygroundWords) if f"--{field.name}" not in text] == []
    assert [name for name in _METHODS if f"`{name}`" not in text] == []
