"""Fields of log records that say which message was being handled.

The object is an observer of a container and a filter of a logging handler. A container without it does nothing for its
messages; with it the message is noted before its handler is called, and read when a record is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import Token
from typing import Final

from ..errors import DecodeError, printable
from ..message import Message
from ..observers import LinkObserver, ObservedLink, ObservedOperation
from ..trace_context import NO_TRACE, TRACEPARENT, trace_of
from ..unread import UnreadMessage
from .callers import HANDLED

#: Longest text in a field, in characters: message-ids and names come from peers.
_TEXT_MAX: Final = 200
#: Fields of records, empty while no message is handled.
FIELDS: Final = ("message_id", "address", "link", "peer", "attempt", "trace_id")


class DeliveryLogs(logging.Filter):
    """Filter of log records, and observer of containers, which adds the message that is being handled.

    ::

        logs = DeliveryLogs()
        handler = logging.StreamHandler()
        handler.addFilter(logs)
        handler.setFormatter(logging.Formatter("%(message)s [%(message_id)s at %(address)s]"))
        app = Container("app", observe=[logs])

    Records get ``message_id``, ``address``, ``link`` (its name), ``peer`` (its container-id), ``attempt`` (from 1 on) and
    ``trace_id``: texts, empty if unknown, or if the record does not come from a handler. Of a batch only
    address, link and peer are known. Tasks and threads that a handler starts
    count as the handler.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to *record*; every record passes."""
        handled = HANDLED.get()
        found = handled.fields() if isinstance(handled, _Handled) else {}
        for name in FIELDS:
            setattr(record, name, found.get(name, ""))
        return True

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        """Observe *link* if it has a handler."""
        return _HandledLink(link) if link.kind in ("process", "serve") else None


class _HandledLink:
    """Observer of a link whose messages have a handler."""

    #: Nothing here raises.
    guards_itself = True

    def __init__(self, link: ObservedLink) -> None:
        self._link = link

    def begin(self, message: Message | None) -> ObservedOperation | None:
        return _Handled(self._link, UnreadMessage(None, message))

    def begin_unread(self, message: UnreadMessage) -> ObservedOperation | None:
        return _Handled(self._link, message)


class _Handled:
    """Message that is being handled."""

    __slots__ = ("_fields", "_link", "_message", "_token")

    def __init__(self, link: ObservedLink, message: UnreadMessage) -> None:
        self._link = link
        #: The message, which is decoded for the first record; None for a batch.
        self._message: UnreadMessage | None = message
        self._fields: dict[str, str] | None = None
        self._token: Token[object] | None = None

    @property
    def trace(self) -> Mapping[str, str]:
        return NO_TRACE

    def fields(self) -> dict[str, str]:
        """Return the fields of the message, without those that are unknown."""
        if self._fields is None:
            link = self._link
            found = {
                "address": link.address,
                "link": link.name,
                "peer": "" if link.peer is None else link.peer.container_id,
                **_fields_of(None if self._message is None else self._message.read()),
            }
            self._fields = {
                name: printable(text, _TEXT_MAX) for name, text in found.items() if text
            }
        return self._fields

    def identify(self, message_id: object, conversation_id: object) -> None:
        """Do nothing: the message is known from the beginning."""

    def add(self, message: Message | None) -> None:
        """Leave out what is of one message: there are several."""
        self._message = self._fields = None

    def enter(self) -> None:
        self._token = HANDLED.set(self)

    def leave(self) -> None:
        if self._token is not None:
            HANDLED.reset(self._token)
            self._token = None

    def end(self, error: str | None = None) -> None:
        """Do nothing: tasks that the handler has started go on to be those of its message."""


def _fields_of(message: Message | None) -> dict[str, str]:
    if message is None:
        return {}
    found = {"trace_id": trace_of(message).get(TRACEPARENT, "").partition("-")[2][:32]}
    try:
        found["attempt"] = str(message.delivery_count + 1)
        found["message_id"] = "" if message.message_id is None else str(message.message_id)
    except DecodeError:
        pass  # The handler's outcome says so.
    return found
