"""An unexpected error in the work of one node ends neither the broker nor the work of others."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from brokers import commit_epoch
from stalls import Stalls

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.broker.bindings import Destination
from amqp_rt.broker.staging.attempts import ATTEMPT, EPOCH, PART, PRODUCER, RUN
from amqp_rt.errors import AmqpError, CallFailed, DeliveryRejected, LinkRefused
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.outcomes import RELEASED
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Described, Symbol

#: Few messages in memory.
LIMITS = Limits(queue_memory_messages_max=4)
FIRST = {"at": Described(Symbol("rabbitmq:stream-offset-spec"), "first")}


class Broken:
    """Link that raises an unexpected error on the first delivery."""

    draining = False
    attached = True
    writable = True
    flow_properties = None
    connection = None
    name = "broken"
    max_message_size = 0
    credit = 100
    unsettled: tuple[Any, ...] = ()

    def send(self, *args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a bug")

    def offer(self, available: int) -> None: ...

    def drained(self) -> None: ...

    def detach(self, error: Any = None, *, closed: bool = True) -> None:
        self.attached = False


class World:
    """Broker with a node ``bad``, which the test makes fail, and a queue ``good``."""

    def __init__(self, broker: Broker, stalls: Stalls, peer: Connection) -> None:
        self.broker = broker
        self.host = broker.host
        self.stalls = stalls
        self.peer = peer

    @property
    def held(self) -> Any:
        return self.host.space().nodes["bad"].held

    def attach_broken(self) -> None:
        """Attach a consumer whose link raises, and which is served next."""
        subscription = self.held.subscribe(default_outcome=RELEASED)
        subscription.link = Broken()
        self.held.serve(subscription)

    async def fill(self, *bodies: Any, **fields: Any) -> None:
        async with self.peer.sender("bad") as out:
            for body in bodies:
                await out.send(body, durable=True, **fields)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


Fault = Callable[[World], Awaitable[None]]


async def kept_message(world: World) -> None:
    """Fail in the journal: in the calls after a message is on the disk."""
    world.attach_broken()
    await world.fill("a")


async def due_message(world: World) -> None:
    """Fail by the clock: when a delayed message is due."""
    due = Symbol("x-opt-delivery-delay")
    await world.fill("a", message_annotations={due: 5_000})
    world.attach_broken()
    await trio.sleep(10)


async def expired_message(world: World) -> None:
    """Fail in the sweep: when a message has expired."""

    def fails(*args: Any) -> bool:
        raise ZeroDivisionError("a bug")

    await world.fill("a", ttl_s=5)
    world.held.dead_letter = fails
    await trio.sleep(10)


async def paged_message(world: World) -> None:
    """Fail in the pager: when messages are read from the store."""
    await world.fill(*"abcdefgh")
    world.stalls.at("_read", error=ZeroDivisionError("a bug")).released.set()
    async with world.peer.receiver("bad", credit=100, rcv_settle_mode=RCV_SECOND) as inbox:
        for _ in range(4):
            await inbox.receive(within=5)
        await settle()


async def filtered_messages(world: World) -> None:
    """Fail in a later turn of a filter with many messages to examine."""
    await world.fill("a")
    held = world.held
    world.host.turns.resume_later(_Raises(held))
    world.host.turns.pending.set()
    await settle()


class _Raises:
    """Queue equal to *held* that has more messages to examine, and raises."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return other is self._held

    def __hash__(self) -> int:
        return hash(self._held)

    def resume(self) -> None:
        raise ZeroDivisionError("a bug")


async def committed_epoch(world: World) -> None:
    """Fail in staging: when an epoch is committed."""
    claim: dict[Any, Any] = {PRODUCER: "job", RUN: "one", EPOCH: 0, PART: 0, ATTEMPT: 0}
    async with world.peer.sender("bad", properties=claim) as out:
        await out.send("a", durable=True)
    world.stalls.at("messages", error=ZeroDivisionError("a bug")).released.set()
    parts = [(0, 0, 1, _crc("a"))]
    with pytest.raises(AmqpError, match="out of service"):
        await commit_epoch(world.host, "bad", "job", "one", 0, parts)


def _crc(body: Any) -> int:
    return zlib.crc32(Message(body, durable=True).encode())


async def ended_lease(world: World) -> None:
    """Fail in the sweep: when a lease has ended, and its messages are available to others."""
    await world.fill("a")
    await world.host.leases.open(world.host.space().find("bad"), "job", 5)
    await world.host.leases.extend(world.host.space().find("bad"), "job", 1, 1)
    world.attach_broken()
    await trio.sleep(10)


async def expired_terminus(world: World) -> None:
    """Fail in the sweep: when a terminus has expired without its link."""
    await world.fill("a")
    async with world.broker.local() as third:
        options: dict[str, Any] = {"name": "mine", "timeout": 5, "rcv_settle_mode": RCV_SECOND}
        inbox = third.receiver("bad", credit=1, **options)
        await inbox.__aenter__()
        await inbox.receive(within=5)
        await inbox.suspend()
    world.attach_broken()
    await trio.sleep(10)


