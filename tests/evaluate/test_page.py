"""Every command of docs/evaluation.md runs, on a tiny model and tiny data."""

import shlex

import pytest
from pages import commands_of, out_of, run_on_tiny_model

from kvfoundry.evaluate.results import RESULTS, read_lines

COMMANDS = commands_of("evaluation.md")


def test_the_page_has_a_command_for_each_task():
    assert {shlex.split(command)[2] for command in COMMANDS} >= {
        "niah",
        "ruler",
        "longbench",
        "ragqa",
        "babilong",
        "fidelity",
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition("--out ")[2])
def test_command(command, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    out = out_of(run_on_tiny_model(command))
    assert read_lines(out / RESULTS) and (out / "report.html").exists()
