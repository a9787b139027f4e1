"""Messages sent to consumers, until they are settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amqp_rt.fronts import LocalProtocolError

if TYPE_CHECKING:
    from .links import SendingLink


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
