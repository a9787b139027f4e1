"""Context of a session, and the order in which its commands are carried out.

Commands follow each other. One that takes steps, such as a purge or the attach of a link, holds up those after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from amqp_rt.fronts import AmqpError, Event, Limits, Topology, TransactionBranches
from amqp_rt.fronts.anchors import Anchor

from .assembling import Assembly
from .contexts import WAIT, Connection, Steps
from .faults import CommandFault
from .handlers import LATER, Answer, Later
from .layouts import Command
from .limits import COMMAND_COST, HELD_MAX, HELD_OCTETS_MAX
from .sessions import Session
from .transports import ChannelTransport

#: Work on the commands of one session within one turn, in frames.
_WORK_MAX: Final = 200


class SessionContext:
    """Context of the parts of one session (:class:`~amqp_rt_amqp010.contexts.Context`).

    Args:
        session: The session.
        anchor: Session and connection of its links.
        topology: Queues and exchanges that the peer may declare; None if nothing can be declared.
        branches: Branches of distributed transactions that the peer may use; None if there are none.
        carry_out: Carries out a command.
    """

    def __init__(
        self,
        session: Session,
        anchor: Anchor,
        topology: Topology | None,
        branches: TransactionBranches | None,
        carry_out: Callable[[int, Command, Assembly], Answer],
    ) -> None:
        self.session = session
        self.anchor = anchor
        self.topology = topology
        self.branches = branches
        self.order = CommandOrder(session, carry_out)
        #: Events reported while the session was detached.
        self._events: list[Event] = []

    @property
    def connection(self) -> Connection | None:
        """The connection that carries the session; None while it is detached."""
        return connection_of(self.session)

    @property
    def limits(self) -> Limits:
        """Bounds on resources that the peer may use."""
        return self.anchor.limits

    def report(self, event: Event) -> None:
        """Queue *event* for the container: at once, or when the session is attached again."""
        connection = self.connection
        if connection is None:
            self._events.append(event)
        else:
            connection.report(event)

    def report_waiting(self) -> None:
        """Report the events that waited for an attachment."""
        events, self._events = self._events, []
        for event in events:
            self.report(event)

    def run(self, number: int, command: Command, steps: Steps) -> Later:
        """Carry out *command*, which has the id *number*, in steps; commands after it wait for it."""
        return self.order.run(number, command, steps)

    def wake(self) -> None:
        """Continue steps that have yielded :data:`~amqp_rt_amqp010.contexts.WAIT`."""
        self.order.wake()


class _Held(NamedTuple):
    """A command that waits for one before it."""

    number: int
    command: Command
    assembly: Assembly
    octets: int


class CommandOrder:
    """Steps of the present command, and the commands after it.

    While the session is detached nothing goes on here.

    Args:
        session: The session.
        carry_out: Carries out a command.
    """

    def __init__(
        self, session: Session, carry_out: Callable[[int, Command, Assembly], Answer]
    ) -> None:
        self._session = session
        self._carry_out = carry_out
        #: The command that is carried out in steps, with its number; None if there is none.
        self._steps: Steps | None = None
        self._number = 0
        self._command: Command | None = None
        #: Whether the steps wait to be woken, and whether they were woken before they began to wait.
        self._waits = False
        self._woken = False
        #: Whether commands are being carried out here, and whether a step is running.
        self._running = False
        self._stepping = False
        self._held: deque[_Held] = deque()
        self._held_octets = 0

    @property
    def is_busy(self) -> bool:
        """Whether a new command has to wait."""
        return self._steps is not None or bool(self._held)

    @property
    def is_congested(self) -> bool:
        """Whether so much waits that no more should be read."""
        return len(self._held) >= HELD_MAX or self._held_octets >= HELD_OCTETS_MAX

    def hold(self, number: int, command: Command, assembly: Assembly) -> None:
        """Keep *command* until those before it have been carried out."""
        header = 0 if assembly.header is None else len(assembly.header)
        octets = COMMAND_COST + len(assembly.content) + header + assembly.body_size
        self._held.append(_Held(number, command, assembly, octets))
        self._held_octets += octets

    def run(self, number: int, command: Command, steps: Steps) -> Later:
        """Carry out *command* in *steps*, as far as the work of this turn goes."""
        assert self._steps is None
        self._steps = steps
        self._number = number
        self._command = command
        self._waits = self._woken = False
        if not self._running:
            self.go_on()
        return LATER

    def wake(self) -> None:
        """Continue the steps soon, if they wait."""
        if self._waits:
            self._waits = False
            self.resume()
        else:
            self._woken = True

    def resume(self) -> None:
        """Continue soon, if there is something to do and the session is attached."""
        connection = connection_of(self._session)
        if connection is not None and self.is_busy and not self._waits:
            connection.schedule(self.go_on)

    def go_on(self) -> None:
        """Run steps and held commands, as far as the work of one turn goes."""
        if self._running:
            return
        self._running = True
        try:
            left = _WORK_MAX
            while left > 0 and self._can_go_on():
                left -= self._advance() if self._steps is not None else self._carry_out_next()
        finally:
            self._running = False
        connection = connection_of(self._session)
        if connection is not None and self.is_busy and not self._waits:
            connection.work_later(self.go_on)

    def _can_go_on(self) -> bool:
        session = self._session
        if session.ended or session.failed:
            self.end()
        return self.is_busy and not self._waits and session.carrier is not None

    def _advance(self) -> int:
        """Run one step of the present command; return its work."""
        steps, number, command = self._steps, self._number, self._command
        assert steps is not None
        assert command is not None
        self._stepping = True
        try:
            work = next(steps)
        except StopIteration as stop:
            self._steps = self._command = None
            self._answer(number, stop.value)
            return 1
        except (CommandFault, AmqpError) as error:
            self._steps = self._command = None
            self._session.fail(fault_of(error, command), number)
            return 1
        finally:
            self._stepping = False
        if self._steps is not steps:
            # The session ended within the step.
            steps.close()
            return 1
        if work == WAIT:
            self._waits = not self._woken
            self._woken = False
            return 1
        if (connection := connection_of(self._session)) is not None:
            connection.spend(work)
        return max(work, 1)

    def _carry_out_next(self) -> int:
        held = self._held.popleft()
        self._held_octets -= held.octets
        try:
            answer = self._carry_out(held.number, held.command, held.assembly)
        except CommandFault as fault:
            self._session.fail(fault_of(fault, held.command), held.number)
            return 1
        self._answer(held.number, answer)
        if (connection := connection_of(self._session)) is not None:
            connection.spend(1)
        return 1

    def _answer(self, number: int, answer: Answer) -> None:
        if not isinstance(answer, Later):
            self._session.complete(number, answer)

    def end(self) -> None:
        """Drop all commands: the session has ended or failed."""
        steps, self._steps = self._steps, None
        self._command = None
        self._waits = False
        self._held.clear()
        self._held_octets = 0
        # A step that runs is closed after it.
        if steps is not None and not self._stepping:
            steps.close()


def fault_of(error: CommandFault | AmqpError, command: Command) -> CommandFault:
    """Return *error* as a fault of *command*."""
    fault = error if isinstance(error, CommandFault) else CommandFault.of(error)
    if fault.class_code is None:
        fault.class_code, fault.command_code = command.CODE >> 8, command.CODE & 0xFF
    if fault.field and fault.field_index is None:
        fault.field_index = command.__struct_fields__.index(fault.field)
    return fault


def connection_of(session: Session) -> Connection | None:
    """Return the connection that carries *session*; None while it is detached."""
    carrier = session.carrier
    if carrier is None:
        return None
    transport = carrier.transport
    assert isinstance(transport, ChannelTransport)
    return transport.connection
