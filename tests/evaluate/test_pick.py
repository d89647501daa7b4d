"""The choice of a recipe: within the limits, from measured results alone, with a reason for every refusal."""

import pytest
from made import line, lines, run_of

from kvfoundry.cli.options import parse_bytes
from kvfoundry.errors import DataError
from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.pick import Limits, pick


def arm(method, scores, size, **more):
    return lines(method, scores, stored_bytes=int(size * MIB), **more)


def board():
    return run_of(
        *arm("fullkv", [1.0] * 10, 4),
        *arm("snapkv(budget=8)", [1.0] * 9 + [0.0], 0.5),
        *arm("snapkv(budget=32)", [1.0] * 10, 2, ms_per_token=9.0),
        *arm("h2o(budget=32)", [1.0] * 10, 2, ms_per_token=20.0),
        *arm("tova(budget=32)", [0.5] * 10, 1),
    )


def test_the_highest_score_within_the_memory_then_the_faster():
    made = pick([board()], Limits(memory=3 * MIB))
    assert made.best.method == "snapkv(budget=32)" and made.runner_up.method == "h2o(budget=32)"
    assert made.between.verdict == "equal" and made.nearest is None and made.items == 10 and made.tasks == ["niah"]
    assert {one.method: one.refused for one in made.refused} == {
        "fullkv": ["stores 4.00 MiB, over the limit of 3.00 MiB"],
        "snapkv(budget=8)": ["loses 10.0% of the full cache's score, more than 2.0%"],
        "tova(budget=32)": ["loses 50.0% of the full cache's score, more than 2.0%"],
    }


def test_without_a_memory_limit_the_smallest_within_the_loss():
    assert pick([board()], Limits()).best.method == "snapkv(budget=32)"
    assert pick([board()], Limits(loss=0.1)).best.method == "snapkv(budget=8)"
    assert pick([board()], Limits(loss=1.0, memory=MIB)).best.method == "snapkv(budget=8)"


def test_the_full_cache_is_used_where_it_fits_and_nothing_is_as_good():
    results = run_of(*arm("fullkv", [1.0] * 6, 4), *arm("h2o(budget=8)", [1.0] * 5 + [0.0], 1))
    made = pick([results], Limits(share=1.0))
    assert made.best.method == "fullkv" and made.best.difference is None and made.runner_up is None


def test_a_limit_holds_for_the_largest_prompt():
    results = run_of(
        *arm("fullkv", [1.0] * 2, 4),
        *lines("h2o(budget=8)", [1.0], stored_bytes=MIB),
        line("h2o(budget=8)", "i1", prompt_hash="niah 1", stored_bytes=3 * MIB),
    )
    assert pick([results], Limits(share=0.75)).best.method == "h2o(budget=8)"
    made = pick([results], Limits(share=0.7))
    assert made.best is None and made.nearest.method == "h2o(budget=8)"
    assert made.nearest.refused == ["stores 75.0% of the full cache, over the limit of 70.0%"]


def test_when_nothing_fits_the_nearest_misses_least():
    made = pick([board()], Limits(memory=int(0.4 * MIB), loss=0.0))
    # 25 % over the memory and 10 % lost, against 400 %, 150 % and more
    assert made.best is None and made.runner_up is None and made.nearest.method == "snapkv(budget=8)"
    assert len(made.nearest.refused) == 2


def test_what_was_not_measured_alike_is_refused():
    results = run_of(
        *arm("fullkv", [1.0] * 3, 4), *arm("fullkv", [1.0] * 2, 4, task="other"),
        *arm("part(budget=8)", [1.0] * 3, 1),
        *arm("fewer(budget=8)", [1.0] * 3, 1), *arm("fewer(budget=8)", [1.0], 1, task="other"),
        *arm("bad(budget=8)", [1.0] * 3, 1), *arm("bad(budget=8)", [1.0], 1, task="other"),
        *lines("bad(budget=8)", [None, None], "other", error="RuntimeError: no", prediction=None)[1:],
    )  # fmt: skip
    refused = {one.method: one.refused for one in pick([results], Limits()).refused}
    assert refused["part(budget=8)"] == ["not measured like fullkv: not at all on other"]
    assert refused["fewer(budget=8)"] == ["not measured like fullkv: on 4 of 5 items"]
    assert refused["bad(budget=8)"][0] == "1 of its items failed"
    assert pick([results], Limits(), tasks=["niah"]).best.method == "part(budget=8)"


