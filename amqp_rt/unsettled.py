"""Unsettled deliveries that a terminus keeps while its link is suspended (Part 2 §2.6.13).

The owner of the terminus keeps them as a plain map from delivery-tag to :class:`Unsettled`, and
passes it to the next attach. No layer below the owner has a registry of suspended links: the map
may lie in memory or in a store, and outlive the connection or the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from .transactions import DeliveryState


class Unsettled(Struct, kw_only=True):
    """Delivery that is not settled on this side.

    A store has to keep ``tag``, ``state``, ``payload``, ``complete`` and ``message_format``; the
    other two live with the process.
    """

    tag: bytes
    #: State of the delivery on this side. At the source: None if it can be sent from its beginning,
    #: ``Received`` for the earliest point from which it can be, or the outcome that took effect.
    #: At the target: the outcome that was sent, else None; the position reached in the payload is
    #: computed when the link attaches.
    state: DeliveryState | None = None
    #: At the source the whole encoded message, or None if no longer kept; at the target the part received.
    payload: bytes | Sequence[bytes] | None = None
    #: At the target: whether the whole payload has arrived.
    complete: bool = True
    message_format: int = 0
    #: Data of the owner that belongs to the delivery.
    context: Any = None
    #: Object that represented the delivery on the previous link and goes on representing it, so that
    #: an outcome set while the link is suspended is found. Without one, for example after a restart,
    #: the link makes a new object and delivers a complete message without an outcome to the endpoint
    #: again, since no handler can have it any more.
    delivery: Any = None


#: Unsettled deliveries by delivery-tag, oldest first.
UnsettledMap: TypeAlias = dict[bytes, Unsettled]
