"""Policies of calls: repeating, hedging, breaking the circuit, bounding and caching.

An application passes policies to ``peer.calling(...)``; the first is the outermost. This module has their
rules, and no I/O: the time is an argument, and :mod:`amqp_rt.container.calling` does the waiting.
Each policy keeps a state for each address. Create policies of their own for each peer, since
connections that share a policy share its state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from math import inf
from random import random as random_share
from typing import Any, Final, Generic, TypeAlias, TypeVar

from .errors import (
    AmqpError,
    CallFailed,
    CircuitOpen,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    Overloaded,
    SessionEnded,
)
from .message import Message
from .outcomes import Modified, Released

S = TypeVar("S")

#: Seconds of the past that budgets and circuits look at.
SPAN_S: Final = 10.0
#: Parts of the span, each of which is forgotten as a whole.
_BUCKETS: Final = 10
#: Addresses with a state in one policy; beyond these the least recently used state is dropped.
ADDRESSES_MAX: Final = 1_024
#: Latencies from which a percentile is computed, and the least number for one.
LATENCIES_MAX: Final = 256
LATENCIES_MIN: Final = 20
#: New latencies after which the percentile is computed again.
_LATENCIES_STEP: Final = 16
#: Octets that an entry of a cache takes besides its reply: key, objects and table.
ENTRY_OVERHEAD: Final = 512
#: Conditions of errors for which the node is at fault, or too busy, and not the request.
_FAULTS_OF_NODE: Final = frozenset(
    {"amqp:internal-error", "amqp:timeout", "amqp:resource-limit-exceeded"}
)


class Window:
    """Count of the events of the last ``SPAN_S`` seconds.

    The past is forgotten in steps of a tenth of the span, so memory and work do not depend on the
    number of events.
    """

    __slots__ = ("_counts", "_newest", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._newest = 0
        self._total = 0

    def add(self, now: float) -> None:
        """Count an event at *now*, in seconds of a clock that does not go back."""
        total = self.total(now)
        self._counts[self._newest % _BUCKETS] += 1
        self._total = total + 1

    def total(self, now: float) -> int:
        """Return the number of events that are still in the span at *now*."""
        bucket = int(now // (SPAN_S / _BUCKETS))
        if bucket > self._newest:
            if bucket - self._newest >= _BUCKETS:
                self.clear()
            else:
                for passed in range(self._newest + 1, bucket + 1):
                    self._total -= self._counts[passed % _BUCKETS]
                    self._counts[passed % _BUCKETS] = 0
            self._newest = bucket
        return self._total

    def clear(self) -> None:
        """Forget all events."""
        self._counts = [0] * _BUCKETS
        self._total = 0


class Budget:
    """Bound of additional attempts: a share of the calls of the last 10 seconds, and a reserve.

    Args:
        share: Additional attempts for each call.
        reserve: Additional attempts in 10 seconds that are allowed without any call.
    """

    __slots__ = ("_calls", "_extra", "reserve", "share")

    def __init__(self, share: float, reserve: float) -> None:
        self.share = share
        self.reserve = reserve
        self._calls = Window()
        self._extra = Window()

    def count_call(self, now: float) -> None:
        """Count a call, which adds its share to the budget."""
        self._calls.add(now)

    def has_room(self, now: float) -> bool:
        """Return whether one more attempt is within the budget."""
        allowed = self.share * self._calls.total(now) + self.reserve
        # A product such as 0.2 * 15 may be slightly below its true value.
        return self._extra.total(now) + 1 <= allowed + 1e-9

    def spend(self, now: float) -> bool:
        """Take one more attempt out of the budget; return False, and take none, without room."""
        if not self.has_room(now):
            return False
        self._extra.add(now)
        return True


class _ByAddress(Generic[S]):
    """States of a policy by address; the least recently used one is dropped beyond the bound."""

    __slots__ = ("_make", "_states")

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._states: OrderedDict[str, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, address: str) -> S:
        state = self._states.get(address)
        if state is None:
            state = self._states[address] = self._make()
            if len(self._states) > ADDRESSES_MAX:
                self._states.popitem(last=False)
        else:
            self._states.move_to_end(address)
        return state


class Retry:
    """Repeat calls that were not processed, within a budget.

    Repeated are requests that the node released, and requests that had not left when their link,
    session or connection ended. ``peer.calling(..., idempotent=True)`` adds requests in doubt: modified,
    timed out (see *attempt_s*), or sent before a loss. The pause before attempt n + 1 is ``min(most_s,
    first_s * factor ** (n - 1))``, changed at random by the share *jitter*, so that callers that
    failed together do not return together. If the pause would last beyond the deadline of the call,
    the error is raised at once.

    The budget keeps repetitions from multiplying the load of a node that fails: for each address at most
    *budget* of the calls of the last 10 seconds, and *reserve_per_s* a second.

    Args:
        attempts: Most attempts of a call, including the first.
        first_s: Seconds before the second attempt.
        factor: Growth of the pause.
        most_s: Longest pause in seconds, before the jitter.
        jitter: Share from 0 to 1 by which a pause may be shorter or longer.
        attempt_s: Seconds that each attempt may take; None for the time of the whole call.
        budget: Repetitions for each call.
        reserve_per_s: Repetitions a second that are allowed without regard to *budget*.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        first_s: float = 0.05,
        factor: float = 2.0,
        most_s: float = 1.0,
        jitter: float = 0.2,
        attempt_s: float | None = None,
        budget: float = 0.2,
        reserve_per_s: float = 10.0,
    ) -> None:
        _check_least("Retry", "attempts", attempts, 1)
        _check_least("Retry", "first_s", first_s, 0)
        _check_least("Retry", "factor", factor, 1)
        _check_least("Retry", "most_s", most_s, 0)
        _check_least("Retry", "jitter", jitter, 0, 1)
        _check_least("Retry", "budget", budget, 0)
        _check_least("Retry", "reserve_per_s", reserve_per_s, 0)
        if attempt_s is not None and not attempt_s > 0:
            raise ValueError(f"Retry: attempt_s must be more than 0, got {attempt_s!r}")
        self.attempts = attempts
        self.first_s = first_s
        self.factor = factor
        self.most_s = most_s
        self.jitter = jitter
        self.attempt_s = attempt_s
        self._budgets = _ByAddress(lambda: Budget(budget, reserve_per_s * SPAN_S))

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


