"""Records of a log in one message: a batch, by which a reader gets many of them for the work of one delivery.

A receiver that wants batches attaches to a log with the desired capability :data:`RECORD_BATCHES`. A broker
that sends them offers it in its answer; any other sends single messages. On such a link each delivery has the
message format :data:`RECORD_BATCH`, one credit is one batch, and a batch has records of one partition.

A batch is one or more records, one after the other. Each is its offset (64 bits), the time at which it was
appended (64 bits, signed, milliseconds since 1970), its message format (32 bits), the number of its octets (32 bits)
and its octets as they are kept, without the annotations that say its place on other links. Numbers are
big-endian. Offsets ascend; what retention has dropped, and what a filter does not let pass, is missing between
them.
"""

from __future__ import annotations

import struct
from typing import Final

from .errors import DecodeError
from .values import Symbol

#: The capability of a link from a log to send batches.
RECORD_BATCHES: Final = Symbol("amqp_rt:record-batches")
#: The ``message-format`` of a batch (Part 2 §2.8.11): three octets of our own, and a version.
RECORD_BATCH: Final = 0x61725201

#: What comes before the octets of a record: offset, time, message format and size.
RECORD_HEAD: Final = struct.Struct(">QqII")

#: Later times have no number of microseconds that fits 64 bits.
_TIME_MAX: Final = (2**63 - 1) // 1000
_OFFSET_MAX: Final = 2**63 - 1


def read_records(batch: bytes) -> tuple[list[int], list[int], list[bytes]]:
    """Return the offsets, the times and the octets of the records of *batch*.

    Raises:
        DecodeError: It is not a batch of records.
    """
    offsets: list[int] = []
    times: list[int] = []
    payloads: list[bytes] = []
    at, end, last = 0, len(batch), -1
    while at < end:
        if end - at < RECORD_HEAD.size:
            raise DecodeError(
                f"a batch of records ends within the head of one: {end - at} octets at octet {at}"
            )
        offset, time_ms, _, size = RECORD_HEAD.unpack_from(batch, at)
        at += RECORD_HEAD.size
        if size > end - at:
            raise DecodeError(
                f"a batch of records has {end - at} octets at octet {at}, and the record there {size}"
            )
        if not last < offset <= _OFFSET_MAX:
            raise DecodeError(f"a batch of records has the offset {offset} after {last}")
        if not -_TIME_MAX <= time_ms <= _TIME_MAX:
            raise DecodeError(
                f"a batch of records has the time {time_ms}, which is out of range, at offset {offset}"
            )
        offsets.append(offset)
        times.append(time_ms)
        payloads.append(batch[at : at + size])
        at += size
        last = offset
    if not offsets:
        raise DecodeError("a batch of records has none")
    return offsets, times, payloads
