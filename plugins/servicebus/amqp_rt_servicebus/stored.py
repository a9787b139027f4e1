"""Messages as entities hold them.

A module of its own, since compiled modules hold no Structs: mypyc drops the keywords of their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import inf
from struct import Struct as Packer
from typing import Any, Final
from uuid import UUID

from amqp_rt.broker.building import Entry
from amqp_rt.codec.primitives import write_symbol, write_ulong, write_value
from amqp_rt.codec.section_types import Properties
from amqp_rt.codec.sections import MESSAGE_ANNOTATIONS, SECTION_OPENINGS, read_annotations
from amqp_rt.limits import Limits
from amqp_rt.values import Symbol

PARTITION_KEY: Final = Symbol("x-opt-partition-key")

NO_PROPERTIES: Final = Properties()

#: Head of a section of annotations: its opening with the constructor of a map, and size and count of that.
_MAP: Final = SECTION_OPENINGS[MESSAGE_ANNOTATIONS] + b"\xd1"
_MAP_HEAD: Final = Packer(">II")
#: Bounds on annotations that are decoded again: their message was within the namespace's when it arrived.
_ARRIVED: Final = Limits(nesting_max=1 << 16, elements_max=1 << 31)


class State(IntEnum):
    """State of a message, as ``x-opt-message-state`` has it."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


class Stored(Entry, kw_only=True):
    """A message in an entity of Service Bus, or on its way there.

    ``payload`` begins with the properties as they were sent; ``delivery_count`` is the number of deliveries
    that failed here, and ``expires_at`` follows from the time to live. A message is locked if it has a
    ``token``, also while its state is *deferred*.

    As of all entries, the collector knows nothing of it: a delivery refers back to it, so ``delivery`` is
    removed when the link, the lock or the entity ends.
    """

    #: Properties as they are delivered.
    properties: Properties = NO_PROPERTIES
    #: Keys and values of the message annotations of the sender, encoded without the head of their map,
    #: and their number. Decoded, each annotation would be one object more for the collector to visit.
    annotation_octets: bytes = b""
    annotation_items: int = 0
    #: Where the application properties and the body begin in ``payload``.
    content_at: int = 0
    body_at: int = 0
    #: Octets of the message as it arrived, for accounts of memory.
    size: int = 0
    #: ``durable`` of the header. The field ``durable`` of an entry is False, since entities are in memory.
    sent_durable: bool = False
    #: Own time to live, as the sender gave it, and the one that counts in this entity.
    ttl_ms: int | None = None
    lasting_ms: int | None = None
    #: Sequence number, 0 before the message has one; and that of the entity to which it was sent, if it was
    #: forwarded since.
    number: int = 0
    enqueued_number: int = 0
    #: Partition; None if the entity is not partitioned.
    partition: int | None = None
    #: Wall-clock times.
    enqueued_at: float = 0.0
    due_at: float = 0.0
    state: State = State.ACTIVE
    #: Lock: its token, its end, and the delivery to its receiver as long as that has a link.
    token: UUID | None = None
    until: float = inf
    delivery: Any = None
    #: Number of entities that have forwarded the message.
    hops: int = 0
    #: Path of the entity that dead-lettered it, empty if none did.
    dead_letter_source: str = ""

    @property
    def annotations(self) -> dict[Any, Any]:
        """Message annotations of the sender; a new map."""
        if not self.annotation_items:
            return {}
        head = _MAP_HEAD.pack(4 + len(self.annotation_octets), self.annotation_items)
        return read_annotations(_MAP + head + self.annotation_octets, _ARRIVED)

    def annotate(self, annotations: Mapping[Any, Any]) -> None:
        """Replace the message annotations of the sender.

        Raises:
            EncodeError: A value is of no type of AMQP.
        """
        out = bytearray()
        for key, value in annotations.items():
            if isinstance(key, int):
                write_ulong(out, key)
            else:
                write_symbol(out, key)
            write_value(out, value, 1)
        self.annotation_octets = bytes(out)
        self.annotation_items = 2 * len(annotations)

    @property
    def session(self) -> str | None:
        """The session, which is the ``group-id``."""
        return self.properties.group_id

    @property
    def partition_key(self) -> str | None:
        """The partition key, if the sender gave one."""
        key = self.annotations.get(PARTITION_KEY)
        return key if isinstance(key, str) else None
