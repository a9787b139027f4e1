"""Links that outlive connections: filed under the connection that they are on, and judged by its rights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import pytest
import trio
import trio.lowlevel
from brokers import client_of

from amqp_rt import Message
from amqp_rt.broker import Broker, Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.tokens import Sas
from amqp_rt.events import Peer
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontLink, FrontReceivingLink
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.security.access import Rights
from amqp_rt.security.tokens import Cbs, SasKey, SasKeys
from amqp_rt.termini import Coordinator, Target
from amqp_rt.transactions import Declare, Declared, Discharge, TransactionalState

KEYS = SasKeys({"all": SasKey(("k",), Rights.SEND | Rights.LISTEN)})
UNAUTHORIZED = "amqp:unauthorized-access"


class Session:
    """A session of a protocol whose sessions move, on connections of one whose sessions do not."""

    def __init__(self, connection: Connection) -> None:
        self.anchor = Anchor(DEFAULT_LIMITS, connection.peer, "s")
        self.connection = connection
        #: Ends of links, as the peer would hear of them.
        self.ends: list[tuple[str, str]] = []

    def sender(self, address: str) -> FrontReceivingLink:
        """Attach a link on which the peer sends."""
        return self._attach(Target(address=address), address)

    def coordinator(self) -> FrontReceivingLink:
        return self._attach(Coordinator(), "tx")

    def _attach(self, target: Target | Coordinator, what: str) -> FrontReceivingLink:
        anchor = self.anchor
        link = FrontReceivingLink(anchor, anchor, anchor.link_name(what), target)

        def ended(error: Error | None) -> None:
            self.ends.append((what, str(error.condition) if error else ""))

        link.on_answer = lambda error: ended(error) if error else None
        link.on_end = ended
        self.connection.handle([anchor.request(link)])
        return link

    def move(self, connection: Connection) -> None:
        self.connection = connection
        connection.handle([self.anchor.moved(connection.peer)])


def say(link: FrontReceivingLink, payload: bytes, state: Any = None) -> Any:
    """Send a message, and return its outcome once it is there."""
    outcomes: list[Any] = []
    link.put([FrontDelivery(link, payload, outcomes.append, state)])
    assert len(outcomes) == 1
    return outcomes[0]


def hello() -> bytes:
    return Message("x").encode()


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Broker]:
    async with Broker("b", volatile=True, **options) as broker:
        await broker.declare(Queue("q"), Queue("r"))
        await broker.listen("memory://b")
        yield broker


@asynccontextmanager
async def joined(broker: Broker, *addresses: str, **options: Any) -> AsyncIterator[Connection]:
    """The broker's end of a connection whose client has tokens for *addresses*."""
    known = set(broker.container.connections)
    if addresses:
        options["token"] = Sas("all", "k")
    async with client_of(broker, **options) as peer:
        for each in addresses:
            async with peer.sender(each) as out:
                await out.wait_attached()
        (connection,) = set(broker.container.connections) - known
        yield connection


async def ended(broker: Broker, connection: Connection) -> None:
    with trio.fail_after(5):
        while connection in broker.container.connections:
            await trio.lowlevel.checkpoint()


def is_clean(broker: Broker) -> bool:
    attaching = broker.container.attaching
    return not (attaching._engine_of or any(attaching._anchors_on.values()) or attaching._links)


async def test_links_stay_when_their_connection_ends_and_move_to_the_next() -> None:
    async with serving() as broker:
        async with joined(broker) as first:
            session = Session(first)
            link = session.sender("q")
            assert say(link, hello()) is ACCEPTED
        await ended(broker, first)
        assert (link.attached, broker.stats("q").producers) == (True, 1)
        async with joined(broker) as second:
            session.move(second)
            assert link.peer is second.peer
            assert say(link, hello()) is ACCEPTED
            session.anchor.end()
            assert (broker.stats("q").producers, broker.stats("q").available) == (0, 2)
        assert session.ends == []
        await ended(broker, second)
        assert is_clean(broker)


