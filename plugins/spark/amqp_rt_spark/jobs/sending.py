"""Send rows of messages again, each once under the id of the replay.

Each partition that they came from is a producer of its own at the address, and its offsets are the numbers
that record its progress (:mod:`.publishing`). This module does not depend on Spark.
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

#: Most partitions of one replay, each of which is a producer at the address.
PARTITIONS_MAX: Final = 1_000
#: The only annotation that is kept, or derived from the group-id: it keeps messages of one key in one
#: partition. Of the others a table has only their JSON form.
_KEY: Final = "x-opt-partition-key"

#: Address and partition of a row; a queue has no partitions.
Origin = tuple[str, int | None]


class Sender:
    """Sends rows that come in the order of their offsets.

    Args:
        conf: Connection settings.
        to: The address.
        replay: Id of the replay.
        pace: Rate of the replay.
        properties: Application properties to set.
        chosen: Description of the choice of rows, which stays the same under one id.

    Attributes:
        counts: For each partition, messages sent by this run and by earlier ones.
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
            AmqpError: The replay was interrupted.
            ValueError: The rows are no messages or ambiguous, or other ones were chosen under this id.
        """
        pieces: dict[Origin, list[tuple[int, bytes]]] = {}
        count = size = 0
        for row in rows:
            key, number, payload = self._message(row)
            last = self._last.get(key)
            if last is not None and number <= last[0]:
                if number == last[0] and payload == last[1]:
                    # A duplicate row of the table.
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
    """Return the name of the producer for messages of a partition."""
    address, partition = origin
    return short(f"replay {json.dumps([replay, partition, address])}")


def shown(origin: Origin) -> str:
    """Return *origin* as part of a sentence."""
    address, partition = origin
    return repr(address) if partition is None else f"{address!r}, partition {partition}"
