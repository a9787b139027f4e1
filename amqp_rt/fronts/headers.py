"""Headers of other protocols for what a message of AMQP 1.0 has beside them.

Protocols with a table of headers show in it the properties and annotations of 1.0 for which they have no
field. Their values are those of 1.0 here; a front converts them to its own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from ..annotations import NUMBER_PREFIX
from ..codec.section_types import MessageId
from ..errors import AmqpError
from ..message import BodyKind, Message
from ..values import ULong
from .splicing import ANNOTATIONS, EXCHANGE, HISTORY, ROUTING_KEY

__all__ = [
    "AMQP10",
    "CORRELATION_ID_TYPE",
    "EXPIRES",
    "GROUP_ID",
    "GROUP_SEQUENCE",
    "MESSAGE_ID_TYPE",
    "REPLY_TO_GROUP_ID",
    "SUBJECT",
    "TEXT_FIELDS",
    "TO",
    "annotation_headers",
    "body_sections",
    "death_headers",
    "number_headers",
    "read_sections",
    "typed_id",
]

#: ``type`` of a message whose body consists of sections of 1.0, since the body is not data.
AMQP10: Final = "amqp-1.0"

#: Names of headers for properties of 1.0.
TO: Final = "x-amqp10-to"
SUBJECT: Final = "x-amqp10-subject"
GROUP_ID: Final = "x-amqp10-group-id"
GROUP_SEQUENCE: Final = "x-amqp10-group-sequence"
REPLY_TO_GROUP_ID: Final = "x-amqp10-reply-to-group-id"
EXPIRES: Final = "x-amqp10-absolute-expiry-time"
#: Names of headers with the type of an id that is not a string: binary, uuid or ulong.
MESSAGE_ID_TYPE: Final = "x-message-id-type"
CORRELATION_ID_TYPE: Final = "x-correlation-id-type"

#: Characters of a UUID, and most of a ulong.
_UUID_SIZE: Final = 36
_ULONG_SIZE: Final = 20
#: Header → field of 1.0, for texts; a message that comes with such a header has the field again.
TEXT_FIELDS: Final = {
    TO: "to",
    SUBJECT: "subject",
    GROUP_ID: "group_id",
    REPLY_TO_GROUP_ID: "reply_to_group_id",
}

#: Reasons of dead-lettering in RabbitMQ's terms.
_REASONS: Final = {
    "overflow": "maxlen",
    "max-deliveries": "delivery_limit",
    "max-attempts": "delivery_limit",
}


def annotation_headers(annotations: Mapping[Any, Any]) -> dict[str, object]:
    """Return the annotations that are no field of a message, such as a sender's or dead-letter reasons."""
    return {
        str(name): value
        for name, value in annotations.items()
        if isinstance(name, str)
        and name.startswith("x-")
        and name not in ANNOTATIONS
        and not name.startswith(NUMBER_PREFIX)
    }


def number_headers(annotations: Mapping[Any, Any]) -> dict[str, object]:
    """Return the numbers that queues have given a message, by the names of their headers.

    A header of that name that the sender has set is replaced.
    """
    return {
        name[len(NUMBER_PREFIX) :]: value
        for name, value in annotations.items()
        if isinstance(name, str) and name.startswith(NUMBER_PREFIX) and isinstance(value, ULong)
    }


def death_headers(annotations: Mapping[Any, Any]) -> dict[str, object]:
    """Return ``x-death`` and related headers in RabbitMQ's form, from the dead-letter history.

    There is an entry for each queue and reason with its count, the latest first.
    """
    history = annotations.get(HISTORY)
    if not isinstance(history, list):
        return {}
    exchange = str(annotations.get(EXCHANGE, ""))
    key = str(annotations.get(ROUTING_KEY, ""))
    deaths: dict[tuple[str, str], dict[str, object]] = {}
    for each in history:
        if not isinstance(each, Mapping):
            continue
        queue = str(each.get("source", ""))
        reason = str(each.get("reason", ""))
        reason = _REASONS.get(reason, reason)
        before = deaths.pop((queue, reason), None)
        count = before["count"] if before is not None else 0
        deaths[queue, reason] = {
            "count": int(count) + 1 if isinstance(count, int) else 1,
            "queue": queue,
            "reason": reason,
            "time": before["time"] if before is not None else each.get("time"),
            "exchange": exchange,
            "routing-keys": [key],
        }
    if not deaths:
        return {}
    headers: dict[str, object] = {"x-death": list(reversed(deaths.values()))}
    for name, (queue, reason) in (("first", next(iter(deaths))), ("last", next(reversed(deaths)))):
        headers[f"x-{name}-death-queue"] = queue
        headers[f"x-{name}-death-reason"] = reason
        headers[f"x-{name}-death-exchange"] = exchange
    return headers


def typed_id(text: str, kind: object) -> MessageId:
    """Return the id whose text is *text*, of the type that a header names as *kind*.

    It is the text itself if *kind* is none of these types, or the text is not that of such an id.
    """
    found: MessageId | None = None
    try:
        if kind == "uuid" and len(text) == _UUID_SIZE:
            found = UUID(text)
        elif kind == "ulong" and text.isascii() and text.isdigit() and len(text) <= _ULONG_SIZE:
            found = ULong(int(text))
        elif kind == "binary":
            octets = bytes.fromhex(text)
            if octets.hex() == text:
                return octets
    except ValueError:
        return text
    return found if found is not None and str(found) == text else text


def body_sections(message: Message) -> bytes:
    """Encode the body of *message* alone, as sections; its type is then :data:`AMQP10`."""
    return Message(message.body, body_kind=message.body_kind).encode()


def read_sections(body: bytes) -> tuple[Any, BodyKind | None]:
    """Decode a *body* of type :data:`AMQP10`: return the body of 1.0 and its kind.

    If *body* is not exactly such sections, return it unchanged as data, with the kind None.
    """
    try:
        found = Message.decode(body)
        alone = Message(found.body, body_kind=found.body_kind)
        if found.body_kind is None or found.footer or found.encode_front() != alone.encode_front():
            return body, None
    except AmqpError:
        return body, None
    return found.body, found.body_kind
