"""Entries of messages as structures. Apart from :mod:`.entries`, whose functions are compiled, since mypyc drops the
keywords of classes of msgspec.

Entries are not tracked by the garbage collector, which would otherwise visit every queued message; this is safe
because nothing that they refer to refers back to them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from ..limits import Limits
from ..message import MESSAGE_FORMAT
from .expiry import NEVER
from .queue.schedule import Due

#: Sequence numbers of messages without a position; the second one if they are not due yet.
NOWHERE: Final = -1
LATER: Final = -2


class Moves(Struct, gc=False, frozen=True, array_like=True):
    """Automatic dead-lettering of a message since it was published or given up by a consumer.

    Kept beside the message and not in its annotations, which its publisher may write.
    """

    #: Queues that dead-lettered it, the oldest first.
    queues: tuple[str, ...]
    #: Upper bound of the number of copies made of it on the way.
    copies: int = 1

    def is_cycle(self, queue: str, limits: Limits) -> bool:
        """Return whether *queue* dead-lettered the message before, or it has moved too often."""
        return queue in self.queues or len(self.queues) > limits.dead_letter_hops_max

    def copied(self, copies: int) -> Moves:
        """Return the moves of each copy when *copies* copies are made."""
        return self if copies == 1 else Moves(self.queues, self.copies * copies)


class Entry(Struct, gc=False):
    """A message at one node."""

    #: Encoded message; correct for sending except perhaps for its header, see ``altered``.
    payload: bytes
    message_format: int = MESSAGE_FORMAT
    durable: bool = False
    priority: int = 4
    first_acquirer: bool = False
    #: Failed deliveries, by the rules of Part 3 §3.4.
    delivery_count: int = 0
    #: Wall-clock time.
    expires_at: float = NEVER
    #: Whether the header in ``payload`` has to be replaced before sending.
    altered: bool = False
    #: Acquisitions at this node, with any outcome (decision 0012).
    attempts: int = 0
    #: Sequence number in the queue; negative before it has one: ``LATER`` if not due, else
    #: ``NOWHERE``.
    sequence: int = NOWHERE
    #: Subscriptions that must not receive it (§3.4.5 ``undeliverable-here``).
    avoid: frozenset[int] | None = None
    #: Whether it is in the store, under its sequence number.
    stored: bool = False
    #: Container-id of its sender, if known.
    publisher: str | None = None
    #: Earliest time of delivery, None for immediately.
    due: Due | None = None
    #: Values that its queue has read from it, if any; see :mod:`~amqp_rt.broker.queue.keyed`.
    marks: Any = None
    #: Bytes and pieces of a body that is in the store only; ``payload`` is the part before the
    #: body.
    rest: int = 0
    pieces: int = 0
    #: Node number and sequence number under which the pieces are stored.
    origin: tuple[int, int] | None = None
    #: Whether its sender has the right to send to its ``reply-to``.
    returnable: bool = False
    #: Automatic dead-lettering that led it here, None if there was none.
    moves: Moves | None = None

    def copy_for_node(self) -> Entry:
        """Return an entry of the same message for another node."""
        return Entry(
            self.payload,
            self.message_format,
            self.durable,
            self.priority,
            self.first_acquirer,
            self.delivery_count,
            self.expires_at,
            self.altered,
            sequence=NOWHERE if self.due is None else LATER,
            publisher=self.publisher,
            due=self.due,
            rest=self.rest,
            pieces=self.pieces,
            origin=self.origin,
            returnable=self.returnable,
            moves=self.moves,
        )


class KeptFields(Struct, gc=False, array_like=True):
    """Fields of an entry that a store keeps beside its payload. Append new fields at the end."""

    message_format: int
    durable: bool
    priority: int
    first_acquirer: bool
    delivery_count: int
    #: None for never.
    expires_at: float | None
    altered: bool
    attempts: int
    publisher: str | None = None
    due_at: float | None = None
    delay_s: float | None = None
    #: For a message in pieces: the part before its body, and the bytes and pieces of the body.
    front: bytes = b""
    rest: int = 0
    pieces: int = 0
    returnable: bool = False
    moves: Moves | None = None


#: Encodes and decodes the fields of an entry that a store keeps beside its payload.
encode_fields: Final = msgspec.msgpack.Encoder().encode
decode_fields: Final = msgspec.msgpack.Decoder(KeptFields).decode
