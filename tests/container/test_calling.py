"""Calls under policies, in virtual time: what is sent, what is raised, and what a cancelled caller leaves."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from answering import Node, echoing
from far_end import connected
from trio.testing import MockClock, wait_all_tasks_blocked

from amqp_rt import Breaker, Bulkhead, Cache, Hedge, Reconnect, Retry
from amqp_rt.container.calling import Calling
from amqp_rt.errors import (
    CallFailed,
    CircuitOpen,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryNotAccepted,
    Overloaded,
)
from amqp_rt.message import Message
from amqp_rt.outcomes import RELEASED, Modified, Outcome

pytestmark = pytest.mark.req("A20")

SOON = Reconnect(first_delay_s=1, jitter=0)
STEADY: Any = {"first_s": 1, "factor": 2, "most_s": 60, "jitter": 0}


def returning(node: Node, times: int, outcome: Outcome = RELEASED) -> None:
    """Return the first *times* requests with *outcome*, and answer the others."""

    def answer(node: Node, request: Message) -> None:
        if len(node.requests) <= times:
            node.deliveries[-1].settle(outcome)
        else:
            echoing(node, request)

    node.answer = answer


# --- Retry -----------------------------------------------------------------------------------


async def test_a_released_request_is_sent_again_after_a_pause(autojump_clock: MockClock) -> None:
    node = Node()
    returning(node, 2)
    async with connected(node.far) as peer:
        calls = peer.calling(Retry(3, **STEADY))
        started = trio.current_time()
        assert await calls.call("q", 7, reply=int) == 7
        assert trio.current_time() - started == pytest.approx(3, abs=0.1)
        assert len(node.requests) == 3
        returning(node, 99)
        with pytest.raises(DeliveryNotAccepted):
            await calls.call("q", 8)
        assert len(node.requests) == 6


@pytest.mark.parametrize(("idempotent", "sent"), [(False, 1), (True, 2)])
async def test_a_modified_request_is_repeated_only_if_that_is_harmless(
    autojump_clock: MockClock, idempotent: bool, sent: int
) -> None:
    node = Node()
    returning(node, 1, Modified(delivery_failed=True))
    async with connected(node.far) as peer:
        calls = peer.calling(Retry(3), idempotent=idempotent)
        if idempotent:
            assert await calls.call("q", 1) == 1
        else:
            with pytest.raises(DeliveryNotAccepted):
                await calls.call("q", 1)
    assert len(node.requests) == sent


async def test_an_attempt_may_have_a_time_of_its_own(autojump_clock: MockClock) -> None:
    def answer(node: Node, request: Message) -> None:
        if len(node.requests) == 2:
            echoing(node, request)

    node = Node(answer)
    async with connected(node.far) as peer:
        calls = peer.calling(Retry(2, attempt_s=1, **STEADY), idempotent=True)
        assert await calls.call("q", 1, within=10) == 1
        await node.far.until(lambda: len(node.given_up) == 1)
        # The ttl is that of the attempt.
        assert [request.ttl_ms for request in node.requests] == [1000, 1000]


async def test_a_pause_beyond_the_deadline_is_not_waited_for(autojump_clock: MockClock) -> None:
    node = Node()
    returning(node, 99)
    async with connected(node.far) as peer:
        calls = peer.calling(Retry(9, **STEADY))
        started = trio.current_time()
        with pytest.raises(DeliveryNotAccepted):
            await calls.call("q", 1, within=2)
        assert trio.current_time() - started == pytest.approx(1, abs=0.1)
    assert len(node.requests) == 2


async def test_the_budget_bounds_repetitions_and_a_cancelled_pause_takes_none(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    returning(node, 99)
    policy = Retry(2, budget=0, reserve_per_s=0.1, **STEADY)
    async with connected(node.far) as peer:
        calls = peer.calling(policy)
        with trio.move_on_after(0.5) as scope:
            await calls.call("q", 1)
        assert scope.cancelled_caught
        assert policy.budget_of("q").has_room(trio.current_time())
        for sent in (3, 4):
            with pytest.raises(DeliveryNotAccepted):
                await calls.call("q", 1)
            assert len(node.requests) == sent
        # Two pauses at once, with room for one repetition.
        await trio.sleep(11)
        async with trio.open_nursery() as nursery:
            for _ in range(2):

                async def call() -> None:
                    with pytest.raises(DeliveryNotAccepted):
                        await calls.call("q", 1)

                nursery.start_soon(call)
        assert len(node.requests) == 7


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_request_that_had_left_is_repeated_on_the_next_connection_if_idempotent(
    autojump_clock: MockClock, idempotent: bool
) -> None:
    node = Node()
    found: list[Any] = []
    async with connected(node.far, reconnect=SOON) as peer:
        calls = peer.calling(Retry(3), idempotent=idempotent)

        async def call() -> None:
            try:
                found.append(await calls.call("q", "work", within=30))
            except ConnectionLost as error:
                found.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await node.far.until(lambda: node.requests)
            node.answer = echoing
            node.far.drop()
        assert len(node.requests) == 1 + idempotent
        assert (found == ["work"]) is idempotent


async def test_a_repetition_that_is_cancelled_before_it_leaves_costs_no_budget(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    policy = Retry(3, **STEADY)
    budget = policy.budget_of("q")
    later = Reconnect(first_delay_s=60, jitter=0)
    async with connected(node.far, reconnect=later) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(peer.calling(policy, idempotent=True).call, "q", 1)
        await node.far.until(lambda: node.requests)
        node.far.drop()
        await trio.sleep(2)
        # The repetition waits for the next connection.
        assert budget.spent(trio.current_time()) == 1
        nursery.cancel_scope.cancel()
    assert budget.spent(trio.current_time()) == 0
    assert len(node.requests) == 1


async def test_a_closed_connection_is_not_tried_again(autojump_clock: MockClock) -> None:
    node = Node()
    async with connected(node.far, reconnect=None) as peer:
        calls = peer.calling(Retry(9, **STEADY), idempotent=True)
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await calls.call("q", 1)

            nursery.start_soon(call)
            await node.far.until(lambda: node.requests)
            started = trio.current_time()
            node.far.drop()
        assert trio.current_time() - started < 0.5


# --- Hedge -----------------------------------------------------------------------------------


async def warm(calls: Calling, count: int = 20) -> None:
    for number in range(count):
        assert await calls.call("q", number) == number


async def test_the_first_reply_is_taken_and_the_other_request_is_abandoned(
    autojump_clock: MockClock,
) -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        hedge = Hedge()
        for _ in range(20):
            hedge.state_of("q").observe(0.5)
        calls = peer.calling(hedge, idempotent=True)
        await warm(calls, 40)

        def slow(node: Node, request: Message) -> None:
            if len(node.requests) == 42:
                echoing(node, request)

        node.answer = slow
        started = trio.current_time()
        assert await calls.call("q", "x", within=10) == "x"
        assert trio.current_time() - started == pytest.approx(0.5, abs=0.05)
        assert len(node.requests) == 42
        await node.far.until(lambda: node.given_up)
        assert node.given_up == [node.deliveries[40]]
        # A twentieth of 41 calls: the third would be one too many.
        node.answer = None
        for sent in (44, 45):
            with pytest.raises(DeadlineExceeded):
                await calls.call("q", "y", within=1)
            assert len(node.requests) == sent


async def test_a_cancelled_caller_abandons_both_requests(autojump_clock: MockClock) -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        calls = peer.calling(Hedge(budget=1), idempotent=True)
        await warm(calls)
        node.answer = None
        with trio.move_on_after(1):
            await calls.call("q", "x")
        await node.far.until(lambda: len(node.given_up) == 2)
        assert not peer._calls()._replies.calls  # type: ignore[union-attr]


async def test_an_error_of_both_is_raised_as_it_is(autojump_clock: MockClock) -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        calls = peer.calling(Hedge(budget=1), idempotent=True)
        await warm(calls)
        node.answer = None
        with pytest.raises(DeadlineExceeded):
            await calls.call("q", 1, within=1)
        returning(node, 99)
        with pytest.raises(DeliveryNotAccepted):
            await calls.call("q", 1)
        with pytest.raises(ValueError, match="idempotent=True"):
            peer.calling(Hedge())


# --- Breaker and Bulkhead --------------------------------------------------------------------


async def test_the_circuit_opens_after_twenty_failures_and_a_trial_closes_it(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    returning(node, 20)
    async with connected(node.far) as peer:
        calls = peer.calling(Breaker())
        for _ in range(20):
            with pytest.raises(DeliveryNotAccepted):
                await calls.call("q", 1)
        with pytest.raises(CircuitOpen):
            await calls.call("q", 1)
        assert len(node.requests) == 20
        node.answer = None
        await trio.sleep(5)
        # A trial that is cancelled decides nothing.
        with trio.move_on_after(1):
            await calls.call("q", 1)
        node.answer = echoing
        assert await calls.call("q", 1) == 1
        assert await calls.call("q", 2) == 2


@pytest.mark.parametrize("inner", [False, True], ids=["retry first", "breaker first"])
async def test_the_first_policy_is_the_outermost(autojump_clock: MockClock, inner: bool) -> None:
    node = Node()
    returning(node, 99)
    policies: list[Any] = [Retry(3), Breaker(least=3)]
    async with connected(node.far) as peer:
        calls = peer.calling(*(reversed(policies) if inner else policies))
        # A breaker around the retries counts calls, one within them counts attempts.
        for call in range(4):
            error: Any = CircuitOpen if call >= (3 if inner else 1) else DeliveryNotAccepted
            with pytest.raises(error):
                await calls.call("q", 1)
    assert len(node.requests) == (9 if inner else 3)


async def test_calls_beyond_the_bulkhead_fail_at_once_and_every_end_gives_the_place_back(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    bulkhead = Bulkhead(2)
    async with connected(node.far) as peer:
        calls = peer.calling(bulkhead)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(calls.call, "q", 1)
            await node.far.until(lambda: len(node.requests) == 2)
            started = trio.current_time()
            with pytest.raises(Overloaded):
                await calls.call("q", 1)
            assert trio.current_time() == started
            assert len(node.requests) == 2
            nursery.cancel_scope.cancel()
        assert bulkhead.running("q") == 0
        node.answer = echoing
        assert await calls.call("q", 1) == 1
        assert bulkhead.running("q") == 0


# --- Cache -----------------------------------------------------------------------------------


def kept(node: Node, request: Message) -> None:
    node.reply(request, len(node.requests), ttl_ms=5000)


async def test_a_reply_with_a_ttl_is_kept_for_equal_requests_of_its_connection(
    autojump_clock: MockClock,
) -> None:
    node = Node(kept)
    cache = Cache()
    async with connected(node.far) as peer, connected(Node(kept).far) as other:
        calls = peer.calling(cache)
        assert [await calls.call("q", 1) for _ in range(3)] == [1, 1, 1]
        assert await calls.call("q", 1, subject="s") == 2
        assert await calls.call("q", 2) == 3
        assert await calls.call("r", 1) == 4
        assert await other.calling(cache).call("q", 1, subject="s") == 1
        await trio.sleep(5)
        assert await calls.call("q", 1) == 5
        node.answer = echoing
        assert [await calls.call("r", n) for n in (5, 5)] == [5, 5]
        assert len(node.requests) == 7

        def failing(node: Node, request: Message) -> None:
            failure = {"statusCode": 404, "errorCondition": "amqp:not-found"}
            node.reply(request, b"", ttl_ms=5000, application_properties=failure)

        node.answer = failing
        for _ in range(2):
            with pytest.raises(CallFailed):
                await calls.call("q", "fails")
        assert len(node.requests) == 9


async def race(calls: Calling, count: int, found: list[Any], **options: Any) -> None:
    async def call() -> None:
        try:
            found.append(await calls.call("q", "same", **options))
        except (DeliveryNotAccepted, DeadlineExceeded) as error:
            found.append(type(error))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(call)


@pytest.mark.parametrize("how", ["kept", "not kept", "failed"])
async def test_equal_requests_wait_for_the_one_under_way(
    autojump_clock: MockClock, how: str
) -> None:
    node = Node()
    cache = Cache()
    found: list[Any] = []
    async with connected(node.far) as peer, trio.open_nursery() as nursery:
        calls = peer.calling(cache)
        nursery.start_soon(race, calls, 5, found)
        await node.far.until(lambda: node.requests)
        await wait_all_tasks_blocked()
        assert len(node.requests) == 1
        if how == "failed":
            node.deliveries[0].settle(RELEASED)
        else:
            node.answer = echoing
            ttl = {"ttl_ms": 1000} if how == "kept" else {}
            node.reply(node.requests[0], "same", **ttl)
    assert found == [DeliveryNotAccepted if how == "failed" else "same"] * 5
    assert len(node.requests) == (5 if how == "not kept" else 1)
    assert not cache.flights


async def test_a_cancelled_sender_hands_its_request_to_one_that_waits(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    cache = Cache()
    found: list[Any] = []
    async with connected(node.far) as peer, trio.open_nursery() as nursery:
        calls = peer.calling(cache)
        async with trio.open_nursery() as first:
            first.start_soon(calls.call, "q", "same")
            await node.far.until(lambda: node.requests)
            nursery.start_soon(race, calls, 3, found)
            await wait_all_tasks_blocked()
            first.cancel_scope.cancel()
        await node.far.until(lambda: len(node.requests) == 2)
        node.reply(node.requests[1], "same", ttl_ms=1000)
    assert found == ["same"] * 3
    assert not cache.flights


async def test_a_caller_waits_for_the_request_of_another_only_until_its_own_deadline(
    autojump_clock: MockClock,
) -> None:
    node = Node()
    cache = Cache()
    found: list[Any] = []
    async with connected(node.far) as peer, trio.open_nursery() as nursery:
        calls = peer.calling(cache)
        nursery.start_soon(calls.call, "q", "same")
        await node.far.until(lambda: node.requests)
        await race(calls, 2, found, within=1)
        assert found == [DeadlineExceeded] * 2
        assert len(node.requests) == 1
        nursery.cancel_scope.cancel()
    assert not cache.flights


# --- together --------------------------------------------------------------------------------


async def test_cancelling_at_any_moment_leaves_nothing(autojump_clock: MockClock) -> None:
    """The node returns two requests and answers the third; the caller goes after each 50 ms."""
    for step in range(1, 80):
        node = Node()
        returning(node, 2)
        cache, bulkhead, breaker = Cache(), Bulkhead(1), Breaker()
        async with connected(node.far) as peer:
            calls = peer.calling(cache, Retry(3, **STEADY), breaker, bulkhead)
            with trio.move_on_after(step * 0.05):
                await calls.call("q", 1)
            assert not cache.flights
            assert bulkhead.running("q") == 0
            assert breaker.circuit_of("q").opened_until is None
            requests = peer._calls()
            assert requests._replies is None or not requests._replies.calls
            returning(node, 0)
            assert await calls.call("q", 2) == 2


async def test_all_policies_together_answer_as_a_plain_call(autojump_clock: MockClock) -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        calls = peer.calling(Cache(), Hedge(), Retry(), Breaker(), Bulkhead(), idempotent=True)
        await warm(calls, 30)
        with pytest.raises(TypeError, match=r"^reply="):
            await calls.call("q", 1, reply=object())
        with pytest.raises(TypeError, match=r"such as Retry\(3\)"):
            peer.calling(Retry)  # type: ignore[arg-type]
        assert repr(calls) == "<Calling with Cache, Hedge, Retry, Breaker, Bulkhead>"
