"""Deadline and trace context of the request that a handler processes, for calls that the handler makes.

Both are in a context variable, so they reach the tasks that a handler starts. A call made meanwhile waits
no longer than the handler's caller, and carries the same trace context, unless an observer writes that of its own
operation (:mod:`amqp_rt.trace_context`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from math import inf
from typing import Any

import trio

from ..errors import DeadlineExceeded
from ..message import Message
from ..trace_context import TRACEPARENT, trace_of


class CallerContext:
    """Deadline and trace context of the request that is being processed."""

    __slots__ = ("at", "trace")

    def __init__(self, at: float, trace: Mapping[str, str]) -> None:
        #: Deadline in trio's clock; infinite if there is none.
        self.at = at
        #: ``traceparent`` and ``tracestate``, or nothing.
        self.trace = trace

    def within(self, within: float | None) -> float | None:
        """Return the seconds that a call may take: at most *within*, and the time the caller has left.

        An infinite *within* detaches the call from the deadline.

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


def caller_of(message: Message, at: float = inf) -> CallerContext:
    """Return the caller that sent *message*, with the deadline *at*."""
    return CallerContext(at, trace_of(message))
