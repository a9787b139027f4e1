"""Clients that receive over sockets: the project's own, and Qpid's for Python, with others at the same queue."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp091 import Front as OtherFront
from amqp_rt_amqp091 import connect as connect_other
from client010 import connected
from driven010 import Driven, Refused
from protocol010 import NOT_ACQUIRED
from served010 import Served, serving

from amqp_rt import Broker, connect
from amqp_rt.broker.nodes import Queue
from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.memory import MemoryStore


async def send(served: Served, *texts: str) -> None:
    """Send texts to ``q`` by AMQP 1.0."""
    async with connect(served.url) as connection, connection.sender("q") as sender:
        for text in texts:
            await sender.send(text)


# --- the project's own client ------------------------------------------------------------------------


@pytest.mark.req("D7")
async def test_messages_are_received_and_accepted() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        await session.subscribe("q", "d")
        for number in range(300):
            session.transfer("", b"%d" % number, key="q", accept_mode=None)
        messages = [await session.message() for _ in range(300)]
        assert [each.body for each in messages] == [b"%d" % number for number in range(300)]
        numbers = [each.id for each in messages]
        await session.done(session.accept(*[each for each in numbers if each is not None]))
        assert served.broker.stats("q").acquired == 0


@pytest.mark.req("D2", "D7")
async def test_consumers_of_three_protocols_share_a_queue() -> None:
    fronts = [Front(), OtherFront()]
    async with Broker(fronts=fronts, volatile=True) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        served = Served(broker, fronts[0], url)  # type: ignore[arg-type]
        async with (
            served.client() as client,
            connect(url) as one,
            connect_other(url) as other,
            other.channel() as channel,
        ):
            session = await client.session(b"s")
            await session.subscribe("q", "looking", acquire_mode=NOT_ACQUIRED)
            await session.subscribe("q", "taking", messages=1, flow_mode=0)
            await send(served, "a", "b", "c", "d")
            copies = [await session.message() for _ in range(5)]
            taken = [each for each in copies if each.destination == "taking"]
            assert len(taken) == 1
            async with one.receiver("q", credit=1) as receiver:
                theirs = await receiver.receive()
                got = await channel.get("q")
                assert got is not None
                theirs.accept()
                got.ack()
            # The last of the four is there, and is acquired by the id of its copy.
            ids = [(each.id, each.id) for each in copies if each.destination == "looking"]
            result = await session.call("message.acquire", transfers=ids)
            assert result is not None
            assert len(result.transfers) == 1
            held = [result.transfers[0][0], taken[0].id]
            await session.done(session.accept(*held))
            assert broker.stats("q").available == broker.stats("q").acquired == 0


@pytest.mark.req("D10")
async def test_messages_survive_a_cut_and_no_message_comes_twice() -> None:
    async with serving() as served:
        await served.broker.declare(Queue("q"))
        stream = await trio.open_tcp_stream("127.0.0.1", served.port)
        async with connected(stream) as client:
            session = await client.session(b"s")
            session.state.ask_timeout(60)
            await session.subscribe("q", "d", messages=3)
            session.state.completes = False
            await send(served, *"abcdef")
            first = await session.message()
            assert first.id is not None
            session.accept(first.id)
            await client.cut()
        async with served.client() as client:
            again = await client.resume(session.state)
            await again.sync()
            assert (served.broker.stats("q").acquired, served.broker.stats("q").available) == (2, 3)
            for unit in (1, 0):
                await again.call("message.flow", destination="d", unit=unit)
            await again.until(lambda: len(again.state.messages) == 6)
            assert [each.body for each in again.state.messages] == [
                b"a",
                b"b",
                b"c",
                b"d",
                b"e",
                b"f",
            ]


class Gated(MemoryStore):
    """A disk that writes while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def commit(self, batch: ChangeSet) -> None:
        assert self.gate.wait(20)
        super().commit(batch)


@pytest.mark.req("D12", "B7")
@pytest.mark.parametrize("command", ["accept", "release", "reject"])
async def test_an_outcome_is_complete_when_it_is_on_disk(command: str) -> None:
    store = Gated()
    async with Broker(fronts=[front := Front()], store=store) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with Served(broker, front, url).client() as client:
            session = await client.session(b"s")
            await session.call("queue.declare", queue="q", durable=True)
            for number in range(20):
                session.transfer("", b"%d" % number, key="q", delivery={"delivery_mode": 2})
            await session.sync()
            await session.subscribe("q", "d", flow_mode=0, messages=20)
            numbers = [(await session.message()).id for _ in range(20)]
            try:
                store.gate.clear()
                ids = [(number, number) for number in numbers]
                fields = {"release": {"set_redelivered": True}, "reject": {"code": 0}}.get(
                    command, {}
                )
                one = session.send(f"message.{command}", transfers=ids[:1], sync=True, **fields)
                rest = session.send(f"message.{command}", transfers=ids[1:], sync=True, **fields)
                # Commands after it do not wait.
                await session.call("queue.query", queue="q")
                for number in (one, rest):
                    assert not session.state.is_complete(number)
            finally:
                store.gate.set()
            await session.done(one)
            await session.done(rest)
            assert broker.stats("q").acquired == 0