class Hedge:
    """Send a slow request a second time, and take the reply that arrives first.

    The second request leaves when the first has taken longer than 95 % of the recent ones to its
    address, which needs 20 replies at first. The other request is then abandoned, and its handler
    cancelled. At most *budget* of the calls of the last 10 seconds are sent twice. Requires
    ``peer.calling(..., idempotent=True)``, since both requests may be processed.

    Args:
        budget: Second requests for each call.
    """

    def __init__(self, *, budget: float = 0.05) -> None:
        _check_least("Hedge", "budget", budget, 0, 1)
        self._states = _ByAddress(lambda: HedgeState(budget))

    def state_of(self, address: str) -> HedgeState:
        """Return the latencies and the budget of calls to *address*."""
        return self._states.get(address)


class HedgeState:
    """Latencies of the last calls to one address, and the budget of second requests."""

    __slots__ = ("_latencies", "_next", "_p95_s", "budget")

    def __init__(self, share: float) -> None:
        self.budget = Budget(share, 0)
        self._latencies: list[float] = []
        self._next = 0
        self._p95_s = inf

    @property
    def delay_s(self) -> float:
        """Seconds after which a second request may leave; infinite without enough latencies."""
        return self._p95_s

    def observe(self, latency_s: float) -> None:
        """Add a latency, in place of the oldest if there are enough."""
        if len(self._latencies) < LATENCIES_MAX:
            self._latencies.append(latency_s)
        else:
            self._latencies[self._next % LATENCIES_MAX] = latency_s
        self._next += 1
        count = len(self._latencies)
        if count == LATENCIES_MIN or (count > LATENCIES_MIN and self._next % _LATENCIES_STEP == 0):
            self._p95_s = sorted(self._latencies)[(count * 95 - 1) // 100]


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
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"Breaker: share must be above 0 and at most 1, got {share!r}")
        _check_least("Breaker", "least", least, 1)
        _check_least("Breaker", "open_s", open_s, 0)
        _check_least("Breaker", "open_most_s", open_most_s, open_s)
        self.share = share
        self.least = least
        self.open_s = open_s
        self.open_most_s = open_most_s
        self._circuits = _ByAddress(lambda: Circuit(self))

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


