"""The runner on a tiny model: what it writes, that it resumes, and that one bad item is only one bad item."""

import json
import random
from dataclasses import replace

import pytest
import torch

import kvfoundry
from kvfoundry.errors import DataError, KVFoundryError, SpecError
from kvfoundry.evaluate.arms import expand_arms
from kvfoundry.evaluate.prompts import hash_ids
from kvfoundry.evaluate.results import FORMAT, META, REPORT, RESULTS, SUMMARY, read_lines
from kvfoundry.evaluate.runner import evaluate, spread
from kvfoundry.evaluate.runs import read_run
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.niah import NeedleTask

FIELDS = {
    "task", "item", "method", "seed", "prompt_tokens", "prediction", "references", "score", "exact",
    "stored_bytes", "kept_rows", "kept_share", "kept_profile", "peak_bytes", "full_bytes", "ttft_seconds",
    "ms_per_token", "seconds", "notes",
}  # fmt: skip
TASK = NeedleTask(lengths=(120, 200), depths=(0.0, 100.0), max_new_tokens=3)
TIMES = ("ttft_seconds", "ms_per_token", "seconds")


def timeless(path):
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in read_lines(path)]
    return sorted(lines, key=lambda line: (line["method"], line["item"]))


@pytest.fixture(scope="module")
def finished(model, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "deep" / "out"
    outcome = evaluate(
        model, tokenizer, [TASK], ["fullkv", "streamingllm"], budgets=[64, 0.5], out=out, arguments={"model": "tiny"}
    )
    return out, outcome


def test_one_line_per_item_and_arm_with_every_field(finished):
    out, outcome = finished
    lines = read_lines(out / RESULTS)
    methods = {"fullkv", "streamingllm(budget=64)", "streamingllm(budget=0.5)"}
    assert {line["method"] for line in lines} == methods
    assert len(lines) == 4 * 3 and outcome.failed == 0
    for line in lines:
        assert line.keys() >= FIELDS and not line.get("error")
        assert 0 <= line["score"] <= 1 and line["prompt_tokens"] <= line["length"]
        assert line["stored_bytes"] <= line["full_bytes"] * 1.5
    full = [line for line in lines if line["method"] == "fullkv"]
    assert all(line["kept_share"] == 1.0 and line["kept_rows"] == line["prompt_tokens"] for line in full)
    assert all(line["kept_rows"] == 64 for line in lines if line["method"] == "streamingllm(budget=64)")


def test_files_of_a_run(finished):
    out, outcome = finished
    meta = json.loads((out / META).read_text())
    assert set(meta["versions"]) == {"python", "torch", "transformers", "kvfoundry"}
    assert meta["arguments"]["model"] == "tiny" and meta["arguments"]["tasks"][0]["lengths"] == [120, 200]
    assert len(meta["arms"]) == 3 and meta["shared_prompts"] is True
    shared = [
        {key: arm[key] for key in ("backend", "dtype", "prompts", "prefill_chunk", "items")}
        for arm in meta["arms"].values()
    ]
    assert shared[0] == shared[1] == shared[2] and shared[0]["items"] == 4
    assert meta["format"] == FORMAT and meta["dtype"] == "float32"
    summary = json.loads((out / SUMMARY).read_text())
    assert (summary["rows"], summary["board"], summary["warnings"]) == (outcome.rows, outcome.board, outcome.flags)
    html = (out / REPORT).read_text()
    assert outcome.report == out / REPORT and "streamingllm(budget=64)" in html and "<svg" in html


def test_a_killed_run_resumes_to_the_same_results(finished, model, tokenizer, tmp_path):
    whole = (finished[0] / RESULTS).read_bytes()
    rng = random.Random(5)
    for cut in sorted(rng.sample(range(1, len(whole)), 3)):
        out = tmp_path / str(cut)
        out.mkdir()
        (out / RESULTS).write_bytes(whole[:cut])
        (out / META).write_bytes((finished[0] / META).read_bytes())
        evaluate(
            model,
            tokenizer,
            [TASK],
            ["fullkv", "streamingllm"],
            budgets=[64, 0.5],
            out=out,
            arguments={"model": "tiny"},
            resume=True,
        )
        assert timeless(out / RESULTS) == timeless(finished[0] / RESULTS)


def test_interrupt_keeps_what_is_done_and_resume_asks_only_the_rest(model, tokenizer, tmp_path, monkeypatch):
    real, asked = kvfoundry.generate, []

    def interrupted(*args, **kwargs):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(args[2])
        return real(*args, **kwargs)

    monkeypatch.setattr(kvfoundry, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tokenizer, [TASK], ["fullkv"], out=tmp_path)
    assert len(read_lines(tmp_path / RESULTS)) == 2
    again = []
    monkeypatch.setattr(kvfoundry, "generate", lambda *args, **kwargs: again.append(args[2]) or real(*args, **kwargs))
    evaluate(model, tokenizer, [TASK], ["fullkv"], out=tmp_path, resume=True)
    assert len(again) == 2 and not {prompts[0] for prompts in again} & {prompts[0] for prompts in asked}
    assert len(read_lines(tmp_path / RESULTS)) == 4


def test_a_failing_item_is_recorded_and_the_rest_goes_on(model, tokenizer, tmp_path, monkeypatch):
    real = kvfoundry.generate
    bad = TASK.items(tokenizer, True, 0)[1]

    def failing(model, tokenizer, prompts, **kwargs):
        if bad.prompt in prompts:
            raise RuntimeError("no memory")
        return real(model, tokenizer, prompts, **kwargs)

    monkeypatch.setattr(kvfoundry, "generate", failing)
    outcome = evaluate(model, tokenizer, [TASK], ["fullkv"], out=tmp_path, batch_size=2)
    lines = {line["item"]: line for line in read_lines(tmp_path / RESULTS)}
    assert outcome.failed == 1 and len(lines) == 4
    assert lines[bad.item]["error"] == "RuntimeError: no memory" and lines[bad.item]["score"] is None
    monkeypatch.setattr(kvfoundry, "generate", real)
    assert evaluate(model, tokenizer, [TASK], ["fullkv"], out=tmp_path, batch_size=2, resume=True).failed == 0


EVERY_KIND = [
    "fullkv", "streamingllm(budget=40)", "snapkv(budget=40, window=8)", "adakv(budget=0.3, window=8)",
    "h2o(budget=0.3)", "tova(budget=40)", "keydiff(budget=40)", "random(budget=40)", "kivi(bits=2)", "quest(budget=32)",
    "snapkv(budget=40, window=8)+weighted_merge()", "kvzip(budget=40)",
]  # fmt: skip


def test_batches_give_what_single_items_give(model, tokenizer, tmp_path):
    """Answers, scores and kept rows are the same; bytes are those of the batch, padding of its shorter prompts too."""
    task = NeedleTask(lengths=(90, 120), depths=(0.0, 50.0, 100.0), max_new_tokens=3)
    for folder, batch_size in (("one", 1), ("many", 4)):
        evaluate(model, tokenizer, [task], EVERY_KIND, out=tmp_path / folder, batch_size=batch_size)
    one, many = timeless(tmp_path / "one" / RESULTS), timeless(tmp_path / "many" / RESULTS)
    assert len(one) == 6 * len(EVERY_KIND)
    for single, batched in zip(one, many, strict=True):
        for name in ("stored_bytes", "peak_bytes"):
            assert batched.pop(name) == pytest.approx(single.pop(name), rel=0.35), single["method"]
        assert single == batched


def test_answers_of_a_batch_are_as_long_as_alone(model, tokenizer, tmp_path):
    """Items that may answer at length do not lengthen the answers of others."""

    class Mixed(NeedleTask):
        def items(self, *args):
            items = super().items(*args)
            return [replace(item, max_new_tokens=2 + 3 * (number % 2)) for number, item in enumerate(items)]

    task = Mixed(lengths=(90, 120), depths=(0.0, 100.0))
    evaluate(model, tokenizer, [task], ["fullkv"], out=tmp_path, batch_size=4)
    assert sorted(line["new_tokens"] for line in read_lines(tmp_path / RESULTS)) == [2, 2, 5, 5]


def test_methods_together_give_what_each_gives_alone_and_some_prompts_are_timed(model, tokenizer, tmp_path):
    methods, settings = ["fullkv", "streamingllm", "h2o(window=8)"], {"budgets": [64, 0.5], "batch_size": 2}
    evaluate(model, tokenizer, [TASK], methods, out=tmp_path / "alone", **settings)
    evaluate(model, tokenizer, [TASK], methods, out=tmp_path / "both", together=5, timed=1, **settings)
    sized = {"stored_bytes", "peak_bytes", "full_bytes"}  # a prompt that is timed is in no batch

    def answers(folder):
        return [{name: value for name, value in line.items() if name not in sized} for line in timeless(folder)]

    assert answers(tmp_path / "both" / RESULTS) == answers(tmp_path / "alone" / RESULTS)
    lines = read_lines(tmp_path / "both" / RESULTS)
    timed = {(line["item"], line["method"]) for line in lines if line["ttft_seconds"] is not None}
    assert len(timed) == 5 and len({item for item, _ in timed}) == 1
    assert all(line["ms_per_token"] is not None for line in lines if line["ttft_seconds"] is not None)
    again = evaluate(
        model, tokenizer, [TASK], methods, out=tmp_path / "both", together=5, timed=1, resume=True, **settings
    )
    assert len(again.board) == 5 and all(row["ttft_seconds"] > 0 for row in again.board)


def test_a_batch_that_memory_does_not_hold_is_asked_in_halves(model, tokenizer, tmp_path, monkeypatch):
    real, sizes = kvfoundry.generate_together, []

    def small(model, tokenizer, prompts, *rest, **options):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, tokenizer, prompts, *rest, **options)

    monkeypatch.setattr(kvfoundry, "generate_together", small)
    task = NeedleTask(lengths=(120,), depths=(0.0, 50.0, 100.0), max_new_tokens=3)
    methods = ["fullkv", "streamingllm(budget=64)"]
    outcome = evaluate(model, tokenizer, [task], methods, out=tmp_path, batch_size=3, together=2)
    assert sizes == [3, 1, 2, 1, 1] and outcome.failed == 0
    assert len(read_lines(tmp_path / RESULTS)) == 6 and not any(
        line["notes"] for line in read_lines(tmp_path / RESULTS)
    )