# --- qpid-python -------------------------------------------------------------------------------------


@asynccontextmanager
async def high(messaging: Driven) -> AsyncIterator[Served]:
    """Run a broker with a queue ``q``, and connect ``qpid.messaging`` with a session ``s``."""
    async with serving() as served:
        await served.broker.declare(Queue("q"))
        await messaging.step("connect", "c", f"127.0.0.1:{served.port}")
        await messaging.step("session", "s", "c")
        yield served
        await messaging.step("close", "c")


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.req("D7")
async def test_qpid_fetches_one_by_one(messaging: Driven) -> None:
    async with high(messaging) as served:
        await messaging.step("receiver", "in", "s", "q")
        assert await messaging.step("fetch", "in", 0) is None
        await send(served, "a", "b")
        for text in ("a", "b"):
            found = await messaging.step("fetch", "in")
            assert found["content"] == text
            await messaging.step("acknowledge", "s", found["key"])
        assert await messaging.step("fetch", "in", 0.1) is None
        assert served.broker.stats("q").acquired == 0


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.req("D7")
@pytest.mark.parametrize("capacity", [1, 7, "UNLIMITED"])
async def test_qpid_fetches_ahead(messaging: Driven, capacity: int | str) -> None:
    async with high(messaging) as served:
        await messaging.step("receiver", "in", "s", "q", {"capacity": capacity})
        await send(served, *[str(number) for number in range(30)])
        for number in range(30):
            assert (await messaging.step("fetch", "in"))["content"] == str(number)
        assert await messaging.step("fetch", "in", 0) is None
        await messaging.step("capacity", "in", 3)
        await messaging.step("acknowledge", "s")
        assert served.broker.stats("q").acquired == 0


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.req("D7")
async def test_qpid_browses_releases_and_rejects(messaging: Driven) -> None:
    async with high(messaging) as served:
        await send(served, "a", "b")
        await messaging.step("receiver", "looking", "s", "q; {mode: browse}", {"capacity": 10})
        for text in ("a", "b"):
            found = await messaging.step("fetch", "looking")
            assert found["content"] == text
            await messaging.step("acknowledge", "s", found["key"])
        assert served.broker.stats("q").available == 2
        await messaging.step("receiver", "in", "s", "q")
        found = await messaging.step("fetch", "in")
        assert not found.get("redelivered")
        await messaging.step("acknowledge", "s", found["key"], "release", {"set_redelivered": True})
        again = await messaging.step("fetch", "in")
        assert (again["content"], again["redelivered"]) == ("a", True)
        how = {"code": 0, "text": "no"}
        await messaging.step("acknowledge", "s", again["key"], "reject", how)
        assert (await messaging.step("fetch", "in"))["content"] == "b"
        assert served.broker.stats("q").acquired == 1


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.req("D7")
async def test_qpid_is_told_of_a_missing_queue_and_chooses_by_a_selector(messaging: Driven) -> None:
    async with high(messaging) as served:
        with pytest.raises(Refused) as caught:
            await messaging.step("receiver", "in", "s", "nowhere")
        assert caught.value.kind == "NotFound"
        async with connect(served.url) as connection, connection.sender("q") as sender:
            for color in ("red", "blue"):
                await sender.send(color, application_properties={"color": color})
        selecting = (
            "q; {link: {x-subscribe: {arguments: {'x-apache-selector': \"color = 'blue'\"}}}}"
        )
        await messaging.step("receiver", "in", "s", selecting)
        assert (await messaging.step("fetch", "in"))["content"] == "blue"
        assert await messaging.step("fetch", "in", 0) is None


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.req("D7")
async def test_qpid_gets_what_it_has_not_acknowledged_after_a_reconnection(
    messaging: Driven,
) -> None:
    async with serving() as served:
        await served.broker.declare(Queue("q"))
        options = {"reconnect": True, "reconnect_interval": 0.1, "reconnect_log": False}
        await messaging.step("connect", "c", f"127.0.0.1:{served.port}", options)
        await messaging.step("session", "s", "c")
        await messaging.step("receiver", "in", "s", "q")
        await send(served, "a", "b", "c")
        found = await messaging.step("fetch", "in")
        await messaging.step("acknowledge", "s", found["key"])
        assert (await messaging.step("fetch", "in"))["content"] == "b"
        for peer in list(served.broker.container.connections):
            peer.close()
        again = await messaging.step("fetch", "in")
        assert (again["content"], again["redelivered"]) == ("b", True)
        await messaging.step("acknowledge", "s", again["key"])
        last = await messaging.step("fetch", "in")
        assert (last["content"], bool(last.get("redelivered"))) == ("c", False)
        await messaging.step("acknowledge", "s", last["key"])
        stats = served.broker.stats("q")
        assert (stats.available, stats.acquired) == (0, 0)
        await messaging.step("close", "c")
