"""Batches: many messages in one delivery.

**Records.** A receiver that wants batches attaches to a log with the desired capability :data:`RECORD_BATCHES`. A broker
that sends them offers it in its answer; any other sends single messages. On such a link each delivery has the
message format :data:`RECORD_BATCH`, one credit is one batch, and a batch has records of one partition.

A batch is a sequence of one or more records. Each is its offset (64 bits), the time at which it was
appended (64 bits, signed, milliseconds since 1970), its message format (32 bits), the number of its octets (32 bits)
and its octets as stored, without the annotations that give its place on other links. Numbers are
big-endian. Offsets ascend; those of records that retention has dropped, or that a filter does not match, are
missing.

**Messages.** A sender that stages messages for an epoch may send batches if the broker offers :data:`MESSAGE_BATCHES`,
which the sender desires. Such a message has the message format :data:`MESSAGE_BATCH` and a data section (Part 3
§3.2.6) for each encoded message, as batches of Event Hubs have. It is accepted or refused as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from .errors import DecodeError
from .values import Symbol

#: Capability of a link from a log to send batches.
RECORD_BATCHES: Final = Symbol("amqp_rt:record-batches")
#: The ``message-format`` of a batch of records (Part 2 §2.8.11): three octets of our own, and a version.
RECORD_BATCH: Final = 0x61725201

#: Capability of a link to accept batches of messages, and their ``message-format``.
MESSAGE_BATCHES: Final = Symbol("amqp_rt:message-batches")
MESSAGE_BATCH: Final = 0x80013700

#: Head of a record, before its octets: offset, time, message format and size.
RECORD_HEAD: Final = struct.Struct(">QqII")

#: Latest time whose number of microseconds fits 64 bits.
_TIME_MAX: Final = (2**63 - 1) // 1000
_OFFSET_MAX: Final = 2**63 - 1


def read_records(batch: bytes) -> tuple[list[int], list[int], list[bytes]]:
    """Return the offsets, the times and the octets of the records of *batch*.

    Raises:
        DecodeError: *batch* is not a batch of records.
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


#: Openings of a data section: 8 or 32 bits of size follow.
_SHORT: Final = b"\x00\x53\x75\xa0"
_LONG: Final = b"\x00\x53\x75\xb0"
_LONG_HEAD: Final = struct.Struct(">4sI")


def write_messages(messages: Iterable[bytes]) -> bytes:
    """Return the batch of the encoded *messages*."""
    pieces: list[bytes] = []
    for message in messages:
        pieces.append(_LONG_HEAD.pack(_LONG, len(message)))
        pieces.append(message)
    return b"".join(pieces)


def read_messages(batch: bytes, most: int) -> list[bytes]:
    """Return the encoded messages of *batch*, at most *most*.

    Raises:
        DecodeError: *batch* is not a batch of messages, or has more than *most*.
    """
    found: list[bytes] = []
    at, end, unpack = 0, len(batch), _LONG_HEAD.unpack_from
    while at < end:
        start = at + 8
        opening, size = unpack(batch, at) if start <= end else (b"", 0)
        if opening != _LONG:
            if not batch.startswith(_SHORT, at) or at + 5 > end:
                raise DecodeError(f"a batch of messages has no data section at octet {at}")
            start, size = at + 5, batch[at + 4]
        at = start + size
        if at > end:
            raise DecodeError(
                f"a batch of messages has {end - start} octets at octet {start}, and the message there {size}"
            )
        if len(found) == most:
            raise DecodeError(f"a batch of messages has more than {most}")
        found.append(batch[start:at])
    if not found:
        raise DecodeError("a batch of messages has none")
    return found
