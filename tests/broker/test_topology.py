"""Arguments of declarations, and dead letters for exchanges."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt import Broker, Limits, Message
from amqp_rt.broker.bindings import Destination
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.exchange_addresses import exchange_address
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.fronts.base import Exchange, QueueDeclaration

BINARY = {"x-note": b"." * 1_000}


def topology(broker: Broker) -> Topology:
    return broker.topologies.of(Peer(), object())


def declare_all(here: Topology, **options: Any) -> None:
    """Declare a queue, an exchange and bindings with arguments, each twice."""
    for _ in range(2):
        here.declare_queue(QueueDeclaration(name="q", arguments=BINARY, **options))
        here.declare_exchange(Exchange(name="e", type="topic", arguments=BINARY, **options))
        here.bind_queue("q", "e", "a.b", BINARY)
        here.bind_exchange("e", "amq.fanout", "", BINARY)


@pytest.mark.req("N11", "N12")
async def test_what_declarations_take_is_counted_and_given_back() -> None:
    async with Broker() as broker:
        here = topology(broker)
        memory = broker.host.memory
        declare_all(here)
        assert 4_000 < memory.held < 10_000
        here.unbind_queue("q", "e", "a.b", BINARY)
        here.unbind_queue("q", "e", "a.b", BINARY)
        here.delete_exchange("e")
        here.delete_queue("q")
        assert memory.held == 0
        declare_all(here)
        here.delete_queue("q")
        here.delete_exchange("e")
        assert memory.held == 0


@pytest.mark.req("N11", "N12")
async def test_nothing_is_declared_for_which_there_is_no_room() -> None:
    async with Broker(limits=Limits(broker_bytes_max=1_000)) as broker:
        here = topology(broker)
        here.declare_queue(QueueDeclaration(name="plain"))
        for refused in (
            lambda: here.declare_queue(QueueDeclaration(name="q", arguments=BINARY)),
            lambda: here.declare_exchange(Exchange(name="e", arguments=BINARY)),
            lambda: here.bind_queue("plain", "amq.topic", "k", BINARY),
        ):
            with pytest.raises(AmqpError) as caught:
                refused()
            assert caught.value.condition == "amqp:resource-limit-exceeded"
        assert broker.host.memory.held < 200


@pytest.mark.req("N11", "N12")
async def test_what_was_stored_is_restored_whatever_room_there_is(tmp_path: Any) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        declare_all(topology(broker), durable=True)
    async with Broker(store=store, limits=Limits(broker_bytes_max=1_000)) as broker:
        here = topology(broker)
        assert here.route("e", "a.b", {}) == ["q"]
        assert here.route("amq.fanout", "a.b", {}) == ["q"]
        held = broker.host.memory.held
    async with Broker(store=store) as broker:
        assert topology(broker).route("amq.fanout", "a.b", {}) == ["q"]
        assert broker.host.memory.held == held


async def test_arguments_have_so_many_bytes() -> None:
    limits = Limits(arguments_bytes_max=1_000)
    fits, too_much = {"x": b"." * 900}, {"x": b"." * 1_000}
    async with Broker(limits=limits) as broker:
        here = topology(broker)
        here.declare_queue(QueueDeclaration(name="q", arguments=fits))
        here.declare_exchange(Exchange(name="e", arguments=fits))
        here.bind_queue("q", "e", "k", fits)
        for refused in (
            lambda: here.declare_queue(QueueDeclaration(name="q2", arguments=too_much)),
            lambda: here.declare_exchange(Exchange(name="e2", arguments=too_much)),
            lambda: here.bind_queue("q", "e", "k", too_much),
        ):
            with pytest.raises(AmqpError, match="at most") as caught:
                refused()
            assert caught.value.condition == "amqp:precondition-failed"


async def test_a_dead_letter_is_held_against_so_many_bindings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(dead_letter_looks_max=100)
    async with Broker(limits=limits) as broker:
        exchanges = broker.topologies.space("").exchanges
        for number in range(300):
            exchanges.bind("amq.fanout", Destination(f"q{number}"), "", {})
        entry: Any = broker.host.services.entry_factory.make_entry(Message(b"x").encode(), 0, 0.0)
        address = exchange_address("amq.fanout")
        found = broker.topologies.dead_letter_nodes("", address, entry)
        assert found is not None
        assert 90 <= len(found) <= 110
        assert "use fewer bindings" in caplog.text
        for _ in range(100):
            broker.topologies.dead_letter_nodes("", address, entry)
        # A client that makes dead letters must not fill the log.
        assert caplog.text.count("use fewer bindings") == broker.host.limits.log_lines_max
        caplog.clear()
        for number in range(90, 300):
            exchanges.forget(f"q{number}")
        found = broker.topologies.dead_letter_nodes("", address, entry)
        assert found is not None
        assert len(found) == 90
        assert not caplog.text


@pytest.mark.req("N11", "N12")
async def test_consumers_without_a_link_of_a_peer_are_counted(tmp_path: Any) -> None:
    async with Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker, broker.local() as peer:
        here = topology(broker)
        here.declare_queue(QueueDeclaration(name="q", durable=True))
        async with peer.receiver("q", name="mine", durable=2, timeout=1_000):
            # The broker sends on a link of its own, which records the deliveries first.
            assert here.queue("q").consumers == 1
        assert here.queue("q").consumers == 0
        node = broker.host.space().find("q")
        await broker.host.leases.open(node, "job")
        assert here.queue("q").consumers == 1
        with pytest.raises(AmqpError, match="has consumers"):
            here.delete_queue("q", if_unused=True)
        await broker.host.leases.release(node, "job")
        assert here.queue("q").consumers == 0


@pytest.mark.req("N12")
async def test_a_dead_letter_that_an_exchange_leads_nowhere_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Broker() as broker:
        here = topology(broker)
        here.declare_exchange(Exchange(name="bare", type="direct"))
        for name, exchange in (("a", "bare"), ("b", "later"), ("c", "missing")):
            dead = {"x-dead-letter-exchange": exchange, "x-max-length": 1}
            here.declare_queue(QueueDeclaration(name=name, arguments=dead))
        here.declare_exchange(Exchange(name="later", type="system"))
        for name in ("a", "b", "c"):
            for number in range(2):
                broker.publish(name, Message(b"x", message_id=f"m{number}").encode())
        lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(lines) == 3
    for name, line in zip("abc", lines, strict=True):
        assert f"overflow at '{name}'" in line
        assert "'m0'" in line
        assert ("leads to no queue" in line) == (name != "c")
    assert "no exchange 'missing'" in lines[2]


@pytest.mark.req("N12")
async def test_a_system_exchange_is_no_place_for_dead_letters() -> None:
    async with Broker() as broker:
        here = topology(broker)
        here.declare_exchange(Exchange(name="services", type="system"))
        with pytest.raises(AmqpError, match="leads to services") as caught:
            await broker.declare(Queue("q", dead_letter=exchange_address("services", "key")))
        assert caught.value.condition == "amqp:precondition-failed"
        assert not broker.has("q")
