"""Channels of a connection, each of which carries at most one session at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from amqp_rt.fronts import Error
from amqp_rt.fronts.links import FrontLink

from .assembling import Assembly
from .attachments import Attachment, AttachmentStage
from .deliveries import OutgoingDelivery
from .faults import CommandFault
from .handlers import CommandHandler
from .handling import Handler
from .layouts import Control
from .registry import SessionRegistry
from .sessions import Session
from .transports import ChannelConnection, ChannelTransport


class Channel:
    """A channel in use, and the session attached to it.

    Args:
        connection: Its connection.
        number: The channel number.
        registry: The sessions of the broker.
        open_handler: Makes the layer above a new session.
    """

    def __init__(
        self,
        connection: ChannelConnection,
        number: int,
        registry: SessionRegistry,
        open_handler: Callable[[Session], CommandHandler],
    ) -> None:
        self._connection = connection
        #: The channel number, by which management names its session.
        self.channel = number
        peer = connection.peer
        transport = ChannelTransport(connection, number)
        self._attachment = Attachment(
            registry, transport, peer.virtual_host, peer.user, open_handler
        )

    @property
    def is_free(self) -> bool:
        """Whether no session is attached or being detached."""
        return self._attachment.stage is AttachmentStage.FREE

    @property
    def is_congested(self) -> bool:
        """Whether input of this channel should wait."""
        return self._attachment.is_congested

    @property
    def _handler(self) -> Handler | None:
        session = self._attachment.session
        handler = None if session is None else session.handler
        return handler if isinstance(handler, Handler) else None

    @property
    def links(self) -> Mapping[int, FrontLink]:
        """Links of the session, by handle."""
        handler = self._handler
        return {} if handler is None else {link.handle: link for link in handler.links}

    @property
    def sent_unsettled(self) -> Mapping[int, OutgoingDelivery]:
        """Messages that the client has acquired and not settled, in the order of sending."""
        handler = self._handler
        return {} if handler is None else handler.unsettled

    @property
    def subscription_count(self) -> int:
        """Number of subscriptions of the session."""
        handler = self._handler
        return 0 if handler is None else handler.subscription_count

    def end(self, error: Error) -> None:
        """End the session by an exception for *error*."""
        if self._attachment.session is not None:
            self._attachment.session.fail(CommandFault.of(error))

    # --- input, for the connection ----------------------------------------------------------------

    def receive_control(self, control: Control, now: float) -> None:
        """Handle a control of class session.

        Raises:
            ConnectionFault: It is a command-point within a command.
        """
        before = self._attachment.session
        self._attachment.receive_control(control, now)
        if self._attachment.session is not before and (handler := self._handler) is not None:
            connection = self._connection
            most = connection.limits.connection_subscriptions_max
            if handler.subscription_count and connection.count_subscriptions() > most:
                # Sessions of many connections are not gathered on one beyond what it may have itself.
                self._attachment.give_up(now)
            else:
                handler.on_attached(connection)

    def receive_command(self, assembly: Assembly, now: float) -> None:
        """Handle a command."""
        self._attachment.receive_command(assembly, now)

    def fail(self, fault: CommandFault, now: float) -> None:
        """End the session for *fault* of a command that could not be received."""
        self._attachment.fail(fault, now)

    def turn(self, now: float) -> None:
        """Send the replies and sets that are due."""
        self._attachment.turn(now)

    def salvage(self, assembly: Assembly) -> None:
        """Keep what is worth it of a command that will not be complete: the connection is gone."""
        session, handler = self._attachment.session, self._handler
        if session is not None and handler is not None and session.executes_at_once:
            handler.salvage(assembly)

    def lose(self, now: float, *, at_once: bool) -> None:
        """Detach the session: the connection is gone. Unless *at_once*, it ends in a later turn."""
        self._attachment.lose(now, at_once=at_once)
