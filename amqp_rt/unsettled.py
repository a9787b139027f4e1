"""What a terminus remembers of a link's deliveries while the link is suspended (Part 2 §2.6.13).

Links come and go; what they left unsettled is kept by whoever owns the terminus, as a plain map
from delivery-tag to :class:`Unsettled`, and handed to the next attach. There is no registry of
suspended links anywhere below the owner: the map may lie in memory or in a store, and outlive the
connection or the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import Struct


class Unsettled(Struct, kw_only=True):
    """One delivery that is not settled on this side.

    ``tag``, ``state``, ``payload``, ``complete`` and ``message_format`` are what a store has to
    keep; the other two live with the process.
    """

    tag: bytes
    #: What this side says of it. At the source: None if it can be sent from its beginning,
    #: ``Received`` for the earliest point from which it can be, or the outcome that took effect.
    #: At the target: the outcome that was said, else None; how far the payload has come is worked
    #: out when the link attaches.
    state: Any = None
    #: At the source the whole encoded message, None if it is gone. At the target what has arrived.
    payload: bytes | Sequence[bytes] | None = None
    #: At the target: all of the payload has arrived.
    complete: bool = True
    message_format: int = 0
    #: Whatever the owner wants to find at the delivery when it goes on.
    context: Any = None
    #: The object that stood for the delivery on the link before, which then goes on standing for
    #: it: an outcome that is said while the link is suspended is found there. Without one, for
    #: example after a restart, the link makes a new one, and a complete message without an outcome
    #: is handed to the endpoint again: nobody has it in hand.
    delivery: Any = None


#: By delivery-tag, oldest first.
UnsettledMap: TypeAlias = dict[bytes, Unsettled]
