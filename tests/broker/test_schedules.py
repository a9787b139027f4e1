"""Schedules of a broker: the times of their messages, over restarts and changes of the clock."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import trio
from brokers import World
from commands import Served, ok
from crashed import Photographed
from msgspec import Struct

from amqp_rt import Access, Broker, Container, Rights, Rule, node
from amqp_rt.broker import Log, Queue, Schedule
from amqp_rt.broker.declarations import declarations_of, declared_by
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.nodes import passages_of
from amqp_rt.errors import AmqpError, LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.security.access import Passage
from amqp_rt.security.mechanisms import Plain
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.timetables import Cron

BERLIN = ZoneInfo("Europe/Berlin")
NIGHTLY = Schedule("nightly", to="jobs", cron="30 2 * * *", tz="Europe/Berlin", payload="go")


def at(text: str, fold: int = 0) -> float:
    """Return the time *text* in Berlin; the second one with *fold* 1."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


class Clocks:
    """Both clocks, of which a test may set one alone."""

    def __init__(self, wall: float) -> None:
        self.wall_s = wall
        self.monotonic_s = 1000.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s


class Run:
    """A broker without a network, whose time passes when a test says so."""

    def __init__(self, host: BrokerHost, clocks: Clocks) -> None:
        self.host = host
        self.clocks = clocks

    def pass_s(self, seconds: float, step: float = 10.0) -> None:
        while seconds > 0:
            move = min(step, seconds)
            self.clocks.wall_s += move
            self.clocks.monotonic_s += move
            seconds -= move
            self.host.turns.tick()

    def set_wall(self, wall: float) -> None:
        self.clocks.wall_s = wall
        self.pass_s(11)

    def sent(self, name: str = "jobs") -> list[str]:
        """Return the times in Berlin for which the queue *name* has messages."""
        found = []
        for payload in trio.run(self.host.space().find(name).peek, 1000):  # type: ignore[attr-defined]
            due = Message.decode(payload).message_annotations["x-opt-schedule-time"] / 1000
            found.append(datetime.fromtimestamp(due, BERLIN).strftime("%m-%d %H:%M:%S %Z"))
        return found


def run_of(wall: float, *declared: Any, **options: Any) -> Run:
    clocks = Clocks(wall)
    host = BrokerHost(clock=clocks, **options)
    for each in declared:
        host.space().declare(each)
    return Run(host, clocks)


def test_a_message_is_sent_once_at_each_time() -> None:
    run = run_of(at("2026-06-01 02:29:00"), Queue("jobs"), NIGHTLY)
    run.pass_s(59)
    assert run.sent() == []
    run.pass_s(1)
    assert run.sent() == ["06-01 02:30:00 CEST"]
    run.pass_s(2 * 86_400, step=9)
    assert run.sent() == [f"06-0{day} 02:30:00 CEST" for day in (1, 2, 3)]
    (first, *_) = trio.run(run.host.space().find("jobs").peek, 1)  # type: ignore[attr-defined]
    message = Message.decode(first)
    assert message.body == "go"
    assert message.message_id == "nightly@2026-06-01T00:30:00+00:00"
    assert message.message_annotations["x-opt-schedule"] == "nightly"
    assert not message.durable, "there is no store"


@pytest.mark.parametrize(
    ("start", "times"),
    [
        # 02:30 does not exist on 29 March, and exists twice on 25 October.
        ("2026-03-28 02:00", ["03-28 02:30:00 CET", "03-29 03:00:00 CEST", "03-30 02:30:00 CEST"]),
        ("2026-10-24 02:00", ["10-24 02:30:00 CEST", "10-25 02:30:00 CEST", "10-26 02:30:00 CET"]),
    ],
)
def test_daylight_saving_time(start: str, times: list[str]) -> None:
    run = run_of(at(start), Queue("jobs"), NIGHTLY)
    run.pass_s(2.2 * 86_400, step=60)
    assert run.sent() == times


def test_a_wildcard_goes_by_real_time() -> None:
    hourly = Schedule("hourly", to="jobs", cron="0 * * * *", tz="Europe/Berlin")
    run = run_of(at("2026-10-25 01:30"), Queue("jobs"), hourly)
    run.pass_s(3 * 3600)
    assert [each[6:] for each in run.sent()] == ["02:00:00 CEST", "02:00:00 CET", "03:00:00 CET"]


