"""The benchmark scripts that share the room's clocks still run, on their toys."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "words", "figures"),
    [
        ("decode", ["--arms", "graph", "eager", "--only", "full", "kivi", "--tokens", "64", "640"], 3),
        ("prefill", ["--tokens", "512", "--rounds", "1"], 7),
        ("headinfer", ["--arms", "0", "1"], 2),
        ("million", ["--tokens", "1000"], 1),
    ],
)
def test_a_script_runs_on_its_toy(script, words, figures, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--config", "tiny", "--out", str(out), *words])
    importlib.import_module(script).main()
    record = json.loads(out.read_text())
    assert len(record["figures"]) == figures and all(gate["passed"] for gate in record["gates"].values())
    assert len(record["gates"]) == {"decode": 6, "prefill": 0, "headinfer": 2, "million": 2}[script]
