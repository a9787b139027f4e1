"""Logs of other brokers that speak AMQP 1.0: streams of RabbitMQ, and Event Hubs.

Both can be read from an offset on as often as it takes, and both say it with a filter of the source. They
differ in how a partition is addressed, how its ends are found, and where a record says its offset.
What they do not have, leases, cursors and staging, a query does without.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from amqp_rt import Message
from amqp_rt.values import Symbol, Timestamp

from . import wire
from .options import EVENT_HUBS, RABBITMQ, Options
from .wire import SEQUENCE_NUMBER, Spelling, Wire, offset_spec, selector_filter

#: Partition → its oldest offset, and the next one.
Ends = dict[int, tuple[int, int]]

#: Records that are looked at to find the newest: it is among those of the last chunk.
_LAST_MOST: Final = 100_000


class RabbitStreams(Spelling):
    """Streams of RabbitMQ 4: ``/queues/NAME``, each with one partition. One that has several is read as
    several addresses."""

    def node(self, address: str, partition: int) -> str:
        return address

    def begin(self, position: Any) -> dict[Any, Any]:
        return {Symbol("rabbitmq:stream-offset-spec"): offset_spec(position)}

    def number(self, message: Message) -> int:
        return int(message.message_annotations["x-stream-offset"])

    def state(self, there: Wire, address: str) -> tuple[str, Ends]:
        """What tells the log from another one of its name, if anything does; and its ends.

        Nobody says where a stream ends: ``last`` is its last chunk, of which the last record is it.

        Raises:
            AmqpError: It cannot be read.
        """
        first = there.probe(address, 0, "first", spelling=self)
        if first is None:
            return "", {0: (0, 0)}
        newest = first
        for offset in islice(there.from_(address, 0, "last", spelling=self), _LAST_MOST):
            newest = offset
        return "", {0: (first, newest + 1)}


class EventHubs(Spelling):
    """Event Hubs, read as *group*. Offsets are sequence numbers here, which are whole numbers in order."""

    def __init__(self, group: str) -> None:
        self._group = group

    def node(self, address: str, partition: int) -> str:
        return f"{address}/ConsumerGroups/{self._group}/Partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        name = "x-opt-enqueued-time" if isinstance(position, Timestamp) else SEQUENCE_NUMBER
        text = f"amqp.annotation.{name} >= '{int(position)}'"
        return {Symbol("apache.org:selector-filter:string"): selector_filter(text)}

    def state(self, there: Wire, address: str) -> tuple[str, Ends]:
        """What tells the log from another one of its name, and its ends.

        Raises:
            AmqpError: There is no such hub, or it does not say.
        """
        asked = {"operation": "READ", "name": address}
        hub = there.ask("$management", {**asked, "type": "com.microsoft:eventhub"})
        ends: Ends = {}
        for partition in hub["partition_ids"]:
            kind = {"type": "com.microsoft:partition", "partition": str(partition)}
            said = there.ask("$management", {**asked, **kind})
            after = int(said["last_enqueued_sequence_number"]) + 1
            first = after if said["is_partition_empty"] else int(said["begin_sequence_number"])
            ends[int(partition)] = first, after
        # A hub that is made again has its name, and another day of birth.
        return str(int(hub["created_at"])), ends


def dialect_of(options: Options) -> RabbitStreams | EventHubs | None:
    """How the logs of *options* are spelled; None for those of our broker."""
    if options.logs == RABBITMQ:
        return RabbitStreams()
    if options.logs == EVENT_HUBS:
        return EventHubs(options.group or "$Default")
    return None


def spelling_of(options: Options) -> Spelling:
    """The same, with ours."""
    return dialect_of(options) or wire.OURS