def test_a_clock_put_back_sends_nothing_twice() -> None:
    run = run_of(at("2026-06-01 02:00"), Queue("jobs"), NIGHTLY)
    run.pass_s(3600)
    assert len(run.sent()) == 1
    run.set_wall(at("2026-06-01 02:00"))
    run.pass_s(3600)
    assert len(run.sent()) == 1
    run.set_wall(at("2026-05-31 02:00"))
    run.pass_s(86_400)
    assert len(run.sent()) == 1
    run.pass_s(86_400 + 3600)
    assert run.sent() == ["06-01 02:30:00 CEST", "06-02 02:30:00 CEST"]


def test_an_interval_does_not_follow_the_wall_clock() -> None:
    run = run_of(at("2026-06-01 12:00"), Queue("jobs"), Schedule("tick", to="jobs", every_s=60))
    run.pass_s(125)
    assert len(run.sent()) == 2
    run.set_wall(at("2026-05-01 12:00"))
    run.pass_s(60)
    assert len(run.sent()) == 3
    run.set_wall(at("2027-05-01 12:00"))
    assert len(run.sent()) == 3
    run.pass_s(60)
    assert len(run.sent()) == 4


@pytest.mark.parametrize(
    ("catch_up", "found"),
    [
        ("one", ["06-04 02:30:00 CEST"]),
        ("all", [f"06-0{day} 02:30:00 CEST" for day in (2, 3, 4)]),
        ("none", []),
    ],
)
def test_times_that_were_missed(catch_up: Any, found: list[str]) -> None:
    run = run_of(
        at("2026-06-01 03:00"),
        Queue("jobs"),
        Schedule("nightly", to="jobs", cron="30 2 * * *", tz="Europe/Berlin", catch_up=catch_up),
    )
    run.set_wall(at("2026-06-04 12:00"))
    assert run.sent() == found
    run.pass_s(86_400, step=60)
    assert run.sent() == [*found, "06-05 02:30:00 CEST"]


@pytest.mark.parametrize("most", [5, 6])
def test_the_limit_of_missed_times(most: int) -> None:
    run = run_of(
        at("2026-06-01 03:00"),
        Queue("jobs"),
        Schedule("often", to="jobs", cron="* * * * *", tz="Europe/Berlin", catch_up="all"),
        limits=Limits(schedule_catch_up_max=most),
    )
    run.set_wall(at("2026-06-01 03:06"))
    assert [each[6:14] for each in run.sent()] == [f"03:0{n}:00" for n in range(7 - most, 7)]


def test_a_destination_that_takes_no_message_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = run_of(at("2026-06-01 02:00"), NIGHTLY, Queue("full", length_max=1))
    run.host.space().declare(Schedule("other", to="full", every_s=60, catch_up="all"))
    run.pass_s(3600)
    said = [each for each in caplog.messages if "nightly" in each]
    assert said == [
        "schedule 'nightly': no message was sent to 'jobs': there is no such node; trying again"
    ]
    stats = run.host.space().find("nightly").kind_stats()
    assert stats.error == "there is no such node"  # type: ignore[attr-defined]
    assert len(run.sent("full")) == 1
    run.host.space().declare(Queue("jobs"))
    run.pass_s(10)
    assert run.sent() == ["06-01 02:30:00 CEST"]
    assert run.host.space().find("nightly").kind_stats().error is None  # type: ignore[attr-defined]
    trio.run(run.host.space().find("full").purge)
    run.pass_s(10)
    # The second of the missed times takes the only place.
    assert run.sent("full") == ["06-01 02:02:00 CEST"]


def test_a_deleted_schedule_sends_nothing() -> None:
    run = run_of(at("2026-06-01 02:00"), Queue("jobs"), NIGHTLY)
    run.host.space().delete("nightly")
    run.pass_s(86_400, step=60)
    assert run.sent() == []


