"""Intake of messages in brokers with observers, which are intermediaries on the way of a trace.

A separate class of the factory of entries, so that other brokers do not even look for a trace context.
"""

from __future__ import annotations

from ..annotations import AnnotationPolicy
from ..errors import DecodeError
from ..limits import Limits
from ..message import MESSAGE_FORMAT, Message
from ..observers import LinkObserver
from ..trace_context import TRACE_OCTETS
from ..values import Symbol
from .entries import Entry, EntryFactory, annotate


class ObservedEntryFactory(EntryFactory):
    """Factory of the entries of one node, which tells of messages that belong to a trace.

    The context of the operation is written into the message-annotations, where intermediaries write; the bare message
    stays as it is.

    Args:
        annotations: How unknown annotation keys are treated.
        limits: Bounds of header, annotations, and of the search for a trace context.
        observer: Observer of what the node takes in.
    """

    def __init__(
        self, annotations: AnnotationPolicy, limits: Limits, observer: LinkObserver
    ) -> None:
        super().__init__(annotations, limits)
        self._observer = observer

    def make_entry(
        self, payload: bytes, message_format: int, now: float, ttl_s: float | None = None
    ) -> Entry:
        """Return the entry for an encoded message; see :meth:`EntryFactory.make_entry`.

        Raises:
            DecodeError: Its header or annotations are malformed.
            UnacceptableMessage: Its annotations have a key that must be understood and is not.
        """
        entry = super().make_entry(payload, message_format, now, ttl_s)
        within = self.limits.trace_context_within
        if message_format != MESSAGE_FORMAT or payload.find(TRACE_OCTETS, 0, within) < 0:
            return entry
        try:
            operation = self._observer.begin(Message.decode(payload))
        except DecodeError:
            return entry
        if operation is not None:
            if operation.trace:
                annotate(
                    entry, {Symbol(key): text for key, text in operation.trace.items()}, self.limits
                )
            operation.end()
        return entry
