"""The broker as a container and an operator see it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from brokers import Sending, World

from amqp_rt import Broker, node, rpc
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.nodes import Declaration, Queue, Topic
from amqp_rt.errors import AmqpError, DecodeError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Modified,
    Outcome,
    Rejected,
    rejected,
)
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder


def payload(body: Any = "m", **fields: Any) -> bytes:
    return bytes(Message(body, **fields).encode())


def bodies(world: World, address: str) -> list[Any]:
    return [Message.decode(m).body for m in world.peek(address, 1_000)]


def raises(condition: str) -> Any:
    return pytest.raises(AmqpError, match=re.escape(condition))


# --- declaring -----------------------------------------------------------------------------


def test_declaring_again_changes_nothing_and_differently_is_an_error() -> None:
    world = World(Queue("q", max_deliveries=3))
    world.host.space().publish("q", payload())
    world.host.space().declare(Queue("q", max_deliveries=3))
    assert bodies(world, "q") == ["m"]
    for other in (Queue("q"), Topic("q")):
        with raises("amqp:precondition-failed"):
            world.host.space().declare(other)
    with pytest.raises(TypeError, match="a Queue, a Topic, a Log or a Schedule"):
        world.host.space().declare(Declaration("x"))


def test_a_dead_letter_queue_is_made_if_there_is_none() -> None:
    world = World(Topic("mine"), Queue("a", dead_letter="mine"), Queue("b", dead_letter="made"))
    assert world.host.space().declarations() == [
        Topic("mine"),
        Queue("a", dead_letter="mine"),
        Queue("b", dead_letter="made"),
        Queue("made"),
    ]


def test_dead_letters_of_a_deleted_address_are_dropped() -> None:
    world = World(Queue("q", dead_letter="dead"))
    world.host.space().publish("q", payload())
    world.host.space().delete("dead")
    world.client().receiver("q", credit=1).settle(Rejected())
    assert world.stats("q").dropped == 1
    assert world.host.memory.held == 0


def test_nodes_are_bounded() -> None:
    world = World(Queue("a"), limits=Limits(nodes_max=2), auto_create=Queue)
    client = world.client()
    assert client.sender("b").error is None
    assert client.sender("c").error == "amqp:resource-limit-exceeded"
    assert client.receiver(None, dynamic=True).error == "amqp:resource-limit-exceeded"
    with raises("amqp:resource-limit-exceeded"):
        world.host.space().declare(Queue("d"))
    relay = client.sender(None)
    relay.send("m", to="e")
    assert [type(state) for state in relay.outcomes] == [Rejected]
    world.host.space().delete("b")
    assert client.sender("c").error is None


# --- deleting ------------------------------------------------------------------------------


@pytest.mark.req("B10")
@pytest.mark.parametrize("declared", [Queue("x"), Topic("x")], ids=str)
def test_the_links_of_a_deleted_node_are_detached(declared: Declaration) -> None:
    world = World(declared)
    client = world.client()
    sender = client.sender("x")
    links: list[Any] = [
        sender,
        world.client().receiver("x", credit=1),
        client.receiver("x", distribution_mode="copy"),
    ]
    sender.send(1, 2, 3)
    assert world.host.space().delete("x") > 0
    world.pump()
    assert [link.error for link in links] == ["amqp:resource-deleted"] * 3
    # An outcome that is said too late does no harm.
    links[1].settle(RELEASED)
    assert world.host.memory.held == 0
    assert client.sender("x").error == "amqp:not-found"
    with raises("amqp:not-found"):
        world.host.space().delete("x")
    world.host.space().declare(declared)
    assert world.stats("x").enqueued == 0


def test_outcomes_that_cross_a_deletion_do_no_harm() -> None:
    world = World(Queue("q", dead_letter="dead"))
    world.host.space().publish("q", payload())
    client = world.client()
    receiver = client.receiver("q", credit=1)
    world.host.space().delete("q")
    for delivery in receiver.endpoint.deliveries:
        delivery.settle(Rejected())
    world.pump()
    assert world.stats("dead").available == 0
    assert receiver.error == "amqp:resource-deleted"


# --- routes into the broker ----------------------------------------------------------------


def test_addresses_of_others_are_left_to_others() -> None:
    host = BrokerHost()
    taken: list[bool] = []
    joined = Joined(on_attach=lambda link: taken.append(host.attach(link)))
    joined.pump()
    session = joined.client.begin()
    session.attach_sender("a", Recorder(), target=Target(address="x"))
    session.attach_sender("b", Recorder(), target=Target(address=7))
    session.attach_sender("c", Recorder(), target=Target(address="y"))
    session.attach_sender("d", Recorder())
    session.attach_receiver("e", Recorder(), source=Source(address="x"))
    session.attach_receiver("f", Recorder())
    joined.pump()
    assert taken == [False] * 6
    assert host.relay("x", joined.links[0]) is None


@pytest.mark.req("M41", "B1")
def test_messages_of_an_anonymous_terminus_are_relayed() -> None:
    world = World(Queue("q"), Topic("t"), Queue("full", length_max=1))
    client = world.client()
    subscriber = client.receiver("t", credit=5)
    replies = client.receiver(None, dynamic=True, credit=5)
    sender = client.sender(None)
    assert sender.link.target.address is None
    for address in ("q", "t", replies.link.source.address, "nowhere", "full", "full"):
        sender.send(address, to=address)
    assert bodies(world, "q") == ["q"]
    assert subscriber.bodies == ["t"]
    assert replies.bodies == [replies.link.source.address]
    said = [state if state == ACCEPTED else state.error.condition for state in sender.outcomes]
    assert said == [ACCEPTED] * 3 + [
        "amqp:not-found",
        ACCEPTED,
        "amqp:resource-limit-exceeded",
    ]


@pytest.mark.req("M41")
def test_a_relay_follows_an_address_to_a_new_node() -> None:
    world = World(Queue("q"))
    sender = world.client().sender(None)
    sender.send(1, to="q")
    world.host.space().delete("q")
    sender.send(2, to="q")
    world.host.space().declare(Queue("q"))
    sender.send(3, to="q")
    assert bodies(world, "q") == [3]
    said = [state if state == ACCEPTED else state.error.condition for state in sender.outcomes]
    assert said == [ACCEPTED, "amqp:not-found", ACCEPTED]


def test_publishing_from_within_the_process() -> None:
    world = World(
        Queue("q", length_max=1), auto_create=lambda name: Queue(name) if name == "a" else None
    )
    world.host.space().publish("q", payload(1))
    world.host.space().publish("a", payload(2))
    assert (bodies(world, "q"), bodies(world, "a")) == ([1], [2])
    for address, data, condition in (
        ("nowhere", payload(), "amqp:not-found"),
        ("q", payload(), "amqp:resource-limit-exceeded"),
        ("a", payload(message_annotations={"reserved": 1}), "amqp:not-implemented"),
    ):
        with raises(condition):
            world.host.space().publish(address, data)
    with pytest.raises(DecodeError):
        world.host.space().publish("a", b"\xff")


def test_nodes_are_made_on_first_use() -> None:
    def create(address: str) -> Declaration | None:
        kind, _, rest = address.partition("-")
        if not rest:
            return None
        return Topic(address) if kind == "news" else Queue(address, length_max=5)

    world = World(auto_create=create)
    client = world.client()
    subscriber = client.receiver("news-today", credit=5)
    client.sender("news-today").send("n")
    client.sender("orders-1").send("o")
    client.sender(None).send("r", to="orders-2")
    assert subscriber.bodies == ["n"]
    assert (bodies(world, "orders-1"), bodies(world, "orders-2")) == (["o"], ["r"])
    assert client.sender("plain").error == "amqp:not-found"
    assert client.sender("").error == "amqp:not-found"
    assert world.host.space().declarations() == [
        Topic("news-today"),
        Queue("orders-1", length_max=5),
        Queue("orders-2", length_max=5),
    ]


def test_virtual_hosts_with_nodes_of_their_own() -> None:
    world = World(Queue("q"))
    world.host.spaces.open("b").declare(Queue("q"))
    client, other, stranger = world.client(), world.client(), world.client()
    other.joined.server.peer.virtual_host = "b"
    stranger.joined.server.peer.virtual_host = "127.0.0.1"
    client.sender("q").send("here")
    other.sender("q").send("there")
    assert stranger.receiver("q", credit=5).bodies == ["here"]
    assert other.receiver("q", credit=5).bodies == ["there"]
    assert world.host.space("b").declarations() == [Queue("q")]
    world.host.space("b").delete("q")
    assert world.host.space("b").declarations() == []
    assert world.host.space().declarations() == [Queue("q")]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("role", ["source", "target"])
def test_a_link_whose_peer_is_gone_leaves_nothing_behind(role: str, dynamic: bool) -> None:
    host = BrokerHost()
    host.space().declare(Queue("q"))
    joined = Joined(on_attach=lambda link: None)
    joined.pump()
    session = joined.client.begin()
    address = None if dynamic else "q"
    if role == "source":
        session.attach_receiver("l", Recorder(), source=Source(address=address, dynamic=dynamic))
    else:
        session.attach_sender("l", Recorder(), target=Target(address=address, dynamic=dynamic))
    joined.pump()
    # An authorization had to be awaited first, and comes too late.
    joined.server.receive_eof(0.0)
    assert host.attach(joined.links[0])
    stats = host.space().get("q").stats()
    assert (stats.consumers, stats.producers) == (0, 0)
    assert host.space().declarations() == [Queue("q")]


def test_an_address_that_is_too_long_makes_no_node() -> None:
    world = World(auto_create=Queue)
    client = world.client(limits=Limits(name_max=5_000))
    assert client.sender("x" * 1_025).error == "amqp:not-found"
    assert client.sender("x" * 1_024).error is None


def test_a_dead_letter_queue_has_its_own_time_to_live() -> None:
    world = World(Queue("q", dead_letter="dead"), Queue("late", ttl_s=2))
    world.host.space().delete("dead")
    world.host.space().declare(Queue("dead", ttl_s=5))
    world.client().sender("q").send("a", "b", ttl_s=1_000)
    world.client().receiver("q", credit=1).settle(Rejected())
    assert world.move("q", "late", 1) == 1
    world.time.now += 2
    world.host.sweep()
    assert (bodies(world, "late"), bodies(world, "dead")) == ([], ["a"])
    world.time.now += 3
    world.host.sweep()
    assert bodies(world, "dead") == []


# --- operators -----------------------------------------------------------------------------


def test_peek_shows_messages_as_they_would_be_sent() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send("a", ttl_s=10)
    client.sender("q").send("b", "c")
    receiver = client.receiver("q", credit=2)
    receiver.settle(Modified(delivery_failed=True), 1)
    receiver.settle(RELEASED, 0)
    receiver.detach()
    world.time.now += 3
    found = [Message.decode(m) for m in world.peek("q", 2)]
    assert [(m.body, m.ttl_s, m.delivery_count) for m in found] == [("a", 7, 0), ("b", None, 1)]
    assert world.stats("q").available == 3
    assert world.peek("q", 0) == []


def test_purge_leaves_what_consumers_hold() -> None:
    world = World(Queue("q"))
    client = world.client()
    client.sender("q").send(*range(300))
    receiver = client.receiver("q", credit=3)
    receiver.settle(RELEASED, 1)
    assert world.purge("q") == 298
    stats = world.stats("q")
    assert (stats.available, stats.acquired, stats.dropped) == (0, 2, 298)
    receiver.detach()
    assert bodies(world, "q") == [0, 2]
    client.sender("q").send("next")
    assert client.receiver("q", credit=5).bodies == [0, 2, "next"]


def test_move_keeps_the_order_and_wakes_the_consumers() -> None:
    world = World(Queue("a"), Queue("b"), Topic("t"))
    client = world.client()
    client.sender("a").send(*range(6))
    held = client.receiver("a", credit=2)
    held.settle(Modified(undeliverable_here=True), 1)
    receiver = client.receiver("b", credit=2)
    assert world.move("a", "b", 4) == 4
    world.pump()
    assert receiver.bodies == [1, 2]
    assert bodies(world, "b") == [3, 4]
    assert bodies(world, "a") == [5]
    held.detach()
    assert bodies(world, "a") == [0, 5]
    subscriber = client.receiver("t", credit=5)
    assert world.move("a", "t", 100) == 2
    world.pump()
    assert subscriber.bodies == [0, 5]


def test_moved_messages_make_room_for_senders() -> None:
    world = World(Queue("a", length_max=2), Queue("b"))
    sender = world.client().sender("a")
    sender.send(1)
    sender.send(2)
    assert sender.link.credit == 0
    world.move("a", "b", 1)
    world.pump()
    assert sender.link.credit == 1


def test_what_operators_ask_of_the_wrong_node() -> None:
    world = World(Queue("q"), Topic("t"))
    host = world.host
    for call in (
        lambda: host.space().get("x").stats(),
        lambda: world.peek("x"),
        lambda: world.purge("x"),
        lambda: world.move("x", "q", 1),
        lambda: world.move("q", "x", 1),
        lambda: host.space().delete("x"),
    ):
        with raises("amqp:not-found"):
            call()
    for call in (
        lambda: world.peek("t"),
        lambda: world.purge("t"),
        lambda: world.move("q", "q", 1),
    ):
        with raises("amqp:not-allowed"):
            call()


def test_stats_and_repr() -> None:
    world = World(Queue("q"))
    client = world.client()
    senders: list[Sending] = [client.sender("q") for _ in range(2)]
    senders[0].send(1, 2, 3)
    receiver = client.receiver("q", credit=2)
    client.receiver("q", distribution_mode="copy")
    receiver.settle(ACCEPTED, 0)
    stats = world.stats("q")
    assert (stats.name, stats.kind, stats.dynamic) == ("q", "queue", False)
    assert (stats.consumers, stats.producers) == (1, 2)
    assert (stats.available, stats.acquired) == (1, 1)
    assert (stats.enqueued, stats.delivered, stats.accepted) == (3, 2, 1)
    assert stats.bytes == world.host.memory.held == 2 * len(payload(1))
    assert repr(world.host) == f"<BrokerHost: 1 nodes, {stats.bytes} bytes>"


# --- time ----------------------------------------------------------------------------------


@pytest.mark.req("M7")
async def test_expired_messages_are_swept_in_time(autojump_clock: trio.testing.MockClock) -> None:
    world = World(Queue("q", ttl_s=5, dead_letter="dead"))
    world.host.space().publish("q", payload())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        await trio.sleep(3)
        assert await world.host.space().find("dead").peek() == []
        world.time.now += 5
        await trio.sleep(1.5)
        (dead,) = await world.host.space().find("dead").peek()
        assert Message.decode(dead).body == "m"
        nursery.cancel_scope.cancel()


def test_a_source_without_an_address_is_of_no_node() -> None:
    world = World(Queue("q"))
    receiver = world.client().receiver(None, source=Source())
    assert receiver.error == "amqp:not-found"


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (
            rejected("app:odd", "no\nsuch sku"),
            "rejected at 'q', message-id 'm-1': the queue has no dead_letter: app:odd: 'no\\nsuch sku'",
        ),
        (MODIFIED_FAILED, "max-deliveries at 'q', message-id 'm-1': the queue has no dead_letter"),
        (RELEASED, "max-attempts at 'q', message-id 'm-1': the queue has no dead_letter"),
    ],
)
def test_a_message_that_is_given_up_without_a_dead_letter_address_leaves_a_warning(
    outcome: Outcome, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(Queue("q", max_deliveries=1, max_attempts=1))
    world.client().sender("q").send("m", message_id="m-1")
    world.client().receiver("q", credit=1).settle(outcome)
    (record,) = caplog.records
    assert record.getMessage() == f"message dropped: {sentence}"
    assert record.levelname == "WARNING"


def test_dropped_messages_log_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Queue("q"), Topic("t"), Queue("short", ttl_s=1), limits=Limits(log_lines_max=2))
    for address in ("q", "t", "short"):
        receiver = world.client().receiver(address, credit=50)
        world.client().sender(address).send(*range(50))
        if address != "short":
            receiver.settle(rejected("app:odd"))
    world.time.now += 5
    world.host.sweep()
    places = [each.getMessage().split(",")[0] for each in caplog.records]
    assert places == [f"message dropped: rejected at '{name}'" for name in ("q", "q", "t", "t")]


@pytest.mark.parametrize("declare", [node("jobs"), node("{any}"), rpc("jobs")])
async def test_a_node_that_a_handler_would_shadow_is_refused(declare: Any) -> None:
    async def handle(body: Any) -> None: ...

    async with Broker(nodes=[declare(handle)]) as broker:
        with raises("already receives the messages of that address, and the node would get none"):
            await broker.declare(Queue("jobs"))
        assert broker.nodes() == []
        await broker.declare(Queue("other/jobs"))


@pytest.mark.parametrize("declare", [node("jobs"), node("{any}"), rpc("jobs")])
async def test_a_handler_that_would_shadow_a_node_is_refused(declare: Any) -> None:
    @declare
    async def handle(body: Any) -> None: ...

    async with Broker() as broker:
        await broker.declare(Queue("other/jobs"))
        await broker.declare(Queue("jobs"), virtual_host="v")
        with raises("would receive the messages of the queue 'jobs', and the node none"):
            broker.container.add(handle)
        assert handle not in [route.function for route in broker.container.routes]
        await broker.delete("jobs", virtual_host="v")
        broker.container.add(handle)


async def test_a_handler_that_shadows_a_node_of_the_store_leaves_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:{tmp_path / 'store'}"
    async with Broker(store=url) as broker:
        await broker.declare(Queue("jobs"))

    @node("jobs")
    async def handle(body: Any) -> None: ...

    async with Broker(nodes=[handle], store=url):
        pass
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith("node shadowed: queue 'jobs' of the store: the handler ")


async def test_a_broker_is_entered_once() -> None:
    broker = Broker("b")
    async with broker:
        with pytest.raises(
            RuntimeError, match=re.escape(f"{broker!r} has been entered before: make another")
        ):
            await broker.__aenter__()
        await broker.declare(Queue("q"))
    with pytest.raises(RuntimeError, match="has been entered before"):
        await broker.__aenter__()