def test_loss_is_relative_and_means_the_mean_over_tasks():
    results = run_of(
        *arm("fullkv", [0.5] * 8, 4, task="a"), *arm("fullkv", [1.0] * 2, 4, task="b"),
        *arm("x(budget=8)", [0.4] * 8, 1, task="a"), *arm("x(budget=8)", [1.0] * 2, 1, task="b"),
    )  # fmt: skip
    made = pick([results], Limits(loss=0.07))
    assert made.best.method == "x(budget=8)" and made.best.loss == pytest.approx(0.05 / 0.75)
    assert pick([results], Limits(loss=0.06)).best.method == "fullkv"


def test_a_task_that_says_nothing_is_left_out():
    results = run_of(*arm("fullkv", [1.0] * 3, 4, task="a"), *arm("fullkv", [0.0] * 3, 4, task="b"))
    made = pick([results], Limits())
    assert made.tasks == ["a"] and made.remarks == ["b is left out: the full cache itself scores 0.00 there"]
    with pytest.raises(DataError, match="fullkv was not measured on a task that counts"):
        pick([results], Limits(), tasks=["b"])


def test_several_folders_are_one_board_and_later_ones_replace():
    first = run_of(*arm("fullkv", [1.0] * 6, 4), *arm("h2o(budget=8)", [0.0] * 6, 1))
    second = run_of(*arm("h2o(budget=8)", [1.0] * 6, 1), *arm("snapkv(budget=8)", [1.0] * 6, 2))
    made = pick([first, second], Limits(share=0.5))
    assert made.best.method == "h2o(budget=8)" and made.runner_up.method == "snapkv(budget=8)"
    assert pick([second, first], Limits(share=0.5)).best.method == "snapkv(budget=8)"


def test_items_that_the_full_cache_did_not_answer_do_not_count():
    results = run_of(*arm("fullkv", [1.0] * 2, 4), *arm("h2o(budget=8)", [1.0] * 2 + [0.0] * 5, 1))
    assert pick([results], Limits(share=0.3)).best.score == 1.0


def test_share_is_of_what_the_full_cache_really_stored():
    results = run_of(*arm("fullkv", [1.0], 4.1), *arm("h2o(budget=8)", [1.0], 2.05))
    assert pick([results], Limits(share=1.0)).runner_up.method == "fullkv"
    assert pick([results], Limits(share=0.5)).best.stored_share == pytest.approx(0.5)


def test_runs_that_differ_are_not_mixed():
    one, other = run_of(*arm("fullkv", [1.0], 4)), run_of(*arm("fullkv", [1.0], 4), model="big")
    with pytest.raises(DataError, match=r"of 2 models \(tiny, big\); name one with --model"):
        pick([one, other], Limits())
    assert pick([one, other], Limits(), model="big").best.method == "fullkv"
    with pytest.raises(DataError, match="unknown model 'bgi'; did you mean 'big'"):
        pick([one, other], Limits(), model="bgi")
    hidden = run_of(*arm("fullkv", [1.0], 4), hide_question=True)
    with pytest.raises(DataError, match="measured different things: hide_question is None and True"):
        pick([one, hidden], Limits())
    with pytest.raises(DataError, match="unknown task 'nih'; did you mean 'niah'"):
        pick([one], Limits(), tasks=["nih"])
    with pytest.raises(DataError, match="fullkv was not measured"):
        pick([run_of(*arm("h2o(budget=8)", [1.0], 4))], Limits())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * MIB), ("1.5 GB", 1_500_000_000), ("1gib", 1 << 30), ("500", 500), ("500B", 500), (".5k", None),
        ("2kB", 2000), ("0", None), ("0.2B", None), ("-3MiB", None), ("lots", None), ("", None), ("3 MiB MiB", None),
        ("nan", None), ("iB", None), ("3iB", None),
    ],
)  # fmt: skip
def test_sizes(text, size):
    if size is None:
        with pytest.raises(DataError, match="is not a size; give bytes with a unit"):
            parse_bytes(text, "--memory")
    else:
        assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("limits", [{"share": 0}, {"share": 1.2}, {"share": float("nan")}, {"loss": -0.1}, {"loss": 2}])
def test_limits_out_of_range(limits):
    with pytest.raises(DataError, match="out of range"):
        Limits(**limits)
