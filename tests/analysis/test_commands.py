"""The analysis commands end to end on a tiny model: files, figures, the page in a browser, and bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfoundry.cli import main

from .test_heads import SIZES, byte_tokenizer

pytest.importorskip("matplotlib")
SAMPLES = [
    {
        "id": f"s{number} <b>",
        "question": "Who keeps <script>alert(1)</script> bees?",
        "answers": ["Anna"],
        "ctxs": [
            {"title": f"Town {i}", "text": f"Person {number} keeps {'bees' if i else 'goats & cows'}.", "gold": i == 1}
            for i in range(3)
        ],
    }
    for number in range(2)
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny model and a data file."""
    folder = tmp_path_factory.mktemp("analysis")
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"max_position_embeddings": 2048})).save_pretrained(
        folder / "model"
    )
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "data.json").write_text(json.dumps(SAMPLES))
    return folder


def run(place: Path, command: str, *given: str) -> int:
    return main(["analyze", command, "--model", str(place / "model"), "--out", str(place / "out"), *given])


@pytest.mark.parametrize("command", ["attention", "coverage", "sparsity", "drift"])
def test_each_leaves_figures_and_a_picture(command, place, capsys):
    assert run(place, command, "--data", str(place / "data.json"), "--steps", "3") == 0
    told = json.loads((place / "out" / f"{command}.json").read_text())
    assert told["about"]["samples"] == 2 and told["about"]["steps"] == 3
    assert (place / "out" / f"{command}.png").stat().st_size > 10_000
    assert f"{command}.png" in capsys.readouterr().out


def test_passage_lengths(place, capsys):
    assert run(place, "passages", "--data", str(place / "data.json")) == 0
    told = json.loads((place / "out" / "passages.json").read_text())
    longest = max(len(f"{c['title']}: {c['text']}") for s in SAMPLES for c in s["ctxs"])  # a token per byte
    assert told["different_passages"] == 6 and told["passage_tokens"]["most"] == longest


def test_cache_sizes_of_models_and_cards(place, capsys):
    assert (
        run(place, "cache-size", "--model", "gemma-3-27b", "--gpu", "1MiB", "--gpu", "h100", "--dtype", "bfloat16") == 0
    )
    told = json.loads((place / "out" / "cache-size.json").read_text())
    tiny, gemma = told["models"]
    rows = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 2
    assert tiny["cache_bytes"]["1024"] == pytest.approx(1024 * rows, rel=0.03)
    assert gemma["beside_the_weights"]["h100"]["longest_tokens"] == 131072
    assert gemma["beside_the_weights"]["a device of 1MiB"]["longest_tokens"] == 0
    # 52 of its 62 layers have a window of 1,024 tokens
    assert gemma["cache_bytes"]["131072"] < 0.2 * 128 * gemma["cache_bytes"]["1024"]


def test_the_cache_benchmark(place, capsys):
    given = ["--data", str(place / "data.json"), "--method", "fullkv", "--method", "int8", "--repeat", "1"]
    assert run(place, "cache-bench", *given) == 0
    told = json.loads((place / "out" / "cache-bench.json").read_text())
    assert [row["method"] for row in told["chunks"]] == ["fullkv", "int8"]
    for row in told["chunks"]:
        assert set(row["milliseconds"]) == set(told["operations"]) and min(row["milliseconds"].values()) > 0
        assert row["planned_bytes"] == pytest.approx(row["chunk_bytes"], rel=0.08)  # token ids are in the chunk
    text, blended, reused = told["first_token"]
    assert text["reused_tokens"] == 0 < blended["recomputed_tokens"] and reused["reused_tokens"] > 0


def test_the_page_in_a_browser(place):
    path = Path(__file__).resolve().parents[1] / "evaluate" / "browser.py"
    spec = importlib.util.spec_from_file_location("browser_of_evaluate", path)
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    program = browser.executable()
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(browser.NAMES)} is on the path")
    assert run(place, "attention", "--data", str(place / "data.json"), "--steps", "3") == 0
    with browser.Browser(program) as page:
        page.open(place / "out" / "attention.html")
        assert page.read("document.querySelectorAll('tbody tr').length") == 3
        sums = page.read("[...document.querySelectorAll('thead span')].length")
        assert sums == len(json.loads((place / "out" / "attention.json").read_text())["samples"][0]["tokens"])
        page.click("tbody tr:nth-child(2) button")
        assert "keeps bees" in page.read("document.getElementById('text').textContent")
        page.read(
            "for (const [id, value] of [['columns', 'layer'], ['of', 'all'], ['sample', '1']]) {"
            "const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event('change')); }"
        )
        assert page.read("document.querySelectorAll('tbody tr').length") == 6
        assert "<script>" in page.read("document.getElementById('question').textContent")
        page.open(place / "out" / "attention.html", width=390, height=800)
        assert page.read("document.documentElement.scrollWidth") <= 390
        assert page.complaints == []


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("attention", ["--data", "nothing.json"]),
        ("coverage", ["--steps", "0"]),
        ("drift", ["--steps", "1"]),
        ("sparsity", ["--threshold", "-1"]),
        ("cache-size", ["--gpu", "abacus"]),
        ("cache-size", ["--dtype", "int3"]),
        ("cache-bench", ["--method", "nothing"]),
        ("passages", ["--model", "./nowhere"]),
    ],
)
def test_bad_input_is_one_line(command, given, place, capsys):
    data = [] if command == "cache-size" or "--data" in given else ["--data", str(place / "data.json")]
    assert run(place, command, *data, *given) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and not any("Traceback" in line for line in lines)
