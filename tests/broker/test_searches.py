"""Filters examine messages in turns: each examines as much as the work of a turn allows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from brokers import Controller, Receiving, World
from paged import PagedWorld, world_of

from amqp_rt.broker.durable.ledgers import QueueLedger
from amqp_rt.broker.entries import Entry
from amqp_rt.broker.log.log import MessageLog
from amqp_rt.broker.log.reading import LogReader
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.broker.queue.accounts import WORK_OF_A_TURN
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.subscriptions import Subscription
from amqp_rt.broker.topics import MessageTopic, TopicLedger
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Outcome, Rejected, rejected
from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.termini import COPY
from amqp_rt.transactions import Discharge, TransactionalState
from amqp_rt.values import Described, Symbol

WIDE = Limits(unsettled_max=100_000, session_window=100_000)

#: Messages that costly filters examine in a turn, at most.
PER_TURN = 4


class Costly:
    """Filters that want the messages with one of *bodies*, at a quarter of a turn for each."""

    def __init__(self, *bodies: object) -> None:
        self.work = WORK_OF_A_TURN // PER_TURN + 1
        self.payloads = [Message(body).encode() for body in bodies]
        self.asked = 0

    def matches(self, entry: Entry, publisher: object) -> bool:
        self.asked += 1
        return bytes(entry.payload)[-8:] in [payload[-8:] for payload in self.payloads]


def queue_of(world: World, address: str = "q") -> MessageQueue:
    held = world.host.space().find(address).held
    assert isinstance(held, MessageQueue)
    return held


def topic_of(world: World) -> MessageTopic:
    held = world.host.space().find("t").held
    assert isinstance(held, MessageTopic)
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


def fill(world: World, count: int, address: str = "q") -> None:
    for number in range(count):
        world.host.space().publish(address, Message(f"{number:06}").encode())
    world.pump()


def named(*numbers: int) -> list[str]:
    return [f"{number:06}" for number in numbers]


def searching(world: World, *numbers: int, **options: Any) -> tuple[Receiving, Costly]:
    """A receiver without credit whose costly filters want the messages of these *numbers*."""
    address = options.pop("address", "q")
    receiver = world.client().receiver(
        address,
        filter={Symbol("n"): Described(Symbol("amqp:false-filter"), None)},
        **options,
    )
    assert receiver.link.attached
    queue = queue_of(world, address)
    subscriptions: dict[int, Subscription] = queue.consumers | queue.browsers
    subscription = subscriptions[max(subscriptions)]
    subscription.filters = filters = Costly(*named(*numbers))
    return receiver, filters


def asked_in_a_turn(world: World, *filters: Costly) -> list[int]:
    """Give one turn; how many messages each of *filters* has examined in it."""
    before = [each.asked for each in filters]
    turn(world)
    return [each.asked - asked for each, asked in zip(filters, before, strict=True)]


@pytest.mark.req("M27", "X16")
@pytest.mark.parametrize("mode", [None, COPY], ids=["consumer", "browser"])
def test_a_search_ends_with_the_work_of_a_turn_and_continues_in_the_next(mode: Any) -> None:
    world = World(Queue("q"))
    fill(world, 40)
    receiver, filters = searching(world, 3, 21, 39, distribution_mode=mode)
    receiver.grant(10)
    assert filters.asked <= PER_TURN
    examined = filters.asked
    while turn(world):
        assert filters.asked - examined <= PER_TURN
        examined = filters.asked
    assert receiver.bodies == named(3, 21, 39)
    assert filters.asked == 40


@pytest.mark.req("M27", "X16")
def test_filters_that_cost_little_examine_more_in_a_turn() -> None:
    world = World(Queue("q"))
    fill(world, 400)
    receiver, filters = searching(world)
    filters.work = 1
    receiver.grant(1)
    assert filters.asked == 400


def credit_is_withdrawn(world: World, receiver: Receiving) -> None:
    receiver.link.grant(0)
    world.pump()


def consumer_is_detached(world: World, receiver: Receiving) -> None:
    receiver.detach(closed=True)


def connection_is_lost(world: World, receiver: Receiving) -> None:
    for client in world.clients:
        if client.session is receiver.link.session:
            client.cut()
            return


def messages_are_purged(world: World, receiver: Receiving) -> None:
    world.purge("q")


def messages_are_taken(world: World, receiver: Receiving) -> None:
    world.client().receiver("q", credit=30, settle=ACCEPTED)


def messages_arrive(world: World, receiver: Receiving) -> None:
    fill(world, 5)


def queue_is_deleted(world: World, receiver: Receiving) -> None:
    world.host.space().delete("q")
    world.pump()


CHANGES = [
    credit_is_withdrawn,
    consumer_is_detached,
    connection_is_lost,
    messages_are_purged,
    messages_are_taken,
    messages_arrive,
    queue_is_deleted,
]


@pytest.mark.req("M27", "X16")
@pytest.mark.parametrize("mode", [None, COPY], ids=["consumer", "browser"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("drains", [False, True], ids=["", "drains"])
def test_the_state_may_change_between_two_turns_of_a_search(
    change: Callable[[World, Receiving], None], mode: Any, drains: bool
) -> None:
    world = World(Queue("q"))
    fill(world, 40)
    receiver, filters = searching(world, 2, 39, distribution_mode=mode)
    receiver.link.grant(10)
    if drains:
        receiver.link.drain()
    world.pump()
    assert receiver.bodies == named(2)
    assert filters.asked < 40
    if drains:
        assert receiver.link.credit == 9
    change(world, receiver)
    examined = filters.asked
    turns(world)
    ended = change in (consumer_is_detached, connection_is_lost, queue_is_deleted)
    if ended or change is credit_is_withdrawn:
        assert filters.asked <= examined + 1
        assert receiver.bodies == named(2)
    elif change is messages_are_purged:
        assert receiver.bodies == named(2)
    else:
        # Another message with the number 2 arrives.
        assert receiver.bodies == named(2, 39, *([2] if change is messages_arrive else []))
    if drains and not ended:
        assert receiver.link.credit == 0
    world.check()


@pytest.mark.req("M27", "X16")
@pytest.mark.parametrize("mode", [None, COPY], ids=["consumer", "browser"])
def test_a_drain_is_answered_when_the_search_is_through(mode: Any) -> None:
    world = World(Queue("q"))
    fill(world, 40)
    receiver, filters = searching(world, distribution_mode=mode)
    receiver.link.grant(5)
    receiver.link.drain()
    world.pump()
    while filters.asked < 40:
        assert receiver.link.credit == 5
        turn(world)
    assert receiver.link.credit == 0
    assert turns(world) <= 1


@pytest.mark.req("M27", "B5", "X16")
def test_others_are_served_while_a_search_goes_on() -> None:
    world = World(Queue("q"), Queue("other"))
    fill(world, 100)
    receiver, filters = searching(world, 99)
    receiver.grant(1)
    plain = world.client().receiver("q", credit=20, settle=ACCEPTED)
    assert plain.bodies == named(*range(20))
    world.host.space().publish("other", Message("o").encode())
    assert world.client().receiver("other", credit=1).bodies == ["o"]
    assert filters.asked <= PER_TURN
    turns(world)
    assert receiver.bodies == named(99)


@pytest.mark.req("M27", "X16")
@pytest.mark.parametrize(
    ("first", "second"), [(None, None), (COPY, COPY), (COPY, None), (None, COPY)], ids=repr
)
def test_two_searches_take_turns(first: Any, second: Any) -> None:
    world = World(Queue("q"))
    fill(world, 40)
    one, filters = searching(world, 38, distribution_mode=first)
    other, others = searching(world, 39, distribution_mode=second)
    one.grant(1)
    other.grant(1)
    while filters.asked < 30 and others.asked < 30:
        asked_in_a_turn(world, filters, others)
        assert abs(filters.asked - others.asked) <= 2 * PER_TURN
    turns(world)
    assert (one.bodies, other.bodies) == (named(38), named(39))


@pytest.mark.req("M27", "X16")
def test_searches_in_two_queues_take_turns() -> None:
    world = World(Queue("q"), Queue("other"))
    fill(world, 40)
    fill(world, 40, "other")
    one, filters = searching(world)
    other, others = searching(world, address="other")
    one.grant(1)
    other.grant(1)
    while filters.asked < 40 or others.asked < 40:
        assert sum(asked_in_a_turn(world, filters, others)) <= 2 * PER_TURN
        assert abs(filters.asked - others.asked) <= 2 * PER_TURN


@pytest.mark.req("M27", "M22", "X16")
def test_requeued_messages_are_examined_in_turns_and_in_order() -> None:
    world = World(Queue("q"))
    fill(world, 40)
    before = world.client().receiver("q", credit=30)
    receiver, filters = searching(world, 5, 25, 35)
    before.settle(RELEASED)
    assert filters.asked == 0
    receiver.grant(10)
    examined = 0
    while True:
        assert filters.asked - examined <= PER_TURN
        examined = filters.asked
        if not turn(world):
            break
    assert receiver.bodies == named(5, 25, 35)
    assert filters.asked == 40
    world.check()


@pytest.mark.req("M22", "M27", "B5")
def test_a_requeued_message_does_not_overtake_those_not_examined_yet() -> None:
    world = World(Queue("q"))
    fill(world, 40)
    first, _ = searching(world, 30)
    first.grant(1)
    turns(world)
    assert first.bodies == named(30)
    receiver, filters = searching(world, 20, 30)
    first.settle(RELEASED)
    first.detach(closed=True)
    receiver.grant(2)
    assert 0 < filters.asked < 20
    turns(world)
    assert receiver.bodies == named(20, 30)


@pytest.mark.req("M27", "X16")
def test_attaching_to_many_messages_of_priorities_examines_them_in_turns() -> None:
    world = World(Queue("q", priorities=10))
    fill(world, 40)
    receiver, filters = searching(world, 7, 33)
    assert filters.asked == 0
    receiver.grant(5)
    examined = 0
    while turn(world):
        assert filters.asked - examined <= 2 * PER_TURN
        examined = filters.asked
    assert receiver.bodies == named(7, 33)
    assert filters.asked == 40
    # Messages that the consumer has examined are not examined again.
    fill(world, 1)
    turns(world)
    assert filters.asked == 41
    assert world.client().receiver("q", credit=99).bodies == named(
        *(number for number in range(40) if number not in (7, 33)), 0
    )


@pytest.mark.req("M27", "X16")
def test_messages_that_arrive_are_examined_as_far_as_a_turn_allows() -> None:
    world = World(Queue("q"))
    receiver, filters = searching(world, 20)
    receiver.grant(1)
    sender = world.client().sender("q")
    sender.send(*named(*range(25)), settled=True)
    assert filters.asked <= PER_TURN
    turns(world)
    assert receiver.bodies == named(20)
    assert filters.asked <= 22


@pytest.mark.req("M27", "X16")
def test_very_many_searches_are_passed_over_in_turns() -> None:
    world = World(Queue("q"), limits=WIDE)
    queue = queue_of(world)
    client = world.client()
    for _ in range(200):
        client.receiver(
            "q", filter={Symbol("n"): Described(Symbol("amqp:false-filter"), None)}, credit=1
        )
    everything = []
    for consumer in queue.consumers.values():
        consumer.filters = Costly()
        everything.append(consumer.filters)
    world.host.memory.work = WORK_OF_A_TURN
    fill(world, 1)
    # Each is passed over at a cost, and has its turn at last.
    assert world.host.memory.work < 0
    while turn(world):
        assert world.host.memory.work >= -2 * WORK_OF_A_TURN
    assert [each.asked for each in everything[1:]] == [1] * 199


@pytest.mark.req("M27", "X16")
def test_empty_places_are_passed_over_in_turns() -> None:
    world = World(Queue("q"), limits=WIDE)
    fill(world, 500)
    first = world.client().receiver("q", credit=1)
    assert first.bodies == named(0)
    taken = world.client().receiver("q", credit=498, settle=ACCEPTED)
    assert len(taken.bodies) == 498
    first.settle(RELEASED)
    first.detach()
    browser, filters = searching(world, 0, 499, distribution_mode=COPY)
    browser.grant(5)
    turns(world)
    assert browser.bodies == named(0, 499)
    assert filters.asked == 2


@pytest.mark.req("M27", "X16")
async def test_messages_in_the_store_are_examined_in_turns() -> None:
    async with world_of(MemoryStore(), Queue("q")) as world:
        await world.put(*named(*range(60)))
        assert queue_of(world).paging.count
        receiver, filters = searching(world, 5, 55)
        receiver.link.grant(5)
        receiver.link.drain()
        world.pump()
        await world.settle()
        assert receiver.bodies == named(5, 55)
        assert receiver.link.credit == 0
        assert filters.asked == 60


# --- Logs --------------------------------------------------------------------------------------


def reading(world: World, *numbers: int, **options: Any) -> tuple[Receiving, Costly]:
    """A reader of the log from its first record, whose costly filters want these *numbers*."""
    first = Described(Symbol("rabbitmq:stream-offset-spec"), "first")
    receiver = world.client().receiver(
        "log", filter={Symbol("rabbitmq:stream-offset-spec"): first}, **options
    )
    log = world.host.space().find("log").held
    assert isinstance(log, MessageLog)
    reader: LogReader = list(log.readers)[-1]
    reader.filters = filters = Costly(*named(*numbers))
    return receiver, filters


@pytest.mark.req("X16")
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_reader_of_a_log_examines_records_in_turns(partitions: int) -> None:
    world = World(Log("log", partitions=partitions))
    fill(world, 40, "log")
    receiver, filters = reading(world, 3, 39)
    receiver.link.grant(5)
    receiver.link.drain()
    world.pump()
    while filters.asked < 40:
        assert receiver.link.credit >= 3
        (asked,) = asked_in_a_turn(world, filters)
        assert asked <= PER_TURN
    turns(world)
    assert sorted(receiver.bodies) == named(3, 39)
    assert receiver.link.credit == 0


@pytest.mark.req("X16")
def test_readers_of_a_log_take_turns() -> None:
    world = World(Log("log"))
    fill(world, 40, "log")
    one, filters = reading(world, 39)
    other, others = reading(world, 39)
    one.grant(1)
    other.grant(1)
    while filters.asked < 40 or others.asked < 40:
        assert sum(asked_in_a_turn(world, filters, others)) <= PER_TURN
        assert abs(filters.asked - others.asked) <= 2 * PER_TURN
    assert one.bodies == other.bodies == named(39)
    # A reader without filters does not wait for them.
    world.host.memory.work = 0
    plain = world.client().receiver("log", credit=1)
    fill(world, 1, "log")
    assert plain.bodies == named(0)


@pytest.mark.req("X16")
def test_records_that_arrive_are_examined_as_far_as_a_turn_allows() -> None:
    world = World(Log("log"))
    receiver, filters = reading(world, 19)
    receiver.grant(1)
    fill(world, 20, "log")
    assert filters.asked <= PER_TURN
    assert len(world.host.turns.unfinished) == 1
    turns(world)
    assert receiver.bodies == named(19)
    assert filters.asked == 20


@pytest.mark.req("X16")
@pytest.mark.parametrize("leaves", [consumer_is_detached, connection_is_lost])
def test_a_reader_may_leave_between_two_turns(leaves: Callable[[World, Receiving], None]) -> None:
    world = World(Log("log"))
    fill(world, 20, "log")
    receiver, filters = reading(world, 19)
    receiver.grant(1)
    leaves(world, receiver)
    asked = filters.asked
    turns(world)
    assert filters.asked == asked < 20


# --- Topics ------------------------------------------------------------------------------------


@pytest.mark.req("M29", "X16")
def test_filters_of_one_subscription_examine_messages_in_turns_and_in_order() -> None:
    world = World(Topic("t"))
    topic = topic_of(world)
    filters = Costly(*named(2, 19))
    identity, queue = topic.open(filters)
    fill(world, 20, "t")
    assert filters.asked <= PER_TURN
    examined = filters.asked
    while turn(world):
        assert filters.asked - examined <= PER_TURN
        examined = filters.asked
    assert filters.asked == 20
    assert [Message.decode(entry.payload).body for entry in queue.peek(5)] == named(2, 19)
    topic.close(identity)


@pytest.mark.req("B4", "X16")
async def test_filters_of_durable_subscriptions_examine_messages_in_turns() -> None:
    async with world_of(MemoryStore(), Topic("t"), limits=WIDE) as world:
        client = world.client("c")
        for number in range(10):
            client.receiver("t", name=f"s{number}", expiry_policy="never", timeout=99, durable=2)
        await world.settle()
        topic = topic_of(world)
        everything = []
        for identity in list(topic.stored):
            everything.append(Costly(*named(0, 2)))
            topic._filters[identity] = everything[-1]
        world.host.memory.work = WORK_OF_A_TURN
        sender = world.client().sender("t")
        sender.send(*named(0, 1, 2), durable=True)
        assert 0 < sum(each.asked for each in everything) <= PER_TURN
        assert topic.staging
        await world.settle()
        assert sender.outcomes == [ACCEPTED] * 3
        assert [each.asked for each in everything] == [3] * 10
        for queue in topic.queues:
            bodies = [Message.decode(entry.payload).body for entry in queue.peek(5)]
            assert bodies == named(0, 2)


@pytest.mark.req("R3", "X16")
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
async def test_filters_of_durable_subscriptions_examine_posts_in_turns(fails: bool) -> None:
    async with world_of(MemoryStore(), Topic("t"), Queue("gone"), limits=WIDE) as world:
        client = world.client("c")
        client.receiver("t", name="s", expiry_policy="never", timeout=99, durable=2)
        await world.settle()
        topic = topic_of(world)
        (identity,) = topic.stored
        topic._filters[identity] = filters = Costly(*named(0, 19))
        control = Controller(client)
        txn_id = control.declare()
        sender = client.sender("t")
        for body in named(*range(20)):
            sender.post(txn_id, body, durable=True)
        client.sender("gone").post(txn_id, "gone")
        world.host.memory.work = WORK_OF_A_TURN
        said = control.link.send(Message(Discharge(txn_id)).encode())
        world.pump()
        assert 0 < filters.asked <= PER_TURN
        assert said.state is None
        if fails:
            world.host.space().delete("gone")
        sender.send("after", durable=True)
        await world.settle()
        assert filters.asked == 21
        assert isinstance(said.state, Rejected) == fails
        (queue,) = topic.queues
        bodies = [Message.decode(entry.payload).body for entry in queue.peek(5)]
        assert bodies == ([] if fails else named(0, 19))
        ledger = world.host.space().find("t").ledger
        assert isinstance(ledger, TopicLedger)
        assert not ledger._filter_matches


# --- Dead letters for topics -------------------------------------------------------------------

SUBSCRIPTIONS = 10


class Watched(MemoryStore):
    """Store that counts the rows of nodes after each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.rows: list[list[int]] = []

    def commit(self, batch: ChangeSet) -> None:
        super().commit(batch)
        self.rows.append([self.summary(number)[0] for number in self.numbers])


