"""Long work is done in turns, and other work runs between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from brokers import Controller, Receiving, World
from paged import Gate, PagedWorld, world_of

from amqp_rt.broker.nodes import Declaration, Queue, Topic
from amqp_rt.broker.queue.accounts import WORK_OF_A_TURN
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.topics import MessageTopic
from amqp_rt.broker.topology.exchange_addresses import exchange_address
from amqp_rt.core.senders import SenderLink
from amqp_rt.errors import WouldBlock
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Outcome, Rejected, rejected
from amqp_rt.stores.base import StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.transactions import Discharge, TransactionalState
from amqp_rt.values import Symbol

WIDE = Limits(unsettled_max=100_000, session_window=100_000, lease_messages_max=100_000)
#: More than two turns of deliveries.
MANY = 2 * WORK_OF_A_TURN + 500


def queue_of(world: World, address: str = "q") -> MessageQueue:
    held = world.host.space().find(address).held
    assert isinstance(held, MessageQueue)
    return held


def turn(world: World) -> bool:
    """Give one turn to what waits for it; whether something did."""
    waited = bool(world.host.turns.unfinished)
    world.host.turns.run_pending()
    world.pump()
    return waited or bool(world.host.turns.unfinished)


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
        world.host.space().publish("q", Message(number).encode())
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
    assert world.host.space().delete("q") == MANY
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
    world.host.space().declare(Queue("q"))
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
    state = await host.leases.open(host.space().find("q"), "g")

    async def watch(sizes: list[int]) -> None:
        while True:
            sizes.append(queue.acquired)
            await trio.lowlevel.checkpoint()

    sizes: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, sizes)
        state = await host.leases.extend(host.space().find("q"), "g", state.generation, MANY)
        assert (state.first, state.next) == (0, MANY)
        state = await host.leases.accept(
            host.space().find("q"), "g", state.generation, MANY - 1_600
        )
        assert (state.first, queue.acquired) == (MANY - 1_600, 1_600)
        await host.leases.give_back(
            host.space().find("q"), "g", state.generation, [(MANY - 600, MANY)]
        )
        assert (queue.available, queue.acquired) == (600, 1_000)
        nursery.cancel_scope.cancel()
    steps = [abs(later - earlier) for earlier, later in pairwise(sizes)]
    assert max(steps) <= 1_000
    host.memory.work = 100
    await host.leases.release(host.space().find("q"), "g")
    assert 0 < queue.acquired < 1_000
    turns(world)
    assert (queue.available, queue.acquired) == (1_600, 0)
    assert taking(world, credit=MANY).bodies == list(range(MANY - 1_600, MANY))


def test_a_deleted_queue_is_freed_in_turns() -> None:
    world = filled(20_000)
    queue = queue_of(world)
    assert world.host.space().delete("q") == 20_000
    assert world.host.memory.held == 0
    assert not world.host.space().has("q")
    left = len(queue.deferred.trash[0])
    assert left > 20_000 // 128 // 2
    turn(world)
    assert 0 < left - len(queue.deferred.trash[0]) < left
    turns(world)
    assert not queue.deferred.trash


def test_operators_work_follows_what_they_ask_for() -> None:
    world = filled(MANY)
    world.host.space().declare(Queue("r"))
    receiver = taking(world, credit=MANY)
    receiver.detach(closed=True)
    turns(world)
    queue = queue_of(world)
    assert len(queue.shelf.returned) == MANY
    looked = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal looked
            looked += 1
            return int(self) < int(other)

    queue.shelf.returned = [Counted(rank) for rank in queue.shelf.returned]
    assert [entry.sequence for entry in queue.peek(10)] == list(range(10))
    assert looked < 400
    assert queue.drop(10) == 10
    assert looked < 1_600
    assert world.move("q", "r", 10) == 10
    assert [entry.sequence for entry in queue.peek(3)] == [20, 21, 22]
    assert world.purge("q") == MANY - 20
    assert (queue.available, queue.shelf.returned) == (0, [])


@pytest.mark.parametrize("priorities", [1, 10])
def test_a_purge_leaves_what_comes_while_it_goes_on(priorities: int) -> None:
    world = filled(MANY, priorities=priorities)
    purging = world.host.space().find("q").purging()
    assert next(purging) == 500
    for number in range(30):
        world.host.space().publish("q", Message(number, priority=9).encode())
    assert list(purging)[-1] == MANY
    assert taking(world, credit=MANY).bodies == list(range(30))


def test_messages_that_are_due_at_the_same_time_come_in_turns() -> None:
    world = World(Queue("q"), limits=WIDE)
    for number in range(MANY):
        annotations = {Symbol("x-opt-delivery-delay"): 1_000}
        world.host.space().publish("q", Message(number, message_annotations=annotations).encode())
    receiver = taking(world, credit=MANY)
    queue = queue_of(world)
    world.time.now += 1
    came = []
    while queue.delayed:
        before = queue.delayed
        world.host.turns.tick()
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
        world.host.turns.tick()
        world.host.turns.run_pending()
        came.append(before - queue.acquired)
    assert max(came) <= 2 * WORK_OF_A_TURN
    assert len(receiver.bodies) == queue.available == MANY


def test_a_large_message_takes_the_room_of_very_many_in_turns() -> None:
    world = filled(MANY, overflow="drop-head", bytes_max=100_000)
    queue = queue_of(world)
    assert queue.available == MANY
    world.host.space().publish("q", Message(bytes(99_000)).encode())
    assert 1 < MANY - queue.available < 100
    turns(world)
    assert queue.bytes <= 100_000
    (last,) = taking(world, credit=MANY).bodies[-1:]
    assert last == bytes(99_000)


def test_very_many_nodes_are_swept_in_turns() -> None:
    world = World(*(Queue(f"q{number}") for number in range(700)))
    for number in range(700):
        world.host.space().publish(f"q{number}", Message(1, ttl_s=5).encode())
    queues = [queue_of(world, f"q{number}") for number in range(700)]
    world.time.now += 5
    world.host.turns.alarms.clear()
    world.host.sweep()
    assert 0 < sum(queue.available for queue in queues) < 700
    turns(world)
    assert sum(queue.available for queue in queues) == 0


def test_the_links_of_a_deleted_queue_are_detached_in_turns() -> None:
    world = World(Queue("q"))
    client = world.client()
    receivers = [client.receiver("q") for _ in range(200)]
    world.host.space().delete("q")
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
    world.host.space().publish("q", Message("late").encode())
    assert other.bodies == []
    turns(world)
    assert sorted([*receiver.bodies, *other.bodies], key=str) == sorted(
        [*range(MANY), "late"], key=str
    )
    assert receiver.bodies == [body for body in receiver.bodies if body not in other.bodies]
    assert receiver.link.credit == (0 if drains else 2 * MANY - len(receiver.bodies))


def test_consumers_that_cannot_send_leave_their_ring_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(Queue("q"), limits=WIDE)
    receivers = [
        client.receiver("q", credit=10)
        for client in [world.client() for _ in range(3)]
        for _ in range(200)
    ]
    queue = queue_of(world)
    ring = queue.turns.ring
    assert len(ring) == len(receivers)
    queue.memory.work = WORK_OF_A_TURN
    monkeypatch.setattr(SenderLink, "writable", property(lambda self: False))
    world.host.space().publish("q", Message("kept").encode())
    # Each counts for four messages that are examined, and a turn examines twice as many as it has work.
    assert len(ring) == len(receivers) - 2 * WORK_OF_A_TURN // 4
    turns(world)
    assert (len(ring), queue.available) == (0, 1)
    assert all(receiver.bodies == [] for receiver in receivers)


# --- Dead letters --------------------------------------------------------------------------------

#: Queues that each dead letter goes to, and what giving up one message then is worth in a turn.
COPIES = 50
FAN = exchange_address("fan")


class Fan:
    """Leads dead letters for an exchange to so many queues (:class:`~amqp_rt.broker.services.RoutedAddresses`)."""

    def __init__(self, world: World) -> None:
        self.names = [f"copy-{number}" for number in range(COPIES)]
        for name in self.names:
            world.host.space().declare(Queue(name))
        world.host.services.routed_addresses = self

    def dead_letter_nodes(
        self, virtual_host: str, address: str, entry: Any, *, diverted: bool = False
    ) -> list[str] | None:
        return self.names if address == FAN else None

    def drops_dead_letters(self, virtual_host: str, address: str) -> bool:
        return False

    def own_name(self, address: str) -> str:
        return address

    def inlet(self, virtual_host: str, address: str, link: Any) -> None:
        return None

    async def restore(self, journal: Any) -> None:
        """Keep nothing."""

    def sweep(self) -> None:
        """Do nothing."""


def letters(world: World) -> int:
    """How many dead letters have come, in copies."""
    return sum(world.stats(f"copy-{number}").available for number in range(COPIES))


def fanning(count: int, **options: Any) -> tuple[World, MessageQueue]:
    """A queue of so many messages, each of which becomes many dead letters."""
    world = World(limits=WIDE)
    Fan(world)
    world.host.space().declare(Queue("q", dead_letter=FAN, **options))
    for number in range(count):
        world.host.space().publish("q", Message(number).encode())
    return world, queue_of(world)


def most_at_once(world: World, work: Callable[[], None]) -> int:
    """Do *work*, and turns until nothing waits. Returns the most dead letters of one of them."""
    came = []
    before = letters(world)
    work()
    while True:
        came.append(letters(world) - before)
        before += came[-1]
        if not turn(world):
            return max(came)


#: Dead letters that one turn may make, and the one that it ends with.
LETTERS_OF_A_TURN = WORK_OF_A_TURN // 8 + COPIES


@pytest.mark.req("B19")
@pytest.mark.parametrize("outcome", [rejected("no"), MODIFIED_FAILED], ids=["reject", "modify"])
def test_rejects_with_many_dead_letters_are_done_in_turns(outcome: Outcome) -> None:
    world, queue = fanning(100, max_deliveries=1)
    receiver = taking(world, credit=100)
    assert most_at_once(world, lambda: receiver.settle(outcome)) <= LETTERS_OF_A_TURN
    assert letters(world) == 100 * COPIES
    assert (queue.available, queue.acquired) == (0, 0)


@pytest.mark.req("B19")
def test_a_reject_that_waits_for_its_turn_stands_whatever_its_peer_says_then() -> None:
    world, queue = fanning(101)
    receiver = taking(world, credit=100, rcv_settle_mode=RCV_SECOND)
    deliveries = receiver.endpoint.deliveries
    for delivery in deliveries:
        delivery.settle(rejected("no"))
    world.pump()
    waiting = queue.acquired
    assert 0 < waiting < 100
    # Nothing is delivered before them, and the messages do not come back.
    other = world.client().receiver("q", credit=10)
    assert other.bodies == []
    end_by_loss(receiver)
    turns(world)
    assert letters(world) == 100 * COPIES
    assert other.bodies == [100]
    assert queue.acquired == 1


@pytest.mark.req("B19")
@pytest.mark.req("B19")
def test_dead_letters_keep_the_order_of_the_rejects_when_some_wait() -> None:
    world = filled(20, dead_letter="dead")
    receiver = taking(world, credit=20)
    world.host.memory.work = 0
    receiver.settle(rejected("no"), *range(10))
    # An alarm gives the turn new time, before those that wait have had theirs.
    world.host.turns.tick()
    receiver.settle(rejected("no"), *range(10, 20))
    turns(world)
    assert taking(world, "dead", credit=20).bodies == list(range(20))


def test_a_rejecting_peer_hears_of_each_delivery_once_it_has_its_end() -> None:
    world, queue = fanning(100)
    receiver = taking(world, credit=100, rcv_settle_mode=RCV_SECOND)
    for delivery in receiver.endpoint.deliveries:
        delivery.settle(rejected("no"))
    world.pump()
    settled = len(receiver.endpoint.settled)
    assert settled == 100 - queue.acquired
    turns(world)
    assert len(receiver.endpoint.settled) == 100


@pytest.mark.req("B5")
@pytest.mark.parametrize("credit", [0, 500], ids=["sweep", "consumer"])
def test_what_expires_with_many_dead_letters_does_so_in_turns(credit: int) -> None:
    world, queue = fanning(100, ttl_s=1)
    world.host.space().publish("q", Message("later").encode())
    world.time.now += 0.5
    world.host.space().publish("q", Message("stays").encode())
    world.time.now += 0.6

    def expire() -> None:
        if credit:
            taken.append(world.client().receiver("q", credit=credit))
        else:
            world.host.turns.tick()

    taken: list[Receiving] = []
    assert most_at_once(world, expire) <= LETTERS_OF_A_TURN
    while queue.alarm <= world.time.now:
        assert most_at_once(world, world.host.turns.tick) <= LETTERS_OF_A_TURN
    assert letters(world) == 101 * COPIES
    assert queue.counts.expired == 101
    assert [each.bodies for each in taken] == [["stays"]] * len(taken)


@pytest.mark.req("B5")
def test_what_overflows_with_many_dead_letters_does_so_in_turns() -> None:
    world, queue = fanning(0, overflow="drop-head", length_max=10)
    sender = world.client().sender("q")
    assert most_at_once(world, lambda: sender.send(*range(100))) <= LETTERS_OF_A_TURN
    assert letters(world) == 90 * COPIES
    assert [entry.sequence for entry in queue.peek(100)] == list(range(90, 100))


@pytest.mark.req("B5")
def test_a_queue_that_cannot_drop_as_fast_as_messages_come_refuses_some() -> None:
    world, queue = fanning(0, overflow="drop-head", length_max=10)
    sender = world.client().sender("q")
    sender.link.session.limits = WIDE
    for _ in range(15):
        sender.send(*range(100))
    said = {type(each).__name__ for each in sender.outcomes}
    assert said == {"Accepted", "Rejected"}
    assert queue.available <= 1_000 + 10 + 50
    turns(world)
    assert queue.available == 10
    sender.send("again")
    assert sender.outcomes[-1] == ACCEPTED


@pytest.mark.req("B5")
def test_locks_whose_end_makes_many_dead_letters_end_in_turns() -> None:
    world, queue = fanning(100, lock_s=1, max_attempts=1)
    taking(world, credit=100)
    world.time.now += 1
    assert most_at_once(world, world.host.turns.tick) <= LETTERS_OF_A_TURN
    assert letters(world) == 100 * COPIES
    assert queue.acquired == 0


# --- Topics of many subscriptions ----------------------------------------------------------------

SUBSCRIPTIONS = 700


def topic_of(world: World) -> MessageTopic:
    held = world.host.space().find("t").held
    assert isinstance(held, MessageTopic)
    return held


def gathering(world: World, count: int) -> list[MessageQueue]:
    """So many new subscriptions, which gather."""
    return [topic_of(world).open(None)[1] for _ in range(count)]


def held_by(queue: MessageQueue) -> list[Any]:
    return [Message.decode(entry.payload).body for entry in queue.peek(100)]


@pytest.mark.req("B5", "M2")
def test_a_message_for_many_subscriptions_is_handed_out_in_turns_and_in_order() -> None:
    world = World(Topic("t"), limits=WIDE)
    queues = gathering(world, SUBSCRIPTIONS)
    sender = world.client().sender("t")
    came = [0]
    sender.send(0, 1, 2)
    assert sender.outcomes == [ACCEPTED] * 3
    assert world.stats("t").enqueued == 3
    while True:
        came.append(world.stats("t").available)
        if not turn(world):
            break
    assert max(later - earlier for earlier, later in pairwise(came)) <= WORK_OF_A_TURN // 4
    assert [held_by(queue) for queue in queues] == [[0, 1, 2]] * SUBSCRIPTIONS
    assert world.host.memory.held == world.stats("t").bytes


@pytest.mark.req("B19", "M2")
def test_a_message_that_is_being_handed_out_is_for_those_that_were_there() -> None:
    world = World(Topic("t"), limits=WIDE)
    queues = gathering(world, SUBSCRIPTIONS)
    receiver = world.client().receiver("t", credit=10)
    leaver = world.client().receiver("t", credit=10)
    sender = world.client().sender("t")
    sender.send("first")
    turn(world)
    assert receiver.bodies == []
    late = world.client().receiver("t", credit=10)
    end_by_loss(leaver)
    sender.send("second")
    turns(world)
    assert receiver.bodies == ["first", "second"]
    assert late.bodies == ["second"]
    assert leaver.bodies == []
    assert {tuple(held_by(queue)) for queue in queues} == {("first", "second")}


@pytest.mark.req("B5")
def test_very_many_subscriptions_that_end_at_once_are_freed_in_turns() -> None:
    world = World(Topic("t"), limits=WIDE)
    client = world.client()
    for _ in range(200):
        client.receiver("t")
    world.host.space().publish("t", Message("m").encode())
    turns(world)
    held = world.host.memory.held
    world.host.memory.work = WORK_OF_A_TURN
    client.cut()
    assert world.stats("t").consumers == world.stats("t").available == 0
    assert 0 < world.host.memory.held < held
    world.host.space().publish("t", Message("nobody has it").encode())
    turns(world)
    assert world.host.memory.held == 0


@pytest.mark.req("B5")
@pytest.mark.parametrize("fails", [False, True], ids=["deleted", "failed"])
def test_a_topic_ends_while_messages_are_handed_out(fails: bool) -> None:
    world = World(Topic("t"), limits=WIDE)
    gathering(world, SUBSCRIPTIONS)
    receiver = world.client().receiver("t", credit=10)
    world.client().sender("t").send(*range(5))
    turn(world)
    if fails:
        world.host.fail(topic_of(world), ValueError("on purpose"))
        world.pump()
    else:
        world.host.space().delete("t")
    turns(world)
    assert receiver.bodies == []
    assert receiver.error == ("amqp:internal-error" if fails else "amqp:resource-deleted")
    if not fails:
        assert world.host.memory.held == 0


@pytest.mark.req("B5")
def test_a_topic_is_deleted_while_queues_of_ended_subscriptions_are_freed() -> None:
    world = World(Topic("t"), limits=WIDE)
    receivers = [world.client().receiver("t") for _ in range(60)]
    world.client().sender("t").send(*range(10))
    turns(world)
    world.host.memory.work = 0
    for receiver in receivers[:5]:
        receiver.detach(closed=True)
    assert topic_of(world)._ended
    world.host.space().delete("t")
    turns(world)
    assert world.host.memory.held == 0


@pytest.mark.req("B5")
def test_a_topic_may_be_deleted_because_a_slow_subscriber_is_given_up() -> None:
    world = World(Topic("t", backlog_max=1), limits=WIDE)
    topic = topic_of(world)
    slow, *_ = gathering(world, SUBSCRIPTIONS)
    (identity, *_) = topic._queues
    topic.on_end_slow[identity] = lambda error: world.host.space().delete("t") and None
    world.host.space().publish("t", Message(0).encode())
    slow.put(topic._passing[0].entry.copy_for_node())
    turns(world)
    assert not world.host.space().has("t")
    assert world.host.memory.held == 0


@pytest.mark.slow
@pytest.mark.req("B5")
def test_messages_that_wait_to_be_handed_out_are_bounded() -> None:
    world = World(Topic("t", backlog_max=20), limits=WIDE)
    topic = topic_of(world)
    queues = gathering(world, SUBSCRIPTIONS)
    sender = world.client().sender("t")
    room = topic.room()
    for number in range(20):
        assert topic.room() > 20
        world.host.space().publish("t", Message(number).encode())
    assert topic.room() == 0
    with pytest.raises(WouldBlock):
        world.host.space().publish("t", Message("more").encode())
    # Credit that was promised before is honoured, and no more is given.
    sender.send(*range(20, 30))
    assert sender.outcomes == [ACCEPTED] * 10
    other = world.client().sender("t")
    assert other.link.credit == 0
    while turn(world):
        for queue in queues:
            queue.drop(100)
    assert topic.room() == room
    assert other.link.credit > 0


@pytest.mark.req("B5")
def test_filters_of_subscriptions_count_for_their_work() -> None:
    class Matching:
        asked = 0
        work = 100

        def matches(self, entry: Any, publisher: Any) -> bool:
            self.asked += 1
            return True

    world = World(Topic("t"), limits=WIDE)
    filters = Matching()
    for _ in range(300):
        topic_of(world).open(filters)
    world.host.space().publish("t", Message("m").encode())
    most = 0
    while filters.asked < 300:
        before = filters.asked
        turn(world)
        most = max(most, filters.asked - before)
    assert 0 < most <= 1 + WORK_OF_A_TURN // 100


def test_very_many_subscriptions_are_swept_in_turns() -> None:
    world = World(Topic("t", ttl_s=1), limits=WIDE)
    queues = gathering(world, SUBSCRIPTIONS)
    world.host.space().publish("t", Message("m").encode())
    turns(world)
    world.time.now += 2
    topic_of(world).sweep()
    assert [queue.available for queue in queues] == [1] * SUBSCRIPTIONS
    turn(world)
    assert 0 < sum(queue.available for queue in queues) < SUBSCRIPTIONS
    turns(world)
    assert sum(queue.available for queue in queues) == 0


LASTING: dict[str, Any] = {"expiry_policy": "never", "timeout": 1_000, "durable": 2}


@pytest.mark.req("B4", "B7")
async def test_a_message_for_many_durable_subscriptions_is_accepted_when_all_have_it() -> None:
    count = 60
    gate = Gate()
    world = PagedWorld(MemoryStore(), WIDE)
    journal = world.host.journal
    assert journal is not None
    journal.call = gate
    await world.host.restore()
    world.host.space().declare(Topic("t"))
    client = world.client("c")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        for number in range(count):
            client.receiver("t", name=f"s{number}", **LASTING)
        await world.settle()
        sender = world.client().sender("t")
        gate.opened = trio.Event()
        sender.send(*range(30), durable=True)
        sender.send("other")
        topic = topic_of(world)
        # Only some of them have their places by now, and nothing is seen of any.
        assert topic.staging
        assert topic.available == 0
        await trio.testing.wait_all_tasks_blocked()
        assert not topic.staging
        assert topic.available == 0
        assert sender.outcomes == []
        gate.opened.set()
        await world.settle()
        assert sender.outcomes == [ACCEPTED] * 31
        for queue in topic.queues:
            assert held_by(queue) == [*range(30), "other"]
        nursery.cancel_scope.cancel()
    await world.host.close()


async def subscribed(world: PagedWorld, count: int) -> MessageTopic:
    """The topic, which has so many durable subscriptions."""
    client = world.client("c")
    for number in range(count):
        client.receiver("t", name=f"s{number}", **LASTING)
    await world.settle()
    return topic_of(world)


@pytest.mark.req("B5")
@pytest.mark.parametrize("fails", [False, True], ids=["kept", "failed"])
async def test_messages_that_wait_to_be_stored_take_room(fails: bool) -> None:
    async with world_of(MemoryStore(), Topic("t"), limits=WIDE) as world:
        topic = await subscribed(world, 3)
        sender = world.client().sender("t")
        world.host.memory.work = 0
        sender.send(*[bytes(10_000)] * 20, durable=True)
        assert topic.staging
        assert world.host.memory.held > 200_000
        if fails:
            world.host.fail(topic, ValueError("on purpose"))
        await world.settle()
        assert not topic.staging
        if not fails:
            assert topic.available == 60
            assert world.host.memory.held == topic.bytes


@pytest.mark.req("B7")
async def test_a_broker_that_stops_stores_what_waits_for_its_turn() -> None:
    store = MemoryStore()
    world = PagedWorld(store, WIDE)
    await world.host.restore()
    world.host.space().declare(Topic("t"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        await world.settle()
        topic = await subscribed(world, 3)
        world.host.memory.work = 0
        world.host.space().publish("t", Message("kept", durable=True).encode())
        assert topic.staging
        nursery.cancel_scope.cancel()
    await world.host.close()
    async with world_of(store, limits=WIDE) as again:
        assert [held_by(queue) for queue in topic_of(again).queues] == [["kept"]] * 3


@pytest.mark.req("B4")
async def test_a_topic_has_so_many_durable_subscriptions() -> None:
    limits = Limits(stored_subscriptions_max=3)
    async with world_of(MemoryStore(), Topic("t"), limits=limits) as world:
        client = world.client("c")
        for number in range(3):
            assert client.receiver("t", name=f"s{number}", **LASTING).error is None
        assert client.receiver("t", name="s3", **LASTING).error == "amqp:resource-limit-exceeded"
        # Others are not counted, and those that are there come back.
        assert client.receiver("t").error is None
        again = world.client("d").receiver("t", name="s", expiry_policy="never", timeout=9)
        assert again.error is None
        client.cut()
        assert world.client("c").receiver("t", name="s2", **LASTING).error is None


# --- Transactions --------------------------------------------------------------------------------

POSTS = 1_200


def posting(world: World, *addresses: str, count: int = POSTS, **options: Any) -> Posting:
    """A transaction that has so many posts, spread over *addresses*."""
    return Posting(world, addresses or ("q",), count, **options)


class Posting:
    def __init__(
        self, world: World, addresses: tuple[str, ...], count: int, **options: Any
    ) -> None:
        self.client = world.client()
        self.control = Controller(self.client)
        self.txn_id = self.control.declare()
        fields = options.pop("fields", {})
        self.senders = [self.client.sender(address, **options) for address in addresses]
        for number in range(count):
            sender = self.senders[number % len(addresses)]
            sender.link.send(
                Message(number, **fields).encode(), state=TransactionalState(self.txn_id)
            )
            if not number % 100:
                world.pump()
        world.pump()

    def discharge(self) -> Any:
        """Commit. Returns what says whether that is done."""
        return self.control.link.send(Message(Discharge(self.txn_id)).encode())


@pytest.mark.req("R3", "B5")
def test_what_was_posted_is_there_at_once_and_delivered_in_turns() -> None:
    world = World(Queue("a"), Queue("b"), limits=WIDE)
    receivers = [world.client().receiver(name, credit=10_000) for name in "ab"]
    browser = world.client().receiver("a", credit=10_000, distribution_mode="copy")
    posted = posting(world, "a", "b")
    said = posted.discharge()
    world.pump()
    assert said.state == ACCEPTED
    # All of it in both, and nothing of it delivered before.
    assert [queue_of(world, name).available for name in "ab"] == [POSTS // 2] * 2
    assert [each.bodies for each in [*receivers, browser]] == [[], [], []]
    # Later messages are behind all of them, and a drain waits for them.
    world.client().sender("a").send("later")
    receivers[0].link.drain()
    world.pump()
    assert receivers[0].link.credit == 10_000
    turns(world)
    assert receivers[0].bodies == browser.bodies == [*range(0, POSTS, 2), "later"]
    assert receivers[1].bodies == list(range(1, POSTS, 2))
    assert receivers[0].link.credit == 0


@pytest.mark.req("R3")
def test_a_controller_that_goes_while_what_it_posted_is_delivered_changes_nothing() -> None:
    world = World(Queue("q"), limits=WIDE)
    receiver = world.client().receiver("q", credit=10_000)
    posted = posting(world)
    posted.discharge()
    world.pump()
    posted.client.cut()
    turns(world)
    assert receiver.bodies == list(range(POSTS))
    assert len(world.host.transactions) == 0


@pytest.mark.req("R3", "B5")
def test_posts_whose_senders_wait_are_answered_in_turns() -> None:
    world = World(Queue("q"), limits=WIDE)
    posted = posting(world, rcv_settle_mode=RCV_SECOND)
    (sender,) = posted.senders
    said = posted.discharge()
    world.pump()
    assert said.state == ACCEPTED

    def accepted() -> int:
        return len({each.tag for each in sender.endpoint.outcomes if each.state == ACCEPTED})

    assert accepted() <= WORK_OF_A_TURN
    turns(world)
    assert accepted() == POSTS


def retiring(world: World, outcome: Outcome) -> tuple[Posting, Receiving]:
    """A transaction in which all messages that a consumer has get *outcome*."""
    posted = posting(world, count=0)
    receiver = posted.client.receiver("q", credit=MANY, rcv_settle_mode=RCV_SECOND)
    turns(world)
    for delivery in receiver.endpoint.deliveries:
        delivery.update(TransactionalState(posted.txn_id, outcome))
    world.pump()
    return posted, receiver


@pytest.mark.slow
@pytest.mark.req("R4", "B5")
@pytest.mark.parametrize("end", [None, end_by_detach, end_by_end, end_by_loss])
@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED, rejected("no")], ids=str)
def test_what_was_retired_ends_as_discharged_whatever_its_consumer_does(
    outcome: Outcome, end: Callable[[Receiving], None] | None
) -> None:
    world = filled(MANY, dead_letter="dead")
    posted, receiver = retiring(world, outcome)
    queue = queue_of(world)
    assert queue.acquired == MANY
    receiver.grant(0)
    other = world.client().receiver("q")
    said = posted.discharge()
    world.pump()
    assert said.state == ACCEPTED
    assert queue.acquired >= MANY - WORK_OF_A_TURN
    other.grant(MANY)
    assert other.bodies == []
    if end is not None:
        end(receiver)
    if end in (None, end_by_detach):
        assert posted.control.discharge(posted.txn_id) == "amqp:transaction:unknown-id"
    turns(world)
    assert queue.counts.accepted == (MANY if outcome == ACCEPTED else 0)
    assert other.bodies == (list(range(MANY)) if outcome == RELEASED else [])
    assert queue.counts.dead_lettered == (MANY if isinstance(outcome, Rejected) else 0)
    assert world.stats("q").available == 0


async def test_an_outcome_right_after_the_discharge_is_heard() -> None:
    world = filled(500)
    posted = posting(world, count=0)
    receiver = posted.client.receiver("q")
    receiver.link.grant(500, properties={"txn-id": posted.txn_id})
    world.pump()
    turns(world)
    world.host.memory.work = 0
    posted.discharge()
    world.pump()
    receiver.settle(ACCEPTED)
    turns(world)
    assert queue_of(world).counts.accepted == 500


@asynccontextmanager
async def gated(*declared: Declaration, limits: Limits = WIDE) -> AsyncIterator[tuple[Any, Gate]]:
    """A world whose store writes when its gate is open."""
    gate = Gate()
    async with world_of(MemoryStore(), *declared, limits=limits) as world:
        world.host.journal.call = gate
        yield world, gate
        gate.opened.set()


@pytest.mark.req("R3", "B5", "B7")
@pytest.mark.parametrize("happens", ["nothing", "loss", "discharge", "delete"])
async def test_a_large_transaction_is_written_in_turns_and_seen_when_it_is_kept(
    happens: str,
) -> None:
    async with gated(Queue("a"), Queue("b")) as (world, gate):
        receivers = [world.client().receiver(name, credit=10_000) for name in "ab"]
        await world.settle()
        posted = posting(world, "a", "b", fields={"durable": True})
        await world.settle()
        gate.opened = trio.Event()
        said = posted.discharge()
        world.pump()
        steps = 0
        while steps < 20:
            # The message is assembled in turns, between which others have theirs.
            await trio.lowlevel.checkpoint()
            steps += 1
            assert [each.bodies for each in receivers] == [[], []]
            assert [world.queue(name).available for name in "ab"] == [0, 0]
        if happens == "loss":
            posted.client.cut()
        elif happens == "discharge":
            assert posted.control.discharge(posted.txn_id) == "amqp:transaction:unknown-id"
        elif happens == "delete":
            world.host.space().delete("b")
        # Messages that arrive in the meantime do not overtake it.
        sender = world.client().sender("a")
        sender.send("later")
        world.pump()
        assert sender.outcomes == []
        gate.opened.set()
        await world.settle()
        assert receivers[0].bodies == [*range(0, POSTS, 2), "later"]
        assert receivers[1].bodies == ([] if happens == "delete" else list(range(1, POSTS, 2)))
        if happens != "loss":
            assert said.state == ACCEPTED


@pytest.mark.slow
@pytest.mark.req("R3", "B7")
@pytest.mark.parametrize("kept", [False, True])
async def test_a_crash_leaves_all_of_a_large_transaction_or_nothing(kept: bool) -> None:
    store = MemoryStore()
    gate = Gate()
    world = PagedWorld(store, WIDE)
    assert world.host.journal is not None
    await world.host.restore()
    world.host.space().declare(Queue("a"))
    world.host.space().declare(Queue("b"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.journal.run)
        await world.settle()
        posted = posting(world, "a", "b", fields={"durable": True})
        await world.settle()
        world.host.journal.call = gate
        gate.opened = trio.Event()
        posted.discharge()
        world.pump()
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        if kept:
            gate.opened.set()
            await trio.testing.wait_all_tasks_blocked()
        left = deepcopy(store)
        left.close()
        gate.opened.set()
        nursery.cancel_scope.cancel()
    async with world_of(left, limits=WIDE) as again:
        assert [again.queue(name).available for name in "ab"] == [POSTS // 2 * kept] * 2


@pytest.mark.req("R3")
async def test_a_large_transaction_that_the_store_refuses_has_not_happened() -> None:
    class Full(MemoryStore):
        full = False

        def commit(self, batch: Any) -> None:
            if self.full and batch.size:
                raise StoreFull("the disk is full")
            super().commit(batch)

    store = Full()
    async with world_of(store, Queue("q"), limits=WIDE) as world:
        receiver = world.client().receiver("q", credit=10_000)
        posted = posting(world, fields={"durable": True})
        await world.settle()
        store.full = True
        said = posted.discharge()
        await world.settle()
        store.full = False
        assert isinstance(said.state, Rejected)
        assert world.host.memory.held == 0
        await world.put("after")
        assert receiver.bodies == ["after"]


@pytest.mark.req("R4", "B5")
async def test_a_transaction_makes_so_many_dead_letters() -> None:
    limits = Limits(transaction_work_max=40, unsettled_max=1_000)
    for count, condition in ((10, "accepted"), (11, "amqp:transaction:rollback")):
        async with world_of(MemoryStore(), Queue("q", dead_letter="dead"), limits=limits) as world:
            await world.put(*range(count))
            posted = posting(world, count=0)
            receiver = posted.client.receiver("q", credit=count)
            await world.settle()
            for delivery in receiver.endpoint.deliveries:
                delivery.update(TransactionalState(posted.txn_id, rejected("no")))
            world.pump()
            said = posted.discharge()
            await world.settle()
            done = condition == "accepted"
            assert isinstance(said.state, Rejected) != done
            assert world.queue("dead").available == (count if done else 0)
            assert world.queue().acquired == (0 if done else count)


@pytest.mark.req("R3", "B19")
@pytest.mark.parametrize("happens", ["nothing", "loss", "delete", "fail"])
async def test_a_transaction_is_behind_messages_that_wait_for_their_turn_at_a_topic(
    happens: str,
) -> None:
    async with world_of(MemoryStore(), Topic("t"), Queue("q"), limits=WIDE) as world:
        topic = await subscribed(world, 3)
        client = world.client()
        control = Controller(client)
        txn_id = control.declare()
        sender = client.sender("t")
        queueing = client.sender("q")
        world.host.memory.work = 0
        sender.send("before", durable=True)
        sender.post(txn_id, "posted", durable=True)
        queueing.post(txn_id, "posted", durable=True)
        said = control.link.send(Message(Discharge(txn_id)).encode())
        sender.send("after", durable=True)
        assert topic.staging
        assert said.state is None
        if happens == "loss":
            client.cut()
        elif happens == "delete":
            world.host.space().delete("t")
        elif happens == "fail":
            world.host.fail(topic, ValueError("on purpose"))
        await world.settle()
        committed = happens in ("nothing", "loss")
        if committed:
            found = [held_by(queue) for queue in topic.queues]
            assert found == [["before", "posted", "after"]] * 3
        if happens != "loss":
            assert isinstance(said.state, Rejected) != committed
        assert world.queue().available == committed
        assert world.queue().held == 0


@pytest.mark.req("R3", "B5")
async def test_posts_that_are_not_stored_are_delivered_in_turns_too() -> None:
    async with world_of(MemoryStore(), Queue("q"), limits=WIDE) as world:
        receiver = world.client().receiver("q", credit=10_000)
        await world.settle()
        posted = posting(world)
        await world.settle()
        queue = world.queue()
        delivered = [0]
        posted.discharge()
        world.pump()
        for _ in range(100):
            world.pump()
            await trio.lowlevel.checkpoint()
            delivered.append(queue.counts.delivered)
        assert delivered[-1] == POSTS
        assert max(later - earlier for earlier, later in pairwise(delivered)) < 1_100
        await world.settle()
        assert receiver.bodies == list(range(POSTS))


@pytest.mark.req("R3")
def test_consumers_with_credit_get_what_a_drop_head_queue_would_drop() -> None:
    world = World(Queue("q", overflow="drop-head", length_max=10), limits=WIDE)
    receiver = world.client().receiver("q", credit=10_000)
    posted = posting(world)
    posted.discharge()
    world.pump()
    turns(world)
    assert receiver.bodies == list(range(POSTS))
    receiver.settle(ACCEPTED)
    receiver.grant(0)
    posting(world).discharge()
    world.pump()
    turns(world)
    assert queue_of(world).available == 10


@pytest.mark.req("R4", "B4")
async def test_a_post_counts_for_subscriptions_that_come_before_the_discharge() -> None:
    limits = Limits(transaction_work_max=7)
    async with world_of(MemoryStore(), Topic("t"), limits=limits) as world:
        posted = posting(world, "t", count=4, fields={"durable": True})
        topic = await subscribed(world, 3)
        said = posted.discharge()
        await world.settle()
        assert isinstance(said.state, Rejected)
        assert topic.available == 0
        assert world.host.memory.held == 0


@pytest.mark.req("R4", "B4")
async def test_a_post_counts_for_each_durable_subscription() -> None:
    limits = Limits(transaction_work_max=7)
    async with world_of(MemoryStore(), Topic("t"), limits=limits) as world:
        client = world.client("c")
        for number in range(3):
            client.receiver("t", name=f"s{number}", **LASTING)
        await world.settle()
        posted = posting(world, "t", count=4, fields={"durable": True})
        states = [state.outcome for state in posted.senders[0].outcomes]
        assert states[:3] == [ACCEPTED] * 3
        assert isinstance(states[3], Rejected)
