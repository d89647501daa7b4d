"""Fidelity: zero for the full cache, the model's own numbers for perplexity, and a method that has really acted."""

import math

import pytest
import torch

from kvfoundry.errors import DataError
from kvfoundry.evaluate.fidelity import compare, force
from kvfoundry.evaluate.prompts import encode_item
from kvfoundry.evaluate.results import RESULTS, read_lines
from kvfoundry.evaluate.runner import evaluate
from kvfoundry.evaluate.summary import summarise
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.fidelity import FidelityTask

SNAPKV = "snapkv(budget=24, window=8)"


@pytest.fixture
def text(model):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(6, model.config.vocab_size, (1, 90), generator=generator)


def forced(model, tokenizer, ids, *arguments, **more):
    return force(model, tokenizer, ids, torch.ones_like(ids), *arguments, **more)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_the_full_cache_says_what_the_model_says(model, tokenizer, text, piece):
    with torch.no_grad():
        own = model(text).logits[0, -30:].float()
    found = forced(model, tokenizer, text, 30, piece=piece)
    torch.testing.assert_close(found.logits[0], own, rtol=0, atol=1e-4)
    nll = torch.nn.functional.cross_entropy(own[:-1], text[0, -29:])
    fidelity = compare(own, found.logits[0], text[0, -30:])
    assert fidelity.nll == pytest.approx(float(nll), abs=1e-5) and fidelity.full_nll == pytest.approx(fidelity.nll)
    assert fidelity.kl == pytest.approx(0, abs=1e-6) and fidelity.agreement == 1.0


def test_the_method_acts_on_the_prefix_alone(model, tokenizer, text):
    found = forced(model, tokenizer, text, 30, SNAPKV)
    full = forced(model, tokenizer, text, 30)
    assert [row.rows for row in found.kept] == [24] and found.stored_bytes < full.stored_bytes
    assert full.profiles == [None] and len(found.profiles[0]) == 90 and found.profiles[0].endswith("9" * 30)
    other = text.clone()
    other[0, -1] = 7  # the last token forced moves nothing before it
    assert torch.equal(forced(model, tokenizer, other, 30, SNAPKV).logits[:, :-1], found.logits[:, :-1])


def test_a_batch_equals_its_rows(model, tokenizer, text):
    short = text[:, 20:]
    ids = torch.cat([text, torch.cat([torch.full((1, 20), 1), short], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    together = force(model, tokenizer, ids, mask, 30, SNAPKV).logits
    for row, alone in enumerate((text, short)):
        by_itself = forced(model, tokenizer, alone, 30, SNAPKV).logits[0]
        torch.testing.assert_close(together[row], by_itself, rtol=0, atol=1e-5)


def test_by_hand():
    full = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    found = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    fidelity = compare(full, found, torch.tensor([0, 1]))
    assert fidelity.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert fidelity.agreement == 0.5
    assert fidelity.nll == pytest.approx(math.log(2)) and fidelity.full_nll == pytest.approx(math.log(4))


@pytest.mark.parametrize(("rest", "piece"), [(0, 1), (90, 1), (10, 0)])
def test_impossible_divisions(model, tokenizer, text, rest, piece):
    with pytest.raises(ValueError, match="no prompt"):
        forced(model, tokenizer, text, rest, piece=piece)


def test_a_run_writes_a_line_per_stretch(model, tokenizer, tmp_path):
    task = FidelityTask(prefix=60, rest=20, count=3)
    outcome = evaluate(model, tokenizer, [task], ["fullkv", SNAPKV], out=tmp_path, batch_size=2)
    lines = read_lines(tmp_path / RESULTS)
    assert outcome.failed == 0 and len(lines) == 6
    for line in lines:
        assert 78 <= line["prompt_tokens"] <= 80 and line["new_tokens"] == 20 and line["rest"] == 20
        for text in (*line["references"], line["prediction"]):
            assert len(tokenizer(text)["input_ids"]) == 20
        assert line["perplexity"] == pytest.approx(math.exp(line["nll"]))
        full = line["method"] == "fullkv"
        assert (line["kl"] == 0) == full and (line["nll"] == line["full_nll"]) == full
        assert line["score"] == 1.0 if full else 0 <= line["score"] <= 1
        assert line["kept_rows"] == (line["prompt_tokens"] - 20 if full else 24)
        assert line["stored_bytes"] <= line["full_bytes"] * 1.5
    rows = {row["method"]: row for row in summarise(lines)}
    assert rows["fullkv"]["kl"] == 0 < rows["snapkv(budget=24, window=8)"]["kl"]
    alone = tmp_path / "alone"
    evaluate(model, tokenizer, [task], [SNAPKV], out=alone)
    ours = {line["item"]: line["kl"] for line in read_lines(alone / RESULTS)}
    assert ours == pytest.approx({line["item"]: line["kl"] for line in lines if line["method"] != "fullkv"}, abs=1e-6)


def test_stretches_of_a_file_follow_each_other(tokenizer, tmp_path):
    words = [f"the river rose above step {number}." for number in range(100)]
    (tmp_path / "t.txt").write_text(" ".join(words))
    task = FidelityTask(text=tmp_path / "t.txt", prefix=40, rest=10, count=5)
    items = task.items(tokenizer, True, 0)
    assert " ".join(words).startswith("".join(item.prompt for item in items))
    assert all(len(encode_item(tokenizer, item, True)) == 50 and item.chat is False for item in items)
    with pytest.raises(TaskError, match="ends in item 15 of 20"):
        FidelityTask(text=tmp_path / "t.txt", prefix=40, rest=10, count=20).items(tokenizer, True, 0)
    with pytest.raises(DataError, match="cannot be read"):
        FidelityTask(text=tmp_path / "none.txt").items(tokenizer, True, 0)


def test_generated_text_has_the_length_and_the_seed(tokenizer):
    task = FidelityTask(prefix=300, rest=100, count=2)
    items = task.items(tokenizer, True, 0)
    assert all(398 <= len(encode_item(tokenizer, item, True)) <= 400 for item in items)
    assert items == task.items(tokenizer, True, 0)
    assert len({item.prompt for seed in (0, 1) for item in task.items(tokenizer, True, seed)}) == 4


@pytest.mark.parametrize("wrong", [{"count": 0}, {"prefix": 0}, {"rest": 1}, {"piece": 0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(TaskError):
        FidelityTask(**wrong)
