"""An outbox while the application has its database, gives up, or is started again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from far_end import FarEnd, connected

from amqp_rt import Broker, Message
from amqp_rt.broker import Queue
from amqp_rt.container.codecs import Codecs
from amqp_rt.errors import LocalProtocolError
from amqp_rt.outbox import SqliteOutbox
from amqp_rt.outcomes import ACCEPTED

pytestmark = pytest.mark.req("R14")


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
def outbox(sqlite_database: sqlite3.Connection) -> SqliteOutbox:
    return SqliteOutbox(sqlite_database, "shop")


def bodies(far: FarEnd) -> list[Any]:
    return [Message.decode(each.payload).body for each in far.heard.deliveries]


async def roll_back(outbox: SqliteOutbox, meanwhile: Callable[[], None]) -> None:
    async with outbox.transaction() as work:
        work.send("q", "never")
        meanwhile()
        await settle()
        raise ZeroDivisionError


async def test_what_is_rolled_back_is_never_sent(outbox: SqliteOutbox) -> None:
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(outbox.run, peer)
        async with outbox.transaction() as work:
            work.send("q", "first")
        await outbox.flush()
        with pytest.raises(ZeroDivisionError):
            # The outbox looks for work, and the same connection shows it the row.
            await roll_back(outbox, outbox._work.set)
        await settle()
        async with outbox.transaction() as work:
            work.send("q", "second")
        await outbox.flush()
        assert bodies(far) == ["first", "second"]
        nursery.cancel_scope.cancel()


async def test_a_flush_does_not_wait_for_what_is_rolled_back(outbox: SqliteOutbox) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(ZeroDivisionError):
            await roll_back(outbox, partial(nursery.start_soon, outbox.flush))
        await settle()
        assert not nursery.child_tasks
        nursery.cancel_scope.cancel()


async def test_an_outbox_that_was_cancelled_runs_again_at_once(outbox: SqliteOutbox) -> None:
    """The peer has not answered the detach of the first run, so that the name of the link is in use."""
    async with Broker(volatile=True) as broker:
        await broker.declare(Queue("q"))
        async with broker.local() as peer:
            for body in ("a", "b", "c"):
                async with outbox.transaction() as work:
                    work.send("q", body)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(outbox.run, peer)
                    await outbox.flush()
                    nursery.cancel_scope.cancel()
        assert broker.stats("q").available == 3


class Redialled:
    """Connection during a reconnect: its new engine has not received the peer's container-id yet."""

    def __init__(self) -> None:
        self.peer = self.default_session = self
        self.container_id = ""
        self.properties: dict[object, Any] = {}
        self.links: list[Any] = []
        self.codecs = Codecs()

    async def wait_open(self) -> None:
        await trio.lowlevel.checkpoint()
        self.container_id = "broker"

    def add(self, link: Any) -> None:
        self.links.append(link)


async def test_a_link_that_is_made_during_a_redial_asks_the_peer_that_answers(
    outbox: SqliteOutbox,
) -> None:
    """Otherwise messages that the peer remembers would be sent again."""
    async with outbox.transaction() as work:
        work.send("q", "a")
    outbox.database.execute("UPDATE amqp_outbox SET state = 1")
    peer: Any = Redialled()
    await outbox._send(peer, {})
    (link,) = peer.links
    peer.engine = peer
    assert link._to_resume(peer)


async def test_messages_leave_although_a_delivery_cannot_be_accepted(outbox: SqliteOutbox) -> None:
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("in"), Queue("q"))
        async with (
            trio.open_nursery() as nursery,
            peer.sender("in") as out,
            peer.receiver("in", credit=2) as inbox,
        ):
            nursery.start_soon(outbox.run, peer)
            for number in ("1", "2"):
                await out.send(number, message_id=number)
            first, second = await inbox.receive(), await inbox.receive()

            async def process() -> None:
                async with outbox.transaction() as work:
                    for delivery in (first, second):
                        work.accept(delivery)
                    work.send("q", "a")
                    first.release()

            with pytest.raises(LocalProtocolError):
                await process()
            assert second.outcome == ACCEPTED
            await settle()
            assert broker.stats("q").available == 1
            nursery.cancel_scope.cancel()
