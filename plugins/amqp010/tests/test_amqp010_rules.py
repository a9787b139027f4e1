"""Rules of the published 0-10 that no other test checks: connections, sessions, exchanges and queues.

``specification/rules.toml`` says which rule each of these tests checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amqp_rt_amqp010.layouts import (
    ExchangeDeclare,
    ExchangeQuery,
    ExchangeQueryResult,
    QueueDeclare,
    QueueQuery,
    QueueQueryResult,
)
from declaring010 import DeclaringSession
from octets010 import Operation, Struct, frames
from protocol010 import Session
from served010 import Served, serving
from worlds010 import Client, World

from amqp_rt import Broker
from amqp_rt.events import Closed, ConnectionFailed

pytestmark = pytest.mark.req("D19")


def started() -> Client:
    """A client that answers nothing after ``connection.start``."""
    client = World().connect(opened=False, wire={"by_hand": ["connection.start"]})
    client.wire.start()
    client.pump()
    return client


# --- connection --------------------------------------------------------------------------------------


def test_the_server_describes_itself() -> None:
    (start,) = started().received("connection.start")
    properties = start.server_properties
    assert properties["host"] == "server"
    for name in ("product", "version", "platform", "copyright", "information"):
        assert properties[name], name
    assert "en_US" in start.locales.items


def test_the_range_of_heartbeats_is_told() -> None:
    client = World().connect()
    (tune,) = client.received("connection.tune")
    assert tune.heartbeat_min is not None
    assert tune.heartbeat_min <= tune.heartbeat_max


@pytest.mark.parametrize("insist", [False, True])
def test_no_client_is_redirected(insist: bool) -> None:
    client = World().connect(opened=False, wire={"by_hand": ["connection.tune"]})
    client.wire.start()
    client.pump()
    client.say("connection.tune-ok", channel_max=5, max_frame_size=4096)
    client.say("connection.open", virtual_host="/", insist=insist)
    assert client.wire.opened
    assert client.received("connection.redirect") == []


def test_a_socket_that_ends_without_a_close_is_reported() -> None:
    world = World()
    lost, closed = world.connect(), world.connect()
    lost.lose()
    (failed,) = [each for each in lost.events if isinstance(each, ConnectionFailed)]
    assert failed.error.description
    closed.say("connection.close", reply_code=200)
    assert not any(isinstance(each, ConnectionFailed) for each in closed.events)
    assert isinstance(closed.events[-1], Closed)


async def queue_count(served: Served, virtual_host: str | None, name: str) -> int | None:
    async with served.client(virtual_host=virtual_host) as client:
        session = await client.session(b"q")
        found = await session.call("queue.query", queue=name)
        assert found is not None
        return found.message_count if found.queue else None


async def test_virtual_hosts_share_nothing() -> None:
    async with serving(virtual_hosts=["", "berlin"]) as served:
        async with served.client(virtual_host="berlin") as client:
            session = await client.session(b"s")
            await session.call("queue.declare", queue="q")
            await session.call("exchange.declare", exchange="e", type="fanout")
            await session.call("exchange.bind", queue="q", exchange="amq.fanout")
            session.transfer("amq.fanout", b"x", accept_mode=None)
            await session.sync()
        assert await queue_count(served, "berlin", "q") == 1
        assert await queue_count(served, None, "q") is None
        async with served.client() as client:
            session = await client.session(b"s")
            found = await session.call("exchange.query", name="e")
            assert found is not None
            assert found.not_found
            # This fanout exchange is another one, without the binding.
            session.transfer("amq.fanout", b"x", accept_mode=None)
            await session.sync()
        assert await queue_count(served, "berlin", "q") == 1


# --- session -----------------------------------------------------------------------------------------


def test_answers_to_flush_have_no_fragments() -> None:
    """Parts of commands are never kept, so that each command is expected and confirmed as a whole."""
    client = World().connect()
    session = client.session(timeout=30)
    client.run(session, "execution.sync")
    transfer = Operation("message.transfer", {"destination": ""}, False, None, b"x" * 100)
    first, *_ = frames(transfer.segments(), session.channel, 60)
    client.feed(first)
    session.flush()
    client.pump()
    assert session.expected == [(1, 1)]
    for name in ("session.expected", "session.confirmed"):
        (answer,) = client.received(name)
        assert answer.fragments is None


def test_what_is_known_to_be_complete_is_not_told_again() -> None:
    client = World().connect()
    session = client.session()
    for _ in range(4):
        client.run(session, "execution.sync")
    session.know(0, 1)
    client.pump()
    client.run(session, "execution.sync")
    session.flush()
    client.pump()
    assert client.received("session.completed")[-1].commands == [(2, 4)]
    assert session.confirmed == [(2, 4)]


def test_a_gap_over_complete_commands_changes_nothing() -> None:
    client = World().connect()
    session = client.session()
    for _ in range(3):
        client.run(session, "execution.sync")
    session.gap(0, 1, 2)
    session.flush()
    client.pump()
    assert session.detached is None
    assert session.expected == [(3, 3)]
    assert client.received("session.completed")[-1].commands == [(0, 2)]
    client.run(session, "execution.sync")


# --- exchanges and queues ----------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Client:
    return world.connect()


@pytest.fixture
def session(client: Client) -> Session:
    return client.session()


@pytest.mark.parametrize("type_name", ["direct", "fanout", "topic", "headers"])
def test_exchanges_of_all_types_are_declared(
    client: Client, session: Session, type_name: str
) -> None:
    client.run(session, "exchange.declare", exchange="e", type=type_name)
    assert client.run(session, "exchange.query", name="e").type == type_name
    assert client.run(session, "exchange.query", name=f"amq.{type_name}").type == type_name


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("exchange.declare", {"exchange": "", "type": "direct"}, 542),
        ("exchange.declare", {"exchange": "", "type": "direct", "passive": True}, 542),
        ("exchange.delete", {"exchange": ""}, 542),
        ("exchange.bind", {"exchange": "", "queue": "q", "binding-key": "other"}, 542),
        ("exchange.unbind", {"exchange": "", "queue": "q", "binding-key": "q"}, 542),
    ],
    ids=["declare", "declare-passively", "delete", "bind", "unbind"],
)
def test_the_default_exchange_cannot_be_changed(
    client: Client, session: Session, name: str, fields: dict[str, Any], code: int
) -> None:
    client.run(session, "queue.declare", queue="q")
    words = {key.replace("-", "_"): value for key, value in fields.items()}
    assert client.fails(session, name, **words) == code
    again = client.session(b"again")
    again.transfer("", b"x", key="q", accept_mode=None)
    client.run(again, "execution.sync")
    assert client.world.stats("q").available == 1


def test_there_may_be_many_exchanges_and_queues(client: Client, session: Session) -> None:
    for number in range(300):
        session.send("exchange.declare", exchange=f"e{number}", type="direct")
        session.send("queue.declare", queue=f"q{number}")
    client.run(session, "execution.sync")
    for number in (0, 299):
        assert client.run(session, "exchange.query", name=f"e{number}").type == "direct"
        assert client.run(session, "queue.query", queue=f"q{number}").queue == f"q{number}"


def test_a_queue_with_many_bindings_gets_a_message_once(client: Client, session: Session) -> None:
    client.run(session, "queue.declare", queue="q")
    keys = ["animals.#", "animals.dogs.*", "animals.dogs.chihuahua", "*.dogs.#", "#"]
    for key in keys:
        client.run(session, "exchange.bind", queue="q", exchange="amq.topic", binding_key=key)
    for exchange in ("amq.direct", "amq.fanout", "amq.headers"):
        client.run(session, "exchange.bind", queue="q", exchange=exchange, binding_key="k")
    session.transfer("amq.topic", b"x", key="animals.dogs.chihuahua", accept_mode=None)
    client.run(session, "execution.sync")
    assert client.world.stats("q").available == 1
    session.transfer("amq.direct", b"x", key="k", accept_mode=None)
    session.transfer("amq.fanout", b"x", key="k", accept_mode=None)
    client.run(session, "execution.sync")
    assert client.world.stats("q").available == 3


def test_a_message_goes_to_one_alternate_exchange(client: Client, session: Session) -> None:
    """From the first exchange to the second, but not from there to the third."""
    for exchange, alternate in (("third", None), ("second", "third"), ("first", "second")):
        client.run(
            session,
            "exchange.declare",
            exchange=exchange,
            type="direct",
            alternate_exchange=alternate,
        )
        client.run(session, "queue.declare", queue=exchange)
        client.run(session, "exchange.bind", queue=exchange, exchange=exchange, binding_key="k")
    for key in ("k", "other"):
        session.transfer("first", b"x", key=key, accept_mode=None)
    client.run(session, "exchange.unbind", queue="first", exchange="first", binding_key="k")
    session.transfer("first", b"x", key="k", accept_mode=None)
    client.run(session, "exchange.unbind", queue="second", exchange="second", binding_key="k")
    session.transfer("first", b"x", key="k", accept_mode=None)
    client.run(session, "execution.sync")
    counts = [client.world.stats(name).available for name in ("first", "second", "third")]
    assert counts == [1, 1, 0]


def test_queues_take_all_content_in_any_mix(client: Client, session: Session) -> None:
    """Through an exchange of each type to each of several queues; each class has its own consumers."""
    exchanges = ("amq.direct", "amq.fanout", "amq.topic", "amq.headers")
    queues = ("q1", "q2", "q3")
    for queue in queues:
        client.run(session, "queue.declare", queue=queue)
        for exchange in exchanges:
            client.run(session, "exchange.bind", queue=queue, exchange=exchange, binding_key="k")
    for exchange in exchanges:
        session.transfer(exchange, b"message", key="k", accept_mode=None)
        client.run(
            session,
            "stream.publish",
            headers=[Struct("stream-properties")],
            body=b"packet",
            exchange=exchange,
            routing_key="k",
        )
    client.run(session, "execution.sync")
    assert [client.world.stats(queue).available for queue in queues] == [8, 8, 8]
    client.run(session, "stream.consume", queue="q1", consumer_tag="c")
    client.pump()
    packets = [each for each in session.others if each.name == "stream.deliver"]
    assert [each.body for each in packets] == [b"packet"] * 4
    assert client.world.stats("q1").available == 4


async def test_durable_and_transient_ones_are_there(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        here = DeclaringSession(broker)
        for durable in (False, True):
            name = f"durable-{durable}".lower()
            here.execute(QueueDeclare(queue=name, durable=durable))
            here.execute(ExchangeDeclare(exchange=name, type="fanout", durable=durable))
    async with Broker(store=store) as broker:
        here = DeclaringSession(broker)
        for durable in (False, True):
            name = f"durable-{durable}".lower()
            queue = here.execute(QueueQuery(queue=name))
            exchange = here.execute(ExchangeQuery(name=name))
            assert isinstance(queue, QueueQueryResult)
            assert isinstance(exchange, ExchangeQueryResult)
            assert (queue.queue, queue.durable) == ((name, True) if durable else (None, False))
            assert (exchange.not_found, exchange.durable) == (not durable, durable)
