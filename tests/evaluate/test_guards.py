"""Guards: each trips on its own fault, and stays quiet on a sound run."""

from made import line, lines, run_of

from kvfoundry.evaluate.board import MIB
from kvfoundry.evaluate.guards import flags_of


def told(*results, **arguments):
    return [(flag["kind"], flag["method"], flag["message"]) for flag in flags_of(run_of(*results, **arguments))]


def test_a_sound_run_trips_none():
    sound = [
        *lines("fullkv", [1.0, 0.5, 1.0]),
        *lines("snapkv(budget=8)", [0.0, 0.5, 1.0]),
        *lines("snapkv(budget=32)", [1.0, 0.5, 0.0]),
    ]
    assert told(*sound) == []


def test_different_prompts():
    (flag,) = told(line("fullkv"), line("h2o(budget=8)", prompt_hash="else"))
    assert flag[0] == "prompts" and "do not compare" in flag[2]


def test_a_baseline_at_zero_and_at_chance():
    (flag,) = told(*lines("fullkv", [0.0, 0.1]))
    assert flag[:2] == ("baseline", "fullkv") and "scores 0.05 (about zero)" in flag[2]
    tasks = [{"task": "niah", "chance": 0.25}]
    assert [kind for kind, *_ in told(*lines("fullkv", [0.0, 0.5]), tasks=tasks)] == ["baseline"]
    assert told(*lines("fullkv", [0.0, 0.7]), tasks=tasks) == []
    assert told(*lines("snapkv(budget=8)", [0.0, 0.0])) == []  # without the full cache nothing is known


def test_the_same_answers_at_every_budget():
    results = [*lines("h2o(budget=8)", [1.0, 0.5], kept_rows=8), *lines("h2o(budget=32)", [1.0, 0.5], kept_rows=32)]
    (flag,) = told(*results)
    assert flag[:2] == ("budget", "h2o") and "(8, 32)" in flag[2] and "does not tell these budgets apart" in flag[2]
    stuck = [{**one, "kept_rows": 8.0} for one in results]
    assert "the budget has no effect" in told(*stuck)[0][2]
    assert told(*results, *lines("h2o(budget=64)", [1.0, 0.0])) == []


def test_a_method_that_never_acted():
    kept = dict(kept_share=1.0, stored_bytes=4 * MIB)
    full, idle = lines("fullkv", [1.0, 0.5]), lines("h2o(budget=999)", [1.0, 0.5], **kept)
    (flag,) = told(*full, *idle)
    assert flag[:2] == ("idle", "h2o(budget=999)") and "never acted: on all 2 items" in flag[2]
    # sparse prompts leave work out, codes save bytes, a reader changes answers; one item on which it acted is enough
    assert told(*full, *lines("minference", [1.0, 0.5], prefill_share=0.4, **kept)) == []
    assert [kind for kind, *_ in told(*full, *lines("minference", [1.0, 0.5], prefill_share=1.0, **kept))] == ["idle"]
    assert told(*full, *lines("kivi(bits=2)", [1.0, 0.5], kept_share=1.0, stored_bytes=MIB)) == []
    assert told(*full, *lines("quest(budget=8)", [1.0, 0.0], **kept)) == []
    assert told(*full, idle[0], line("h2o(budget=999)", "i1", score=0.5, prompt_hash="niah 1", kept_share=0.5)) == []


def test_failed_items_trip_nothing():
    failed = dict(prediction=None, error="RuntimeError: no", kept_share=None)
    assert told(*lines("fullkv", [1.0]), *lines("h2o(budget=8)", [None], **failed)) == []


def test_the_gravest_comes_first():
    kept = dict(kept_share=1.0, stored_bytes=4 * MIB)
    results = [*lines("fullkv", [0.0]), *lines("a(budget=8)", [0.0], **kept), *lines("a(budget=9)", [0.0], **kept)]
    assert [kind for kind, *_ in told(*results)] == ["baseline", "idle", "idle", "budget"]