async def test_a_session_that_ends_without_a_connection_leaves_nothing() -> None:
    async with serving() as broker:
        async with joined(broker) as first:
            session = Session(first)
            link = session.sender("q")
        await ended(broker, first)
        session.anchor.end()
        session.anchor.end()
        assert (link.attached, broker.stats("q").producers) == (False, 0)
        assert is_clean(broker)
        async with joined(broker) as second:
            # What has ended does not move any more.
            session.move(second)
        await ended(broker, second)
        assert is_clean(broker)


@pytest.mark.req("SE11")
async def test_only_links_with_a_right_there_survive_a_move() -> None:
    async with serving(cbs=Cbs([KEYS])) as broker:
        async with joined(broker, "q", "r") as first:
            session = Session(first)
            q, r = session.sender("q"), session.sender("r")
        await ended(broker, first)
        async with joined(broker, "r") as second:
            session.move(second)
            assert (q.attached, r.attached) == (False, True)
            assert session.ends == [("q", UNAUTHORIZED)]
            assert say(r, hello()) is ACCEPTED
            # Another attach is judged by the connection that the session is on, too.
            session.sender("q")
            assert session.ends[1:] == [("q", UNAUTHORIZED)]


@pytest.mark.req("SE12")
async def test_rights_that_end_are_those_of_the_connection_that_links_are_on() -> None:
    async with (
        serving(cbs=Cbs([KEYS])) as broker,
        joined(broker, "q") as first,
        joined(broker, "q") as second,
    ):
        session = Session(first)
        link = session.sender("q")
        # The old connection is open still: the session was taken over.
        session.move(second)
        first.peer.tokens.expire(inf)
        broker.container.attaching.reauthorize(first, "gone")
        assert link.attached
        first.engine.close()
        await ended(broker, first)
        assert link.attached
        second.peer.tokens.expire(inf)
        broker.container.attaching.reauthorize(second, "gone")
        assert session.ends == [("q", UNAUTHORIZED)]


@pytest.mark.req("SE11")
@pytest.mark.parametrize("differs", ["user", "virtual_host"])
async def test_links_do_not_move_to_another_user(differs: str) -> None:
    async with serving() as broker, joined(broker) as first, joined(broker) as second:
        session = Session(first)
        link = session.sender("q")
        setattr(second.peer, differs, "eve")
        session.move(second)
        assert not link.attached
        assert session.ends == [("q", UNAUTHORIZED)]


async def test_a_transaction_goes_on_on_the_next_connection() -> None:
    async with serving() as broker:
        async with joined(broker) as first:
            session = Session(first)
            control, link = session.coordinator(), session.sender("q")
            declared = say(control, Message(Declare()).encode())
            assert isinstance(declared, Declared)
            posted = say(link, hello(), TransactionalState(declared.txn_id))
            assert isinstance(posted, TransactionalState)
        await ended(broker, first)
        async with joined(broker) as second:
            session.move(second)
            assert broker.stats("q").available == 0
            done = say(control, Message(Discharge(declared.txn_id, False)).encode())
            assert done == ACCEPTED
            assert broker.stats("q").available == 1


async def test_a_transaction_is_rolled_back_when_its_session_ends() -> None:
    async with serving() as broker:
        async with joined(broker) as first:
            session = Session(first)
            control, link = session.coordinator(), session.sender("q")
            declared = say(control, Message(Declare()).encode())
            say(link, hello(), TransactionalState(declared.txn_id))
        await ended(broker, first)
        session.anchor.end()
        assert (broker.stats("q").available, broker.stats("q").producers) == (0, 0)


@pytest.mark.parametrize("then", ["stays", "moves", "lost"])
async def test_an_answer_about_a_link_of_a_connection_that_it_has_left_refuses_it(
    then: str,
) -> None:
    asked, answer = trio.Event(), trio.Event()

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        asked.set()
        await answer.wait()
        return True

    async with serving(authorize=authorize) as broker, joined(broker) as second:
        async with joined(broker) as first:
            session = Session(first)
            link: FrontLink = session.sender("q")
            await asked.wait()
            if then == "moves":
                session.move(second)
            if then != "lost":
                answer.set()
                await trio.testing.wait_all_tasks_blocked()
        answer.set()
        await trio.testing.wait_all_tasks_blocked()
        assert link.attached == (then == "stays")
        assert session.ends == ([] if then == "stays" else [("q", "amqp:link:stolen")])
