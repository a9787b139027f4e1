"""Add-ons of a broker: hosts, hooks and alarms that a plug-in adds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from brokers import World, client_of

from amqp_rt import Access, Broker, Container, Message, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.broker.broker import addon_of
from amqp_rt.broker.host import BrokerHost
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import ACCEPTED, Error
from amqp_rt.fronts.base import ReceivingLink, SendingLink
from amqp_rt.fronts.hosts import BareHost
from amqp_rt.testing.clocks import MovableClock
from amqp_rt.testing.loopback import LoopbackBroker


class Sink:
    """Endpoint that accepts what it receives, and keeps the payloads."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def on_attached(self, link: Any) -> None:
        link.grant(10)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries:
            self.payloads.append(each.payload)
            each.settle(ACCEPTED)

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """Keep the payloads."""


class Bins(BareHost):
    """Host of the addresses that begin with ``bin``."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.asked: list[Any] = []

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        terminus = link.target
        self.asked.append(terminus)
        if not str(getattr(terminus, "address", "")).startswith("bin"):
            return False
        link.accept(self.sink)  # type: ignore[arg-type]
        return True


class BinsAddOn:
    """Add-on with one host, which is asked before the broker."""

    def __init__(self) -> None:
        self.host = Bins()

    def install(self, broker: Broker) -> None:
        broker.container.add_host(self.host, first=True)


async def test_the_host_of_an_addon_is_asked_before_the_nodes_of_the_broker() -> None:
    addon = BinsAddOn()
    async with Broker(addons=[addon], auto_create=["queue:*"]) as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://b")
        async with client_of(broker) as peer:
            async with peer.sender("bin/1") as sender:
                await sender.send("old")
            async with peer.sender("work") as sender:
                await sender.send("new")
        assert [Message.decode(each).body for each in addon.host.sink.payloads] == ["old"]
        assert not broker.has("bin/1")
        assert broker.stats("work").available == 1


async def test_addons_are_installed_in_order_before_the_start() -> None:
    installed: list[tuple[int, Broker, bool]] = []

    class Noted:
        def __init__(self, number: int) -> None:
            self.number = number

        def install(self, broker: Broker) -> None:
            installed.append((self.number, broker, broker.container.ready))
            broker.container.on_startup(lambda: installed.append((-self.number, broker, False)))

    broker = Broker(addons=[Noted(1), Noted(2)])
    assert installed == [(1, broker, False), (2, broker, False)]
    async with broker:
        assert [number for number, _, _ in installed] == [1, 2, -1, -2]


def test_an_addon_that_raises_leaves_no_broker() -> None:
    class Wrong:
        def install(self, broker: Broker) -> None:
            raise AmqpError("needs management", condition="amqp:not-allowed")

    with pytest.raises(AmqpError, match="needs management"):
        Broker(addons=[Wrong()])


def test_an_installed_addon_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_addon.py").write_text(
        "class Shop:\n    def install(self, broker):\n        broker.shop = self\n"
    )
    about = tmp_path / "shop_addon-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-addon\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[amqp_rt.addons]\nshop = shop_addon:Shop\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broker: Any = Broker(addons=["shop"])
    assert type(broker.shop).__name__ == "Shop"
    with pytest.raises(AmqpError, match=r"no plug-in has an add-on 'shops'; installed are: .*shop"):
        addon_of("shops")
    sys.modules.pop("shop_addon")


def test_a_protocol_whose_plug_in_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amqp_rt.broker.broker.entry_points", lambda **group: ())
    with pytest.raises(
        AmqpError, match=r"the protocol amqp091 needs .*: pip install amqp-rt-amqp091"
    ):
        Broker(fronts=["amqp091"])


class Chime:
    """Object that is called at a time."""

    def __init__(self, host: BrokerHost) -> None:
        self.host = host
        self.alarm = 0.0
        self.deleted = False
        self.ticks: list[float] = []
        self.fault: Exception | None = None
        self.rang = trio.Event()

    def set(self, at: float) -> None:
        self.alarm = at
        self.host.set_alarm(self, at)

    def tick(self) -> None:
        self.ticks.append(self.host.clock.monotonic())
        self.rang.set()
        if self.fault is not None:
            raise self.fault


def test_an_alarm_goes_off_once_when_the_clock_is_moved_past_it() -> None:
    world = World()
    chime = Chime(world.host)
    begun = world.time.now
    chime.set(begun + 10)
    world.time.now += 9.9
    world.host.catch_up()
    assert chime.ticks == []
    world.time.now = begun + 10
    world.host.catch_up()
    world.host.catch_up()
    assert chime.ticks == [begun + 10]


def test_an_alarm_that_was_moved_goes_off_at_the_new_time_only() -> None:
    world = World()
    chime = Chime(world.host)
    begun = world.time.now
    chime.set(begun + 10)
    chime.set(begun + 20)
    world.time.now = begun + 15
    world.host.catch_up()
    assert chime.ticks == []
    world.time.now = begun + 25
    world.host.catch_up()
    assert chime.ticks == [begun + 25]


def test_the_alarm_of_a_deleted_object_does_not_go_off() -> None:
    world = World()
    chime = Chime(world.host)
    chime.set(world.time.now + 1)
    chime.deleted = True
    world.time.now += 5
    world.host.catch_up()
    assert chime.ticks == []


def test_an_alarm_that_raises_is_logged_and_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    first, second = Chime(world.host), Chime(world.host)
    first.fault = ZeroDivisionError("tick")
    for each in (first, second):
        each.set(world.time.now + 1)
    world.time.now += 5
    world.host.catch_up()
    assert len(second.ticks) == 1
    assert "ZeroDivisionError: tick" in caplog.text


def test_alarms_beyond_the_work_of_a_turn_stay_due() -> None:
    world = World()
    chimes = [Chime(world.host) for _ in range(5_000)]
    for each in chimes:
        each.set(world.time.now + 1)
    world.time.now += 5
    world.host.catch_up()
    rung = sum(len(each.ticks) for each in chimes)
    assert 0 < rung < 5_000
    for _ in range(100):
        world.host.catch_up()
    assert all(len(each.ticks) == 1 for each in chimes)


async def test_a_running_broker_rings_alarms_by_itself() -> None:
    clock = MovableClock()
    async with Broker(clock=clock) as broker:
        chime = Chime(broker.host)
        chime.set(clock.monotonic() + 0.01)
        with trio.fail_after(10):
            await chime.rang.wait()
    assert len(chime.ticks) == 1


def test_advance_rings_the_alarms_of_an_addon_before_it_returns() -> None:
    chimes: list[Chime] = []

    class Ringing:
        def install(self, broker: Broker) -> None:
            chimes.append(Chime(broker.host))

    with LoopbackBroker(addons=[Ringing()]) as broker:
        (chime,) = chimes
        broker.call(_set, chime, 30.0)
        broker.advance(31)
        assert len(chime.ticks) == 1


async def _set(chime: Chime, in_s: float) -> None:
    chime.set(chime.host.clock.monotonic() + in_s)


async def test_a_host_of_an_addon_gets_no_links_without_rights() -> None:
    addon = BinsAddOn()
    access = Access([Rule("work", Rights.SEND, anonymous=True)])
    async with Broker(addons=[addon], access=access) as broker:
        await broker.listen("memory://b")
        async with (
            Container("c", network=broker.container.network) as container,
            container.connect("memory://b", reconnect=None) as peer,
        ):
            with pytest.raises(AmqpError, match="not for you"):
                async with peer.sender("bin/1"):
                    pass
    assert addon.host.asked == []
