"""Bounds of memory at ``/management``, over each transport: requests, answers and pairs of links."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from brokers import client_of
from certificates import certificates
from rabbit_requests import managing, request

from amqp_rt import Broker, Connection, Limits, connect
from amqp_rt.broker import Queue
from amqp_rt.errors import LinkRefused
from amqp_rt.net.tls import ClientTls, ServerTls
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

pytestmark = pytest.mark.req("G4")

KNOWN = certificates()
DOORS = {"tcp": "amqp", "tls": "amqps", "ws": "ws", "wss": "wss"}


class Half(Recorder):
    """One link of a pair, without a container."""

    async def until(self, condition: Callable[[], object]) -> None:
        with trio.fail_after(10):
            while not condition():  # noqa: ASYNC110  # engines notify no task
                await trio.sleep(0.005)

    @property
    def condition(self) -> str:
        """Condition with which the link ended."""
        [(error, _)] = self.detached
        assert error is not None
        return str(error.condition)


def attach(session: Any, role: str, half: Half, name: str = "half") -> Any:
    """Attach one link of the pair *half*."""
    options: dict[str, Any] = {"properties": {"paired": True}}
    if role == "sender":
        target = Target(address="/management")
        return session.attach_sender(name, half, source=Source(), target=target, **options)
    source = Source(address="/management")
    return session.attach_receiver(name, half, source=source, target=Target(), **options)


@asynccontextmanager
async def rabbit(limits: Limits, door: str = "tcp") -> AsyncIterator[tuple[Broker, Connection]]:
    async with Broker(volatile=True, limits=limits, tls=ServerTls(KNOWN.server)) as broker:
        [url] = await broker.listen(f"{DOORS[door]}://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None, tls=ClientTls(KNOWN.ca)) as peer:
            yield broker, peer


def held(broker: Broker) -> int:
    """Return the octets that the pairs of the one connection hold."""
    [profile] = broker._profiles.values()
    [client] = profile.hosts[0]._management._clients.values()
    return int(client.held)


@pytest.mark.parametrize("door", DOORS)
async def test_requests_without_reading_the_answers_end_their_link(door: str) -> None:
    async with rabbit(Limits(management_bytes_max=10_000), door) as (broker, peer):
        session: Any = peer.engine
        session = session.begin()
        half, answers = Half(), Half()
        replies = attach(session, "receiver", answers)
        out = attach(session, "sender", half)
        await half.until(lambda: out.credit and replies.attached)
        # Each answer has some hundred octets, and the client gives no credit.
        sent = 0
        while not half.detached:
            await half.until(lambda: out.credit or half.detached)
            if not half.detached:
                out.send(request("GET", f"/queues/none-{sent:0200}").encode(), settled=True)
                sent += 1
                await trio.sleep(0.001)
        assert half.condition == "amqp:resource-limit-exceeded"
        assert 10 < sent < 100
        assert 8_000 < held(broker) <= 10_000
        replies.detach()
        await half.until(lambda: held(broker) == 0)
        # The connection and its other pairs go on.
        async with managing(peer) as manage:
            assert (await manage("GET", "/queues/none"))[0] == "404"
        assert held(broker) == 0


async def test_an_answer_that_is_too_large_ends_its_link() -> None:
    async with rabbit(Limits(management_bytes_max=40_000)) as (broker, peer):
        async with managing(peer) as manage:
            await manage("PUT", "/queues/q", {})
            body = {"source": "amq.headers", "destination_queue": "q", "binding_key": ""}
            for number in range(5):
                arguments = {"n": number, "pad": "x" * 10_000}
                assert (await manage("POST", "/bindings", {**body, "arguments": arguments}))[
                    0
                ] == "204"
        session: Any = peer.engine
        session = session.begin()
        half, answers = Half(), Half()
        replies = attach(session, "receiver", answers)
        out = attach(session, "sender", half)
        await half.until(lambda: out.credit and replies.attached)
        path = "/bindings?src=amq.headers&dstq=q&key="
        out.send(request("GET", path).encode(), settled=True)
        await half.until(lambda: answers.detached)
        assert answers.condition == "amqp:resource-limit-exceeded"
        assert held(broker) == 0
        # A client that is ready for it gets it.
        async with managing(peer) as manage:
            assert len((await manage("GET", path))[1]) == 5


async def test_requests_that_wait_end_their_link() -> None:
    """While a request waits, for example for a purge, the following ones must not fill the memory."""
    async with rabbit(Limits(management_bytes_max=200_000)) as (broker, peer):
        await broker.declare(Queue("q"))
        async with peer.sender("q") as out:
            await out.send_many(b"x" for _ in range(250))
        session: Any = peer.engine
        session = session.begin()
        half = Half()
        link = attach(session, "sender", half)
        await half.until(lambda: link.credit)
        link.send(request("DELETE", "/queues/q/messages").encode(), settled=True)
        for _ in range(30):
            body = {"arguments": {"x": "y" * 10_000}}
            link.send(request("PUT", "/queues/r", body).encode(), settled=True)
        await half.until(lambda: half.detached)
        assert half.condition == "amqp:resource-limit-exceeded"
        await half.until(lambda: held(broker) == 0)


async def test_pairs_of_a_connection_have_a_limit() -> None:
    async with rabbit(Limits(management_pairs_max=2)) as (_, peer):
        session: Any = peer.engine
        first, second = session.begin(), session.begin()
        halves = [Half() for _ in range(4)]
        links = [
            attach(first, "sender", halves[0], "one"),
            attach(first, "receiver", halves[1], "one"),
            attach(second, "sender", halves[2], "two"),
        ]
        await halves[0].until(lambda: all(each.attached for each in links))
        with pytest.raises(LinkRefused, match="management_pairs_max"):
            async with managing(peer):
                pass
        # The other link of a pair is none of its own; and an ended pair makes room.
        attach(second, "receiver", halves[3], "two")
        await halves[3].until(lambda: halves[3].attached)
        for link in links[:2]:
            link.detach()
        await halves[0].until(lambda: halves[0].detached and halves[1].detached)
        async with managing(peer) as manage:
            assert (await manage("GET", "/queues/none"))[0] == "404"


async def test_another_connection_is_not_affected() -> None:
    async with Broker("b", volatile=True, limits=Limits(management_pairs_max=1)) as broker:
        await broker.listen("memory://b?profile=rabbitmq")
        async with (
            client_of(broker, "one") as one,
            client_of(broker, "two") as two,
            managing(one),
            managing(two) as manage,
        ):
            assert (await manage("GET", "/queues/none"))[0] == "404"
