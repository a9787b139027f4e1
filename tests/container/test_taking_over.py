"""Taking over what another connection has, or what is kept for it, takes the right to that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel
from brokers import client_of

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.container import attaching
from amqp_rt.container.connections import Connection
from amqp_rt.container.namesakes import SOLE_CONNECTION
from amqp_rt.container.tokens import Sas
from amqp_rt.errors import AmqpError, LinkDetached, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.security.access import Rights
from amqp_rt.security.tokens import Cbs, SasKey, SasKeys

UNAUTHORIZED = "amqp:unauthorized-access"
STOLEN = "amqp:link:stolen"
KEYS = SasKeys({"all": SasKey(("k",), Rights.SEND | Rights.LISTEN)})


@asynccontextmanager
async def guarded(**options: Any) -> AsyncIterator[Broker]:
    """A broker that knows its clients by their tokens only, not by a user."""
    async with Broker("b", cbs=Cbs([KEYS]), **options) as broker:
        await broker.declare(Queue("q"), Queue("eve/q"), Topic("news"), Topic("eve/news"))
        await broker.listen("memory://b")
        yield broker


def client(broker: Broker, *, token: bool = True, **options: Any) -> Any:
    """A connection of a container ``shop``, whoever that is, with tokens for what it attaches to."""
    if token:
        options["token"] = Sas("all", "k")
    return client_of(broker, "shop", **options)


async def refused(link: Any) -> str:
    with pytest.raises(LinkRefused) as caught:
        await link.wait_attached()
    return caught.value.condition


@pytest.mark.req("SE11", "X13")
@pytest.mark.parametrize("receives", [True, False])
async def test_a_link_is_not_detached_for_one_without_a_right(receives: bool) -> None:
    async with guarded() as broker, client(broker) as peer, client(broker, token=False) as eve:

        def link(connection: Connection) -> Any:
            attach = connection.receiver if receives else connection.sender
            return attach("q", name="l")

        async with link(peer) as first:
            await first.wait_attached()
            assert await refused(link(eve)) == UNAUTHORIZED
            stats = broker.stats("q")
            assert (stats.consumers, stats.producers) == ((1, 0) if receives else (0, 1))
            # With the right it is taken over, as the standard wants it.
            async with client(broker) as again, link(again) as second:
                await second.wait_attached()
                with pytest.raises(LinkDetached) as caught:
                    await (first.receive() if receives else first.send("x"))
                assert caught.value.condition == STOLEN


@pytest.mark.req("SE11")
async def test_a_right_elsewhere_is_none_to_the_link_of_that_name() -> None:
    async with (
        guarded() as broker,
        client(broker) as peer,
        client(broker) as eve,
        peer.sender("q", name="l") as out,
    ):
        # Eve has a token for eve/q only: the client puts one for what it attaches to.
        assert await refused(eve.sender("eve/q", name="l")) == UNAUTHORIZED
        assert await out.send("x") == ACCEPTED
        async with eve.sender("eve/q", name="another") as mine:
            assert await mine.send("x") == ACCEPTED


@pytest.mark.req("SE11", "SE14")
async def test_links_that_put_tokens_are_of_one_connection() -> None:
    async with (
        guarded() as broker,
        client(broker, token=False) as peer,
        client(broker, token=False) as eve,
        peer.sender("$cbs", name="cbs") as out,
        eve.sender("amqp://b/$cbs", name="cbs"),
    ):
        assert out.link.attached


@pytest.mark.req("SE11", "X23", "X24")
async def test_a_kept_terminus_is_not_ended_for_a_link_elsewhere() -> None:
    async with guarded() as broker:
        async with client(broker) as peer:
            news = peer.receiver("news", name="inbox", timeout=60)
            await news.wait_attached()
            await news.suspend()
        async with client(broker) as peer, client(broker) as eve:
            assert await refused(eve.receiver("eve/news", name="inbox", timeout=60)) == UNAUTHORIZED
            async with peer.sender("news") as out:
                await out.send("kept")
            async with peer.receiver("news", name="inbox", timeout=60) as news:
                assert (await news.receive()).body == "kept"


@pytest.mark.req("SE11", "X23")
async def test_what_is_kept_is_not_told_to_who_has_no_right() -> None:
    async with guarded() as broker:
        async with client(broker) as peer:
            news = peer.receiver("news", name="inbox", timeout=60)
            await news.wait_attached()
            await news.suspend()
        async with client(broker, token=False) as eve:
            for name in ("inbox", "another"):
                assert await refused(eve.receiver(name=name)) == UNAUTHORIZED


@pytest.mark.req("SE11", "X25")
async def test_a_subscription_of_all_is_not_ended_for_a_link_elsewhere() -> None:
    def subscribed(connection: Connection, address: str) -> Any:
        return connection.receiver(
            address, name="sub", capabilities=["shared", "global"], durable=1
        )

    async with guarded(volatile=True) as broker:
        async with client(broker) as peer:
            news = subscribed(peer, "news")
            await news.wait_attached()
            await news.suspend()
        async with client(broker) as eve:
            assert await refused(subscribed(eve, "eve/news")) == UNAUTHORIZED
        assert [each.name for each in broker.subscriptions("news")] == ["sub"]


@pytest.mark.req("SE17", "X13")
async def test_a_link_is_taken_over_once_the_application_lets_it() -> None:
    asked: list[trio.Event] = []
    answers: list[bool] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        if not asked:
            asked.append(trio.Event())
            return True
        event = trio.Event()
        asked.append(event)
        await event.wait()
        return answers.pop()

    async with (
        Broker("b", authorize=authorize) as broker,
        client_of_all(broker, 4) as (first, eve, second, third),
    ):
        out = first.sender("q", name="l")
        await out.wait_attached()
        async with trio.open_nursery() as nursery:
            found: dict[str, str] = {}

            async def attach(name: str, peer: Connection, count: int) -> None:
                link = peer.sender("q", name="l")
                try:
                    await link.wait_attached()
                    found[name] = "attached"
                except LinkRefused as error:
                    found[name] = error.condition

            for count, (name, peer) in enumerate(
                [("second", second), ("eve", eve), ("third", third)], 2
            ):
                nursery.start_soon(attach, name, peer, count)
                while len(asked) < count:
                    await trio.lowlevel.checkpoint()
            # None of them has the link before it has its answer.
            assert await out.send("x") == ACCEPTED
            answers.append(False)
            asked[2].set()
            while "eve" not in found:
                await trio.lowlevel.checkpoint()
            assert await out.send("x") == ACCEPTED
            answers.append(True)
            asked[3].set()
            while "third" not in found:
                await trio.lowlevel.checkpoint()
            with pytest.raises(LinkDetached):
                await out.send("x")
            # The right requested before is too late now.
            answers.append(True)
            asked[1].set()
        assert found == {"eve": UNAUTHORIZED, "third": "attached", "second": STOLEN}
        assert not broker.container.attaching._asking


@asynccontextmanager
async def client_of_all(broker: Broker, count: int) -> AsyncIterator[list[Connection]]:
    """Connections of one container."""
    await broker.declare(Queue("q"))
    await broker.listen("memory://b")
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(broker, "shop")) for _ in range(count)]


@pytest.mark.req("SE12")
async def test_every_link_is_judged_again_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attaching, "_LINKS_KEPT", 2)
    async with guarded() as broker, client(broker) as peer:
        links = [peer.sender("q", name=f"{number}") for number in range(9)]
        for each in links:
            await each.wait_attached()
        (served,) = broker.container.connections
        assert served.peer.tokens is not None
        served.peer.tokens.drop("q")
        for each in links:
            with pytest.raises((LinkDetached, AmqpError)) as caught:
                await each.send("x")
            assert caught.value.condition == UNAUTHORIZED


@pytest.mark.req("M42", "SE13")
async def test_a_stranger_keeps_no_container_out() -> None:
    sole = {"desired_capabilities": [SOLE_CONNECTION]}
    async with guarded() as broker, client(broker, token=False, **sole) as stranger:
        await stranger.wait_open()
        async with client(broker, **sole) as peer:
            async with peer.sender("q") as out:
                assert await out.send("x") == ACCEPTED
            # With a token it is known, and one too many.
            async with client(broker, **sole) as another:
                out = another.sender("q")
                await another.wait_closed()
                with pytest.raises(AmqpError, match="'shop' has a connection already"):
                    await out.send("x")
        assert stranger.state == "open"