def test_other_times_count_from_the_change() -> None:
    run = run_of(at("2026-06-01 02:00"), Queue("jobs"), NIGHTLY)
    run.host.space().update(Schedule("nightly", to="jobs", every_s=300))
    run.pass_s(301)
    assert len(run.sent()) == 1
    run.host.space().update(Schedule("nightly", to="jobs", every_s=300, payload="new"))
    run.pass_s(300)
    assert len(run.sent()) == 2


# --- with a store ----------------------------------------------------------------------------


@asynccontextmanager
async def kept(store: MemoryStore, clocks: Clocks, *declared: Any) -> AsyncIterator[Run]:
    host = BrokerHost(clock=clocks, journal=Journal(store))
    await host.restore()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        for each in declared:
            host.space().declare(each)
        await host.wait_kept()
        yield Run(host, clocks)
        nursery.cancel_scope.cancel()
    await host.close()


@pytest.mark.parametrize("back", [0, 3600, 86_400 * 3])
async def test_a_restart_sends_nothing_twice(back: float) -> None:
    store = MemoryStore()
    clocks = Clocks(at("2026-06-01 02:00"))
    async with kept(store, clocks, Queue("jobs"), NIGHTLY) as run:
        run.pass_s(3600)
        await run.host.wait_kept()
        assert run.host.space().get("jobs").stats().available == 1
    clocks.wall_s -= back
    # Declared again, as an application does; and restored alone.
    for declared in ((NIGHTLY,), ()):
        async with kept(store, clocks, *declared) as run:
            run.pass_s(3600)
            await run.host.wait_kept()
            assert run.host.space().get("jobs").stats().available == 1
            (payload,) = await run.host.space().find("jobs").peek(5)  # type: ignore[attr-defined]
            assert Message.decode(payload).durable


async def test_times_missed_between_two_runs_are_caught_up() -> None:
    store = MemoryStore()
    clocks = Clocks(at("2026-06-01 02:00"))
    every = Schedule("tick", to="ticks", every_s=600, catch_up="all")
    async with kept(store, clocks, Queue("jobs"), Queue("ticks"), NIGHTLY, every):
        pass
    clocks.wall_s += 2 * 86_400
    clocks.monotonic_s = 5.0
    async with kept(store, clocks) as run:
        run.pass_s(1)
        await run.host.wait_kept()
        assert run.host.space().get("jobs").stats().available == 1
        assert run.host.space().get("ticks").stats().available == 100
        run.pass_s(600)
        await run.host.wait_kept()
        assert run.host.space().get("ticks").stats().available == 101


async def test_an_interval_waits_once_if_the_clock_was_put_back() -> None:
    store = MemoryStore()
    clocks = Clocks(at("2026-06-01 02:00"))
    every = Schedule("tick", to="ticks", every_s=600)
    async with kept(store, clocks, Queue("ticks"), every) as run:
        run.pass_s(700)
        await run.host.wait_kept()
    clocks.wall_s -= 86_400
    async with kept(store, clocks) as run:
        run.pass_s(599)
        await run.host.wait_kept()
        assert run.host.space().get("ticks").stats().available == 1
        run.pass_s(1)
        await run.host.wait_kept()
        assert run.host.space().get("ticks").stats().available == 2


async def test_message_and_progress_are_stored_together() -> None:
    """A copy of the store after any commit has both or neither."""
    clocks = Clocks(at("2026-06-01 02:00"))
    store = Photographed()
    async with kept(store, clocks, Queue("jobs"), NIGHTLY) as run:
        run.pass_s(3600)
        await run.host.wait_kept()
    assert len(store.copies) >= 2
    for copy in store.copies:
        async with kept(copy, Clocks(at("2026-06-01 04:00")), Queue("jobs"), NIGHTLY) as run:
            run.pass_s(11)
            await run.host.wait_kept()
            available = run.host.space().get("jobs").stats().available
            # Before the schedule was stored it begins at 04:00.
            assert available == (1 if copy is not store.copies[0] else available)


