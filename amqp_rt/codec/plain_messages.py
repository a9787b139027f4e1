"""Quick reading of plain messages: of properties and a body of one section, in the usual encoding.

:func:`read_plain_data` finds the octets of a data section by comparing the few octets around it.
:class:`PlainReader` reads messages that differ from an earlier one of their link only in an id and in the body:
requests of one caller, and the replies to them, have the same properties but for the key that matches a reply to
its request. The octets around the key are compared with those of an earlier message instead of being decoded.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from ..errors import DecodeError
from ..limits import DEFAULT_LIMITS
from .primitives import Reader
from .section_types import Properties
from .sections import (
    AMQP_VALUE,
    APPLICATION_PROPERTIES,
    DATA,
    PROPERTIES,
    SECTION_NAMES,
    SECTION_OPENINGS,
    reach_of,
    read_properties,
)

_U32: Final = struct.Struct(">I")

#: Messages in a row that may differ from the ones before, until a reader gives up: comparing them would be wasted.
_MISSES_MAX: Final = 16
#: Position of the correlation-id in the properties (§3.2.4).
_CORRELATION_ID: Final = 5

#: How these sections begin with a size of one octet, and of four.
_PROPERTIES_8: Final = SECTION_OPENINGS[PROPERTIES] + b"\xc0"
_APPLICATION_PROPERTIES_8: Final = SECTION_OPENINGS[APPLICATION_PROPERTIES] + b"\xc1"
_DATA_8: Final = SECTION_OPENINGS[DATA] + b"\xa0"
_DATA_32: Final = SECTION_OPENINGS[DATA] + b"\xb0"


def read_plain_data(payload: bytes) -> bytes | None:
    """Return the octets of a message of one data section, at most behind properties, in the usual encoding.

    None is returned for any other message, also for one of these that is malformed: see :func:`~.sections.read_data`. As
    there, the properties are not read.
    """
    at = 0
    if payload[:4] == _PROPERTIES_8 and len(payload) > 4:
        at = 5 + payload[4]
    begin = at + 5
    if payload[at : at + 4] == _DATA_8 and begin <= len(payload):
        # As most messages: without another call.
        return payload[begin:] if begin + payload[at + 4] == len(payload) else None
    return _last_data(payload, at)


def read_data_behind_properties(payload: bytes) -> bytes | None:
    """Return the same octets as :func:`read_plain_data`, also if application-properties precede the data.

    These may have a trace context, which is not looked for here.
    """
    at = 0
    if payload[:4] == _PROPERTIES_8 and len(payload) > 4:
        at = 5 + payload[4]
    if payload[at : at + 4] == _APPLICATION_PROPERTIES_8 and len(payload) > at + 4:
        at += 5 + payload[at + 4]
    return _last_data(payload, at)


def _last_data(payload: bytes, at: int) -> bytes | None:
    """Return the octets of the data section from *at* to the end of *payload*; None if there is no such section."""
    begin = at + 5
    kind = payload[at : at + 4]
    if kind == _DATA_8:
        if len(payload) >= begin and begin + payload[at + 4] == len(payload):
            return payload[begin:]
    elif kind == _DATA_32:
        begin += 3
        if len(payload) >= begin and begin + _U32.unpack_from(payload, at + 4)[0] == len(payload):
            return payload[begin:]
    return None


class PlainMessage:
    """Received message of properties and a body of one data section or one AMQP value."""

    __slots__ = ("_begin", "body_kind", "key", "payload", "properties")

    def __init__(
        self, payload: bytes, key: str, properties: Properties, kind: str, begin: int
    ) -> None:
        #: The octets as received.
        self.payload = payload
        #: The correlation-id, or if there is none the message-id.
        self.key = key
        #: Properties of an earlier message, which has other ids; all else is equal.
        self.properties = properties
        #: ``data`` or ``value``, as of :class:`~amqp_rt.message.Message`.
        self.body_kind = kind
        #: Where the octets of the data begin, or the value.
        self._begin = begin

    @property
    def body(self) -> Any:
        """Octets of the data section, or the value.

        Raises:
            DecodeError: The value is malformed.
        """
        if self.body_kind == "data":
            return self.payload[self._begin :]
        return read_section_value(self.payload, self._begin)

    @property
    def octets(self) -> bytes | None:
        """Octets of the data section; None for a value, and for octets in a content-encoding."""
        if self.body_kind != "data" or self.properties.content_encoding is not None:
            return None
        return self.payload[self._begin :]


def read_section_value(payload: bytes, at: int) -> object:
    """Return the value of the amqp-value section that reaches from *at* to the end of *payload* (§3.2.8).

    Raises:
        DecodeError: The value is malformed.
    """
    r = Reader(payload, at, len(payload), DEFAULT_LIMITS)
    try:
        value = r.read_value()
        if r.at != r.end:
            raise DecodeError(f"{r.end - r.at} octets are left over")
    except DecodeError as error:
        raise DecodeError(f"{SECTION_NAMES[AMQP_VALUE]}: {error.description}") from None
    return value


class PlainReader:
    """Reader of the messages of one link, which remembers the properties of the latest one."""

    __slots__ = ("_head", "_misses", "_properties", "_size", "_tail")

    def __init__(self) -> None:
        #: Octets of the properties before the key, which end with its size, and those after it.
        self._head = b""
        self._tail = b""
        #: Octets of the key.
        self._size = 0
        self._properties = Properties()
        self._misses = 0

    def read(self, payload: bytes) -> PlainMessage | None:
        """Return the message in *payload*; None if it is another than a plain one, or malformed."""
        if self._misses > _MISSES_MAX:
            return None
        begin = len(self._head)
        end = begin + self._size
        at = end + len(self._tail)
        if begin and payload.startswith(self._head) and payload[end:at] == self._tail:
            self._misses = 0
        else:
            self._misses += 1
            if not self._learn(payload):
                return None
            begin = len(self._head)
            end = begin + self._size
            at = end + len(self._tail)
        size = len(payload)
        kind = "data"
        if payload[at : at + 4] == b"\x00\x53\x75\xa0" and at + 4 < size:
            after = at + 5
            if after + payload[at + 4] != size:
                return None
        elif reach_of(payload, at) != size:
            return None
        elif payload[at + 2] == DATA:
            after = at + 8
        elif payload[at + 2] == AMQP_VALUE:
            after = at + 3
            kind = "value"
        else:
            return None
        try:
            key = payload[begin:end].decode("utf-8")
        except UnicodeDecodeError:
            return None
        return PlainMessage(payload, key, self._properties, kind, after)

    def _learn(self, payload: bytes) -> bool:
        """Remember the properties of *payload*; return False if they are not the first section, or have no key."""
        if payload[:4] != b"\x00\x53\x73\xc0" or len(payload) < 6:
            return False
        size = len(payload)
        end = 5 + payload[4]
        if end > size:
            return False
        try:
            properties = read_properties(payload, 0, end, DEFAULT_LIMITS)
        except DecodeError:
            return False
        at = 6
        if properties.correlation_id is None:
            key = properties.message_id
        else:
            if properties.message_id is not None:
                return False
            key = properties.correlation_id
            for _ in range(_CORRELATION_ID):
                code = payload[at]
                if code == 0x40:
                    at += 1
                elif code == 0xA0 or code == 0xA1 or code == 0xA3:
                    at += 2 + payload[at + 1]
                else:
                    return False
        if type(key) is not str or payload[at] != 0xA1:
            return False
        begin = at + 2
        self._size = payload[at + 1]
        self._head = payload[:begin]
        self._tail = payload[begin + self._size : end]
        self._properties = properties
        return True
