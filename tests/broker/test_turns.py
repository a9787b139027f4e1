"""Long work is done in turns, and other work runs between them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
from brokers import Controller, Receiving, World
from paged import PagedWorld, world_of

from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queues import WORK_OF_A_TURN, MessageQueue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import MODIFIED_FAILED, RELEASED
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Symbol

WIDE = Limits(unsettled_max=100_000, session_window=100_000, lease_messages_max=100_000)
#: More than two turns of deliveries.
MANY = 2 * WORK_OF_A_TURN + 500


def queue_of(world: World, address: str = "q") -> MessageQueue:
    held = world.host._find(world.host._space(""), address).held
    assert isinstance(held, MessageQueue)
    return held


def turn(world: World) -> bool:
    """Give one turn to what waits for it; whether something did."""
    waited = bool(world.host._unfinished)
    world.host.look_on()
    world.pump()
    return waited or bool(world.host._unfinished)


def turns(world: World) -> int:
    """Give turns until nothing waits for one; how many it took."""
    count = 0
    while turn(world):
        count += 1
        assert count < 1_000
    return count


def filled(count: int = MANY, **options: Any) -> World:
    world = World(Queue("q", **options), limits=WIDE)
    for number in range(count):
        world.host.publish("q", Message(number).encode())
    return world


def taking(world: World, address: str = "q", **options: Any) -> Receiving:
    """A receiver that has got what there is for it."""
    receiver = world.client().receiver(address, **options)
    turns(world)
    return receiver


def end_by_detach(receiver: Receiving) -> None:
    receiver.detach(closed=True)


def end_by_end(receiver: Receiving) -> None:
    receiver.link.session.end()
    receiver.world.pump()


def end_by_loss(receiver: Receiving) -> None:
    (client,) = [each for each in receiver.world.clients if each.session is receiver.link.session]
    client.cut()


@pytest.mark.req("B5", "B19")
@pytest.mark.parametrize("end", [end_by_detach, end_by_end, end_by_loss])
def test_what_an_ended_link_leaves_is_requeued_in_turns_and_in_order(
    end: Callable[[Receiving], None],
) -> None:
    world = filled(MANY + 10)
    receiver = taking(world, credit=MANY)
    queue = queue_of(world)
    assert (queue.available, queue.acquired) == (10, MANY)
    other = world.client().receiver("q")
    end(receiver)
    other.grant(2 * MANY)
    before = queue.acquired
    assert MANY - WORK_OF_A_TURN <= before < MANY
    # Messages behind those that come back do not overtake them.
    assert other.bodies == []
    while queue.acquired and not other.bodies:
        turn(world)
        assert before - queue.acquired <= WORK_OF_A_TURN or other.bodies
        before = queue.acquired
    turns(world)
    assert other.bodies == list(range(MANY + 10))
    assert (queue.available, queue.acquired) == (0, MANY + 10)


def test_many_links_share_the_work_of_a_turn() -> None:
    world = filled(MANY)
    client = world.client()
    for _ in range(MANY // 50):
        client.receiver("q", credit=50)
    queue = queue_of(world)
    assert queue.acquired == MANY
    client.cut()
    assert queue.available <= WORK_OF_A_TURN
    assert turns(world) > 1
    assert (queue.available, queue.acquired) == (MANY, 0)


def test_a_message_that_comes_meanwhile_waits_behind_those_that_come_back() -> None:
    world = filled(MANY)
    receiver = taking(world, credit=MANY)
    other = taking(world, credit=2 * MANY)
    receiver.detach(closed=True)
    world.client().sender("q").send("late")
    assert other.bodies == []
    turns(world)
    assert other.bodies == [*range(MANY), "late"]


def test_a_drain_is_answered_when_all_has_come_back() -> None:
    world = filled(MANY)
    receiver = taking(world, credit=MANY)
    other = world.client().receiver("q")
    receiver.detach(closed=True)
    other.link.grant(MANY + 1)
    other.drain()
    assert other.link.credit == MANY + 1
    turns(world)
    assert other.bodies == list(range(MANY))
    assert other.link.credit == 0


def test_a_queue_is_deleted_while_messages_come_back() -> None:
    world = filled(MANY)
    receiver = taking(world, credit=MANY)
    receiver.detach(closed=True)
    assert world.host.delete("q") == MANY
    turns(world)
    assert world.host.memory.held == 0


def test_dead_letters_of_an_ended_link_come_in_turns() -> None:
    world = filled(MANY, dead_letter="dead", max_deliveries=1)
    receiver = taking(world, credit=MANY, default_outcome=MODIFIED_FAILED)
    receiver.detach(closed=True)
    dead = queue_of(world, "dead")
    assert 0 < dead.available < WORK_OF_A_TURN // 10
    turns(world)
    assert dead.available == MANY
    assert taking(world, "dead", credit=MANY).bodies == list(range(MANY))


async def test_a_broker_that_stops_keeps_what_was_to_be_requeued() -> None:
    store = MemoryStore()
    world = PagedWorld(store, WIDE)
    await world.host.restore()
    world.host.declare(Queue("q"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        await world.settle()
        await world.put(*range(MANY))
        receiver = await world.take(MANY)
        assert world.queue().acquired == MANY
        receiver.link.detach(closed=True)
        world.pump()
        assert world.queue().acquired
        nursery.cancel_scope.cancel()
    assert (world.queue().available, world.queue().acquired) == (MANY, 0)
    await world.host.close()
    async with world_of(store, limits=WIDE) as again:
        assert [entry.attempts for entry in again.queue().peek(MANY)] == [1] * MANY


@pytest.mark.req("R4")
def test_a_transaction_is_rolled_back_in_turns() -> None:
    world = filled()
    client = world.client()
    control = Controller(client)
    txn_id = control.declare()
    receiver = client.receiver("q")
    receiver.link.grant(MANY, properties={"txn-id": txn_id})
    world.pump()
    turns(world)
    queue = queue_of(world)
    assert queue.acquired == MANY
    other = taking(world, credit=MANY)
    assert control.discharge(txn_id, fail=True) == "accepted"
    assert queue.acquired >= MANY - WORK_OF_A_TURN
    receiver.grant(0)
    turns(world)
    assert other.bodies == list(range(MANY))
    assert {delivery.state for delivery in receiver.endpoint.settled} == {RELEASED}


async def test_a_lease_is_extended_accepted_and_released_in_turns() -> None:
    world = filled(MANY)
    host = world.host
    queue = queue_of(world)
    state = await host.open_lease("q", "g")

    async def watch(sizes: list[int]) -> None:
        while True:
            sizes.append(queue.acquired)
            await trio.lowlevel.checkpoint()

    sizes: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, sizes)
        state = await host.lease("q", "g", state.generation, MANY)
        assert (state.first, state.next) == (0, MANY)
        state = await host.accept_lease("q", "g", state.generation, MANY - 1_600)
        assert (state.first, queue.acquired) == (MANY - 1_600, 1_600)
        await host.return_lease("q", "g", state.generation, [(MANY - 600, MANY)])
        assert (queue.available, queue.acquired) == (600, 1_000)
        nursery.cancel_scope.cancel()
    steps = [abs(later - earlier) for earlier, later in pairwise(sizes)]
    assert max(steps) <= 1_000
    host.memory.work = 100
    await host.release_lease("q", "g")
    assert 0 < queue.acquired < 1_000
    turns(world)
    assert (queue.available, queue.acquired) == (1_600, 0)
    assert taking(world, credit=MANY).bodies == list(range(MANY - 1_600, MANY))


def test_a_deleted_queue_is_freed_in_turns() -> None:
    world = filled(20_000)
    queue = queue_of(world)
    assert world.host.delete("q") == 20_000
    assert world.host.memory.held == 0
    assert not world.host.has("q")
    left = len(queue._trash[0])
    assert left > 20_000 // 128 // 2
    turn(world)
    assert 0 < left - len(queue._trash[0]) < left
    turns(world)
    assert not queue._trash


def test_operators_work_follows_what_they_ask_for() -> None:
    world = filled(MANY)
    world.host.declare(Queue("r"))
    receiver = taking(world, credit=MANY)
    receiver.detach(closed=True)
    turns(world)
    queue = queue_of(world)
    assert len(queue._returned) == MANY
    looked = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal looked
            looked += 1
            return int(self) < int(other)

    queue._returned = [Counted(rank) for rank in queue._returned]
    assert [entry.sequence for entry in queue.peek(10)] == list(range(10))
    assert looked < 400
    assert queue.drop(10) == 10
    assert looked < 1_600
    assert world.move("q", "r", 10) == 10
    assert [entry.sequence for entry in queue.peek(3)] == [20, 21, 22]
    assert world.purge("q") == MANY - 20
    assert (queue.available, queue._returned) == (0, [])


@pytest.mark.parametrize("priorities", [1, 10])
def test_a_purge_leaves_what_comes_while_it_goes_on(priorities: int) -> None:
    world = filled(MANY, priorities=priorities)
    purging = world.host.purging("q")
    assert next(purging) == 500
    for number in range(30):
        world.host.publish("q", Message(number, priority=9).encode())
    assert list(purging)[-1] == MANY
    assert taking(world, credit=MANY).bodies == list(range(30))


def test_messages_that_are_due_at_the_same_time_come_in_turns() -> None:
    world = World(Queue("q"), limits=WIDE)
    for number in range(MANY):
        annotations = {Symbol("x-opt-delivery-delay"): 1_000}
        world.host.publish("q", Message(number, message_annotations=annotations).encode())
    receiver = taking(world, credit=MANY)
    queue = queue_of(world)
    world.time.now += 1
    came = []
    while queue.delayed:
        before = queue.delayed
        world.host.tick()
        came.append(before - queue.delayed)
    turns(world)
    assert max(came) <= WORK_OF_A_TURN
    assert receiver.bodies == list(range(MANY))


def test_deliveries_whose_time_is_up_at_once_are_released_in_turns() -> None:
    world = filled(MANY, lock_s=1)
    receiver = taking(world, credit=MANY)
    queue = queue_of(world)
    world.time.now += 1
    came = []
    while queue.acquired:
        before = queue.acquired
        world.host.tick()
        came.append(before - queue.acquired)
    assert max(came) <= WORK_OF_A_TURN
    assert len(receiver.bodies) == queue.available == MANY


def test_a_large_message_takes_the_room_of_very_many_in_turns() -> None:
    world = filled(MANY, overflow="drop-head", bytes_max=100_000)
    queue = queue_of(world)
    assert queue.available == MANY
    world.host.publish("q", Message(bytes(99_000)).encode())
    assert 1 < MANY - queue.available < 100
    turns(world)
    assert queue.bytes <= 100_000
    (last,) = taking(world, credit=MANY).bodies[-1:]
    assert last == bytes(99_000)


def test_very_many_nodes_are_swept_in_turns() -> None:
    world = World(*(Queue(f"q{number}") for number in range(700)))
    for number in range(700):
        world.host.publish(f"q{number}", Message(1, ttl_s=5).encode())
    queues = [queue_of(world, f"q{number}") for number in range(700)]
    world.time.now += 5
    world.host._alarms.clear()
    world.host.sweep()
    assert 0 < sum(queue.available for queue in queues) < 700
    turns(world)
    assert sum(queue.available for queue in queues) == 0


def test_the_links_of_a_deleted_queue_are_detached_in_turns() -> None:
    world = World(Queue("q"))
    client = world.client()
    receivers = [client.receiver("q") for _ in range(200)]
    world.host.delete("q")
    world.pump()
    assert 0 < sum(receiver.error is not None for receiver in receivers) < 200
    turns(world)
    assert {receiver.error for receiver in receivers} == {"amqp:resource-deleted"}


@pytest.mark.parametrize("drains", [False, True])
def test_very_many_messages_are_delivered_in_turns(drains: bool) -> None:
    world = filled(MANY)
    queue = queue_of(world)
    receiver = world.client().receiver("q")
    receiver.link.grant(2 * MANY)
    if drains:
        receiver.link.drain()
    world.pump()
    assert MANY - 1_100 < queue.available <= MANY - 1_000
    other = world.client().receiver("q", credit=10)
    world.host.publish("q", Message("late").encode())
    assert other.bodies == []
    turns(world)
    assert sorted([*receiver.bodies, *other.bodies], key=str) == sorted(
        [*range(MANY), "late"], key=str
    )
    assert receiver.bodies == [body for body in receiver.bodies if body not in other.bodies]
    assert receiver.link.credit == (0 if drains else 2 * MANY - len(receiver.bodies))
