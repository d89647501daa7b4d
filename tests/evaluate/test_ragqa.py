"""Questions over passages: our own set, files of three forms, and the command on a tiny model."""

import hashlib
import json

import pytest

from kvfoundry.cli import main
from kvfoundry.errors import DataError
from kvfoundry.evaluate.prompts import hidden_tokens
from kvfoundry.evaluate.results import META, RESULTS, read_lines
from kvfoundry.evaluate.scores import extra
from kvfoundry.evaluate.scores.words import normal_form
from kvfoundry.evaluate.tasks import ragqa
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.ragqa import EXAMPLE, PROMPT, RagTask
from kvfoundry.evaluate.tasks.ragqa_data import Passage, load_ragqa

SAMPLE = {
    "id": "a", "question": "Who saw the roof?", "answers": ["the river", "river"],
    "ctxs": [{"title": "Roof", "text": "The river saw the roof.", "gold": True}, {"title": "", "text": "The mail."}],
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1", "question": "Who saw the roof?", "answer": "river", "answer_aliases": ["the river"],
    "paragraphs": [
        {"title": "Roof", "paragraph_text": "The river saw the roof.", "is_supporting": True},
        {"title": "Mail", "paragraph_text": "The mail came.", "is_supporting": False},
    ],
}  # fmt: skip
HOTPOT = {
    "_id": "h", "question": "Who saw the roof?", "answer": "river", "supporting_facts": [["Roof", 0]],
    "context": [["Roof", ["The river saw it.", " The roof leaked."]], ["Mail", ["The mail came."]]],
}  # fmt: skip


def saved(tmp_path, *records, name="data.json"):
    path = tmp_path / name
    path.write_text(json.dumps(list(records)))
    return path


# --- our own set ------------------------------------------------------------------------------------------------------


def holds(text, answer):
    return f" {normal_form(answer)} " in f" {normal_form(text)} "


def test_our_own_set_can_be_answered_from_its_gold_passages_and_from_no_others():
    samples = load_ragqa().samples
    assert len(samples) >= 40 and sum(sample.hops == 2 for sample in samples) >= 12
    assert len({sample.item for sample in samples}) == len({sample.question for sample in samples}) == len(samples)
    for sample in samples:
        assert 4 <= len(sample.passages) <= 8 and sample.hops in (1, 2), sample.item
        assert all(60 <= len(passage.text.split()) <= 150 for passage in sample.passages), sample.item
        assert len({passage.title for passage in sample.passages}) == len(sample.passages), sample.item
        assert all(len(answer.split()) <= 5 for answer in sample.answers), sample.item
        with_answer = [
            passage for passage in sample.passages
            if any(holds(f"{passage.title}. {passage.text}", answer) for answer in sample.answers)
        ]  # fmt: skip
        assert with_answer and all(passage.gold for passage in with_answer), sample.item
        # The passage that the question names leads to a second one: neither is enough.
        assert len(with_answer) == 1 or sample.hops == 2, sample.item


def test_the_gold_passages_of_two_hops_are_linked():
    for sample in load_ragqa().samples:
        if sample.hops == 2:
            first, second = (passage for passage in sample.passages if passage.gold)
            names = {word for word in second.title.split() if word[0].isupper()} - {"The"}
            back = {word for word in first.title.split() if word[0].isupper()} - {"The"}
            assert any(name in first.text for name in names) or any(name in second.text for name in back), sample.item


def test_answers_do_not_sit_in_one_place():
    places = [
        next(number for number, passage in enumerate(sample.passages) if passage.gold) / (len(sample.passages) - 1)
        for sample in load_ragqa().samples
        if sample.hops == 1
    ]
    assert min(places) == 0.0 and max(places) == 1.0 and 0.3 < sum(places) / len(places) < 0.7


def test_the_wording_is_a_version():
    assert (PROMPT, hashlib.sha256(EXAMPLE.encode()).hexdigest()[:16]) == ("kvfoundry-1", "f2588c19af86d007")


# --- files ------------------------------------------------------------------------------------------------------------


def test_three_forms_say_the_same(tmp_path):
    ours, musique, hotpot = load_ragqa(saved(tmp_path, SAMPLE, MUSIQUE, HOTPOT)).samples
    assert [sample.item for sample in (ours, musique, hotpot)] == ["a", "2hop__1", "h"]
    assert ours.answers == ("the river", "river") and ours.hops == musique.hops == hotpot.hops == 1
    assert ours.passages == (Passage("Roof", "The river saw the roof.", True), Passage("", "The mail."))
    assert musique.answers == ("river", "the river") and musique.passages[1] == Passage("Mail", "The mail came.", False)
    assert hotpot.answers == ("river",) and hotpot.passages[0].text == "The river saw it. The roof leaked."


def test_answers_in_lists_and_samples_without_name(tmp_path):
    (sample,) = load_ragqa(saved(tmp_path, SAMPLE | {"id": None, "answers": [["river", "x"], "roof"]})).samples
    assert (sample.item, sample.answers) == ("1", ("river", "roof"))
    unmarked = SAMPLE | {"ctxs": [{"title": "Roof", "text": "A roof."}]}
    assert load_ragqa(saved(tmp_path, unmarked)).samples[0].hops is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"question": " "}, "record 2 (b) has no question"),
        ({"answers": []}, "(b) has no answer in text"),
        ({"answers": [3]}, "has no answer in text"),
        ({"answers": [[]]}, "in no known form (IndexError"),
        ({"answers": "river"}, "in no known form (TypeError: a str where a list belongs)"),
        ({"ctxs": []}, "has no passages under"),
        ({"ctxs": [{"title": "Roof"}]}, "in no known form (KeyError: 'text')"),
        ({"ctxs": [{"text": "The roof."}, {"title": "", "text": " "}]}, "has no text in passage 2"),
        ({"ctxs": [{"title": 3, "text": "The roof."}]}, "has no text in passage 1"),
        ({"ctxs": ["The roof."]}, "in no known form (AttributeError"),
    ],
)
def test_a_bad_sample_is_named_by_its_id(tmp_path, changes, fault):
    path = saved(tmp_path, SAMPLE, SAMPLE | {"id": "b"} | changes)
    with pytest.raises(DataError) as caught:
        load_ragqa(path)
    assert fault in str(caught.value) and "--skip-damaged" in str(caught.value)
    data = load_ragqa(path, skip_damaged=True)
    assert [sample.item for sample in data.samples] == ["a"] and fault in data.damaged[0]


