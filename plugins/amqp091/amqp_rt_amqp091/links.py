"""Links of a channel, as containers and brokers see them (:mod:`amqp_rt.fronts.base`).

``basic.consume`` and ``basic.get`` are sending links, whose credit is the prefetch; published
messages arrive on receiving links; transactions have a control link. No link outlives its channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from amqp_rt.fronts import (
    SENDER,
    Coordinator,
    LocalProtocolError,
    Payload,
    Source,
    Target,
    UnsettledMap,
)
from amqp_rt.fronts.base import SND_SETTLED, SND_UNSETTLED
from amqp_rt.fronts.links import LINK_DETACH, UNBOUNDED, FrontLink, FrontReceivingLink

from .outgoing import OutgoingDelivery

if TYPE_CHECKING:
    from .sessions import ServerConnection, Session
    from .window import DeliveryWindow

#: Messages sent to the consumers of a connection within one turn; more follow in the next one.
_GIVEN_MAX: Final = 100

#: Inlet of a node (None if the link itself carries the messages), the link and the node's name.
Way: TypeAlias = tuple[Any, FrontReceivingLink, str]


class SendingLink(FrontLink):
    """A consumer, or the link of ``basic.get`` for one queue.

    Args:
        session: The session of its channel.
        window: Unsettled deliveries of the channel, and the bounds on them.
        deliver: Called with the link, a message, its context and whether it is settled; writes the
            message and returns its delivery.
        name: Its consumer-tag, or another name.
        source: Source of the messages.
        no_ack: Whether messages are settled when sent.
        prefetch: Unsettled messages that it may have, 0 for any number.
    """

    role = SENDER
    connection: ServerConnection

    def __init__(
        self,
        session: Session,
        window: DeliveryWindow,
        deliver: Callable[[SendingLink, bytes, Any, bool], OutgoingDelivery],
        name: str,
        source: Source,
        *,
        no_ack: bool,
        prefetch: int,
    ) -> None:
        super().__init__(session, session.engine, name)
        self.window = window
        self.deliver = deliver
        source.expiry_policy = LINK_DETACH
        self.source = source
        self.target = Target(expiry_policy=LINK_DETACH)
        self.snd_settle_mode = SND_SETTLED if no_ack else SND_UNSETTLED
        self.no_ack = no_ack
        self.prefetch = prefetch
        self.tag = name
        #: Encoded ``basic.deliver`` up to the consumer-tag, b"" until first used.
        self.said = b""
        self.draining = False
        self.flow_properties: Mapping[object, object] | None = None
        self.idle = False
        #: Clients requeue deliveries they do not want, and expect that to happen at once (§4.7).
        self.requeues = True
        #: Unsettled deliveries of this link, by delivery-tag.
        self.held: dict[int, OutgoingDelivery] = {}
        #: Credit where it does not follow from the prefetch, as for ``basic.get``; None for
        #: consumers.
        self.once: int | None = None
        #: Called when there is no message to send.
        self.on_drained: Callable[[], None] | None = None

    @property
    def credit(self) -> int:
        """Messages that may be sent now."""
        if not self.attached:
            return 0
        if self.once is not None:
            return self.once
        if self.no_ack:
            return UNBOUNDED
        return self.window.room_of(self.prefetch, len(self.held))

    @property
    def writable(self) -> bool:
        """Whether the output and this turn have room, and the client accepts messages."""
        if not self.window.flowing:
            return False
        engine = self.connection
        if engine.output_size < engine.limits.output_max and engine.given < _GIVEN_MAX:
            return True
        engine.thirsty[self] = None
        return False

    def accept(
        self,
        endpoint: Any,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Accept the attach request; messages follow ``consume-ok``."""
        if self.over:
            self._accepted_late(endpoint)
            return
        self.source = source or self.source
        if snd_settle_mode is not None:
            self.snd_settle_mode = snd_settle_mode
        self._accepted(endpoint)
        self.offer_credit()

    def offer_credit(self) -> None:
        """Notify the endpoint that credit or room may be available."""
        if self.attached:
            self.endpoint.on_credit(self)

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: Any = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Send one message.

        Raises:
            LocalProtocolError: There is no credit, or 0-9-1 cannot carry the message.
        """
        if not self.attached or self.credit <= 0:
            raise LocalProtocolError(f"consumer {self.tag!r} has no credit")
        if more:
            raise LocalProtocolError("0-9-1 needs the size of a message before its first octet")
        if message_format != 0:
            raise LocalProtocolError(f"0-9-1 knows no message-format {message_format}")
        octets = payload if isinstance(payload, bytes) else b"".join(payload)
        done = self.no_ack if settled is None else settled
        self.connection.given += 1
        delivery = self.deliver(self, octets, context, done)
        if self.once is not None:
            self.once -= 1
        if not done:
            number = delivery.number
            self.held[number] = delivery
            self.window.unacked[number] = delivery
        return delivery

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Remove the settled *delivery*."""
        number = delivery.number
        self.held.pop(number, None)
        self.window.unacked.pop(number, None)

    def drained(self) -> None:
        """Report that the source has no message to send; ends a drain."""
        if self.draining:
            self.draining = False
            self.once = 0
            told, self.on_drained = self.on_drained, None
            if told is not None:
                told()

    def offer(self, available: int) -> None:
        """Ignore *available*: 0-9-1 has no field for it."""

    def _forget_hooks(self) -> None:
        super()._forget_hooks()
        self.on_drained = None

    def _gather(self) -> None:
        self.connection.thirsty.pop(self, None)
        # The client may still acknowledge these; that has no effect.
        self.unsettled = list(self.held.values())
        self.held.clear()


class RepliesLink(SendingLink):
    """Link of the consumer of direct replies: the output alone bounds what it gets in a turn.

    Replies of other clients of 0-9-1 do not wait for a later turn (see :class:`.replies.DirectReplies`).
    """

    @property
    def credit(self) -> int:
        """Replies that may be sent now: any number, unless the client has stopped the flow."""
        return UNBOUNDED if self.attached and self.window.flowing else 0

    @property
    def writable(self) -> bool:
        """Whether the output has room."""
        engine = self.connection
        if engine.output_size < engine.limits.output_max:
            return True
        engine.thirsty[self] = None
        return False
