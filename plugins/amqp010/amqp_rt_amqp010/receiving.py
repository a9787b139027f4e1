"""Receiving side of a session: which commands have come, and which of them are complete."""

from __future__ import annotations

from collections import deque
from typing import Final

from .faults import CommandFault
from .layouts import ErrorCode
from .limits import RANGES_MAX
from .serials import RangeSet, advance, precedes

#: Half of the circle of serial numbers, and how far a gap may reach from the present number.
_HALF: Final = 1 << 31
_QUARTER: Final = 1 << 30
#: Commands after which completed ones that are older than a quarter of the circle are forgotten.
_FORGET_EVERY: Final = 1 << 24


class CommandReceiver:
    """Numbers of the commands that a session receives, and the sets that it reports of them.

    ``next`` is the number of the next command to come, ``received`` the one after the highest command
    seen. They differ while the peer repeats commands after the session was attached again. No method
    walks numbers that the peer chose: ranges and our own tables only.
    """

    __slots__ = (
        "_ahead",
        "_arrived",
        "_executing",
        "_order",
        "changed",
        "completed",
        "known",
        "next",
        "received",
        "started",
    )

    def __init__(self) -> None:
        #: Whether there is execution state: a command-point has come, on this attachment or before.
        self.known = False
        #: Whether a command-point has come on this attachment.
        self.started = False
        self.next = 0
        self.received = 0
        #: Complete commands, without those that the peer knows to be complete.
        self.completed = RangeSet()
        #: Whether ``completed`` has gained commands since this was last set to False.
        self.changed = False
        #: Whether any command or gap has come.
        self._arrived = False
        #: Commands in execution → whether it is an ``execution.sync``, complete when it is the first one.
        self._executing: dict[int, bool] = {}
        #: The same in their order, and complete ones behind the first that is not.
        self._order: deque[int] = deque()
        #: Numbers from ``received`` on that gaps cover.
        self._ahead = RangeSet()

    @property
    def executing(self) -> int:
        """Number of commands that have been received and are not complete."""
        return len(self._executing)

    @property
    def next_is_new(self) -> bool:
        """Whether the next command has not come before."""
        return self.next == self.received

    @property
    def expected(self) -> RangeSet:
        """The set of ``session.expected``: empty only without execution state."""
        return RangeSet([(self.received, self.received)] if self.known else ())

    def set_point(self, number: int) -> None:
        """Set the number of the next command, by a command-point.

        Raises:
            CommandFault: It leaves out commands that no gap covers (542).
        """
        if not self._arrived:
            # Sessions may begin anywhere.
            self.received = number
            self.known = True
        elif number != self.received and not precedes(number, self.received):
            raise _invalid(f"command-point {number} leaves out commands from {self.received} on")
        self.next = number
        self.started = True

    def arrive(self) -> int:
        """Return the number of the command that came; -1 if it came before and is not to be executed.

        Such a command is reported as completed again, unless it is in execution: the peer does not
        know that it is complete.
        """
        number = self.next
        if number != self.received:
            self.next = advance(number)
            if number not in self._executing:
                self._complete(number)
            return -1
        self._arrived = True
        self._receive_before(advance(number))
        if number % _FORGET_EVERY == 0:
            # A peer that never sends known-completed: numbers lose their order after half a circle.
            self.completed.remove(advance(number, _HALF), advance(number, -_QUARTER))
        return number

    def begin(self, number: int, *, barrier: bool = False) -> None:
        """Note that command *number* is in execution; a *barrier* completes when all before it have."""
        if barrier and not self._executing:
            self._complete(number)
            return
        self._executing[number] = barrier
        self._order.append(number)
        if len(self._order) > 2 * len(self._executing) + 64:
            self._order = deque(each for each in self._order if each in self._executing)

    def executes(self, number: int) -> bool:
        """Return whether command *number* is in execution."""
        return number in self._executing

    def finish(self, number: int) -> bool:
        """Note that a command in execution is complete; return False if it is not in execution."""
        if self._executing.pop(number, None) is None:
            return False
        self._complete(number)
        order = self._order
        while order:
            barrier = self._executing.get(order[0])
            if barrier is False:
                break
            first = order.popleft()
            if barrier:
                del self._executing[first]
                self._complete(first)
        return True

    def know_completed(self, commands: RangeSet) -> None:
        """Forget *commands*, which the peer knows to be complete.

        Raises:
            CommandFault: Some of them have not come (542).
        """
        if commands.meets(self.received, advance(self.received, _HALF)):
            beyond = commands.overlap(RangeSet([(self.received, advance(self.received, _HALF))]))
            beyond.subtract(self._ahead)
            if beyond:
                raise _invalid("known-completed has commands that have not been received")
        self.completed.subtract(commands)

    def skip(self, commands: RangeSet) -> bool:
        """Complete *commands*, which a gap covers; return whether that includes the next command.

        Commands in execution have come whole, so that nothing of them is missing. They complete when
        they end, because they may still fail.

        Raises:
            CommandFault: The gap comes before any command-point, or reaches too far (542), or there are
                too many gaps (506).
        """
        if not self.known:
            raise _invalid("a gap comes before any command-point")
        if commands.meets(advance(self.received, _QUARTER), advance(self.received, -_QUARTER)):
            raise _invalid("a gap reaches further than a quarter of all numbers")
        self._arrived = True
        covers = self.next in commands
        repeating = self.next != self.received
        complete = commands.copy()
        for number in commands.among(self._executing):
            complete.remove(number)
        self.completed.update(complete)
        self.changed = True
        ahead = commands.overlap(RangeSet([(self.received, advance(self.received, _QUARTER))]))
        self._ahead.update(ahead)
        if self._ahead.range_count > RANGES_MAX:
            raise CommandFault("too many gaps", ErrorCode.RESOURCE_LIMIT_EXCEEDED)
        before = self.next
        received = self.received
        self._receive_before(received)
        if repeating:
            self.next = before
            last = commands.last_from(before)
            if last is not None:
                after = advance(last)
                self.next = after if precedes(after, received) else self.received
        return covers

    def _receive_before(self, number: int) -> None:
        """Let *number* be the next new command, or the first one after it that no gap covers."""
        if self._ahead:
            last = self._ahead.last_from(number)
            if last is not None:
                self._ahead.remove(number, last)
                number = advance(last)
        self.next = self.received = number

    def _complete(self, number: int) -> None:
        self.completed.add(number)
        self.changed = True


def _invalid(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT)
