"""Observers of operations on messages, such as tracing and metrics.

An observer is asked once for each link, when it attaches, what it wants to hear of the link's messages, and is not
called for links of which it wants nothing. Without observers, senders, receivers and handlers are the same as if
there were none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol, TypeAlias, cast

from msgspec import Struct

from .errors import AmqpError
from .events import Peer
from .message import Message
from .outcomes import Modified, Rejected, Released
from .trace_context import NO_TRACE
from .unread import UnreadMessage

log = logging.getLogger("amqp_rt.observers")

#: Operations on the messages of a link: ``send`` by a sender, ``receive`` and ``settle`` by a receiver, ``process``
#: by the handler of a node, ``serve`` by the handler of a request, ``call`` by its caller, ``create`` by an outbox that
#: sends the message later, and ``relay`` by a broker that takes a message in for others.
Kind: TypeAlias = Literal[
    "send", "receive", "settle", "process", "serve", "call", "create", "relay"
]


class ObservedLink(Struct, frozen=True, kw_only=True):
    """Link whose operations may be observed; of requests, the calls to one address."""

    kind: Kind
    #: The address of the node, and the pattern that it fits, if that has captures.
    address: str
    template: str | None = None
    #: Whether the address was created for one client, such as for its replies: there may be any number of such.
    temporary: bool = False
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


class UnreadObserver(LinkObserver, Protocol):
    """Observer of a link that decodes messages itself if it needs to.

    An observer without :meth:`begin_unread` gets the decoded message. One with an attribute ``guards_itself`` that is true,
    whose operations then must not raise either, is called directly if it is the only one of its link.
    """

    def begin_unread(self, message: UnreadMessage) -> ObservedOperation | None:
        """Begin an operation as :meth:`begin` does, on a message that may not have been decoded."""


class Observer(Protocol):
    """Observer of the operations of a container, given to ``Container(observe=[...])``."""

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        """Return the observer of *link*, which is being attached; None to hear nothing of it."""


def bind(observers: Iterable[Observer], link: ObservedLink) -> UnreadObserver | None:
    """Return one observer of *link* for all of *observers*; None if none of them wants to hear of it.

    An observer that fails is logged and not called again for the link: messages go on without it.
    """
    found: _Guarded | None = None
    for each in reversed(list(observers)):
        try:
            watching = each.observe(link)
        except Exception as error:
            log_left_out(each, link, error)
            continue
        if watching is not None:
            found = _Guarded(watching, link, found)
    return None if found is None else found.alone() or found


def log_left_out(observer: object, link: ObservedLink, error: Exception) -> None:
    """Log that *observer* of *link* has failed, and is not called for it again."""
    log.error(
        "observer left out: %r failed at %s %.200r",
        observer,
        link.kind,
        link.address,
        exc_info=error,
    )


class _Guarded:
    """Observer of one link, whose exceptions do not reach the messages, and those after it.

    A chain and not a list: in most containers there is one observer, whose calls go straight through.
    """

    def __init__(
        self, observer: LinkObserver, link: ObservedLink, further: _Guarded | None
    ) -> None:
        self._observer: LinkObserver | None = observer
        self._unread: Callable[[UnreadMessage], ObservedOperation | None] | None
        self._unread = getattr(observer, "begin_unread", None)
        self._link = link
        self._further = further

    def begin(self, message: Message | None) -> _GuardedOperation | None:
        operation: ObservedOperation | None = None
        if self._observer is not None:
            try:
                operation = self._observer.begin(message)
            except Exception as error:
                self._leave_out(error)
        further = None if self._further is None else self._further.begin(message)
        return further if operation is None else _GuardedOperation(operation, further)

    def begin_unread(self, message: UnreadMessage) -> _GuardedOperation | None:
        operation: ObservedOperation | None = None
        try:
            if self._unread is not None:
                operation = self._unread(message)
            elif self._observer is not None:
                operation = self._observer.begin(message.read())
        except Exception as error:
            self._leave_out(error)
        further = None if self._further is None else self._further.begin_unread(message)
        return further if operation is None else _GuardedOperation(operation, further)

    def alone(self) -> UnreadObserver | None:
        """Return the observer itself, if it is the only one and needs no guard."""
        guards_itself = getattr(self._observer, "guards_itself", False)
        return (
            cast("UnreadObserver", self._observer) if guards_itself and not self._further else None
        )

    def _leave_out(self, error: Exception) -> None:
        log_left_out(self._observer, self._link, error)
        self._observer = self._unread = None


class _GuardedOperation:
    """Operation of an observer, and those of the observers after it. Their exceptions are logged."""

    __slots__ = ("_ended", "_further", "_operation", "trace")

    def __init__(self, operation: ObservedOperation, further: _GuardedOperation | None) -> None:
        self._operation = operation
        self._further = further
        self._ended = False
        #: That of the first one that has one: a message has one trace context.
        self.trace: Mapping[str, str] = operation.trace or (
            NO_TRACE if further is None else further.trace
        )

    def identify(self, message_id: object, conversation_id: object) -> None:
        try:
            self._operation.identify(message_id, conversation_id)
        except Exception as error:
            log_failed("identify", self._operation, error)
        if self._further is not None:
            self._further.identify(message_id, conversation_id)

    def add(self, message: Message | None) -> None:
        try:
            self._operation.add(message)
        except Exception as error:
            log_failed("add", self._operation, error)
        if self._further is not None:
            self._further.add(message)

    def enter(self) -> None:
        try:
            self._operation.enter()
        except Exception as error:
            log_failed("enter", self._operation, error)
        if self._further is not None:
            self._further.enter()

    def leave(self) -> None:
        # In reverse: what was entered last is left first.
        if self._further is not None:
            self._further.leave()
        try:
            self._operation.leave()
        except Exception as error:
            log_failed("leave", self._operation, error)

    def end(self, error: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._operation.end(error)
        except Exception as failure:
            log_failed("end", self._operation, failure)
        if self._further is not None:
            self._further.end(error)


def log_failed(name: str, operation: object, error: Exception) -> None:
    """Log that the method *name* of *operation* has failed."""
    log.error("observer failed: %s of %r", name, operation, exc_info=error)


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
