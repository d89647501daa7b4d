"""Differences: paired by item, with an interval that knows noise from a difference."""

import numpy as np
import pytest
from made import line, lines, run_of

from kvfoundry.errors import DataError
from kvfoundry.evaluate.compare import compare_runs, comparison_csv, comparison_markdown, difference, pair


def test_pairs_need_the_same_item_seed_and_references():
    first = [line("m", "a", score=1.0), line("m", "b"), line("m", "c"), line("m", "d")]
    second = [
        line("m", "a", score=0.25), line("m", "b", references=["other"]), line("m", "c", seed=1),
        line("m", "d", score=None, error="no"), line("m", "e"),
    ]  # fmt: skip
    assert pair(first, second) == {"niah": [(1.0, 0.25)]}


def test_interval_against_the_closed_form():
    """Of many items the percentile interval is the mean plus and minus 1.96 standard errors."""
    rng = np.random.default_rng(3)
    gains = rng.normal(0.05, 0.3, 900)
    found = difference({"t": [(0.5, 0.5 + gain) for gain in gains]})
    error = 1.96 * gains.std() / 30
    assert found.mean == pytest.approx(gains.mean())
    assert found.low == pytest.approx(gains.mean() - error, abs=0.1 * error)
    assert found.high == pytest.approx(gains.mean() + error, abs=0.1 * error)
    assert found.verdict == "better"


def test_intervals_cover_the_truth_as_often_as_they_say():
    """200 samples of 40 items around a true difference of 0.1: about 95 in 100 intervals hold it."""
    rng = np.random.default_rng(5)
    holds = 0
    for _ in range(200):
        found = difference({"t": [(0.0, gain) for gain in rng.normal(0.1, 0.4, 40)]})
        holds += found.low <= 0.1 <= found.high
    assert 180 <= holds <= 198


def test_every_task_weighs_the_same():
    pairs = {"long": [(0.0, 1.0)] * 90, "short": [(1.0, 0.0)] * 10}
    found = difference(pairs)
    assert found.mean == 0 and found.first == 0.5 and found.second == 0.5 and found.items == 100


@pytest.mark.parametrize(
    ("pairs", "verdict", "reason"),
    [
        ([(1.0, 1.0)] * 9, "equal", "equal on all 9 items"),
        ([(1.0, 0.0)] * 5 + [(1.0, 1.0)], "noise", "noise: only 5 of 6 items differ, at least 6 must"),
        ([(1.0, 0.0)] * 6, "worse", "worse: 95 % interval -1.000 to -1.000, 6 items"),
        ([(0.0, 1.0)] * 8, "better", "better"),
        ([(0.0, 1.0), (1.0, 0.0)] * 10, "noise", "noise: 95 % interval"),
    ],
)
def test_verdicts(pairs, verdict, reason):
    found = difference({"t": pairs})
    assert found.verdict == verdict and found.reason.startswith(reason)


def test_same_seed_same_interval():
    pairs = {"t": [(0.0, float(number % 3)) for number in range(30)]}
    assert difference(pairs, seed=1) == difference(pairs, seed=1) != difference(pairs, seed=2)
    assert difference({}) is None


def test_long_tasks_are_drawn_in_blocks():
    found = difference({"t": [(0.0, 1.0), (1.0, 0.0)] * 2500})
    assert found.mean == 0 and found.high == pytest.approx(1.96 / 5000**0.5, rel=0.1)


def test_two_runs():
    first = run_of(*lines("fullkv", [1.0] * 8), *lines("snapkv(budget=8)", [1.0] * 8), *lines("old", [0.0] * 8))
    second = run_of(*lines("fullkv", [1.0] * 8), *lines("snapkv(budget=8)", [0.0] * 8), model="other", chat=True)
    made = compare_runs(first, second)
    assert [(row.first, row.second, row.difference.verdict) for row in made.rows] == [
        ("fullkv", "fullkv", "equal"), ("snapkv(budget=8)", "snapkv(budget=8)", "worse"),
    ]  # fmt: skip
    assert made.remarks == ["model is tiny in A and other in B", "chat is None in A and True in B", "only in A: old"]
    assert comparison_csv(made).splitlines()[1].startswith("niah,fullkv,fullkv,8,1.0,1.0,0.0,")
    assert "| `snapkv(budget=8)` | `snapkv(budget=8)` | 8 | 1.000 | 0.000 | -1.000 |" in comparison_markdown(made)


def test_runs_without_a_method_in_common_are_crossed_and_a_mean_over_tasks_is_added():
    first = run_of(*lines("a", [1.0] * 7, "x"), *lines("a", [1.0] * 7, "y"))
    second = run_of(*lines("b", [0.0] * 7, "x"), *lines("b", [1.0] * 7, "y"), *lines("c", [1.0] * 7, "x"))
    rows = compare_runs(first, second).rows
    assert [(row.task, row.second, row.difference.mean) for row in rows] == [
        (None, "b", -0.5), ("x", "b", -1.0), ("y", "b", 0.0), ("x", "c", 0.0),
    ]  # fmt: skip


def test_other_prompts_are_remarked_on():
    first = run_of(*lines("a", [1.0, 1.0]))
    second = run_of(*({**one, "prompt_hash": "else"} for one in lines("a", [1.0, 0.0])))
    assert compare_runs(first, second).remarks == ["2 of the shared items have other prompt tokens in B than in A"]


def test_runs_without_shared_items_are_refused():
    with pytest.raises(DataError, match="share no answered item"):
        compare_runs(run_of(line("a", "i")), run_of(line("a", "j")))
