"""What peers declare: what is kept of it, and what goes by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front, connect
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.frames import BODY, HEADER, frame
from worlds091 import Client, World

from amqp_rt import Broker, Container
from amqp_rt.broker.bindings import Binding, Destination
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.topologies import Topologies
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.errors import AmqpError, DeliveryNotAccepted
from amqp_rt.fronts import Exchange, Limits, Peer, QueueDeclaration, UInt
from amqp_rt.security.access import Rights


def topology(broker: Broker, connection: Any = None) -> Topology:
    return broker.topologies.of(Peer(), connection or object())


async def settled(broker: Broker) -> None:
    await broker.host.wait_kept()


@pytest.mark.req("N11", "N12")
async def test_what_is_durable_is_there_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    arguments = {"x-max-length": UInt(5), "x-queue-type": "classic"}
    wanted = QueueDeclaration(name="q", durable=True, arguments=arguments)
    async with Broker(store=store) as broker:
        here = topology(broker)
        here.declare_queue(wanted)
        here.declare_queue(QueueDeclaration(name="passing"))
        here.declare_exchange(Exchange(name="e", type="topic", durable=True))
        here.declare_exchange(Exchange(name="gone", type="topic", durable=True))
        here.declare_exchange(Exchange(name="light", type="topic"))
        here.bind_queue("q", "e", "a.#", {"n": 1})
        here.bind_queue("q", "e", "b", {})
        here.bind_queue("q", "light", "b", {})
        here.bind_queue("passing", "e", "b", {})
        here.bind_exchange("e", "amq.fanout", "", {})
        here.unbind_queue("q", "e", "b", {})
        here.delete_exchange("gone")
        await settled(broker)
    async with Broker(store=store) as broker:
        here = topology(broker)
        assert here.route("e", "a.b", {}) == ["q"]
        assert here.route("e", "b", {}) == []
        assert here.route("amq.fanout", "a", {}) == ["q"]
        for name in ("light", "gone"):
            with pytest.raises(AmqpError):
                here.exchange(name)
        assert here.exchange("e").durable
        assert [node.name for node in broker.nodes()] == ["q"]
        here.declare_queue(wanted)
        with pytest.raises(AmqpError) as caught:
            here.declare_queue(QueueDeclaration(name="q", durable=True))
        assert caught.value.condition == "amqp:precondition-failed"
        here.delete_queue("q")
        here.declare_queue(QueueDeclaration(name="q", durable=True))
        await settled(broker)
    async with Broker(store=store) as broker:
        # A new queue of an old name has none of its bindings.
        assert topology(broker).route("e", "a.b", {}) == []


@pytest.mark.req("N12")
def test_an_unused_queue_expires() -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q", arguments={"x-expires": 5000}))
    client.say(1, m.BasicConsume(queue="q", consumer_tag="t"))
    world.now += 100
    world.host.sweep()
    assert world.host.space().has("q")
    client.say(1, m.BasicCancel(consumer_tag="t"))
    world.now += 4
    client.say(1, m.QueueDeclare(queue="q", passive=True))
    world.now += 4
    world.host.sweep()
    assert world.host.space().has("q")
    world.now += 2
    world.host.sweep()
    assert not world.host.space().has("q")


@pytest.mark.req("N12", "N18")
def test_an_exclusive_queue_goes_with_its_connection_and_takes_its_bindings_along() -> None:
    world = World()
    client, other = world.connect(), world.connect()
    client.say(1, m.QueueDeclare(queue="mine", exclusive=True), m.QueueBind(exchange="amq.fanout"))
    space = world.topologies.space("")
    assert len(space.exchanges.bindings("amq.fanout")) == 1
    other.say(1, m.BasicGet(queue="mine"))
    assert other.take()[-1][1].reply_code == 405
    client.handle(client.engine.receive_eof(world.now))
    assert not world.host.space().has("mine")
    assert space.exchanges.bindings("amq.fanout") == []
    assert not space.queues


@pytest.mark.req("N12", "N18")
@pytest.mark.parametrize("auto_delete", [True, False])
def test_a_queue_that_is_deleted_tells_its_consumers_and_takes_its_bindings_along(
    auto_delete: bool,
) -> None:
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="q", auto_delete=auto_delete))
    client.say(1, m.QueueBind(queue="q", exchange="amq.fanout"))
    client.say(1, m.BasicConsume(queue="q", consumer_tag="t"))
    client.take()
    client.say(1, m.QueueDelete(queue="q"))
    assert [each for _, each in client.take()] == [
        m.BasicCancel(consumer_tag="t", no_wait=True),
        m.QueueDeleteOk(),
    ]
    client.say(1, m.QueueDeclare(queue="q"))
    client.publish(1, "q", b"x", exchange="amq.fanout")
    client.heard.clear()
    client.say(1, m.BasicGet(queue="q"))
    assert client.answer(m.BasicGetEmpty)


def test_a_named_queue_is_no_address_that_nobody_can_guess() -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="known"), m.QueueDeclare(exclusive=True))
    made = client.take()[1][1].queue
    assert not world.host.is_dynamic("known", "")
    assert world.host.is_dynamic(made, "")


@pytest.mark.req("N9")
def test_a_client_is_told_that_memory_is_scarce_and_that_it_is_not() -> None:
    world = World(Limits(broker_bytes_max=100_000))
    client = Client(world)
    client.open()
    client.engine._hears_blocked = True
    client.say(1, m.QueueDeclare(queue="q"))
    client.heard.clear()
    for _ in range(9):
        client.publish(1, "q", b"x" * 10_000)
    assert [type(each) for _, each in client.take()] == [m.ConnectionBlocked]
    client.say(1, m.QueuePurge(queue="q"))
    assert m.ConnectionUnblocked in [type(each) for _, each in client.take()]


def test_nodes_that_others_declared_can_be_used() -> None:
    world = World()
    world.host.space().declare(Queue("q", max_deliveries=5))
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q", passive=True), m.QueueDeclare(queue="q", durable=True))
    assert [type(each) for _, each in client.take()] == [m.QueueDeclareOk] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-max-length": -1},
        {"x-max-length": True},
        {"x-expires": "5"},
        {"x-overflow": "odd"},
        {"x-overflow": 3},
        {"x-max-priority": 256},
        {"x-single-active-consumer": 1},
        {"x-dead-letter-exchange": 5},
        {"x-dead-letter-routing-key": "k"},
        {"x-queue-type": "stream", "x-max-age": "soon"},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q", arguments=arguments))
    assert client.take()[-1][1].reply_code == 406
    assert not world.host.space().has("q")


def test_a_stream_is_read_from_where_one_wants() -> None:
    world = World()
    client = world.connect()
    client.say(
        1,
        m.QueueDeclare(
            queue="s", durable=True, arguments={"x-queue-type": "stream", "x-max-age": "7D"}
        ),
        m.BasicQos(prefetch_count=10),
    )
    for number in range(4):
        client.publish(1, "s", b"%d" % number)
    for tag, offset, expected in (
        ("first", "first", [b"0", b"1", b"2", b"3"]),
        ("second", 2, [b"2", b"3"]),
        ("third", "next", []),
    ):
        client.take()
        client.say(
            1,
            m.BasicConsume(queue="s", consumer_tag=tag, arguments={"x-stream-offset": offset}),
        )
        assert [each.body for each in client.contents()] == expected, tag


def test_single_active_and_exclusive_consumers() -> None:
    world = World()
    client, other = world.connect(), world.connect()
    client.say(1, m.QueueDeclare(queue="q", arguments={"x-single-active-consumer": True}))
    client.say(1, m.BasicConsume(queue="q", consumer_tag="a", no_ack=True))
    other.say(1, m.BasicConsume(queue="q", consumer_tag="b", no_ack=True))
    client.publish(1, "q", b"1")
    assert [each.method.consumer_tag for each in client.contents()] == ["a"]
    client.say(1, m.BasicCancel(consumer_tag="a"))
    client.publish(1, "q", b"2")
    assert [each.method.consumer_tag for each in other.contents()] == ["b"]
    client.say(1, m.QueueDeclare(queue="x"), m.BasicConsume(queue="x", exclusive=True))
    other.say(1, m.BasicConsume(queue="x"))
    assert other.take()[-1][1].reply_code == 403


def test_nobody_else_receives_from_an_exclusive_queue_whatever_the_protocol() -> None:
    world = World()
    client, other = world.connect(), world.connect(topology=None)
    client.say(1, m.QueueDeclare(queue="mine", exclusive=True))
    other.say(1, m.BasicGet(queue="mine"))
    assert other.take()[-1][1].reply_code == 405


def test_why_a_message_is_a_dead_letter() -> None:
    world = World()
    client = world.connect()
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    client.say(
        1,
        m.QueueDeclare(queue="dead"),
        m.QueueDeclare(queue="q", arguments={**letters, "x-max-length": 1}),
    )
    client.publish(1, "q", b"1")
    client.publish(1, "q", b"2")
    client.heard.clear()
    client.say(1, m.BasicGet(queue="q"), m.BasicReject(delivery_tag=1))
    client.take()
    for body, reason in ((b"1", "maxlen"), (b"2", "rejected")):
        client.say(1, m.BasicGet(queue="dead", no_ack=True))
        (found,) = client.contents()
        headers = found.properties.headers
        (death,) = headers["x-death"]
        assert found.body == body
        assert (death["queue"], death["reason"], death["count"]) == ("q", reason, 1)
        assert death["routing-keys"] == ["q"]
        assert headers["x-first-death-reason"] == reason


def test_channels_together_hold_so_much_that_is_not_complete() -> None:
    world = World(Limits(message_size_max=10_000, session_window_bytes=15_000))
    client = world.connect()
    header = frame(HEADER, 1, b"\x00\x3c\x00\x00" + (10_000).to_bytes(8, "big") + b"\0\0")
    for number in range(1, 20):
        if number > 1:
            client.say(number, m.ChannelOpen())
        client.say(number, m.BasicPublish(routing_key="q"))
        client.feed(header[:1] + number.to_bytes(2, "big") + header[3:])
        for _ in range(2):
            client.feed(frame(BODY, number, b"x" * 4000))
        if client.engine.over:
            break
    assert number == 3
    assert client.take()[-1][1].reply_code == 506


def test_what_was_not_complete_is_let_go_with_its_channel() -> None:
    client = World().connect()
    client.say(1, m.BasicPublish(routing_key="q"))
    client.feed(frame(HEADER, 1, b"\x00\x3c\x00\x00" + (9).to_bytes(8, "big") + b"\0\0"))
    client.feed(frame(BODY, 1, b"123"))
    assert client.engine.held == 3
    client.say(1, m.BasicGet(queue="q"))
    assert client.engine.over
    assert client.engine.held == 0


def test_consumers_of_a_channel_are_bounded() -> None:
    world = World(Limits(handle_max=5))
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for _ in range(7):
        client.say(1, m.BasicConsume(queue="q"))
    assert client.take()[-1][1].reply_code == 506


class ByLength:
    """The key of a binding is how long that of a message is."""

    def __init__(self) -> None:
        self._bindings: list[Binding] = []

    def check(self, key: str, arguments: Any) -> None:
        if not key.isdigit():
            raise AmqpError("the key is a number", condition="amqp:precondition-failed")

    def add(self, binding: Binding) -> None:
        self._bindings.append(binding)

    def remove(self, binding: Binding) -> None:
        self._bindings.remove(binding)

    def match(self, key: str, headers: Any) -> list[Destination]:
        return [each.destination for each in self._bindings if int(each.key) == len(key)]


@pytest.mark.req("N11", "U1")
async def test_types_of_exchange_of_ones_own() -> None:
    with pytest.raises(ValueError, match="begins with x-"):
        Broker(exchange_types={"length": ByLength})
    async with Broker(exchange_types={"x-length": ByLength}) as broker:
        here = topology(broker)
        here.declare_queue(QueueDeclaration(name="q"))
        here.declare_exchange(Exchange(name="e", type="x-length"))
        here.bind_queue("q", "e", "3", {})
        assert (here.route("e", "abc", {}), here.route("e", "ab", {})) == (["q"], [])
        with pytest.raises(AmqpError):
            here.bind_queue("q", "e", "three", {})


def newest_only(wanted: QueueDeclaration) -> Queue:
    """A queue of which each key's newest message is kept."""
    key = wanted.arguments.get("x-key")
    if not isinstance(key, str):
        raise AmqpError("x-key names a header", condition="amqp:precondition-failed")
    return Queue(wanted.name, last_value_key=key)


