"""Messages of a lake go to an address once more, each of them once.

Each partition that the messages came from is a producer of its own at the address, and its offsets are the
numbers by which it gets on (:mod:`.publishing`). Run again under the same id, after an interruption or
with more rows in the table, it goes on where it was. Messages of one partition stay in their order, and
so do those of a group that came from one partition; between partitions it is roughly that of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final

from msgspec import Meta
from pyspark.sql import Window
from pyspark.sql import functions as sql

from amqp_rt import Message
from amqp_rt.errors import DeliveryRejected
from amqp_rt.values import Symbol

from .. import wire
from ..options import SINK, read_options
from ..rows import payload_of
from .conf import JobConf, Rate, per_second
from .publishing import PIECE_BYTES, Pace, Publisher, replayed, short
from .report import Report, Table, Text
from .tables import Moment, messages_of

#: Partitions of one replay, each of which is a producer at the address.
_PARTITIONS_MAX: Final = 1_000
#: What of a row is looked at beside its message.
_BESIDE: Final = ("header", "message_annotations")
_NEEDED: Final = ("address", "partition", "offset", "enqueued_time", "message", *_BESIDE)
#: The one annotation that goes along, or is made of the group-id: it keeps messages of one key in one
#: partition. Of the others a table has only what JSON has of them.
_KEY: Final = "x-opt-partition-key"

#: Address and partition of a row; a queue has no partitions.
_Key = tuple[str, int | None]


class Replay(JobConf, frozen=True, kw_only=True):
    """What the job is told."""

    table: Annotated[str, Meta(description="The table that ingest has written.")]
    to: Annotated[str, Meta(description="The address to send to.")]
    replay_id: Annotated[
        str,
        Meta(
            description="A name for this replay. Under the same one nothing is sent twice; it is the "
            "message annotation x-opt-replay-id."
        ),
    ]
    where: Annotated[
        str,
        Meta(
            description="Only rows for which this SQL condition is true, over the table's columns."
        ),
    ] = ""
    since: Annotated[
        Moment,
        Meta(description="Only messages that were enqueued from this time on: 2026-01-31T12:00Z."),
    ] = ""
    until: Annotated[Moment, Meta(description="… and before this one.")] = ""
    rate: Annotated[Rate, Meta(description="Not more than so many at a time: 200/s.")] = ""
    set_property: Annotated[
        tuple[str, ...],
        Meta(description="An application property to set, NAME=VALUE, a string. Repeatable."),
    ] = ()
    dry_run: Annotated[bool, Meta(description="Say what would be sent, and send nothing.")] = False


def replay(spark: Any, conf: Replay) -> Report:
    """Send messages of a table to an address, each once under this id.

    Args:
        spark: The session.
        conf: What to send.

    Raises:
        ValueError: The table is none that ingest has written with its messages, or the condition is none.
        AmqpError: The broker cannot be reached, or refuses. Run again, it goes on where it was.
    """
    properties = _properties(conf.set_property)
    rows = messages_of(
        spark, conf.table, _NEEDED, since=conf.since, until=conf.until, where=conf.where
    )
    if conf.dry_run:
        return _planned(rows, conf)
    # In the order of time, as far as that is the order of offsets in each partition.
    before = Window.partitionBy("address", "partition").orderBy("offset")
    moment = sql.max("enqueued_time").over(
        before.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    columns = ["address", "partition", "offset", "message", *_BESIDE]
    ordered = (
        rows.select(*columns, moment.alias("_moment"))
        .orderBy("_moment", "address", "partition", "offset")
        .drop("_moment")
    )
    sender = Sender(conf, Pace(per_second(conf.rate) if conf.rate else None), properties)
    sender.send(row.asDict() for row in ordered.toLocalIterator(prefetchPartitions=True))
    return sender.report()


class Sender:
    """Sends rows that come in the order of their offsets.

    Args:
        conf: Where to.
        pace: How fast.
        properties: Application properties to set.
    """

    def __init__(self, conf: Replay, pace: Pace, properties: dict[str, str]) -> None:
        self._conf = conf
        self._pace = pace
        self._properties = properties
        self._options = read_options(conf.options(address=conf.to, ignoreUnknownColumns=True), SINK)
        self._publishers: dict[_Key, Publisher] = {}
        #: The last offset of each partition, and its message.
        self._last: dict[_Key, tuple[int, bytes]] = {}
        #: Partition → messages that were sent, and those that were there already.
        self.counts: dict[_Key, list[int]] = {}

    def send(self, rows: Iterable[dict[str, Any]]) -> None:
        """Send *rows* in pieces.

        Raises:
            AmqpError: It was interrupted.
            ValueError: The rows are no messages, or are ambiguous.
        """
        pieces: dict[_Key, list[tuple[int, bytes]]] = {}
        count = size = 0
        for row in rows:
            key, number, payload = self._message(row)
            last = self._last.get(key)
            if last is not None and number <= last[0]:
                if number == last[0] and payload == last[1]:
                    # The table has it twice.
                    continue
                raise ValueError(
                    f"the table has two messages of {_shown(key)} at offset {number}: the log was deleted "
                    "and made again, or the group of the queue was; choose one time of it by since and until"
                )
            self._last[key] = number, payload
            pieces.setdefault(key, []).append((number, payload))
            count += 1
            size += len(payload)
            if count >= self._pace.piece or size >= PIECE_BYTES:
                self._piece(pieces)
                pieces = {}
                count = size = 0
        self._piece(pieces)

    def report(self) -> Report:
        """What was sent."""
        sent = sum(each[0] for each in self.counts.values())
        already = sum(each[1] for each in self.counts.values())
        return Report(
            title=f"Replay {self._conf.replay_id} to {self._conf.to}",
            sections=[
                Text(
                    f"{sent} messages were sent"
                    + (f", and {already} had been before." if already else ".")
                ),
                Table(
                    "By where they came from",
                    ["address", "partition", "sent", "sent before"],
                    [[*key, *self.counts[key]] for key in sorted(self.counts, key=_shown)],
                ),
            ],
            facts={"id": self._conf.replay_id, "sent": sent, "sent_before": already},
        )

    def _message(self, row: dict[str, Any]) -> tuple[_Key, int, bytes]:
        key = str(row["address"]), row["partition"]
        number = row["offset"]
        if number is None or row["message"] is None:
            raise ValueError(
                f"a row of {_shown(key)} has no {'offset' if number is None else 'message'}: leave such "
                "rows out with where"
            )
        said = json.loads(row.pop("message_annotations") or "{}")
        message = Message.decode(payload_of(row, self._options))
        same = said.get(_KEY, message.group_id)
        if same is not None:
            message.message_annotations = {Symbol(_KEY): str(same)}
        if self._properties:
            message = message.replace(
                application_properties={**message.application_properties, **self._properties}
            )
        return key, int(number), replayed(message, self._conf.replay_id)

    def _piece(self, pieces: dict[_Key, list[tuple[int, bytes]]]) -> None:
        for key, messages in pieces.items():
            publisher = self._publishers.get(key)
            if publisher is None:
                if len(self._publishers) >= _PARTITIONS_MAX:
                    raise ValueError(
                        f"the table has messages of more than {_PARTITIONS_MAX} partitions: replay some of "
                        "them with where"
                    )
                publisher = Publisher(self._conf, self._conf.to, producer_of(self._conf, key))
                self._publishers[key] = publisher
            there = sum(number < publisher.next for number, _ in messages)
            self._pace.wait(len(messages) - there)
            try:
                sent = publisher.publish(messages, messages[-1][0] + 1)
            except DeliveryRejected as error:
                raise DeliveryRejected(
                    f"{self._conf.to!r} does not take one of the messages of {_shown(key)} with the "
                    f"offsets {messages[0][0]} to {messages[-1][0]}, and has none of them: "
                    f"{error.description}",
                    condition=error.condition,
                ) from error
            counts = self.counts.setdefault(key, [0, 0])
            counts[0] += sent
            counts[1] += len(messages) - sent


def producer_of(conf: Replay, key: _Key) -> str:
    """Under which name messages of a partition are published."""
    address, partition = key
    return short(f"replay {json.dumps([conf.replay_id, partition, address])}")


def _planned(rows: Any, conf: Replay) -> Report:
    """What would be sent."""
    counted = rows.groupBy("address", "partition").agg(
        sql.countDistinct("offset").alias("count"),
        sql.min("offset").alias("first"),
        sql.max("offset").alias("last"),
    )
    table: list[list[Any]] = []
    for row in counted.orderBy("address", "partition").limit(_PARTITIONS_MAX).collect():
        asked = producer_of(conf, (row.address, row.partition))
        known = wire.call(conf.endpoint, conf.to, "EPOCH", producer=asked)["epoch"]
        table.append([row.address, row.partition, row["count"], row.first, row.last, max(0, known)])
    total = sum(each[2] for each in table)
    return Report(
        title=f"Replay {conf.replay_id} to {conf.to}",
        sections=[
            Table(
                "Would be sent, unless it was before",
                ["address", "partition", "messages", "first offset", "last offset", "sent before"],
                table,
                "what is before the offset in the last column has been sent under this id",
            )
        ],
        facts={"id": conf.replay_id, "dry_run": True, "messages": total},
    )


def _properties(given: Iterable[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise ValueError(f"set_property is NAME=VALUE, not {each!r:.80}")
        found[name] = value
    return found


def _shown(key: _Key) -> str:
    address, partition = key
    return repr(address) if partition is None else f"{address!r}, partition {partition}"
