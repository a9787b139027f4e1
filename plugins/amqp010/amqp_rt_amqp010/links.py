"""Links of subscriptions, as containers and brokers see them (:mod:`amqp_rt.fronts.base`).

A link belongs to its session and outlives connections with it. Its credit is that of the subscription.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amqp_rt.fronts import (
    SENDER,
    Error,
    LocalProtocolError,
    Payload,
    Source,
    Target,
    UnsettledMap,
)
from amqp_rt.fronts.base import SND_SETTLED, SND_UNSETTLED
from amqp_rt.fronts.links import LINK_DETACH, FrontLink

from .contexts import Context
from .credit import Credit
from .deliveries import Deliveries, OutgoingDelivery
from .layouts import AcceptMode, AcquireMode, FlowMode, MessageTransfer
from .limits import GIVEN_MAX
from .transfers import TransferCommands, send_message


class SendingLink(FrontLink):
    """Link of a subscription.

    Args:
        context: Context of its session.
        deliveries: Where messages are remembered that have been sent.
        destination: Name of the subscription.
        source: The queue, with filters.
        accept_mode: Whether the client accepts messages, or has settled them once they are sent.
        acquire_mode: Whether it acquires messages, or gets copies first.
        sync_frequency: After so many messages the client is asked to complete them at once; 0 for never.
    """

    role = SENDER

    def __init__(
        self,
        context: Context,
        deliveries: Deliveries,
        destination: str,
        source: Source,
        *,
        accept_mode: AcceptMode,
        acquire_mode: AcquireMode,
        sync_frequency: int = 0,
    ) -> None:
        anchor = context.anchor
        super().__init__(anchor, anchor, anchor.link_name(f"subscribe-{destination}"))
        self.session_context = context
        topology = context.topology
        #: Wall clock of the broker; None if it has no topology.
        self.wall = None if topology is None else topology.wall
        self.deliveries = deliveries
        self.destination = destination
        source.expiry_policy = LINK_DETACH
        self.source = source
        self.target = Target(expiry_policy=LINK_DETACH)
        self.accepts = accept_mode == AcceptMode.EXPLICIT
        self.copies = acquire_mode == AcquireMode.NOT_ACQUIRED
        self.snd_settle_mode = SND_UNSETTLED if self.accepts and not self.copies else SND_SETTLED
        transfer = MessageTransfer(
            destination=destination, accept_mode=accept_mode, acquire_mode=acquire_mode
        )
        self.commands = TransferCommands(transfer, sync_frequency)
        self.balance = Credit()
        self.draining = False
        self.flow_properties: Mapping[object, object] | None = None
        self.idle = False
        #: Clients release what they do not want, and expect it to be available at once.
        self.requeues = True
        #: Messages of this subscription that later commands can refer to, acquired or not.
        self.held: dict[int, OutgoingDelivery] = {}
        #: Whether the attach request has been answered, and the error if it was refused.
        self.answered = False
        self.refusal: Error | None = None

    @property
    def address(self) -> str:
        """Address of the queue."""
        return "" if self.source is None else str(self.source.address)

    @property
    def credit(self) -> int:
        """Messages that may be sent now, as far as their sizes are unknown."""
        if not self.attached or self.deliveries.was_full:
            return 0
        return self.balance.messages

    @property
    def writable(self) -> bool:
        """Whether session, output and this turn have room."""
        context = self.session_context
        if not context.session.can_send:
            return False
        connection = context.connection
        if connection is None:
            return False
        if connection.output_size < connection.limits.output_max and connection.given < GIVEN_MAX:
            return True
        connection.thirsty[self] = None
        return False

    def accept(
        self,
        endpoint: Any,
        *,
        source: Source | None = None,
        target: Target | Any = None,
        snd_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Accept the attach request."""
        if self.over:
            self._accepted_late(endpoint)
            return
        self.source = source or self.source
        if snd_settle_mode is not None:
            self.snd_settle_mode = snd_settle_mode
        self._accepted(endpoint)

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
            CreditTooSmall: The credit in octets does not cover it.
            LocalProtocolError: There is no credit, or 0-10 cannot carry the message.
        """
        if more or message_format != 0:
            raise LocalProtocolError("0-10 sends messages of format 0, and whole, here")
        return send_message(self, payload, context, settled)

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Remove *delivery*, to which no later command can refer."""
        self.deliveries.forget(delivery)

    def set_mode(self, mode: FlowMode) -> bool:
        """Set the flow mode; return False, and do nothing, if it would change while there is credit."""
        is_windowed = mode == FlowMode.WINDOW
        if is_windowed != self.balance.is_windowed:
            if not self.balance.is_zero:
                return False
            self.zero()
            self.balance.is_windowed = is_windowed
        return True

    def zero(self) -> None:
        """Set the credit to 0, and end a drain."""
        for number in self.balance.clear():
            self.deliveries.windowed.pop(number, None)
        if self.draining:
            self.draining = False
            self.session_context.wake()

    def drained(self) -> None:
        """End a drain: there is no message to send."""
        if self.draining:
            self.zero()

    def offer(self, available: int) -> None:
        """Ignore *available*: 0-10 has no field for it."""

    def _gather(self) -> None:
        context = self.session_context
        connection = context.connection
        if connection is not None:
            connection.thirsty.pop(self, None)
        self.zero()
        tables = self.deliveries
        left: list[OutgoingDelivery] = []
        for number, delivery in self.held.items():
            if tables.held.pop(number, None) is not None:
                if delivery.state is None:
                    # The transaction in which it was accepted has been rolled back, and its turn to get
                    # the outcome that the client gave it meanwhile has not come.
                    delivery.state = delivery.outcome_on_rollback
                left.append(delivery)
            else:
                tables.copies.pop(number, None)
        self.held.clear()
        self.unsettled = left
