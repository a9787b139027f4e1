"""Sending side of a session: numbers of commands, those that are not complete, and replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from .faults import CommandFault
from .handlers import Transport
from .layouts import ErrorCode, SessionCommandPoint, SessionGap
from .limits import (
    COMMAND_COST,
    OUTSTANDING_MAX,
    OUTSTANDING_RANGES_MAX,
    RANGES_MAX,
    REPLAY_MAX,
    REPLAY_OCTETS_MAX,
    URGENT_MAX,
    URGENT_OCTETS_MAX,
)
from .serials import RangeSet, advance, precedes

_HALF: Final = 1 << 31


class SentCommand:
    """Octets of a command, kept for replay, whatever becomes of the list that held its body."""

    __slots__ = ("body", "header", "octets", "size", "urgent")

    def __init__(
        self,
        octets: bytes,
        header: bytes | None,
        body: Sequence[bytes] | None,
        *,
        urgent: bool,
    ) -> None:
        self.octets = octets
        self.header = header
        self.body = None if body is None else list(body)
        self.urgent = urgent
        self.size = COMMAND_COST + len(octets) + (0 if header is None else len(header))
        if self.body is not None:
            for each in self.body:
                self.size += len(each)


class CommandSender:
    """Numbers of the commands that a session sends, and those that the peer has not completed.

    Args:
        first: Number of the first command.
    """

    __slots__ = (
        "_kept",
        "_outstanding_count",
        "_position",
        "_unsent",
        "_urgent_count",
        "_urgent_octets",
        "keeps",
        "next",
        "octets",
        "outstanding",
    )

    def __init__(self, first: int = 0) -> None:
        self.next = first
        #: Whether commands are kept for replay: the state of the session outlives its attachment.
        self.keeps = False
        #: Commands that the peer has not completed.
        self.outstanding = RangeSet()
        self._outstanding_count = 0
        #: Of these, the ones kept for replay, in ascending order.
        self._kept: dict[int, SentCommand] = {}
        #: Octets of all kept commands, and of urgent ones, which are also counted.
        self.octets = 0
        self._urgent_octets = 0
        self._urgent_count = 0
        #: Kept commands still to be sent on this attachment.
        self._unsent: deque[int] = deque()
        #: Number that the peer gives to the next command it receives; -1 before our command-point.
        self._position = -1

    @property
    def kept_count(self) -> int:
        """Number of commands kept for replay."""
        return len(self._kept)

    @property
    def is_sending(self) -> bool:
        """Whether commands go out at once: our command-point is out and nothing is left to replay."""
        return self._position >= 0 and not self._unsent

    @property
    def is_full(self) -> bool:
        """Whether commands that can wait have to wait until the peer completes others."""
        return (
            self.octets - self._urgent_octets >= REPLAY_OCTETS_MAX
            or len(self._kept) - self._urgent_count >= REPLAY_MAX
            or self._outstanding_count >= OUTSTANDING_MAX
        )

    @property
    def takes_urgent(self) -> bool:
        """Whether a command that cannot wait may still be sent."""
        return self._urgent_count < URGENT_MAX and self._urgent_octets < URGENT_OCTETS_MAX

    def has_sent(self, number: int) -> bool:
        """Return whether *number* comes before the next command."""
        return precedes(number, self.next)

    def attach(self) -> None:
        """Begin a new attachment: no command-point of ours is known to the peer."""
        self._position = -1
        self._unsent.clear()

    def start(self, transport: Transport) -> None:
        """Send our command-point; commands kept from before are not repeated."""
        self._unsent.clear()
        self._move(transport, self.next)

    def send(
        self,
        transport: Transport | None,
        octets: bytes,
        header: bytes | None,
        body: Sequence[bytes] | None,
        *,
        urgent: bool,
    ) -> int:
        """Send a command, at once or after those that wait; return its number."""
        number = self.next
        self.next = advance(number)
        self.outstanding.add(number)
        self._outstanding_count += 1
        at_once = transport is not None and self.is_sending
        if self.keeps or not at_once:
            sent = SentCommand(octets, header, body, urgent=urgent)
            self._kept[number] = sent
            self.octets += sent.size
            if urgent:
                self._urgent_count += 1
                self._urgent_octets += sent.size
        if at_once:
            assert transport is not None
            transport.send_command(octets, header, body)
            self._position = self.next
        elif self._position >= 0:
            self._unsent.append(number)
        return number

    def keep(self, *, keeps: bool) -> None:
        """Keep commands for replay from now on, or drop those that have been kept and sent."""
        self.keeps = keeps
        if not keeps and self.is_sending:
            self._drop(list(self._kept))

    def complete(self, commands: RangeSet) -> RangeSet:
        """Note that the peer has completed *commands*; return those that were not complete before.

        Raises:
            CommandFault: Some have not been sent (542), or they leave too many ranges incomplete (506).
        """
        self._check(commands, "completed")
        fresh = commands.overlap(self.outstanding)
        if fresh:
            self.outstanding.subtract(fresh)
            self._outstanding_count -= len(fresh)
            if self._kept:
                self._drop(fresh.among(self._kept))
            if self.outstanding.range_count > OUTSTANDING_RANGES_MAX:
                raise CommandFault(
                    f"completed leaves more than {OUTSTANDING_RANGES_MAX} ranges incomplete",
                    ErrorCode.RESOURCE_LIMIT_EXCEEDED,
                )
        return fresh

    def confirm(self, commands: RangeSet) -> None:
        """Drop *commands* from replay: the peer will complete them.

        Raises:
            CommandFault: Some have not been sent (542).
        """
        self._check(commands, "confirmed")
        if self._kept:
            self._drop(commands.among(self._kept))

    def resume(self, transport: Transport, expected: RangeSet) -> None:
        """Have the commands repeated that the peer expects; :meth:`replay` sends them.

        Commands that it expects and that are not kept are covered by a gap. The last of *expected*
        stands for all numbers from there on.

        Raises:
            CommandFault: Some have not been sent (542).
        """
        end = advance(self.next)
        if expected.meets(end, advance(end, _HALF)):
            raise CommandFault(
                "expected has commands that have not been sent", ErrorCode.INVALID_ARGUMENT
            )
        wanted = expected.copy()
        last = wanted.ranges()[-1][1]
        if last != self.next:
            wanted.add(last, advance(self.next, -1))
        wanted.remove(self.next)
        repeated = wanted.among(self._kept)
        self._unsent.clear()
        self._unsent.extend(repeated)
        wanted.subtract(RangeSet([(number, number) for number in repeated]))
        lost = wanted.ranges()
        for start in range(0, len(lost), RANGES_MAX):
            transport.send_control(SessionGap(commands=RangeSet(lost[start : start + RANGES_MAX])))
        self._move(transport, self._unsent[0] if self._unsent else self.next)

    def replay(self, transport: Transport) -> bool:
        """Repeat commands as far as *transport* has room; return whether all have been sent."""
        unsent = self._unsent
        while unsent:
            if not transport.has_room:
                return False
            number = unsent.popleft()
            sent = self._kept.get(number)
            if sent is None:
                # Completed or confirmed meanwhile.
                continue
            if number != self._position:
                self._move(transport, number)
            transport.send_command(sent.octets, sent.header, sent.body)
            self._position = advance(number)
        if self._position != self.next:
            self._move(transport, self.next)
        if not self.keeps and self._kept:
            self._drop(list(self._kept))
        return True

    def _move(self, transport: Transport, number: int) -> None:
        transport.send_control(SessionCommandPoint(command_id=number, command_offset=0))
        self._position = number

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            sent = self._kept.pop(number)
            self.octets -= sent.size
            if sent.urgent:
                self._urgent_count -= 1
                self._urgent_octets -= sent.size

    def _check(self, commands: RangeSet, name: str) -> None:
        if commands.meets(self.next, advance(self.next, _HALF)):
            raise CommandFault(
                f"{name} has commands that have not been sent", ErrorCode.INVALID_ARGUMENT
            )
