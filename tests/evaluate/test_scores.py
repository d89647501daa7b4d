"""Known answers of the published scores, and what holds for any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfoundry.errors import MissingExtraError
from kvfoundry.evaluate.scores import extra
from kvfoundry.evaluate.scores.answers import answer_f1, as_question, exact_match, given_answer
from kvfoundry.evaluate.scores.choices import classification, count, retrieval
from kvfoundry.evaluate.scores.code import code_sim
from kvfoundry.evaluate.scores.longbench import METRICS, NEEDED, bucket_of, by_length, first_line, published_form, score
from kvfoundry.evaluate.scores.rouge import rouge, rouge_l
from kvfoundry.evaluate.scores.words import normal_form, qa_f1, qa_f1_zh


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The North-West, a coast.", "northwest coast"),
        ("1,000 an hour", "1000 hour"),
        ("Theatre", "theatre"),  # an article is a whole word
        ("a-an the", "aan"),  # punctuation goes before articles
        (" \n the ", ""),
    ],
)
def test_normal_form(text, normal):
    assert normal_form(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answer", "value"),
    [
        ("a green boat", "The green boat!", 1.0),
        ("green", "green boat", 2 / 3),
        ("green green boat", "green boat", 0.8),
        ("red", "green", 0.0),
        ("", "", 0.0),
    ],
)
def test_f1_of_words(prediction, answer, value):
    assert qa_f1(prediction, answer) == pytest.approx(value)


def test_chinese_words():
    pytest.importorskip("jieba")
    assert qa_f1_zh("水稻。", "水稻") == 1.0
    assert qa_f1_zh("水稻", "小麦") == 0.0
    assert 0 < qa_f1_zh("他们种植水稻", "水稻") < 1


def test_rouge_counts_distinct_words_by_sentence():
    pytest.importorskip("rouge")
    assert rouge("boat boat boat", "boat") == pytest.approx(1, abs=1e-6)
    assert rouge("the sea. the land.", "the land. the sea.") == pytest.approx(1, abs=1e-6)
    assert rouge("", "the sea") == rouge("...", "the sea") == 0.0


def test_a_sentence_that_is_too_long_for_the_package_scores_nothing():
    pytest.importorskip("rouge")

    def apart(words):
        """Two sentences that share their first word."""
        return [" ".join(["the", *(f"{letter}{number}" for number in range(words))]) for letter in "ab"]

    assert rouge(*apart(50)) > 0.0
    assert rouge(*apart(520)) == 0.0


def test_stemming_rouge():
    pytest.importorskip("rouge_score")
    assert rouge_l("boats sailing", "boat sails") == pytest.approx(1)
    assert rouge_l("one two three", "three two one") == pytest.approx(1 / 3)


def test_classes_share_the_credit_and_a_part_of_the_truth_is_no_rival():
    classes = ["inner sea", "sea", "lake", "river"]
    assert classification("a lake", "lake", classes) == 1.0
    assert classification("lake or river", "lake", classes) == 0.5
    assert classification("the inner sea", "inner sea", classes) == 1.0
    assert classification("the inner sea", "sea", classes) == 0.5
    assert classification("Lake", "lake", classes) == classification("", "lake", classes) == 0.0


def test_the_name_behind_one_that_is_dropped_is_passed_over():
    """Of three parts of the truth the second stays a rival, as in the reference."""
    assert classification("old river mouth", "old river mouth", ["old", "river", "mouth", "old river mouth"]) == 0.5


def test_numbers():
    assert count("12 or 13", "12") == 0.5
    assert count("twelve", "12") == count("012", "12") == 0.0
    assert retrieval("Paragraph 4, not 5", "Paragraph 4") == 0.5
    with pytest.raises(ValueError, match="names no paragraph"):
        retrieval("4", "the fourth")


def test_code_lines():
    pytest.importorskip("rapidfuzz")
    assert code_sim("# why\n\n", "x = 1") == 0.0
    assert code_sim("```py\nx = 1\ny = 2", "x = 1") == 1.0
    assert code_sim("x = 2", "x = 1") == 0.8
    assert code_sim("a // b\nx", "x") == 1.0


def test_best_answer_and_first_line():
    assert first_line("\n\nboat\nsea") == "boat"
    assert score("qa_f1", "\nboat\nsea", ["land", "boat"], first_line_only=True) == 1.0
    assert score("qa_f1", "\nboat\nsea", ["land", "boat"]) == pytest.approx(2 / 3)
    assert score("qa_f1", "boat", []) == 0.0


def test_buckets_and_published_form():
    assert [bucket_of(length) for length in (0, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert by_length([1.0, 0.5, 0.25], [1, 2, 9000]) == {"0-4k": 75.0, "4-8k": None, "8k+": 25.0}
    assert published_form([1 / 3]) == 33.33 and published_form([]) is None


@pytest.mark.parametrize(
    ("prediction", "answer"),
    [
        ("\nboat\nsea", "boat"),
        ("Yes, it is", "Yes"),
        ("yesterday", "Yes"),
        ("  Nobody knows", "No"),
        ("It is no boat", "It is no boat"),
        ("\n", ""),
    ],
)
def test_given_answer(prediction, answer):
    assert given_answer(prediction) == answer


def test_short_answers():
    assert answer_f1("the green boat\nmore", "green boat") == 1.0 and exact_match("The green boat.", "green boat")
    assert answer_f1("green", "green boat") == pytest.approx(2 / 3) and not exact_match("green", "green boat")
    assert answer_f1("the", "a") == 1.0 and answer_f1("the", "boat") == 0.0
    assert as_question("Where is it") == "where is it?" and as_question("Who?") == "who?"


@given(st.text(), st.text(), st.sampled_from(["qa_f1", "count"]))
def test_scores_stay_in_bounds(prediction, answer, metric):
    assert 0.0 <= score(metric, prediction, [answer]) <= 1.0
    assert 0.0 <= answer_f1(prediction, answer) <= 1.0
    if exact_match(prediction, answer):
        assert answer_f1(prediction, answer) == 1.0


@pytest.mark.parametrize("module", sorted({module for modules in NEEDED.values() for module in modules}))
def test_a_missing_library_is_one_line_that_names_the_extra(module, monkeypatch):
    monkeypatch.setattr(extra.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"install the extra: pip install 'kvfoundry\[eval\]'"):
        extra.load(module)
    assert set(NEEDED) <= set(METRICS)
