"""Messages of publishers, which get the annotations that consumers of RabbitMQ read."""

from __future__ import annotations

from typing import Final

from amqp_rt.broker.topology.exchange_addresses import split_exchange
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import (
    Error,
    IncomingDelivery,
    ReceivingEndpoint,
    ReceivingLink,
    Rejected,
    Symbol,
)
from amqp_rt.limits import Limits
from amqp_rt.message import Message

_EXCHANGE: Final = Symbol("x-exchange")
_ROUTING_KEY: Final = Symbol("x-routing-key")
#: Credit of a publisher. A queue without room rejects, as with ``x-overflow: reject-publish``.
_WINDOW: Final = 1_000


class Publisher:
    """Endpoint of a publisher's link, before that of the queue or exchange (fronts.base.ReceivingEndpoint).

    Args:
        inner: Endpoint of the queue or exchange, which grants no credit.
        address: Address of the queue or exchange.
        limits: For decoding.
    """

    def __init__(self, inner: ReceivingEndpoint, address: str, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits
        found = split_exchange(address)
        #: Exchange and routing key in the address; the default exchange and the queue's name for a queue.
        self._exchange, self._key = ("", address) if found is None else found
        self._by_subject = found is not None and not self._key

    def on_attached(self, link: ReceivingLink) -> None:
        """Grant the credit."""
        link.grant(_WINDOW)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Annotate each message, and pass it on; reject a malformed one."""
        whole: list[IncomingDelivery] = []
        for each in deliveries:
            if each.message_format == 0:
                try:
                    each.payload = self._annotated(each.payload)
                except AmqpError as error:
                    each.settle(Rejected(Error.of(error)))
                    continue
            whole.append(each)
        if whole:
            self._inner.deliver(link, whole)
        self.on_flow(link)

    def _annotated(self, payload: bytes) -> bytes:
        message = Message.decode(payload, self._limits)
        key = (message.subject or "") if self._by_subject else self._key
        message.message_annotations = {
            **(message.message_annotations or {}),
            _EXCHANGE: self._exchange,
            _ROUTING_KEY: key,
        }
        return message.encode()

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: only complete messages are handled."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Pass it on."""
        self._inner.on_settled(link, deliveries)

    def on_flow(self, link: ReceivingLink) -> None:
        """Renew the credit when half of it is used, on a link of its own; a relay grants that of its link."""
        own = bool(getattr(link.target, "address", None))
        if own and link.attached and link.credit * 2 <= _WINDOW:
            link.grant(_WINDOW)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Pass it on."""
        self._inner.on_detached(link, error, closed)