# --- declaring, rights, operators ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to": ""}, "to is the address of another node"),
        ({"to": "s", "every_s": 5}, "to is the address of another node"),
        ({"to": "q"}, "either cron or every_s"),
        ({"to": "q", "cron": "* * * * *", "every_s": 5}, "either cron or every_s"),
        (
            {"to": "q", "cron": "61 * * * *"},
            "is no timetable such as '30 2 [*] [*] [*]': Bad minute",
        ),
        ({"to": "q", "cron": "*/5 * * * * *"}, "is no timetable .*: it has five fields"),
        ({"to": "q", "cron": "* * * * *", "tz": "Mars/Base"}, "there is no time zone 'Mars/Base'"),
        ({"to": "q", "cron": "* * * * *", "tz": "../etc/x"}, "there is no time zone"),
        ({"to": "q", "every_s": 0}, "every_s is at least 0.001"),
        ({"to": "q", "every_s": 5, "catch_up": "two"}, "catch_up is one, none or all"),
        ({"to": "q", "every_s": 5, "payload": {"a": [object()]}}, "payload is made of texts"),
        ({"to": "q", "every_s": 5, "payload": 2**64}, "more than 64 bits"),
    ],
)
def test_a_wrong_declaration_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Schedule("s", **options)


def test_a_payload_may_be_deep_but_not_too_deep() -> None:
    deep: Any = "x"
    for _ in range(16):
        deep = [deep]
    Schedule("s", to="q", every_s=5, payload=deep)
    with pytest.raises(ValueError, match="at most 16 deep"):
        Schedule("s", to="q", every_s=5, payload=[deep])


@pytest.mark.parametrize(("every_s", "fits"), [(2.0, True), (1.9, False)])
def test_the_shortest_interval_is_limited(every_s: float, fits: bool) -> None:
    world = World(limits=Limits(schedule_every_min_s=2))
    space = world.host.space()
    if fits:
        space.declare(Schedule("s", to="q", every_s=every_s))
        with pytest.raises(AmqpError, match="every_s is at least 2, not 1"):
            space.update(Schedule("s", to="q", every_s=1))
    else:
        with pytest.raises(AmqpError, match=r"every_s is at least 2, not 1\.9"):
            space.declare(Schedule("s", to="q", every_s=every_s))


def test_the_payload_fits_into_a_message() -> None:
    world = World(limits=Limits(message_size_max=1000))
    world.host.space().declare(Schedule("s", to="q", every_s=5, payload="x" * 900))
    with pytest.raises(AmqpError, match="more than message_size_max"):
        world.host.space().declare(Schedule("t", to="q", every_s=5, payload="x" * 1000))


def test_schedules_in_files_and_on_the_command_line() -> None:
    document = {
        "schedules": {
            "nightly": {"to": "jobs", "cron": "30 2 * * *", "tz": "Europe/Berlin", "payload": "go"},
            "tick": {"to": "jobs", "every_s": 5, "payload": {"kind": "tick", "n": [1, 2.5, None]}},
        }
    }
    assert declarations_of(document) == {
        "": [
            NIGHTLY,
            Schedule("tick", to="jobs", every_s=5, payload={"kind": "tick", "n": [1, 2.5, None]}),
        ]
    }
    assert declared_by("schedule:tick?to=jobs&every_s=5&payload=x") == Schedule(
        "tick", to="jobs", every_s=5, payload="x"
    )
    with pytest.raises(AmqpError, match="missing required field `to`"):
        declared_by("schedule:tick?every_s=5")


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ValueError, match=r"pip install 'amqp-rt\[cron\]'"):
        Schedule("s", to="q", cron="* * * * *")
    Schedule("s", to="q", every_s=5)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("$management", "is the broker's own"),
        ("/exchanges/amq.fanout", "is the address of an exchange"),
        ("log/partitions/0", "is a partition of 'log'"),
        ("alias", "an alias of 'jobs': give the name of the node"),
    ],
)
def test_it_sends_to_nodes_only(to: str, why: str) -> None:
    world = World(Queue("jobs", aliases=("alias",)), Log("log"))
    with pytest.raises(AmqpError, match=why):
        world.host.space().declare(Schedule("s", to=to, every_s=5))
    assert not world.host.space().has("s")


def test_peers_neither_send_nor_receive() -> None:
    world = World(Queue("jobs"), NIGHTLY)
    client = world.client()
    for link in (client.sender("nightly"), client.receiver("nightly")):
        world.pump()
        assert not link.link.attached
    stats = world.stats("nightly")
    assert (stats.kind, stats.available, stats.consumers, stats.producers) == ("schedule", 0, 0, 0)


