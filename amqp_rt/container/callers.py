"""Deadline and trace context of the request that a handler processes, for calls that the handler makes.

Both are in a context variable, so they reach the tasks that a handler starts. A call made meanwhile waits
no longer than the handler's caller, and carries the same trace context, unless an observer writes that of its own
operation (:mod:`amqp_rt.trace_context`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from math import inf
from typing import Any, Final

import trio

from ..codec.sections import walk_front
from ..errors import DeadlineExceeded, DecodeError
from ..limits import KIB
from ..message import Message
from ..trace_context import TRACEPARENT, trace_of

#: Octets of messages that are kept whole; of larger ones only what comes before the body.
_KEPT_MAX: Final = 64 * KIB


class CallerContext:
    """Deadline and trace context of the request that is being processed.

    The trace context is read when it is asked for: most handlers make no calls.

    Args:
        at: Deadline in trio's clock; infinite if there is none.
        source: The message; or its octets, without a large body, which tasks of the handler would keep in memory.
    """

    __slots__ = ("_source", "_trace", "at")

    def __init__(self, at: float, source: Message | bytes) -> None:
        self.at = at
        self._source: Message | bytes = source
        self._trace: Mapping[str, str] | None = None

    @property
    def trace(self) -> Mapping[str, str]:
        """``traceparent`` and ``tracestate``, or nothing."""
        if self._trace is None:
            source, self._source = self._source, b""
            if isinstance(source, bytes):
                source = Message.decode(_front_of(source))
            self._trace = trace_of(source)
        return self._trace

    def within(self, within: Any) -> Any:
        """Return the seconds that a call may take: at most *within*, and the time the caller has left.

        An infinite *within* detaches the call from the deadline. Any type of numbers may come from applications.

        Raises:
            DeadlineExceeded: There is no time left. Nothing was sent.
        """
        if self.at == inf or within == inf:
            return within
        left_s = self.at - trio.current_time()
        if left_s <= 0:
            raise DeadlineExceeded(
                "the deadline of the request that is being processed has passed; within=inf "
                "calls without regard to it"
            )
        return left_s if within is None else min(within, left_s)

    def traced(self, args: tuple[Any, ...], properties: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return *properties* of a request with the trace context, unless the request has one."""
        if not self.trace:
            return properties
        own = properties.get("application_properties")
        if own is None and len(args) == 1 and isinstance(args[0], Message):
            own = args[0].application_properties
        if own and TRACEPARENT in own:
            return properties
        return {**properties, "application_properties": {**(own or {}), **self.trace}}


#: The caller of the handler that runs in this context; None outside handlers, and in those whose
#: message has neither a deadline nor a trace context.
CALLER: ContextVar[CallerContext | None] = ContextVar("amqp_rt_caller", default=None)

#: What the handler that runs in this context handles, for log records; None outside handlers, and without
#: :class:`~amqp_rt.container.delivery_logs.DeliveryLogs`.
HANDLED: ContextVar[object] = ContextVar("amqp_rt_handled", default=None)


def caller_of(source: Message | bytes, at: float = inf) -> CallerContext:
    """Return the caller that sent the message *source*, or its octets, with the deadline *at*."""
    if isinstance(source, bytes) and len(source) > _KEPT_MAX:
        source = _front_of(source)
    return CallerContext(at, source)


def _front_of(octets: bytes) -> bytes:
    """Return the sections before the body; nothing if one is malformed, which the handler is told of."""
    try:
        *_, body = walk_front(octets)
    except DecodeError:
        return b""
    return octets[:body]
