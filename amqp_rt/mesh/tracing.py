"""Trace context of messages that enter a mesh, or leave it by a bridge (pure).

A node there is an intermediary on the way of a trace, as W3C's draft for AMQP calls it: it writes its own context into the
message-annotations. Nodes in the middle of a route, and links that are resumed at their destination, pass octets on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..annotations import merge_annotations
from ..codec.sections import walk_front
from ..errors import AmqpError
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..observers import LinkObserver, ObservedLink, Observer, bind
from ..trace_context import TRACE_OCTETS
from ..values import Symbol
from .via import Revised

__all__ = ["ContextWriter", "context_writer", "traced"]


class ContextWriter:
    """Revision of messages that belong to a trace; others pass unchanged.

    Args:
        observer: Observer of the messages.
        limits: ``trace_context_within`` bounds the search for a trace context.
    """

    def __init__(self, observer: LinkObserver, limits: Limits = DEFAULT_LIMITS) -> None:
        self._observer = observer
        self._limits = limits

    def __call__(self, octets: bytes) -> bytes:
        """Return the message that begins with *octets*, or its first part, with the context of this node's operation."""
        limits = self._limits
        if octets.find(TRACE_OCTETS, 0, limits.trace_context_within) < 0:
            return octets
        try:
            _, start, end, _, body = walk_front(octets, limits)
            operation = self._observer.begin(Message.decode(octets[:body], limits))
            if operation is None:
                return octets
            context = {Symbol(key): text for key, text in operation.trace.items()}
            operation.end()
            changed = merge_annotations(octets[start:end], context, limits)
        except AmqpError:
            # The front is malformed, or does not end here; its destination judges that.
            return octets
        return octets[:start] + changed + octets[end:]


def context_writer(
    observers: Sequence[Observer], address: str, limits: Limits = DEFAULT_LIMITS
) -> ContextWriter | None:
    """Return what writes the context of this node into messages to *address*; None if no observer wants that."""
    observer = bind(observers, ObservedLink(kind="relay", address=address))
    return None if observer is None else ContextWriter(observer, limits)


def traced(
    revise: Callable[[bytes, bool], Revised], writer: ContextWriter | None
) -> Callable[[bytes, bool], Revised]:
    """Return *revise* followed by *writer*."""
    if writer is None:
        return revise

    def both(octets: bytes, complete: bool) -> Revised:
        revised = revise(octets, complete)
        return writer(revised) if isinstance(revised, bytes) else revised

    return both
