"""Sorted numbers: the order of an entity's messages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

#: Numbers in a run; a run of twice as many is divided.
_RUN: Final = 512


class Numbers:
    """Sorted set of numbers, most of which are added at the end and removed at the beginning.

    The numbers are in runs. Adding and removing search for the run and move the numbers of one run, so that
    their cost hardly grows with the size of the set.
    """

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        #: The last number of each run.
        self._lasts: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self._lasts, number)
        if index == len(self._runs):
            return False
        run = self._runs[index]
        return run[bisect_left(run, number)] == number

    @property
    def first(self) -> int | None:
        """The lowest number, None if there is none."""
        return self._runs[0][0] if self._runs else None

    def add(self, number: int) -> None:
        """Add *number*; nothing happens if the set has it."""
        runs, lasts = self._runs, self._lasts
        if not lasts or number > lasts[-1]:
            if not runs or len(runs[-1]) >= _RUN:
                runs.append([number])
                lasts.append(number)
            else:
                runs[-1].append(number)
                lasts[-1] = number
            self._size += 1
            return
        index = bisect_left(lasts, number)
        run = runs[index]
        if run[bisect_left(run, number)] == number:
            return
        insort(run, number)
        self._size += 1
        if len(run) > 2 * _RUN:
            runs[index : index + 1] = [run[:_RUN], run[_RUN:]]
            lasts.insert(index, run[_RUN - 1])

    def discard(self, number: int) -> None:
        """Remove *number*; nothing happens if the set does not have it."""
        runs, lasts = self._runs, self._lasts
        index = bisect_left(lasts, number)
        if index == len(runs):
            return
        run = runs[index]
        at = bisect_left(run, number)
        if run[at] != number:
            return
        del run[at]
        self._size -= 1
        if not run:
            del runs[index], lasts[index]
        elif at == len(run):
            lasts[index] = run[-1]

    def since(self, number: int) -> Iterator[int]:
        """Iterate over the numbers that are *number* or higher. The set must not change meanwhile."""
        index = bisect_left(self._lasts, number)
        if index == len(self._runs):
            return
        run = self._runs[index]
        yield from run[bisect_left(run, number) :]
        for later in range(index + 1, len(self._runs)):
            yield from self._runs[later]

    def __iter__(self) -> Iterator[int]:
        for run in self._runs:
            yield from run
