"""Quotas that only a realistic namespace has: connections, receivers, shared access policies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from amqp_rt_servicebus.conditions import NO_ROOM
from amqp_rt_servicebus.declarations import Hub, Queue, SasKey, Subscription, Topic
from amqp_rt_servicebus.host import ATTACH_TIMEOUT, SESSION_FILTER
from amqp_rt_servicebus.namespace import Namespace
from amqp_rt_servicebus.quotas import QUOTAS, UNLIMITED
from amqp_rt_servicebus.testing import ServiceBus
from msgspec.structs import replace
from trio.testing import MockClock

from amqp_rt import Broker, Connection
from amqp_rt.errors import AmqpError
from amqp_rt.values import Symbol, UInt

pytestmark = pytest.mark.req("Z13")


@pytest.fixture
async def peer(autojump_clock: MockClock) -> AsyncIterator[Connection]:
    """Client of a namespace with three receivers for each queue or topic."""
    namespace = Namespace(
        Queue("q"),
        Queue("other"),
        Queue("s", requires_session=True),
        Topic("t", [Subscription("a"), Subscription("b")]),
        realistic=True,
    )
    namespace.quotas = replace(QUOTAS, receivers=3)
    async with Broker(addons=[namespace], volatile=True) as broker, broker.local() as peer:
        yield peer


async def refused(peer: Connection, address: str, **options: Any) -> str:
    with pytest.raises(AmqpError) as caught:
        async with peer.receiver(address, **options):
            pass
    return caught.value.condition


@pytest.mark.parametrize(
    ("first", "last", "free"),
    [
        (("q", "q", "q/$deadletterqueue"), "q", "other"),
        (("t/subscriptions/a", "t/subscriptions/a", "t/subscriptions/b"), "t/subscriptions/b", "q"),
    ],
)
async def test_receivers_are_counted_as_long_as_they_are_attached(
    peer: Connection, first: tuple[str, ...], last: str, free: str
) -> None:
    async with peer.receiver(first[0]), peer.receiver(first[1]):
        for _ in range(2):
            async with peer.receiver(first[2]):
                assert await refused(peer, last) == NO_ROOM
                async with peer.receiver(free):
                    pass
        async with peer.receiver(last):
            pass


async def test_receivers_of_sessions_are_counted(peer: Connection) -> None:
    def session(name: str | None) -> dict[str, Any]:
        return {
            "filter": {Symbol(SESSION_FILTER): name},
            "properties": {ATTACH_TIMEOUT: UInt(1_000)},
        }

    async with peer.receiver("s", **session("1")), peer.receiver("s", **session("2")):
        # Refused attaches are not counted.
        assert await refused(peer, "s", **session("1")) == "com.microsoft:session-cannot-be-locked"
        assert await refused(peer, "s", **session(None)) == "com.microsoft:timeout"
        async with peer.receiver("s", **session("3")):
            assert await refused(peer, "s", **session("4")) == NO_ROOM


async def test_connections_of_a_namespace_are_counted() -> None:
    namespace = Namespace(realistic=True)
    namespace.quotas = replace(QUOTAS, connections=2)
    async with Broker(addons=[namespace], volatile=True) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        # Connections without a token are bounded by themselves.
        url = url.replace("://", "://RootManageSharedAccessKey:SAS_KEY_VALUE@")
        async with Broker() as client, client.container.connect(url, reconnect=None) as first:
            await first.wait_open()
            async with client.container.connect(url, reconnect=None) as second:
                await second.wait_open()
                with pytest.raises(AmqpError, match="2 connections to namespace tests already"):
                    async with client.container.connect(url, reconnect=None) as third:
                        await third.wait_closed()


KEYS = {f"k{number}": SasKey("key") for number in range(13)}
TWELVE = dict(list(KEYS.items())[:12])


@pytest.mark.parametrize("kind", [Queue, Topic, Hub])
def test_an_entity_has_twelve_policies_at_most(kind: Any) -> None:
    with (
        ServiceBus(kind("e", keys=TWELVE), realistic=True) as bus,
        pytest.raises(ValueError, match="'f' has 13 shared access policies, at most 12"),
    ):
        bus.declare(kind("f", keys=KEYS))
    with ServiceBus(kind("e", keys=KEYS)):
        pass


def test_a_namespace_has_twelve_policies_at_most() -> None:
    assert len(Namespace(keys=TWELVE, realistic=True).keys) == 12
    with pytest.raises(ValueError, match="namespace 'tests' has 13 shared access policies"):
        Namespace(keys=KEYS, realistic=True)
    assert len(Namespace(keys=KEYS).keys) == 13


def test_quotas_are_those_of_the_service() -> None:
    assert (QUOTAS.connections, QUOTAS.receivers, QUOTAS.keys) == (5_000, 5_000, 12)
    assert UNLIMITED.connections is None
