"""Parts that entities are built of: sorted numbers, deadlines, and the line of credit."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest
from amqp_rt_servicebus.deadlines import Deadlines
from amqp_rt_servicebus.numbers import Numbers
from amqp_rt_servicebus.turns import GRANTS_MAX, Turns
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker.building import Subscription


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=300), st.integers(0, 70))
def test_numbers_are_a_sorted_set(steps: list[tuple[bool, int]], since: int) -> None:
    numbers = Numbers()
    known: set[int] = set()
    for adds, number in steps:
        if adds:
            numbers.add(number)
            known.add(number)
        else:
            numbers.discard(number)
            known.discard(number)
    assert list(numbers) == sorted(known)
    assert list(numbers.since(since)) == sorted(each for each in known if each >= since)
    assert numbers.first == min(known, default=None)
    assert len(numbers) == len(known)
    assert (since in numbers) == (since in known)


def test_many_numbers_in_any_order() -> None:
    numbers = Numbers()
    order = [each * 7_919 % 10_007 for each in range(10_007)]
    for number in order:
        numbers.add(number)
        numbers.add(number)
    assert list(numbers) == list(range(10_007))
    assert list(numbers.since(9_990)) == list(range(9_990, 10_007))
    for number in order[:9_000]:
        numbers.discard(number)
    assert list(numbers) == sorted(order[9_000:])
    for number in order[9_000:]:
        assert number in numbers
        numbers.discard(number)
    assert numbers.first is None
    assert 5 not in numbers


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "discard", "pop"]), st.integers(0, 5), st.integers(0, 9)),
        max_size=200,
    )
)
def test_deadlines_are_met_in_the_order_of_their_times(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    known: dict[int, float] = {}
    for what, key, at in steps:
        if what == "set":
            deadlines.set(key, at)
            known[key] = at
        elif what == "discard":
            deadlines.discard(key)
            known.pop(key, None)
        else:
            earliest = min(known.values(), default=inf)
            found = deadlines.pop(at)
            while found is None and deadlines.next <= at:
                found = deadlines.pop(at)
            assert (found is not None) == (earliest <= at)
            if found is not None:
                assert known.pop(found) == earliest
        assert deadlines.next == min(known.values(), default=inf)
        assert len(deadlines) == len(known)


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_no_call_drops_thousands_of_deadlines(what: str) -> None:
    deadlines: Deadlines[int] = Deadlines()
    sizes = [0]

    def note() -> None:
        sizes.append(deadlines.heap_size)

    for round_ in range(1, 6 if what == "replaced" else 2):
        for key in range(5_000):
            deadlines.set(key, 1_000 * round_ + key)
            note()
    if what == "removed":
        for key in range(4_999):
            deadlines.discard(key)
            note()
    while (at := deadlines.next) != inf:
        note()
        deadlines.pop(at)
        note()
    assert min(after - before for before, after in pairwise(sizes)) >= -40
    assert max(sizes) < 3.5 * 5_000
    assert len(deadlines) == 0


def test_replaced_deadlines_keep_no_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for at in range(10_000):
        deadlines.set("a", at)
        deadlines.set(f"b{at}", at)
        deadlines.discard(f"b{at}")
    assert deadlines.heap_size < 100
    deadlines.set("a", inf)
    assert deadlines.next == inf


class Link:
    """Credit of a link."""

    attached = True
    writable = True

    def __init__(self, credit: int) -> None:
        self.credit = credit


def subscription(identity: int, credit: int) -> Any:
    found = Subscription(None, identity, default_outcome=None)
    found.link = Link(credit)
    return found


def taken(turns: Turns, most: int = 100) -> list[int]:
    """Return the identities of the consumers that get the next messages."""
    found = []
    while len(found) < most and (first := turns.first()) is not None:
        found.append(first.identity)
        first.link.credit -= 1
        turns.use()
    return found


def test_each_unit_of_credit_has_its_place() -> None:
    turns = Turns()
    a, b = subscription(1, 2), subscription(2, 1)
    turns.update(a)
    turns.update(b)
    a.link.credit = 3
    turns.update(a)
    assert taken(turns) == [1, 1, 2, 1]
    assert len(turns) == 0


def test_credit_that_was_taken_back_is_not_used() -> None:
    turns = Turns()
    a, b = subscription(1, 3), subscription(2, 1)
    turns.update(a)
    turns.update(b)
    a.link.credit = 1
    assert taken(turns) == [1, 2]


def test_a_consumer_that_cannot_send_loses_its_place_until_it_can() -> None:
    turns = Turns()
    a, b = subscription(1, 1), subscription(2, 1)
    turns.update(a)
    turns.update(b)
    a.link.writable = False
    assert taken(turns) == [2]
    a.link.writable = True
    turns.update(a)
    assert taken(turns) == [1]


def test_the_grants_of_a_consumer_are_bounded() -> None:
    turns = Turns()
    a, b = subscription(1, 0), subscription(2, 0)
    for _ in range(10 * GRANTS_MAX):
        for each in (a, b):
            each.link.credit += 1
            turns.update(each)
    assert len(turns) == 2 * GRANTS_MAX
    assert len(taken(turns, 10_000)) == 20 * GRANTS_MAX


def test_a_consumer_that_has_left_is_in_no_line() -> None:
    turns = Turns()
    a, b = subscription(1, 2), subscription(2, 1)
    for each in (a, b):
        turns.update(each)
    turns.leave(a)
    turns.leave(a)
    assert taken(turns) == [2]
    assert turns.credit(a) == 0
