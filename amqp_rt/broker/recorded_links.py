"""Sending links of termini with durable unsettled state, whose deliveries are recorded before they leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..errors import LocalProtocolError
from ..events import Peer
from ..fronts.base import LinkConnection, OutgoingDelivery, Payload, SendingLink
from ..outcomes import RELEASED, Error
from ..transactions import DeliveryState
from ..unsettled import Unsettled
from .entries import Entry
from .queue.subscriptions import Subscription


class DeliveryRecorder(Protocol):
    """Terminus that records the deliveries of its link in the store."""

    subscription: Subscription
    #: Whether it has ended.
    over: bool

    def next_tag(self) -> bytes:
        """Return a tag that no unsettled delivery has."""

    def record(self, tag: bytes, entry: Entry, then: Callable[[], None]) -> None:
        """Record that *entry* leaves with *tag*, and call *then* once that is stored."""

    def ended(self, delivery: OutgoingDelivery | Unsettled) -> None:
        """Remove the record of *delivery*."""


class RecordedLink:
    """Sending link on which a message leaves once the store has recorded its delivery.

    After a restart the delivery is therefore known, and the message is not sent to another
    consumer.
    """

    def __init__(self, link: SendingLink, source: DeliveryRecorder) -> None:
        self.raw = link
        self._source = source
        #: Messages waiting for their record.
        self._staged = 0

    @property
    def credit(self) -> int:
        return self.raw.credit - self._staged

    @property
    def writable(self) -> bool:
        return self.raw.writable

    @property
    def draining(self) -> bool:
        return self.raw.draining and not self._staged

    @property
    def attached(self) -> bool:
        return self.raw.attached

    @property
    def connection(self) -> LinkConnection:
        return self.raw.connection

    @property
    def max_message_size(self) -> int:
        return self.raw.max_message_size

    @property
    def role(self) -> bool:
        return self.raw.role

    @property
    def idle(self) -> bool:
        return self.raw.idle

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def peer(self) -> Peer:
        return self.raw.peer

    def offer(self, available: int) -> None:
        self.raw.offer(available)

    def drained(self) -> None:
        self.raw.drained()

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        self.raw.detach(error, closed=closed)

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> OutgoingDelivery | None:
        """Send the message once it is recorded; settled or transactional ones are sent at once.

        Raises:
            LocalProtocolError: The message is larger than the peer takes, or is to be sent in pieces,
                which the record of a delivery would have to include.
        """
        if more:
            raise LocalProtocolError("a recorded message cannot be sent in pieces")
        source = self._source
        tag = source.next_tag()
        if settled or not isinstance(context, Entry):
            return self.raw.send(
                payload,
                context,
                settled=settled,
                tag=tag,
                message_format=message_format,
                state=state,
            )
        size = len(payload) if isinstance(payload, bytes) else sum(len(each) for each in payload)
        if 0 < self.raw.max_message_size < size:
            raise LocalProtocolError("the message is larger than the peer takes")
        self._staged += 1
        source.record(tag, context, partial(self._leave, tag, payload, context, message_format))
        return None

    def _leave(self, tag: bytes, payload: Payload, entry: Entry, message_format: int) -> None:
        self._staged -= 1
        raw = self.raw
        subscription = self._source.subscription
        node = subscription.node
        if raw.attached and raw.credit > 0 and not self._source.over:
            sent = raw.send(payload, entry, settled=False, tag=tag, message_format=message_format)
            node.start_lock(subscription, sent)
        else:
            self._source.ended(Unsettled(tag=tag))
            node.conclude(subscription, entry, RELEASED)
            node.concluded()
        if not self._staged and raw.draining and raw.attached:
            node.serve(subscription)
