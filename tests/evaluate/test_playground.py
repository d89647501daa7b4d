"""The flags of the older playground: what they stand for, that they reach the run, and what is refused."""

import json

import pytest

import kvfoundry
from kvfoundry.cli import main
from kvfoundry.cli.evaluation.playground import PlaygroundWords, specs
from kvfoundry.errors import KVFoundryError
from kvfoundry.evaluate.arms import expand_arms
from kvfoundry.evaluate.results import META, RESULTS, read_lines
from kvfoundry.registry import entry

NAMES = (
    "pyramidkv", "snapkv", "h2o", "streamingllm", "cam", "l2norm", "adakv", "headkv", "think", "quest", "nacl",
    "scissorhands", "minicache", "minference", "fullkv",
)  # fmt: skip


def canonical(methods, **flags):
    words = PlaygroundWords(**flags)
    budgets = [int(budget) for budget in words.budgets(None)]
    return [str(arm) for arm in expand_arms(specs(methods, words), budgets)]


@pytest.mark.parametrize(
    ("method", "flags", "spec"),
    [
        (None, {}, "fullkv"),
        ("FullKV", {}, "fullkv"),
        ("full", {"max_capacity_prompts": 64}, "fullkv"),
        ("PyramidKV", {"max_capacity_prompts": 64}, "pyramidkv(budget=64)"),
        ("snapkv(window=8, kernel=7, pooling=max)", {"max_capacity_prompts": 64},
         "snapkv(budget=64, window=8, kernel=7, pooling='max')"),
        ("snapkv", {"max_capacity_prompts": 64, "kv_cache_granularity": "query_head"},
         "snapkv(budget=64, granularity='query_head')"),
        ("h2o", {"max_capacity_prompts": 64, "kv_cache_granularity": "kv_head", "gqa_score_agg": "max"},
         "h2o(budget=64, group='max')"),
        ("quest", {"max_capacity_prompts": 64, "gqa_score_agg": "sum"}, "quest(budget=64, group='sum')"),
        ("think", {}, "think"),
        ("think(ratio=0.4)", {"max_capacity_prompts": 64}, "snapkv(budget=64)+think(ratio=0.4)"),
        ("think", {"max_capacity_prompts": 64, "kv_cache_granularity": "query_head"},
         "snapkv(budget=64, granularity='query_head')+think(granularity='query_head')"),
        ("snapkv", {"max_capacity_prompts": 64, "merge": "pivot"}, "snapkv(budget=64)+pivot_merge"),
        ("l2norm", {"max_capacity_prompts": 64, "merge": "weighted"},
         "l2norm(budget=64)+weighted_merge(form='neighbour')"),
        ("minicache", {"max_capacity_prompts": 64}, "minicache"),
        ("MInference", {"max_capacity_prompts": 64}, "minference"),
        ("fullkv", {"quant_method": "kivi"}, "kivi"),
        ("fullkv", {"quant_method": "kivi", "nbits": 4, "q_group_size": 64}, "kivi(bits=4, group=64)"),
        ("fullkv", {"quant_method": "kivi", "axis_key": 1, "axis_value": 0}, "kivi"),
        ("fullkv", {"quant_method": "kivi", "nbits": 4, "axis_key": 0}, "int4(residual=128)"),
        ("fullkv", {"quant_method": "kivi", "axis_value": 1, "q_group_size": 16},
         "int2(group=16, keys='tokens', values='tokens', residual=128)"),
        ("snapkv", {"max_capacity_prompts": 64, "quant_method": "kvquant", "nbits": 4, "outlier_ratio": 0.02},
         "snapkv(budget=64)+kvquant(bits=4, outliers=0.02)"),
        ("fullkv", {"quant_method": "gear", "nbits": 2, "rank": 8, "outlier_ratio": 0.1, "q_group_size": 32,
                    "axis_key": 1}, "gear(bits=2, rank=8, outlier_ratio=0.1, group=32)"),
        ("tova(budget=9)+protect(sinks=1)", {"gqa_score_agg": "sum"}, "tova(budget=9, group='sum')+protect(sinks=1)"),
    ],
)  # fmt: skip
def test_flags_stand_for_a_spec(method, flags, spec):
    assert canonical(method and [method], **flags) == [spec]


def test_every_name_of_the_playground_is_a_method_of_ours(tmp_path):
    table = tmp_path / "heads.json"
    table.write_text(json.dumps({"0-0": [1.0], "0-1": [2.0]}))
    for name in NAMES:
        flags = {"head_path": str(table)} if name == "headkv" else {}
        (spec,) = canonical([name.upper()], max_capacity_prompts=64, **flags)
        assert name in spec and ("64" in spec or not entry(name).parameters.get("budget"))


def test_the_full_cache_stays_the_baseline_of_other_methods():
    flags = {"max_capacity_prompts": 64, "merge": "pivot", "kv_cache_granularity": "query_head"}
    assert canonical(["fullkv", "snapkv"], **flags) == [
        "fullkv", "snapkv(budget=64, granularity='query_head')+pivot_merge",
    ]  # fmt: skip
    assert canonical(["fullkv", "snapkv"], max_capacity_prompts=64, quant_method="kivi") == [
        "kivi", "snapkv(budget=64)+kivi",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["headinfer"])
def test_what_is_not_built_yet_says_so(name):
    if name in kvfoundry.methods():
        pytest.fail(f"{name} is built: take it out of registry._PLANNED and of the docs")
    for spec in (name, name.title(), f"snapkv(budget=8)+{name}"):
        with pytest.raises(KVFoundryError, match=f"{name} .* is not built yet"):
            canonical([spec])
    with pytest.raises(KVFoundryError, match="is not built yet"):
        kvfoundry.Method.parse(name)


