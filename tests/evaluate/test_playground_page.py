"""Every command of docs/from_the_playground.md runs, in its order, and the page names every flag and method."""

import json
from dataclasses import fields

from pages import DOCS, commands_of, out_of, run_on_tiny_model

from kvfoundry.cli.evaluation.playground import _METHODS, PlaygroundWords
from kvfoundry.evaluate.results import META, RESULTS, read_lines

PAGE = "from_the_playground.md"


def test_every_command_runs(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    seen = set()
    for command in commands_of(PAGE):
        words = run_on_tiny_model(command)
        if words[0] == "eval":
            out = out_of(words)
            lines, meta = read_lines(out / RESULTS), json.loads((out / META).read_text())
            assert lines and not any(line.get("error") for line in lines), command
            assert {line["method"] for line in lines} == set(meta["arguments"]["methods"])
            seen |= set(meta["arguments"]["methods"])
        elif words[0] == "bench":
            record = json.loads((out_of(words) / "bench.json").read_text())
            found = {(each["arm"], each["method"]): each for each in record["figures"]}
            assert {arm for arm, _ in found} == {"eager", "static", "plain", "engine"}
            full, smaller = found["plain", "fullkv"], found["plain", "pyramidkv(budget=64)"]
            assert smaller["stored_bytes"] < full["stored_bytes"] == found["engine", "fullkv"]["stored_bytes"]
            assert all(len(each["ttft_runs_ms"]) == 2 and each["ms"] > 0 for each in found.values())
            assert all(gate["passed"] for gate in record["gates"].values()) and not record["left_out"]
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
