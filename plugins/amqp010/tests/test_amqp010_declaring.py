"""Clients declare queues and exchanges over sockets; those of other protocols find them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front
from amqp_rt_amqp091 import BasicProperties
from amqp_rt_amqp091 import Front as Front091
from amqp_rt_amqp091 import connect as connect091
from driven010 import Driven, Refused
from protocol010 import Failed
from served010 import Served, serving

from amqp_rt import Broker, connect
from amqp_rt.broker import Queue
from amqp_rt.message import Message

pytestmark = pytest.mark.req("D2")


@asynccontextmanager
async def crossing() -> AsyncIterator[Served]:
    """Run a broker with 0-10, 0-9-1 and 1.0 at one port."""
    front = Front()
    async with Broker(fronts=[front, Front091()], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield Served(broker, front, url)


async def test_a_client_declares_binds_queries_and_deletes() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("exchange.declare", exchange="e", type="topic")
        await session.call(
            "queue.declare", queue="q", alternate_exchange="e", arguments={"qpid.max_count": 5}
        )
        await session.call("exchange.bind", queue="q", exchange="e", binding_key="a.#")
        bound = await session.call("exchange.bound", exchange="e", queue="q", binding_key="a.*")
        assert bound is not None
        assert bound.fields == {"key-not-matched": True}
        found = await session.call("queue.query", queue="q")
        assert found is not None
        assert found.fields == {
            "queue": "q",
            "alternate-exchange": "e",
            "arguments": {"qpid.max_count": 5},
            "message-count": 0,
            "subscriber-count": 0,
        }
        nothing = await session.call("queue.query", queue="none")
        assert nothing is not None
        assert nothing.fields == {}
        await session.call("exchange.unbind", queue="q", exchange="e", binding_key="a.#")
        await session.call("queue.delete", queue="q")
        await session.call("exchange.delete", exchange="e")
        found = await session.call("exchange.query", name="e")
        assert found is not None
        assert found.fields == {"not-found": True}


async def test_a_refused_declaration_ends_its_session_only() -> None:
    async with serving() as served, served.client() as client:
        failing, other = await client.session(b"failing"), await client.session(b"other")
        with pytest.raises(Failed) as caught:
            await failing.call("queue.declare", queue="amq.mine")
        assert caught.value.code == 530
        await other.call("queue.declare", queue="mine")


@pytest.mark.req("D10")
async def test_an_exclusive_queue_stays_with_its_session_through_connections() -> None:
    async with serving() as served:
        async with served.client() as client:
            session = await client.session(b"s")
            session.state.ask_timeout(60)
            await session.call("queue.declare", queue="q", exclusive=True, auto_delete=True)
            await client.cut()
        async with served.client() as client:
            stranger = await client.session(b"other")
            with pytest.raises(Failed) as caught:
                await stranger.call("queue.declare", queue="q", passive=True)
            assert caught.value.code == 405
            again = await client.resume(session.state)
            await again.call("queue.declare", queue="q", passive=True)
            await again.detach()


async def test_a_purge_in_steps_holds_up_later_commands_of_its_session_only() -> None:
    async with serving() as served, served.client() as client:
        await served.broker.declare(Queue("q"))
        for number in range(5_000):
            served.broker.publish("q", Message(number).encode())
        session, other = await client.session(b"s"), await client.session(b"other")
        purge = session.send("queue.purge", queue="q")
        query = session.send("queue.query", queue="q")
        await other.sync()
        await session.done(purge)
        found = await session.done(query)
        assert found is not None
        assert found.fields["message-count"] == 0


async def test_clients_of_other_protocols_use_what_0_10_declares() -> None:
    async with crossing() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("exchange.declare", exchange="e", type="headers")
        await session.call("queue.declare", queue="q", arguments={"qpid.policy_type": "ring"})
        await session.call(
            "exchange.bind",
            queue="q",
            exchange="e",
            binding_key="",
            arguments={"x-match": b"any", "colour": b"red"},
        )
        async with connect091(served.url) as peer, peer.channel() as channel:
            await channel.declare_queue("q", passive=True)
            for colour, body in (("red", b"one"), ("blue", b"none")):
                properties = BasicProperties(headers={"colour": colour})
                await channel.publish(body, exchange="e", properties=properties)
            message = await channel.get("q")
            assert message is not None
            assert message.body == b"one"
            assert await channel.get("q") is None
        async with connect(served.url) as peer, peer.sender("q") as sender:
            await sender.send("two")
        found = await session.call("queue.query", queue="q")
        assert found is not None
        assert found.fields["message-count"] == 2


async def test_0_10_uses_what_other_protocols_declare() -> None:
    async with crossing() as served, served.client() as client:
        session = await client.session(b"s")
        async with connect091(served.url) as peer, peer.channel() as channel:
            await channel.declare_exchange("e", "fanout")
            await channel.declare_queue("q", auto_delete=True)
            await session.call("queue.declare", queue="q", durable=True)
            await session.call("exchange.declare", exchange="e", type="fanout", durable=True)
            await session.call("exchange.bind", queue="q", exchange="e")
            await channel.publish(b"one", exchange="e")
            found = await session.call("queue.query", queue="q")
        assert found is not None
        assert found.fields["message-count"] == 1
        assert found.fields["auto-delete"]


@pytest.mark.req("D6")
async def test_messages_are_routed_to_other_exchanges() -> None:
    """By bindings between exchanges, which 0-10 has no command for, and by alternate exchanges."""
    async with crossing() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("exchange.declare", exchange="rest", type="fanout")
        for name in ("first", "second"):
            await session.call(
                "exchange.declare", exchange=name, type="direct", alternate_exchange="rest"
            )
            await session.call("queue.declare", queue=name)
            await session.call("exchange.bind", queue=name, exchange=name, binding_key="k")
        await session.call("queue.declare", queue="unrouted")
        await session.call("exchange.bind", queue="unrouted", exchange="rest")
        async with connect091(served.url) as peer, peer.channel() as channel:
            await channel.bind_exchange("second", "first", "k")
        for key, body in (("k", b"through both"), ("other", b"to no queue")):
            session.transfer("first", body, key=key, accept_mode=None)
        await session.sync()
        for queue, body in (
            ("first", b"through both"),
            ("second", b"through both"),
            ("unrouted", b"to no queue"),
        ):
            await session.subscribe(queue, queue)
            message = await session.message()
            assert (message.body, message.destination) == (body, queue)
            found = await session.call("queue.query", queue=queue)
            assert found is not None
            assert found.fields["message-count"] == 0


async def test_messages_of_a_browse_only_queue_stay() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q", arguments={"qpid.browse-only": 1})
        session.transfer("", b"one", key="q")
        for name in ("first", "second"):
            await session.subscribe("q", name)
            message = await session.message()
            assert message.body == b"one"
            assert message.id is not None
            session.accept(message.id)
        await session.sync()
        found = await session.call("queue.query", queue="q")
        assert found is not None
        assert found.fields["message-count"] == 1


async def test_a_no_local_queue_is_for_messages_of_other_connections() -> None:
    async with serving() as served, served.client() as client, served.client() as other:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q", arguments={"no-local": True})
        await session.subscribe("q", "d")
        session.transfer("", b"own", key="q")
        await session.sync()
        stranger = await other.session(b"other")
        stranger.transfer("", b"other", key="q")
        assert (await session.message()).body == b"other"


async def test_messages_of_a_deleted_queue_go_to_its_alternate_exchange() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("exchange.declare", exchange="e", type="fanout")
        await session.call("queue.declare", queue="orphans")
        await session.call("exchange.bind", queue="orphans", exchange="e")
        await session.call("queue.declare", queue="q", alternate_exchange="e")
        session.transfer("", b"one", key="q")
        await session.call("queue.delete", queue="q")
        await session.subscribe("orphans", "d")
        assert (await session.message()).body == b"one"


# --- qpid-python --------------------------------------------------------------------------------------


@pytest.mark.foreign
@pytest.mark.slow
async def test_qpid_python_declares_binds_and_queries(commands: Driven) -> None:
    async with serving() as served:
        step = commands.step
        await step("connect", "c", "127.0.0.1", served.port)
        await step("session", "s", "c")

        async def call(name: str, /, **fields: Any) -> Any:
            named = {key.replace("_", "-"): value for key, value in fields.items()}
            return (await step("command", "s", name, named))["result"]

        await call("exchange.declare", exchange="e", type="headers")
        await call("queue.declare", queue="q", arguments={"qpid.policy_type": "ring"})
        await call("exchange.bind", queue="q", exchange="e", arguments={"x-match": "all", "a": "b"})
        bound = await call("exchange.bound", exchange="e", queue="q")
        assert bound == {}
        found = await call("queue.query", queue="q")
        assert (found["queue"], found["message-count"]) == ("q", 0)
        assert found["arguments"] == {"qpid.policy_type": "ring"}
        assert await call("queue.query", queue="none") == {}
        assert (await call("exchange.query", name="amq.topic"))["type"] == "topic"
        assert (await call("exchange.query", name="none"))["not-found"]
        await call("exchange.unbind", queue="q", exchange="e", binding_key="")
        with pytest.raises(Refused) as caught:
            await call("exchange.unbind", queue="q", exchange="e", binding_key="")
        assert caught.value.code == 404
        await trio.to_thread.run_sync(partial(commands, "close", "c"))


@pytest.mark.foreign
@pytest.mark.slow
async def test_qpid_messaging_creates_asserts_and_deletes_by_addresses(messaging: Driven) -> None:
    async with serving() as served:
        step = messaging.step
        await step("connect", "c", f"127.0.0.1:{served.port}")
        await step("session", "s", "c")
        declare = "x-declare: {arguments: {'qpid.max_count': 5}}"
        bind = "x-bindings: [{exchange: 'amq.topic', key: 'eu.#'}]"
        address = f"q; {{create: always, node: {{{declare}, {bind}}}}}"
        await step("sender", "out", "s", address)
        await step(
            "receiver", "in", "s", "q; {assert: always, node: {type: queue}, delete: always}"
        )
        await step("receiver", "topic", "s", "amq.topic/eu.*")
        await step("sender", "news", "s", "amq.topic")
        await step("send", "news", "hello", {"subject": "eu.berlin"})
        for name in ("in", "topic"):
            found = await step("fetch", name)
            assert found["content"] == "hello"
        with pytest.raises(Refused):
            await step("sender", "none", "s", "missing")
        await step("acknowledge", "s")
        await step("close", "c")
        names = [each.name for each in served.broker.host.space().declarations()]
        assert "q" not in names