def refused(name, message, *arguments):
    return pytest.param(arguments, message, id=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        refused("merge of nothing", "--merge: fullkv drops no rows that could be merged", "--merge", "pivot"),
        refused("merge of nothing twice", "--merge: fullkv drops no rows", "--method", "full", "--method", "fullkv",
                "--merge", "pivot"),
        refused("merge of a reader", "--merge: quest drops no rows",
                "--method", "quest", "--max_capacity_prompts", 64, "--merge", "pivot", "--method", "fullkv"),
        refused("merge twice", "cam and pivot_merge both set dispose",
                "--method", "cam", "--max_capacity_prompts", 64, "--merge", "pivot"),
        refused("unknown merge", "unknown --merge 'pivto'; did you mean 'pivot'?", "--merge", "pivto"),
        refused("bits alone", "--nbits describes codes; name them with --quant_method", "--nbits", 4),
        refused("axis alone", "--axis_key describes codes", "--axis_key", 0),
        refused("bits", "kvquant: bits must be 2, 3 or 4, got 8", "--quant_method", "kvquant", "--nbits", 8),
        refused("rank of kivi", "--rank is for gear; kivi has nothing like it", "--quant_method", "kivi", "--rank", 2),
        refused("groups of kvquant", "--q_group_size is for kivi and gear",
                "--quant_method", "kvquant", "--q_group_size", 64),
        refused("axis of gear", "gear stores keys per channel", "--quant_method", "gear", "--axis_key", 0),
        refused("no such axis", "--axis_value is 0 (per token) or 1 (per channel), not 2",
                "--quant_method", "kivi", "--axis_value", 2),
        refused("bits on other axes", "--nbits 1 exists on the published axes only",
                "--quant_method", "kivi", "--axis_key", 0, "--nbits", 1),
        refused("codes twice", "both set codec", "--method", "think", "--quant_method", "kivi"),
        refused("codes of pairs", "minicache and a codec", "--method", "minicache", "--quant_method", "kivi"),
        refused("unknown codes", "unknown --quant_method 'hqq'", "--quant_method", "hqq"),
        refused("granularity of pairs", "--kv_cache_granularity: minicache chooses nothing head by head",
                "--method", "minicache", "--kv_cache_granularity", "query_head"),
        refused("reduction of nothing", "--gqa_score_agg makes one score", "--method", "snapkv", "--gqa_score_agg",
                "max", "--kv_cache_granularity", "query_head"),
        refused("reduction of think", "--gqa_score_agg: think makes no score", "--method", "think",
                "--gqa_score_agg", "max"),
        refused("granularity twice", "both set granularity", "--method", "snapkv(budget=64, granularity=kv_head)",
                "--kv_cache_granularity", "query_head"),
        refused("unknown granularity", "unknown --kv_cache_granularity 'head'", "--kv_cache_granularity", "head"),
        refused("table of snapkv", "--head_path: snapkv reads no head table",
                "--method", "snapkv", "--max_capacity_prompts", 64, "--head_path", "heads.json"),
        refused("no table", "headkv: table must be given", "--method", "headkv", "--max_capacity_prompts", 64),
        refused("budget twice", "--budget and --max_capacity_prompts say the same",
                "--budget", 64, "--max_capacity_prompts", 64),
        refused("backend", "unknown --attn_implementation 'flash'", "--attn_implementation", "flash"),
        refused("not built", "headinfer (rows on the host, streamed head by head) is not built yet",
                "--method", "headinfer"),
    ],
)  # fmt: skip
def test_what_could_change_nothing_is_one_line_and_exit_2(capsys, tmp_path, arguments, message):
    status = main(["eval", "niah", *map(str, arguments), "--save_dir", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and not (tmp_path / "out").exists()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


def test_a_run_records_the_canonical_specs(capsys, tmp_path, model_folder):
    arguments = [
        "eval", "niah", "--lengths", "120", "--depths", "50", "--max-new-tokens", "2", "--model", str(model_folder),
        "--method", "FullKV", "--method", "snapkv", "--max_capacity_prompts", "40", "--merge", "weighted",
        "--kv_cache_granularity", "query_head", "--attn_implementation", "eager", "--save_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    meta = json.loads((tmp_path / "out" / META).read_text())
    spec = "snapkv(budget=40, granularity='query_head')+weighted_merge(form='neighbour')"
    assert meta["arguments"]["methods"] == ["fullkv", spec] and meta["arguments"]["attn_implementation"] == "eager"
    assert {arm["backend"] for arm in meta["arms"].values()} == {"eager"}
    rows = {line["method"]: line["kept_rows"] for line in read_lines(tmp_path / "out" / RESULTS)}
    assert rows[spec] == 40 < rows["fullkv"]
    assert main([*arguments[:-4], "--save_dir", str(tmp_path / "out"), "--resume"]) == 2
    assert "attn_implementation was" in capsys.readouterr().err


def test_the_flags_stand_in_a_panel_of_their_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["eval", "niah", "--help"]) == 0
    text = capsys.readouterr().out
    panel = text[text.index("Words of the older playground") :]
    for flag in ("max_capacity_prompts", "kv_cache_granularity", "gqa_score_agg", "merge", "quant_method", "nbits",
                 "rank", "outlier_ratio", "q_group_size", "axis_key", "axis_value", "attn_implementation"):  # fmt: skip
        assert f"--{flag}" in panel
