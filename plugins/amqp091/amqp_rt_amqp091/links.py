"""Links of a channel, as containers and brokers see them (:mod:`amqp_rt.fronts.base`).

``basic.consume`` and ``basic.get`` are sending links, whose credit is the prefetch; published
messages arrive on receiving links; transactions have a control link. No link outlives its channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from amqp_rt.fronts import (
    ACCEPTED,
    Coordinator,
    Error,
    LocalProtocolError,
    Modified,
    Payload,
    Peer,
    Rejected,
    Source,
    Symbol,
    Target,
    UnsettledMap,
    rejected,
)

from . import methods as m
from .faults import Fault

if TYPE_CHECKING:
    from .sessions import Session
    from .window import DeliveryWindow

#: ``role`` of Part 2 §2.8.1.
_SENDER: Final = False
_RECEIVER: Final = True
_UNSETTLED: Final = 0
_SETTLED: Final = 1
_FIRST: Final = 0
#: Messages sent to the consumers of a connection within one turn; more follow in the next one.
_GIVEN_MAX: Final = 100
#: Credit where no bound is set.
UNBOUNDED: Final = 1 << 31

_LINK_DETACH: Final = Symbol("link-detach")
_FULL: Final = rejected("amqp:resource-limit-exceeded", "there is no room for the message")
GONE: Final = rejected("amqp:not-found", "there is no such queue any more")
#: Outcome of a requeue: consumers see the next delivery marked as redelivered.
REQUEUED: Final = Modified(delivery_failed=True)
#: Conditions of rejections that the publisher, or the configuration of the broker, could avoid.
_MENDABLE: Final = frozenset(("amqp:precondition-failed", "amqp:unauthorized-access"))


class Link:
    """Common part of both directions."""

    role = _RECEIVER

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.connection = session.engine
        self.name = name
        #: Number of the link on its connection, by which management refers to it.
        self.handle = session.engine.next_name()
        self.peer: Peer = session.engine.peer
        self.source: Source | None = None
        self.target: Target | Coordinator | None = None
        self.asked: str | None = None
        self.snd_settle_mode = _UNSETTLED
        self.rcv_settle_mode = _FIRST
        self.max_message_size = 0
        self.properties: Mapping[object, object] = {}
        self.offered_capabilities: tuple[str, ...] = ()
        self.desired_capabilities: tuple[str, ...] = ()
        self.attached = False
        self.unsettled: list[Any] = []
        self.remote_unsettled: Mapping[bytes, Any] | None = None
        self.remote_incomplete = False
        self.resumed = False
        self.unknown: list[Any] = []
        self.incomplete = False
        self.context: Any = None
        #: Whether the link has ended.
        self.over = False
        self.endpoint: Any = None
        #: Called once with the answer to the attach request: the error if it was refused, or None.
        self.on_answer: Callable[[Error | None], None] | None = None
        #: Called with the error, or None, when the endpoint detaches the link.
        self.on_end: Callable[[Error | None], None] | None = None

    def refuse(self, error: Error) -> None:
        """Refuse the attach request."""
        if self.over:
            return
        self.over = True
        answer = self.on_answer
        self._forget_hooks()
        if answer is not None:
            answer(error)

    def _answer(self, error: Error | None) -> None:
        answer, self.on_answer = self.on_answer, None
        if answer is not None:
            answer(error)

    def _accepted(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.attached = True
        endpoint.on_attached(self)
        self._answer(None)

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """End the link from the endpoint's side, and call ``on_end``."""
        if self.over:
            return
        told = self.on_end
        self.end(error, closed)
        if told is not None:
            told(error)

    def end(self, error: Error | None, closed: bool) -> None:
        """End the link at once and notify the endpoint."""
        if self.over:
            return
        self.over = True
        self._forget_hooks()
        was, self.attached = self.attached, False
        self._gather()
        endpoint, self.endpoint = self.endpoint, None
        if was:
            endpoint.on_detached(self, error, closed)

    def _forget_hooks(self) -> None:
        """Drop callbacks, which may refer to the link: a reference cycle would keep it alive."""
        self.on_answer = self.on_end = None

    def _gather(self) -> None:
        """Put unsettled deliveries into ``unsettled`` for the endpoint, or settle them."""

    def remember(self) -> UnsettledMap:
        """Return an empty map: nothing survives the channel."""
        return {}