class Letters:
    """Topic with durable subscriptions, whose filters are costly, and a queue that dead-letters to it."""

    def __init__(self, world: PagedWorld, store: Watched) -> None:
        self.world = world
        self.queue = world.queue("q")
        self.topic = topic_of(world)
        self.everything = [Costly(*named(0, 2)) for _ in self.topic.stored]
        for identity, filters in zip(self.topic.stored, self.everything, strict=True):
            self.topic._filters[identity] = filters
        store.numbers = [world.host.space().find("q").number, *self.topic.stored.values()]
        #: Examinations in each turn.
        self.turns: list[int] = []
        run_pending = world.host.turns.run_pending

        def counted() -> None:
            before = self.asked
            run_pending()
            self.turns.append(self.asked - before)

        world.host.turns.run_pending = counted  # type: ignore[method-assign]

    @property
    def asked(self) -> int:
        return sum(each.asked for each in self.everything)

    def bodies(self) -> list[list[object]]:
        return [
            [Message.decode(entry.payload).body for entry in queue.peek(9)]
            for queue in self.topic.queues
        ]


@asynccontextmanager
async def lettering(
    store: Watched, limits: Limits = WIDE, **options: Any
) -> AsyncIterator[Letters]:
    nodes = Topic("t"), Queue("q", dead_letter="t", **options)
    async with world_of(store, *nodes, limits=limits) as world:
        client = world.client("c")
        for number in range(SUBSCRIPTIONS):
            client.receiver("t", name=f"s{number}", expiry_policy="never", timeout=99, durable=2)
        await world.settle()
        yield Letters(world, store)


