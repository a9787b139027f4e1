"""Serial numbers that wrap, and sets of them, against plain sets on a small part of the circle."""

from __future__ import annotations

import pytest
from amqp_rt_amqp010.serials import MASK, RangeSet, advance, difference, precedes
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

HALF = 1 << 31


@pytest.mark.req("D11")
@pytest.mark.parametrize(
    ("earlier", "later", "distance"),
    [
        *((0, 0, 0), (0, 1, 1), (MASK, 0, 1), (2**32 - 3, 2, 5), (0, HALF - 1, HALF - 1)),
        *((5, 3, -2), (0, MASK, -1), (1, HALF + 2, 1 - HALF), (7, 7 + HALF, -HALF)),
    ],
)
def test_distances_wrap(earlier: int, later: int, distance: int) -> None:
    assert difference(later, earlier) == distance
    assert advance(earlier, distance) == later
    assert precedes(earlier, later) == (distance > 0)


@pytest.mark.req("D11")
def test_numbers_half_a_circle_apart_are_in_no_order() -> None:
    assert not precedes(0, HALF)
    assert not precedes(HALF, 0)


@pytest.mark.req("D11")
@pytest.mark.parametrize(
    ("added", "ranges"),
    [
        ([], []),
        ([(0, 0)], [(0, 0)]),
        ([(0, 2), (15, 15), (5, 6)], [(0, 2), (5, 6), (15, 15)]),
        # Touching and overlapping ones become one.
        ([(0, 2), (3, 4)], [(0, 4)]),
        ([(3, 4), (0, 2)], [(0, 4)]),
        ([(0, 9), (3, 4), (8, 12)], [(0, 12)]),
        ([(0, 0), (4, 4), (2, 2), (1, 3)], [(0, 4)]),
        # Across the end of the circle.
        ([(MASK, MASK), (3, 4)], [(MASK, MASK), (3, 4)]),
        ([(2**32 - 3, 1)], [(2**32 - 3, 1)]),
        ([(2**32 - 3, MASK), (0, 1)], [(2**32 - 3, 1)]),
        ([(0, 1), (2**32 - 9, 2**32 - 8), (5, 5)], [(2**32 - 9, 2**32 - 8), (0, 1), (5, 5)]),
        ([(0, MASK)], [(0, MASK)]),
        ([(5, 3)], [(5, 3)]),
    ],
)
def test_ranges_come_in_the_order_of_serial_numbers(
    added: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    found = RangeSet(added)
    assert found.ranges() == ranges
    assert found == RangeSet(ranges)
    assert bool(found) == bool(ranges)


@pytest.mark.req("D11")
def test_a_set_of_everything_costs_no_more_than_the_table() -> None:
    everything = RangeSet([(0, MASK)])
    assert len(everything) == 2**32
    assert everything.among({7: "a", MASK: "b"}) == [7, MASK]
    assert everything.last_from(7) == MASK
    everything.remove(9)
    assert everything.last_from(10) == 8
    assert everything.among({8, 9, 10}) == [8, 10]


def test_a_set_of_few_looks_these_up() -> None:
    known = dict.fromkeys((advance(MASK, step) for step in range(10)), "")
    assert RangeSet([(MASK, 0), (7, 8)]).among(known) == [MASK, 0, 7, 8]
    assert RangeSet([(MASK, 0), (12, 13)]).among(known) == [MASK, 0]


def test_a_set_can_change_and_has_no_hash() -> None:
    with pytest.raises(TypeError, match="no hash"):
        hash(RangeSet())
    found = RangeSet([(1, 2)])
    copied = found.copy()
    copied.add(3)
    assert (found.ranges(), copied.ranges()) == ([(1, 2)], [(1, 3)])
    copied.clear()
    assert not copied
    assert found != "x"
    assert "x" not in found
    assert repr(found) == "RangeSet([(1, 2)])"


#: Numbers on both sides of the end of the circle.
NUMBERS = st.integers(-40, 40).map(lambda number: number & MASK)


class Sets(RuleBasedStateMachine):
    """Two range sets, and a plain set for each."""

    @initialize()
    def begin(self) -> None:
        self.found, self.other = RangeSet(), RangeSet()
        self.expected: set[int] = set()
        self.others: set[int] = set()

    def numbers(self, first: int, last: int) -> set[int]:
        return {advance(first, step) for step in range(difference(last, first) + 1)}

    @rule(first=NUMBERS, span=st.integers(0, 30))
    def add(self, first: int, span: int) -> None:
        last = advance(first, span)
        self.found.add(first, last)
        self.expected |= self.numbers(first, last)

    @rule(first=NUMBERS)
    def add_one(self, first: int) -> None:
        self.found.add(first)
        self.expected.add(first)

    @rule(first=NUMBERS, span=st.integers(0, 30))
    def remove(self, first: int, span: int) -> None:
        last = advance(first, span)
        self.found.remove(first, last)
        self.expected -= self.numbers(first, last)

    @rule(first=NUMBERS, span=st.integers(0, 30))
    def prepare(self, first: int, span: int) -> None:
        last = advance(first, span)
        self.other.add(first, last)
        self.others |= self.numbers(first, last)

    @rule(numbers=st.lists(NUMBERS, min_size=10))
    def prepare_each(self, numbers: list[int]) -> None:
        for number in numbers:
            self.other.add(number)
        self.others.update(numbers)

    @rule(first=NUMBERS, span=st.integers(0, 30))
    def look(self, first: int, span: int) -> None:
        last = advance(first, span)
        assert self.found.meets(first, last) == bool(self.expected & self.numbers(first, last))
        assert self.other.meets(first, last) == bool(self.others & self.numbers(first, last))

    @rule()
    def update(self) -> None:
        self.found.update(self.other)
        self.expected |= self.others

    @rule()
    def subtract(self) -> None:
        self.found.subtract(self.other)
        self.expected -= self.others

    @invariant()
    def agree(self) -> None:
        ordered = sorted(self.expected, key=lambda number: difference(number, 0))
        assert self.found.among(dict.fromkeys(ordered)) == ordered
        assert len(self.found) == len(ordered)
        assert bool(self.found) == bool(ordered)
        both = RangeSet((number, number) for number in self.expected & self.others)
        assert self.found.overlap(self.other) == self.other.overlap(self.found) == both
        ranges = self.found.ranges()
        assert len(ranges) <= self.found.range_count <= len(ranges) + 1
        assert [each for pair in ranges for each in sorted(self.numbers(*pair), key=lambda n: difference(n, 0))] == ordered  # fmt: skip
        for _, last in ranges:
            assert advance(last) not in self.expected
        for number in range(-45, 75):
            assert (number & MASK in self.found) == (number & MASK in self.expected)
        for first, last in ranges:
            assert self.found.last_from(first) == last
            assert self.found.last_from(advance(last)) is None


TestSets = pytest.mark.slow(pytest.mark.req("D11")(Sets.TestCase))


@pytest.mark.req("D11")
@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, MASK)), max_size=8))
def test_any_ranges_make_a_set(ranges: list[tuple[int, int]]) -> None:
    found = RangeSet(ranges)
    again = found.ranges()
    assert RangeSet(again) == found
    assert len(again) <= max(1, len(ranges))
    for first, last in ranges:
        assert first in found
        assert last in found
    assert sum(((last - first) & MASK) + 1 for first, last in again) == len(found)
