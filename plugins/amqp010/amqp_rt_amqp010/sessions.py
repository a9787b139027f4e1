"""Sessions: the state of commands in both directions, which outlives the channel that carries them.

A session reads no clock and opens no stream. It hands commands to its handler and queues output on the
transport of its carrier, a channel's :class:`~amqp_rt_amqp010.attachments.Attachment`. It is the same for
both peers; which of them attaches is the carrier's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .assembling import Assembly
from .codec import read_command, write_command
from .faults import CommandFault
from .handlers import Answer, CommandHandler, Later, SessionCarrier, Transport
from .layouts import (
    Command,
    Composite,
    Control,
    ErrorCode,
    ExecutionException,
    ExecutionResult,
    ExecutionSync,
    MessageTransfer,
    SessionCommandPoint,
    SessionCompleted,
    SessionConfirmed,
    SessionDetach,
    SessionExpected,
    SessionFlush,
    SessionGap,
    SessionKnownCompleted,
)
from .limits import (
    EXECUTING_MAX,
    RANGES_MAX,
    TIMELY_RANGES,
    WAITING_MAX,
    WAITING_TURN,
)
from .receiving import CommandReceiver
from .sending import CommandSender
from .serials import RangeSet
from .waiting import WaitingInput


class SessionKey(NamedTuple):
    """Identity of a session: names are scoped to a principal."""

    #: The virtual host.
    host: str
    #: The user; None for all anonymous ones, who are one principal.
    user: str | None
    name: bytes


class CommandPointMissing(Exception):
    """Command data came before any command-point of this attachment: detach with ``unknown-ids``."""


class Session:
    """Commands of one session in both directions.

    Args:
        key: Its identity.
        open_handler: Makes the layer above; called once, from here.
        first: Number of the first command that is sent.
    """

    def __init__(
        self,
        key: SessionKey,
        open_handler: Callable[[Session], CommandHandler],
        *,
        first: int = 0,
    ) -> None:
        self.key = key
        #: Seconds for which the state outlives an attachment.
        self.timeout_s = 0
        #: The attachment; None while there is none.
        self.carrier: SessionCarrier | None = None
        #: Whether the state has ended; every method does nothing from then on.
        self.ended = False
        self.receiver = CommandReceiver()
        self.sender = CommandSender(first)
        self._known = False
        #: Whether ``expected`` of the peer is missing on resumption. Its commands wait until that comes:
        #: if it is empty the peer is new, and they are not those that we have seen.
        self._awaits = False
        #: Whether commands are being replayed. Until they are out no completion is, because results
        #: may be among them, which come before the completion of their commands.
        self._resuming = False
        self._waiting = WaitingInput()
        #: Sets that the peer has asked for since the last turn.
        self._owes_expected = False
        self._owes_confirmed = False
        self._owes_completed = False
        #: Commands that the peer has completed since the last turn, where it asks for the echo.
        self._echo = RangeSet()
        self._owes_echo = False
        #: The exception that ends the session, while it cannot be sent.
        self._failure: ExecutionException | None = None
        #: Whether the handler waits for room.
        self._starved = False
        #: Latest transfer of the peer, which publishers repeat: its octets, and what they say.
        self._transfer_octets = b""
        self._transfer: tuple[MessageTransfer, bool] | None = None
        #: Calls of the handler that are due in the next turn.
        self._due: dict[Callable[[], None], None] = {}
        self.handler = open_handler(self)

    # --- for the handler --------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether transfers may be sent; ``on_ready`` or ``on_resumed`` of the handler tell of a change."""
        return self._is_settled and self._failure is None and not self.sender.is_full

    @property
    def is_congested(self) -> bool:
        """Whether input of the channel should wait, because as much of it is in hand as may be."""
        return (
            self.receiver.executing >= EXECUTING_MAX
            or (len(self._waiting) > 0 and not self._awaits)
            or self.handler.is_congested
        )

    @property
    def failed(self) -> bool:
        """Whether an exception ends the session, now or when it can be sent: execute nothing more."""
        return self._failure is not None

    def send(
        self,
        octets: bytes,
        header: bytes | None = None,
        body: Sequence[bytes] | None = None,
        *,
        urgent: bool = False,
    ) -> int:
        """Send a command; while the session is detached or resuming it is kept and sent later.

        Args:
            octets: The command segment.
            header: The header segment; None for none.
            body: Pieces of the body segment; None for none.
            urgent: Whether it cannot wait until ``can_send`` is True. Too many of these end the session.

        Returns:
            The command-id; -1 if the session has ended, or ends by this.
        """
        if self.ended:
            return -1
        if urgent and not self.sender.takes_urgent:
            text = "too many commands are kept for replay: complete some of them"
            self.fail(CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED))
            return -1
        return self._send(octets, header, body, urgent=urgent)

    def _send(
        self,
        octets: bytes,
        header: bytes | None,
        body: Sequence[bytes] | None,
        *,
        urgent: bool,
    ) -> int:
        transport = None if self.carrier is None else self.carrier.transport
        number = self.sender.send(transport, octets, header, body, urgent=urgent)
        if self.sender.is_full and not self._starved and self._failure is None:
            self._starved = True
            if transport is not None:
                transport.send_control(SessionFlush(confirmed=True, completed=True))
        return number

    def complete(self, number: int, result: Composite | None = None) -> None:
        """Complete command *number*, after *result* if it has one; nothing if it is not in execution."""
        if self.ended or not self.receiver.executes(number):
            return
        if result is not None:
            octets = write_command(ExecutionResult(command_id=number, value=result))
            if self.send(octets, urgent=True) < 0:
                return
        self.receiver.finish(number)
        self._request_turn()

    def at_turn(self, call: Callable[[], None]) -> None:
        """Call *call* once, in the next turn before completions are reported, or before the session fails.

        A handler sends commands there that belong together and come before the completion of others.
        Equal functions are called once. Not called if the state ends before.
        """
        if not self.ended:
            self._due[call] = None
            self._request_turn()

    def _call_due(self) -> None:
        while self._due and not self.ended:
            due, self._due = self._due, {}
            for call in due:
                call()

    def fail(self, fault: CommandFault, number: int | None = None) -> None:
        """End the session by an exception; the state of a detached one ends when it has been told.

        Args:
            fault: The reason.
            number: The command that failed, which never completes; None if it was none.
        """
        if self._failure is None:
            self._call_due()
        # One of these calls may have ended the session, or failed itself.
        self._fail(fault, number)

    def _fail(self, fault: CommandFault, number: int | None) -> None:
        if self.ended or self._failure is not None:
            return
        self._failure = ExecutionException(
            error_code=fault.code,
            command_id=number,
            class_code=fault.class_code,
            command_code=fault.command_code,
            field_index=fault.field_index,
            description=fault.text,
        )
        if self._awaits and number is None and self.carrier is not None:
            # Input is lost, and with it the session, whether the peer knows this state or not. It gets
            # no replay, and no completion, because a result may be missing that comes before it.
            self._awaits = False
            self.receiver.changed = False
            self.sender.start(self.carrier.transport)
        if not self._awaits:
            self._waiting.clear()
        if self._is_settled:
            self._conclude()

    # --- attachment -------------------------------------------------------------------------------

    @property
    def _is_settled(self) -> bool:
        return self.sender.is_sending and not self._resuming and self.carrier is not None

    @property
    def kept_octets(self) -> int:
        """Octets that the session holds while it is detached."""
        return len(self.key.name) + self.sender.octets

    def set_timeout(self, timeout_s: int) -> None:
        """Set how many seconds the state outlives an attachment; commands are kept for that only."""
        self.timeout_s = timeout_s
        self.sender.keep(keeps=timeout_s > 0)

    def inherit(self, old: Session) -> None:
        """Take over requests and input from *old*, whose key is the same: the peer turned out to be new."""
        self.set_timeout(old.timeout_s)
        self._waiting = old._waiting.taken()
        self._owes_expected = old._owes_expected
        self._owes_confirmed = old._owes_confirmed
        self._owes_completed = old._owes_completed

    def begin(self, carrier: SessionCarrier) -> None:
        """Begin an attachment to *carrier*, which has sent or received ``attached``."""
        self.carrier = carrier
        if self._known:
            # The last report of complete commands may be lost.
            self.receiver.changed = True
            self._awaits = True
            flush = SessionFlush(expected=True, confirmed=True, completed=True)
            carrier.transport.send_control(flush)
        else:
            self._known = True
            self.sender.start(carrier.transport)

    def suspend(self) -> None:
        """End the attachment and keep the state."""
        self.receiver.started = False
        self.sender.attach()
        self._awaits = self._resuming = False
        self._owes_expected = self._owes_confirmed = self._owes_completed = False
        self._echo.clear()
        self._owes_echo = False
        self._waiting.clear()
        self.leave()

    def leave(self) -> None:
        """End the attachment and stop sending; the state ends soon, and is never attached again."""
        self.carrier = None
        self.handler.on_suspended()

    def end(self) -> None:
        """End the state, and the attachment."""
        if not self.ended:
            # Input that waits remains, for inherit to take over.
            self.ended = True
            self.carrier = None
            self._due.clear()
            self.handler.on_ended()

    # --- input ------------------------------------------------------------------------------------

    @property
    def executes_at_once(self) -> bool:
        """Whether a command that comes now is a new one, and does not wait for others here."""
        receiver = self.receiver
        return (
            not (self.ended or self.failed or self._awaits or len(self._waiting))
            and receiver.started
            and receiver.next_is_new
        )

    def receive_command(self, assembly: Assembly) -> None:
        """Execute a command, or keep it until ``expected`` of the peer has come.

        Raises:
            CommandPointMissing: No command-point has come on this attachment.
        """
        if self.ended:
            return
        if self._awaits or len(self._waiting):
            self._wait(assembly)
        elif self._failure is None:
            self._execute(assembly)

    def fail_input(self, fault: CommandFault) -> None:
        """End the session for *fault* of a command that could not be received.

        Raises:
            CommandPointMissing: No command-point has come on this attachment.
        """
        if self.ended:
            return
        if self._awaits or len(self._waiting):
            # Its number is not known yet.
            self.fail(fault)
        elif self.receiver.started:
            self.fail(fault, self.receiver.next)
        else:
            raise CommandPointMissing

    def receive_control(self, control: Control) -> None:
        """Handle a control of class session that is not about attachment."""
        if self.ended:
            return
        if isinstance(control, SessionCompleted) and control.timely_reply:
            # At once, even if it waits: a peer may send nothing more until it has the reply.
            self._owe_echo(control.commands or RangeSet())
        if not self._awaits and not len(self._waiting):
            self._on_control(control)
        elif isinstance(control, SessionGap) and self.carrier and self.carrier.transport.has_begun:
            self.fail(_invalid("a gap within a command that waits"))
        elif self._awaits and not isinstance(control, (SessionCommandPoint, SessionGap)):
            if isinstance(control, SessionFlush) and not control.expected:
                # It is about the commands that wait. A peer that asks for expected, too, resumes, and
                # waits for our answer as we wait for its own.
                self._wait(control)
            elif isinstance(control, SessionCompleted) and len(self._waiting):
                # The result of a command comes before its completion, and may be among what waits.
                self._wait(control)
            else:
                self._on_control(control)
        else:
            # In its place: a completion follows the result that may wait before it.
            self._wait(control)

    def _wait(self, item: Assembly | Control) -> None:
        self._waiting.add(item)
        if self._waiting.octets > WAITING_MAX:
            text = f"more than {WAITING_MAX} octets before expected"
            self.fail(CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED))

    def _execute(self, assembly: Assembly) -> None:
        receiver = self.receiver
        if not receiver.started:
            raise CommandPointMissing
        number = receiver.arrive()
        if number < 0:
            return
        command: Command | None = None
        try:
            content = assembly.content
            if content == self._transfer_octets and self._transfer is not None:
                command, sync = self._transfer
            else:
                command, sync = read_command(content)
                if isinstance(command, MessageTransfer):
                    self._transfer_octets, self._transfer = content, (command, sync)
            if isinstance(command, ExecutionSync):
                receiver.begin(number, barrier=True)
                return
            # The handler may complete it before it returns.
            receiver.begin(number)
            answer: Answer = None
            if isinstance(command, ExecutionResult):
                self._on_result(command)
            elif isinstance(command, ExecutionException):
                # Its sender detaches next, and keeps nothing.
                self.set_timeout(0)
                self.handler.on_exception(command)
            else:
                answer = self.handler.execute(number, command, assembly, sync=sync)
        except CommandFault as fault:
            if command is not None and fault.class_code is None:
                fault.class_code, fault.command_code = command.CODE >> 8, command.CODE & 0xFF
            self.fail(fault, number)
            return
        if not isinstance(answer, Later):
            self.complete(number, answer)

    def _on_result(self, command: ExecutionResult) -> None:
        number = command.command_id
        if number is None or not self.sender.has_sent(number):
            raise _invalid(f"a result for command {number}, which has not been sent")
        self.handler.on_result(number, command.value)

    def _on_control(self, control: Control, *, waited: bool = False) -> None:
        try:
            if isinstance(control, SessionCompleted):
                self._on_completed(control.commands or RangeSet())
            elif isinstance(control, SessionKnownCompleted):
                self.receiver.know_completed(control.commands or RangeSet())
            elif isinstance(control, SessionFlush):
                # Answered once a turn, however many there are: the sets may be large.
                self._owes_expected |= control.expected
                self._owes_confirmed |= control.confirmed
                self._owes_completed |= control.completed
            elif isinstance(control, SessionCommandPoint):
                if control.command_offset:
                    raise _invalid("commands are repeated from their beginning: offset 0")
                self.receiver.set_point(control.command_id or 0)
            elif isinstance(control, SessionGap):
                covers = self.receiver.skip(control.commands or RangeSet())
                if covers and not waited and self.carrier is not None:
                    self.carrier.transport.forget()
            elif isinstance(control, SessionConfirmed):
                self.sender.confirm(control.commands or RangeSet())
                self._notify_room()
            elif isinstance(control, SessionExpected) and self._awaits:
                self._on_expected(control.commands or RangeSet())
        except CommandFault as fault:
            self.fail(fault)

    def _owe_echo(self, commands: RangeSet) -> None:
        # On request only: qpid.messaging knows no such control. Others keep what they complete as few
        # ranges meanwhile.
        if self._echo.range_count + commands.range_count > RANGES_MAX:
            self._send_echo()
        self._echo.update(commands)
        self._owes_echo = True

    def _on_completed(self, commands: RangeSet) -> None:
        fresh = self.sender.complete(commands)
        # A session that has failed drops commands, and with them results that come before completions.
        if fresh and self._failure is None:
            self.handler.on_completed(fresh)
            self._notify_room()

    def _on_expected(self, commands: RangeSet) -> None:
        assert self.carrier is not None
        if not commands:
            self.carrier.renew_session()
            return
        self.sender.resume(self.carrier.transport, commands)
        self._awaits = False
        self._resuming = True

    def _notify_room(self) -> None:
        if self._starved and self.can_send:
            self._starved = False
            self.handler.on_ready()

    # --- output -----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Handle input that waited, replay commands, and send the sets that are due.

        Called after each chunk of input, when it has been requested, and when the transport has room
        again.

        Raises:
            CommandPointMissing: A command waited, and no command-point before it.
        """
        if self.ended:
            return
        if not self._awaits and len(self._waiting):
            if self._failure is None:
                self._run_waiting()
            else:
                self._waiting.clear()
        if self.carrier is None:
            return
        transport = self.carrier.transport
        if self._owes_echo:
            self._send_echo()
        if self._owes_expected:
            self._owes_expected = False
            transport.send_control(SessionExpected(commands=self.receiver.expected))
        if self._awaits:
            return
        if self._resuming:
            if not self.sender.replay(transport):
                return
            self._resuming = False
            self._starved = self.sender.is_full
            self.handler.on_resumed()
        self._call_due()
        if self.carrier is None:
            # One of them has ended the session.
            return
        self._send_sets(transport)
        if self._failure is not None and self._is_settled:
            self._conclude()

    def _run_waiting(self) -> None:
        waiting = self._waiting
        for _ in range(WAITING_TURN):
            if not len(waiting):
                return
            item = waiting.take()
            if isinstance(item, Control):
                self._on_control(item, waited=True)
            else:
                self._execute(item)
        if len(waiting):
            self._request_turn()

    def _send_sets(self, transport: Transport) -> None:
        receiver = self.receiver
        completed = receiver.completed
        if completed.range_count > RANGES_MAX:
            text = f"more than {RANGES_MAX} ranges are complete and not known-completed"
            self.fail(CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED))
            return
        if self._owes_confirmed:
            self._owes_confirmed = False
            transport.send_control(SessionConfirmed(commands=completed.copy()))
        if self._owes_completed or (receiver.changed and completed):
            self._owes_completed = False
            self._send_completed(transport)
        receiver.changed = False

    def _send_completed(self, transport: Transport) -> None:
        # The whole set: a peer would wait for commands that are left out.
        completed = self.receiver.completed
        timely = completed.range_count >= TIMELY_RANGES
        transport.send_control(SessionCompleted(commands=completed.copy(), timely_reply=timely))

    def _send_echo(self) -> None:
        if self.carrier is not None:
            self.carrier.transport.send_control(SessionKnownCompleted(commands=self._echo.copy()))
        self._echo.clear()
        self._owes_echo = False

    def _conclude(self) -> None:
        """Send the complete set, the exception and ``detach``; the state ends."""
        carrier, failure = self.carrier, self._failure
        assert carrier is not None and failure is not None  # noqa: PT018
        if self.receiver.changed and 0 < self.receiver.completed.range_count <= RANGES_MAX:
            self._send_completed(carrier.transport)
        self._send(write_command(failure), None, None, urgent=True)
        carrier.transport.send_control(SessionDetach(name=self.key.name))
        self.end()
        carrier.session_failed()

    def _request_turn(self) -> None:
        if self.carrier is not None:
            self.carrier.transport.request_turn()


def _invalid(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT)