def test_prompts_are_kept_with_their_ends(finished, tokenizer):
    prompts = read_run(finished[0]).prompts
    assert [prompt["item"] for prompt in prompts] == [item.item for item in TASK.items(tokenizer, True, 0)]
    for prompt in prompts:
        assert len(prompt["head_sizes"]) == prompt["prompt_tokens"] and sum(prompt["head_sizes"]) == len(prompt["head"])
        assert hash_ids(tokenizer(prompt["head"])["input_ids"]) == prompt["prompt_hash"]


def test_items_of_one_name_are_refused(model, tokenizer, tmp_path):
    with pytest.raises(TaskError, match="occurs 2 times"):
        evaluate(model, tokenizer, [TASK, TASK], ["fullkv"], out=tmp_path)


def test_progress_counts_to_the_end(model, tokenizer, tmp_path):
    seen = []
    evaluate(model, tokenizer, [TASK], ["fullkv"], out=tmp_path, on_progress=seen.append)
    assert [state.done for state in seen] == [1, 2, 3, 4] and {state.total for state in seen} == {4}
    assert seen[-1].seconds_left == 0


def test_arms_cross_methods_with_budgets_once():
    assert [str(arm) for arm in expand_arms(["fullkv", "snapkv", "fullkv"], [128, 0.5])] == [
        "fullkv", "snapkv(budget=128)", "snapkv(budget=0.5)",
    ]  # fmt: skip
    assert [str(arm) for arm in expand_arms(["snapkv(window=16, budget=32)"], [64])] == ["snapkv(budget=64, window=16)"]
    with pytest.raises(SpecError, match="budget must be given"):
        expand_arms(["snapkv"])
    with pytest.raises(KVFoundryError, match="no method"):
        expand_arms([])


