"""Requests and responses of HTTP over AMQP, as RabbitMQ's clients write them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote
from uuid import UUID

from msgspec import Struct

from amqp_rt.codec.primitives import Reader
from amqp_rt.errors import AmqpError, DecodeError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.values import Described

#: Descriptors of sections (Part 3 §3.2).
_PROPERTIES: Final = 0x73
_DATA: Final = 0x75
_VALUE: Final = 0x77
_SECTIONS: Final = range(0x70, 0x79)
#: Fields of properties (§3.2.4).
_MESSAGE_ID, _TO, _SUBJECT, _REPLY_TO = 0, 2, 3, 4
#: Address of the other link of the pair.
_PAIRED_REPLY: Final = "$me"

_STATUS: Final = {
    "amqp:not-found": 404,
    "amqp:precondition-failed": 409,
    "amqp:resource-locked": 409,
    "amqp:unauthorized-access": 403,
    "amqp:not-allowed": 400,
    "amqp:resource-limit-exceeded": 403,
    "amqp:internal-error": 500,
}


class HttpRequest(Struct, frozen=True):
    """Request of a client: a method on a path."""

    message_id: int | str | bytes | UUID
    method: str
    path: str
    body: object


class HttpResponse(Struct, frozen=True):
    """Response: a status code and a body, which is sent as an amqp-value."""

    status: int
    body: object = None

    @classmethod
    def of(cls, error: AmqpError) -> HttpResponse:
        """Return the response for *error*; clients show its text."""
        return cls(_STATUS.get(str(error.condition), 400), error.description)


def read_request(payload: bytes, limits: Limits) -> HttpRequest:
    """Read a request, whose sections may be in any order.

    RabbitMQ's own client for Python writes a null amqp-value before the properties.

    Raises:
        DecodeError: It is no message, or no request that can be answered.
    """
    reader = Reader(payload, limits=limits)
    properties: list[Any] = []
    body: object = None
    while reader.at < reader.end:
        section = reader.read_value()
        code = section.descriptor if isinstance(section, Described) else None
        if not isinstance(section, Described) or code not in _SECTIONS:
            raise DecodeError(f"{code!r:.40} is no section of a message")
        if code == _PROPERTIES:
            if not isinstance(section.value, list):
                raise DecodeError("the properties of the request are no list")
            properties = section.value
        elif code in (_DATA, _VALUE):
            body = section.value
    fields = properties + [None] * (5 - len(properties))
    method, path, reply_to = fields[_SUBJECT], fields[_TO], fields[_REPLY_TO]
    message_id = fields[_MESSAGE_ID]
    if message_id is None:
        raise DecodeError("the request has no message-id")
    if not _is_id(message_id):
        raise DecodeError(
            f"the message-id is {message_id!r:.80}, not a ulong, a UUID, a binary or a string"
        )
    if not isinstance(method, str) or not isinstance(path, str):
        raise DecodeError("the request has no subject, its method, or no `to`, its path")
    if reply_to != _PAIRED_REPLY:
        raise DecodeError(f"reply-to is {_PAIRED_REPLY!r} on paired links, not {reply_to!r:.80}")
    return HttpRequest(message_id, str(method), str(path), body)


def _is_id(found: object) -> bool:
    """Return whether *found* is of a type that a correlation-id can have (§3.2.11 to §3.2.14)."""
    if isinstance(found, int):
        return not isinstance(found, bool) and 0 <= found < 1 << 64
    return isinstance(found, str | bytes | UUID)


def encode_response(request: HttpRequest, response: HttpResponse) -> bytes:
    """Encode the answer to *request*."""
    message = Message(
        response.body,
        subject=str(response.status),
        correlation_id=request.message_id,
        application_properties={"http:response": "1.1"},
        body_kind="value",
    )
    return message.encode()


def unquoted(text: str) -> str:
    """Decode percent-encoded *text*.

    Raises:
        AmqpError: It is not UTF-8.
    """
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise AmqpError(
            f"{text!r:.80} is not percent-encoded UTF-8", condition="amqp:invalid-field"
        ) from error


def text_of(body: Mapping[Any, Any], name: str, default: str = "") -> str:
    """Return the field *name* of a request's body, a text.

    Raises:
        AmqpError: It is something else.
    """
    found = body.get(name, default)
    if not isinstance(found, str):
        raise AmqpError(f"{name} is {found!r:.80}, not a text", condition="amqp:invalid-field")
    return str(found)


def flag_of(body: Mapping[Any, Any], name: str, *, default: bool) -> bool:
    """Return the field *name* of a request's body, true or false.

    Raises:
        AmqpError: It is something else.
    """
    found = body.get(name, default)
    if not isinstance(found, bool):
        raise AmqpError(f"{name} is {found!r:.80}, not a boolean", condition="amqp:invalid-field")
    return found


def map_of(found: object, what: str) -> dict[str, Any]:
    """Return *found*, a map with texts as keys.

    Raises:
        AmqpError: It is something else.
    """
    if not isinstance(found, Mapping) or not all(isinstance(each, str) for each in found):
        raise AmqpError(f"{what} is {found!r:.80}, not a map", condition="amqp:invalid-field")
    return {str(key): value for key, value in found.items()}
