"""The demo's two parts on a tiny model, and the reuse of one document's cache."""

import json

import pytest

from kvfoundry.demo import BUDGETS, METHODS, document_questions, run_demo
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.results import REPORT, RESULTS, read_lines
from kvfoundry.evaluate.reuse import common_prefix, compare_reuse
from kvfoundry.evaluate.tasks.niah import NeedleTask


def test_demo_compares_four_methods_at_two_budgets(model, tokenizer, tmp_path):
    tasks = (NeedleTask(lengths=(300,), depths=(50.0,), max_new_tokens=2),)
    result = run_demo(model, tokenizer, tmp_path, name="tiny", tasks=tasks, document_tokens=120)
    assert "<dt>model</dt><dd>tiny</dd>" in result.outcome.report.read_text()
    methods = {line["method"] for line in read_lines(tmp_path / RESULTS)}
    assert len(METHODS) >= 5 and len(methods) == 1 + (len(METHODS) - 1) * len(BUDGETS)
    assert result.outcome.failed == 0 and (tmp_path / REPORT).exists()
    assert json.loads((tmp_path / "reuse.json").read_text())[0]["questions"] == 3
    assert (
        result.reuse[0].same_answers == 3
    )  # the full cache forgets nothing, so a fork answers as a fresh reading does


def test_questions_share_their_document_and_ask_different_things(tokenizer):
    prompts, answers = document_questions(tokenizer, tokens=200, seed=0)
    assert len(set(prompts)) == 3 and len({answer for (answer,) in answers}) == 3
    encoded = [encode_prompt(tokenizer, prompt, True) for prompt in prompts]
    assert common_prefix(encoded) > 200
    for prompt in prompts:
        for (answer,) in answers:
            assert prompt.count(answer) == 1


@pytest.mark.parametrize("method", ["fullkv", "snapkv(budget=40, window=8)", "h2o(budget=40, window=8)"])
def test_a_fork_leaves_the_document_as_it_was(model, tokenizer, method):
    prompts, answers = document_questions(tokenizer, tokens=120, seed=1)
    once = compare_reuse(model, tokenizer, method, prompts, answers, chat=True, max_new_tokens=4)
    swapped = compare_reuse(model, tokenizer, method, prompts[::-1], answers[::-1], chat=True, max_new_tokens=4)
    assert once.stored_bytes == swapped.stored_bytes
    assert once.document_tokens == swapped.document_tokens
    assert once.same_answers == swapped.same_answers


def test_prompts_without_a_shared_start_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="begin with the same document"):
        compare_reuse(model, tokenizer, "fullkv", ["one"], [("x",)], chat=False)


@pytest.mark.parametrize(
    ("sequences", "length"), [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2, 3]], 2), ([[1], [2]], 0), ([[5, 6]], 2)]
)
def test_common_prefix(sequences, length):
    assert common_prefix(sequences) == length
