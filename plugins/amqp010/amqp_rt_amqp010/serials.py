"""Serial numbers of commands, which wrap at 2**32 (RFC 1982), and sets of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Final

MASK: Final = 0xFFFF_FFFF
_HALF: Final = 0x8000_0000
#: Ranges up to which they are removed one by one.
_FEW: Final = 8
#: Numbers that are compared with a set in the time that a frame takes.
_NUMBERS_OF_A_FRAME: Final = 100


def advance(serial: int, count: int = 1) -> int:
    """Return the serial number *count* after *serial*; *count* may be negative."""
    return (serial + count) & MASK


def difference(later: int, earlier: int) -> int:
    """Return the distance from *earlier* to *later*; negative if *later* comes first.

    RFC 1982 leaves two numbers half a circle apart unordered; here the distance is -2**31.
    """
    distance = (later - earlier) & MASK
    return distance - 0x1_0000_0000 if distance >= _HALF else distance


def precedes(serial: int, other: int) -> bool:
    """Return whether *serial* comes before *other*."""
    return 0 < ((other - serial) & MASK) < _HALF


class RangeSet:
    """Set of serial numbers, held as ranges.

    A range runs upwards from its first number, past 2**32 - 1 to 0 if its last number is smaller. No
    method costs more than the number of ranges, or than the size of a table that is passed.

    Args:
        ranges: First and last number of each range, both included, in any order.
    """

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        # Bounds of disjoint ranges that do not touch, in the order of plain integers: a range across
        # the end of the circle is held as two.
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int | None = None) -> None:
        """Add the numbers from *first* to *last*, or *first* alone."""
        end = first if last is None else last
        if end < first:
            self._add(first, MASK)
            self._add(0, end)
        elif self._lasts and self._lasts[-1] + 1 == first:
            # The usual case: commands complete in their order.
            self._lasts[-1] = end
        else:
            self._add(first, end)

    def _add(self, first: int, last: int) -> None:
        # Ranges from low up to high overlap or touch the new one.
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, last + 1)
        if low < high:
            first = min(first, self._firsts[low])
            last = max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def remove(self, first: int, last: int | None = None) -> None:
        """Remove the numbers from *first* to *last*, or *first* alone; others of these are ignored."""
        end = first if last is None else last
        if end < first:
            self._remove(first, MASK)
            self._remove(0, end)
        else:
            self._remove(first, end)

    def _remove(self, first: int, last: int) -> None:
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        if low >= high:
            return
        firsts: list[int] = []
        lasts: list[int] = []
        if self._firsts[low] < first:
            firsts.append(self._firsts[low])
            lasts.append(first - 1)
        if self._lasts[high - 1] > last:
            firsts.append(last + 1)
            lasts.append(self._lasts[high - 1])
        self._firsts[low:high] = firsts
        self._lasts[low:high] = lasts

    def update(self, other: RangeSet) -> None:
        """Add all numbers of *other*."""
        for first, last in other.ranges():
            self.add(first, last)

    def subtract(self, other: RangeSet) -> None:
        """Remove all numbers of *other*."""
        # Each removal moves what lies behind it; one pass over both is cheaper for many.
        if len(other._firsts) <= _FEW:
            for first, last in zip(other._firsts, other._lasts, strict=True):
                self._remove(first, last)
            return
        firsts: list[int] = []
        lasts: list[int] = []
        index = 0
        count = len(other._firsts)
        for first, last in zip(self._firsts, self._lasts, strict=True):
            while index < count and other._lasts[index] < first:
                index += 1
            at = first
            inner = index
            while inner < count and other._firsts[inner] <= last:
                if other._firsts[inner] > at:
                    firsts.append(at)
                    lasts.append(other._firsts[inner] - 1)
                at = other._lasts[inner] + 1
                inner += 1
            if at <= last:
                firsts.append(at)
                lasts.append(last)
            # The last of these ranges may reach into our next one.
            index = max(index, inner - 1)
        self._firsts = firsts
        self._lasts = lasts

    def overlap(self, other: RangeSet) -> RangeSet:
        """Return the numbers that both sets contain; the set with fewer ranges is walked."""
        small, large = (self, other) if len(self._firsts) < len(other._firsts) else (other, self)
        made = RangeSet()
        count = len(large._firsts)
        for first, last in zip(small._firsts, small._lasts, strict=True):
            index = bisect_left(large._lasts, first)
            while index < count and large._firsts[index] <= last:
                made._firsts.append(max(first, large._firsts[index]))
                made._lasts.append(min(last, large._lasts[index]))
                index += 1
        return made

    def meets(self, first: int, last: int) -> bool:
        """Return whether any number from *first* to *last* is a member."""
        if last < first:
            return self.meets(first, MASK) or self.meets(0, last)
        index = bisect_left(self._lasts, first)
        return index < len(self._lasts) and self._firsts[index] <= last

    @property
    def range_count(self) -> int:
        """Number of ranges that are held; one across the end of the circle counts twice."""
        return len(self._firsts)

    def clear(self) -> None:
        """Remove all numbers."""
        self._firsts.clear()
        self._lasts.clear()

    def copy(self) -> RangeSet:
        """Return an equal set, which changes independently."""
        made = RangeSet()
        made._firsts = self._firsts[:]
        made._lasts = self._lasts[:]
        return made

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges, each with its first and last number, in ascending order (RFC 1982).

        On a circle the first range is the one after the widest gap: the numbers of a session lie close
        together.
        """
        count = len(self._firsts)
        if count == 0:
            return []
        widest = self._firsts[0] + MASK - self._lasts[-1]
        start = 0
        for index in range(1, count):
            gap = self._firsts[index] - self._lasts[index - 1] - 1
            if gap > widest:
                widest, start = gap, index
        found = [(self._firsts[index], self._lasts[index]) for index in range(start, count)]
        if start:
            rest = [(self._firsts[index], self._lasts[index]) for index in range(start)]
            if found[-1][1] == MASK and rest[0][0] == 0:
                rest[0] = (found.pop()[0], rest[0][1])
            found += rest
        return found

    def among(self, known: Collection[int]) -> list[int]:
        """Return the members of *known* that this set contains.

        *known* should be a dict or a set. The cost is bounded by its size, however large the ranges are
        that a peer sends. Where *known* is in ascending order, so is the result.
        """
        if len(self._firsts) == 1 and self._firsts[0] == self._lasts[0]:
            # The usual case: commands name one message.
            return self._firsts[:] if self._firsts[0] in known else []
        return [each for some in self.parts_among(known, len(known) or 1) for each in some]

    def parts_among(self, known: Collection[int], size: int) -> Iterator[list[int]]:
        """Yield the members of *known* that this set contains, those among *size* numbers in each part.

        *known* may change between two parts.
        """
        if len(self) > len(known):
            numbers = iter(list(known))
            while some := list(islice(numbers, size)):
                yield [each for each in some if each in known and each in self]
            return
        members = chain.from_iterable(
            range(first, last + 1)
            if first <= last
            else chain(range(first, MASK + 1), range(last + 1))
            for first, last in self.ranges()
        )
        while some := list(islice(members, size)):
            yield [each for each in some if each in known]

    def work_among(self, known: Collection[int]) -> int:
        """Return the cost in frames of :meth:`among`."""
        return min(len(self), len(known)) // _NUMBERS_OF_A_FRAME

    def last_from(self, first: int) -> int | None:
        """Return the last number of the unbroken run that begins with *first*; None if it is absent."""
        index = bisect_left(self._lasts, first)
        if index == len(self._lasts) or self._firsts[index] > first:
            return None
        last = self._lasts[index]
        return self._lasts[0] if last == MASK and self._firsts[0] == 0 else last

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        index = bisect_left(self._lasts, number)
        return index < len(self._lasts) and self._firsts[index] <= number

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RangeSet)
            and self._firsts == other._firsts
            and self._lasts == other._lasts
        )

    def __hash__(self) -> int:
        raise TypeError("a RangeSet can change, and has no hash")

    def __repr__(self) -> str:
        return f"RangeSet({self.ranges()})"
