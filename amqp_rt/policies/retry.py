"""Repetition of calls that were not processed."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from random import random as random_share
from typing import Any

from ..errors import (
    AmqpError,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryNotAccepted,
    LinkDetached,
    LinkRefused,
    SessionEnded,
)
from ..outcomes import Modified, Released
from .budgets import SPAN_S, Budget
from .states import ADDRESSES_MAX, ByAddress, check_least


class Retry:
    """Repeat calls that were not processed, within a budget; or messages whose handler has failed.

    A node with ``retry=Retry(...)`` gives a failed message back with the pause before its next attempt. Its queue
    counts the attempts, and rejects it after the last one, which dead-letters it. The rest concerns calls.

    Repeated are requests that the node released, and requests that had not left when their link,
    session or connection ended. ``peer.calling(..., idempotent=True)`` adds requests in doubt: modified,
    timed out (see *attempt_s*), or sent before a loss. The pause before attempt n + 1 is ``min(most_s,
    first_s * factor ** (n - 1))``, changed at random by the share *jitter*, so that callers that
    failed together do not return together. If the pause would last beyond the deadline of the call,
    the error is raised at once.

    The budget keeps repetitions from multiplying the load of a node that fails: for each address at most
    *budget* of the calls of the last 10 seconds, and *reserve_per_s* a second.

    Args:
        attempts: Most attempts of a call or a message, including the first; None for any number.
        first_s: Seconds before the second attempt.
        factor: Growth of the pause.
        most_s: Longest pause in seconds, before the jitter.
        jitter: Share from 0 to 1 by which a pause may be shorter or longer.
        never: Exceptions after which a message is rejected at once, and a call is not repeated.
        attempt_s: Seconds that each attempt may take; None for the time of the whole call.
        budget: Repetitions for each call.
        reserve_per_s: Repetitions a second that are allowed without regard to *budget*.
        addresses: Addresses with a budget; beyond these the least recently used budget is dropped.

    Raises:
        ValueError: An argument is out of its range.
        TypeError: *never* has something else than classes of exceptions.
    """

    def __init__(
        self,
        attempts: int | None = 3,
        *,
        first_s: float = 0.05,
        factor: float = 2.0,
        most_s: float = 1.0,
        jitter: float = 0.2,
        never: type[Exception] | Iterable[type[Exception]] = (),
        attempt_s: float | None = None,
        budget: float = 0.2,
        reserve_per_s: float = 10.0,
        addresses: int = ADDRESSES_MAX,
    ) -> None:
        check_least("Retry", "attempts", inf if attempts is None else attempts, 1)
        check_least("Retry", "first_s", first_s, 0)
        check_least("Retry", "factor", factor, 1)
        check_least("Retry", "most_s", most_s, 0)
        check_least("Retry", "jitter", jitter, 0, 1)
        check_least("Retry", "budget", budget, 0)
        check_least("Retry", "reserve_per_s", reserve_per_s, 0)
        if attempt_s is not None and not attempt_s > 0:
            raise ValueError(f"Retry: attempt_s must be more than 0, got {attempt_s!r}")
        #: Most attempts, infinite for any number.
        self.attempts: float = inf if attempts is None else attempts
        self.never = _classes(never)
        self.first_s = first_s
        self.factor = factor
        self.most_s = most_s
        self.jitter = jitter
        self.attempt_s = attempt_s
        self._budgets = ByAddress(
            "Retry", lambda: Budget(budget, reserve_per_s * SPAN_S), addresses
        )

    def budget_of(self, address: str) -> Budget:
        """Return the budget of calls to *address*."""
        return self._budgets.get(address)

    def pause_s(self, attempt: int, share: float | None = None) -> float:
        """Return the seconds to wait after *attempt*, counted from 1.

        Args:
            attempt: Number of attempts made.
            share: Position within the jitter, from 0 (shortest) to 1; None chooses at random.
        """
        if share is None:
            share = random_share()  # noqa: S311  # spreads callers, protects nothing
        try:
            pause = min(self.most_s, self.first_s * self.factor ** (attempt - 1))
        except OverflowError:
            pause = self.most_s
        return pause * (1 + self.jitter * (2 * share - 1))

    def may_repeat(self, error: AmqpError, *, left: bool, idempotent: bool) -> bool:
        """Return whether a call that failed with *error* may be sent again.

        Args:
            error: Failure of the last attempt.
            left: Whether octets of the request may have reached the peer.
            idempotent: Whether processing a request twice does no harm.
        """
        if isinstance(error, self.never):
            return False
        if isinstance(error, DeliveryNotAccepted):
            outcome = error.info.get("outcome")
            if isinstance(outcome, Released):
                return True
            # Part 3 §3.4.5: "undeliverable-here" asks the sender not to try the same link again.
            return idempotent and isinstance(outcome, Modified) and not outcome.undeliverable_here
        if isinstance(error, LinkRefused):
            return False
        if isinstance(error, ConnectionLost | SessionEnded | LinkDetached):
            return idempotent or not left
        return idempotent and isinstance(error, DeadlineExceeded)


def _classes(
    never: type[Exception] | Iterable[type[Exception]],
) -> tuple[type[Exception], ...]:
    """Return *never* as ``isinstance`` takes it.

    Raises:
        TypeError: It has something else than classes of exceptions.
    """
    found: tuple[Any, ...] = (never,) if isinstance(never, type) else tuple(never)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise TypeError(f"Retry: never has classes of exceptions, and {each!r} is none")
    return found
