"""The columns of a message, as Spark's DDL names their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
}


def columns_of(options: Options) -> tuple[str, ...]:
    """The columns that *options* ask for, in order."""
    if options.columns:
        extra = ("message",) if options.raw and "message" not in options.columns else ()
        return options.columns + extra
    return tuple(
        name
        for name in COLUMNS
        if (name != "message" or options.raw)
        and (name != "body_variant" or options.body in ("auto", "json"))
    )


def ddl_of(options: Options) -> str:
    """The schema that *options* ask for, in DDL."""
    return ", ".join(
        f"{name} {'string' if name == 'body' and options.body == 'text' else COLUMNS[name]}"
        for name in columns_of(options)
    )
