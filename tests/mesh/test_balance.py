"""Which leg gets the next message."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.mesh.balance import (
    EJECTED_MAX_S,
    EJECTED_S,
    FAILURES_MAX,
    Standing,
    choose,
    combined,
    eligible,
    nearest,
)
from amqp_rt.mesh.loads import LOAD, Load, read_load, write_load
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, rejected

pytestmark = pytest.mark.req("P2")
REJECTED = rejected("amqp:not-allowed")


def itself(standing: Standing) -> Standing:
    return standing


def served(standings: list[Standing], rounds: int, answer: Any, **options: Any) -> Counter[int]:
    """Distribute messages of 10 ms each in virtual time; *answer* gives latency and outcome by the number of a leg."""
    chance = random.Random(7)
    counts: Counter[int] = Counter()
    running: list[tuple[float, int, float, object]] = []
    for at in range(rounds):
        now = at * 0.01
        for entry in sorted(each for each in running if each[0] <= now):
            running.remove(entry)
            ends, number, took, outcome = entry
            standings[number].outstanding -= 1
            standings[number].answered(outcome, took, ends)
        ready = eligible(standings, itself, now=now)
        chosen = choose(ready, itself, now=now, random=chance.random, **{"zone": "", **options})
        number = standings.index(chosen)
        took, outcome = answer(number)
        chosen.outstanding += 1
        counts[number] += 1
        running.append((now + took, number, took, outcome))
    return counts


def test_equal_legs_get_equal_shares() -> None:
    counts = served([Standing() for _ in range(8)], 4_000, lambda number: (0.05, ACCEPTED))
    assert min(counts.values()) > 0.8 * 500
    assert max(counts.values()) < 1.2 * 500


def test_a_slow_leg_gets_few_messages() -> None:
    counts = served(
        [Standing() for _ in range(8)],
        4_000,
        lambda number: (0.5 if number == 3 else 0.05, ACCEPTED),
    )
    assert counts[3] < 0.25 * 500
    assert counts[3] > 0


def test_slots_divide_the_load() -> None:
    standings = [Standing(slots=1), Standing(slots=4)]
    counts = served(standings, 2_000, lambda number: (0.04, ACCEPTED))
    assert counts[1] > 2 * counts[0]


def test_a_load_of_others_counts() -> None:
    one, other = Standing(slots=1), Standing(slots=1)
    one.load = 5
    for draws in ([0.0, 0.0], [0.9, 0.0]):
        assert choose([one, other], itself, zone="", now=0, random=iter(draws).__next__) is other


@pytest.mark.parametrize("outcome", [REJECTED, MODIFIED_FAILED])
def test_a_leg_that_fails_fast_gets_few_messages(outcome: object) -> None:
    """Failing in a fifth of the time of others looks idle; at most 5 % of the messages fail."""
    counts = served(
        [Standing() for _ in range(8)],
        4_000,
        lambda number: (0.01, outcome) if number == 0 else (0.05, ACCEPTED),
    )
    assert counts[0] <= 0.05 * 4_000


def test_ejection_doubles_up_to_its_maximum_and_ends_with_a_success() -> None:
    standing = Standing()
    now, wanted = 0.0, EJECTED_S
    for _ in range(6):
        for failure in range(FAILURES_MAX):
            assert standing.ejected_until <= now
            standing.answered(REJECTED, 0.01, now)
            assert (standing.ejected_until > now) == (failure == FAILURES_MAX - 1)
        assert standing.ejected_until == now + min(wanted, EJECTED_MAX_S)
        # A failure of a message sent before does not prolong it, and a success does not end it.
        standing.answered(REJECTED, 0.01, now + 1)
        standing.answered(ACCEPTED, 0.01, now + 1)
        assert standing.ejected_until == now + min(wanted, EJECTED_MAX_S)
        now = standing.ejected_until
        wanted *= 2
    standing.answered(ACCEPTED, 0.01, now)
    for _ in range(FAILURES_MAX):
        standing.answered(REJECTED, 0.01, now)
    assert standing.ejected_until == now + EJECTED_S


def test_a_success_between_failures_prevents_the_ejection() -> None:
    standing = Standing()
    for _ in range(FAILURES_MAX - 1):
        standing.answered(REJECTED, 0.01, 0)
    standing.answered(ACCEPTED, 0.01, 0)
    standing.answered(REJECTED, 0.01, 0)
    assert standing.ejected_until < 0


def test_a_failure_counts_by_the_usual_latency_and_not_by_earlier_failures() -> None:
    standing = Standing()
    standing.answered(ACCEPTED, 0.1, 0)
    for _ in range(3):
        standing.answered(REJECTED, 0.001, 0)
        assert standing.latency == pytest.approx(1.0)
    # One that never succeeds is judged by the others.
    failing = Standing()
    failing.answered(REJECTED, 0.001, 0, usual_s=0.2)
    assert failing.latency == pytest.approx(2.0)
    assert failing.usual == 0


def test_messages_that_are_released_fast_do_not_attract_others_or_eject() -> None:
    standing = Standing()
    for _ in range(3 * FAILURES_MAX):
        standing.answered(RELEASED, 0.001, 0, usual_s=0.1)
    assert standing.latency == pytest.approx(1.0)
    assert standing.ejected_until < 0


def test_weights_divide_the_messages() -> None:
    standings = [Standing(weight=1), Standing(weight=3)]
    counts = served(standings, 4_000, lambda number: (0.2, ACCEPTED))
    assert 2 * counts[0] < counts[1] < 4 * counts[0]


@pytest.mark.parametrize(
    ("legs", "out", "left"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 2), (8, 8, 4), (8, 4, 4)]
)
def test_at_most_half_are_ejected(legs: int, out: int, left: int) -> None:
    standings = [Standing() for _ in range(legs)]
    for number, each in enumerate(standings[:out]):
        each.ejected_until = 10.0 + number
    kept = eligible(standings, itself, now=0)
    assert len(kept) == left
    if out > legs // 2:
        assert standings[0] in kept


def test_the_own_zone_comes_first_until_it_is_busy() -> None:
    near, far = Standing(zone="a", slots=2), Standing(zone="b")
    pick = random.Random(1).random
    near.latency, far.latency = 1.0, 0.001
    near.outstanding = 1
    assert {id(choose([near, far], itself, zone="a", now=0, random=pick)) for _ in range(20)} == {
        id(near)
    }
    near.outstanding = 2
    assert choose([near, far], itself, zone="a", now=0, random=pick) is far
    assert choose([far], itself, zone="a", now=0, random=pick) is far


def test_the_nearest_are_those_of_least_cost() -> None:
    one, two, three = Standing(cost=2), Standing(cost=1), Standing(cost=1)
    assert nearest([one, two, three], itself) == [two, three]
    assert nearest([], itself) == []


def test_a_slower_answer_counts_at_once_and_a_faster_one_gradually() -> None:
    standing = Standing()
    standing.answered(ACCEPTED, 0.1, 0)
    standing.answered(ACCEPTED, 1.0, 1)
    assert standing.latency == 1.0
    standing.answered(ACCEPTED, 0.1, 2)
    assert 0.8 < standing.latency < 1.0
    for at in range(3, 100):
        standing.answered(ACCEPTED, 0.1, at)
    assert standing.latency == pytest.approx(0.1, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5), st.integers(0, 4)), min_size=1),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
)
def test_any_draw_chooses_one_that_is_ready(
    given_: list[tuple[int, float, int]], first: float, second: float
) -> None:
    standings = []
    for outstanding, latency, slots in given_:
        standing = Standing(slots=slots)
        standing.outstanding, standing.latency = outstanding, latency
        standings.append(standing)
    chosen = choose(standings, itself, zone="", now=9, random=iter([first, second]).__next__)
    assert chosen in standings


@pytest.mark.parametrize(
    ("outcomes", "wanted", "worst"),
    [
        ([RELEASED, ACCEPTED], ACCEPTED, RELEASED),
        ([ACCEPTED, REJECTED, RELEASED], REJECTED, REJECTED),
        ([MODIFIED_FAILED, RELEASED], MODIFIED_FAILED, MODIFIED_FAILED),
        ([MODIFIED_FAILED, ACCEPTED], ACCEPTED, MODIFIED_FAILED),
        ([ACCEPTED, ACCEPTED], ACCEPTED, ACCEPTED),
        ([RELEASED], RELEASED, RELEASED),
    ],
)
def test_the_outcome_of_all(outcomes: list[object], wanted: object, worst: object) -> None:
    assert combined(outcomes) == wanted
    assert combined(outcomes, worst=True) == worst
    assert combined(outcomes[::-1]) == wanted


def test_a_load_is_read_as_it_was_written() -> None:
    assert read_load(write_load(Load(7, 4))) == Load(7, 4)
    assert read_load(write_load(Load(2**40, 4))) == Load(2**32 - 1, 4)


@pytest.mark.parametrize(
    "properties", [None, {}, {LOAD: 3}, {LOAD: [1]}, {LOAD: ["a", 1]}, {LOAD: [-1, 1]}]
)
def test_a_malformed_load_is_none(properties: Any) -> None:
    assert read_load(properties) is None
