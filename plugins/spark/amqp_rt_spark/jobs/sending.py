"""Rows of messages are sent once more, each once under the id of the replay.

Each partition that they came from is a producer of its own at the address, and its offsets are the numbers by
which it gets on (:mod:`.publishing`). Nothing here knows Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from amqp_rt import Message
from amqp_rt.errors import DeliveryRejected
from amqp_rt.values import Symbol

from ..options import SINK, read_options
from ..rows import payload_of
from .conf import JobConf
from .publishing import PIECE_BYTES, Pace, Publisher, replayed, short

#: Partitions of one replay, each of which is a producer at the address.
PARTITIONS_MAX: Final = 1_000
#: The one annotation that goes along, or is made of the group-id: it keeps messages of one key in one
#: partition. Of the others a table has only what JSON has of them.
_KEY: Final = "x-opt-partition-key"

#: Address and partition of a row; a queue has no partitions.
Origin = tuple[str, int | None]


class Sender:
    """Sends rows that come in the order of their offsets.

    Args:
        conf: Where the broker is.
        to: The address.
        replay: The id of the replay.
        pace: How fast it goes.
        properties: Application properties to set.
        chosen: Says which rows are sent; under one id it stays the same.

    Attributes:
        counts: Of each partition, how many messages were sent, and had been before.
    """

    def __init__(
        self,
        conf: JobConf,
        to: str,
        replay: str,
        pace: Pace,
        properties: dict[str, str],
        chosen: str = "",
    ) -> None:
        self.counts: dict[Origin, list[int]] = {}
        self._conf = conf
        self._to = to
        self._id = replay
        self._pace = pace
        self._properties = properties
        self._chosen = chosen
        self._options = read_options(conf.options(address=to, ignoreUnknownColumns=True), SINK)
        self._publishers: dict[Origin, Publisher] = {}
        #: The last offset of each partition, and its message.
        self._last: dict[Origin, tuple[int, bytes]] = {}

    def send(self, rows: Iterable[dict[str, Any]]) -> None:
        """Send *rows* in pieces.

        Raises:
            AmqpError: It was interrupted.
            ValueError: The rows are no messages, are ambiguous, or other ones were chosen under this id.
        """
        pieces: dict[Origin, list[tuple[int, bytes]]] = {}
        count = size = 0
        for row in rows:
            key, number, payload = self._message(row)
            last = self._last.get(key)
            if last is not None and number <= last[0]:
                if number == last[0] and payload == last[1]:
                    # The table has it twice.
                    continue
                raise ValueError(
                    f"the table has two messages of {shown(key)} at offset {number}: the log was deleted "
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

    def _message(self, row: dict[str, Any]) -> tuple[Origin, int, bytes]:
        key = str(row["address"]), row["partition"]
        number = row["offset"]
        if number is None or row["message"] is None:
            raise ValueError(
                f"a row of {shown(key)} has no {'offset' if number is None else 'message'}: leave such "
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
        return key, int(number), replayed(message, self._id)

    def _piece(self, pieces: dict[Origin, list[tuple[int, bytes]]]) -> None:
        for key, messages in pieces.items():
            publisher = self._publishers.get(key)
            if publisher is None:
                if len(self._publishers) >= PARTITIONS_MAX:
                    raise ValueError(
                        f"the table has messages of more than {PARTITIONS_MAX} partitions: replay some of "
                        "them with where"
                    )
                name = producer_of(self._id, key)
                publisher = Publisher(self._conf, self._to, name, self._chosen)
                self._publishers[key] = publisher
            there = sum(number < publisher.next for number, _ in messages)
            self._pace.wait(len(messages) - there)
            try:
                sent = publisher.publish(messages, messages[-1][0] + 1)
            except DeliveryRejected as error:
                raise DeliveryRejected(
                    f"{self._to!r} does not take one of the messages of {shown(key)} with the "
                    f"offsets {messages[0][0]} to {messages[-1][0]}, and has none of them: "
                    f"{error.description}",
                    condition=error.condition,
                ) from error
            counts = self.counts.setdefault(key, [0, 0])
            counts[0] += sent
            counts[1] += len(messages) - sent


def producer_of(replay: str, origin: Origin) -> str:
    """Under which name messages of a partition are published."""
    address, partition = origin
    return short(f"replay {json.dumps([replay, partition, address])}")


def shown(origin: Origin) -> str:
    """*origin* as a sentence has it."""
    address, partition = origin
    return repr(address) if partition is None else f"{address!r}, partition {partition}"