async def retired_work(world: World) -> None:
    """Fail in the journal: when a stored transaction releases a message."""
    await world.fill("a")
    async with world.peer.receiver("bad", credit=1, rcv_settle_mode=RCV_SECOND) as inbox:
        delivery = await inbox.receive(within=5)
        async with world.peer.transaction() as txn:
            delivery.release(transaction=txn)
            async with world.peer.sender("good") as out:
                await out.send("with it", durable=True, transaction=txn)
            world.attach_broken()
        async with world.peer.receiver("good") as inbox:
            (await inbox.receive(within=5)).accept()


QUEUE_FAULTS = [
    kept_message,
    due_message,
    expired_message,
    paged_message,
    filtered_messages,
    committed_epoch,
    ended_lease,
    expired_terminus,
    retired_work,
]


async def topic_message(world: World) -> None:
    """Fail in the journal: when a message is stored for the subscribers of a topic."""
    (queue,) = world.held.queues
    queue.subscribe(default_outcome=RELEASED).link = Broken()
    queue.serve(next(reversed(queue.consumers.values())))
    await world.fill("a")


async def read_log(world: World) -> None:
    """Fail in the reader of logs: when records are read from the store."""
    await world.fill("a")
    log = world.held
    for partition in log.partitions:
        partition.forget(len(partition.blocks))
    world.stalls.at("_fetch", error=ZeroDivisionError("a bug")).released.set()
    async with world.peer.receiver("bad", credit=10, filter=FIRST):
        await settle()


async def retained_log(world: World) -> None:
    """Fail in the retention: when the store looks for records to drop."""
    await world.fill("a")
    world.stalls.at("extent", error=ZeroDivisionError("a bug")).released.set()
    await trio.sleep(3)


