"""Rules of the policies of calls, without any I/O: budgets and circuits against models, bounds, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.errors import (
    AmqpError,
    CallFailed,
    CircuitOpen,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    Overloaded,
    SessionEnded,
)
from amqp_rt.message import Message
from amqp_rt.outcomes import RELEASED, Modified
from amqp_rt.policies import Breaker, Bulkhead, Cache, Hedge, Retry, is_failure
from amqp_rt.policies.breaker import Circuit
from amqp_rt.policies.budgets import Budget
from amqp_rt.policies.cache import ENTRY_OVERHEAD
from amqp_rt.policies.hedge import LATENCIES_MAX
from amqp_rt.policies.states import ADDRESSES_MAX

pytestmark = pytest.mark.req("A20")

#: Seconds between two events, mostly small, sometimes longer than the span.
STEPS = st.one_of(st.floats(0, 0.5), st.floats(0, 15), st.just(10.0), st.just(1.0))


@given(
    share=st.sampled_from([0.05, 0.2, 1.0]),
    reserve=st.sampled_from([0, 1, 10]),
    events=st.lists(st.tuples(STEPS, st.booleans()), max_size=80),
)
def test_a_budget_is_a_share_of_the_calls_of_ten_seconds(
    share: float, reserve: float, events: list[tuple[float, bool]]
) -> None:
    budget = Budget(share, reserve)
    calls: list[int] = []
    extra: list[int] = []
    now = 1000.0
    for step, is_call in events:
        now += step
        oldest = int(now) - 9
        calls = [each for each in calls if each >= oldest]
        extra = [each for each in extra if each >= oldest]
        if is_call:
            budget.count_call(now)
            calls.append(int(now))
            continue
        allowed = len(extra) + 1 <= round(share * len(calls), 6) + reserve
        assert budget.has_room(now) is allowed
        assert budget.spend(now) is allowed
        if allowed:
            extra.append(int(now))


@given(
    events=st.lists(
        st.tuples(STEPS, st.sampled_from(["start", "fail", "succeed", "cancel"])), max_size=120
    )
)
def test_a_circuit_follows_its_model(events: list[tuple[float, str]]) -> None:
    """The model keeps every call; the circuit counts in tenths of the span."""
    circuit = Circuit(Breaker(least=4, open_s=5, open_most_s=20))
    running: list[tuple[int, int]] = []
    ended: list[tuple[int, bool]] = []
    state, era, until, opens = "closed", 0, 0.0, 5.0
    now = 1000.0
    for step, what in events:
        now += step
        if what == "start":
            if state == "closed" or (state == "open" and now >= until):
                ticket = circuit.admit("q", now)
                if state == "open":
                    state, era = "trial", era + 1
                running.append((ticket, era))
            else:
                with pytest.raises(CircuitOpen) as refused:
                    circuit.admit("q", now)
                assert refused.value.info["retry_after_s"] == pytest.approx(max(0, until - now))
            continue
        if not running:
            continue
        ticket, begun = running.pop(0)
        failed = {"fail": True, "succeed": False, "cancel": None}[what]
        circuit.finish(ticket, now, failed=failed)
        if begun != era or failed is None:
            if begun == era and state == "trial":
                state = "open"
            continue
        if state == "trial":
            opens = min(2 * opens, 20) if failed else 5.0
            state = "open" if failed else "closed"
            until = now + opens
            era += 1
            ended = []
            continue
        ended = [each for each in [*ended, (int(now), failed)] if each[0] >= int(now) - 9]
        failures = sum(each[1] for each in ended)
        if failed and len(ended) >= 4 and failures >= 0.5 * len(ended):
            state, era, until, ended = "open", era + 1, now + opens, []


def test_the_circuit_opens_for_twice_the_time_up_to_a_minute() -> None:
    circuit = Breaker().circuit_of("q")
    now = 100.0
    for _ in range(19):
        circuit.finish(circuit.admit("q", now), now, failed=True)
    circuit.finish(circuit.admit("q", now), now, failed=True)
    pauses = []
    for _ in range(6):
        assert circuit.opened_until is not None
        pauses.append(circuit.opened_until - now)
        with pytest.raises(CircuitOpen, match="'q' was not called"):
            circuit.admit("q", circuit.opened_until - 0.001)
        now = circuit.opened_until
        ticket = circuit.admit("q", now)
        with pytest.raises(CircuitOpen, match="a trial call is under way"):
            circuit.admit("q", now)
        circuit.finish(ticket, now, failed=True)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_a_cancelled_trial_leaves_the_trial_to_the_next_call() -> None:
    circuit = Breaker(least=1).circuit_of("q")
    circuit.finish(circuit.admit("q", 0), 0, failed=True)
    circuit.finish(circuit.admit("q", 5), 5, failed=None)
    circuit.finish(circuit.admit("q", 5), 5, failed=False)
    assert circuit.opened_until is None


def outcome(state: object) -> AmqpError:
    return DeliveryNotAccepted("no", info={"outcome": state})


@pytest.mark.parametrize(
    ("error", "left", "plain", "idempotent"),
    [
        (outcome(RELEASED), True, True, True),
        (outcome(Modified(delivery_failed=True)), True, False, True),
        (outcome(Modified(undeliverable_here=True)), True, False, False),
        (ConnectionLost(), False, True, True),
        (ConnectionLost(), True, False, True),
        (SessionEnded(), False, True, True),
        (LinkDetached(), True, False, True),
        (LinkRefused(), False, False, False),
        (DeadlineExceeded(), False, False, True),
        (CallFailed(), True, False, False),
        (DeliveryRejected(), True, False, False),
        (CircuitOpen(), False, False, False),
        (Overloaded(), False, False, False),
        (DecodeError(), True, False, False),
    ],
)
def test_calls_are_repeated_only_if_they_were_not_processed_or_may_be_twice(
    error: AmqpError, left: bool, plain: bool, idempotent: bool
) -> None:
    policy = Retry()
    assert policy.may_repeat(error, left=left, idempotent=False) is plain
    assert policy.may_repeat(error, left=left, idempotent=True) is idempotent


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DeadlineExceeded(), True),
        (outcome(RELEASED), True),
        (ConnectionLost(), True),
        (LinkRefused(), True),
        (CallFailed(condition="amqp:internal-error"), True),
        (CallFailed(condition="com:busy", info={"statusCode": 503}), True),
        (CallFailed(condition="amqp:not-found", info={"statusCode": 404}), False),
        (DeliveryRejected(condition="amqp:decode-error"), False),
        (CircuitOpen(), None),
        (Overloaded(), None),
        (TypeError(), None),
    ],
)
def test_a_failure_is_the_fault_of_the_node(error: Exception, failure: bool | None) -> None:
    assert is_failure(error) is failure


def test_pauses_grow_up_to_a_bound_and_are_spread() -> None:
    policy = Retry(first_s=1, factor=2, most_s=5, jitter=0.5)
    assert [policy.pause_s(n, 0.5) for n in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]
    assert (policy.pause_s(1, 0), policy.pause_s(1, 1)) == (0.5, 1.5)
    assert len({policy.pause_s(1) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retry(0), "Retry: attempts must be at least 1, got 0"),
        (lambda: Retry(jitter=2), "Retry: jitter must be from 0 to 1, got 2"),
        (lambda: Retry(attempt_s=0), "Retry: attempt_s must be more than 0, got 0"),
        (lambda: Hedge(budget=-1), "Hedge: budget must be from 0 to 1, got -1"),
        (lambda: Hedge(least_s=-1), "Hedge: least_s must be at least 0, got -1"),
        (lambda: Hedge(replies=257), "Hedge: replies must be from 1 to 256, got 257"),
        (lambda: Retry(addresses=0), "Retry: addresses must be at least 1, got 0"),
        (lambda: Breaker(share=0), "Breaker: share must be above 0 and at most 1, got 0"),
        (
            lambda: Breaker(open_s=9, open_most_s=8),
            "Breaker: open_most_s must be at least 9, got 8",
        ),
        (lambda: Bulkhead(0), "Bulkhead: calls must be at least 1, got 0"),
        (lambda: Cache(0), "Cache: entries must be at least 1, got 0"),
        (lambda: Cache(octets=0), "Cache: octets must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def test_exceptions_that_are_not_repeated_are_a_class_or_several() -> None:
    assert Retry(never=ValueError).never == (ValueError,)
    assert Retry(never=[KeyError, ValueError]).never == (KeyError, ValueError)
    for never, named in (((3,), "3"), ([ValueError()], r"ValueError\(\)"), (int, "<class 'int'>")):
        with pytest.raises(
            TypeError, match=f"^Retry: never has classes of .*, and {named} is none$"
        ):
            Retry(never=never)  # type: ignore[arg-type]


def test_a_bulkhead_admits_its_number_for_each_address() -> None:
    bulkhead = Bulkhead(2)
    bulkhead.enter("a")
    bulkhead.enter("a")
    with pytest.raises(Overloaded, match=r"'a' was not called: 2 calls .* Bulkhead\(2\)"):
        bulkhead.enter("a")
    bulkhead.enter("b")
    bulkhead.leave("a")
    bulkhead.enter("a")
    for address in "aab":
        bulkhead.leave(address)
    assert not bulkhead._running


def test_p95_needs_twenty_latencies_and_follows_the_last_ones() -> None:
    state = Hedge(least_s=0).state_of("q")
    for number in range(19):
        state.observe(number)
    assert state.delay_s == float("inf")
    state.observe(19)
    assert state.delay_s == 18
    for _ in range(1000):
        state.observe(0.5)
    assert state.delay_s == 0.5
    assert len(state._latencies) == LATENCIES_MAX


def reply(octets: int, ttl_ms: int | None) -> tuple[Message, int]:
    return Message(b"x" * octets, ttl_ms=ttl_ms), octets


def test_a_cache_keeps_replies_with_a_ttl_until_it_passes() -> None:
    cache = Cache()
    for ttl_ms in (None, 0):
        assert not cache.put((1, "q", b"k"), *reply(1, ttl_ms), now=0)
    assert cache.put((1, "q", b"k"), *reply(1, 2000), now=0)
    assert cache.get((1, "q", b"k"), 1.999) is not None
    assert cache.get((2, "q", b"k"), 1) is None
    assert cache.get((1, "q", b"k"), 2) is None
    assert (len(cache), cache._octets) == (0, 0)


def test_a_cache_is_bounded_in_entries_and_octets() -> None:
    cache = Cache(2, octets=2 * ENTRY_OVERHEAD + 100)
    for key in (b"a", b"b"):
        cache.put((1, "q", key), *reply(50, 1000), now=0)
    assert len(cache) == 2
    cache.get((1, "q", b"a"), 0)
    cache.put((1, "q", b"c"), *reply(50, 1000), now=0)
    assert [bool(cache.get((1, "q", key), 0)) for key in (b"a", b"b", b"c")] == [True, False, True]
    # One octet more than fits beside another entry, and one more than fits at all.
    cache.put((1, "q", b"c"), *reply(51, 1000), now=0)
    assert len(cache) == 1
    cache.put((1, "q", b"d"), *reply(ENTRY_OVERHEAD + 101, 1000), now=0)
    assert cache.get((1, "q", b"d"), 0) is None
    cache.clear()
    assert (len(cache), cache._octets) == (0, 0)


def test_a_second_request_waits_for_a_least_time_and_number_of_replies() -> None:
    state = Hedge(least_s=0.25, replies=3).state_of("q")
    for latency in (0.0, 0.0):
        state.observe(latency)
        assert state.delay_s == float("inf")
    state.observe(0.0)
    assert state.delay_s == 0.25
    for _ in range(256):
        state.observe(0.5)
    assert state.delay_s == 0.5


@given(
    events=st.lists(st.tuples(STEPS, st.sampled_from(["spend", "give back"])), max_size=60),
)
def test_what_is_given_back_is_gone_from_the_budget(events: list[tuple[float, str]]) -> None:
    budget = Budget(0, 3)
    spent: list[float] = []
    now = 1000.0
    for step, what in events:
        now += step
        if what == "give back":
            if spent:
                budget.give_back(spent.pop(), now)
        elif budget.spend(now):
            spent.append(now)
        assert budget.spent(now) == sum(int(at) >= int(now) - 9 for at in spent) <= 3


@pytest.mark.parametrize(
    ("policy", "state_of", "bound"),
    [
        (Breaker(), Breaker.circuit_of, ADDRESSES_MAX),
        (Breaker(addresses=2), Breaker.circuit_of, 2),
        (Retry(addresses=3), Retry.budget_of, 3),
        (Hedge(addresses=1), Hedge.state_of, 1),
    ],
)
def test_states_of_addresses_are_bounded(
    policy: Any, state_of: Callable[[Any, str], object], bound: int
) -> None:
    first = state_of(policy, "0")
    for number in range(1, bound):
        state_of(policy, str(number))
    assert state_of(policy, "0") is first
    for number in range(1, bound):
        state_of(policy, f"{number} more")
    assert state_of(policy, "0") is first
    for number in range(bound):
        state_of(policy, f"another {number}")
    assert state_of(policy, "0") is not first
