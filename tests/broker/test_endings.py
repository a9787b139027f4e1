"""A connection that ends leaves the state of its links at the broker, and no object of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from brokers import Client, Controller, World
from paged import Gate
from references import reference

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.nodes import Queue
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.transactions import TransactionalState
from amqp_rt.unsettled import Unsettled

pytestmark = pytest.mark.usefixtures("no_collector")


def holds_messages(client: Client) -> None:
    """Leave messages unsettled on a link that may come back."""
    client.world.client("other").sender("q").send("m")
    client.receiver("q", name="l", credit=5, timeout=60)


def lost_the_outcomes(client: Client) -> None:
    """Lose what the broker said of messages."""
    sender = client.sender(None, name="l", target=Target(address="q", timeout=60))
    sender.link.send(Message("m").encode())
    client.joined.server.receive(b"".join(client.joined.client.take()), 0.0)


def sent_a_part(client: Client) -> None:
    """Leave a message incomplete."""
    sender = client.sender(None, name="l", target=Target(address="q", timeout=60))
    sender.link.send(Message(b"x" * 5000).encode()[:2000], more=True)
    client.world.pump()


def committed(client: Client) -> None:
    """Retire a message in a transaction that is committed, and one in another that is not."""
    other = client.world.client("other").sender("q")
    other.send("m")
    other.send("n")
    receiver = client.receiver("q", name="l", credit=5, timeout=60)
    for delivery, ends in zip(receiver.endpoint.deliveries, (True, False), strict=True):
        control = Controller(client)
        txn_id = control.declare()
        delivery.update(TransactionalState(txn_id, ACCEPTED))
        client.world.pump()
        if ends:
            control.discharge(txn_id)


USES = [holds_messages, lost_the_outcomes, sent_a_part, committed]


@pytest.mark.parametrize("use", USES, ids=lambda each: each.__name__)
def test_a_link_that_may_come_back_does_not_keep_its_connection(
    use: Callable[[Client], None],
) -> None:
    here = World(Queue("q"))
    client = here.client("c")
    use(client)
    refs: list[Callable[[], Any]] = [reference(client.joined.server)]
    refs += [reference(session) for session in client.joined.server.sessions.values()]
    client.cut()
    # The test's own ends refer to each other.
    vars(client.joined).clear()
    assert any(terminus.key[2] == "c" for terminus in here.host.termini)
    assert [each() for each in refs if each() is not None] == []


async def test_a_message_that_is_stored_after_the_loss_does_not_keep_its_connection(
    autojump_clock: Any,
) -> None:
    gate = Gate()
    here = World(journal=Journal(MemoryStore(), gate))
    async with trio.open_nursery() as nursery:
        await here.host.restore()
        nursery.start_soon(here.host.run)
        here.host.space().declare(Queue("q"))
        await here.host.wait_kept()
        gate.opened = trio.Event()
        client = here.client("c")
        sender = client.sender(None, name="l", target=Target(address="q", timeout=600))
        sending = sender.link.send(Message("m", durable=True).encode())
        here.pump()
        server = reference(client.joined.server)
        client.cut()
        vars(client.joined).clear()
        # The outcome for the sender is not known yet.
        assert server() is not None
        gate.opened.set()
        await here.host.wait_kept()
        await trio.sleep(5)
        assert server() is None
        # The outcome is remembered all the same.
        unsettled = {sending.tag: Unsettled(tag=sending.tag, payload=b"x")}
        endpoint = Recorder()
        here.client("c").session.attach_sender(
            "l", endpoint, target=Target(address="q", timeout=600), unsettled=unsettled
        )
        here.pump()
        assert [each.state for each in endpoint.outcomes] == [ACCEPTED]
        nursery.cancel_scope.cancel()
