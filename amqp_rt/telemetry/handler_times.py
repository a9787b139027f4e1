"""Times that handlers take.

mypyc compiles this module: each message to a handler passes through it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from ..message import Message
from ..observers import LinkObserver, ObservedLink, ObservedOperation
from ..tallies import OTHER, Distribution
from ..trace_context import NO_TRACE
from ..unread import UnreadMessage

#: Bounds of the time that handlers take, in seconds.
_HANDLER_BOUNDS_S: Final[tuple[float, ...]] = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class _Timed:
    """Operation that takes a handler's time."""

    __slots__ = ("_began", "_into")

    #: Metrics write no trace context.
    trace = NO_TRACE

    def __init__(self, into: Distribution) -> None:
        self._into: Distribution | None = into
        self._began = perf_counter()

    def identify(self, message_id: object, conversation_id: object) -> None:
        """Do nothing: values are not those of single messages."""

    def add(self, message: Message | None) -> None:
        """Do nothing: the handler takes its time for the whole batch."""

    def enter(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def end(self, error: str | None = None) -> None:
        if self._into is not None:
            self._into.add(perf_counter() - self._began)
            self._into = None


class HandlerTimes:
    """Observer of the time that handlers take, by the pattern of their addresses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.routes: dict[str, Distribution] = {}

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        if link.kind not in ("process", "serve"):
            return None
        name = link.template or link.address
        if name not in self.routes and len(self.routes) >= self._most:
            name = OTHER
        return _TimesOfLink(self.routes.setdefault(name, Distribution(_HANDLER_BOUNDS_S)))


class _TimesOfLink:
    #: Nothing here raises.
    guards_itself = True

    def __init__(self, into: Distribution) -> None:
        self._into = into

    def begin(self, message: Message | None) -> ObservedOperation | None:
        return _Timed(self._into)

    def begin_unread(self, message: UnreadMessage) -> ObservedOperation | None:
        return _Timed(self._into)
