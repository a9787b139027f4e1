"""Observers of operations on messages, such as tracing and metrics.

An observer is asked once for each link, when it attaches, what it wants to hear of the link's messages, and is not
called for links of which it wants nothing. Without observers, senders, receivers and handlers are the same as if
there were none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from .errors import AmqpError
from .events import Peer
from .message import Message
from .outcomes import Modified, Rejected, Released

log = logging.getLogger("amqp_rt.observers")

#: Operations on the messages of a link: ``send`` by a sender, ``receive`` and ``settle`` by a receiver, ``process``
#: by the handler of a node, ``serve`` by the handler of a request, ``call`` by its caller, and ``relay`` by a broker
#: that takes a message in for others.
Kind: TypeAlias = Literal["send", "receive", "settle", "process", "serve", "call", "relay"]

#: Trace context of messages without one.
NO_TRACE: Final[Mapping[str, str]] = {}


class ObservedLink(Struct, frozen=True, kw_only=True):
    """Link whose operations may be observed; of requests, the calls to one address."""

    kind: Kind
    #: The address of the node, and the pattern that it fits, if that has captures.
    address: str
    template: str | None = None
    #: Name of the link; empty for those of which only the address is known.
    name: str = ""
    #: The peer; None until one has been reached.
    peer: Peer | None = None
    #: Whether we opened the connection, so that the peer is a server.
    dialled: bool = False


class ObservedOperation(Protocol):
    """Operation on one message, from its beginning to its end."""

    @property
    def trace(self) -> Mapping[str, str]:
        """Trace context to write into the message: ``traceparent`` and ``tracestate``, or nothing."""

    def identify(self, message_id: object, conversation_id: object) -> None:
        """Note the ids of the message, where they were not known at the beginning."""

    def add(self, message: Message | None) -> None:
        """Note one more message of the batch that is processed."""

    def enter(self) -> None:
        """Begin to run code of the application in the current task; :meth:`leave` follows in the same task."""

    def leave(self) -> None:
        """End what :meth:`enter` began."""

    def end(self, error: str | None = None) -> None:
        """End the operation; *error* is the condition of the failure, or the class of the exception.

        Later calls have no effect.
        """


class LinkObserver(Protocol):
    """Observer of the operations of one link."""

    def begin(self, message: Message | None) -> ObservedOperation | None:
        """Begin an operation on *message*; None if nothing follows.

        *message* is None if it cannot be decoded, or is not there yet.
        """


class Observer(Protocol):
    """Observer of the operations of a container, given to ``Container(observe=[...])``."""

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        """Return the observer of *link*, which is being attached; None to hear nothing of it."""


def bind(observers: Iterable[Observer], link: ObservedLink) -> LinkObserver | None:
    """Return one observer of *link* for all of *observers*; None if none of them wants to hear of it.

    An observer that fails is logged and not called again for the link: messages go on without it.
    """
    found: list[LinkObserver] = []
    for each in observers:
        try:
            watching = each.observe(link)
        except Exception:
            log.exception(
                "observer left out: %r failed at %s %.200r", each, link.kind, link.address
            )
            continue
        if watching is not None:
            found.append(watching)
    return _Guarded(found, link) if found else None


class _Guarded:
    """Observers of one link, whose exceptions do not reach the messages."""

    def __init__(self, observers: list[LinkObserver], link: ObservedLink) -> None:
        self._observers = observers
        self._link = link

    def begin(self, message: Message | None) -> ObservedOperation | None:
        begun: list[ObservedOperation] = []
        for each in list(self._observers):
            try:
                operation = each.begin(message)
            except Exception:
                self._observers.remove(each)
                link = self._link
                log.exception(
                    "observer left out: %r failed at %s %.200r", each, link.kind, link.address
                )
                continue
            if operation is not None:
                begun.append(operation)
        return _GuardedOperation(begun) if begun else None


class _GuardedOperation:
    """Operation of several observers, whose exceptions are logged."""

    __slots__ = ("_ended", "_operations", "trace")

    def __init__(self, operations: list[ObservedOperation]) -> None:
        self._operations = operations
        self._ended = False
        #: The first one that there is: a message has one trace context.
        self.trace = next((each.trace for each in operations if each.trace), NO_TRACE)

    def identify(self, message_id: object, conversation_id: object) -> None:
        self._each("identify", message_id, conversation_id)

    def add(self, message: Message | None) -> None:
        self._each("add", message)

    def enter(self) -> None:
        self._each("enter")

    def leave(self) -> None:
        self._each("leave")

    def end(self, error: str | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._each("end", error)

    def _each(self, name: str, *args: Any) -> None:
        for each in self._operations:
            try:
                getattr(each, name)(*args)
            except Exception:
                log.exception("observer failed: %s of %r", name, each)


def error_of(error: BaseException) -> str:
    """Return the name of *error* for observers: its condition, or the class of an exception that has none."""
    if isinstance(error, AmqpError):
        return str(error.condition)
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def error_of_outcome(outcome: object) -> str | None:
    """Return the name of *outcome* for observers; None if it is a success, or there is none."""
    if isinstance(outcome, Rejected):
        return "rejected" if outcome.error is None else str(outcome.error.condition)
    if isinstance(outcome, Released):
        return "released"
    return "modified" if isinstance(outcome, Modified) else None