async def kept_record(world: World) -> None:
    """Fail in the journal: when a stored record is delivered to readers."""

    def extend(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    world.held.extend = extend
    await world.fill("a")


async def swept_log(world: World) -> None:
    """Fail in the sweep: when a log looks for records to drop."""

    def tell() -> None:
        raise ZeroDivisionError("a bug")

    await world.fill("a")
    world.held.notify_waiting = tell
    await trio.sleep(3)


CASES = [
    *((Queue("bad"), fault) for fault in QUEUE_FAULTS),
    (Topic("bad"), topic_message),
    *((Log("bad", max_age_s=3600), fault) for fault in (read_log, retained_log, kept_record)),
    (Log("bad", max_age_s=3600), swept_log),
]


@pytest.mark.req("B7")
@pytest.mark.parametrize(("node", "fault"), CASES, ids=lambda each: getattr(each, "__name__", ""))
async def test_a_node_that_fails_is_out_of_service_and_nothing_else(
    node: Any,
    fault: Fault,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    stalls = Stalls()
    kept = {"name": "mine", "timeout": 1_000, "durable": 2}
    async with (
        Broker(store=store, executor=stalls, limits=LIMITS) as broker,
        broker.local() as peer,
        broker.local() as other,
    ):
        await broker.declare(node, Queue("good"))
        if isinstance(node, Topic):
            durable = peer.receiver("bad", **kept)
            await durable.__aenter__()
            await settle()
            await durable.suspend()
        with caplog.at_level(logging.ERROR):
            await fault(World(broker, stalls, peer))
            await trio.sleep(3)
        faults = [each for each in caplog.records if each.exc_info and "'bad'" in each.getMessage()]
        assert len(faults) == 1
        assert faults[0].getMessage().startswith("node failed: 'bad'")
        # Requests for the node get an error with the event and the advice.
        for attach in (other.sender, other.receiver):
            with pytest.raises(
                LinkRefused, match=r"'bad' is out of service.*start the broker"
            ) as no:
                async with attach("bad"):
                    pass
            assert no.value.condition == "amqp:internal-error"
        with pytest.raises(AmqpError, match="out of service"):
            broker.publish("bad", b"")
        assert "out of service" in (broker.stats("bad").failure or "")
        asked = Message(application_properties={"operation": "PURGE", "name": "bad"})
        with pytest.raises(CallFailed) as failed:
            await other.call("$management", asked, reply=Message)
        assert failed.value.condition == "amqp:internal-error"
        query = Message(application_properties={"operation": "QUERY"})
        assert (await other.call("$management", query, reply=Message)).body["results"]
        # Other nodes continue.
        async with other.sender("good") as out, other.receiver("good") as inbox:
            await out.send("hello", durable=True)
            delivery = await inbox.receive(within=5)
            assert delivery.body == "hello"
            delivery.accept()
            await trio.sleep(5)
    # The node's messages are available after a restart of the broker.
    async with (
        Broker(store=store, executor=Stalls(), limits=LIMITS) as broker,
        broker.local() as peer,
    ):
        await settle()
        assert broker.stats("bad").failure is None
        if fault is committed_epoch:
            # The commit was decided before the node failed.
            assert not await commit_epoch(broker.host, "bad", "job", "one", 0, [])
        options: dict[str, Any] = kept if isinstance(node, Topic) else {}
        if isinstance(node, Log):
            options = {"filter": FIRST}
        expected = "abcdefgh" if fault is paged_message else "a"
        if fault is expired_message:
            assert broker.stats("bad").available <= 1
            return
        async with peer.receiver("bad", credit=20, **options) as inbox:
            found = [(await inbox.receive(within=5)).body for _ in expected]
            assert sorted(found) == list(expected)
            assert await inbox.get() is None


async def test_a_failed_node_can_be_deleted_and_made_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        Broker(store=MemoryStore(), executor=Stalls()) as broker,
        broker.local() as peer,
    ):
        await broker.declare(Queue("bad"))
        await kept_message(World(broker, Stalls(), peer))
        with pytest.raises(AmqpError, match="out of service"):
            await broker.declare(Queue("bad"))
        await broker.delete("bad")
        await broker.declare(Queue("bad"))
        async with peer.sender("bad") as out:
            await out.send("a", durable=True)
        assert broker.stats("bad").available == 1


async def test_dead_letters_for_a_failed_queue_are_in_the_store(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = MemoryStore()
    async with Broker(store=store, executor=Stalls()) as broker, broker.local() as peer:
        await broker.declare(Queue("bad"), Queue("source", dead_letter="bad"))
        world = World(broker, Stalls(), peer)
        await kept_message(world)
        async with peer.sender("source") as out:
            await out.send("letter", durable=True)
        async with peer.receiver("source") as inbox:
            (await inbox.receive(within=5)).reject()
            await settle()
        assert broker.stats("source").failure is None
    async with Broker(store=store, executor=Stalls()) as broker:
        found = [Message.decode(each).body for each in await broker.peek("bad", 9)]
        assert found == ["a", "letter"]


async def test_what_an_exchange_leads_to_a_failed_queue_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Otherwise the sender would take it for delivered to all of them."""
    async with (
        Broker(store=MemoryStore(), executor=Stalls()) as broker,
        broker.local() as peer,
    ):
        await broker.declare(Queue("bad"), Queue("good"))
        exchanges = broker.topologies.space("").exchanges
        for name in ("good", "bad"):
            exchanges.bind("amq.fanout", Destination(name), "", {})
        await kept_message(World(broker, Stalls(), peer))
        async with peer.sender("/exchanges/amq.fanout") as out:
            with pytest.raises(DeliveryRejected, match="'bad' is out of service"):
                await out.send("to all", durable=True)
        assert broker.stats("good").available == 0


async def test_who_knew_the_way_to_a_failed_node_hears_why_it_refuses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        Broker(store=MemoryStore(), executor=Stalls()) as broker,
        broker.local() as peer,
        peer.sender(None) as out,
    ):
        await broker.declare(Queue("bad"))
        await out.send("a", to="bad", durable=True)
        broker.host.fail(broker.host.space().nodes["bad"], ZeroDivisionError("a bug"))
        with pytest.raises(DeliveryRejected, match="'bad' is out of service"):
            await out.send("b", to="bad", durable=True)


async def test_what_was_on_its_way_to_a_failed_log_is_written(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = MemoryStore()
    stalls = Stalls()
    async with Broker(store=store, executor=stalls) as broker, broker.local() as peer:
        await broker.declare(Log("bad"))
        async with peer.sender("bad") as out:
            stall = stalls.at("commit")
            broker.host.space().declare(Queue("other"))
            await stall.reached.wait()
            out.send_nowait("a", durable=True)
            await settle()
            broker.host.fail(broker.host.space().nodes["bad"].held, ZeroDivisionError("a bug"))
            stall.released.set()
            await settle()
    async with (
        Broker(store=store, executor=Stalls()) as broker,
        broker.local() as peer,
        peer.receiver("bad", credit=5, filter=FIRST) as inbox,
    ):
        assert (await inbox.receive(within=5)).body == "a"


@pytest.mark.parametrize("call", ["commit", "tidy"])
async def test_a_store_that_raises_the_unexpected_is_verified_and_goes_on(
    call: str, autojump_clock: trio.testing.MockClock
) -> None:
    store = MemoryStore()
    stalls = Stalls()
    async with Broker(store=store, executor=stalls) as broker, broker.local() as peer:
        await broker.declare(Queue("good"))
        stalls.at(call, error=ZeroDivisionError("a bug")).released.set()
        await trio.sleep(5)
        async with peer.sender("good") as out:
            await out.send("a", durable=True)
        assert broker.stats("good").available == 1


async def test_the_journal_of_messages_fails_alone(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker(journal=True) as broker, broker.local() as peer:
        await broker.declare(Queue("good"))

        def extend(*args: Any) -> None:
            raise ZeroDivisionError("a bug")

        log: Any = broker.host.space().nodes["$journal"].held
        log.extend = extend
        async with peer.sender("good") as out:
            for body in "abc":
                await out.send(body)
                await trio.sleep(5)
        assert broker.stats("good").available == 3
        assert broker.stats("$journal").failure is not None
        assert sum(each.getMessage().startswith("node failed") for each in caplog.records) == 1