def test_whoever_declares_it_needs_the_right_to_send() -> None:
    passage = Passage("nightly", "jobs", Rights.MANAGE, Rights.SEND)
    assert passages_of(NIGHTLY, None, lambda _: True) == [passage]
    assert passages_of(NIGHTLY, NIGHTLY, lambda _: True) == []
    other = Schedule("nightly", to="jobs", cron="30 2 * * *", tz="Europe/Berlin", payload="stop")
    assert passages_of(other, NIGHTLY, lambda _: True) == [passage]


class Job(Struct):
    what: str


async def test_a_schedule_declared_by_a_peer(autojump_clock: trio.testing.MockClock) -> None:
    """With its rights, its rows, and a handler that gets the payload."""
    got: list[tuple[str, float]] = []

    @node("jobs")
    async def work(job: Job) -> None:
        got.append((job.what, trio.current_time()))

    rules = [
        Rule("own/*", Rights.MANAGE, users=("eve", "ada")),
        Rule("jobs", Rights.SEND | Rights.LISTEN, users=("ada",)),
    ]
    async with Broker(
        access=Access(rules), users={"eve": "e", "ada": "a"}, plain_in_clear=True
    ) as broker:
        await broker.declare(Queue("jobs"))
        await broker.listen("memory://b")
        async with Container("c", nodes=[work], network=broker.container.network) as container:
            kind = "amqp_rt.schedule"
            options = {"to": "jobs", "every_s": 60, "payload": {"what": "sweep"}}
            async with (
                container.connect("memory://b", auth=Plain("eve", "e")) as peer,
                peer.management() as management,
            ):
                with pytest.raises(AmqpError, match="would go to 'jobs'"):
                    await management.request("CREATE", options, type=kind, name="own/tick")
            async with (
                container.connect("memory://b", auth=Plain("ada", "a")) as peer,
                peer.management() as management,
            ):
                await peer.serve(work)
                began = trio.current_time()
                await management.request("CREATE", options, type=kind, name="own/tick")
                await trio.sleep(150)
                row = await management.read(kind, "own/tick")
                with pytest.raises(LinkRefused):
                    async with peer.sender("own/tick"):
                        pass
        assert [(what, round(when - began)) for what, when in got] == [
            ("sweep", 60),
            ("sweep", 120),
        ]
        assert row["sent"] == 2
        assert row["every_s"] == 60
        stats = broker.schedule_stats("own/tick")
        assert stats.next_at is not None
        assert stats.last_at == pytest.approx(stats.next_at - 60)


def test_timetables_at_their_edges() -> None:
    cron = Cron("*/10 * * * *")
    noon = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
    assert cron.after(noon) == noon + 600
    assert cron.after(noon - 0.001) == noon
    assert cron.latest(noon) == noon
    assert cron.latest(noon - 0.001) == noon - 600
    assert cron.latest(noon + 599.9) == noon


def test_the_latest_time_in_the_hour_that_occurs_twice() -> None:
    cron = Cron("59 1,2,3 * * *", "Europe/Berlin")
    day = datetime(2026, 10, 25, tzinfo=UTC).timestamp()
    times = [day - 60, day + 3_540, day + 10_740]
    assert [cron.after(each - 1) for each in times] == times
    for due in times:
        assert [cron.latest(due + late) for late in (0, 1, 61, 3_500)] == [due] * 4
    assert Cron("0 0 1 1 *").latest(day) < day


@pytest.mark.slow
def test_a_schedule_survives_kill_9(tmp_path: Path) -> None:
    options = (
        *("--store", f"sqlite:{tmp_path}/broker.db", "--node", "queue:jobs"),
        *("--node", "schedule:tick?to=jobs&every_s=1&payload=x&catch_up=all"),
    )
    seen: list[str] = []
    for _ in range(3):
        served = Served("--anonymous", *options)
        seen += ok("receive", "jobs", "--count", "2", "--json", url=served.url).splitlines()
        served.process.kill()
        served.stop()
    ids = [json.loads(line)["properties"]["message_id"] for line in seen]
    assert len({*ids}) == len(ids) == 6, ids