class IncomingDelivery:
    """A published message on its way to one node.

    Args:
        link: The link it arrives on.
        payload: The encoded AMQP 1.0 message.
        on_outcome: Called once with the outcome; None if the message is sent settled.
        state: Transactional state, None outside of transactions.
    """

    __slots__ = ("context", "link", "local_state", "on_outcome", "payload", "settled", "state")

    # Equal for all deliveries of this class.
    tag = b""
    message_format = 0
    second = False
    complete = True
    aborted = False
    streamed = False

    def __init__(
        self,
        link: ReceivingLink,
        payload: bytes,
        on_outcome: Callable[[Any], None] | None,
        state: Any = None,
    ) -> None:
        self.link = link
        self.settled = on_outcome is None
        self.state = state
        self.local_state: Any = None
        self.payload = payload
        self.context: Any = None
        self.on_outcome = on_outcome

    def read_chunks(self) -> list[bytes]:
        """Return the whole payload: messages are not streamed here."""
        return [self.payload]

    def settle(self, outcome: Any) -> None:
        """Settle with *outcome*; only the first call counts."""
        self.local_state = outcome
        told, self.on_outcome = self.on_outcome, None
        self.settled = True
        if told is not None:
            told(outcome)
        elif outcome is not ACCEPTED and type(outcome) is Rejected:
            report_refusal(self.link.session, outcome)

    def update(self, state: Any) -> None:
        """Keep *state*: the protocol cannot send it to the publisher."""
        self.local_state = state