@pytest.mark.req("N12", "U1")
def test_types_of_queue_of_ones_own() -> None:
    with pytest.raises(ValueError, match="begins with x-"):
        Broker(queue_types={"newest": newest_only})
    world = World()
    world.topologies = Topologies(world.host, world._decide, queue_types={"x-newest": newest_only})
    client = world.connect()
    arguments: dict[str, object] = {"x-queue-type": "x-newest", "x-key": "city"}
    client.say(1, m.QueueDeclare(queue="q", arguments=arguments))
    for number, city in enumerate(["Bonn", "Kiel", "Bonn"]):
        properties = m.BasicProperties(headers={"city": city})
        client.publish(1, "q", b"%d" % number, properties=properties)
    client.heard.clear()
    client.say(1, m.QueueDeclare(queue="q", passive=True))
    assert client.answer(m.QueueDeclareOk).message_count == 2
    client.say(1, m.QueueDeclare(queue="r", arguments={"x-queue-type": "x-newest"}))
    assert client.answer(m.ChannelClose).reply_code == 406


# --- System exchanges (0-9-1 §3.1.3.5) ------------------------------------------------------------


@pytest.mark.req("N11")
async def test_a_system_exchange_leads_to_services_of_the_application() -> None:
    heard: list[bytes] = []
    container = Container("app", fronts=[Front()])

    @container.node("billing")
    async def billing(body: bytes) -> None:
        heard.append(body)

    async with Broker(container=container, volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            async with connect(url) as connection, connection.channel() as channel:
                await channel.declare_exchange("services", "system", durable=True)
                await channel.publish(b"1", exchange="services", key="billing", mandatory=True)
                for key in ("nobody", "amq.nobody", ""):
                    with pytest.raises(DeliveryNotAccepted):
                        await channel.publish(b"2", exchange="services", key=key, mandatory=True)
                queue = await channel.declare_queue("q")
                await channel.publish(b"3", exchange="services", key=queue.name)
                assert await channel.purge_queue("q") == 1
    assert heard == [b"1"]


@pytest.mark.req("N11")
def test_who_sends_to_a_service_has_the_right_to() -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="secret"))
    client.say(1, m.ExchangeDeclare(exchange="s", type="system"))
    client.say(
        1, m.ExchangeDeclare(exchange="e", type="fanout", arguments={"alternate-exchange": "s"})
    )
    client.take()
    world.denied.add((Rights.SEND, "secret"))
    # Not by an alternate exchange, nor by a binding.
    client.publish(1, "secret", b"x", exchange="e")
    assert world.stats("secret").available == 0
    client.say(1, m.ExchangeBind(destination="s", source="e"))
    assert client.take()[-1][1].reply_code == 406
    client.say(1, m.ChannelCloseOk())
    client.say(1, m.ChannelOpen(), m.QueueBind(queue="secret", exchange="s"))
    assert client.take()[-1][1].reply_code == 406
    client.say(1, m.ChannelCloseOk())
    client.say(1, m.ChannelOpen())
    client.publish(1, "secret", b"x", exchange="s")
    assert client.take()[-1][1].reply_code == 403
    assert world.stats("secret").available == 0


