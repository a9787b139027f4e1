"""The execution layer of the draft of June 2007 (§3.3) as a pure model: what every session refines.

Commands of one direction are C(n); DUP(ranges) tells of the disposition of some, CEM(m) that all up to m are
complete. The model has no wire and no serial numbers: commands are counted from 0 without an end, and their
32 bits are the business of those who drive it. It is part of the tests, because nothing else uses it: a
session would not become simpler by it, and a distribution ships what runs.

How traffic of 0-10 is read as operations of the model: a command is C; ``execution.result`` and
``execution.exception`` are DUP of the id that they name, ``message.accept`` and ``message.reject`` of all ids
in their ranges; ``completed`` is CEM at its low end, and what it states beyond that is processed early;
``known-completed`` is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Kind(Enum):
    """Occasions at which a command completes."""

    #: The model layer, which says so.
    MODEL = 0
    #: The model layer, and its result or outcome is told before.
    RESULT = 1
    #: Its arrival: commands of the execution layer itself.
    ARRIVAL = 2
    #: Completion of all commands before it.
    BARRIER = 3


class ExecutionModel:
    """Commands of one direction: what their receiver has processed, and what it has told of them."""

    def __init__(self) -> None:
        #: The commands so far; the next one has the number after the last.
        self.kinds: list[Kind] = []
        self.processed: set[int] = set()
        self.skipped: set[int] = set()
        self.abnormal: set[int] = set()
        #: Commands whose disposition was told, those reported as complete, and the highest mark of these.
        self.told: set[int] = set()
        self.reported: set[int] = set()
        self.mark = -1

    def command(self, number: int, kind: Kind) -> None:
        """C(n): the sequence is implicit, so that the next number is the only one that there can be."""
        assert number == len(self.kinds)
        self.kinds.append(kind)

    def process(self, number: int) -> None:
        """Note that a command ended normally: once, and not after it failed."""
        assert number < len(self.kinds)
        assert number not in self.processed
        assert number not in self.abnormal
        self.processed.add(number)

    def fail(self, number: int) -> None:
        """Note that a command ended abnormally."""
        assert number < len(self.kinds)
        assert number not in self.processed
        self.abnormal.add(number)

    def skip(self, number: int) -> None:
        """Note that a gap covers a command, which may have been executed before."""
        self.skipped.add(number)

    def dispose(self, number: int) -> None:
        """DUP({n}): names a command that was not marked complete before, and once only."""
        assert 0 <= number < len(self.kinds)
        assert number not in self.told
        assert number > self.mark
        assert number not in self.reported
        self.told.add(number)

    def report(self, numbers: Iterable[int]) -> None:
        """CEM(m), and what was processed early: only what is, and after the disposition of results."""
        fresh = set(numbers) - self.reported
        for number in fresh:
            assert 0 <= number < len(self.kinds)
            # An abnormal end is told by an exception, which ends the session: its id never completes.
            assert number not in self.abnormal
            if number not in self.skipped:
                kind = self.kinds[number]
                assert kind in (Kind.ARRIVAL, Kind.BARRIER) or number in self.processed
                assert kind is not Kind.RESULT or number in self.told
        self.reported |= fresh
        while self.mark + 1 in self.reported:
            self.mark += 1
        for number in fresh - self.skipped:
            assert self.kinds[number] is not Kind.BARRIER or number <= self.mark
