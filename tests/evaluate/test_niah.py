"""The needle grid: lengths in the model's own tokens, needles and question that always stay."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.needles import KINDS
from kvfoundry.evaluate.tasks.niah import NeedleTask, insert_at_depths, truncate_middle


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
