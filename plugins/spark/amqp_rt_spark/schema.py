"""Columns of a message, with their types in Spark's DDL."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from .kafka_names import column_hint

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from .options import Options

_HEADER: Final = (
    "struct<durable: boolean, priority: int, ttl: bigint, first_acquirer: boolean, "
    "delivery_count: bigint>"
)
_PROPERTIES: Final = (
    "struct<message_id: string, message_id_type: string, user_id: binary, to: string, "
    "subject: string, reply_to: string, correlation_id: string, correlation_id_type: string, "
    "content_type: string, content_encoding: string, absolute_expiry_time: timestamp, "
    "creation_time: timestamp, group_id: string, group_sequence: bigint, "
    "reply_to_group_id: string>"
)

#: Column → type.
COLUMNS: Final[dict[str, str]] = {
    "address": "string",
    "partition": "int",
    "offset": "bigint",
    "enqueued_time": "timestamp",
    "body": "binary",
    "body_kind": "string",
    "body_variant": "variant",
    "header": _HEADER,
    "properties": _PROPERTIES,
    "application_properties": "variant",
    "message_annotations": "variant",
    "message": "binary",
    "key": "string",
    "timestamp": "timestamp",
    "broker": "string",
}

#: Columns that are present only if requested by name or by another option.
ON_REQUEST: Final = frozenset(("message", "key", "timestamp", "broker"))


def columns_of(options: Options) -> tuple[str, ...]:
    """Return the columns that *options* request, in order."""
    if options.columns:
        extra = ("message",) if options.raw and "message" not in options.columns else ()
        return options.columns + extra
    return tuple(
        name
        for name in COLUMNS
        if (
            name not in ON_REQUEST
            or (name == "message" and options.raw)
            # Without this column, rows of two brokers could share partition and offset.
            or (name == "broker" and len(options.urls) > 1)
        )
        and (name != "body_variant" or options.body in ("auto", "json"))
    )


def ddl_of(options: Options) -> str:
    """Return the schema that *options* request, in DDL."""
    return ", ".join(f"{name} {_type(name, options)}" for name in columns_of(options))


def _type(name: str, options: Options) -> str:
    return "string" if name == "body" and options.body == "text" else COLUMNS[name]


def with_schema(options: Options, schema: StructType) -> Options:
    """Return *options* with the columns that *schema* names, in its order.

    Spark passes the schema of ``.schema(...)`` to the reader, or else that of :func:`ddl_of`, and matches
    columns by position.

    Raises:
        ValueError: A column does not exist, or has another type.
    """
    for field in schema.fields:
        if field.name not in COLUMNS:
            near = get_close_matches(field.name, COLUMNS, 1)
            hint = f": did you mean {near[0]!r}?" if near else f": there are {', '.join(COLUMNS)}"
            hint = column_hint(field.name) or hint
            raise ValueError(f"schema: a message has no column {field.name!r}{hint}")
        wanted = _type(field.name, options)
        given = field.dataType.simpleString()
        if given != wanted.replace(": ", ":").replace(", ", ","):
            hint = "; set the option body=text" if (field.name, given) == ("body", "string") else ""
            raise ValueError(
                f"schema: the column {field.name!r} is {wanted}, not {given}{hint or ': cast it after reading'}"
            )
    names = tuple(field.name for field in schema.fields)
    return replace(options, columns=names, raw="message" in names)
