"""Calls under policies that are cancelled after each step of any task: nothing of them is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
import trio
from answering import Node, echoing
from far_end import connected
from trio.testing import MockClock

from amqp_rt import Breaker, Bulkhead, Cache, Connection, Hedge, Retry
from amqp_rt.message import Message
from amqp_rt.outcomes import RELEASED

pytestmark = pytest.mark.req("A20")

STEADY: Any = {"first_s": 1, "factor": 2, "most_s": 60, "jitter": 0}
#: More steps than any of the calls takes, so that a call that never ends fails its test.
STEPS_MAX = 1_000


class Stepwise(trio.abc.Instrument):
    """Cancel *scope* after the *last* step of any task; a task gets no further than that step.

    Every task that waits for a checkpoint of its own, such as both attempts of a hedge, is then at the
    checkpoint that it has reached, and what the others send and settle has come as far as it has.
    """

    def __init__(self, scope: trio.CancelScope, last: int) -> None:
        self._scope = scope
        self._left = last

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if not self._left:
            self._scope.cancel()


class Slow:
    """The first *times* requests get no reply, and are released after 2 seconds if *released*."""

    def __init__(self, times: int, *, released: bool) -> None:
        self.times = times
        self.released = released

    def __call__(self, node: Node, request: Message) -> None:
        if len(node.requests) > self.times:
            node.reply(request, request.body, ttl_ms=60_000)
        elif self.released:
            node.deliveries[-1].settle(RELEASED)


def warm_hedge() -> Hedge:
    hedge = Hedge(budget=1)
    for _ in range(20):
        hedge.state_of("q").observe(0.5)
    return hedge


#: Name → how the far end answers, and the policies.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "retry": (lambda: Slow(2, released=True), lambda: [Retry(3, **STEADY)]),
    "retry in time": (
        lambda: Slow(2, released=False),
        lambda: [Retry(3, attempt_s=1, **STEADY)],
    ),
    "hedge": (lambda: Slow(1, released=False), lambda: [warm_hedge()]),
    "hedge, both failing": (lambda: Slow(9, released=True), lambda: [warm_hedge()]),
    "breaker": (lambda: Slow(0, released=False), lambda: [Breaker()]),
    "bulkhead": (lambda: Slow(0, released=False), lambda: [Bulkhead(1)]),
    "cache": (lambda: Slow(0, released=False), lambda: [Cache()]),
    "cache, hedge": (lambda: Slow(1, released=False), lambda: [Cache(), warm_hedge()]),
    "retry, hedge, bulkhead": (
        lambda: Slow(3, released=False),
        lambda: [Retry(3, attempt_s=2, **STEADY), warm_hedge(), Bulkhead(2)],
    ),
    "all": (
        lambda: Slow(3, released=False),
        lambda: [
            Cache(),
            Retry(3, attempt_s=2, **STEADY),
            warm_hedge(),
            Breaker(least=2, open_s=0.5),
            Bulkhead(2),
        ],
    ),
}


def additional(policies: list[Any]) -> int:
    """Return the number of requests that the budgets have paid for."""
    now = trio.current_time()
    budgets = [
        policy.budget_of("q") if isinstance(policy, Retry) else policy.state_of("q").budget
        for policy in policies
        if isinstance(policy, Retry | Hedge)
    ]
    return sum(budget.spent(now) for budget in budgets)


async def check_clean(peer: Connection, node: Node, policies: list[Any]) -> None:
    """Check that no call is left anywhere, and that the next call is answered."""
    requests = peer._calls()
    assert requests._replies is None or not requests._replies.calls
    assert not requests._awaited
    for policy in policies:
        if isinstance(policy, Cache):
            assert not policy.flights
        elif isinstance(policy, Bulkhead):
            assert policy.running("q") == 0
        elif isinstance(policy, Breaker):
            assert not policy.circuit_of("q")._trial
    # Everything that was sent arrives within a moment.
    await trio.sleep(0.1)
    sent = len(node.requests)
    # Each budget has paid for a request that left after the first, and for no other.
    assert additional(policies) <= max(0, sent - 1)
    # Requests that the node has not settled are settled by the caller, which cancels their handlers.
    await node.far.until(
        lambda: all(each.settled or each.local_settled for each in node.deliveries)
    )
    node.answer = echoing
    await trio.sleep(1)
    assert await peer.calling(*policies, idempotent=True).call("q", "next", within=20) == "next"
    assert all(sender.pending == 0 for sender in requests._senders.values())


async def cancelled_after(
    steps: int, case: str, act: Callable[[Connection, list[Any]], Awaitable[object]]
) -> bool:
    """Run *act* until it ends or *steps* steps have passed; return whether it had more."""
    answer, make = CASES[case]
    node = Node(answer())
    policies = make()
    async with connected(node.far) as peer:
        with trio.CancelScope() as scope:
            instrument = Stepwise(scope, steps)
            trio.lowlevel.add_instrument(instrument)
            try:
                await act(peer, policies)
            finally:
                trio.lowlevel.remove_instrument(instrument)
        await check_clean(peer, node, policies)
    return scope.cancel_called


async def call(peer: Connection, policies: list[Any]) -> None:
    try:
        await peer.calling(*policies, idempotent=True).call("q", 1, within=20)
    except Exception:
        # How a call ends is the matter of other tests; here it may have failed before its cancellation.
        pass


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trio run ready tasks in the same order each time."""
    monkeypatch.setattr("trio._core._run._r", Random(1))


@pytest.mark.parametrize("case", CASES)
async def test_a_call_that_is_cancelled_after_any_step_leaves_nothing(
    autojump_clock: MockClock, case: str
) -> None:
    for steps in range(1, STEPS_MAX):
        if not await cancelled_after(steps, case, call):
            break
    else:
        raise AssertionError(f"the call did not end within {STEPS_MAX} steps")
    # Fewer would mean that the scope was not cancelled within the call.
    assert steps > 20


@pytest.mark.parametrize("case", ["cache", "cache, hedge"])
async def test_a_sender_that_is_cancelled_after_any_step_leaves_its_request_to_the_others(
    autojump_clock: MockClock, case: str
) -> None:
    """Two further callers wait for the reply to the same request, and get one."""
    cancelled = 0
    for steps in range(1, STEPS_MAX):
        answer, make = CASES[case]
        node = Node(answer())
        policies = make()
        found: list[Any] = []
        async with connected(node.far) as peer, trio.open_nursery() as nursery:
            calls = peer.calling(*policies, idempotent=True)

            async def wait(calls: Any = calls, found: list[Any] = found) -> None:
                found.append(await calls.call("q", 1, within=60))

            with trio.CancelScope() as scope:
                instrument = Stepwise(scope, steps)
                trio.lowlevel.add_instrument(instrument)
                try:
                    nursery.start_soon(wait)
                    nursery.start_soon(wait)
                    await calls.call("q", 1, within=60)
                finally:
                    trio.lowlevel.remove_instrument(instrument)
        assert found == [1, 1]
        assert not any(policy.flights for policy in policies if isinstance(policy, Cache))
        if not scope.cancel_called:
            break
        cancelled += scope.cancelled_caught
    else:
        raise AssertionError(f"the call did not end within {STEPS_MAX} steps")
    assert cancelled > 10