def test_limit_spreads_over_the_grid():
    assert spread(list(range(10)), 3) == [0, 3, 6]
    assert spread([1, 2], 5) == [1, 2] and spread([1, 2], None) == [1, 2]


def test_refusals_come_before_anything_is_written(model, tokenizer, tmp_path):
    out = tmp_path / "out"

    def run(task=TASK, methods=("fullkv",), **more):
        evaluate(model, tokenizer, [task], methods, out=out, **more)

    with pytest.raises(KVFoundryError, match=r"has \d+ tokens and asks for 24 more, but the model is limited to 512"):
        run(NeedleTask(lengths=(510,), depths=(0.0,)))
    with pytest.raises(TaskError, match="limit 0 leaves no items"):
        run(limit=0)
    with pytest.raises(TaskError, match="batch size 0"):
        run(batch_size=0)
    with pytest.raises(SpecError, match="unknown method 'nope'"):
        run(methods=["nope"])
    with pytest.raises(TaskError, match="no items"):
        evaluate(model, tokenizer, [], ["fullkv"], out=out)
    assert not out.exists()


def test_existing_results_and_changed_arguments_are_refused(finished, model, tokenizer):
    before = (finished[0] / RESULTS).read_bytes()
    with pytest.raises(DataError, match="already holds results"):
        evaluate(model, tokenizer, [TASK], ["fullkv"], out=finished[0])
    with pytest.raises(DataError, match=r"methods was .* and is now"):
        evaluate(model, tokenizer, [TASK], ["fullkv"], out=finished[0], resume=True, arguments={"model": "tiny"})
    assert (finished[0] / RESULTS).read_bytes() == before


def test_chat_template_is_asked_of_a_tokenizer_without_one(model, tokenizer, tmp_path):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(KVFoundryError, match="no chat template; use --no-chat"):
        evaluate(model, bare, [TASK], ["fullkv"], out=tmp_path, chat=True)
    evaluate(model, bare, [TASK], ["fullkv"], out=tmp_path)
    assert json.loads((tmp_path / META).read_text())["arguments"]["chat"] is False
