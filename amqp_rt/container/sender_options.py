"""Options of senders, as ``peer.sender(address, …)`` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

#: Treatment of messages whose outcome was lost with the connection: the caller gets
#: ``ConnectionLost``, or they are sent again and may arrive twice.
InDoubt = Literal["raise", "resend"]


class SenderOptions(TypedDict, total=False):
    """Options of ``peer.sender(address, …)``.

    * ``name``: name of the link; generated if omitted.
    * ``max_pending``: messages without an outcome that it holds, waiting for credit or sent.
    * ``settled``: True sends all messages settled (at most once, no outcomes), False none.
    * ``rcv_settle_mode``: 1 asks the receiver to wait for us to settle (Part 2 §2.8.3).
    * ``in_doubt``: ``"resend"`` sends messages again that a lost connection left without an
      outcome.
    * ``dynamic``: the peer creates a node and its address.
    * ``durable``: 1 or 2, see Part 3 §3.5.5.
    * ``timeout``: seconds that the peer is asked to keep its side of the link while a lost
      connection is dialled again (Part 3 §3.5.4). If it does, unsettled messages are resumed, and
      none is in doubt.
    * ``capabilities``: capabilities of the target, for example ``"queue"``.
    * ``properties``: properties of the link.
    * ``source``: our own address, for peers that use it.
    * ``outcomes``: the outcomes that we support, such as ``"amqp:accepted:list"``; by default all.
    """

    name: str
    max_pending: int
    settled: bool | None
    rcv_settle_mode: int
    in_doubt: InDoubt
    dynamic: bool
    durable: int
    timeout: int
    capabilities: Sequence[str]
    properties: Mapping[object, object] | None
    source: str | None
    outcomes: Sequence[str]
