"""Known answers of the needle metric: empty 0, exact 1, unrelated 0, part of it a part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfoundry.evaluate.metrics import contains_answer, recovered_share, score_answers, words_of


@pytest.mark.parametrize(
    ("answer", "prediction", "share", "exact"),
    [
        ("tiger", "", 0.0, False),
        ("tiger", "It is a Tiger.", 1.0, True),
        ("tiger", "It is a tigers' den.", 0.0, False),
        ("tiger", "a panther", 0.0, False),
        ("1234567", "The number is 1234567.", 1.0, True),
        ("1234567", "1,234,567", 1.0, True),
        ("1234567", "1234", 4 / 7, False),
        ("1234567", "It is 123 or so", 3 / 7, False),
        ("1234567", "9994567", 4 / 7, False),
        ("1234567", "9", 0.0, False),
        ("1234567", "7 apples", 0.0, False),  # one of seven digits is chance
        ("1234567", "12345678", 6 / 7, False),  # inside a longer number is not the number
        ("7", "7 apples", 1.0, True),
        ("ride a red tram", "You can ride a red tram there.", 1.0, True),
        ("ride a red tram", "Take a red tram", 2 / 3, False),  # articles do not count: ride, red, tram
        ("ride a red tram", "Ride the red tram", 1.0, False),
        ("ride a red tram", "a the an", 0.0, False),
        ("ÉCOLE", "école", 1.0, True),
    ],
)
def test_known_answers(answer, prediction, share, exact):
    assert recovered_share(answer, prediction) == pytest.approx(share)
    assert contains_answer(answer, prediction) is exact


def test_several_references_are_all_asked_for():
    assert score_answers(["tiger", "camel"], "a tiger and a camel") == (1.0, True)
    assert score_answers(["tiger", "camel"], "a tiger") == (0.5, False)
    assert score_answers(["1234567", "camel"], "123456 camel") == (pytest.approx((6 / 7 + 1) / 2), False)


@given(st.text(), st.text())
def test_bounds_and_exact_means_one(answer, prediction):
    share = recovered_share(answer, prediction)
    assert 0.0 <= share <= 1.0
    if contains_answer(answer, prediction):
        assert share == 1.0


@given(st.integers(10**6, 10**7 - 1), st.integers(0, 7))
def test_losing_digits_from_the_end_lowers_the_score_step_by_step(number, kept):
    answer = str(number)
    expected = 0.0 if kept < 2 else kept / 7
    assert recovered_share(answer, answer[:kept]) == pytest.approx(expected)


def test_words_keep_decimals_apart_from_thousands():
    assert words_of("1,234 and 12,34") == ["1234", "and", "12", "34"]
