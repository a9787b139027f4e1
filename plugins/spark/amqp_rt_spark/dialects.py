"""Logs of other brokers that speak AMQP 1.0: RabbitMQ streams and Event Hubs.

Both can be read repeatedly from an offset, which a filter of the source selects. They differ in how a
partition is addressed, how its ends are found, and where a record carries its offset. Neither has leases,
cursors or staging, so a query works without these.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from amqp_rt import Message
from amqp_rt.values import Symbol, Timestamp

from .options import EVENT_HUBS, RABBITMQ, Options
from .spelling import OURS, SEQUENCE_NUMBER, Spelling, offset_spec, selector_filter
from .wire import Wire

#: Partition → offset of its oldest record, and the offset that the next record gets.
Ends = dict[int, tuple[int, int]]

#: Most records of the last chunk that are read to find the newest one.
_LAST_MOST: Final = 100_000


class RabbitStreams(Spelling):
    """RabbitMQ 4 streams: ``/queues/NAME``, each with one partition. A super stream with several partitions
    is read as several addresses."""

    def node(self, address: str, partition: int) -> str:
        return address

    def begin(self, position: Any) -> dict[Any, Any]:
        return {Symbol("rabbitmq:stream-offset-spec"): offset_spec(position)}

    def number(self, message: Message) -> int:
        return int(message.message_annotations["x-stream-offset"])

    def state(self, there: Wire, address: str) -> tuple[str, Ends]:
        """Return an identifier of the log's incarnation, here always empty, and the ends of its partitions.

        RabbitMQ reports no end of a stream: ``last`` positions at its last chunk, whose last record is
        the newest.

        Raises:
            AmqpError: The stream cannot be read.
        """
        first = there.probe(address, 0, "first", spelling=self)
        if first is None:
            return "", {0: (0, 0)}
        newest = first
        for offset in islice(there.from_(address, 0, "last", spelling=self), _LAST_MOST):
            newest = offset
        return "", {0: (first, newest + 1)}


class EventHubs(Spelling):
    """Event Hubs, read as *group*. Offsets here are sequence numbers, which are ascending integers."""

    def __init__(self, group: str) -> None:
        self._group = group

    def node(self, address: str, partition: int) -> str:
        return f"{address}/ConsumerGroups/{self._group}/Partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        name = "x-opt-enqueued-time" if isinstance(position, Timestamp) else SEQUENCE_NUMBER
        text = f"amqp.annotation.{name} >= '{int(position)}'"
        return {Symbol("apache.org:selector-filter:string"): selector_filter(text)}

    def state(self, there: Wire, address: str) -> tuple[str, Ends]:
        """Return an identifier of the hub's incarnation, and the ends of its partitions.

        Raises:
            AmqpError: No such hub exists, or its properties cannot be read.
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
        # A hub that is deleted and created again keeps its name, but has another creation time.
        return str(int(hub["created_at"])), ends


def dialect_of(options: Options) -> RabbitStreams | EventHubs | None:
    """Return the dialect of the logs of *options*; None for logs of amqp_rt."""
    if options.logs == RABBITMQ:
        return RabbitStreams()
    if options.logs == EVENT_HUBS:
        return EventHubs(options.group or "$Default")
    return None


def spelling_of(options: Options) -> Spelling:
    """Return the dialect of the logs of *options*, also for those of amqp_rt."""
    return dialect_of(options) or OURS
