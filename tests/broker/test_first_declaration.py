"""Queues made for dead letters or on their first use: the first declaration says what they are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amqp_rt import Broker, Message
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.fronts.base import QueueDeclaration

WORK = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "retry"}
RETRY = {
    "x-message-ttl": 100,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": "work",
}


def topology(broker: Broker) -> Topology:
    return broker.topologies.of(Peer(), object())


def declare(here: Topology, name: str, arguments: dict[str, Any], **options: Any) -> None:
    here.declare_queue(QueueDeclaration(name=name, arguments=arguments, **options))


def queue(broker: Broker, name: str) -> Queue:
    declared = broker.declaration(name)
    assert isinstance(declared, Queue)
    return declared


@pytest.mark.parametrize("first", ["work", "retry"])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.req("N11", "N12")
async def test_queues_that_lead_to_each_other_in_either_order(
    tmp_path: Path, stored: bool, durable: bool, first: str
) -> None:
    options: dict[str, Any] = (
        {"store": f"sqlite:{tmp_path / 'broker.db'}"} if stored else {"volatile": True}
    )
    steps = [("work", WORK), ("retry", RETRY)]
    if first == "retry":
        steps.reverse()
    for _ in range(2 if stored else 1):
        async with Broker(**options) as broker:
            here = topology(broker)
            for name, arguments in steps:
                declare(here, name, arguments, durable=durable)
            assert queue(broker, "work").dead_letter == "retry"
            assert (queue(broker, "retry").dead_letter, queue(broker, "retry").ttl_s) == (
                "work",
                0.1,
            )
            for name, arguments in steps:
                declare(here, name, arguments, durable=durable)
                with pytest.raises(AmqpError, match="arguments") as caught:
                    declare(here, name, {"x-max-length": 77}, durable=durable)
                assert caught.value.condition == "amqp:precondition-failed"
    if stored:
        async with Broker(**options) as broker:
            # A node that exists keeps its options, whether or not a client declares it again.
            last = "retry" if first == "work" else "work"
            assert queue(broker, last).dead_letter == first


@pytest.mark.req("N12")
async def test_messages_stay_at_the_first_declaration() -> None:
    async with Broker() as broker:
        here = topology(broker)
        declare(here, "work", WORK)
        broker.publish("retry", Message(b"x").encode())
        declare(here, "retry", {"x-max-length": 2})
        assert here.queue("retry").messages == 1
        assert queue(broker, "retry").length_max == 2


@pytest.mark.req("N12")
async def test_a_queue_made_on_its_first_use_becomes_what_is_declared(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store, auto_create=["queue:orders-*"]) as broker:
        broker.publish("orders-1", Message(b"x").encode())
    async with Broker(store=store) as broker:
        # The node is still one that no declaration has described.
        declare(topology(broker), "orders-1", {"x-max-length": 2}, durable=True)
        assert queue(broker, "orders-1").length_max == 2
    async with Broker(store=store) as broker:
        with pytest.raises(AmqpError, match="arguments"):
            declare(topology(broker), "orders-1", {"x-max-length": 3}, durable=True)


@pytest.mark.req("N12")
async def test_what_the_program_declared_stays_so_over_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work", dead_letter="dead"))
        await broker.declare(Queue("dead", ttl_s=5))
    async with Broker(store=store) as broker:
        for name in ("work", "dead"):
            declare(topology(broker), name, {}, durable=True)
        assert queue(broker, "work").dead_letter == "dead"
        assert queue(broker, "dead").ttl_s == 5


@pytest.mark.req("N12")
async def test_the_program_cannot_redeclare_what_a_client_has_declared() -> None:
    async with Broker() as broker:
        here = topology(broker)
        declare(here, "work", WORK)
        declare(here, "retry", RETRY)
        with pytest.raises(AmqpError) as caught:
            await broker.declare(Queue("retry", ttl_s=9))
        assert caught.value.condition == "amqp:precondition-failed"


@pytest.mark.req("N12")
async def test_a_queue_made_for_dead_letters_becomes_exclusive_or_says_why_not() -> None:
    async with Broker() as broker:
        here, other = topology(broker), topology(broker)
        declare(here, "work", WORK)
        declare(here, "retry", {}, exclusive=True)
        for use in (
            lambda: other.queue("retry"),
            lambda: declare(other, "retry", {}),
        ):
            with pytest.raises(AmqpError) as caught:
                use()
            assert caught.value.condition == "amqp:resource-locked"
        here.close()
        assert not broker.has("retry")


@pytest.mark.req("N12")
async def test_a_queue_that_others_use_does_not_become_exclusive() -> None:
    async with Broker() as broker:
        here = topology(broker)
        declare(here, "work", WORK)
        broker.publish("retry", Message(b"x").encode())
        await broker.declare(Queue("plain"))
        for name in ("retry", "plain"):
            with pytest.raises(AmqpError, match="exclusive") as caught:
                declare(here, name, {}, exclusive=True)
            assert caught.value.condition == "amqp:resource-locked"
        assert here.queue("retry").messages == 1


@pytest.mark.req("N12")
async def test_a_queue_whose_order_would_change_is_refused() -> None:
    async with Broker() as broker:
        here = topology(broker)
        declare(here, "work", WORK)
        with pytest.raises(AmqpError, match="delete it first") as caught:
            declare(here, "retry", {"x-max-priority": 5})
        assert caught.value.condition == "amqp:precondition-failed"
        here.delete_queue("retry")
        declare(here, "retry", {"x-max-priority": 5})


TIME_MAX = 10**13


@pytest.mark.parametrize(
    ("argument", "most"),
    [
        ("x-message-ttl", TIME_MAX),
        ("x-expires", TIME_MAX),
        ("x-max-length", 2**63 - 1),
        ("x-max-length-bytes", 2**63 - 1),
        ("x-delivery-limit", 2**63 - 2),
        ("x-max-priority", 255),
    ],
)
@pytest.mark.req("N12")
async def test_numbers_of_arguments_have_an_upper_bound(
    tmp_path: Path, argument: str, most: int
) -> None:
    async with Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
        here = topology(broker)
        declare(here, "most", {argument: most}, durable=True)
        broker.publish("most", Message(b"x", durable=True).encode())
        await broker.host.wait_kept()
        broker.topologies.sweep()
        for value in (most + 1, 10**14, 2**63 - 1):
            if not most < value < 2**63:
                continue
            with pytest.raises(AmqpError, match=argument) as caught:
                declare(here, "q", {argument: value})
            assert caught.value.condition == "amqp:precondition-failed"


@pytest.mark.parametrize("age", ["999999999Y", "9" * 20 + "s", "10000000001s", "²s", "1\n"])
@pytest.mark.req("N12")
async def test_the_age_of_a_stream_has_an_upper_bound(age: str) -> None:
    async with Broker() as broker:
        here = topology(broker)
        stream = {"x-queue-type": "stream"}
        declare(here, "most", {**stream, "x-max-age": "10000000000s"})
        with pytest.raises(AmqpError, match="x-max-age") as caught:
            declare(here, "q", {**stream, "x-max-age": age})
        assert caught.value.condition == "amqp:precondition-failed"


def test_numbers_of_declarations_have_an_upper_bound() -> None:
    for field in ("length_max", "bytes_max", "max_deliveries", "max_attempts"):
        Queue("q", **{field: 2**63 - 1})
        with pytest.raises(ValueError, match=field):
            Queue("q", **{field: 2**63})
