"""Subscriptions that collect messages without a link, and those that several links share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from brokers import World, client_of
from paged import Gate

from amqp_rt import Broker, Connection
from amqp_rt.broker.durable import facts
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.broker.termini import KeptSource
from amqp_rt.errors import AmqpError, LinkDetached, LinkRefused
from amqp_rt.message import Message
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.stores.base import Store, StoreFull
from amqp_rt.stores.memory import MemoryStore

NEVER: dict[str, Any] = {"expiry_policy": "never"}


def world() -> World:
    return World(Topic("t"), Topic("u"))


# --- in memory ---------------------------------------------------------------------------------------


@pytest.mark.req("B19", "M39")
def test_a_subscription_gathers_while_its_subscriber_is_away() -> None:
    here = world()
    sender = here.client().sender("t")
    client = here.client("c")
    client.receiver("t", name="s", **NEVER)
    sender.send(1)
    client.cut()
    sender.send(2)
    client = here.client("c")
    again = client.receiver("t", name="s", credit=1, **NEVER)
    assert again.bodies == [1]
    again.detach(closed=False)
    sender.send(3)
    last = client.receiver("t", name="s", credit=9, **NEVER)
    # The first was delivered, and was never said anything of.
    assert last.bodies == [1, 2, 3]
    # Others have others, whatever they are called.
    assert here.client("d").receiver("t", name="s", credit=9, **NEVER).bodies == []
    last.detach()
    sender.send(4)
    assert client.receiver("t", name="s", credit=9, **NEVER).bodies == []
    assert here.stats("t").consumers == 2


@pytest.mark.req("B19")
def test_a_source_of_null_gives_the_kept_one_back() -> None:
    here = world()
    client = here.client("c")
    first = client.receiver("t", name="s", default_outcome=ACCEPTED, **NEVER)
    first.detach(closed=False)
    here.client().sender("t").send(1)

    class Asking:
        name = "s"
        role = False
        peer = client.joined.server.peer
        desired_capabilities = ()

    found = here.host.kept_source(Asking())  # type: ignore[arg-type]
    assert found == first.link.source
    assert found is not first.link.source
    Asking.name = "other"
    assert here.host.kept_source(Asking()) is None  # type: ignore[arg-type]


@pytest.mark.req("B19")
@pytest.mark.parametrize("scope", [(), ("global",)], ids=["of a container", "global"])
@pytest.mark.parametrize("lasting", [{}, NEVER], ids=["volatile", "lasting"])
def test_links_that_share_a_subscription_get_each_message_once(
    scope: tuple[str, ...], lasting: dict[str, Any]
) -> None:
    here = world()
    capabilities = ("topic", "shared", *scope)
    other = "d" if scope else "c"
    one = here.client("c").receiver("t", name="s", capabilities=capabilities, **lasting)
    two = here.client(other).receiver("t", name="s|2", capabilities=capabilities, **lasting)
    assert one.link.source.capabilities == capabilities
    sender = here.client().sender("t")
    one.grant(10)
    two.grant(10)
    sender.send(*range(6))
    assert sorted([*one.bodies, *two.bodies]) == list(range(6))
    assert one.bodies
    assert two.bodies
    # Messages that one link has not settled when it ends are for the other.
    left = one.bodies
    one.detach(closed=not lasting)
    assert sorted(two.bodies) == list(range(6))
    assert set(left) <= set(two.bodies)
    two.settle(ACCEPTED)
    two.detach(closed=not lasting)
    sender.send(7)
    again = here.client(other).receiver(
        "t", name="s|3", capabilities=capabilities, credit=5, **lasting
    )
    assert again.bodies == ([7] if lasting else [])
    again.settle(ACCEPTED)
    again.detach()
    sender.send(8)
    assert here.stats("t").available == 0
    assert here.host.memory.held == 0


@pytest.mark.req("B19")
def test_a_shared_subscription_with_links_is_not_changed_under_them() -> None:
    here = world()
    shared = ("shared",)
    one = here.client("c").receiver("t", name="s", capabilities=shared, **NEVER)
    two = here.client("c").receiver("u", name="s|2", capabilities=shared, **NEVER)
    assert two.error == "amqp:precondition-failed"
    one.detach(closed=False)
    here.client().sender("t").send(1)
    again = here.client("c").receiver("u", name="s|2", capabilities=shared, credit=5, **NEVER)
    assert again.error is None
    assert here.stats("t").available == 0
    here.client().sender("u").send(2)
    assert again.bodies == [2]


@pytest.mark.req("B19", "B4")
def test_a_subscription_whose_backlog_is_full_is_given_up_and_says_so() -> None:
    here = World(Topic("t", backlog_max=3))
    client = here.client("c")
    client.receiver("t", name="s", **NEVER).detach(closed=False)
    here.client().sender("t").send(*range(5))
    assert here.host.memory.held == 0
    assert client.receiver("t", name="s", **NEVER).error == "amqp:resource-limit-exceeded"
    # The peer has received the error: from here on the subscription is new.
    again = client.receiver("t", name="s", credit=9, **NEVER)
    assert (again.error, again.bodies) == (None, [])


# --- with a store ------------------------------------------------------------------------------------


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[Broker]:
    async with Broker(store=store, network=MemoryNetwork()) as broker:
        await broker.declare(Topic("t"), Topic("u"))
        await broker.listen("memory://b")
        yield broker


async def bodies(peer: Connection, count: int, *, more: bool = False, **options: Any) -> list[Any]:
    """The first *count* messages of the subscription; there are *more*, or no more."""
    found = []
    subscriber = peer.receiver("t", name="s", durable=2, **options)
    for _ in range(count):
        delivery = await subscriber.receive()
        found.append(delivery.body)
        delivery.accept()
    with trio.move_on_after(0.05) as quiet:
        (await subscriber.receive()).release()
    assert quiet.cancelled_caught is not more
    await subscriber.suspend()
    return found


@pytest.mark.slow
@pytest.mark.req("B19", "M38", "B7")
async def test_a_durable_subscription_outlives_the_broker(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker, client_of(broker) as peer:
        subscriber = peer.receiver("t", name="s", durable=2)
        await subscriber.wait_attached()
        assert subscriber.link.source.durable == 2
        await subscriber.suspend()
        async with peer.sender("t") as out:
            await out.send("kept", durable=True)
            await out.send("lost")
            await out.send("too", durable=True)
        assert await bodies(peer, 1, more=True) == ["kept"]
    async with running(kept()) as broker, client_of(broker) as peer:
        assert await bodies(peer, 1) == ["too"]
        async with peer.sender("t") as out:
            await out.send("later", durable=True)
    async with running(kept()) as broker, client_of(broker) as peer:
        async with client_of(broker, "d") as other:
            assert await bodies(other, 0) == []
        assert await bodies(peer, 1) == ["later"]
        async with peer.receiver("t", name="s", durable=2):
            pass  # and closed, which ends it
        async with peer.sender("t") as out:
            await out.send("for nobody", durable=True)
    async with running(kept()) as broker, client_of(broker) as peer:
        assert await bodies(peer, 0) == []
        names = [terminus.key[2] for terminus in broker.host.termini]
        assert sorted(names) == ["c", "d"]


@pytest.mark.req("M38", "X24")
async def test_what_a_durable_source_had_sent_is_known_after_a_restart(
    kept: Callable[[], Store],
) -> None:
    async with running(kept()) as broker, client_of(broker) as peer:
        subscriber = peer.receiver("t", name="s", durable=2)
        await subscriber.wait_attached()
        async with peer.sender("t") as out:
            await out.send("in hand", durable=True)
        # A second delivery has another header than the sender's.
        (await subscriber.receive()).modify()
        delivery = await subscriber.receive()
        await subscriber.suspend()
    async with running(kept()) as broker:
        (terminus,) = broker.host.termini
        assert isinstance(terminus, KeptSource)
        assert terminus.memory is not None
        (known,) = terminus.memory.values()
        assert (known.tag, known.complete) == (delivery.tag, True)
        assert isinstance(known.payload, bytes)
        message = Message.decode(known.payload)
        assert (message.body, message.delivery_count) == ("in hand", 1)
        # A second end does nothing more.
        ends: list[None] = []
        terminus.on_end.append(lambda: ends.append(None))
        terminus.end()
        terminus.end()
        assert len(ends) == 1


@pytest.mark.req("M38")
async def test_what_a_durable_target_has_noted_goes_with_it() -> None:
    store = MemoryStore()
    async with running(store) as broker, client_of(broker) as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q", name="s", durable=2, settled=False, timeout=60) as out:
            await out.send("m", durable=True)
            await broker.host.wait_kept()
            assert len(list(store.facts(facts.SEEN.name))) == 1
        await broker.host.wait_kept()
        assert len(broker.host.termini) == 0
        assert list(store.facts(facts.SEEN.name)) == []


@pytest.mark.req("M38", "X15")
async def test_credit_that_is_withdrawn_while_a_delivery_is_noted_is_not_used(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gate = Gate()
    network = MemoryNetwork()
    async with Broker(store=MemoryStore(), executor=gate, network=network) as broker:
        await broker.declare(Topic("t"))
        await broker.listen("memory://b")
        async with client_of(broker) as peer:
            subscriber = peer.receiver("t", name="s", durable=2, credit=1)
            await subscriber.wait_attached()
            subscriber.stop()
            async with peer.sender("t") as out:
                await out.send("m", durable=True)
            await trio.sleep(1)
            gate.opened = trio.Event()
            subscriber.start(1)
            await trio.sleep(1)
            subscriber.stop()
            await trio.sleep(1)
            gate.opened.set()
            await trio.sleep(1)
            assert subscriber.waiting == 0
            subscriber.start(1)
            delivery = await subscriber.receive()
            assert (delivery.body, delivery.message.delivery_count) == ("m", 0)


@pytest.mark.req("M38", "X22")
async def test_a_durable_source_sends_any_size_to_a_peer_that_sets_no_bound() -> None:
    async with running(MemoryStore()) as broker, client_of(broker) as peer:
        subscriber = peer.receiver("t", name="s", durable=2, streaming=True)
        await subscriber.wait_attached()
        assert subscriber.link.max_message_size == 0
        async with peer.sender("t") as out:
            await out.send(b"x" * 1_000, durable=True)
        delivery = await subscriber.receive()
        assert b"".join([chunk async for chunk in delivery.chunks()]) == b"x" * 1_000


@pytest.mark.req("B19", "M38")
async def test_a_durable_subscription_keeps_its_filter(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker, client_of(broker) as peer:
        await bodies(peer, 0, selector="n > 1")
    async with running(kept()) as broker, client_of(broker) as peer:
        async with peer.sender("t") as out:
            for n in range(4):
                await out.send(n, durable=True, application_properties={"n": n})
        assert await bodies(peer, 2, selector="n > 1") == [2, 3]
        # Another filter is another subscription.
        async with peer.sender("t") as out:
            await out.send(9, durable=True, application_properties={"n": 9})
        assert await bodies(peer, 0, selector="n > 2") == []


@pytest.mark.req("B19", "M38")
async def test_a_shared_subscription_outlives_the_broker(kept: Callable[[], Store]) -> None:
    options: dict[str, Any] = {"durable": 2, "capabilities": ["topic", "shared", "global"]}
    async with running(kept()) as broker, client_of(broker) as peer:
        subscriber = peer.receiver("t", name="s|global", **options)
        await subscriber.wait_attached()
        await subscriber.suspend()
        async with peer.sender("t") as out:
            for n in range(10):
                await out.send(n, durable=True)
    async with (
        running(kept()) as broker,
        client_of(broker) as peer,
        client_of(broker, "d") as other,
    ):
        one = peer.receiver("t", name="s|global", credit=1, **options)
        two = other.receiver("t", name="s|global2", credit=1, **options)
        await one.wait_attached()
        await two.wait_attached()
        found = []
        for n in range(10):
            delivery = await (one if n % 2 else two).receive()
            found.append(delivery.body)
            delivery.accept()
        assert sorted(found) == list(range(10))
        await one.suspend()
        await two.suspend()
    async with running(kept()) as broker:
        assert broker.stats("t").available == 0


@pytest.mark.req("B19")
async def test_a_publisher_hears_when_all_durable_subscriptions_have_it() -> None:
    """A message that the store refuses is refused for all subscriptions."""

    class Full(MemoryStore):
        full = False

        def commit(self, batch: Any) -> None:
            if self.full and batch.puts:
                raise StoreFull("the disk is full")
            super().commit(batch)

    store = Full()
    async with running(store) as broker, client_of(broker) as peer:
        await bodies(peer, 0)
        async with peer.sender("t") as out, peer.receiver("t") as volatile:
            store.full = True
            with pytest.raises(AmqpError, match="full"):
                await out.send("refused", durable=True)
            store.full = False
            await out.send("taken", durable=True)
            assert (await volatile.receive()).body == "taken"
        assert await bodies(peer, 1) == ["taken"]


@pytest.mark.req("B19")
async def test_unsubscribing_by_a_source_of_null(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker, client_of(broker) as peer:
        with pytest.raises(LinkRefused) as refused:
            await unsubscribe(peer, "s")
        assert refused.value.condition == "amqp:not-found"
        await bodies(peer, 0)
        assert await unsubscribe(peer, "s") == "t"
        assert len(broker.host.termini) == 0
        shared = ["shared", "global"]
        one = peer.receiver("t", name="g", durable=2, capabilities=shared)
        await one.wait_attached()
        with pytest.raises(LinkRefused) as refused:
            await unsubscribe(peer, "g|global")
        assert refused.value.condition == "amqp:resource-locked"
        await one.suspend()
        assert await unsubscribe(peer, "g|global") == "t"
        assert len(broker.host.termini) == 0


async def unsubscribe(peer: Connection, name: str) -> Any:
    """As JMS clients do it; the address that was subscribed to."""
    async with peer.receiver(name=name, credit=0) as receiver:
        assert receiver.address == receiver.source.address
        return receiver.address


@pytest.mark.req("B19", "SE17")
async def test_what_is_kept_is_for_those_who_may_receive_it() -> None:
    allowed = {"t"}

    async def authorize(peer: Any, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        return address in allowed

    async with Broker(volatile=True, network=MemoryNetwork(), authorize=authorize) as broker:
        await broker.declare(Topic("t"))
        await broker.listen("memory://b")
        async with client_of(broker) as peer:
            subscriber = peer.receiver("t", name="s", durable=1)
            await subscriber.wait_attached()
            await subscriber.suspend()
            allowed.clear()
            with pytest.raises(LinkRefused) as refused:
                await unsubscribe(peer, "s")
            assert refused.value.condition == "amqp:unauthorized-access"


async def test_a_subscriber_that_is_given_up_while_it_is_there(kept: Callable[[], Store]) -> None:
    async with Broker(store=kept(), network=MemoryNetwork()) as broker:
        await broker.declare(Topic("t", backlog_max=2))
        await broker.listen("memory://b")
        async with client_of(broker) as peer, peer.sender("t") as out:
            asleep = peer.receiver("t", name="s", durable=2, credit=0)
            await asleep.wait_attached()
            for n in range(4):
                await out.send(n, durable=True)
            with pytest.raises(LinkDetached) as detached:
                await asleep.get()
            assert detached.value.condition == "amqp:resource-limit-exceeded"
        assert broker.stats("t").consumers == 0
    async with Broker(store=kept(), network=MemoryNetwork()) as broker:
        assert [terminus for terminus in broker.host.termini if terminus.key[3]] == []
        assert broker.stats("t").available == 0


def test_released_copies_come_again_to_the_same_subscription() -> None:
    here = world()
    client = here.client("c")
    first = client.receiver("t", name="s", credit=5, **NEVER)
    here.client().sender("t").send(1)
    first.settle(RELEASED, 0)
    client.cut()
    assert here.client("c").receiver("t", name="s", credit=5, **NEVER).bodies == [1]


@pytest.mark.req("B19", "M39")
async def test_a_subscription_that_is_attached_again_has_all_of_its_time_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Broker(network=MemoryNetwork()) as broker:
        await broker.declare(Topic("t"))
        await broker.listen("memory://b")

        async def visit(stay_s: float) -> list[Any]:
            """Attach, take what has gathered, stay, and leave without closing."""
            found = []
            async with client_of(broker, "c") as peer:
                receiver = peer.receiver("t", name="l", timeout=30)
                with trio.move_on_after(stay_s):
                    async for delivery in receiver:
                        delivery.accept()
                        found.append(delivery.body)
                await receiver.suspend()
            return found

        async with client_of(broker, "other") as peer, peer.sender("t") as out:
            assert await visit(1) == []
            for number in range(3):
                # Shorter than its time, so that only the sum of two absences would be too long.
                await trio.sleep(25)
                await out.send(number)
                # Longer than its time: nothing ends while it is here.
                assert await visit(100) == [number]
            await out.send("late")
            await trio.sleep(31)
            assert await visit(1) == []
