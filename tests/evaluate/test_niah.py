"""The needle grid: lengths in the model's own tokens, needles and question that always stay."""

import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfoundry.errors import MissingExtraError
from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks import needle_scores
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.needles import KINDS
from kvfoundry.evaluate.tasks.niah import NeedleTask
from kvfoundry.evaluate.tasks.placement import depth_grid, insert_at_depths, insert_at_tokens, truncate_middle


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("chat", [True, False])
def test_lengths_are_met_and_everything_asked_for_is_inside(tokenizer, kind, chat):
    task = NeedleTask(lengths=(150, 400), depths=(0, 50, 100), kind=kind, needles=2)
    items = task.items(tokenizer, chat, seed=0)
    assert [(item.cell["length"], item.cell["depth"]) for item in items] == [
        (n, d) for n in (150, 400) for d in (0, 50, 100)
    ]
    assert len({item.item for item in items}) == len(items)
    for item in items:
        tokens = len(encode_prompt(tokenizer, item.prompt, chat))
        assert item.cell["length"] - 45 < tokens <= item.cell["length"]
        assert len(item.references) == len(set(item.references)) == 2
        for answer in item.references:
            assert item.prompt.count(answer) == 1
        assert item.prompt.rstrip().endswith(("?", "."))
        assert "Question: " in item.prompt


def test_depth_moves_the_needle_through_the_same_text(tokenizer):
    places = []
    texts = set()
    for item in NeedleTask(lengths=(400,), depths=(0, 25, 50, 75, 100)).items(tokenizer, False, seed=1):
        context = item.prompt.split("\n\nQuestion: ")[0].split("at the end.\n\n")[1]
        places.append(context.index(item.references[0]) / len(context))
        needle = next(
            sentence for sentence in context.replace("\n\n", " ").split(". ") if item.references[0] in sentence
        )
        texts.add(context.replace(needle, "")[:60] if places[-1] > 0.5 else context[-60:])
    assert places == sorted(places)
    for place, wanted in zip(places, (0, 0.25, 0.5, 0.75, 1), strict=True):
        assert abs(place - wanted) < 0.12


def test_same_seed_same_items_other_seed_other_items(tokenizer):
    task = NeedleTask(lengths=(200,), depths=(50,), repeats=2)
    first, again, other = (task.items(tokenizer, True, seed) for seed in (0, 0, 1))
    assert first == again
    assert [item.prompt for item in first] != [item.prompt for item in other]
    assert first[0].prompt != first[1].prompt


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 900))
def test_middle_truncation_keeps_head_and_tail(sizes, budget):
    head, tail = truncate_middle(sizes, budget)
    kept = sizes[:head] + sizes[len(sizes) - tail :]
    assert sum(kept) <= budget or not kept
    assert head + tail <= len(sizes)
    if sum(sizes) <= budget:
        assert kept == sizes
    else:
        assert tail <= head <= tail + 1
        following = sizes[head] if head <= tail else sizes[-1 - tail]
        assert sum(kept) + following > budget  # nothing more fits


def test_needles_at_one_boundary_keep_their_order():
    assert insert_at_depths([" a.", " b."], [5, 5], [(100, "x"), (100, "y"), (0, "z"), (50, "w")]) == "z a. w b. x y"


def test_folder_haystack_is_cut_in_the_middle_and_too_little_text_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"Number {index} was {index + 7} long." for index in range(200)))
    item = NeedleTask(lengths=(200,), depths=(50,), haystack=tmp_path).items(tokenizer, False, 0)[0]
    numbers = [int(word) for word in item.prompt.replace(".", "").split() if word.isdigit()][::2]
    jumps = [(after - before) % 200 for before, after in itertools.pairwise(numbers)]
    assert sum(jump != 1 for jump in jumps) == 1  # one cut, in the middle
    assert len(encode_prompt(tokenizer, item.prompt, False)) <= 200
    with pytest.raises(TaskError, match=r"holds .* tokens, too few for a prompt of 9000"):
        NeedleTask(lengths=(9000,), haystack=tmp_path).items(tokenizer, False, 0)


