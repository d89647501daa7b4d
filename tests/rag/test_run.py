"""`kvfoundry rag run` and the scripts: all steps from one configuration, again, and one line for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import run_forked
from tiny_models import build_tokenizer
from transformers import PreTrainedModel

from kvfoundry.cli import main, options
from kvfoundry.evaluate.tasks.ragqa_data import Passage

from .support import sample, saved

ROOT = Path(__file__).resolve().parents[2]
PASSAGES = [Passage(f"w{90 + n}", " ".join(f"w{3 + (7 * n + 5 * i) % 120}" for i in range(8 + n))) for n in range(4)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_model: Callable[..., PreTrainedModel]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("KVFOUNDRY_RAG_"):
            monkeypatch.delenv(name)
    loaded = own_model("llama"), build_tokenizer()
    monkeypatch.setattr(options, "load_model", lambda *_: loaded)
    saved(tmp_path, sample("a", "w5 w6", *PASSAGES[:3]), sample("b", "w7 w8", *PASSAGES[1:]))


def run(*words: Any) -> int:
    return main(["rag", "run", "--data", "towns.json", "--set", "retrieve.retriever=bm25", *map(str, words)])


def test_three_steps_leave_their_files_and_a_second_run_repeats_none(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed: pip install 'kvfoundry[rag]'")
    words = ["--k", 2, "--out", "all", "--set", "new_tokens=4", "--set", "build.device_size=50%"]
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        "[1/3] retrieve",
        "[2/3] build",
        "[3/3] decode",
    ]
    retrieval, kv = Path("all/retrieval/towns_rag_both_k2.json"), Path("all/kv_caches/towns_kv_top2.json")
    trace = Path("all/decoding/speculative_trace.json")
    assert retrieval.exists() and kv.exists() and Path("all/kv_caches/store").is_dir()
    answers = json.loads(trace.read_text())["totals"]
    assert answers["samples"] == 2
    assert run(*words, "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert list(records) == ["retrieve", "build", "decode"]
    assert not records["retrieve"]["written"] and records["decode"]["samples"] == 2
    assert json.loads(trace.read_text())["totals"] == answers


def test_file_environment_and_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rag.yaml").write_text("limit: 1\ndecode:\n  policy: bandit\n  ahead: 2\n")
    monkeypatch.setenv("KVFOUNDRY_RAG_DECODE_AHEAD", "3")
    assert run("--config", "rag.yaml", "--limit", 2, "--print-config") == 0
    text = capsys.readouterr().out
    made = yaml.safe_load(text)
    assert made["limit"] == 2 and made["decode"] == {"policy": "bandit", "ahead": 3}
    assert made["data"] == "towns.json" and made["retrieve"]["retriever"] == "bm25"
    assert "# horizon: 4" in text and "# retrieval: made by a step before" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "decode.polici=bandit"], "unknown setting 'polici'; did you mean 'policy'?"),
        (["--set", "decode.ahead=many"], "decode.ahead='many'"),
        (["--config", "none.yaml"], "none.yaml cannot be read"),
        (["--k", "0"], "k must be at least 1"),
    ],
)
def test_bad_settings_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    told = capsys.readouterr().err
    assert says in told and len(told.strip().splitlines()) == 1 and not Path("results").exists()


@pytest.mark.embedded
@pytest.mark.slow
def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "from_the_rag_project.md").read_text()
    lines = [line for line in page.splitlines() if re.match(r"[A-Z_]+=\S+ .*scripts/", line)]
    assert len(lines) == len(list(ROOT.glob("scripts/**/run_*.sh")) + list(ROOT.glob("scripts/build_*.sh"))) == 4
    program, told = tmp_path / "command.py", tmp_path / "words.json"
    program.write_text(f"import json, sys; json.dump(sys.argv[1:], open({str(told)!r}, 'w'))")
    environment = {**os.environ, "KVFOUNDRY": f"{sys.executable} {program}"}
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line.replace("scripts/", f"{ROOT}/scripts/")],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        done = run_forked(["kvfoundry", *json.loads(told.read_text())], tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "results/decoding/speculative_trace.json").exists()
