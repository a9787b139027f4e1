"""Messages in JSON: those that requests publish, and those that queues and logs have."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
import trio

from amqp_rt import Message
from amqp_rt.cli.tables import JsonRoom, beginning, plain
from amqp_rt.errors import AmqpError

from .json_bodies import check_json, is_json
from .problems import Problem

log = logging.getLogger("amqp_rt.console")

Shown = TypeVar("Shown")

#: Characters of a body in an answer, and of the properties; longer ones are cut.
BODY_SHOWN_MAX: Final = 64 * 1024
#: Octets of a message above which it is decoded and shown in a thread, so that the event loop is not held up.
_INLINE_MAX: Final = 1024
#: Application-properties of a message that is published.
_PROPERTIES_MAX: Final = 100
#: Highest priority of a message, a ubyte (Part 3 §3.2.1).
_PRIORITY_MAX: Final = 255


class Publication(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message to publish: its body as text or JSON, or as octets in base64."""

    body: Any = None
    base64: str | None = None
    content_type: str | None = None
    durable: bool = False
    priority: int = 4
    ttl_s: float | None = None
    delay_s: float | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    subject: str | None = None
    reply_to: str | None = None
    group_id: str | None = None
    application_properties: dict[str, str | int | float | bool | None] = {}

    def message(self) -> Message:
        """Return the message: text with a content-type and all octets are data sections, other text a value.

        Raises:
            Problem: The fields contradict each other, or have values that no message has.
        """
        if len(self.application_properties) > _PROPERTIES_MAX:
            raise Problem(
                400, f"a message has at most {_PROPERTIES_MAX} application-properties here"
            )
        if not 0 <= self.priority <= _PRIORITY_MAX:
            raise Problem(400, f"priority must be 0 to {_PRIORITY_MAX}, got {self.priority}")
        body, content_type = self.body, self.content_type
        try:
            if self.base64 is not None:
                if body is not None:
                    raise Problem(400, "give body or base64, not both")
                body = _octets(self.base64)
            elif isinstance(body, str):
                body = body if content_type is None else body.encode()
            elif body is not None or is_json(content_type):
                body, content_type = msgspec.json.encode(body), content_type or "application/json"
            if content_type is not None and is_json(content_type):
                check_json(body, content_type)
            message = Message(
                body,
                durable=self.durable,
                priority=self.priority,
                ttl_s=self.ttl_s,
                delay_s=self.delay_s,
                message_id=self.message_id,
                correlation_id=self.correlation_id,
                subject=self.subject,
                reply_to=self.reply_to,
                group_id=self.group_id,
                content_type=content_type,
                application_properties=self.application_properties or None,
            )
            message.encode()
        except (ValueError, OverflowError, AmqpError) as error:
            raise Problem(400, f"that is no message: {error}") from None
        return message


def _octets(text: str) -> bytes:
    """Return the octets of *text* in base64.

    Raises:
        Problem: It is no base64.
    """
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        mistake = str(error)
        raise Problem(400, f"base64: {mistake[:1].lower()}{mistake[1:]}") from None


async def shown(payload: bytes, show: Callable[[dict[str, Any]], Shown]) -> Shown:
    """Return what *show* makes of an encoded message with types of JSON; one that cannot be shown has an ``error``.

    *show* is called in a thread for large messages.
    """
    if len(payload) > _INLINE_MAX:
        return await trio.to_thread.run_sync(_shown, payload, show)
    await trio.lowlevel.checkpoint()
    return _shown(payload, show)


def _shown(payload: bytes, show: Callable[[dict[str, Any]], Shown]) -> Shown:
    try:
        return show(_row(payload))
    except AmqpError as error:
        return show({"octets": len(payload), "error": str(error)})
    except Exception as error:
        # A message that was not foreseen takes its own place only: the others are shown.
        log.warning("a message of %d octets cannot be shown: %r", len(payload), error)
        return show({"octets": len(payload), "error": f"it cannot be shown: {error!r:.200}"})


def _row(payload: bytes) -> dict[str, Any]:
    message = Message.decode(payload)
    properties = msgspec.structs.asdict(message.properties)
    room = JsonRoom(BODY_SHOWN_MAX)
    row = {
        "octets": len(payload),
        "header": {
            "durable": message.durable,
            "priority": message.priority,
            "ttl_ms": message.ttl_ms,
            "delivery_count": message.delivery_count,
        },
        "message_annotations": plain(message.message_annotations, room),
        "properties": {
            name: plain(value, room) for name, value in properties.items() if value is not None
        },
        "application_properties": plain(message.application_properties, room),
        **_body_of(message),
    }
    if room.left < 0:
        row["truncated"] = True
    return row


def _body_of(message: Message) -> dict[str, Any]:
    """Return the body, whole or its beginning: text as text, octets that are none in base64, other values as JSON."""
    body = message.body
    if isinstance(body, bytes):
        truncated = len(body) > BODY_SHOWN_MAX
        try:
            return {"body": beginning(body, BODY_SHOWN_MAX), "truncated": truncated}
        except UnicodeDecodeError:
            text = b64encode(body[:BODY_SHOWN_MAX]).decode()
            return {"base64": text, "truncated": truncated}
    if isinstance(body, str):
        return {"body": str(body[:BODY_SHOWN_MAX]), "truncated": len(body) > BODY_SHOWN_MAX}
    room = JsonRoom(BODY_SHOWN_MAX)
    value = plain(body, room)
    octets = msgspec.json.encode(value)
    if room.left >= 0 and len(octets) <= BODY_SHOWN_MAX:
        return {"body": value, "truncated": False}
    return {"body": beginning(octets, BODY_SHOWN_MAX), "truncated": True}
