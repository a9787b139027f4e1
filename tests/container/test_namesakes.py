"""A connection that has to be the only one of its container."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from amqp_rt import Container, Profile
from amqp_rt.broker import Broker
from amqp_rt.container.namesakes import SOLE_CONNECTION
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.security.access import Access, Rights, Rule

SOLE = [SOLE_CONNECTION]


@pytest.mark.req("M42")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_the_only_connection_of_a_container(first: bool, second: bool) -> None:
    network = MemoryNetwork()
    async with (
        Broker(network=network) as broker,
        Container("shop", network=network) as shop,
        Container("other", network=network) as other,
    ):
        await broker.listen("memory://broker")

        async def visit(who: Container, sole: bool) -> None:
            async with who.connect(
                "memory://broker", reconnect=None, desired_capabilities=SOLE if sole else []
            ) as peer:
                await peer.wait_open()
                assert SOLE_CONNECTION in peer.peer.offered_capabilities
                async with peer.sender("$management") as out:
                    assert out is not None

        async with shop.connect(
            "memory://broker", desired_capabilities=SOLE if first else []
        ) as peer:
            await peer.wait_open()
            if first or second:
                with pytest.raises(AmqpError, match="'shop' has a connection already") as refused:
                    await visit(shop, second)
                assert refused.value.condition == "amqp:invalid-field"
                assert refused.value.info == {"invalid-field": "container-id"}
            else:
                await visit(shop, second)
            await visit(other, second)
            # The first one is not disturbed.
            async with peer.sender("$management"):
                pass
        # The connection has ended, and another may open.
        for _ in range(2):
            await visit(shop, True)
        assert len(broker.container.entry._namesakes) <= 1


@pytest.mark.req("M42")
async def test_the_name_of_another_user_is_nobodys_business() -> None:
    network = MemoryNetwork()
    access = Access([Rule("*", Rights.MANAGE, users=("ann", "bob"))])
    users = {"ann": "pencil", "bob": "rubber"}
    async with (
        Broker(network=network, users=users, access=access, plain_in_clear=True) as broker,
        Container("shop", network=network) as shop,
    ):
        await broker.listen("memory://broker")
        async with (
            shop.connect("memory://ann:pencil@broker", desired_capabilities=SOLE) as ann,
            shop.connect("memory://bob:rubber@broker", desired_capabilities=SOLE) as bob,
        ):
            await ann.wait_open()
            await bob.wait_open()


@pytest.mark.req("L6")
@pytest.mark.parametrize("transport", ["amqp", "ws"])
async def test_the_connections_of_a_user_are_bounded(transport: str) -> None:
    """At all listeners together; whoever has no name is not counted by it."""
    limits = Limits(connections_per_user_max=2, failed_login_delay_s=0)
    async with (
        Container(
            "shop",
            users={"ada": "pw", "bob": "pw"},
            sasl=["SCRAM-SHA-256", "ANONYMOUS"],
            limits=limits,
        ) as shop,
        Container("client") as client,
        AsyncExitStack() as stack,
    ):
        urls = await shop.listen("amqp://127.0.0.1:0", f"{transport}://127.0.0.1:0")

        async def come(user: str, url: str) -> None:
            where = url.replace("://", f"://{user}:pw@") if user else url
            peer = await stack.enter_async_context(client.connect(where, reconnect=None))
            await peer.wait_open()

        await come("ada", urls[0])
        await come("ada", urls[1])
        for url in urls:
            with pytest.raises(AmqpError, match="'ada' has 2 connections already") as refused:
                async with client.connect(url.replace("://", "://ada:pw@"), reconnect=None) as peer:
                    await peer.wait_closed()
            assert refused.value.condition == "amqp:resource-limit-exceeded"
        for _ in range(3):
            await come("", urls[0])
        await come("bob", urls[0])
        await stack.aclose()
        with trio.fail_after(5):
            while shop.connections:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await come("ada", urls[1])


@pytest.mark.req("L6")
async def test_the_connections_of_a_profile_are_bounded() -> None:
    """At its listeners together; those of other profiles are not counted."""
    profile = Profile(name="shop", connections_max=2)
    async with Container("shop") as shop, Container("client") as client, AsyncExitStack() as stack:
        (first,) = await shop.listen("amqp://127.0.0.1:0", profile=profile)
        (second,) = await shop.listen("amqp://127.0.0.1:0", profile=profile)
        (other,) = await shop.listen("amqp://127.0.0.1:0", profile=Profile(name="other"))

        async def come(url: str) -> None:
            peer = await stack.enter_async_context(client.connect(url, reconnect=None))
            await peer.wait_open()

        for url in (first, second, other, other, other):
            await come(url)
        for url in (first, second):
            with pytest.raises(AmqpError, match="2 connections to shop already") as refused:
                async with client.connect(url, reconnect=None) as peer:
                    await peer.wait_closed()
            assert refused.value.condition == "amqp:resource-limit-exceeded"
        await stack.aclose()
        with trio.fail_after(5):
            while shop.connections:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await come(first)
        await come(second)
