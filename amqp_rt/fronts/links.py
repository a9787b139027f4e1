"""Links of protocols that have none on the wire, as containers and brokers see them (:mod:`amqp_rt.fronts.base`).

A front makes such links itself: for what a client publishes, subscribes to, or does in transactions. An
attach costs no frames, credit that the endpoint grants stays here, and messages arrive whole. What a
protocol sends to its clients differs too much for a common sending link; :class:`FrontLink` is its base.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from ..events import Peer
from ..limits import Limits
from ..outcomes import Error, Modified, Rejected, rejected
from ..termini import Coordinator, Source, Target
from ..transactions import TransactionalState
from ..unsettled import UnsettledMap
from ..values import Symbol
from .base import (
    RCV_FIRST,
    RECEIVER,
    SND_UNSETTLED,
    LinkConnection,
    LinkSession,
)
from .deliveries import FrontDelivery

__all__ = [
    "GONE",
    "LINK_DETACH",
    "REQUEUED",
    "UNBOUNDED",
    "CarrierConnection",
    "CarrierSession",
    "FrontLink",
    "FrontReceivingLink",
    "PublishingLink",
]

#: Credit where no bound is set.
UNBOUNDED: Final = 1 << 31
#: Expiry policy of termini that end with their link.
LINK_DETACH: Final = Symbol("link-detach")
#: Outcome of a message to a queue that was deleted.
GONE: Final = rejected("amqp:not-found", "there is no such queue any more")
#: Outcome of a requeue: consumers see the next delivery marked as redelivered.
REQUEUED: Final = Modified(delivery_failed=True)


class CarrierSession(LinkSession, Protocol):
    """Session whose links are made by the front."""

    def report_refusal(self, outcome: Rejected) -> None:
        """Handle the rejection of a message whose publisher awaits no outcome."""


class CarrierConnection(LinkConnection, Protocol):
    """Connection whose links are made by the front."""

    @property
    def peer(self) -> Peer:
        """Peer of the connection."""

    @property
    def limits(self) -> Limits:
        """Bounds on resources that the peer may use."""

    def next_name(self) -> int:
        """Return a number unique to one link of the connection."""


class FrontLink:
    """Common part of both directions.

    Args:
        session: Its session, which ends the link with :meth:`end` when it ends itself.
        connection: The connection of the session.
        name: Its name, unique on the connection.
    """

    role = RECEIVER

    def __init__(self, session: CarrierSession, connection: CarrierConnection, name: str) -> None:
        self.session = session
        self.connection = connection
        self.name = name
        #: Number of the link on its connection, by which management refers to it.
        self.handle = connection.next_name()
        self.peer: Peer = connection.peer
        self.source: Source | None = None
        self.target: Target | Coordinator | None = None
        self.asked: str | None = None
        self.snd_settle_mode = SND_UNSETTLED
        self.rcv_settle_mode = RCV_FIRST
        self.max_message_size = 0
        self.properties: Mapping[object, object] = {}
        self.offered_capabilities: tuple[str, ...] = ()
        self.desired_capabilities: tuple[str, ...] = ()
        self.attached = False
        self.unsettled: list[Any] = []
        self.remote_unsettled: Mapping[bytes, Any] | None = None
        self.remote_incomplete = False
        self.sent_all = True
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

    def relay(self, other: Any) -> None:
        """Do nothing: such links are never resumed."""

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

    def _accepted_late(self, endpoint: Any) -> None:
        """Notify *endpoint*, which exists already, that the link had ended before it was accepted."""
        endpoint.on_detached(self, None, True)

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
        # A link that inlets share has none.
        if was and endpoint is not None:
            endpoint.on_detached(self, error, closed)

    def _forget_hooks(self) -> None:
        """Drop callbacks, which may refer to the link: a reference cycle would keep it alive."""
        self.on_answer = self.on_end = None

    def _gather(self) -> None:
        """Put unsettled deliveries into ``unsettled`` for the endpoint, or settle them."""

    def remember(self) -> UnsettledMap:
        """Return an empty map: nothing is remembered of such links."""
        return {}


class FrontReceivingLink(FrontLink):
    """A link on which the client sends."""

    role = RECEIVER

    def __init__(
        self,
        session: CarrierSession,
        connection: CarrierConnection,
        name: str,
        target: Target | Coordinator,
    ) -> None:
        super().__init__(session, connection, name)
        self.target = target
        self.source = Source(expiry_policy=LINK_DETACH)
        self.credit = 0
        self.available = 0
        self.stream_above = 0
        self.has_streamed = False
        self.delivery_work = 0
        self.flow_report: Callable[[], Mapping[object, object]] | None = None
        #: Deliveries that wait for credit or for the answer to the attach, and their octets.
        self._waiting: deque[FrontDelivery] = deque()
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

    def take_back(self, txn_id: bytes) -> list[FrontDelivery]:
        """Remove the deliveries of transaction *txn_id* that wait here, and return them unsettled.

        Others stay, in their order.
        """
        taken: list[FrontDelivery] = []
        left: deque[FrontDelivery] = deque()
        for delivery in self._waiting:
            state = delivery.state
            if type(state) is TransactionalState and state.txn_id == txn_id:
                taken.append(delivery)
                self._waiting_size -= len(delivery.payload)
            else:
                left.append(delivery)
        self._waiting = left
        if taken and not left:
            self._tell_empty()
        return taken

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
            self._accepted_late(endpoint)
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

    def report(self) -> None:
        """Do nothing: only flows of AMQP 1.0 have properties."""

    def _full(self) -> Rejected:
        """Return the outcome of a message that the link cannot keep until its node takes it."""
        limits = self.connection.limits
        address = self.target.address if isinstance(self.target, Target) else None
        return rejected(
            "amqp:resource-limit-exceeded",
            f"messages for {address!r:.200} wait, and no more than {limits.session_window} of"
            f" {limits.session_window_bytes} bytes may (session_window, session_window_bytes)",
        )

    def put(self, deliveries: list[FrontDelivery]) -> None:
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
                delivery.settle(self._full())
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


class PublishingLink(FrontReceivingLink):
    """Link shared by all messages of a session to nodes that need no link of their own."""

    def __init__(self, session: CarrierSession, connection: CarrierConnection, name: str) -> None:
        super().__init__(session, connection, name, Target())
        self.attached = True