@pytest.mark.req("B4", "B19", "X16")
@pytest.mark.parametrize(
    ("outcome", "options"),
    [(rejected("no"), {}), (MODIFIED_FAILED, {"max_deliveries": 1})],
    ids=["rejected", "failed"],
)
async def test_filters_of_durable_subscriptions_examine_dead_letters_in_turns(
    outcome: Outcome, options: dict[str, Any]
) -> None:
    store = Watched()
    async with lettering(store, **options) as here:
        world = here.world
        await world.put(*named(0, 1, 2))
        receiver = await world.take(3)
        before = len(store.rows)
        world.host.memory.work = WORK_OF_A_TURN
        receiver.settle(outcome)
        world.pump()
        assert 0 < here.asked <= PER_TURN
        # The first message has left the queue, and stays in the store until its letters are there.
        assert here.queue.acquired == 2
        assert here.bodies() == [[]] * SUBSCRIPTIONS
        await world.settle()
        assert here.asked == 3 * SUBSCRIPTIONS
        assert max(here.turns) <= PER_TURN
        assert here.bodies() == [named(0, 2)] * SUBSCRIPTIONS
        assert (here.queue.available, here.queue.counts.dead_lettered) == (0, 3)
        for left, *copies in store.rows[before:]:
            # The removal of the second message stands alone, since no filter wants it.
            letters = {(3, 0), (2, 1), (1, 1), (0, 2)}
            assert len(set(copies)) == 1
            assert (left, copies[0]) in letters
        assert store.rows[-1] == [0, *[2] * SUBSCRIPTIONS]
        assert world.host.memory.held == sum(queue.bytes for queue in here.topic.queues)


