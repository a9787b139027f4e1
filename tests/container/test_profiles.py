"""Profiles of listeners: two listeners of one broker, of which one appears as another product."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from brokers import client_of

import amqp_rt
from amqp_rt import Broker, Cbs, Connection, Container, Profile, Rights, SasKey, SasKeys, rpc
from amqp_rt.addresses import address_of
from amqp_rt.broker import Queue
from amqp_rt.container.tokens import Sas
from amqp_rt.errors import AmqpError, DeliveryNotAccepted, LinkRefused
from amqp_rt.fronts.base import RCV_FIRST, RCV_SECOND, ReceivingLink, SendingLink
from amqp_rt.fronts.hosts import BareHost
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import Error
from amqp_rt.security.access import Access, Rule
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Recorder

REFUSED = Error("amqp:not-allowed", "closed today")
KEYS = SasKeys({"app": SasKey(("k",), Rights.SEND | Rights.LISTEN)})


@asynccontextmanager
async def two_listeners(
    profile: Profile, **options: Any
) -> AsyncIterator[tuple[Broker, Connection, Connection]]:
    """Run a broker; yield it with a connection to a listener with *profile*, and one to a plain one."""
    async with Broker("b", **options) as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=profile)
        async with (
            client_of(broker, "c1", url="memory://dressed") as dressed,
            client_of(broker, "c2", url="memory://plain") as plain,
        ):
            yield broker, dressed, plain


async def test_a_profile_gives_the_properties_of_the_open_and_the_size_of_frames() -> None:
    profile = Profile(name="shop", properties={"product": "Shop"}, frame_size_max=128 * 1024)
    limits = Limits(frame_size_max=1024 * 1024)
    async with Broker("b") as broker:
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=profile)
        for url, product, size in (
            ("memory://dressed", "Shop", 128 * 1024),
            ("memory://plain", None, 64 * 1024),
        ):
            async with (
                Container("c", network=broker.container.network, limits=limits) as container,
                container.connect(url, reconnect=None) as peer,
            ):
                engine: Any = peer.engine
                assert peer.peer.properties.get("product") == product
                assert engine.frame_size_out == size


async def test_a_profile_bounds_the_sessions_of_a_connection() -> None:
    async with Broker("b") as broker:
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=Profile(name="shop", channel_max=0))
        for url, most in (("memory://dressed", 0), ("memory://plain", 63)):
            async with broker.connect(url, reconnect=None) as peer:
                engine: Any = peer.engine
                assert engine._remote_channel_max == most


def lower_case(address: str) -> str:
    return address_of(address).lower()


async def test_a_profile_maps_addresses_for_links_rights_and_relays() -> None:
    profile = Profile(name="shop", address=lower_case, echo_addresses=True)
    access = Access([Rule("work", Rights.SEND | Rights.LISTEN, anonymous=True)])
    async with two_listeners(profile, access=access) as (broker, dressed, plain):
        async with dressed.sender("WORK") as sender:
            await sender.send("one")
            assert sender.link.target.address == "WORK"
        async with dressed.sender(None) as sender:
            await sender.send(Message("two", to="amqp://b/Work"))
        assert broker.stats("work").available == 2
        async with dressed.receiver("Work") as receiver:
            assert receiver.link.source.address == "Work"
            async with await receiver.receive() as delivery:
                assert delivery.message.body == "one"
        with pytest.raises(LinkRefused, match="not for you"):
            async with plain.sender("WORK"):
                pass
        async with plain.sender("amqp://b/work") as sender:
            assert sender.link.target.address == "work"


async def test_links_of_a_profile_keep_their_rights_by_the_mapped_address() -> None:
    """Rights that change are judged again by the node's own name."""
    cbs = Cbs([KEYS])
    profile = Profile(name="shop", address=lower_case, echo_addresses=True, cbs=cbs)
    async with Broker("b") as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://dressed", profile=profile)
        async with (
            Container("c", network=broker.container.network) as container,
            container.connect("memory://dressed", reconnect=None, token=Sas("app", "k")) as peer,
            peer.sender("WORK") as sender,
        ):
            await sender.send("one")
            (connection,) = broker.container.connections
            broker.container.attaching.reauthorize(connection, "asked again")
            await sender.send("two")
        assert broker.stats("work").available == 2


