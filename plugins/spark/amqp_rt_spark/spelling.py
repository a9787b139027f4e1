"""Addresses, filters and offsets of logs at amqp_rt's broker; those of other brokers are in :mod:`.dialects`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from amqp_rt import Message
from amqp_rt.values import Described, Symbol

from .malformed import decoded

_compiled_numbers: Callable[[list[bytes]], list[int | None]] | None
try:
    from ._columnar import numbers as _compiled_numbers
except ImportError:
    _compiled_numbers = None

#: Annotation with the offset of a record, or the number of a leased message.
SEQUENCE_NUMBER: Final = "x-opt-sequence-number"


class Spelling:
    """Addresses and annotations of logs at amqp_rt's broker; those of others are in :mod:`.dialects`."""

    def node(self, address: str, partition: int) -> str:
        """Return the address of a partition."""
        return f"{address}/partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        """Return the filters of a source that begins at *position*: an offset, a timestamp, ``first`` or ``last``."""
        return {Symbol("start"): offset_spec(position)}

    def number(self, message: Message) -> int:
        """Return the offset of a record."""
        return int(message.message_annotations[SEQUENCE_NUMBER])

    def numbers(self, payloads: list[bytes]) -> list[int]:
        """Return the offset of each record.

        Raises:
            DecodeError: The annotations of one are malformed.
        """
        return [self.number(decoded(payload)) for payload in payloads]


class _Ours(Spelling):
    """Spelling of amqp_rt's broker, with offsets at a fixed place, from which they can be read directly."""

    def numbers(self, payloads: list[bytes]) -> list[int]:
        return numbers(payloads)


#: Spelling of amqp_rt's logs.
OURS: Final = _Ours()


def offset_spec(position: Any) -> Described:
    """Return *position* as the filter value by which RabbitMQ selects the start in its streams."""
    return Described(Symbol("rabbitmq:stream-offset-spec"), position)


def selector_filter(selector: str) -> Described:
    """Return a filter by an SQL-like condition."""
    return Described(Symbol("apache.org:selector-filter:string"), selector)


_HEADER_BEGIN: Final = b"\x00\x53\x70\xc0"
_ANNOTATIONS_BEGIN: Final = b"\x00\x53\x72\xc1"
_FIRST_KEY: Final = b"\xa3\x0cx-opt-offset\xa1"
_SECOND_KEY: Final = b"\xa3\x15x-opt-sequence-number"


def numbers(payloads: list[bytes]) -> list[int]:
    """Return the number that amqp_rt's broker has given to each record of a log, or message of a lease.

    Raises:
        DecodeError: The annotations of a message are malformed.
    """
    found = (
        map(number_at_its_place, payloads)
        if _compiled_numbers is None
        else _compiled_numbers(payloads)
    )
    return [
        OURS.number(decoded(payload)) if number is None else number
        for number, payload in zip(found, payloads, strict=True)
    ]


def number_at_its_place(payload: bytes) -> int | None:
    """Return the number of a record whose annotations begin with those of amqp_rt's broker; None for others.

    Most records have only these, so the map need not be decoded. ``numbers`` of the compiled module does
    the same.
    """
    at = 5 + payload[4] if payload.startswith(_HEADER_BEGIN) and len(payload) > 4 else 0
    if payload.startswith(_ANNOTATIONS_BEGIN, at) and payload.startswith(_FIRST_KEY, at + 6):
        # Skip the first key, and its text with the octet of its size.
        at += 21
        at += 1 + int.from_bytes(payload[at : at + 1])
        if payload.startswith(_SECOND_KEY, at):
            # A long or a smalllong.
            for constructor, width in ((b"\x81", 8), (b"\x55", 1)):
                number = payload[at + 24 : at + 24 + width]
                if payload.startswith(constructor, at + 23) and len(number) == width:
                    return int.from_bytes(number, signed=True)
    return None
