"""Records of a log, the blocks of them in memory, and the chunks of them in the store."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from ...message import MESSAGE_FORMAT
from ...stores.base import Chunk

_log = logging.getLogger("amqp_rt.broker")

#: Bytes of memory for a record besides its payload.
RECORD_COST: Final = 64


class Record(Struct, gc=False, array_like=True):
    """Message of a log. New fields go to the end."""

    #: Time of appending: milliseconds since 1970.
    time_ms: int
    payload: bytes
    message_format: int = MESSAGE_FORMAT
    #: Container-id of the publisher, if known.
    publisher: str | None = None

    @property
    def size(self) -> int:
        """Number of bytes that it counts as."""
        return len(self.payload) + RECORD_COST


def size_of(records: list[Record]) -> int:
    """Return the sum of ``size`` of *records*, without a call for each one."""
    return sum([len(record.payload) for record in records]) + RECORD_COST * len(records)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class Block:
    """Consecutive records in memory."""

    __slots__ = ("missing", "offset", "records", "size")

    def __init__(self, offset: int, records: list[Record], missing: int = 0) -> None:
        self.offset = offset
        self.records = records
        self.size = size_of(records)
        #: Number of records that cannot be read.
        self.missing = missing

    @property
    def end(self) -> int:
        """Offset after the last record."""
        return self.offset + len(self.records) + self.missing

    @property
    def first_ms(self) -> int:
        return self.records[0].time_ms

    @property
    def last_ms(self) -> int:
        return self.records[-1].time_ms

    def since(self, time_ms: int) -> int:
        """Return the offset of the first record that is not older than *time_ms*."""
        return self.offset + bisect_left(self.records, time_ms, key=_time)


def _time(record: Record) -> int:
    return record.time_ms


def chunk_of(offset: int, records: Sequence[Record]) -> Chunk:
    """Return the chunk to store for *records*, the first of which has *offset*."""
    return Chunk(
        offset, len(records), records[0].time_ms, records[-1].time_ms, _encoder.encode(records)
    )


def block_of(chunk: Chunk) -> Block:
    """Return the records of *chunk*; none if they cannot be read, and readers see the gap in offsets."""
    try:
        records = _decoder.decode(chunk.data)
    except msgspec.DecodeError as error:
        _log.error("records %d to %d: %s", chunk.offset, chunk.offset + chunk.count - 1, error)
        return Block(chunk.offset, [], chunk.count)
    return Block(chunk.offset, records)
