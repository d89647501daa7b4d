"""The commands of a page of the docs, and how to run one on the tiny model."""

import re
import shlex
from pathlib import Path

import pytest

from kvfoundry.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"

# What a command needs beside the core.
_NEEDS = {
    "--score rouge": "rouge_score",
    "eval longbench": "rapidfuzz",
    "--plot": "matplotlib",
    "kvfoundry bench": "matplotlib",
}

# Commands that take a limit on their items.
_LIMITED = ("eval", "lm-eval")


def commands_of(page: str) -> list[str]:
    """The lines of a page's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run_on_tiny_model(command: str) -> list[str]:
    """Run a command in the workplace, with one item of each task; returns its words. It must leave with 0."""
    for words, module in _NEEDS.items():
        if words in command:
            pytest.importorskip(module)
    program, *words = shlex.split(command)
    assert program == "kvfoundry"
    more = ["--model", "model"] if words[0] != "report" else []
    more += ["--limit", "1"] if words[0] in _LIMITED else []
    assert main([*words, *more]) == 0, command
    return words


def out_of(words: list[str]) -> Path:
    """The results folder that a command names."""
    return Path(words[words.index("--out" if "--out" in words else "--save_dir") + 1])