class ReceivingLink(Link):
    """A link on which the client sends."""

    role = _RECEIVER

    def __init__(self, session: Session, name: str, target: Target | Coordinator) -> None:
        super().__init__(session, name)
        self.target = target
        self.source = Source(expiry_policy=_LINK_DETACH)
        self.credit = 0
        self.available = 0
        self.stream_above = 0
        self.has_streamed = False
        self.delivery_work = 0
        #: Deliveries that wait for credit or for the answer to the attach, and their octets.
        self._waiting: deque[IncomingDelivery] = deque()
        self._waiting_size = 0
        #: Called once, when nothing waits any more.
        self._on_empty: Callable[[], None] | None = None

    def wait_empty(self, call: Callable[[], None]) -> bool:
        """Call *call* once nothing waits here for the right to be sent, or for credit.

        Returns False, and does not call it, if nothing waits.
        """
        if not self._waiting:
            return False
        self._on_empty = call
        return True

    def _tell_empty(self) -> None:
        told, self._on_empty = self._on_empty, None
        if told is not None:
            told()

    def accept(
        self,
        endpoint: Any,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        max_message_size: int | None = None,
        streaming: bool = False,
        stream_above: int = 0,
        rcv_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Accept the attach request."""
        if self.over:
            # The channel ended before the answer.
            return
        self.source = source or self.source
        self.target = target or self.target
        self.max_message_size = max_message_size or 0
        self._accepted(endpoint)

    def refuse(self, error: Error) -> None:
        """Refuse the attach request; waiting deliveries are rejected with *error*."""
        waiting, self._waiting = self._waiting, deque()
        super().refuse(error)
        for delivery in waiting:
            delivery.settle(Rejected(error))
        self._tell_empty()

    def grant(self, credit: int, *, properties: Mapping[object, object] | None = None) -> None:
        """Set the credit to *credit*, and deliver as many waiting messages."""
        self.credit = credit
        waiting = self._waiting
        if waiting and credit:
            ready = [waiting.popleft() for _ in range(min(credit, len(waiting)))]
            self._waiting_size -= sum(len(each.payload) for each in ready)
            self.credit -= len(ready)
            self.endpoint.deliver(self, ready)
            if not waiting:
                self._tell_empty()

    def drain(self) -> None:
        """Set the credit to 0 and report the flow: all available messages have been delivered."""
        if self.attached:
            self.credit = 0
            self.endpoint.on_flow(self)

    def put(self, deliveries: list[IncomingDelivery]) -> None:
        """Deliver, or keep deliveries without credit; reject those beyond ``session_window``."""
        if self.over:
            for delivery in deliveries:
                delivery.settle(GONE)
            return
        if self.attached and not self._waiting and self.credit >= len(deliveries):
            self.credit -= len(deliveries)
            self.endpoint.deliver(self, deliveries)
            return
        limits = self.connection.limits
        for delivery in deliveries:
            if (
                len(self._waiting) >= limits.session_window
                or self._waiting_size + len(delivery.payload) > limits.session_window_bytes
            ):
                delivery.settle(_FULL)
            else:
                self._waiting.append(delivery)
                self._waiting_size += len(delivery.payload)
        if self.attached:
            self.grant(self.credit)

    def _gather(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for delivery in waiting:
            delivery.settle(GONE)
        self._tell_empty()


class Publishing(ReceivingLink):
    """Link shared by all messages of a channel to nodes that need no link of their own."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, f"channel-{session.number}", Target())
        self.attached = True


#: Inlet of a node (None if the link itself carries the messages), the link and the node's name.
Way: TypeAlias = tuple[Any, ReceivingLink, str]


def report_refusal(session: Session, outcome: Rejected) -> None:
    """Close the channel if a message without confirms was rejected for a fault of its publisher.

    The standard wants a message that is unroutable, or finds no room, to be dropped; the inlet has
    logged that. A fault that the publisher can correct must reach it, and a channel exception is
    the only way.
    """
    error = outcome.error
    if error is not None and str(error.condition) in _MENDABLE:
        session.fail(Fault.of(error), m.BasicPublish())


class OutgoingDelivery:
    """A message sent to a consumer.

    ``number`` is its delivery-tag in 0-9-1, counted on its channel.
    """

    __slots__ = (
        "context",
        "delivery_id",
        "enlisted",
        "link",
        "number",
        "remote_settled",
        "settled",
        "size",
        "state",
        "tag",
    )

    def __init__(self, link: SendingLink, number: int, context: Any, settled: bool) -> None:
        self.link = link
        self.number = number
        self.delivery_id = number
        self.tag = number.to_bytes(8, "big")
        self.context = context
        self.settled = settled
        self.remote_settled = settled
        self.state: Any = None
        #: Octets of the body.
        self.size = 0
        #: Whether an outcome was sent in a transaction that is not committed.
        self.enlisted = False

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Refuse to stream: messages are sent whole.

        Raises:
            LocalProtocolError: Always.
        """
        raise LocalProtocolError("0-9-1 needs the size of a message before its first octet")

    def abort(self) -> None:
        """Ignore the call: the message has been sent whole."""

    def settle(self, state: Any = None) -> None:
        """Settle the delivery: the client can no longer acknowledge it."""
        self.settled = True
        self.state = state
        self.link.forget(self)


class SendingLink(Link):
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

    role = _SENDER

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
        super().__init__(session, name)
        self.window = window
        self.deliver = deliver
        source.expiry_policy = _LINK_DETACH
        self.source = source
        self.target = Target(expiry_policy=_LINK_DETACH)
        self.snd_settle_mode = _SETTLED if no_ack else _UNSETTLED
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
        room = self.window.room()
        if self.prefetch:
            left = self.prefetch - len(self.held)
            room = min(room, left)
        return max(0, room)

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
            self.held[delivery.number] = delivery
            self.window.unacked[delivery.number] = delivery
        return delivery

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Remove the settled *delivery*."""
        self.held.pop(delivery.number, None)
        self.window.unacked.pop(delivery.number, None)

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
