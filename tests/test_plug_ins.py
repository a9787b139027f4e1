"""Filter types and transports of plug-ins, installed through entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import trio

from amqp_rt import Broker, Plain
from amqp_rt.addresses import parse_url, transport_plugins
from amqp_rt.broker import Queue, Topic
from amqp_rt.broker.building import FilterType, InvalidFilter, MessageView
from amqp_rt.broker.filtering import plugin_filters
from amqp_rt.errors import AmqpError, ConnectFailed
from amqp_rt.limits import Limits
from amqp_rt.net.transports import transport_for
from amqp_rt.values import Described, Symbol

#: Installs a distribution with a module, named by its group, entry point and source.
Install = Callable[[str, str, str], None]

REGION = """
    from amqp_rt.broker.building import InvalidFilter

    def region(value):
        if not isinstance(value, str):
            raise InvalidFilter("a region is a string")
        return lambda view: view.application_properties()["region"] == value
"""

PIGEON = """
    import os
    import socket

    import trio

    class Pigeon:
        secure = True

        async def dial(self, url):
            return await trio.open_unix_socket(url.path)

        async def listen(self, url):
            loft = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                await loft.bind(url.path)
            except BaseException:
                loft.close()
                raise
            loft.listen()
            return trio.SocketListener(loft), url

        def peer(self, stream):
            return ""
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a plug-in for one test."""
    caches = (transport_plugins, plugin_filters._installed, plugin_filters._loaded)
    modules: list[str] = []

    def add(group: str, entry: str, source: str) -> None:
        module = f"plugged_{len(modules)}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(dedent(source))
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        name, _, thing = entry.partition("=")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{thing}\n")
        for cache in caches:
            cache.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield add
    for cache in caches:
        cache.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.req("U1", "M28")
async def test_a_filter_type_of_a_plug_in_selects_messages(install: Install) -> None:
    install("amqp_rt.filters", "shop:region=region", REGION)
    wanted = {"mine": Described(Symbol("shop:region"), "north")}
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        async with peer.receiver("orders", filter=wanted) as north, peer.sender("orders") as out:
            assert north.source is not None
            assert Symbol("mine") in north.source.filter
            for region in ("south", "north"):
                await out.send(region, application_properties={"region": region})
            assert (await north.receive()).body == "north"
            assert broker.stats("orders").available == 1


async def test_a_filter_without_a_descriptor_is_found_by_its_name(install: Install) -> None:
    install("amqp_rt.filters", "shop:region=region", REGION)
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Topic("orders"))
        async with peer.receiver("orders", filter={"shop:region": "north"}) as north:
            assert Symbol("shop:region") in north.source.filter


async def test_a_value_that_a_filter_type_does_not_take_is_refused(install: Install) -> None:
    install("amqp_rt.filters", "shop:region=region", REGION)
    wanted = {"mine": Described(Symbol("shop:region"), 7)}
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        with pytest.raises(AmqpError, match="mine: a region is a string") as refused:
            async with peer.receiver("orders", filter=wanted):
                pass
        assert refused.value.condition == "amqp:invalid-field"


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('broken')", "def region(value): raise RuntimeError('broken')"]
)
async def test_a_filter_type_that_fails_is_not_in_place(
    install: Install, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    install("amqp_rt.filters", "shop:region=region", source)
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        wanted = {"mine": Described(Symbol("shop:region"), "north")}
        async with peer.receiver("orders", filter=wanted) as all_of_them:
            assert not all_of_them.source.filter
        assert "filter not in place: mine: its type shop:region failed" in caplog.text


async def test_messages_for_which_a_test_raises_do_not_pass(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("amqp_rt.filters", "shop:region=region", REGION)
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        async with (
            peer.receiver("orders", filter={"shop:region": "north"}) as north,
            peer.sender("orders") as out,
        ):
            for _ in range(3):
                await out.send("without a region")
            await out.send("with", application_properties={"region": "north"})
            assert (await north.receive()).body == "with"
            assert broker.stats("orders").available == 3
        assert caplog.text.count("message does not pass: filter shop:region") == 1


async def test_work_of_filter_types_is_bounded() -> None:
    def endless(value: object) -> Callable[[MessageView], bool]:
        def test(view: MessageView) -> bool:
            while True:
                view.spend(1)

        return test

    limits = Limits(filter_steps_max=1_000)
    async with (
        Broker(filters={"shop:endless": endless}, limits=limits) as broker,
        broker.local() as peer,
    ):
        await broker.declare(Queue("orders"))
        async with (
            peer.receiver("orders", filter={"shop:endless": 1}) as slow,
            peer.sender("orders") as out,
        ):
            await out.send("one")
            with trio.move_on_after(0.05):
                pytest.fail(f"received {await slow.receive()}")
        assert broker.stats("orders").available == 1


def test_filter_types_of_the_broker_are_not_replaced() -> None:
    def all_of_them(value: object) -> Callable[[MessageView], bool]:
        return lambda view: True

    types: dict[str, FilterType] = {"apache.org:selector-filter:string": all_of_them}
    with pytest.raises(ValueError, match="is one of the broker"):
        Broker(filters=types)


async def test_a_subscription_is_not_restored_without_its_filter_type(tmp_path: Path) -> None:
    def even(value: object) -> Callable[[MessageView], bool]:
        if value is not None and value is not True:
            raise InvalidFilter("true expected")
        return lambda view: (view.properties().group_sequence or 0) % 2 == 0

    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store, filters={"shop:even": even}) as broker, broker.local() as peer:
        await broker.declare(Topic("orders"))
        kept = peer.receiver("orders", name="kept", filter={"shop:even": True}, durable=2)
        async with kept:
            await kept.suspend()
    async with Broker(store=store, filters={"shop:even": even}):
        pass
    with pytest.raises(AmqpError, match="no plug-in has the type of the filter 'shop:even'"):
        async with Broker(store=store):
            pass


@pytest.mark.req("U1", "L3")
async def test_urls_have_the_transport_of_a_plug_in(install: Install, tmp_path: Path) -> None:
    install("amqp_rt.transports", "pigeon=Pigeon", PIGEON)
    url = f"pigeon://{tmp_path / 'loft'}"
    # The password crosses in clear, which takes a secure transport, and so does the listener.
    async with Broker(users={"ann": "secret"}, tls=None) as broker:
        await broker.declare(Queue("orders"))
        assert await broker.listen(url) == [url]
        with_user = url.replace("://", "://ann:secret@")
        async with broker.connect(with_user) as peer, peer.sender("orders") as out:
            await out.send("one")
            assert peer.peer.secure
            (accepted,) = broker.container.entry.connections
            assert (accepted.peer.address, accepted.peer.secure) == ("pigeon://", True)
            assert str(accepted.peer.user) == "ann"
        assert broker.stats("orders").available == 1
        with pytest.raises(ConnectFailed, match=r"cannot listen on pigeon:.*already in use"):
            await broker.listen(url)
        with pytest.raises(ConnectFailed, match="is reached without a proxy"):
            async with broker.connect(url, proxy="http://127.0.0.1:1"):
                pass
    with pytest.raises(ConnectFailed, match="nothing listens there"):
        async with Broker() as client, client.connect(url, reconnect=None):
            pass


async def test_no_password_crosses_a_transport_in_clear(install: Install, tmp_path: Path) -> None:
    install(
        "amqp_rt.transports", "pigeon=Pigeon", PIGEON.replace("secure = True", "secure = False")
    )
    url = f"pigeon://{tmp_path / 'loft'}"
    async with Broker(users={"ann": "secret"}) as broker:
        await broker.listen(url)
        with pytest.raises(AmqpError, match="clear"):
            async with broker.connect(url, auth=Plain("ann", "secret"), reconnect=None):
                pass
        # The broker offers SCRAM, which proves the password without sending it.
        with_user = url.replace("://", "://ann:secret@")
        async with broker.connect(with_user, reconnect=None) as peer:
            assert not peer.peer.secure
            (accepted,) = broker.container.entry.connections
            assert str(accepted.peer.user) == "ann"


def test_schemes_without_a_plug_in_are_named(install: Install) -> None:
    install("amqp_rt.transports", "pigeon=Pigeon", PIGEON)
    with pytest.raises(ConnectFailed, match=r"no such scheme; there are amqp, .*memory, pigeon \["):
        parse_url("dove://here")
    assert str(parse_url("pigeon://ann:secret@loft:7/left")) == "pigeon://ann@loft:7/left"


def test_our_schemes_are_not_replaced(install: Install) -> None:
    install("amqp_rt.transports", "amqps=Pigeon", PIGEON)
    assert transport_for(parse_url("amqps://here")) is None


def test_a_transport_that_does_not_load_is_named(install: Install) -> None:
    install("amqp_rt.transports", "pigeon=Pigeon", "raise RuntimeError('no loft')")
    with pytest.raises(
        ConnectFailed, match=r"pigeon://loft: the transport plugged_0:Pigeon .*no loft"
    ):
        transport_for(parse_url("pigeon://loft"))
