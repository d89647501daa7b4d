"""Scheduler and transfers without a model: what is begun, what makes room, what is waited for, on a clock of steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvfoundry.errors import SpecError
from kvfoundry.rag.room import Room, first_residents
from kvfoundry.rag.scheduler import Limits, Scheduler
from kvfoundry.rag.transfers import Transfers


class Link:
    """A link on a clock of steps: every transfer takes so many, one after the other."""

    def __init__(self, steps: int):
        self.steps, self.queue = steps, list[tuple[int, int]]()

    def start(self, each: int, now: int) -> None:
        begins = max([now, *(done for _, done in self.queue)])
        self.queue.append((each, begins + self.steps))

    def landed(self, now: int) -> list[int]:
        done = [each for each, ends in self.queue if ends <= now]
        self.queue = [pair for pair in self.queue if pair[1] > now]
        return done


def run(scheduler: Scheduler, link: Link, worth: Callable[[int], list[float]], steps: int) -> list[set[int]]:
    """What is resident at every step."""
    found = []
    for now in range(steps):
        for each in link.landed(now):
            scheduler.arrive(each, worth(now))
        assert scheduler.used <= scheduler.limits.room and len(scheduler.coming) <= scheduler.limits.ahead
        found.append(set(scheduler.resident))
        for each in scheduler.predict(worth(now), now):
            link.start(each, now)
    return found


def test_what_is_worth_more_comes_and_the_least_goes() -> None:
    scheduler = Scheduler([10] * 4, Limits(20), {0, 1})
    held = run(scheduler, Link(2), lambda now: [0.3, 0.1, 0.2, 0.4], 7)
    assert held == [{0, 1}, {0, 1}, {0, 3}, {0, 3}, {0, 3}, {0, 3}, {0, 3}]
    assert not scheduler.coming, "2 is worth less than what is there"


def test_free_room_is_filled_by_worth_and_zero_never_comes() -> None:
    held = run(Scheduler([10] * 4, Limits(30), {0}), Link(1), lambda now: [0.0, 0.2, 0.0, 0.1], 5)
    assert held[-1] == {0, 1, 3} and held[1] == {0, 1}


def test_more_ahead_begins_more_at_once() -> None:
    scheduler = Scheduler([10] * 4, Limits(20, ahead=2), {0, 1})
    assert scheduler.predict([0.1, 0.2, 0.4, 0.3], 0) == [2, 3]
    assert scheduler.predict([0.1, 0.2, 0.4, 0.3], 1) == []


def test_a_margin_keeps_two_from_taking_turns() -> None:
    def wavering(now: int) -> list[float]:
        return [1.0, 1.05] if now // 2 % 2 else [1.05, 1.0]

    assert run(Scheduler([1, 1], Limits(1), {0}), Link(1), wavering, 9)[-1] == {0}
    eager = run(Scheduler([1, 1], Limits(1, margin=0.0), {0}), Link(1), wavering, 9)
    assert {1} in eager


def test_a_large_one_must_be_worth_all_that_it_replaces() -> None:
    sizes = [10, 10, 20]
    assert Scheduler(sizes, Limits(20), {0, 1}).predict([0.3, 0.3, 0.5], 0) == []
    scheduler = Scheduler(sizes, Limits(20), {0, 1})
    assert scheduler.predict([0.2, 0.2, 0.5], 0) == [2]
    assert scheduler.arrive(2, [0.2, 0.2, 0.5]) == [0, 1] and scheduler.resident == {2}
    assert Scheduler([10, 30], Limits(20), {0}).predict([0.0, 9.0], 0) == [], "it would never fit"


def test_what_is_no_longer_wanted_when_it_arrives_is_dropped() -> None:
    scheduler = Scheduler([1, 1], Limits(1), {0})
    assert scheduler.predict([0.1, 0.9], 0) == [1]
    assert scheduler.arrive(1, [0.9, 0.1]) is None and scheduler.resident == {0}
    assert scheduler.predict([0.1, 0.9], 3) == [1], "it may be asked for again"


def test_what_failed_is_not_tried_again() -> None:
    scheduler = Scheduler([1, 1], Limits(1), {0})
    scheduler.predict([0.1, 0.9], 0)
    scheduler.fail(1)
    assert scheduler.predict([0.1, 0.9], 1) == [] and scheduler.resident == {0}


def test_only_what_was_predicted_a_horizon_ago_is_waited_for() -> None:
    scheduler = Scheduler([1, 1], Limits(1, horizon=3), {0})
    scheduler.predict([0.1, 0.9], 5)
    assert [scheduler.due(step) for step in (5, 7, 8)] == [[], [], [1]]
    demand = Scheduler([1, 1], Limits(1, horizon=0), {0})
    demand.predict([0.1, 0.9], 5)
    assert demand.due(5) == [1]


def test_room_is_a_size_or_a_share() -> None:
    sizes = [10, 30, 20, 40]
    assert Room.parse("25").of(sizes) == 25 and Room.parse("1KiB").of(sizes) == 1024
    assert Room.parse("all").of(sizes) == 100 and Room.parse("50%").of(sizes) == 70 and Room.parse("1%").of(sizes) == 40
    assert first_residents(sizes, [3, 2, 1, 0], [False, True, True, True], 65) == {3, 2}, "the best that fit, in order"
    assert first_residents(sizes, [3, 2, 1, 0], [False, False, False, True], 100) == {3}
    for bad in ("0%", "101%", "much", ""):
        with pytest.raises(SpecError):
            Room.parse(bad)
    for bad in ({"ahead": 0}, {"horizon": -1}, {"margin": -0.1}):
        with pytest.raises(SpecError):
            Limits(1, **bad)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvfoundry-promote")]


def test_transfers_come_in_order_and_may_be_waited_for() -> None:
    with Transfers(lambda number: number * 10, delay=0.01) as transfers:
        transfers.start(1)
        transfers.start(2)
        transfers.start(1)
        assert transfers.coming == {1, 2} and transfers.wait([2]) > 0
        assert [(each.number, each.content) for each in transfers.landed()] == [(1, 10), (2, 20)]
        assert not transfers.coming and transfers.wait([1, 2]) == 0.0
    assert not threads()


def test_a_failure_is_told_and_the_next_comes() -> None:
    def fetch(number: int) -> int:
        if number == 1:
            raise OSError("the disk is gone")
        return number

    with Transfers(fetch) as transfers:
        transfers.start(1)
        transfers.start(2)
        transfers.wait([1, 2])
        first, second = transfers.landed()
        assert first.content is None and first.failure == "OSError: the disk is gone" and second.content == 2


def test_leaving_calls_off_what_waits_and_ends_the_thread() -> None:
    fetched: list[int] = []
    entered, gate = threading.Event(), threading.Event()

    def fetch(number: int) -> int:
        entered.set()
        gate.wait(5)
        fetched.append(number)
        return number

    transfers = Transfers(fetch)
    transfers.start(1)
    transfers.start(2)
    entered.wait(5)
    threading.Timer(0.05, gate.set).start()
    transfers.close()
    assert not threads() and fetched == [1] and not transfers.coming
    with Transfers(fetch, delay=30.0) as slow:  # the delay does not hold the end up
        slow.start(3)
    assert not threads() and 3 not in fetched
