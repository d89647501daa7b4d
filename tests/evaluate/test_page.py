"""Every command of docs/evaluation.md runs, on a tiny model and tiny data made here."""

import json
import re
import shlex
import shutil
from itertools import islice
from pathlib import Path

import pytest

from kvfoundry.cli import main
from kvfoundry.evaluate.results import RESULTS, read_lines
from kvfoundry.evaluate.tasks.haystack import generated_sentences

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
COMMANDS = [
    line
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def workplace(model_folder, tmp_path_factory):
    """A folder with the data that the page names, and the tiny model with room for the page's lengths."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "texts").mkdir()
    (folder / "texts" / "book.txt").write_text("".join(islice(generated_sentences("book"), 400)))
    (folder / "data" / "babilong").mkdir(parents=True)
    record = {"input": "Anna moved to the office.", "question": "Where is Anna?", "target": "office"}
    for name in ("0k_qa1", "1k_qa1", "0k_qa2", "1k_qa2"):
        (folder / "data" / "babilong" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    prose = "The river rose above the lower step and the roof began to leak. " * 20
    squad = [
        {"context": f"Keeper {number} lives by the mill. {prose}",
         "qas": [{"question": f"Where does keeper {number} live?", "answers": [{"text": "by the mill"}]}]}
        for number in range(12)
    ]  # fmt: skip
    (folder / "data" / "squad.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": squad}]}))
    hotpot = [
        {"question": "Where is the mill?", "answer": "by the river", "supporting_facts": [[f"Mill {number}", 0]],
         "context": [[f"Mill {number}", ["The mill is by the river."]], [f"Roof {number}", [prose]]]}
        for number in range(12)
    ]  # fmt: skip
    (folder / "data" / "hotpot.json").write_text(json.dumps(hotpot))
    (folder / "data" / "longbench").mkdir()
    sample = {
        "context": prose,
        "input": "Who saw it?",
        "answers": ["the roof"],
        "all_classes": ["the roof"],
        "length": 9,
    }
    for name in ("hotpotqa", "hotpotqa_e", "trec", "lcc"):
        (folder / "data" / "longbench" / f"{name}.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "data" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "{context}\n{input}"}))
    passages = {"question": "Who saw it?", "answers": ["the roof"], "ctxs": [{"title": "Roof", "text": prose}]}
    (folder / "data" / "musique_s.json").write_text(json.dumps([passages]))
    shutil.copytree(model_folder, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


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
def test_command(command, workplace, monkeypatch, capsys):
    if "--score rouge" in command:
        pytest.importorskip("rouge_score")
    if "eval longbench" in command:
        pytest.importorskip("rapidfuzz")
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(workplace)
    program, *words = shlex.split(command)
    assert program == "kvfoundry"
    status = main([*words, "--model", "model", "--limit", "1"])
    assert status == 0, capsys.readouterr().err
    out = Path(words[words.index("--out") + 1])
    assert read_lines(out / RESULTS) and (out / "report.html").exists()
