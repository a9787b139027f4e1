"""Choice of the consumer: priorities, exclusive, standby and slow consumers, and groups."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from brokers import Controller, World

from amqp_rt import Broker, Message
from amqp_rt.broker.nodes import Queue
from amqp_rt.errors import LinkRefused
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified
from amqp_rt.transactions import TransactionalState
from amqp_rt.values import Described, Symbol

NOT_HERE = Modified(undeliverable_here=True)


def shown(world: World, address: str = "q") -> list[Any]:
    return [Message.decode(each).body for each in world.peek(address, 1_000)]


def ranked(priority: object, name: str = "priority") -> dict[object, object]:
    return {Symbol(name): priority}


# --- Priority ---


@pytest.mark.req("B23")
def test_consumers_with_a_higher_priority_are_served_first() -> None:
    world = World(Queue("q"))
    client = world.client()
    plain = client.receiver("q", credit=10)
    low = client.receiver("q", credit=10, properties=ranked(-1))
    high = client.receiver("q", credit=2, properties=ranked(5))
    also_high = client.receiver("q", credit=1, properties=ranked(5, "rabbitmq:priority"))
    out = client.sender("q")
    out.send(*range(5))
    # In turn among equals; those below get what is left over.
    assert (high.bodies, also_high.bodies) == ([0, 2], [1])
    assert (plain.bodies, low.bodies) == ([3, 4], [])
    plain.detach()
    out.send(5)
    assert low.bodies == [3, 4, 5]
    high.grant(9)
    low.settle(RELEASED)
    assert high.bodies == [0, 2, 3, 4, 5]
    assert high.link.properties == {"priority": 5}


@pytest.mark.req("B23")
def test_a_lower_priority_gets_what_the_higher_ones_may_not_have() -> None:
    world = World(Queue("q"))
    client = world.client()
    high = client.receiver("q", credit=10, properties=ranked(1))
    low = client.receiver("q", credit=10)
    client.sender("q").send("a", "b")
    assert high.bodies == ["a", "b"]
    high.settle(NOT_HERE, 0)
    assert low.bodies == ["a"]


@pytest.mark.req("B23")
def test_levels_go_with_their_consumers() -> None:
    world = World(Queue("q"))
    client = world.client()
    queue = world.host.space().find("q").held
    for priority in range(50):
        client.receiver("q", credit=1, properties=ranked(priority)).detach()
    assert (queue.turns.levels, queue.turns.rings) == ([], {})
    client.sender("q").send("a")
    assert client.receiver("q", credit=1).bodies == ["a"]


@pytest.mark.parametrize("priority", ["high", 2**31, True, 1.5])
def test_a_priority_that_is_none_is_refused(priority: object) -> None:
    world = World(Queue("q"))
    assert world.client().receiver("q", properties=ranked(priority)).error == "amqp:invalid-field"


# --- Exclusive ---


@pytest.mark.req("B23")
@pytest.mark.parametrize(
    ("declared", "first", "second"),
    [(True, False, False), (False, True, False), (False, False, True)],
)
def test_an_exclusive_consumer_has_no_other_beside_it(
    declared: bool, first: bool, second: bool
) -> None:
    world = World(Queue("q", exclusive=declared))
    client = world.client()
    one = client.receiver("q", properties={Symbol("exclusive"): first})
    assert one.link.properties == ({"exclusive": True} if first else {})
    other = client.receiver("q", properties={Symbol("exclusive"): second})
    assert other.error == "amqp:resource-locked"
    # A browser, which takes nothing away, is no consumer.
    assert client.receiver("q", distribution_mode="copy").error is None
    one.detach()
    assert client.receiver("q", properties={Symbol("exclusive"): second}).error is None


# --- Single active ---


@pytest.mark.req("B23")
def test_another_takes_over_when_the_active_consumer_leaves() -> None:
    world = World(Queue("q", single_active=True))
    first_client = world.client()
    first = first_client.receiver("q", credit=2)
    client = world.client()
    second = client.receiver("q", credit=10)
    third = client.receiver("q", credit=10, properties=ranked(7))
    out = client.sender("q")
    out.send(*range(4))
    # The others stand by, credit or not, and whatever their priority.
    assert (first.bodies, second.bodies, third.bodies) == ([0, 1], [], [])
    second.drain()
    assert second.link.credit == 0
    first.settle(ACCEPTED, 0)
    first_client.cut()
    # In order, beginning with what the other has not settled.
    assert (second.bodies, third.bodies) == ([], [1, 2, 3])
    third.detach()
    assert second.bodies == []
    second.grant(9)
    assert second.bodies == [1, 2, 3]


# --- Groups ---


def group(number: object) -> dict[str, Any]:
    return {"group_id": f"group {number}"}


@pytest.mark.req("B23", "M15")
def test_a_group_goes_to_one_consumer_in_order_until_it_leaves() -> None:
    world = World(Queue("q", groups=1_000))
    client = world.client()
    out = client.sender("q")
    one = client.receiver("q", credit=2)
    other = client.receiver("q", credit=20)
    for n in range(4):
        out.send(("a", n), **group("a"))
        out.send(("b", n), **group("b"))
    out.send(("", 0))
    a, b = [["a", n] for n in range(4)], [["b", n] for n in range(4)]
    assert one.bodies == a[:2]
    # No other consumer gets the rest of the group, and none waits for that.
    assert other.bodies == [*b, ["", 0]]
    one.settle(RELEASED, 1)
    one.grant(1)
    assert one.bodies == [*a[:2], a[1]]
    one.detach()
    assert other.bodies == [*b, ["", 0], *a]


@pytest.mark.req("B23", "M15")
@pytest.mark.parametrize("options", [{}, {"priorities": 10}, {"sort_key": "properties.subject"}])
def test_a_group_that_came_back_has_a_new_owner(options: dict[str, Any]) -> None:
    world = World(Queue("q", groups=1_000, **options))
    client = world.client()
    out = client.sender("q")
    for n in range(6):
        out.send(n, **group(n % 2))
    # All of them have been taken once and lie in a heap.
    client.receiver("q", credit=6).detach()
    one = client.receiver("q", credit=1)
    assert one.bodies == [0]
    other = client.receiver("q", credit=1)
    assert other.bodies == [1]
    other.grant(9)
    assert other.bodies == [1, 3, 5]
    one.grant(9)
    assert one.bodies == [0, 2, 4]
    # A consumer that must not get a message loses the group to the one that gets it.
    one.settle(NOT_HERE, 0)
    assert other.bodies == [1, 3, 5, 0]
    out.send(6, **group(0))
    assert other.bodies == [1, 3, 5, 0, 6]


@pytest.mark.req("M15")
def test_a_consumer_with_a_filter_leaves_groups_that_are_not_its_own() -> None:
    world = World(Queue("q", groups=1_000))
    client = world.client()
    filters = {Symbol("jms"): _selector("n > 1")}
    choosy = client.receiver("q", credit=9, filter=filters)
    anybody = client.receiver("q", credit=9)
    out = client.sender("q")
    for n in range(4):
        out.send(n, **group("a"), application_properties={"n": n})
        out.send(10 + n, **group("b"), application_properties={"n": 10})
    assert anybody.bodies == [0, 1, 2, 3]
    assert choosy.bodies == [10, 11, 12, 13]


def _selector(text: str) -> Any:
    return Described(Symbol("apache.org:selector-filter:string"), text)


# --- Locks ---


@pytest.mark.req("M24", "B23")
@pytest.mark.parametrize("mode", [0, RCV_SECOND])
def test_what_is_not_settled_in_time_is_released(mode: int) -> None:
    world = World(Queue("q", lock_s=30))
    client = world.client()
    out = client.sender("q")
    slow = client.receiver("q", credit=2, rcv_settle_mode=mode)
    out.send("a")
    world.time.now += 20
    out.send("b")
    world.time.now += 10
    world.host.turns.tick()
    world.pump()
    # The consumer learns of the release: the delivery is settled, and the message is as it was.
    assert [each.state for each in slow.endpoint.deliveries] == [RELEASED, None]
    assert [each.settled for each in slow.endpoint.deliveries] == [True, False]
    other = client.receiver("q", credit=9)
    assert [(m.body, m.delivery_count) for m in other.messages] == [("a", 0)]
    # An outcome is too late now, and no error; the other delivery is unaffected.
    slow.settle(ACCEPTED, 0)
    slow.settle(ACCEPTED, 1)
    other.settle(ACCEPTED)
    assert (slow.error, other.error) == (None, None)
    stats = world.stats("q")
    assert (stats.available, stats.acquired, stats.accepted) == (0, 0, 2)
    world.time.now += 1_000
    world.host.turns.tick()
    assert world.host.memory.held == 0


@pytest.mark.req("M24", "B11")
def test_an_outcome_that_crosses_the_release_is_not_heard() -> None:
    world = World(Queue("q", lock_s=30))
    client = world.client()
    client.sender("q").send("a")
    slow = client.receiver("q", credit=1)
    # Said, and still on its way.
    slow.endpoint.deliveries[0].settle(ACCEPTED)
    world.time.now += 30
    world.host.turns.tick()
    world.pump()
    assert shown(world) == ["a"]
    assert world.stats("q").accepted == 0
    assert slow.error is None


@pytest.mark.req("M24", "B16")
def test_a_message_that_is_never_settled_wears_out() -> None:
    world = World(Queue("q", lock_s=30, max_attempts=2, dead_letter="dead"))
    client = world.client()
    client.sender("q").send("a")
    client.receiver("q", credit=9)
    for _ in range(2):
        world.time.now += 30
        world.host.turns.tick()
        world.pump()
    assert (shown(world), shown(world, "dead")) == ([], ["a"])


@pytest.mark.req("M24")
def test_a_transaction_keeps_its_deliveries_as_long_as_it_may() -> None:
    world = World(Queue("q", lock_s=30))
    client = world.client()
    client.sender("q").send("a")
    consumer = client.receiver("q", credit=1)
    control = Controller(client)
    txn_id = control.declare()
    consumer.endpoint.deliveries[0].update(TransactionalState(txn_id, ACCEPTED))
    world.pump()
    world.time.now += 31
    world.host.turns.tick()
    world.pump()
    assert consumer.endpoint.deliveries[0].settled is False
    assert control.discharge(txn_id, fail=True) == "accepted"
    # The consumer has the message again, for the full time of a lock.
    world.time.now += 29
    world.host.turns.tick()
    assert shown(world) == []
    world.time.now += 1
    world.host.turns.tick()
    assert shown(world) == ["a"]


@pytest.mark.req("M24")
def test_locks_of_what_was_settled_are_forgotten() -> None:
    world = World(Queue("q", lock_s=3_600))
    client = world.client()
    out = client.sender("q")
    holder = client.receiver("q", credit=1)
    out.send("held")
    consumer = client.receiver("q", credit=1_000, settle=ACCEPTED)
    for n in range(500):
        out.send(n)
    assert len(consumer.bodies) == 500
    locks = world.host.space().find("q").held.timing.locks
    assert locks is not None
    assert len(locks._held) <= 70
    world.time.now += 3_600
    world.host.turns.tick()
    world.pump()
    assert holder.bodies == ["held"]
    assert consumer.bodies[-1] == "held"


@pytest.mark.req("M24")
async def test_a_lock_takes_as_long_as_it_says(autojump_clock: trio.testing.MockClock) -> None:
    class Virtual:
        def monotonic(self) -> float:
            return trio.current_time()

        #: Jumps by a day with each look.
        days = 0

        def wall(self) -> float:
            self.days += 1
            return self.days * 86_400.0

    async with Broker(clock=Virtual()) as broker, broker.local() as peer:
        await broker.declare(Queue("q", lock_s=30))
        async with peer.sender("q") as out, peer.receiver("q", credit=1) as slow:
            await out.send("a")
            await slow.receive()
            began = trio.current_time()
            async with peer.receiver("q") as other:
                assert (await other.receive()).body == "a"
                assert trio.current_time() == pytest.approx(began + 30, abs=0.1)


async def test_the_client_hears_why_it_is_not_let_in() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.receiver("q", properties={Symbol("exclusive"): True}):
            with pytest.raises(LinkRefused, match="exclusive"):
                async with peer.receiver("q"):
                    pass