# --- Nodes that others make -----------------------------------------------------------------------


@pytest.mark.req("N12", "N13")
async def test_what_is_made_on_its_first_use_can_be_consumed_from() -> None:
    async with Broker(fronts=[Front()], auto_create=["queue:orders-*"], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            async with connect(url) as connection, connection.channel() as channel:
                async with channel.consume("orders-1") as deliveries:
                    await channel.publish(b"x", key="orders-1", mandatory=True)
                    (await anext(deliveries)).ack()
                assert await channel.get("orders-2") is None
                await channel.publish(b"y", key="orders-3", mandatory=True)
                assert (await channel.declare_queue("orders-3", passive=True)).messages == 1
                # Looking whether it is there is no use of it.
                for step in (
                    lambda c: c.declare_queue("orders-4", passive=True),
                    lambda c: c.bind_queue("orders-4", "amq.fanout"),
                    lambda c: c.get("other"),
                    lambda c: c.consume("other").__aenter__(),
                ):
                    async with connection.channel() as wrong:
                        with pytest.raises(AmqpError) as caught:
                            await step(wrong)
                        assert caught.value.condition == "amqp:not-found"
                # A queue gets the arguments of its first declaration.
                await channel.declare_queue("orders-5", arguments={"x-max-length": 1})
                async with connection.channel() as wrong:
                    with pytest.raises(AmqpError, match="arguments"):
                        await wrong.declare_queue("orders-5")


@pytest.mark.req("N12", "N13")
async def test_an_alias_means_its_node() -> None:
    async with Broker(fronts=[Front()], volatile=True) as broker:
        await broker.declare(Queue("orders", aliases=("old-orders",)))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            async with connect(url) as connection, connection.channel() as channel:
                assert (await channel.declare_queue("old-orders")).name == "old-orders"
                await channel.bind_queue("old-orders", "amq.direct", "k")
                await channel.publish(b"1", key="old-orders", mandatory=True)
                await channel.publish(b"2", exchange="amq.direct", key="k", mandatory=True)
                assert (await channel.declare_queue("old-orders", passive=True)).messages == 2
                delivery = await channel.get("old-orders")
                assert delivery is not None
                delivery.ack()
                async with channel.consume("old-orders") as deliveries:
                    (await anext(deliveries)).ack()
                await channel.publish(b"3", key="orders")
                assert await channel.purge_queue("old-orders") == 1
                with pytest.raises(AmqpError, match="delete that"):
                    await channel.delete_queue("old-orders")


@pytest.mark.req("N13")
async def test_a_node_of_the_application_can_be_consumed_from() -> None:
    container = Container("app", fronts=[Front()])

    @container.source("ticks")
    async def ticks() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d" % number
        await trio.sleep_forever()

    async with Broker(container=container, volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(30):
            async with (
                connect(url) as connection,
                connection.channel() as channel,
                channel.consume("ticks") as deliveries,
            ):
                found = [(await anext(deliveries)).body for _ in range(3)]
    assert found == [b"0", b"1", b"2"]


@pytest.mark.req("N12")
def test_a_fault_in_the_sweep_of_one_queue_keeps_no_other_and_ends_no_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    client = world.connect()
    for name in ("a", "bad", "c", "stays"):
        arguments = {} if name == "stays" else {"x-expires": 5000}
        client.say(1, m.QueueDeclare(queue=name, arguments=arguments))
    space = world.topologies.space("")
    consumers = space.consumers

    def broken(name: str) -> int:
        if name == "bad":
            raise ZeroDivisionError("a bug")
        return consumers(name)

    monkeypatch.setattr(space, "consumers", broken)
    world.now += 6
    world.host.sweep()
    assert "ZeroDivisionError: a bug" in caplog.text
    assert [node.name for node in world.host.space().declarations()] == ["bad", "stays"]
    assert [world.stats(name).failure for name in ("bad", "stays")] == [None, None]


def test_queues_that_clients_declare_and_delete_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "amqp_rt.broker")
    client = World().connect()
    client.say(1, m.QueueDeclare(queue="jobs", durable=True), m.QueueDeclare(queue="mine"))
    # The broker names these, and they go with their connection.
    client.say(1, m.QueueDeclare(exclusive=True))
    client.say(1, m.QueueDelete(queue="jobs"))
    assert [each.getMessage() for each in caplog.records] == [
        "node declared: queue 'jobs'",
        "node declared: queue 'mine'",
        "node deleted: queue 'jobs'",
    ]
