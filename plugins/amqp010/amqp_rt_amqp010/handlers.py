"""Layers around a session, as it uses them: the handler above, the transport below, its carrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from .assembling import Assembly
from .layouts import Command, Composite, Control, ExecutionException
from .serials import RangeSet


class Later:
    """Type of :data:`LATER`."""


#: Answer of a handler that calls :meth:`~amqp_rt_amqp010.sessions.Session.complete` or ``fail`` later.
LATER: Final = Later()

#: How a command ends: None completes it, a struct is its result and completes it, or :data:`LATER`.
Answer: TypeAlias = Composite | Later | None


class CommandHandler(Protocol):
    """Layer above one session: carries out the commands of classes other than execution."""

    @property
    def is_congested(self) -> bool:
        """Whether so many commands wait in the handler that input of the channel should wait."""

    def execute(self, number: int, command: Command, assembly: Assembly, *, sync: bool) -> Answer:
        """Carry out *command*, which has the id *number*.

        A command with durable implications completes when they are on disk.

        Args:
            number: The command-id, for :meth:`~amqp_rt_amqp010.sessions.Session.complete` and ``fail``.
            command: The command.
            assembly: The same with its header and body.
            sync: Whether the peer waits for the completion.

        Raises:
            CommandFault: It failed; the session ends.
        """

    def on_result(self, number: int, value: object) -> None:
        """Handle ``execution.result`` for our command *number*; *value* is a struct or None.

        Raises:
            CommandFault: It has no result; the session ends.
        """

    def on_exception(self, exception: ExecutionException) -> None:
        """Handle the peer's exception for one of our commands; the peer detaches after it."""

    def on_completed(self, commands: RangeSet) -> None:
        """Handle the completion of our *commands*, which were not complete before; *commands* is ours.

        Their results have come before. Not called once the session has failed.
        """

    def on_ready(self) -> None:
        """Continue to send: ``can_send``, which was False, is True."""

    def on_suspended(self) -> None:
        """Stop sending: the session was detached and its state is kept. Credit is gone, nothing else."""

    def on_resumed(self) -> None:
        """Continue: the session is attached again, and commands kept for replay have been sent."""

    def on_ended(self) -> None:
        """Release everything: the state of the session has ended. Nothing is called after it."""


#: Carries out one command: its number, the command, and the same with its content.
Method: TypeAlias = Callable[[int, Any, Assembly], Answer]


class Transport(Protocol):
    """A channel of a connection, as the session that it carries uses it."""

    @property
    def has_room(self) -> bool:
        """Whether more output should be queued; replay waits while it is False."""

    @property
    def has_begun(self) -> bool:
        """Whether a command has begun to arrive and is incomplete."""

    def send_control(self, control: Control) -> None:
        """Encode and queue *control*."""

    def send_command(
        self, octets: bytes, header: bytes | None, body: Sequence[bytes] | None
    ) -> None:
        """Queue the frames of a command with its content."""

    def forget(self) -> None:
        """Drop the command that is incomplete, if any, and the rest of its frames."""

    def request_turn(self) -> None:
        """Have the attachment's ``turn`` called soon, and before the connection waits for input."""


class SessionCarrier(Protocol):
    """The attachment of a session to a channel."""

    @property
    def transport(self) -> Transport:
        """The channel."""

    def session_failed(self) -> None:
        """Drop input until ``detached`` comes: exception and ``detach`` are out, the session has ended."""

    def renew_session(self) -> None:
        """Begin with a new session of the same key: the peer has no state of this one."""

    def give_up(self, now: float) -> None:
        """Detach with ``session-busy``: another transport attaches by force, at time *now*."""
