"""Credit windows against a link that only counts: amount and time of each grant."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.container.credit import CreditWindow, SharedSlots
from amqp_rt.fronts.base import ReceivingLink

pytestmark = pytest.mark.req("A11")


class CountingLink:
    """The arithmetic of a receiving link, and a note of every grant. No wire."""

    def __init__(self) -> None:
        self.credit = 0
        self.attached = True
        self.grants: list[int] = []
        self.drains = 0

    def grant(self, credit: int) -> None:
        self.credit = credit
        self.grants.append(credit)

    def drain(self) -> None:
        self.drains += 1

    def arrive(self, count: int) -> None:
        assert count <= self.credit, "the peer has no credit for that"
        self.credit -= count


def a_link() -> tuple[CountingLink, ReceivingLink]:
    link = CountingLink()
    return link, cast(ReceivingLink, cast(Any, link))


def window(slots: int, messages: int, **more: int) -> tuple[CountingLink, CreditWindow]:
    link, as_link = a_link()
    made = CreditWindow(as_link, messages=messages, slots=slots, **more)
    made.opened()
    return link, made


@pytest.mark.parametrize(
    ("slots", "prefetch", "credit"), [(1, 500, 501), (8, 0, 8), (64, 500, 564), (1, 0, 1)]
)
def test_the_first_credit_is_slots_and_prefetch(slots: int, prefetch: int, credit: int) -> None:
    link, _ = window(slots, prefetch)
    assert link.grants == [credit]


def test_nothing_is_granted_before_the_link_is_open() -> None:
    link, as_link = a_link()
    made = CreditWindow(as_link, messages=10)
    made.freed(0, 0)
    assert link.grants == []


def test_credit_is_topped_up_at_half() -> None:
    link, made = window(0, 10)
    link.arrive(10)
    made.took(10, 1_000)
    for _ in range(4):
        made.freed(1, 100)
    assert link.grants == [10]
    made.freed(1, 100)
    assert link.grants == [10, 5]


def test_a_window_of_one_gives_back_each_message() -> None:
    link, made = window(1, 0)
    for _ in range(3):
        link.arrive(1)
        made.took(1, 10)
        made.freed(1, 10)
    assert link.grants == [1, 1, 1, 1]


def test_credit_is_cut_when_messages_are_heavy() -> None:
    link, made = window(0, 100, bytes=1_000)
    link.arrive(6)
    made.took(6, 600)
    assert link.credit == 4  # room for four more of a hundred bytes each
    link.arrive(4)
    made.took(4, 400)
    assert link.credit == 0
    made.freed(10, 1_000)
    assert link.credit == 10


def test_credit_is_cut_as_soon_as_heavy_messages_are_seen() -> None:
    link, made = window(0, 100, bytes=1_000)
    link.arrive(1)
    made.took(1, 100)
    assert link.credit == 9
    made.freed(1, 100)
    link.arrive(9)
    made.took(9, 9)
    made.freed(9, 9)
    assert 9 < link.credit < 100  # small ones are trusted slowly


def test_a_message_heavier_than_the_window_comes_alone() -> None:
    link, made = window(0, 100, bytes=1_000)
    link.arrive(1)
    made.took(1, 5_000)
    assert link.credit == 0
    made.freed(1, 5_000)
    assert link.credit == 1


def test_closing_takes_back_what_was_not_used() -> None:
    link, made = window(0, 10)
    link.arrive(3)
    made.took(3, 30)
    made.close()
    assert link.credit == 0
    made.freed(3, 30)
    assert link.credit == 0


@pytest.mark.slow
@given(
    slots=st.integers(0, 5),
    prefetch=st.integers(1, 20),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(0, 400))),
)
def test_never_more_than_the_window_and_never_stuck(
    slots: int, prefetch: int, steps: list[tuple[bool, int, int]]
) -> None:
    link, made = window(slots, prefetch, bytes=1_000)
    held: list[int] = []
    for arrives, count, size in steps:
        if arrives:
            count = min(count, link.credit)
            if count:
                link.arrive(count)
                held += [size] * count
                made.took(count, size * count)
        else:
            for _ in range(min(count, len(held))):
                made.freed(1, held.pop(0))
        assert len(held) + link.credit <= slots + prefetch
        assert held or link.credit > 0


def shared(slots: int, links: int) -> tuple[SharedSlots, list[tuple[CountingLink, ReceivingLink]]]:
    made = SharedSlots(slots)
    pairs = [a_link() for _ in range(links)]
    for _, as_link in pairs:
        made.add(as_link)
    return made, pairs


def test_without_prefetch_credit_is_the_free_slots() -> None:
    made, [(link, as_link)] = shared(3, 1)
    assert link.credit == 3
    link.arrive(2)
    made.took(as_link, 2)
    assert link.credit == 1
    made.freed(1)
    assert link.credit == 2
    made.freed(1)
    assert link.credit == 3


def test_free_slots_go_round() -> None:
    made, [(a, link_a), (b, link_b), (c, _)] = shared(1, 3)
    assert [a.credit, b.credit, c.credit] == [1, 0, 0]
    a.arrive(1)
    made.took(link_a, 1)
    made.freed(1)
    assert [a.credit, b.credit, c.credit] == [0, 1, 0]
    b.arrive(1)
    made.took(link_b, 1)
    made.freed(1)
    assert [a.credit, b.credit, c.credit] == [0, 0, 1]


def test_credit_that_is_not_used_goes_to_another() -> None:
    made, [(a, link_a), (b, _)] = shared(1, 2)
    assert made.starved
    made.rotate()
    made.rotate()
    assert a.drains == 1
    a.credit = 0  # the peer gives it back
    made.flowed(link_a)
    assert b.credit == 1
    assert made.starved


def test_the_credit_of_a_link_that_goes_is_not_lost() -> None:
    made, [(a, link_a), (b, link_b)] = shared(2, 2)
    assert a.credit + b.credit == 2
    made.remove(link_a)
    assert b.credit == 2
    made.remove(link_b)
    assert not made.starved


def test_closed_slots_are_not_shared_any_more() -> None:
    made, [(a, link_a)] = shared(2, 1)
    a.arrive(1)
    made.took(link_a, 1)
    made.close()
    made.freed(1)
    assert a.credit == 0


@pytest.mark.slow
@given(st.data(), st.integers(1, 6), st.integers(1, 5))
def test_never_more_credit_than_free_slots(data: st.DataObject, slots: int, count: int) -> None:
    made, pairs = shared(slots, count)
    running = 0
    for _ in range(data.draw(st.integers(0, 40))):
        link, as_link = data.draw(st.sampled_from(pairs))
        match data.draw(st.sampled_from(["arrive", "finish", "rotate"])):
            case "arrive" if link.credit:
                link.arrive(1)
                made.took(as_link, 1)
                running += 1
            case "finish" if running:
                running -= 1
                made.freed(1)
            case "rotate":
                before = [each.drains for each, _ in pairs]
                made.rotate()
                for (each, its_link), drains in zip(pairs, before, strict=True):
                    if each.drains != drains:
                        each.credit = 0
                        made.flowed(its_link)
        given_out = sum(each.credit for each, _ in pairs)
        assert running + given_out == slots


def test_fewer_slots_take_credit_back_and_more_give_it() -> None:
    made, [(a, link_a), (b, _)] = shared(8, 2)
    assert a.credit + b.credit == 8
    given = a.credit
    made.resize(given)
    assert a.credit + b.credit == given
    made.resize(0)
    assert a.credit == b.credit == 0
    made.resize(6)
    assert a.credit + b.credit == 6
    # Messages in hand count: with less room than these there is no credit.
    a.arrive(1)
    made.took(link_a, 1)
    made.resize(1)
    assert a.credit == b.credit == 0
    made.freed(1)
    assert a.credit + b.credit == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([1, 100, 10_000, 1_000_000])), max_size=60
    )
)
def test_messages_that_are_freed_at_once_get_the_credit_of_messages_freed_later(
    arrivals: list[tuple[int, int]],
) -> None:
    """Counting both in one call may leave out nothing but a flow that was not needed."""
    link, passing = window(0, 20, bytes=2_000_000)
    other, counting = window(0, 20, bytes=2_000_000)
    for count, size in arrivals:
        for each, made in ((link, passing), (other, counting)):
            count = min(count, each.credit)
            each.arrive(count)
            if made is passing:
                made.passed(count, count * size)
            else:
                made.took(count, count * size)
                made.freed(count, count * size)
            assert made.held == made.held_bytes == 0
            assert each.credit > 0
            # The messages of that size for which there is credit fit into twice the bytes.
            assert each.credit == 1 or each.credit * size <= 2 * 2_000_000
