"""Calls under policies: the object that ``peer.calling(...)`` returns, and the waiting for each policy.

:mod:`amqp_rt.policies` has the rules. Each policy is a step around the next one; the innermost step is an
attempt of :class:`~amqp_rt.container.requests.Requests`. The deadline of a call is checked where a step
waits, so that a step can tell a deadline from the cancellation of its caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from math import inf
from typing import Any, Final, TypeAlias, TypeVar, Unpack, overload

import trio

from ..errors import AmqpError, CircuitOpen, DeadlineExceeded, Overloaded
from ..message import Message
from ..policies import Breaker, Bulkhead, Cache, CacheKey, Hedge, Policy, Retry, is_failure
from .callers import CALLER
from .codecs import Codecs
from .composing import MessageProperties, build_message
from .links import fresh
from .requests import Outgoing, Requests, check_reply, decode_reply

T = TypeVar("T")

#: One step of a call: a policy around the next step, or an attempt.
Step: TypeAlias = Callable[[Outgoing], Awaitable[Message]]


class Calling:
    """Calls of one connection under policies; created by ``peer.calling(...)``."""

    def __init__(
        self, requests: Requests, policies: Sequence[Policy], *, idempotent: bool = False
    ) -> None:
        step: Step = requests.attempt
        for policy in reversed(policies):
            make = _STEPS.get(type(policy))
            if make is None:
                raise TypeError(
                    f"calling() takes policies such as Retry(3) or Breaker(), got {policy!r}"
                )
            step = make(policy, requests, step, idempotent)
        self._step = step
        self._codecs = requests.codecs
        self._policies = tuple(policies)

    @overload
    async def call(
        self,
        address: str,
        *args: Any,
        within: float | None = ...,
        **properties: Unpack[MessageProperties],
    ) -> Any: ...

    @overload
    async def call(
        self,
        address: str,
        *args: Any,
        reply: type[T],
        within: float | None = ...,
        **properties: Unpack[MessageProperties],
    ) -> T: ...

    async def call(
        self,
        address: str,
        *args: Any,
        reply: Any = Any,
        within: float | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Any:
        """Send a request to the node at *address* and wait for its reply, under the policies.

        Arguments and errors are those of :meth:`Connection.call
        <amqp_rt.container.connections.Connection.call>`. *within* is the time for all attempts and pauses
        together. When cancelled, every attempt is abandoned, and the policies keep nothing of the call.

        Raises:
            CircuitOpen: A :class:`~amqp_rt.policies.Breaker` refused the call. Nothing was sent.
            Overloaded: A :class:`~amqp_rt.policies.Bulkhead` refused the call. Nothing was sent.
        """
        reply = check_reply(reply, self._codecs)
        caller = CALLER.get()
        given: Any = properties
        if caller is not None:
            within = caller.within(within)
            given = caller.traced(args, given)
        deadline = inf if within is None else trio.current_time() + within
        outgoing = Outgoing(address, args, deadline, given, properties)
        return decode_reply(await self._step(outgoing), reply)

    def __repr__(self) -> str:
        return f"<Calling with {', '.join(type(each).__name__ for each in self._policies)}>"


# --- Steps -----------------------------------------------------------------------------------


def _retrying(policy: Retry, requests: Requests, then: Step, idempotent: bool) -> Step:
    async def step(outgoing: Outgoing) -> Message:
        budget = policy.budget_of(outgoing.address)
        now = trio.current_time()
        budget.count_call(now)
        deadline = outgoing.deadline
        attempt = 1
        spent_at = inf
        while True:
            outgoing.left = False
            if policy.attempt_s is not None:
                outgoing.deadline = min(deadline, trio.current_time() + policy.attempt_s)
            try:
                return await then(outgoing)
            except AmqpError as error:
                if attempt >= policy.attempts or requests.closed:
                    raise
                if not policy.may_repeat(error, left=outgoing.left, idempotent=idempotent):
                    raise
                pause_s = policy.pause_s(attempt)
                now = trio.current_time()
                if now + pause_s >= deadline or not budget.has_room(now):
                    raise
                # The budget is taken after the pause: a caller that is cancelled in it has taken
                # nothing. Other calls may have used it up by then.
                await trio.sleep(pause_s)
                spent_at = trio.current_time()
                if not budget.spend(spent_at):
                    raise
            except BaseException:
                # Cancelled, in a group of exceptions or not.
                if attempt > 1 and not outgoing.left:
                    budget.give_back(spent_at, trio.current_time())
                raise
            finally:
                outgoing.deadline = deadline
            attempt += 1

    return step


def _breaking(policy: Breaker, requests: Requests, then: Step, idempotent: bool) -> Step:
    async def step(outgoing: Outgoing) -> Message:
        circuit = policy.circuit_of(outgoing.address)
        ticket = circuit.admit(outgoing.address, trio.current_time())
        failed: bool | None = None
        try:
            reply = await then(outgoing)
            failed = False
        except AmqpError as error:
            failed = is_failure(error)
            raise
        finally:
            circuit.finish(ticket, trio.current_time(), failed=failed)
        return reply

    return step


def _bounding(policy: Bulkhead, requests: Requests, then: Step, idempotent: bool) -> Step:
    async def step(outgoing: Outgoing) -> Message:
        policy.enter(outgoing.address)
        try:
            return await then(outgoing)
        finally:
            policy.leave(outgoing.address)

    return step


class _Race:
    """Attempts of one call, of which the first reply is taken, or the first error if all fail."""

    def __init__(self, then: Step) -> None:
        self.over = trio.Event()
        self.reply: Message | None = None
        self.error: Exception | None = None
        self._then = then
        self._running = 0

    def start(self, nursery: trio.Nursery, outgoing: Outgoing) -> Outgoing:
        """Start an attempt of its own for *outgoing*."""
        attempt = outgoing.copy()
        self._running += 1
        nursery.start_soon(self._run, attempt)
        return attempt

    async def _run(self, attempt: Outgoing) -> None:
        try:
            reply = await self._then(attempt)
        except Exception as error:
            if self.error is None:
                self.error = error
        else:
            if self.reply is None:
                self.reply = reply
        self._running -= 1
        if self.reply is not None or not self._running:
            self.over.set()


def _hedging(policy: Hedge, requests: Requests, then: Step, idempotent: bool) -> Step:
    if not idempotent:
        raise ValueError(
            "Hedge() may send a request twice: calling(..., idempotent=True) allows it"
        )

    async def step(outgoing: Outgoing) -> Message:
        state = policy.state_of(outgoing.address)
        began = trio.current_time()
        state.budget.count_call(began)
        delay_s = state.delay_s
        if began + delay_s >= outgoing.deadline or not state.budget.has_room(began):
            reply = await then(outgoing)
            state.observe(trio.current_time() - began)
            return reply
        race = _Race(then)
        first: Outgoing | None = None
        second: Outgoing | None = None
        spent_at = inf
        try:
            async with trio.open_nursery() as nursery:
                first = race.start(nursery, outgoing)
                with trio.move_on_after(delay_s):
                    await race.over.wait()
                spent_at = trio.current_time()
                # Other calls may have used the budget up meanwhile.
                if not race.over.is_set() and state.budget.spend(spent_at):
                    second = race.start(nursery, outgoing)
                await race.over.wait()
                # Leaving the attempt abandons its request, which cancels its handler.
                nursery.cancel_scope.cancel()
        finally:
            outgoing.left = any(each is not None and each.left for each in (first, second))
            if second is not None and not second.left:
                state.budget.give_back(spent_at, trio.current_time())
        if race.reply is None:
            assert race.error is not None
            raise race.error
        # If the second attempt has won, the first has taken at least this long.
        state.observe(trio.current_time() - began)
        return race.reply

    return step


class _Flight:
    """Request under way, for which equal calls wait."""

    __slots__ = ("ended", "error", "own", "reply")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.reply: Message | None = None
        self.error: AmqpError | None = None
        #: Whether the reply belongs to its own call only.
        self.own = False


def _caching(policy: Cache, requests: Requests, then: Step, idempotent: bool) -> Step:
    async def step(outgoing: Outgoing) -> Message:
        key = (requests.identity, outgoing.address, _digest(outgoing, requests.codecs))
        while True:
            reply = policy.get(key, trio.current_time())
            if reply is not None:
                return reply
            flight: _Flight | None = policy.flights.get(key)
            if flight is None:
                return await _fly(policy, key, then, outgoing)
            with trio.move_on_at(outgoing.deadline):
                await flight.ended.wait()
            if not flight.ended.is_set():
                raise DeadlineExceeded(
                    f"{outgoing.address!r} did not answer an equal request in time"
                )
            if flight.reply is not None:
                return flight.reply
            if flight.error is not None:
                raise fresh(flight.error)
            if flight.own:
                return await then(outgoing)
            # The caller that had sent it was cancelled or had less time: one of the others sends.

    return step


async def _fly(policy: Cache, key: CacheKey, then: Step, outgoing: Outgoing) -> Message:
    """Send the request of *key* for all calls that wait for it."""
    flight = policy.flights[key] = _Flight()
    try:
        reply = await then(outgoing)
        if policy.put(key, reply, len(reply.encode()), trio.current_time()):
            flight.reply = reply
        else:
            flight.own = True
    except (DeadlineExceeded, CircuitOpen, Overloaded):
        # These concern this call: others have more time, or are judged on their own.
        raise
    except AmqpError as error:
        flight.error = fresh(error)
        raise
    finally:
        del policy.flights[key]
        flight.ended.set()
    return reply


def _digest(outgoing: Outgoing, codecs: Codecs) -> bytes:
    """Return a digest of payload and properties, without the trace context of the caller."""
    args = outgoing.args
    payload = None if not args else args[0] if len(args) == 1 else list(args)
    message = build_message(payload, outgoing.own, codecs.encoding)
    return blake2b(message.encode(), digest_size=32).digest()


#: Kind of policy → function that makes its step from policy, requests, next step, and whether the calls
#: are idempotent.
_STEPS: Final[dict[type, Callable[[Any, Requests, Step, bool], Step]]] = {
    Retry: _retrying,
    Breaker: _breaking,
    Bulkhead: _bounding,
    Hedge: _hedging,
    Cache: _caching,
}