@pytest.mark.req("B4", "B5", "X16")
async def test_filters_examine_what_overflows_in_turns_and_before_later_posts() -> None:
    store = Watched()
    async with lettering(store, length_max=1, overflow="drop-head") as here:
        world = here.world
        await world.put(*named(0, 1, 2))
        world.client().sender("t").send(*named(0), durable=True)
        await world.settle()
        assert max(here.turns) <= PER_TURN
        assert here.bodies() == [named(0, 0)] * SUBSCRIPTIONS
        assert store.rows[-1] == [1, *[2] * SUBSCRIPTIONS]


@pytest.mark.req("B4", "B19")
@pytest.mark.parametrize("what", ["broker", "topic", "queue"])
async def test_dead_letters_that_wait_for_their_turn_survive_the_end_of(what: str) -> None:
    store = Watched()
    async with lettering(store) as here:
        world = here.world
        await world.put(*named(0, 1, 2))
        receiver = await world.take(3)
        world.host.memory.work = 0
        receiver.settle(rejected("no"))
        world.pump()
        world.host.turns.run_pending()
        assert here.topic.staging
        if what != "broker":
            world.host.space().delete({"topic": "t", "queue": "q"}[what])
            await world.settle()
    async with world_of(store, limits=WIDE) as world:
        await world.settle()
        names = {node.declared.name for node in world.host.spaces.nodes()}
        if what == "topic":
            assert world.stats("q").available == 0
            assert store.rows[-1][0] == 0
        else:
            assert names == ({"t", "q"} if what == "broker" else {"t"})
            # With its queue, messages are dropped that were not given up yet.
            expected = named(0, 2) if what == "broker" else named(0)
            for queue in topic_of(world).queues:
                bodies = [Message.decode(entry.payload).body for entry in queue.peek(5)]
                assert bodies == expected