# --- the task ---------------------------------------------------------------------------------------------------------


def test_items(tmp_path, tokenizer):
    task = RagTask(load_ragqa(saved(tmp_path, SAMPLE)))
    (item,) = task.items(tokenizer, True, 0)
    assert item.prompt.endswith("Roof: The river saw the roof.\n\nThe mail.\n\nQuestion: who saw the roof?\nAnswer:")
    assert item.chat is False and item.line_ends and item.cell == {"passages": 2, "hops": 1}
    assert 0 < hidden_tokens(tokenizer, item, True) < 10
    assert RagTask(task.data, chat=True).items(tokenizer, True, 0)[0].chat is None
    with pytest.raises(TaskError, match="at least 1"):
        RagTask(task.data, max_new_tokens=0)


def test_scores(tmp_path, tokenizer):
    task = RagTask(load_ragqa(saved(tmp_path, SAMPLE)))
    (item,) = task.items(tokenizer, False, 0)
    assert task.score(item, " The river.\n\nQuestion: who") == (1.0, True)
    assert task.score(item, " the wide river") == (pytest.approx(2 / 3), False)
    pytest.importorskip("rouge_score")
    more = task.more_scores(item, " the wide river\nroof roof roof")
    assert more == {"f1": pytest.approx(2 / 3), "exact_match": 0.0, "rouge_l": pytest.approx(0.8)}


def test_without_the_extra_only_rouge_is_missing(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(ragqa, "is_installed", lambda module: False)
    task = RagTask(load_ragqa(saved(tmp_path, SAMPLE)))
    (item,) = task.items(tokenizer, False, 0)
    assert task.more_scores(item, "river") == {"f1": 1.0, "exact_match": 1.0}
    assert task.settings()["rouge_l"] is False


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys):
    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_command_on_our_own_set(call, model_folder, tmp_path):
    status, _, err = call("eval", "ragqa", "--limit", 2, "--model", model_folder, "--out", tmp_path / "out")
    assert status == 0, err
    assert [line["item"] for line in read_lines(tmp_path / "out" / RESULTS)] == ["one-01", "one-20"]
    record = json.loads((tmp_path / "out" / META).read_text())["arguments"]["tasks"][0]
    assert record["data"] == "kvfoundry" and record["samples"] == len(load_ragqa().samples)


def test_the_command_on_a_file(call, model_folder, tmp_path):
    path = saved(tmp_path, SAMPLE, MUSIQUE, HOTPOT, SAMPLE | {"id": "torn", "answers": []})
    arguments = ["eval", "ragqa", "--data", path, "--model", model_folder, "--method", "snapkv(window=8)",
                 "--budget", "16", "--out", tmp_path / "out"]  # fmt: skip
    status, _, err = call(*arguments)
    assert status == 2 and "(torn) has no answer" in err and err.count("\n") == 1
    status, out, err = call(*arguments, "--skip-damaged", "--hide-question", "--json")
    assert status == 0 and "note: 1 damaged record of" in err
    (row,) = json.loads(out)["rows"]
    assert row["items"] == 3 and row["f1"] == row["score"] and row["exact_match"] == row["exact"]
    assert row["ttft_seconds"] > 0
    lines = read_lines(tmp_path / "out" / RESULTS)
    assert {line["item"] for line in lines} == {"a", "2hop__1", "h"} and all(line["hops"] == 1 for line in lines)
    assert json.loads((tmp_path / "out" / META).read_text())["arguments"]["tasks"][0]["prompt"] == "kvfoundry-1"


def test_samples_that_are_too_long_are_left_out_on_demand(call, model_folder, tmp_path):
    long = SAMPLE | {"id": "long", "ctxs": [{"title": "Roof", "text": "the roof " * 400}]}
    arguments = ["eval", "ragqa", "--data", saved(tmp_path, SAMPLE, long), "--model", model_folder]
    status, _, err = call(*arguments, "--out", tmp_path / "refused")
    assert status == 2 and "prompt long of ragqa" in err
    status, _, err = call(*arguments, "--out", tmp_path / "out", "--skip-damaged")
    assert status == 0 and "1 too long record of" in err and "sample long has" in err
    assert [line["item"] for line in read_lines(tmp_path / "out" / RESULTS)] == ["a"]
    status, _, err = call("eval", "ragqa", "--data", saved(tmp_path, long), "--skip-damaged",
                          "--model", model_folder, "--out", tmp_path / "empty")  # fmt: skip
    assert status == 2 and "no sample of" in err


def test_a_missing_extra_is_said_once(call, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    monkeypatch.setattr(ragqa, "is_installed", lambda module: False)
    status, _, err = call(
        "eval", "ragqa", "--data", saved(tmp_path, SAMPLE), "--model", model_folder, "--out", tmp_path / "out"
    )
    assert status == 0 and err.count("no ROUGE-L without the extra eval") == 1
    assert all("rouge_l" not in line for line in read_lines(tmp_path / "out" / RESULTS))
