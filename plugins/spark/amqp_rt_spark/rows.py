"""Conversion of messages to rows, and of rows to messages.

A row is a plain tuple in the order of the columns. Times are microseconds since 1970, and a VARIANT is the
pair of its octets and those of its metadata; their Spark types are up to the caller.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from amqp_rt import Message
from amqp_rt.errors import DecodeError
from amqp_rt.message import Properties, Sequence
from amqp_rt.values import Symbol, Timestamp, ULong

from . import json_bodies, variant
from .kafka_names import column_hint
from .malformed import decoded
from .options import Options
from .schema import COLUMNS, columns_of

#: Annotations with a record's position in its log. A row has columns for these, and a message that is sent
#: elsewhere gets another position.
PLACE: Final = frozenset(
    (
        "x-opt-offset",
        "x-opt-sequence-number",
        "x-opt-enqueued-time",
        "x-opt-partition-id",
        "x-stream-offset",
    )
)
_PARTITION_KEY: Final = Symbol("x-opt-partition-key")

_PROPERTIES: Final = tuple(Properties.__struct_fields__)
_MOMENTS: Final = frozenset(("absolute_expiry_time", "creation_time"))
_IDS: Final = frozenset(("message_id", "correlation_id"))
_HEADER: Final = ("durable", "priority", "ttl")
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MS: Final = dt.timedelta(milliseconds=1)


# --- Messages as rows ----------------------------------------------------------------------------


class Place(Struct, frozen=True):
    """Position of a message."""

    address: str
    partition: int | None = None
    offset: int | None = None
    broker: str = ""
    #: Time at which its log got it, if known without decoding its annotations.
    time_ms: int | None = None
    #: Whether it has no annotations but those of its position.
    bare: bool = False


class Records(Struct):
    """Encoded messages from one node or partition, in order."""

    address: str
    payloads: list[bytes]
    partition: int | None = None
    #: One for each payload.
    offsets: list[int] | None = None
    broker: str = ""
    #: Times at which their log got them, if delivered beside them (milliseconds since 1970).
    times: list[int] | None = None

    def place(self, at: int) -> Place:
        """Return the position of the message with the index *at*."""
        if self.offsets is None:
            return Place(self.address, self.partition, None, self.broker)
        offset = self.offsets[at]
        if self.times is not None:
            return Place(self.address, self.partition, offset, self.broker, self.times[at])
        time_ms = time_at_its_place(self.payloads[at])
        return Place(
            self.address, self.partition, offset, self.broker, time_ms, time_ms is not None
        )


_HEADER_BEGIN: Final = b"\x00\x53\x70\xc0"
_ANNOTATIONS_BEGIN: Final = b"\x00\x53\x72\xc1"
#: Annotations map of a record without other annotations, as amqp_rt's broker writes it, from its count on.
_ONLY_PLACE: Final = re.compile(
    rb"\x0a\xa3\x0cx-opt-offset\xa1(.)([0-9]*)"
    rb"\xa3\x15x-opt-sequence-number\x81.{8}"
    rb"\xa3\x13x-opt-enqueued-time\x83(.{8})"
    rb"\xa3\x0fx-stream-offset\x80.{8}"
    rb"\xa3\x12x-opt-partition-id\xa1(.)([0-9]*)",
    re.DOTALL,
)


def time_at_its_place(payload: bytes) -> int | None:
    """Return the time at which a log got the record *payload*, in milliseconds since 1970, if its annotations
    are those of its position only, as for most records: then the map need not be decoded."""
    at = 5 + payload[4] if payload.startswith(_HEADER_BEGIN) and len(payload) > 4 else 0
    if not payload.startswith(_ANNOTATIONS_BEGIN, at) or len(payload) < at + 5:
        return None
    end = at + 5 + payload[at + 4]
    found = _ONLY_PLACE.fullmatch(payload, at + 5, end) if end <= len(payload) else None
    if found is None:
        return None
    offset_size, offset, time_ms, partition_size, partition = found.groups()
    if (len(offset), len(partition)) != (offset_size[0], partition_size[0]):
        return None
    return int.from_bytes(time_ms, signed=True)


class RowMaker:
    """Makes rows with the columns that *options* request."""

    def __init__(self, options: Options) -> None:
        self._columns = columns_of(options)
        self._row_for_bad = options.on_undecodable == "row"
        self._text = options.body == "text"
        self._getters: list[Callable[[Message, Place], Any]] = [
            _BODIES.get((name, options.body), _GETTERS[name]) for name in self._columns
        ]

    def rows(self, found: Iterable[Records]) -> Iterator[tuple[Any, ...]]:
        """Yield the row of each message.

        Raises:
            DecodeError: A message is malformed, and ``onUndecodable`` is not ``row``.
        """
        for records in found:
            for at, payload in enumerate(records.payloads):
                yield self.row(decoded(payload), records.place(at))

    def row(self, message: Message, place: Place) -> tuple[Any, ...]:
        """Return the row of *message*.

        Raises:
            DecodeError: The message is malformed, and ``onUndecodable`` is not ``row``.
        """
        try:
            return tuple([get(message, place) for get in self._getters])
        except (DecodeError, ValueError) as error:
            if not self._row_for_bad:
                raise DecodeError(
                    f"a message of {_shown(place)} cannot be decoded: {error}; with "
                    "onUndecodable=row it would be a row"
                ) from error
        return tuple([self._as_far(name, message, place) for name in self._columns])

    def _as_far(self, name: str, message: Message, place: Place) -> Any:
        """Return the column *name* of an undecodable message: readable parts help to find out its sender, and
        why it is there."""
        if name == "body":
            octets = message.encode()
            return octets.decode("utf-8", "backslashreplace") if self._text else octets
        if name == "body_kind":
            return "undecodable"
        if name in ("body_variant", "message"):
            return None
        try:
            return _GETTERS[name](message, place)
        except (DecodeError, ValueError):
            return None


def _shown(place: Place) -> str:
    if place.partition is None:
        return repr(place.address)
    return f"{place.address!r}, partition {place.partition}, offset {place.offset}"


def _micros(moment: Any) -> int | None:
    if moment is None:
        return None
    if isinstance(moment, dt.datetime):
        moment = Timestamp.from_datetime(moment)
    return int(moment) * 1000


def _enqueued(message: Message, place: Place) -> int | None:
    if place.time_ms is not None:
        return place.time_ms * 1000
    return _micros(message.message_annotations.get("x-opt-enqueued-time"))


def _key(message: Message, place: Place) -> str | None:
    """Return the partition key, which brokers store as text or octets."""
    found = message.message_annotations.get(_PARTITION_KEY)
    if isinstance(found, bytes):
        return found.decode("utf-8", "backslashreplace")
    return None if found is None else str(found)


def _plain_body(message: Message, place: Place) -> bytes | None:
    kind = message.body_kind
    if kind == "data":
        return bytes(message.body)
    if kind != "value":
        return None
    body = message.body
    if isinstance(body, str):
        return body.encode()
    return bytes(body) if isinstance(body, bytes | bytearray) else None


def _text_body(message: Message, place: Place) -> str | None:
    octets = _plain_body(message, place)
    return None if octets is None else octets.decode()


def _kind(message: Message, place: Place) -> str:
    return message.body_kind or "none"


def _parsed(message: Message, place: Place) -> tuple[bytes, bytes] | None:
    octets = _plain_body(message, place)
    return None if octets is None else variant.encode(json.loads(octets))


def _typed(message: Message, place: Place) -> tuple[bytes, bytes] | None:
    """Return the body with its types: a value or a sequence as it is, and data with a content-type of JSON."""
    if message.body_kind in ("value", "sequence"):
        return variant.encode(message.body)
    content_type = message.content_type or ""
    if message.body_kind == "data" and content_type.partition(";")[0].rstrip().endswith("json"):
        try:
            return _parsed(message, place)
        except ValueError:
            # The content-type is wrong. The octets are in the column body.
            return None
    return None


def _header(message: Message, place: Place) -> tuple[Any, ...]:
    header = message.header
    return (
        header.durable,
        int(header.priority),
        None if header.ttl is None else int(header.ttl),
        header.first_acquirer,
        int(header.delivery_count),
    )


def _id(value: Any) -> tuple[str | None, str | None]:
    if value is None:
        return None, None
    if isinstance(value, UUID):
        return str(value), "uuid"
    if isinstance(value, int):
        return str(int(value)), "ulong"
    if isinstance(value, bytes):
        return value.hex(), "binary"
    return str(value), "string"


def _properties(message: Message, place: Place) -> tuple[Any, ...]:
    found = message.properties
    return (
        *_id(found.message_id),
        found.user_id,
        _string(found.to),
        _string(found.subject),
        _string(found.reply_to),
        *_id(found.correlation_id),
        _string(found.content_type),
        _string(found.content_encoding),
        _micros(found.absolute_expiry_time),
        _micros(found.creation_time),
        _string(found.group_id),
        None if found.group_sequence is None else int(found.group_sequence),
        _string(found.reply_to_group_id),
    )


def _string(value: str | None) -> str | None:
    """Return symbols as strings."""
    return None if value is None else str(value)


def _application_properties(message: Message, place: Place) -> tuple[bytes, bytes] | None:
    found = message.application_properties
    return variant.encode(found) if found else None


def _annotations(message: Message, place: Place) -> tuple[bytes, bytes] | None:
    if place.bare:
        return None
    found = message.message_annotations
    if place.offset is not None:
        found = {key: value for key, value in found.items() if key not in PLACE}
    return variant.encode(found) if found else None


def _bare(message: Message, place: Place) -> bytes:
    return message.bare


_GETTERS: Final[dict[str, Callable[[Message, Place], Any]]] = {
    "address": lambda message, place: place.address,
    "partition": lambda message, place: place.partition,
    "offset": lambda message, place: place.offset,
    "enqueued_time": _enqueued,
    "body": _plain_body,
    "body_kind": _kind,
    "body_variant": _typed,
    "header": _header,
    "properties": _properties,
    "application_properties": _application_properties,
    "message_annotations": _annotations,
    "message": _bare,
    "key": _key,
    "timestamp": _enqueued,
    "broker": lambda message, place: place.broker,
}
#: Functions for columns that the option ``body`` changes.
_BODIES: Final[dict[tuple[str, str], Callable[[Message, Place], Any]]] = {
    ("body", "text"): _text_body,
    ("body_variant", "json"): _parsed,
}


# --- Rows as messages ----------------------------------------------------------------------------


def check_columns(names: Iterable[str], options: Options) -> None:
    """Refuse rows that make no message, or that have columns which would be ignored.

    Raises:
        ValueError: One sentence gives the remedy.
    """
    given = list(names)
    if not {"message", "body", "body_variant"} & set(given):
        meant = "; rename its column 'value' to 'body'" if "value" in given else ""
        raise ValueError(f"rows for amqp need a column body (or message, or body_variant){meant}")
    known = {*COLUMNS, *_PROPERTIES, *_HEADER, "message_id_type", "correlation_id_type"}
    # The address of a row is its origin, not its destination, and times are properties under other names.
    known -= {"address", "timestamp", "broker"}
    chosen = {"orderingKey": options.ordering_key, "dedupColumn": options.dedup_column}
    for option, name in chosen.items():
        if name and name not in given:
            raise ValueError(f"{option} names a column {name!r} that is not there")
        known.add(name)
    if options.dedup_column and "message" in given:
        raise ValueError(
            "the column message holds messages that are sent as they are: dedupColumn cannot name them"
        )
    if options.ordering_key not in ("", "key"):
        # One of the two columns would be ignored.
        known.discard("key")
        if options.dedup_column == "key":
            known.add("key")
    if not options.addresses and "to" not in given:
        raise ValueError(
            "amqp needs the option address, the node to write to, or a column 'to', which names it for each row"
        )
    unknown = [name for name in given if name not in known]
    if unknown and not options.ignore_unknown_columns:
        name = unknown[0]
        meant = _REFUSED.get(name) or f"nothing becomes of the column {name!r}{column_hint(name)}"
        raise ValueError(f"{meant}: drop it, or set ignoreUnknownColumns=true")


#: Refused columns that users may expect to work, with the error text.
_REFUSED: Final = {
    "address": (
        "the column 'address' is the source of a row, not its destination, which is set by the option "
        "address or the column 'to'"
    ),
    "timestamp": (
        "nothing becomes of the column 'timestamp': a log gives each record its time; a time of the "
        "message's own is the column 'creation_time'"
    ),
    "key": "the column 'key' is a partition key, and orderingKey names another column for that",
}


def payload_of(
    row: Mapping[str, Any], options: Options, named_by: str = "", body_type: Any = None
) -> bytes:
    """Return the encoded message of *row*.

    Args:
        row: Values by column.
        options: The user's options.
        named_by: Application property by which the broker detects duplicates, if there is one.
        body_type: Spark's type of the column body, if it is known.

    Raises:
        ValueError: A value has the wrong type; one sentence names it.
    """
    given: dict[str, Any] = {"durable": options.durable}
    header = row.get("header")
    for name in _HEADER:
        if header is None and name not in row:
            continue
        value = _of(row, header, name)
        if value is not None:
            given["ttl_ms" if name == "ttl" else name] = value
    annotations = _annotations_of(row, options)
    if annotations:
        given["message_annotations"] = annotations
    bare = row.get("message")
    if bare is not None:
        # Copied octet for octet, without decoding.
        return Message(**given).encode_front() + bytes(bare)
    properties = row.get("properties")
    for name in _PROPERTIES:
        # Most rows have few properties as columns, and no struct of all.
        if properties is None and name not in row:
            continue
        value = _of(row, properties, name)
        if value is not None:
            given[name] = _property(name, value, _of(row, properties, f"{name}_type"))
    mine = _typed_map(row.get("application_properties"), "application_properties")
    if options.dedup_column:
        said = row.get(options.dedup_column)
        if said is None:
            raise ValueError(
                f"the column {options.dedup_column!r} is null in a row, so its message cannot be told from "
                "others; dedupColumn takes a column without nulls"
            )
        given["message_id"] = str(said)
        if named_by:
            mine[named_by] = str(said)
    if mine:
        given["application_properties"] = mine
    body, kind = _body_of(row, given, body_type)
    if kind == "none":
        return Message(**given).encode_front()
    return Message(body, body_kind=kind, **given).encode()


def _of(row: Mapping[str, Any], nested: Any, name: str) -> Any:
    """Return a field from its own column, or else from the struct *nested*."""
    value = row.get(name)
    if value is None and nested is not None:
        value = nested.get(name) if isinstance(nested, Mapping) else getattr(nested, name, None)
    return value


def _property(name: str, value: Any, kind: Any) -> Any:
    if name in _IDS:
        text = str(value)
        try:
            if kind == "ulong":
                return ULong(int(text))
            if kind == "uuid":
                return UUID(text)
            return bytes.fromhex(text) if kind == "binary" else text
        except ValueError as error:
            raise ValueError(f"{name} is {text!r:.50}, which is no {kind}") from error
    if name in _MOMENTS:
        if not isinstance(value, dt.datetime):
            raise ValueError(f"{name} takes a timestamp, not {type(value).__name__}")
        # AMQP's times are milliseconds: smaller units are truncated, as in Spark's casts.
        return Timestamp((value - _EPOCH if value.tzinfo else value.astimezone() - _EPOCH) // _MS)
    if name == "user_id":
        return value.encode() if isinstance(value, str) else bytes(value)
    return int(value) if name == "group_sequence" else str(value)


def _is_variant(value: Any) -> bool:
    return hasattr(value, "metadata") and hasattr(value, "value")


def _variant(value: Any) -> Any:
    return variant.decode(value.value, value.metadata)


def _typed_map(value: Any, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    found = _variant(value) if _is_variant(value) else value
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} is a map or a VARIANT that holds one")
    return {str(key): each for key, each in found.items()}


def _annotations_of(row: Mapping[str, Any], options: Options) -> dict[Any, Any]:
    found = _typed_map(row.get("message_annotations"), "message_annotations")
    annotations = {Symbol(key): each for key, each in found.items() if key not in PLACE}
    value = row.get(options.ordering_key or "key")
    if value is not None:
        # Brokers choose the partition by the octets of either type.
        octets = isinstance(value, bytes | bytearray)
        annotations[_PARTITION_KEY] = bytes(value) if octets else str(value)
    return annotations


def _body_of(row: Mapping[str, Any], given: dict[str, Any], body_type: Any) -> tuple[Any, Any]:
    body, kind, typed = row.get("body"), row.get("body_kind"), row.get("body_variant")
    if kind == "undecodable":
        raise ValueError("a row whose message could not be decoded is not sent on: filter it out")
    if kind in ("value", "sequence") and typed is not None:
        found = _variant(typed)
        return (Sequence(found), kind) if kind == "sequence" else (found, kind)
    if kind == "sequence":
        raise ValueError("a body that is a sequence is in body_variant, which is not there")
    if kind == "none":
        return None, kind
    if _is_variant(body):
        return _variant(body), "value"
    if body is None and typed is not None:
        return _variant(typed), "value"
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), kind or "data"
    if isinstance(body, str):
        return (body.encode(), "data") if kind == "data" else (body, "value")
    if body is None or isinstance(body, bool | int | float):
        return body, "value"
    given.setdefault("content_type", "application/json")
    return json_bodies.encode(body, body_type), "data"