@pytest.mark.req("R4", "B19")
@pytest.mark.parametrize(("count", "fits"), [(2, True), (3, False)])
async def test_copies_of_dead_letters_count_in_a_transaction(count: int, fits: bool) -> None:
    # A dead letter counts four times, and so does each of its copies for durable subscriptions.
    limits = msgspec.structs.replace(WIDE, transaction_work_max=2 * SUBSCRIPTIONS * 4)
    store = Watched()
    async with lettering(store, limits) as here:
        world = here.world
        await world.put(*named(*[0] * count))
        client = world.client(limits=WIDE)
        control = Controller(client)
        txn_id = control.declare()
        receiver = client.receiver("q", credit=count)
        await world.settle()
        for delivery in receiver.endpoint.deliveries:
            delivery.update(TransactionalState(txn_id, rejected("no")))
        await world.settle()
        asked = here.asked
        sending = control.link.send(Message(Discharge(txn_id)).encode())
        await world.settle()
        assert isinstance(sending.state, Rejected) != fits
        assert here.asked - asked <= 3 * SUBSCRIPTIONS
        assert here.bodies() == [named(*[0] * count) if fits else []] * SUBSCRIPTIONS
        assert here.queue.counts.dead_lettered == (count if fits else 0)


@pytest.mark.req("B19")
async def test_a_purge_spares_messages_whose_dead_letters_are_not_stored_yet() -> None:
    store = Watched()
    async with world_of(store, Queue("q"), limits=WIDE) as world:
        await world.put(*named(*range(5)))
        ledger = world.host.space().find("q").ledger
        assert isinstance(ledger, QueueLedger)
        waiting = world.queue().peek(5)[2]
        ledger.leave(waiting)
        ledger.discard(0, 4, [])
        await world.settle()
        assert [head.sequence for head in store.heads(ledger.number)] == [2]
        ledger.remove_left(waiting)
        ledger.discard(0, 4, [])
        await world.settle()
        assert store.summary(ledger.number)[0] == 0
