"""Handlers that failed: the outcomes of their messages, the pauses before another attempt, and the log."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio

from ..codec.sections import walk_head
from ..errors import DecodeError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..limits import SECONDS_MAX
from ..loglimit import log_loss
from ..message import MESSAGE_FORMAT
from ..observers import error_of, error_of_outcome
from ..outcomes import Error, Modified, Outcome, Rejected, rejected
from ..policies import Retry
from ..termini import PAUSES
from .boxes import Unrecognizable
from .home import Home
from .raising import PAUSE, RaisedOutcome, is_undecodable, with_pause
from .routes import Route

if TYPE_CHECKING:
    from .serving import Inbox

log = logging.getLogger("amqp_rt.handlers")

#: Packages whose frames lie between a worker and its handler.
_OURS: Final = frozenset({"amqp_rt", "trio", "outcome", "contextlib", "anyio"})


def outcome_of_error(
    inbox: Inbox, delivery: IncomingDelivery, error: Exception, *, count: int | None = None
) -> Outcome:
    """Return the outcome of *delivery*, whose handler ended with *error*, and log the error.

    An outcome that the handler raised is returned as it is, and logged only if the sender cannot
    get it. *count* is the message's ``delivery-count``, if it is known.
    """
    route = inbox.route
    if isinstance(error, RaisedOutcome):
        outcome = error.outcome
        if isinstance(outcome, Rejected):
            if isinstance(error, Unrecognizable):
                log_rejection(inbox, delivery, f"not taken by {route.name}", outcome.error)
            elif delivery.settled:
                why = f"rejected by {route.name}, and settled by its sender"
                log_rejection(inbox, delivery, why, outcome.error)
        return outcome
    if is_undecodable(error):
        log_rejection(inbox, delivery, f"it cannot be decoded for {route.name}", Error.of(error))
        return Rejected(Error(error.condition, error.description or None, error.info or None))
    route.stats.failed += 1
    where = f"on a message to {inbox.binding.address!r}"
    log_failure(inbox.binding.container, route, where, error)
    return failed_outcome(inbox, delivery, error, count=count)


def failed_outcome(
    inbox: Inbox, delivery: IncomingDelivery, error: Exception, *, count: int | None = None
) -> Outcome:
    """Return the outcome of *delivery*, whose handler failed with *error*, by the policy of its node."""
    route = inbox.route
    container = inbox.binding.container
    policy = route.retry or container.retry
    if route.on_error is None and policy is not None:
        attempt = attempt_of(delivery) if count is None else count + 1
        return outcome_by(policy, error, attempt, route.name)
    return route.outcome_of(error, container.on_error)


def outcome_by(policy: Retry, error: Exception, attempt: int, name: str) -> Outcome:
    """Return the outcome of a message whose handler *name* failed with *error* in its *attempt*, counted from 1.

    *Modified* with the pause before the next attempt, or *rejected* after the last one.
    """
    kind = type(error).__name__
    if isinstance(error, policy.never):
        return rejected("amqp:internal-error", f"{name} failed: {kind}")
    if attempt >= policy.attempts:
        return rejected("amqp:internal-error", f"{name} failed {attempt} times, at last: {kind}")
    pause = with_pause(None, min(policy.pause_s(attempt), SECONDS_MAX), failed=True)
    return Modified(delivery_failed=True, message_annotations=pause)


def keeps_paused(link: ReceivingLink) -> bool:
    """Return whether the peer keeps a failed message for the pause that its outcome requests."""
    return PAUSES in link.offered_capabilities


def requested_pause_s(outcome: Outcome) -> float:
    """Return the seconds for which *outcome* asks to keep the message; 0 for none."""
    if type(outcome) is not Modified or not outcome.delivery_failed:
        return 0.0
    value = (outcome.message_annotations or {}).get(PAUSE)
    return value / 1000 if isinstance(value, int) and value > 0 else 0.0


def without_pause(outcome: Outcome) -> Outcome:
    """Return *outcome* without the request for a pause, for peers that would only store it."""
    if type(outcome) is not Modified or PAUSE not in (outcome.message_annotations or {}):
        return outcome
    rest = {
        key: value for key, value in (outcome.message_annotations or {}).items() if key != PAUSE
    }
    return Modified(outcome.delivery_failed, outcome.undeliverable_here, rest or None)


def attempt_of(delivery: IncomingDelivery) -> int:
    """Return which attempt at its message *delivery* is, counted from 1 by its ``delivery-count``."""
    if delivery.message_format != MESSAGE_FORMAT:
        return 1
    try:
        return walk_head(delivery.payload).delivery_count + 1
    except DecodeError:
        return 1


def name_of_failure(error: Exception) -> str:
    """Return the name of *error*, with which a handler ended, for observers."""
    if isinstance(error, RaisedOutcome):
        return error_of_outcome(error.outcome) or error_of(error)
    return error_of(error)


def log_failure(container: Home, route: Route, where: str, error: BaseException | None) -> None:
    """Log that the handler of *route* failed. Lines are limited, since every message may cause one."""
    left_out = container.log_limiter.admit((route.name, type(error)), trio.current_time())
    if left_out is not None:
        raised = None if error is None else (type(error), error, trace_of_handler(error))
        log.error("handler failed: %s %s%s", route.name, where, left_out, exc_info=raised)


def trace_of_handler(error: BaseException) -> TracebackType | None:
    """Return the traceback of *error* from the first frame of the application on.

    Without such a frame it is the whole one: the handler was called wrongly, or is a part of this package.
    """
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _OURS:
            return trace
        trace = trace.tb_next
    return error.__traceback__


def log_rejection(inbox: Inbox, delivery: IncomingDelivery, why: str, error: Error | None) -> None:
    """Warn of a message that no handler has processed and that may be lost."""
    binding = inbox.binding
    log_loss(
        log,
        binding.container.log_limiter,
        trio.current_time(),
        event="message rejected: to",
        address=binding.address,
        payload=delivery.payload,
        message_format=delivery.message_format,
        why=why,
        error=error,
    )


def only_cancelled(route: Route, group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the part of a handler's *group* to raise: its cancellation. The rest is logged.

    A handler with its own nursery may raise both at once. A group with a request to end the process, such
    as KeyboardInterrupt, is returned whole.
    """
    cancelled, rest = group.split(trio.Cancelled)
    if rest is not None and not isinstance(rest, ExceptionGroup):
        return group
    if rest is not None:
        route.stats.failed += 1
        log.error("handler failed: %s when it was cancelled", route.name, exc_info=rest)
    return group if cancelled is None else cancelled
