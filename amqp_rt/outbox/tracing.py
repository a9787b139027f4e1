"""Spans of messages that are written into an outbox, whose context goes with them when they are sent later."""

from __future__ import annotations

from collections.abc import Iterable

from ..message import Message
from ..observers import LinkObserver, ObservedLink, Observer, bind
from ..trace_context import with_trace

#: Addresses whose observers are kept. An application has few, or chooses them itself.
_ADDRESSES_MAX = 1_024


class CreationTraces:
    """Writer of trace contexts into the messages of one outbox.

    Args:
        observers: Observers of ``Outbox(observe=[...])``; without any, messages stay as they are.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        self._links: dict[str, LinkObserver | None] = {}

    def traced(self, address: str, message: Message) -> Message:
        """Return *message* to *address* with the context of its creation."""
        if not self._observers:
            return message
        if address not in self._links:
            if len(self._links) >= _ADDRESSES_MAX:
                self._links.clear()
            self._links[address] = bind(
                self._observers, ObservedLink(kind="create", address=address)
            )
        observer = self._links[address]
        operation = None if observer is None else observer.begin(message)
        if operation is None:
            return message
        traced = with_trace(message, operation.trace)
        operation.end()
        return traced
