"""Last messages that exchanges remember for new bindings."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from amqp_rt import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.events import Peer
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.base import Exchange, QueueDeclaration
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message

IVE = {"qpid.ive": True}


def owned(broker: Broker) -> Topology:
    """Return the topology of a new session."""
    peer = Peer()
    return broker.topologies.of(peer, Anchor(DEFAULT_LIMITS, peer, "s"))


def payload(size: int, *, durable: bool = False, ttl_s: float | None = None) -> bytes:
    return bytes(Message(bytes(size), durable=durable, ttl_s=ttl_s).encode())


def bind(here: Topology, queue: str, **arguments: object) -> int:
    """Bind a new queue, and return the number of its messages."""
    here.declare_queue(QueueDeclaration(name=queue, arguments=arguments))
    here.bind_queue(queue, "e", "", {})
    return here.queue(queue).messages


async def test_what_is_remembered_counts_and_ends_with_its_exchange() -> None:
    async with Broker(limits=Limits(last_message_max=100_000)) as broker:
        here = owned(broker)
        memory = broker.host.memory
        here.declare_exchange(Exchange(name="e", type="fanout", arguments=IVE))
        before = memory.held
        message = payload(99_900)
        here.remember("e", ("",), {}, message)
        assert memory.held > before + len(message)
        here.remember("e", ("",), {}, payload(10))
        assert before < memory.held < before + 2_000
        # One above the limit is not remembered, and the one before it is out of date.
        here.remember("e", ("",), {}, payload(100_001))
        assert memory.held == before
        here.remember("e", ("",), {}, message)
        here.delete_exchange("e")
        assert memory.held < before
        here.declare_exchange(Exchange(name="e", type="fanout", arguments=IVE))
        assert bind(here, "q") == 0


async def test_scarce_memory_is_left_to_queues() -> None:
    async with Broker(limits=Limits(broker_bytes_max=100_000)) as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e", type="fanout", arguments=IVE))
        here.remember("e", ("",), {}, payload(80_000))
        assert bind(here, "q") == 0  # There is no room for both.
        here.remember("e", ("",), {}, payload(90_000))
        assert bind(here, "r") == 0
        here.remember("e", ("",), {}, payload(10))
        assert bind(here, "s") == 1


async def test_a_queue_takes_the_message_by_its_own_rules(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker() as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e", type="fanout", arguments=IVE))
        # Without a store no durable message is accepted, and remembering is no way around that.
        here.remember("e", ("",), {}, payload(10, durable=True))
        broker.host.space().declare(Queue("lasting"))
        here.bind_queue("lasting", "e", "", {})
        assert here.queue("lasting").messages == 0
        here.remember("e", ("",), {}, payload(10, ttl_s=60))
        await trio.sleep(59)
        assert bind(here, "early") == 1
        await trio.sleep(2)
        assert bind(here, "late") == 0
        full = {"x-max-length-bytes": 5, "x-overflow": "reject-publish"}
        here.declare_queue(QueueDeclaration(name="full", arguments=full))
        here.remember("e", ("",), {}, payload(10))
        here.bind_queue("full", "e", "", {})
        assert here.queue("full").messages == 0
        assert here.bound("e", "full", "").key_matched
        assert "last message of an exchange not added: to 'full'" in caplog.text
