"""What a store, or its absence, means to clients of 0-9-1."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_amqp091 import Front
from amqp_rt_amqp091 import methods as m
from worlds091 import Client, Content, World, published

from amqp_rt import Broker
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.nodes import Queue
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore

PEERS = Path(__file__).parent / "peers"
PERSISTENT = m.BasicProperties(delivery_mode=2)
TRANSIENT = m.BasicProperties(delivery_mode=1)


class SlowStore:
    """An executor whose commits wait for a sign."""

    def __init__(self) -> None:
        self.open = trio.Event()

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        if getattr(call, "__name__", "") == "commit":
            await self.open.wait()
        await trio.lowlevel.checkpoint()
        return call(*args)


@asynccontextmanager
async def slow_world() -> AsyncIterator[tuple[World, SlowStore]]:
    """A broker with a durable queue *q*, and a store that is kept waiting from then on."""
    slow = SlowStore()
    world = World(volatile=False, journal=Journal(MemoryStore(), slow))
    async with trio.open_nursery() as nursery:
        await world.host.restore()
        nursery.start_soon(world.host.run)
        slow.open.set()
        world.connect().say(1, m.QueueDeclare(queue="q", durable=True))
        await world.host.wait_kept()
        slow.open = trio.Event()
        yield world, slow
        slow.open.set()
        nursery.cancel_scope.cancel()


async def settle(client: Client) -> None:
    """Let the journal run as far as it may, and the client hear of it."""
    await trio.testing.wait_all_tasks_blocked(0.01)
    client.tick()


def named(heard: list[tuple[int, Any]]) -> list[str]:
    return [(each.method if isinstance(each, Content) else each).name for _, each in heard]


@pytest.mark.req("N17")
@pytest.mark.parametrize("properties", [PERSISTENT, TRANSIENT])
async def test_a_get_finds_what_its_channel_has_published_however_slow_the_store_is(
    properties: m.BasicProperties,
) -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        # The transient one waits behind it, so that order stays order.
        client.publish(1, "q", b"first", properties=PERSISTENT)
        client.publish(1, "q", b"second", properties=properties)
        client.say(1, m.BasicGet(queue="q", no_ack=True), m.BasicGet(queue="q", no_ack=True))
        await settle(client)
        assert client.take() == []
        slow.open.set()
        await settle(client)
        assert [each.body for each in client.contents()] == [b"first", b"second"]


@pytest.mark.req("N17")
@pytest.mark.parametrize(
    ("method", "answer", "count"),
    [
        (m.QueueDeclare(queue="q", passive=True), m.QueueDeclareOk, 1),
        (m.QueueDeclare(queue="q", durable=True), m.QueueDeclareOk, 1),
        (m.QueuePurge(queue="q"), m.QueuePurgeOk, 1),
        (m.QueueDelete(queue="q"), m.QueueDeleteOk, 1),
    ],
    ids=["look", "declare", "purge", "delete"],
)
async def test_methods_count_what_their_channel_has_published(
    method: m.Method, answer: type[m.Method], count: int
) -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        client.publish(1, "q", b"x", properties=PERSISTENT)
        client.say(1, method)
        assert client.take() == []
        slow.open.set()
        await settle(client)
        heard: Any = client.answer(answer)
        assert heard.message_count == count


@pytest.mark.req("N17")
async def test_a_queue_with_a_message_that_is_being_stored_is_not_empty() -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        client.publish(1, "q", b"x", properties=PERSISTENT)
        client.say(1, m.QueueDelete(queue="q", if_empty=True))
        slow.open.set()
        await settle(client)
        closed = client.answer(m.ChannelClose)
        assert (closed.reply_code, closed.class_id, closed.method_id) == (406, 50, 40)


@pytest.mark.req("N17")
async def test_only_the_channel_that_has_published_waits() -> None:
    async with slow_world() as (world, slow):
        client = world.connect(opened=False)
        client.open(channels=2)
        client.say(2, m.QueueDeclare(queue="other"))
        client.publish(1, "q", b"x", properties=PERSISTENT)
        client.say(1, m.BasicGet(queue="q", no_ack=True))
        client.say(2, m.BasicGet(queue="other"))
        client.say(1, m.BasicGet(queue="other"))
        assert named(client.take()) == ["queue.declare-ok", "basic.get-empty"]
        # The channel that waits can be closed meanwhile.
        client.say(1, m.ChannelClose())
        assert client.take() == []
        slow.open.set()
        await settle(client)
        assert named(client.take()) == ["basic.get-ok", "basic.get-empty", "channel.close-ok"]


@pytest.mark.req("N17")
async def test_a_channel_that_ends_while_it_waits_does_nothing_afterwards() -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        client.publish(1, "q", b"x", properties=PERSISTENT)
        client.say(1, m.QueuePurge(queue="q"))
        client.handle(client.engine.receive_eof(world.now))
        slow.open.set()
        await settle(client)
        assert world.stats("q").available == 1


@pytest.mark.req("N17")
async def test_pika_gets_what_it_has_published(tmp_path: Any) -> None:
    pika = pytest.importorskip("pika")

    def client(port: int) -> list[bytes | None]:
        parameters = pika.ConnectionParameters("127.0.0.1", port)
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            found = []
            for number in range(50):
                body = b"%d" % number
                channel.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=2))
                found.append(channel.basic_get("q", auto_ack=True)[2])
            return found

    async with Broker(fronts=[Front()], store=f"sqlite:{tmp_path / 'b.db'}") as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2].rstrip("/"))
        found = await trio.to_thread.run_sync(client, port)
    assert found == [b"%d" % number for number in range(50)]


# --- Without a store ---


@pytest.mark.req("N11", "N12")
@pytest.mark.parametrize(
    ("method", "said"),
    [
        (m.QueueDeclare(queue="q", durable=True), "queue 'q'"),
        (m.ExchangeDeclare(exchange="e", type="direct", durable=True), "exchange 'e'"),
    ],
    ids=["queue", "exchange"],
)
def test_nothing_durable_is_declared_where_nothing_is_stored(method: m.Method, said: str) -> None:
    client = World(volatile=False).connect()
    client.say(1, method)
    closed = client.answer(m.ChannelClose)
    assert closed.reply_code == 406
    for each in (said, "--store", "--volatile"):
        assert each in closed.reply_text


@pytest.mark.req("N12")
def test_what_goes_with_its_connection_may_be_called_durable() -> None:
    client = World(volatile=False).connect()
    client.say(1, m.QueueDeclare(queue="q", durable=True, exclusive=True))
    client.answer(m.QueueDeclareOk)
    client.publish(1, "q", b"x", properties=PERSISTENT)
    client.say(1, m.BasicGet(queue="q", no_ack=True))
    assert [each.body for each in client.contents()] == [b"x"]


def without_store() -> tuple[World, Client]:
    """A broker without a store that has a queue *q*, and one that takes part in it."""
    world = World(volatile=False)
    world.host.space().declare(Queue("q"))
    return world, world.connect()


@pytest.mark.req("N13")
@pytest.mark.parametrize("mandatory", [False, True])
def test_a_persistent_message_that_is_not_stored_ends_its_channel(
    mandatory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world, client = without_store()
    with caplog.at_level(logging.WARNING, "amqp_rt.broker"):
        client.publish(1, "q", b"x", mandatory=mandatory, properties=PERSISTENT)
    closed = client.answer(m.ChannelClose)
    assert (closed.reply_code, closed.class_id, closed.method_id) == (406, 60, 40)
    for each in ("no store", "--store", "--volatile"):
        assert each in closed.reply_text
    assert world.stats("q").available == 0


@pytest.mark.req("N13", "N14")
def test_a_persistent_message_that_is_not_stored_is_nacked_where_confirms_are_on() -> None:
    _, client = without_store()
    client.say(1, m.ConfirmSelect(nowait=True))
    client.publish(1, "q", b"x", properties=PERSISTENT)
    assert client.answer(m.BasicNack).delivery_tag == 1
    client.publish(1, "q", b"x", properties=TRANSIENT)
    assert client.answer(m.BasicAck).delivery_tag == 2


@pytest.mark.req("N14")
def test_a_transaction_with_a_persistent_message_that_is_not_stored_is_not_committed() -> None:
    world, client = without_store()
    client.say(1, m.TxSelect())
    client.take()
    client.publish(1, "q", b"kept", properties=TRANSIENT)
    client.publish(1, "q", b"x", properties=PERSISTENT)
    client.say(1, m.TxCommit())
    closed = client.answer(m.ChannelClose)
    assert closed.reply_code == 406
    assert "--store" in closed.reply_text
    assert world.stats("q").available == 0


@pytest.mark.req("N13")
def test_a_message_without_room_is_dropped_and_its_channel_goes_on() -> None:
    world = World()
    world.host.space().declare(Queue("q", length_max=1, overflow="reject"))
    client = world.connect()
    for _ in range(2):
        client.publish(1, "q", b"x")
    client.say(1, m.BasicGet(queue="q", no_ack=True))
    assert named(client.take()) == ["basic.get-ok"]


# --- Confirms ---


def acknowledgements(client: Client) -> list[tuple[int, bool]]:
    """Numbers that were confirmed, and whether those before them were meant too."""
    heard = [method for _, method in client.take()]
    assert all(isinstance(each, m.BasicAck) for each in heard), heard
    return [(each.delivery_tag, each.multiple) for each in heard]


def published_as_one(client: Client, *what: tuple[str, m.BasicProperties]) -> None:
    """Messages of one chunk, each with its queue, whose confirms may be said together."""
    client.feed(b"".join(published(1, key, b"x", "", False, kind) for key, kind in what))


@pytest.mark.req("N14")
async def test_confirms_do_not_speak_for_messages_that_are_not_stored() -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        client.say(1, m.QueueDeclare(queue="light"), m.ConfirmSelect(nowait=True))
        client.take()
        fast, kept = ("light", TRANSIENT), ("q", PERSISTENT)
        # Nothing is open before them: one acknowledgement is enough, and one message needs no more.
        published_as_one(client, fast)
        assert acknowledgements(client) == [(1, False)]
        published_as_one(client, fast, fast)
        assert acknowledgements(client) == [(3, True)]
        # Up to the first that is open; each of the others by itself.
        published_as_one(client, fast, fast, kept, fast, fast)
        assert acknowledgements(client) == [(5, True), (7, False), (8, False)]
        published_as_one(client, fast, kept, fast)
        assert acknowledgements(client) == [(9, False), (11, False)]
        slow.open.set()
        await settle(client)
        # The last one: 6 and 10 are stored, and with them everything is confirmed.
        assert acknowledgements(client) == [(10, True)]
        published_as_one(client, fast)
        assert acknowledgements(client) == [(12, False)]


@pytest.mark.req("N14")
async def test_the_first_open_message_alone_is_not_confirmed_with_those_after_it() -> None:
    async with slow_world() as (world, slow):
        client = world.connect()
        client.say(1, m.QueueDeclare(queue="light"), m.ConfirmSelect(nowait=True))
        client.take()
        published_as_one(client, ("q", PERSISTENT), ("light", TRANSIENT), ("light", TRANSIENT))
        assert acknowledgements(client) == [(2, False), (3, False)]
        slow.open.set()
        await settle(client)
        assert acknowledgements(client) == [(1, False)]


# --- Real clients, on a store ---


@asynccontextmanager
async def stored(tmp_path: Any) -> AsyncIterator[int]:
    """The port of a broker with a store."""
    async with Broker(fronts=[Front()], store=f"sqlite:{tmp_path / 'b.db'}") as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield int(url.rpartition(":")[2].rstrip("/"))


@pytest.mark.req("N14", "R12")
async def test_py_amqp_selects_commits_and_rolls_back(tmp_path: Any) -> None:
    amqp = pytest.importorskip("amqp")

    def message(body: str) -> Any:
        return amqp.Message(body, delivery_mode=2)

    def client(port: int) -> None:
        with amqp.Connection(f"127.0.0.1:{port}") as connection:
            channel, other = connection.channel(), connection.channel()
            channel.queue_declare("in", durable=True, auto_delete=False)
            channel.queue_declare("out", durable=True, auto_delete=False)
            other.basic_publish(message("job"), routing_key="in")
            assert other.queue_declare("in", passive=True).message_count == 1
            channel.tx_select()
            # Rolled back: what was published never was, and what was answered can be answered anew.
            job = channel.basic_get("in")
            channel.basic_publish(message("never"), routing_key="out")
            channel.basic_ack(job.delivery_tag)
            channel.tx_rollback()
            assert other.basic_get("out") is None
            # Not committed: nobody sees it.
            channel.basic_publish(message("result"), routing_key="out")
            channel.basic_ack(job.delivery_tag)
            assert other.basic_get("out") is None
            channel.tx_commit()
            result = other.basic_get("out", no_ack=True)
            assert result.body == "result"
            # A transaction follows the one before; what is open when the channel closes is undone.
            channel.basic_publish(message("late"), routing_key="out")
            channel.close()
            assert other.basic_get("out") is None
            assert other.basic_get("in") is None

    async with stored(tmp_path) as port:
        with trio.fail_after(30):
            await trio.to_thread.run_sync(client, port)


@pytest.mark.req("N14")
async def test_py_amqp_has_persistent_messages_confirmed(tmp_path: Any) -> None:
    amqp = pytest.importorskip("amqp")

    def client(port: int) -> None:
        with amqp.Connection(f"127.0.0.1:{port}", confirm_publish=True) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True, auto_delete=False)
            for number in range(20):
                said = amqp.Message(f"{number}", delivery_mode=2)
                # Returns when it is confirmed.
                channel.basic_publish(said, routing_key="q", timeout=10)
            assert channel.queue_declare("q", passive=True).message_count == 20
            full = {"x-max-length": 1, "x-overflow": "reject-publish"}
            channel.queue_declare("full", durable=True, auto_delete=False, arguments=full)
            channel.basic_publish(amqp.Message("1"), routing_key="full", timeout=10)
            with pytest.raises(amqp.exceptions.MessageNacked):
                channel.basic_publish(amqp.Message("2"), routing_key="full", timeout=10)

    async with stored(tmp_path) as port:
        with trio.fail_after(30):
            await trio.to_thread.run_sync(client, port)


@pytest.mark.req("N14", "R12")
async def test_pika_selects_commits_and_rolls_back_on_a_store(tmp_path: Any) -> None:
    pika = pytest.importorskip("pika")
    persistent = pika.BasicProperties(delivery_mode=2)

    def first(port: int) -> None:
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.tx_select()
            channel.basic_publish("", "q", b"undone", persistent)
            channel.tx_rollback()
            channel.basic_publish("", "q", b"done", persistent)
            channel.tx_commit()
            channel.basic_publish("", "q", b"open", persistent)

    def second(port: int) -> list[bytes | None]:
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
            channel = connection.channel()
            return [channel.basic_get("q", auto_ack=True)[2] for _ in range(2)]

    with trio.fail_after(60):
        async with stored(tmp_path) as port:
            await trio.to_thread.run_sync(first, port)
        # Committed messages are there after a restart, and no others.
        async with stored(tmp_path) as port:
            assert await trio.to_thread.run_sync(second, port) == [b"done", None]


@pytest.mark.req("N14")
async def test_amqplib_has_persistent_messages_confirmed_or_nacked(tmp_path: Any) -> None:
    node = shutil.which("node")
    if node is None or not (PEERS / "node_modules" / "amqplib").is_dir():
        pytest.skip("amqplib is not installed: npm install in tests/peers of this plug-in")

    def client(port: int) -> str:
        done = subprocess.run(
            [str(node), str(PEERS / "amqplib_confirms.js"), f"amqp://guest:guest@127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    async with stored(tmp_path) as port:
        with trio.fail_after(40):
            said = await trio.to_thread.run_sync(client, port)
    assert said.splitlines() == ["confirmed 100", "waiting 100", "acknowledged 1", "nacked 1"]


@pytest.mark.req("N14")
def test_confirms_are_said_in_the_order_of_their_numbers() -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="a"), m.QueueDeclare(queue="b"), m.ConfirmSelect())
    client.take()
    # Messages for one queue are handed over together.
    published_as_one(client, ("a", TRANSIENT), ("b", TRANSIENT), ("a", TRANSIENT))
    assert acknowledgements(client) == [(3, True)]
    published_as_one(client, ("b", TRANSIENT), ("a", TRANSIENT), ("b", TRANSIENT))
    assert acknowledgements(client) == [(6, True)]


# --- One body in many queues ---

_MIB = 1024 * 1024
_NAMES = [f"q{number}" for number in range(100)]


@asynccontextmanager
async def kept_world(path: Path) -> AsyncIterator[tuple[World, Client, SQLiteStore]]:
    """A broker on the store *path*, and a client of it."""
    store = SQLiteStore(path)
    journal = Journal(store)
    world = World(volatile=False, journal=journal)
    await world.host.restore()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        yield world, world.connect(), store
        await world.host.wait_kept()
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await journal.close()


async def published_to_all(world: World, client: Client, body: bytes, how: str) -> None:
    """Have all queues get *body* by one message, and wait until they have kept it."""
    if how == "fanout":
        client.publish(1, "", body, exchange="amq.fanout", properties=PERSISTENT)
    else:
        headers: dict[str, object] = {how: _NAMES[1:]}
        properties = m.BasicProperties(delivery_mode=2, headers=headers)
        client.publish(1, _NAMES[0], body, properties=properties)
    while sum(world.stats(name).available for name in _NAMES) < len(_NAMES):
        await trio.testing.wait_all_tasks_blocked()
        await world.host.wait_kept()
    assert {world.stats(name).available for name in _NAMES} == {1}


async def payloads(world: World, names: list[str]) -> int:
    """Count the payloads in memory that these queues have, with one message each."""
    found = [each for name in names for each in await world.host.space().find(name).peek(9)]
    assert len(found) == len(names)
    return len({id(each) for each in found})


def bodies(store: SQLiteStore) -> int:
    return int(str(store._file.connection.execute("SELECT count(*) FROM pieces").get))


def size(path: Path) -> int:
    return sum(path.with_name(path.name + each).stat().st_size for each in ("", "-wal"))


@pytest.mark.slow
@pytest.mark.req("B7", "B26")
@pytest.mark.parametrize("how", ["fanout", "CC", "BCC"])
async def test_a_body_in_many_queues_is_there_once(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store"
    body = bytes(range(256)) * (_MIB // 256)
    async with kept_world(path) as (world, client, store):
        client.say(1, *(m.QueueDeclare(queue=name, durable=True) for name in _NAMES))
        client.say(1, *(m.QueueBind(queue=name, exchange="amq.fanout") for name in _NAMES))
        await published_to_all(world, client, body, how)
        assert await payloads(world, _NAMES) == 1
        assert size(path) < 4 * _MIB
        assert bodies(store) == 1
    async with kept_world(path) as (world, client, store):
        assert await payloads(world, _NAMES) == 1
        client.take()
        client.say(1, *(m.QueuePurge(queue=name) for name in _NAMES[2:]))
        client.take()
        client.say(1, m.BasicGet(queue=_NAMES[1], no_ack=True))
        assert [each.body == body for each in client.contents()] == [True]
        await world.host.wait_kept()
        assert bodies(store) == 1
    async with kept_world(path) as (world, client, store):
        client.say(1, m.BasicGet(queue=_NAMES[0], no_ack=True))
        assert [each.body == body for each in client.contents()] == [True]
        await world.host.wait_kept()
        assert bodies(store) == 0


_EXPIRY = 50


@pytest.mark.req("B7", "B26")
async def test_a_shared_body_survives_what_becomes_of_its_other_messages(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with kept_world(path) as (world, client, store):
        client.say(
            1,
            m.QueueDeclare(queue="dead", durable=True),
            m.QueueDeclare(queue="short", durable=True, arguments={"x-message-ttl": _EXPIRY}),
            m.QueueDeclare(
                queue="failing",
                durable=True,
                arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
            ),
        )
        for name in ("purged", "deleted", "moved", "target", "left"):
            client.say(1, m.QueueDeclare(queue=name, durable=True))
        for name in ("short", "failing", "purged", "deleted", "moved", "left"):
            client.say(1, m.QueueBind(queue=name, exchange="amq.fanout"))
        body = bytes(_MIB)
        client.publish(1, "", body, exchange="amq.fanout", properties=PERSISTENT)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await world.host.wait_kept()
        assert bodies(store) == 1
        client.take()
        client.say(1, m.QueuePurge(queue="purged"), m.QueueDelete(queue="deleted"))
        client.say(1, m.BasicGet(queue="failing"))
        client.say(1, m.BasicReject(delivery_tag=1, requeue=False))
        assert (
            await world.host.space().find("moved").move(world.host.space().find("target"), 1) == 1
        )
        world.now += _EXPIRY / 1000 + 1
        world.host.turns.tick()
        await world.host.wait_kept()
    async with kept_world(path) as (world, client, store):
        counts = {
            name: world.stats(name).available
            for name in ("short", "failing", "purged", "moved", "dead", "target", "left")
        }
        assert counts == {
            **dict.fromkeys(("short", "failing", "purged", "moved"), 0),
            **dict.fromkeys(("dead", "target", "left"), 1),
        }
        client.say(1, *(m.BasicGet(queue=each, no_ack=True) for each in ("dead", "target", "left")))
        assert [each.body == body for each in client.contents()] == [True] * 3
        await world.host.wait_kept()
        assert bodies(store) == 0
