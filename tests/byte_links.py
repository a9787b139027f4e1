"""Links with credit in bytes, as consumers of 0-10 have them, without a protocol."""

from __future__ import annotations

from typing import Any

from amqp_rt.errors import CreditTooSmall, LocalProtocolError
from amqp_rt.events import Peer
from amqp_rt.outcomes import Error


class ByteDelivery:
    delivery_id = 1
    remote_settled = True

    def __init__(self, context: Any) -> None:
        self.context = context
        self.state: Any = None
        self.settled = False

    def settle(self, outcome: Any) -> None:
        self.settled = True


class ByteLink:
    """Link with credit in messages and in bytes, of which both have to suffice."""

    requeues = True
    flow_properties = None
    connection = None
    peer = Peer()
    writable = True
    attached = True
    max_message_size = 0

    def __init__(self, name: str, *, largest: int = 1_000) -> None:
        self.name = name
        self.largest = largest
        self.messages = 0
        self.bytes = 0
        self.lacking = False
        self.draining = False
        self.sent: list[bytes] = []
        self.held: list[ByteDelivery] = []
        self.tries = 0
        self.subscription: Any = None
        self.properties: dict[object, object] = {}
        self.error: Error | None = None

    @property
    def credit(self) -> int:
        return 0 if self.lacking else self.messages

    def send(self, payload: Any, context: Any = None, **_: Any) -> ByteDelivery:
        self.tries += 1
        payload = payload if isinstance(payload, bytes) else b"".join(payload)
        if len(payload) > self.largest:
            raise LocalProtocolError("never")
        if len(payload) > self.bytes:
            self.lacking = True
            raise CreditTooSmall("not now")
        self.messages -= 1
        self.bytes -= len(payload)
        self.sent.append(payload)
        delivery = ByteDelivery(context)
        self.held.append(delivery)
        return delivery

    def give(self, messages: int, size: int, *, drain: bool = False) -> None:
        self.messages += messages
        self.bytes += size
        self.lacking = False
        self.draining = drain
        self.subscription.on_credit(self)

    def accept(self, endpoint: Any) -> None:
        self.subscription = endpoint
        endpoint.on_attached(self)

    def detach(self, error: Error | None = None) -> None:
        self.attached = False
        self.error = error

    def offer(self, count: int) -> None:
        pass

    def drained(self) -> None:
        if self.draining:
            self.messages = self.bytes = 0
            self.draining = False
