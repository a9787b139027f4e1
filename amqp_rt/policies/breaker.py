"""Circuits that refuse calls to addresses that fail."""

from __future__ import annotations

from typing import Final

from ..errors import (
    CallFailed,
    CircuitOpen,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    Overloaded,
    SessionEnded,
)
from .budgets import Window
from .states import ADDRESSES_MAX, ByAddress, check_least

#: Conditions of errors for which the node is at fault, or too busy, and not the request.
_FAULTS_OF_NODE: Final = frozenset(
    {"amqp:internal-error", "amqp:timeout", "amqp:resource-limit-exceeded"}
)


class Breaker:
    """Refuse calls to an address that fails, so that it can recover and callers do not wait for it.

    When at least *least* calls ended within 10 seconds and half of them failed, the circuit opens:
    calls raise :class:`~amqp_rt.errors.CircuitOpen` for *open_s* seconds. Then one call is let
    through as a trial: a success closes the circuit, a failure opens it for twice the time, up to
    *open_most_s*. A cancelled trial decides nothing, and the next call is a trial.

    Failures are timeouts, losses, released and modified requests, refused links, and errors that
    report a fault of the node (internal errors, exceeded limits). Other errors are answers.

    Args:
        share: Share of failed calls, from above 0 to 1.
        least: Fewest calls within 10 seconds that can open the circuit.
        open_s: Seconds for which the circuit opens first.
        open_most_s: Longest time for which it opens.
        addresses: Addresses with a circuit; beyond these the least recently used circuit is dropped.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        share: float = 0.5,
        least: int = 20,
        open_s: float = 5.0,
        open_most_s: float = 60.0,
        addresses: int = ADDRESSES_MAX,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"Breaker: share must be above 0 and at most 1, got {share!r}")
        check_least("Breaker", "least", least, 1)
        check_least("Breaker", "open_s", open_s, 0)
        check_least("Breaker", "open_most_s", open_most_s, open_s)
        self.share = share
        self.least = least
        self.open_s = open_s
        self.open_most_s = open_most_s
        self._circuits = ByAddress("Breaker", lambda: Circuit(self), addresses)

    def circuit_of(self, address: str) -> Circuit:
        """Return the circuit of *address*."""
        return self._circuits.get(address)


class Circuit:
    """State of a :class:`Breaker` for one address: closed, open, or open with a trial under way."""

    __slots__ = ("_calls", "_epoch", "_failures", "_open_s", "_policy", "_trial", "opened_until")

    def __init__(self, policy: Breaker) -> None:
        self._policy = policy
        self._calls = Window()
        self._failures = Window()
        self._open_s = policy.open_s
        #: Time at which a trial may start; None if the circuit is closed.
        self.opened_until: float | None = None
        self._trial = False
        #: Number of changes between closed, open and trial: results of older calls do not count.
        self._epoch = 0

    def admit(self, address: str, now: float) -> int:
        """Admit a call; return its ticket for :meth:`finish`.

        Raises:
            CircuitOpen: The circuit is open, or its trial is under way.
        """
        if self.opened_until is None:
            return self._epoch
        left_s = self.opened_until - now
        if left_s > 0:
            raise CircuitOpen(
                f"{address!r} was not called: too many calls failed, and its circuit is open for "
                f"{left_s:.1f} s more; call again then, or do without the reply",
                info={"retry_after_s": left_s},
            )
        if self._trial:
            raise CircuitOpen(
                f"{address!r} was not called: too many calls failed, and a trial call is under way; "
                "call again when it has ended, or do without the reply",
                info={"retry_after_s": 0.0},
            )
        self._trial = True
        self._epoch += 1
        return self._epoch

    def finish(self, ticket: int, now: float, *, failed: bool | None) -> None:
        """Count the end of an admitted call.

        Args:
            ticket: Result of :meth:`admit`.
            now: Time in seconds.
            failed: Whether the node failed; None if that is unknown, as for a cancelled call.
        """
        if ticket != self._epoch:
            return
        if self._trial:
            self._trial = False
            if failed:
                self._open_s = min(2 * self._open_s, self._policy.open_most_s)
                self._open(now)
            elif failed is not None:
                self._open_s = self._policy.open_s
                self.opened_until = None
                self._epoch += 1
            return
        if failed is None:
            return
        self._calls.add(now)
        if failed:
            self._failures.add(now)
            calls = self._calls.total(now)
            failures = self._failures.total(now)
            if calls >= self._policy.least and failures >= self._policy.share * calls:
                self._open(now)

    def _open(self, now: float) -> None:
        self.opened_until = now + self._open_s
        self._epoch += 1
        self._calls.clear()
        self._failures.clear()


def is_failure(error: BaseException) -> bool | None:
    """Return whether *error* of a call shows that its node fails; None if it shows nothing.

    Errors of other policies, wrong arguments and cancellation show nothing about the node.
    """
    if isinstance(error, CircuitOpen | Overloaded):
        return None
    if isinstance(error, CallFailed | DeliveryRejected):
        status = error.info.get("statusCode")
        return error.condition in _FAULTS_OF_NODE or (isinstance(status, int) and status >= 500)
    if isinstance(
        error,
        DeadlineExceeded | DeliveryNotAccepted | ConnectionLost | SessionEnded | LinkDetached,
    ):
        return True
    return None
