"""Channels of AMQP 0-10 without a connection: real attachments and sessions, whose output is recorded."""

from __future__ import annotations

from collections.abc import Sequence

from amqp_rt_amqp010.assembling import Assembly
from amqp_rt_amqp010.attachments import Attachment
from amqp_rt_amqp010.codec import read_command, write_command
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.frames import COMMAND
from amqp_rt_amqp010.handlers import LATER, Answer
from amqp_rt_amqp010.layouts import (
    Command,
    Control,
    ErrorCode,
    ExecutionException,
    QueueDelete,
    QueuePurge,
    QueueQuery,
    QueueQueryResult,
    SessionAttach,
    SessionAttached,
    SessionCommandPoint,
    SessionDetach,
    SessionDetached,
    SessionRequestTimeout,
    SessionTimeout,
)
from amqp_rt_amqp010.registry import SessionRegistry
from amqp_rt_amqp010.serials import RangeSet
from amqp_rt_amqp010.sessions import Session

NAME = b"s"


def ranges(*pairs: tuple[int, int]) -> RangeSet:
    return RangeSet(pairs)


def point(number: int = 0) -> SessionCommandPoint:
    return SessionCommandPoint(command_id=number, command_offset=0)


def assembly(command: Command, *, sync: bool = False) -> Assembly:
    made = Assembly(1, COMMAND)
    made.content = write_command(command, sync=sync)
    return made


class Actor:
    """Handler whose answer is told by the command: a deletion completes later, a query has a result, a
    purge fails, everything else completes at once.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.executed: list[tuple[int, Command]] = []
        self.synced: list[int] = []
        self.events: list[object] = []
        self.is_congested = False

    def execute(
        self,
        number: int,
        command: Command,
        assembly: Assembly,
        *,
        sync: bool,
    ) -> Answer:
        self.executed.append((number, command))
        if sync:
            self.synced.append(number)
        if isinstance(command, QueueDelete):
            return LATER
        if isinstance(command, QueueQuery):
            return QueueQueryResult(queue=command.queue)
        if isinstance(command, QueuePurge):
            raise CommandFault("no such queue", ErrorCode.NOT_FOUND, field_index=0)
        return None

    def on_result(self, number: int, value: object) -> None:
        self.events.append(("result", number, value))

    def on_exception(self, exception: ExecutionException) -> None:
        self.events.append(("exception", exception.command_id))

    def on_completed(self, commands: RangeSet) -> None:
        self.events.append(("completed", commands.ranges()))

    def on_ready(self) -> None:
        self.events.append("ready")

    def on_suspended(self) -> None:
        self.events.append("suspended")

    def on_resumed(self) -> None:
        self.events.append("resumed")

    def on_ended(self) -> None:
        self.events.append("ended")


class RecordedTransport:
    """A channel that keeps what is sent, decoded."""

    def __init__(self) -> None:
        self.sent: list[Control | Command] = []
        self.has_room = True
        self.has_begun = False
        #: Commands and controls after which there is no more room; None for any number.
        self.room_for: int | None = None
        self.turns = 0
        #: Bodies of the commands sent.
        self.bodies: list[bytes] = []

    def _add(self, item: Control | Command) -> None:
        self.sent.append(item)
        if self.room_for is not None:
            self.room_for -= 1
            self.has_room = self.room_for > 0

    def send_control(self, control: Control) -> None:
        self._add(control)

    def send_command(
        self,
        octets: bytes,
        header: bytes | None,
        body: Sequence[bytes] | None,
    ) -> None:
        self._add(read_command(octets)[0])
        if body is not None:
            self.bodies.append(b"".join(body))

    def forget(self) -> None:
        self.has_begun = False

    def request_turn(self) -> None:
        self.turns += 1


class Scene:
    """A broker's sessions, its channels, and the time."""

    def __init__(self) -> None:
        self.registry = SessionRegistry()
        self.actors: list[Actor] = []
        self.now = 100.0

    def channel(self, user: str | None = "u", host: str = "h") -> Channel:
        return Channel(self, user, host)

    def attached(self, *, timeout: int = 0, name: bytes = NAME, at: int = 0) -> Channel:
        """Return a channel with a new session, whose first output has been taken."""
        made = self.channel()
        controls: list[Control] = [SessionAttach(name=name), point(at)]
        if timeout:
            controls.append(SessionRequestTimeout(timeout=timeout))
        made.control(*controls)
        expected: list[Control] = [SessionAttached(name=name), point()]
        if timeout:
            expected.append(SessionTimeout(timeout=timeout))
        assert made.taken() == expected
        return made

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.registry.tick(self.now)

    def _open(self, session: Session) -> Actor:
        self.actors.append(Actor(session))
        return self.actors[-1]


class Channel:
    """A channel, written to as a client writes; each call is a chunk of input."""

    def __init__(self, scene: Scene, user: str | None, host: str) -> None:
        self.scene = scene
        self.transport = RecordedTransport()
        self.attachment = Attachment(scene.registry, self.transport, host, user, scene._open)

    @property
    def session(self) -> Session:
        assert self.attachment.session is not None
        return self.attachment.session

    @property
    def actor(self) -> Actor:
        handler = self.session.handler
        assert isinstance(handler, Actor)
        return handler

    def control(self, *controls: Control) -> None:
        for control in controls:
            self.attachment.receive_control(control, self.scene.now)
        self.turn()

    def command(self, *commands: Command, sync: bool = False) -> None:
        for command in commands:
            self.attachment.receive_command(assembly(command, sync=sync), self.scene.now)
        self.turn()

    def turn(self) -> None:
        self.attachment.turn(self.scene.now)

    def taken(self) -> list[Control | Command]:
        """Return what has been sent since the last call."""
        sent = self.transport.sent[:]
        self.transport.sent.clear()
        return sent

    def refused(self, *, name: bytes | None = None) -> int:
        """Take the output, which is ``detached``; return its code."""
        (answer,) = self.taken()
        assert isinstance(answer, SessionDetached)
        assert name is None or answer.name == name
        assert answer.code is not None
        return answer.code

    def failure(self) -> ExecutionException:
        """Take the output, which ends with an exception and ``detach``; return the exception."""
        sent = self.taken()
        assert isinstance(sent[-1], SessionDetach)
        exception = sent[-2]
        assert isinstance(exception, ExecutionException)
        return exception
