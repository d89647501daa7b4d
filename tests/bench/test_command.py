"""The grid and its command on tiny models: every figure is there, faults are told, and bad input is one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tiny_models import _COMMON, FAMILIES

from kvfoundry import Method
from kvfoundry.bench import Grid, Record, bench
from kvfoundry.bench import grid as grid_file
from kvfoundry.bench.grid import cells
from kvfoundry.bench.latency import Runner
from kvfoundry.cli import main
from kvfoundry.engine.attention import TorchKernels
from kvfoundry.errors import DataError, SpecError


@pytest.fixture(autouse=True)
def _rates_are_quick(monkeypatch):
    """They are tested in test_timing; here they would take most of the time."""
    monkeypatch.setattr(grid_file, "copy_rate", lambda device: 1e10)
    monkeypatch.setattr(grid_file, "matmul_rate", lambda device, dtype: 1e11)
    monkeypatch.setattr(grid_file, "disk_rates", lambda folder: {"disk_write": 1e9, "disk_read": 2e9})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, with the config.json of a tiny model of 1,024 positions."""
    FAMILIES["llama"](**_COMMON).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return main(["bench", "--random-weights", "config.json", "--max-new-tokens", "6", "--repeat", "2", *words])


def test_a_whole_grid_with_its_picture(place, capsys):
    pytest.importorskip("matplotlib")
    words = ["--lengths", "48,96", "--batch", "1", "--batch", "2", "--method", "fullkv", "--method", "snapkv(window=8)"]
    assert run(*words, "--budget", "24", "--method", "minicache", "--json", "--out", "out") == 0
    printed = json.loads(capsys.readouterr().out)
    record = json.loads((place / "out" / "bench.json").read_text())
    assert printed == record | {"files": ["out/bench.json", "out/bench.png"]}
    assert (place / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")

    figures = {(each["arm"], each["method"], each["batch"], each["tokens"]): each for each in record["figures"]}
    methods = ["fullkv", "snapkv(budget=24, window=8)", "minicache"]
    shapes = [(batch, tokens) for batch in (1, 2) for tokens in (48, 96)]
    timed = [("eager", "fullkv"), ("static", "fullkv"), *(("plain", method) for method in methods)]
    timed += [("engine", method) for method in methods[:2]]
    assert set(figures) == {(*who, *shape) for who in timed for shape in shapes}
    assert [(each["arm"], each["method"]) for each in record["left_out"]] == [("engine", "minicache")] * 4
    assert "shares rows between layers" in record["left_out"][0]["reason"]

    row = 2 * 2 * 16 * 2 * 4  # layers, KV heads, head size, keys and values, float32
    for (arm, method, batch, tokens), each in figures.items():
        assert each["full_bytes"] == batch * tokens * row and each["context"] == "random ids"
        assert len(each["ttft_runs_ms"]) == 2 and each["steps"] == 4  # of five steps in each run the first and two last
        assert each["ms_p10"] <= each["ms"] <= each["ms_p90"] and each["tokens_per_s"] == batch * 1e3 / each["ms"]
        assert each["times_roofline"] == pytest.approx(each["ms"] / each["roofline_ms"])
        assert each["roofline_ms"] == pytest.approx(each["read_bytes"] / 1e10 * 1e3)
        kept = 24 / tokens if method.startswith("snapkv") else 1.0
        assert each["kept_share"] == pytest.approx(kept)
        if method != "minicache":
            weights = figures["eager", "fullkv", batch, tokens]["read_bytes"] - batch * tokens * row
            assert each["read_bytes"] == weights + batch * tokens * row * kept
            assert each["stored_bytes"] >= each["full_bytes"] * kept
        assert each["peak_bytes"] >= each["stored_bytes"] and (each["static_bytes"] > 0) is (arm == "engine")
    assert all(gate["passed"] for gate in record["gates"].values()) and len(record["gates"]) == 5
    assert record["rates"]["disk_read_bytes_per_s"] == 2e9 and record["random_weights"] and record["stopped"] == []
    assert record["versions"]["torch"] and record["machine"]["device"] == "cpu" and record["dtype"] == "float32"


def test_a_wrong_method_is_told_and_not_timed(place, monkeypatch, capsys):
    right = TorchKernels._attend
    monkeypatch.setattr(TorchKernels, "_attend", lambda *given: right(*given) * 1.01)
    assert run("--lengths", "48", "--method", "fullkv", "--arm", "eager,plain,engine", "--no-plot") == 1
    said = capsys.readouterr()
    assert "WRONG: fullkv: logits of 4 steps of the engine: error 0.0" in said.err
    assert "left out: plain fullkv, 1 x 48 tokens: its gate found it wrong." in said.err
    record = json.loads((place / "results" / "bench" / "bench.json").read_text())
    assert [each["arm"] for each in record["figures"]] == ["eager"]
    assert not (place / "results" / "bench" / "bench.png").exists()


def test_an_error_in_one_figure_leaves_the_others(place, monkeypatch, capsys):
    right = Runner.run

    def broken(self, arm, method, ids, new_tokens, skip):
        if ids.shape[0] == 2:
            raise torch.OutOfMemoryError("no room")
        if arm == "plain":
            raise RuntimeError("a fault\nin two lines")
        return right(self, arm, method, ids, new_tokens, skip)

    monkeypatch.setattr(Runner, "run", broken)
    assert run("--lengths", "48", "--batch", "1,2", "--arm", "plain,engine", "--no-plot", "--out", "out") == 1
    said = capsys.readouterr().err
    assert "left out: plain fullkv, 1 x 48 tokens: stopped: RuntimeError: a fault.\n" in said
    assert "left out: engine fullkv, 2 x 48 tokens: out of memory on cpu." in said
    record = json.loads((place / "out" / "bench.json").read_text())
    assert [(each["arm"], each["batch"]) for each in record["figures"]] == [("engine", 1)]
    assert "in two lines" in record["left_out"][0]["traceback"] and record["stopped"] == ["plain fullkv, 1 x 48 tokens"]


def test_what_comes_behind_the_limit_is_named(place, capsys):
    assert run("--lengths", "48,64", "--arm", "eager,plain", "--limit", "0", "--no-plot") == 0
    said = capsys.readouterr().err
    assert "left out: eager transformers, 1 x 48, 1 x 64 tokens: the time was up." in said
    assert "left out: plain fullkv, 1 x 48, 1 x 64 tokens: the time was up." in said


def test_ctrl_c_keeps_what_is_there(place, monkeypatch, capsys):
    right = Runner.run

    def interrupted(self, arm, *given, **named):
        if arm == "plain":
            raise KeyboardInterrupt
        return right(self, arm, *given, **named)

    monkeypatch.setattr(Runner, "run", interrupted)
    assert run("--lengths", "48", "--arm", "eager,plain", "--no-plot", "--out", "out") == 130
    assert "the figures so far are in out/bench.json" in capsys.readouterr().err
    assert len(json.loads((place / "out" / "bench.json").read_text())["figures"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--random-weights llama-3.1-8x", "unknown config 'llama-3.1-8x'; did you mean 'llama-3.1-8b'?"),
        ("--lengths 1020", "the longest context has 1020 tokens and asks for 33 more"),
        ("--random-weights llama-3.1-8b --lengths 131072", "limited to 131072 positions"),
        ("--arm fast", "unknown arm 'fast'"),
        ("--batch 0", "--batch 0 is too small"),
        ("--repeat 0", "--repeat 0 is too small"),
        ("--lengths many", "--lengths 'many' is not a whole number"),
        ("--max-new-tokens 4", "leaves no step to time; give 5 or more"),
        ("--method snapcv", "did you mean 'snapkv'?"),
        ("--device auto-map", "bench measures one device"),
        ("--method kvzip(budget=40) --lengths 64", "random weights have no tokenizer"),
        ("--out config.json", "the folder 'config.json' cannot be made"),
        ("--dtype fp8", "unknown dtype 'fp8'"),
        ("--file prompts.txt", "--file and --lengths both say what is read"),
        ("--model gpt2", "both name the model"),
    ],
)
def test_bad_input_is_one_line(place, capsys, words, said):
    assert main(["bench", "--random-weights", "config.json", "--lengths", "64", "--no-plot", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: ")


def test_random_weights_read_no_text(place, capsys):
    assert main(["bench", "--random-weights", "config.json", "--file", "prompts.txt"]) == 2
    assert "--random-weights has no tokenizer for --file" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_do(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--lengths", "48") == 2
    assert "pip install 'kvfoundry[plot]' (or --no-plot)" in capsys.readouterr().err


def test_random_rows_stand_for_a_prompt_where_they_can(place, capsys):
    pytest.importorskip("matplotlib")
    specs = ["fullkv", "snapkv(budget=24, window=8)", "adakv(budget=24, window=8)", "int4(residual=0)"]
    specs += ["h2o(budget=24, window=8)", "quest(budget=32)", "streamingllm(budget=24)"]
    words = [word for spec in specs for word in ("--method", spec)]
    assert run("--lengths", "96", *words, "--out", "read", "--json") == 0
    assert run("--lengths", "96", *words, "--random-rows", "--out", "filled") == 0
    found = {}
    for name in ("read", "filled"):
        figures = json.loads((place / name / "bench.json").read_text())["figures"]
        found[name] = {(each["arm"], each["method"]): each for each in figures}
    assert set(found["read"]) == set(found["filled"])
    for (arm, method), each in found["filled"].items():
        read = found["read"][arm, method]
        if arm == "static" or method.startswith("h2o"):
            assert each["context"] == "random ids" and each["ttft_ms"] > 0
            continue
        assert each["context"] == "random rows" and each["ttft_ms"] is None and each["ttft_runs_ms"] == []
        assert each["read_bytes"] == read["read_bytes"] and each["steps"] == read["steps"]
        assert each["stored_bytes"] == pytest.approx(read["stored_bytes"], rel=0.2)  # places and last queries, on a toy
    with pytest.raises(DataError, match="nothing to say"):
        Grid([Method.parse("fullkv")], [64], prefill_chunk=8, random_rows=True)


def test_small_contexts_come_first_and_what_compiles_comes_last():
    grid = Grid([Method.parse("fullkv"), Method.parse("int8")], [200, 100], (1, 4), ("static", "plain", "eager"))
    found = [(cell.arm, str(cell.method), cell.batch * cell.tokens) for cell in cells(grid)]
    sizes = [100, 200, 400, 800]
    quick = [("eager", "fullkv"), ("plain", "fullkv"), ("plain", "int8")]
    assert found == [(*who, size) for size in sizes for who in quick] + [("static", "fullkv", size) for size in sizes]


def test_a_prompt_of_ones_own_and_pieces_of_it(own_model, tokenizer, tmp_path):
    model = own_model("llama")
    settings = model.generation_config
    texts = [tokenizer(" ".join(f"w{n % 90 + 3}" for n in range(300))).input_ids]
    methods = [Method.parse(spec) for spec in ("snapkv(budget=24, window=8)", "kvzip(budget=24)", "headinfer")]
    grid = Grid(methods, [], arms=["plain"], texts=texts, new_tokens=6, repeat=1, prefill_chunk=20)
    record = Record(tmp_path / "bench.json", 100.0, say=lambda text: None)
    bench(model, grid, record, tokenizer=tokenizer)
    small, repeated, far = record.content["figures"]
    assert far["host_bytes"] >= far["full_bytes"] == far["tokens"] * 512
    assert small["context"] == "a given prompt" and small["tokens"] == 300
    assert small["kept_share"] == pytest.approx(24 / 300)
    assert repeated["kept_share"] == pytest.approx(24 / 300, abs=0.01)
    whole = Grid(methods[:1], [], arms=["plain"], texts=texts, new_tokens=6, repeat=1)
    bench(model, whole, again := Record(tmp_path / "again.json", 100.0, say=lambda text: None))
    # A layer never holds more than its budget and a piece; at once it holds the prompt.
    assert small["peak_bytes"] < 0.5 * again.content["figures"][0]["peak_bytes"]
    assert model.generation_config is settings
    with pytest.raises(SpecError, match="kvzip"):
        bench(model, grid, record)
    with pytest.raises(DataError, match="no context"):
        Grid(methods, [])