@pytest.mark.skipif(amqp_rt.COMPILED, reason="methods of compiled classes cannot be changed")
@pytest.mark.parametrize(("whole", "fields"), [(False, 5), (True, 8)])
async def test_performatives_of_a_profile_have_all_their_fields(whole: bool, fields: int) -> None:
    shop = Profile(name="shop", whole_frames=whole)
    async with two_listeners(shop) as (_, dressed, plain):
        for peer, expected in ((dressed, fields), (plain, 5)):
            engine: Any = peer.engine
            receive, seen = engine.receive, bytearray()

            def noting(data: bytes, now: float, seen: Any = seen, receive: Any = receive) -> Any:
                seen.extend(data)
                return receive(data, now)

            engine.receive = noting
            engine.begin()
            await trio.testing.wait_all_tasks_blocked()
            # A begin with a short list: 00 53 11 C0 size count.
            assert seen[seen.index(b"\x00\x53\x11\xc0") + 5] == expected


async def test_errors_of_a_profile_have_all_their_fields() -> None:
    async with two_listeners(Profile(name="shop", whole_errors=True)) as (_, dressed, plain):
        for peer, info in ((dressed, {}), (plain, None)):
            recorder = Recorder()
            engine: Any = peer.engine
            engine.begin().attach_sender("l", recorder, target=Target(address="nowhere"))
            await trio.testing.wait_all_tasks_blocked()
            ((error, _),) = recorder.detached
            assert error is not None
            assert (error.condition, error.info) == ("amqp:not-found", info)


@pytest.mark.parametrize("wanted", [True, False, None])
@pytest.mark.parametrize("usual", [True, False])
async def test_a_profile_decides_who_settles_first(wanted: bool | None, usual: bool) -> None:
    modes: dict[str, int] = {}

    class Noting(BareHost):
        def attach(self, link: ReceivingLink | SendingLink) -> bool:
            modes[link.peer.container_id] = link.rcv_settle_mode
            return False

    broker = Broker("b", settle_second=usual)
    broker.container.add_host(Noting(), first=True)
    async with broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=Profile(name="x", settle_second=wanted))
        for url in ("memory://plain", "memory://dressed"):
            async with (
                Container(url, network=broker.container.network) as container,
                container.connect(url, reconnect=None) as peer,
            ):
                engine: Any = peer.engine
                recorder = Recorder()
                target = Target(address="work")
                engine.begin().attach_sender(
                    "l", recorder, target=target, rcv_settle_mode=RCV_SECOND
                )
                await trio.testing.wait_all_tasks_blocked()
    second = {True: RCV_SECOND, False: RCV_FIRST}
    assert modes == {
        "memory://plain": second[usual],
        "memory://dressed": second[usual if wanted is None else wanted],
    }


async def test_a_listener_takes_tokens_and_the_other_none() -> None:
    profile = Profile(name="shop", cbs=Cbs([KEYS]))
    async with Broker("b") as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=profile)
        async with client_of(broker, "c0", url="memory://plain") as plain:
            async with plain.sender("work") as sender:
                await sender.send("one")
            with pytest.raises(AmqpError, match="needs no tokens"):
                await plain.call(
                    "$cbs", Message("x", application_properties={"operation": "put-token"})
                )
        async with client_of(broker, "c1", url="memory://dressed") as dressed:
            with pytest.raises(LinkRefused, match="not for you"):
                async with dressed.sender("work"):
                    pass
        async with (
            Container("c2", network=broker.container.network) as container,
            container.connect("memory://dressed", reconnect=None, token=Sas("app", "k")) as peer,
            peer.sender("work") as sender,
        ):
            await sender.send("two")
        async with broker.local() as local, local.sender("work") as sender:
            await sender.send("three")
        assert broker.stats("work").available == 3


