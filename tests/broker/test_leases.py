"""Leases: messages that a group has taken aside, and reads again and again (K5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from brokers import World
from crashed import Photographed
from paged import in_line

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Log, Queue
from amqp_rt.broker.durable import facts
from amqp_rt.broker.leases import FROM, GROUP, ID, TO, LeaseState
from amqp_rt.errors import AmqpError, CallFailed, LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.stores.base import ChangeSet, Store, StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore

pytestmark = pytest.mark.req("K5")


async def ask(peer: Connection, operation: str, body: Any = None, **given: Any) -> Any:
    """The state that is answered, without what is another one each time; or the condition of a
    refusal."""
    given = {"group": "job", **given}
    asked = Message(
        body, body_kind="value", application_properties={"operation": operation, **given}
    )
    try:
        reply = await peer.call("work/$management", asked, reply=Message, within=60)
    except CallFailed as error:
        return error.condition
    found = reply.body
    if "next" not in found:
        return found
    assert len(found.pop("id")) == 16
    return LeaseState(**found)


async def read(peer: Connection, begin: int, end: int) -> list[Any]:
    """Bodies and numbers of what the group has there."""
    found = []
    properties = {GROUP: "job", FROM: begin, TO: end}
    async with peer.receiver("work", properties=properties, credit=100) as messages:
        while (delivery := await messages.get()) is not None:
            annotations = delivery.message.message_annotations
            assert annotations["x-opt-offset"] == str(annotations["x-opt-sequence-number"])
            found.append((annotations["x-opt-sequence-number"], delivery.body))
    return found


async def fill(peer: Connection, *bodies: Any, durable: bool = False) -> None:
    async with peer.sender("work") as out:
        for body in bodies:
            await out.send(body, durable=durable)


async def available(broker: Broker) -> list[Any]:
    return [Message.decode(each).body for each in await broker.peek("work", 1_000)]


async def test_a_group_reads_its_messages_as_often_as_it_likes(
    kept_or_not: Callable[[], Store | None],
) -> None:
    async with (
        Broker(store=kept_or_not()) as broker,
        broker.local() as peer,
        broker.local() as other,
    ):
        await broker.declare(Queue("work"))
        await fill(peer, *"abcde")
        assert await ask(peer, "OPEN-LEASE") == LeaseState(1, 0, 0, 5)
        assert await ask(peer, "LEASE", generation=1, count=3) == LeaseState(1, 0, 3, 2)
        assert await read(peer, 0, 3) == [(0, "a"), (1, "b"), (2, "c")]
        assert await read(other, 1, 3) == [(1, "b"), (2, "c")]
        assert await read(other, 1, 1) == []
        # For others it is a queue like any other.
        async with other.receiver("work") as messages:
            delivery = await messages.receive()
            assert delivery.body == "d"
            delivery.accept()
        assert await ask(peer, "ACCEPT-LEASE", generation=1, to=2) == LeaseState(1, 2, 3, 1)
        assert await ask(peer, "ACCEPT-LEASE", generation=1, to=1) == LeaseState(1, 2, 3, 1)
        assert await read(peer, 2, 3) == [(2, "c")]
        assert await ask(peer, "LEASE", generation=1, count=9) == LeaseState(1, 2, 4, 0)
        assert await ask(peer, "LEASE", generation=1, count=9) == LeaseState(1, 2, 4, 0)
        assert await ask(peer, "LEASE-STATE") == LeaseState(1, 2, 4, 0)
        assert await ask(peer, "RELEASE-LEASE") == {"released": 2}
        await broker.host.wait_kept()
        assert await available(broker) == ["c", "e"]
        assert await ask(peer, "LEASE-STATE") == "amqp:not-found"


async def test_messages_of_a_queue_with_a_journal_are_leased() -> None:
    async with Broker(journal=True) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, *"ab")
        assert await ask(peer, "OPEN-LEASE") == LeaseState(1, 0, 0, 2)
        assert await ask(peer, "LEASE", generation=1, count=2) == LeaseState(1, 0, 2, 0)
        assert await ask(peer, "RELEASE-LEASE") == {"released": 2}
        assert await available(broker) == ["a", "b"]
        assert broker.stats("work").failure is None


@pytest.mark.parametrize("paged", [False, True])
async def test_a_lease_outlives_the_broker(tmp_path: Path, paged: bool) -> None:
    def broker_again() -> Broker:
        limits = Limits(queue_memory_messages_max=4) if paged else Limits()
        return Broker(store=SQLiteStore(tmp_path / "broker.db"), limits=limits)

    async with broker_again() as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, *range(20), durable=True)
        await ask(peer, "OPEN-LEASE")
        state = await ask(peer, "LEASE", generation=1, count=3)
        while state.next < 12:
            state = await ask(peer, "LEASE", generation=1, count=12 - state.next)
        await ask(peer, "ACCEPT-LEASE", generation=1, to=2)
    async with broker_again() as broker, broker.local() as peer:
        assert broker.stats("work").acquired == 10
        assert await ask(peer, "OPEN-LEASE") == LeaseState(2, 2, 12, 8)
        assert await read(peer, 2, 12) == [(place, place) for place in range(2, 12)]
        await ask(peer, "ACCEPT-LEASE", generation=2, to=12)
    async with broker_again() as broker, broker.local() as peer:
        assert await ask(peer, "LEASE-STATE") == LeaseState(2, 12, 12, 8)
        assert broker.stats("work").acquired == 0
        await ask(peer, "RELEASE-LEASE")
    async with broker_again() as broker, broker.local() as peer:
        assert await ask(peer, "LEASE-STATE") == "amqp:not-found"


async def test_what_is_not_durable_is_missed_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    async with Broker(store=SQLiteStore(path)) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "kept", durable=True)
        await fill(peer, "lost")
        await ask(peer, "OPEN-LEASE")
        await ask(peer, "LEASE", generation=1, count=5)
        assert len(await read(peer, 0, 2)) == 2
    async with Broker(store=SQLiteStore(path)) as broker, broker.local() as peer:
        # The reader sees that a number is missing.
        assert await read(peer, 0, 2) == [(0, "kept")]


async def test_a_later_opening_replaces_an_earlier_one() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "a")
        await ask(peer, "OPEN-LEASE")
        assert (await ask(peer, "OPEN-LEASE")).generation == 2
        assert await ask(peer, "LEASE", generation=1, count=1) == "amqp:link:stolen"
        assert await ask(peer, "ACCEPT-LEASE", generation=1, to=0) == "amqp:link:stolen"
        assert (await ask(peer, "LEASE", generation=2, count=1)).next == 1


async def test_a_lease_ends_without_a_word(autojump_clock: trio.testing.MockClock) -> None:
    store = MemoryStore()
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "a", "b", durable=True)
        await ask(peer, "OPEN-LEASE", seconds=60)
        await ask(peer, "LEASE", generation=1, count=1)
        await trio.sleep(50)
        await ask(peer, "LEASE", generation=1, count=0)
        await trio.sleep(50)
        assert (await ask(peer, "LEASE-STATE")).next == 1
        await trio.sleep(20)
        assert await ask(peer, "LEASE-STATE") == "amqp:not-found"
        await broker.host.wait_kept()
        assert await available(broker) == ["a", "b"]
        assert store.facts("lease") == store.facts("leased") == []


async def test_what_cannot_be_is_refused() -> None:
    limits = Limits(leases_max=1, lease_messages_max=2, lease_ttl_max_s=60, message_size_max=1_000)
    async with Broker(limits=limits) as broker, broker.local() as peer:
        await broker.declare(
            Queue("work"), Log("log"), Queue("locking", lock_s=1), Queue("alone", exclusive=True)
        )
        await fill(peer, "a", "b", "c")
        assert await ask(peer, "LEASE", generation=1, count=1) == "amqp:not-found"
        for wrong in ({"group": ""}, {"group": 1}, {"seconds": 61}, {"seconds": "x"}):
            assert await ask(peer, "OPEN-LEASE", **wrong) == "amqp:invalid-field"
        await ask(peer, "OPEN-LEASE")
        assert await ask(peer, "OPEN-LEASE", group="two") == "amqp:resource-limit-exceeded"
        assert await ask(peer, "LEASE", generation=1, count=-1) == "amqp:invalid-field"
        assert (await ask(peer, "LEASE", generation=1, count=9)).next == 2
        assert await ask(peer, "ACCEPT-LEASE", generation=1, to=3) == "amqp:invalid-field"
        for begin, end in ((0, 3), (2, 1), (-1, 1)):
            with pytest.raises(LinkRefused):
                await read(peer, begin, end)
        await ask(peer, "ACCEPT-LEASE", generation=1, to=1)
        with pytest.raises(LinkRefused, match="messages 1 to 1"):
            await read(peer, 0, 2)
        host = broker.host
        for address, condition in (("log", "not-allowed"), ("locking", "not-allowed")):
            with pytest.raises(Exception, match=condition):
                await host.leases.open(host.space().find(address), "job")
        async with peer.receiver("alone"):
            with pytest.raises(Exception, match="resource-locked"):
                await host.leases.open(host.space().find("alone"), "job")


async def test_a_queue_takes_its_leases_along() -> None:
    store = MemoryStore()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "a", durable=True)
        await ask(peer, "OPEN-LEASE")
        await ask(peer, "LEASE", generation=1, count=1)
        await broker.delete("work")
        assert store.facts("lease") == store.facts("leased") == []
        await broker.declare(Queue("work"))
        assert await ask(peer, "LEASE-STATE") == "amqp:not-found"


@pytest.mark.slow
async def test_what_is_not_wanted_goes_back(kept_or_not: Callable[[], Store | None]) -> None:
    async with Broker(store=kept_or_not()) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, *"abcdefg")
        await ask(peer, "OPEN-LEASE")
        await ask(peer, "LEASE", generation=1, count=5)
        back = await ask(peer, "RETURN-LEASE", [[0, 1], [2, 4]], generation=1)
        assert back == LeaseState(1, 0, 5, 5)
        assert await read(peer, 0, 5) == [(1, "b"), (4, "e")]
        await broker.host.wait_kept()
        assert await available(broker) == ["a", "c", "d", "f", "g"]
        # Messages that the group returned go to all other consumers, and not to the group again.
        assert (await ask(peer, "LEASE", generation=1, count=9)).next == 7
        assert [body for _, body in await read(peer, 0, 7)] == ["b", "e", "f", "g"]
        async with peer.receiver("work") as messages:
            delivery = await messages.receive()
            assert delivery.body == "a"
            delivery.release()
        # Two of these have been returned already.
        assert (await ask(peer, "RETURN-LEASE", [[0, 2]], generation=1)).available == 4
        await ask(peer, "ACCEPT-LEASE", generation=1, to=7)
        assert (await ask(peer, "LEASE", generation=1, count=9)).next == 7
        # Opened again, it looks with new eyes.
        assert await ask(peer, "OPEN-LEASE") == LeaseState(2, 7, 7, 4)
        assert (await ask(peer, "LEASE", generation=2, count=9)).next == 11
        assert [body for _, body in await read(peer, 7, 11)] == ["a", "b", "c", "d"]
        for wrong in ([[7, 12]], [[6, 8]], [[8, 7]], [[9, 10], [8, 9]], [[7]], [7], {}, [["a", 8]]):
            found = await ask(peer, "RETURN-LEASE", wrong, generation=2)
            assert found == "amqp:invalid-field"
        stolen = await ask(peer, "RETURN-LEASE", [], generation=1)
        assert stolen == "amqp:link:stolen"


async def test_what_was_given_back_is_not_leased_after_a_restart(tmp_path: Path) -> None:
    names = []
    for round_ in range(2):
        store = SQLiteStore(tmp_path / "broker.db")
        async with Broker(store=store) as broker, broker.local() as peer:
            if not round_:
                await broker.declare(Queue("work"))
                await fill(peer, *"abcd", durable=True)
                await ask(peer, "OPEN-LEASE")
                await ask(peer, "LEASE", generation=1, count=4)
                await ask(peer, "RETURN-LEASE", [[1, 3]], generation=1)
            assert await read(peer, 0, 4) == [(0, "a"), (3, "d")]
            assert await available(broker) == ["b", "c"]
            names.append(broker.host.leases.state(broker.host.space().find("work"), "job").id)
            if round_:
                await ask(peer, "RELEASE-LEASE")
                names.append(
                    (await broker.host.leases.open(broker.host.space().find("work"), "job")).id
                )
    # The id stays until the group is opened anew.
    assert names[0] == names[1] != names[2]


async def test_a_group_of_the_same_name_is_another_one() -> None:
    """Numbers begin anew in a new group, and a request with the id of the old one is refused."""
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, *"abc")
        old = (await broker.host.leases.open(broker.host.space().find("work"), "job")).id
        await ask(peer, "LEASE", generation=1, count=2, id=old)
        await ask(peer, "RELEASE-LEASE")
        new = (await broker.host.leases.open(broker.host.space().find("work"), "job")).id
        assert (await ask(peer, "LEASE", generation=1, count=2, id=new)).next == 2
        for operation, given in (
            ("LEASE-STATE", {}),
            ("LEASE", {"generation": 1, "count": 1}),
            ("ACCEPT-LEASE", {"generation": 1, "to": 2}),
            ("RETURN-LEASE", {"generation": 1}),
        ):
            assert await ask(peer, operation, id=old, **given) == "amqp:not-found"
        assert (await ask(peer, "LEASE-STATE", id=new)).first == 0
        properties = {GROUP: "job", FROM: 0, TO: 2}
        async with peer.receiver("work", properties={**properties, ID: new}) as messages:
            assert (await messages.receive()).body == "a"
        with pytest.raises(LinkRefused, match="was released, or has ended, and was opened again"):
            async with peer.receiver("work", properties={**properties, ID: old}):
                pass


async def test_a_group_name_has_1_to_256_characters() -> None:
    world = World(Queue("work"))
    for name in ("g", "g" * 256):
        assert (await world.host.leases.open(world.host.space().find("work"), name)).generation == 1
    for name in ("", "g" * 257):
        with pytest.raises(AmqpError, match="1 to 256 characters"):
            await world.host.leases.open(world.host.space().find("work"), name)


async def test_a_reader_ends_with_the_reason_why_it_cannot_go_on() -> None:
    world = World(Queue("work"))
    world.client().sender("work").send("a", "b", bytes(5_000), "d")
    await world.host.leases.open(world.host.space().find("work"), "job")
    await world.host.leases.extend(world.host.space().find("work"), "job", 1, 4)
    properties = {GROUP: "job", FROM: 0, TO: 4}
    narrow = world.client(limits=Limits(message_size_max=1_000))
    small = narrow.receiver("work", properties=properties, credit=5)
    assert small.bodies == ["a", "b"]
    assert small.error == "amqp:link:message-size-exceeded"
    # The second message is gone before it is asked for.
    late = world.client().receiver("work", properties=properties, credit=1)
    await world.host.leases.accept(world.host.space().find("work"), "job", 1, 2)
    assert late.error is None
    late.grant(1)
    assert late.bodies == ["a"]
    assert late.error == "amqp:not-found"
    # The group is gone.
    properties = {GROUP: "job", FROM: 2, TO: 4}
    late = world.client().receiver("work", properties=properties, credit=1)
    await world.host.leases.release(world.host.space().find("work"), "job")
    late.grant(1)
    assert late.error == "amqp:not-found"


async def test_a_restart_drops_facts_without_a_queue_and_restores_the_others() -> None:
    store = MemoryStore()
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "a", "b", "c", durable=True)
        await ask(peer, "OPEN-LEASE")
        await ask(peer, "LEASE", generation=1, count=2)
        ((key, value),) = store.facts(facts.LEASES.name)
        known = msgspec.msgpack.decode(value)
        nowhere = ChangeSet()
        # Before and behind the others, in the order in which they are read.
        for number in (0, 99):
            gone = number.to_bytes(len(key), "big")
            nowhere.facts[facts.LEASES.name, gone] = msgspec.msgpack.encode([77, *known[1:]])
            nowhere.facts[facts.LEASED.name, gone + bytes(8)] = bytes(8)
        nowhere.facts[facts.LEASED.name, key + (9).to_bytes(8, "big")] = bytes(8)
        store.commit(nowhere)
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        assert await read(peer, 0, 2) == [(0, "a"), (1, "b")]
        await broker.host.wait_kept()
        assert [found for found, _ in store.facts(facts.LEASES.name)] == [key]
        assert len(store.facts(facts.LEASED.name)) == 2
        # Numbers of groups are not given again.
        await broker.host.leases.open(broker.host.space().find("work"), "other")
        assert store.facts(facts.LEASES.name)[-1][0] > (99).to_bytes(len(key), "big")


class Limited(MemoryStore):
    """A disk that takes no facts of leases for a while."""

    full = False

    def commit(self, batch: ChangeSet) -> None:
        if self.full and any(kind == "leased" for kind, _ in batch.facts):
            raise StoreFull("the disk is full")
        super().commit(batch)


async def test_what_cannot_be_kept_goes_back() -> None:
    store = Limited()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, "a", "b", durable=True)
        await ask(peer, "OPEN-LEASE")
        store.full = True
        assert await ask(peer, "LEASE", generation=1, count=2) == "amqp:resource-limit-exceeded"
        store.full = False
        await broker.host.wait_kept()
        assert await available(broker) == ["a", "b"]
        assert (await ask(peer, "LEASE", generation=1, count=2)).next == 2


async def test_a_crash_after_any_commit_loses_nothing_and_doubles_nothing() -> None:
    store = Photographed()
    #: Progress of the application's own results after each commit.
    done: list[int] = []
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        await fill(peer, *range(6), durable=True)
        begun = len(store.copies)
        await ask(peer, "OPEN-LEASE")
        for end in (2, 4, 6):
            await ask(peer, "LEASE", generation=1, count=2)
            # Results are written here; then the range is accepted.
            done += [end] * (len(store.copies) - len(done) - begun)
            await ask(peer, "ACCEPT-LEASE", generation=1, to=end)
    for crashed in store.copies[begun:]:
        async with Broker(store=crashed) as broker, broker.local() as peer:
            state = await ask(peer, "OPEN-LEASE")
            results: list[Any] = list(range(state.first))
            while True:
                state = await ask(peer, "LEASE", generation=state.generation, count=2)
                if state.first == state.next:
                    break
                results += [body for _, body in await read(peer, state.first, state.next)]
                await ask(peer, "ACCEPT-LEASE", generation=state.generation, to=state.next)
            assert results == list(range(6))