class Bulkhead:
    """Refuse calls above a number that run at the same time, for each address.

    A slow node then holds at most *calls* of the application's tasks. Calls do not queue: one above
    the bound raises :class:`~amqp_rt.errors.Overloaded` at once.

    Args:
        calls: Most calls to one address that run at the same time.

    Raises:
        ValueError: *calls* is less than 1.
    """

    def __init__(self, calls: int = 64) -> None:
        _check_least("Bulkhead", "calls", calls, 1)
        self.calls = calls
        # Only addresses with running calls: their number needs no other bound.
        self._running: Counter[str] = Counter()

    def enter(self, address: str) -> None:
        """Count a call that starts; :meth:`leave` must follow.

        Raises:
            Overloaded: As many calls as allowed are running.
        """
        running = self._running.get(address, 0)
        if running >= self.calls:
            raise Overloaded(
                f"{address!r} was not called: {running} calls to it are running, and "
                f"Bulkhead({self.calls}) allows no more; call again later, or raise the number",
            )
        self._running[address] = running + 1

    def leave(self, address: str) -> None:
        """Count a call that has ended."""
        running = self._running[address] - 1
        if running:
            self._running[address] = running
        else:
            del self._running[address]

    def running(self, address: str) -> int:
        """Return the number of calls to *address* that are running."""
        return self._running.get(address, 0)


class Cache:
    """Keep replies for as long as their ``ttl`` allows, and ask once for equal requests.

    A reply is kept only if it is a success and its header has a ``ttl``, which counts from its arrival.
    Requests are equal if connection, address, payload and properties are; replies are never shared by
    connections, and so never by users. While a request is under way, equal ones wait for its
    reply. If that reply may not be kept, each of them sends its own request.

    Args:
        entries: Most replies; beyond these the least recently used one is dropped.
        octets: Most octets of all replies together; a larger reply is not kept.

    Raises:
        ValueError: An argument is less than 1.
    """

    def __init__(self, entries: int = 1_024, *, octets: int = 16 * 1024 * 1024) -> None:
        _check_least("Cache", "entries", entries, 1)
        _check_least("Cache", "octets", octets, 1)
        self.entries = entries
        self.octets = octets
        self._kept: OrderedDict[CacheKey, tuple[float, int, Message]] = OrderedDict()
        self._octets = 0
        #: Requests under way, with an object that the waiting calls share. See ``container.calling``.
        self.flights: dict[CacheKey, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: CacheKey, now: float) -> Message | None:
        """Return the kept reply for *key*, or None."""
        found = self._kept.get(key)
        if found is None:
            return None
        if now >= found[0]:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return found[2]

    def put(self, key: CacheKey, reply: Message, size: int, now: float) -> bool:
        """Keep *reply* of *size* octets, arrived at *now*, if its ``ttl`` allows; return whether."""
        ttl_ms = reply.ttl_ms
        if not ttl_ms:
            return False
        if key in self._kept:
            self._drop(key)
        size += ENTRY_OVERHEAD
        if size <= self.octets:
            self._kept[key] = (now + ttl_ms / 1000, size, reply)
            self._octets += size
            while self._octets > self.octets or len(self._kept) > self.entries:
                self._drop(next(iter(self._kept)))
        return True

    def clear(self) -> None:
        """Drop all replies. Requests under way are not affected."""
        self._kept.clear()
        self._octets = 0

    def _drop(self, key: CacheKey) -> None:
        self._octets -= self._kept.pop(key)[1]


#: Connection, address, and digest of the encoded request.
CacheKey: TypeAlias = tuple[object, str, bytes]
#: Policies that ``peer.calling`` takes.
Policy: TypeAlias = Retry | Hedge | Breaker | Bulkhead | Cache


def _check_least(policy: str, name: str, value: float, least: float, most: float = inf) -> None:
    if not least <= value <= most:
        bound = f"at least {least:g}" if most == inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{policy}: {name} must be {bound}, got {value!r}")