async def test_a_profile_offers_mechanisms_of_its_own() -> None:
    profile = Profile(name="shop", cbs=Cbs([KEYS]), sasl=["MSSBCBS", "ANONYMOUS"])
    async with Broker("b", users={"ada": "pw"}, plain_in_clear=True) as broker:
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=profile)
        entry = broker.container.entry
        assert list(entry._logins_of[profile].mechanisms) == ["MSSBCBS", "ANONYMOUS"]
        assert list(entry._logins_of[None].mechanisms)[-1] == "PLAIN"
        async with client_of(broker, url="memory://dressed", token=Sas("app", "k")):
            pass
        with pytest.raises(AmqpError):
            async with client_of(broker, url="memory://plain"):
                pass


def test_a_profile_with_unknown_mechanisms_is_refused() -> None:
    broker = Broker("b")
    with pytest.raises(ValueError, match="'NTLM' is not known"):
        broker.container.set_profile(Profile(name="x", sasl=["NTLM"]))
    with pytest.raises(ValueError, match="pass cbs="):
        broker.container.set_profile(Profile(name="x", sasl=["MSSBCBS"]))
    with pytest.raises(ValueError, match="frame_size_max"):
        broker.container.set_profile(Profile(name="x", frame_size_max=100))
    with pytest.raises(ValueError, match="profile 'x': sasl_policy='off'"):
        Broker("b", sasl_policy="off").container.set_profile(Profile(name="x", cbs=Cbs([KEYS])))
    assert broker.container.entry.profile is None


async def test_a_profile_decides_on_unknown_annotations() -> None:
    profile = Profile(name="shop", annotations="lenient")
    async with two_listeners(profile) as (broker, dressed, plain):
        message = Message("one", message_annotations={"com.example:kind": 1})
        async with dressed.sender("work") as sender:
            await sender.send(message)
        async with plain.sender("work") as sender:
            with pytest.raises((DeliveryNotAccepted, AmqpError)):
                await sender.send(message)
        assert broker.stats("work").available == 1


async def test_the_hosts_of_a_profile_are_asked_for_its_links_only() -> None:
    class Nowhere(BareHost):
        def attach(self, link: ReceivingLink | SendingLink) -> bool:
            if link.target is None or getattr(link.target, "address", None) is None:
                return False
            link.refuse(REFUSED)
            return True

        def relay(self, address: str, link: ReceivingLink) -> Any:
            return REFUSED

    async with two_listeners(Profile(name="shop", hosts=(Nowhere(),))) as (_, dressed, plain):
        with pytest.raises(LinkRefused, match="closed today"):
            async with dressed.sender("work"):
                pass
        async with dressed.sender(None) as sender:
            with pytest.raises(AmqpError, match="closed today"):
                await sender.send(Message("x", to="work"))
        async with plain.sender("work") as sender:
            await sender.send("x")
        async with plain.sender(None) as sender:
            await sender.send(Message("x", to="work"))


async def test_the_profile_of_a_container_is_that_of_listeners_without_one() -> None:
    seen: list[str | None] = []

    @rpc("who")
    async def who(connection: Connection) -> str:
        profile = connection.peer.profile
        seen.append(None if profile is None else profile.name)
        return "x"

    async with Broker("b", nodes=[who]) as broker:
        broker.container.set_profile(Profile(name="all"))
        await broker.listen("memory://plain")
        await broker.listen("memory://dressed", profile=Profile(name="one"))
        for url in ("memory://plain", "memory://dressed"):
            async with client_of(broker, url=url) as peer:
                await peer.call("who", "")
        async with broker.local() as peer:
            await peer.call("who", "")
    assert seen == ["all", "one", None]