def test_haystack_that_holds_the_answers_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(f"They sold {', '.join(KINDS['word'].answers)}. " * 30)
    with pytest.raises(TaskError, match="another --kind"):
        NeedleTask(lengths=(200,), haystack=tmp_path).items(tokenizer, False, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": ()}, "no length"),
        ({"lengths": (0,)}, "length 0 is out of range"),
        ({"lengths": (-5,)}, "length -5 is out of range"),
        ({"depths": (101.0,)}, "depth 101 is out of range"),
        ({"depths": (-1.0,)}, "depth -1 is out of range"),
        ({"depths": (float("nan"),)}, "depth nan is out of range"),
        ({"depths": (50.0, 50.0)}, "given twice"),
        ({"kind": "wrod"}, "did you mean 'word'"),
        ({"needles": 0}, "0 needles are out of range"),
        ({"needles": 99}, "99 needles are out of range"),
        ({"repeats": 0}, "at least 1"),
        ({"placement": "stops"}, "did you mean 'stop'"),
        ({"scoring": "rogue"}, "did you mean 'rouge'"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(TaskError, match=message):
        NeedleTask(**wrong)


def test_length_below_the_question_is_refused(tokenizer):
    with pytest.raises(TaskError, match="length 20 is too short"):
        NeedleTask(lengths=(20,)).items(tokenizer, True, 0)


def test_distractors_are_facts_about_other_keys_with_other_answers(tokenizer) -> None:
    item = NeedleTask(lengths=(220,), depths=(50.0,), distractors=3).items(tokenizer, False, seed=1)[0]
    facts = item.prompt.split("Remember this: ")[1:]
    assert len(facts) == 4
    assert sum(item.references[0] in fact.split(".")[0] for fact in facts) == 1
    assert item.prompt.endswith(item.question)


def test_too_many_distractors_are_refused() -> None:
    with pytest.raises(TaskError, match="distractors"):
        NeedleTask(distractors=10)


@pytest.mark.parametrize("placement", ["stop", "token"])
@pytest.mark.parametrize("chat", [True, False])
def test_needles_at_tokens_fill_the_length_from_the_head_of_the_text(tokenizer, placement, chat):
    depths = (0, 33, 66, 100)
    task = NeedleTask(lengths=(300,), depths=depths, placement=placement)
    texts, places = set(), []
    for item in task.items(tokenizer, chat, seed=2):
        assert 300 - 2 <= len(encode_prompt(tokenizer, item.prompt, chat)) <= 300
        context = item.prompt.split("at the end.\n\n")[1].split("\n\nQuestion: ")[0]
        needle = re.search(r" ?Remember this: .* pet\.", context)
        assert item.references[0] in needle[0]
        before, after = context[: needle.start()], context[needle.end() :]
        texts.add((before + after).strip()[:900])
        places.append(needle.start() / len(context))
        if placement == "stop" and places[-1] > 0 and item.cell["depth"] < 100:
            assert before.endswith(".")
    assert len(texts) == 1 and places[0] == 0 and after == ""
    for place, depth in zip(places[1:3], depths[1:3], strict=True):
        off = depth / 100 - place
        assert -0.04 < off < (0.2 if placement == "stop" else 0.06)


def test_a_full_stop_that_is_glued_to_a_word_is_passed_over():
    text = "ab. cd . ef gh"
    spans = [(0, 3), (4, 6), (7, 8), (9, 11), (12, 14)]
    assert insert_at_tokens(text, spans, 5, [(90.0, "N")], to_stop=True) == "ab. cd . N ef gh"
    assert insert_at_tokens(text, spans, 5, [(50.0, "N")], to_stop=True) == "N ab. cd . ef gh"
    assert insert_at_tokens(text, spans, 5, [(50.0, "N")], to_stop=False) == "ab. cd N . ef gh"
    assert insert_at_tokens(text, spans, 2, [(100.0, "N")], to_stop=True) == "ab. cd N"
    assert insert_at_tokens(text, spans, 0, [(100.0, "N"), (0.0, "M")], to_stop=True) == "M N"


def test_depth_grids():
    assert depth_grid(5) == (0, 25, 50, 75, 100)
    assert depth_grid(10)[:4] == (0, 11, 22, 33)
    grid = depth_grid(11, "sigmoid")
    assert list(grid) == sorted(grid) and grid[0] == 0 and grid[-1] == 100 and grid[1] == 1.799 and grid[5] == 50


def test_rouge_scores_the_whole_needle(tokenizer):
    pytest.importorskip("rouge_score")
    task = NeedleTask(lengths=(200,), depths=(50,), scoring="rouge")
    (item,) = task.items(tokenizer, False, 0)
    (needle,) = item.references
    assert needle in item.prompt and needle.startswith("Remember this")
    assert task.score(item, needle) == (1.0, True)
    assert task.score(item, "") == (0.0, False)
    score, exact = task.score(item, needle.split(" keeps ")[1])
    assert 0 < score < 1 and not exact


def test_rouge_without_its_package_is_refused_early(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    needle_scores._scorer.cache_clear()
    with pytest.raises(MissingExtraError, match=r"kvfoundry\[eval\]"):
        NeedleTask(scoring="rouge")
