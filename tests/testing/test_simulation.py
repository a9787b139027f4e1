"""Simulation: one seed gives one trace, faults act as named, and errors are found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from markets import market
from worlds import PATIENT, SMALL, URL, serving, trade

from amqp_rt.broker import Queue
from amqp_rt.net.memory import MemoryStream
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.testing.faults import (
    Corrupt,
    Cut,
    Damaged,
    Delay,
    Fails,
    Flap,
    Full,
    HalfClose,
    InjectedFault,
    Jump,
    Kill,
    NetworkPartition,
    OneWay,
    Slow,
    Split,
    Stall,
    draw_faults,
)
from amqp_rt.testing.ledger import Broken, DeliveryLedger
from amqp_rt.testing.simulation import (
    Scenario,
    SimulatedHost,
    Simulation,
    SimulationFailed,
    check_seeds,
    simulate,
)

NOTHING_LOST = [
    [],
    [Split(connection=0, size=1)],
    [Delay(connection=0, seconds=5)],
    [Slow(connection=0, octets_per_s=300)],
    [Slow(connection=0, octets_per_s=300, back=True)],
    [Cut(connection=0, frames=9)],
    [Cut(frames=13)],
    [Cut(connection=0, octets=700), Cut(connection=1, octets=333, back=True)],
    [HalfClose(connection=0, octets=500)],
    [HalfClose(connection=0, octets=300, back=True)],
    [Stall(connection=0, octets=300, seconds=5)],
    [Stall(connection=0, octets=300, seconds=1000, back=True)],
    [NetworkPartition(host="broker", at=1, seconds=20)],
    [NetworkPartition(host="client", at=1, seconds=1000)],
    [OneWay(host="broker", at=1, seconds=20)],
    [OneWay(host="client", to="broker", at=1, seconds=1000)],
    [Flap(host="broker", at=1, seconds=0.1, times=10)],
    [Flap(host="client", at=1, seconds=5, times=3)],
    [Kill(host="broker", at=1.5)],
    [Kill(host="broker", at=1.5, silent=True)],
    [Kill(host="broker", commit=4)],
    [Kill(host="broker", commit=4, kept=True)],
    [Jump(at=1, seconds=86_400), Jump(at=2, seconds=-200_000)],
    [Fails(host="broker", commit=4)],
    [Fails(host="broker", commit=4, kept=True)],
]


async def exchange(net: Simulation) -> None:
    """Ten messages, one after the other, each sent until it has arrived."""
    ledger = DeliveryLedger(duplicates="allowed")
    net.start("broker", serving(net, Queue("work")))
    async with (
        net.connect("client", URL, limits=SMALL, reconnect=PATIENT) as peer,
        peer.sender("work", in_doubt="resend") as out,
    ):
        for _ in range(10):
            body = ledger.body("client", 800)
            await out.send(body, durable=True)
            ledger.was_acknowledged(body)
            await trio.sleep(0.3)
    net.calm()
    left: list[object] = []
    async with net.connect("auditor", URL) as peer, peer.receiver("work") as inbox:
        while (delivery := await inbox.get(within=5)) is not None:
            left.append(delivery.body)
            delivery.accept()
    ledger.check(left)
    assert len(set(left)) == 10


@pytest.mark.slow
@pytest.mark.req("A22", "A23")
@pytest.mark.parametrize("faults", NOTHING_LOST, ids=str)
def test_what_goes_wrong_costs_no_message(faults: list[InjectedFault]) -> None:
    trace = simulate(exchange, seed=1, faults=faults)
    assert not faults or trace.lines != simulate(exchange, seed=1).lines
    assert trace.lines == simulate(exchange, seed=1, faults=faults).lines


@pytest.mark.req("A22", "A23")
def test_a_line_that_is_mute_one_way_still_carries_the_other() -> None:
    heard: dict[str, list[float]] = {"a": [], "b": []}

    async def scenario(net: Simulation) -> None:
        async def listen(name: str) -> None:
            door = net.network.door(name)
            with door.listen(name) as channel:
                stream = await channel.receive()
                await said(stream, name, stream)

        async def said(stream: MemoryStream, name: str, far: MemoryStream) -> None:
            """Say a word each second, and note each one that is heard."""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(note, far, name)
                for _ in range(6):
                    await trio.sleep(1)
                    stream.send(b"x")
                nursery.cancel_scope.cancel()

        async def note(stream: MemoryStream, name: str) -> None:
            while True:
                await stream.wait_readable()
                heard[name] += [trio.current_time()] * len(stream.recv(99))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, "b")
            await trio.sleep(0.1)
            stream = await net.network.door("a").dial("b")
            nursery.start_soon(said, stream, "a", stream)

    simulate(scenario, seed=1, faults=[OneWay(host="a", to="b", at=1.5, seconds=3)])
    # The words of "b" come all the time, those of "a" before 1.5 s and, together, from 4.5 s on.
    assert len([at for at in heard["a"] if at < 4.5]) >= 3
    assert len([at for at in heard["b"] if at < 1.5]) == 1
    assert min(at for at in heard["b"] if at > 1.5) >= 4.5
    assert len(heard["b"]) >= 5


@pytest.mark.req("A22", "A23")
def test_a_full_disk_and_a_torn_page_are_said() -> None:
    refused: list[str] = []

    async def scenario(net: Simulation) -> None:
        ledger = DeliveryLedger()
        net.start("broker", serving(net, Queue("work")))
        async with net.connect("client", URL, limits=SMALL, reconnect=PATIENT) as peer:
            async with peer.sender("work") as out:
                for _ in range(8):
                    body = ledger.body("client")
                    receipt = out.send_nowait(body, durable=True)
                    outcome = await receipt.outcome()
                    if outcome == ACCEPTED:
                        ledger.was_acknowledged(body)
                    else:
                        refused.append(str(outcome))
                        ledger.was_refused(body)
            net.kill("broker")
            await peer.wait_open()
            left = []
            async with peer.receiver("work") as inbox:
                while (delivery := await inbox.get(within=5)) is not None:
                    left.append(delivery.body)
        with pytest.raises(Broken, match="acknowledged and lost"):
            ledger.check(left)
        assert len(net.disk("broker").damaged) == 1
        assert len(left) == 8 - 2 - 1

    simulate(
        scenario,
        seed=3,
        faults=[Full(host="broker", commit=3, count=4), Damaged(host="broker")],
    )
    assert len(refused) == 2
    assert "resource-limit-exceeded" in refused[0]


@pytest.mark.req("A23")
def test_a_flipped_octet_arrives() -> None:
    heard: list[bytes] = []

    async def scenario(net: Simulation) -> None:
        ear = net.network.door("listener").listen("ear")
        ours = await net.network.door("mouth").dial("ear")
        theirs = await ear.receive()
        await ours.send_all(bytes(10))
        heard.append(await theirs.receive_some())

    simulate(scenario, seed=1, faults=[Corrupt(connection=0, octet=3, mask=0x81)])
    assert heard == [b"\0\0\0\x81\0\0\0\0\0\0"]


@pytest.mark.req("A22", "A23")
def test_what_is_said_by_a_dead_process_is_not_heard() -> None:
    heard: list[bytes] = []

    async def scenario(net: Simulation) -> None:
        async def talk(host: SimulatedHost) -> None:
            ours = await host.network.dial("ear")
            net.kill("mouth")
            try:
                await ours.send_all(b"too late")
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)

        ear = net.network.door("listener").listen("ear")
        net.start("mouth", talk)
        stream = await ear.receive()
        heard.append(await stream.receive_some())

    simulate(scenario, seed=1)
    assert heard == [b""]


def test_who_hangs_is_told_apart() -> None:
    async def scenario(net: Simulation) -> None:
        await trio.sleep_forever()

    with pytest.raises(AssertionError, match="not ended after 50 virtual seconds"):
        simulate(scenario, seed=1, within=50)


@pytest.mark.req("A22", "A23")
def test_a_seed_that_fails_says_how_to_see_it_again() -> None:
    """Of many faults the one is left that does it."""

    async def scenario(net: Simulation) -> None:
        net.start("broker", serving(net, Queue("work")))
        async with net.connect("client", URL, reconnect=None) as peer, peer.sender("work") as out:
            for number in range(5):
                await out.send(number)
                await trio.sleep(0.1)

    def draw(luck: Any) -> list[InjectedFault]:
        return [
            Delay(connection=0, seconds=0.1),
            Jump(at=0.1, seconds=5),
            Cut(connection=0, frames=14),
            Split(connection=0, size=64),
        ]

    with pytest.raises(SimulationFailed) as failed:
        check_seeds(scenario, [5], draw=draw)
    assert failed.value.seed == 5
    assert failed.value.faults == [Cut(connection=0, frames=14)]
    text = str(failed.value)
    assert text.startswith("seed 5: ConnectionLost: ")
    assert "Cut(connection=0, frames=14" in text
    assert "is cut" in text


@pytest.mark.slow
@pytest.mark.req("A22")
def test_a_trace_does_not_depend_on_the_process() -> None:
    """Nor on how it hashes strings, nor on where its objects lie."""
    program = (
        "import random, zlib; from worlds import trade;"
        "from amqp_rt.testing.simulation import simulate;"
        "from amqp_rt.testing.faults import Cut, Kill;"
        "trace = simulate(trade, seed=11, faults=[Cut(frames=90), Kill(host='broker', commit=20)]);"
        "print(len(trace.lines), zlib.crc32(str(trace).encode()))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hashing, "PYTHONPATH": str(Path(__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashing in ("1", "2", "77")
    }
    assert len(seen) == 1


# --- the ledger ------------------------------------------------------------------------------------


@pytest.mark.req("A23")
@pytest.mark.parametrize(
    ("complaint", "duplicates", "story"),
    [
        ("acknowledged and lost: a 0", "in doubt", "a0"),
        ("was settled, and was delivered again", "in doubt", "a0 d0 s0 d0"),
        ("for no reason", "never", "d0 d0"),
        ("a 0 came after number 1", "in doubt", "d1 d0"),
        ("is there twice", "in doubt", "l0 l0"),
        ("was settled, and is there", "in doubt", "d0 s0 l0"),
        ("a 0 is behind number 1", "in doubt", "l1 l0"),
        ("was refused, and was delivered", "allowed", "r0 d0"),
        (None, "in doubt", "a0 d0 d0 y0"),
        (None, "in doubt", "a0 d0 d0 l0"),
        (None, "never", "a0 d0 g0 d0 y0"),
        (None, "allowed", "a0 d0 s0 y0 d0 l0 l0"),
        (None, "in doubt", "a0 x0"),
    ],
)
def test_a_ledger_complains(complaint: str | None, duplicates: Any, story: str) -> None:
    ledger = DeliveryLedger("q", duplicates=duplicates)
    bodies = [ledger.body("a"), ledger.body("a", 100)]
    left: list[object] = []

    def tell() -> None:
        for what, number in story.split():
            {
                "a": ledger.was_acknowledged,
                "r": ledger.was_refused,
                "d": ledger.was_delivered,
                "y": ledger.was_accepted,
                "s": ledger.was_settled,
                "g": ledger.was_returned,
                "x": ledger.was_damaged,
                "l": left.append,
            }[what](bodies[int(number)])
        ledger.check(left)

    if complaint is None:
        tell()
    else:
        with pytest.raises(Broken, match=complaint):
            tell()


def test_a_ledger_knows_its_own() -> None:
    ledger = DeliveryLedger()
    body = ledger.body("a", 50)
    for other in (body[:-1], body.replace(b"a 0", b"a 1"), None, "text"):
        with pytest.raises(Broken, match="was never sent"):
            ledger.was_delivered(other)


# --- everything at once ----------------------------------------------------------------------------


@pytest.fixture
def seeds_of(brief_run: bool, long_run: bool) -> Callable[[int, int], range]:
    """Return a function: seeds of a quick run and of a long one → those of this run."""

    def choose(quick: int, long: int) -> range:
        return range(long if long_run else quick // 4 if brief_run else quick)

    return choose


@pytest.mark.slow
@pytest.mark.req("A22", "A23", "B7", "B13", "R1")
def test_seeds(seeds_of: Callable[[int, int], range]) -> None:
    """Queues, transactions, logs and links that are resumed."""
    check_seeds(trade, seeds_of(45, 10_000))


@pytest.mark.slow
@pytest.mark.req("A22", "A23", "B7", "B27", "R1", "M38")
def test_seeds_of_a_market(seeds_of: Callable[[int, int], range]) -> None:
    """Topics, times to live, priorities, and transactions over nodes of every kind."""
    check_seeds(market, seeds_of(30, 2_000))


@pytest.mark.slow
@pytest.mark.req("A23", "B7")
@pytest.mark.parametrize(
    ("scenario", "seed", "faults"),
    [
        # Messages that may have been kept when the store failed were reported as rejected.
        (trade, 449, [Fails(host="broker", commit=12), Fails(host="broker", commit=13, kept=True)]),
        # A subscription ended in memory as the store was given up, and not on the disk.
        (market, 1, [Fails(host="broker", commit=30), Fails(host="broker", commit=31)]),
    ],
)
def test_what_failed_once(scenario: Scenario, seed: int, faults: list[InjectedFault]) -> None:
    """What long runs have found stays found."""
    simulate(scenario, seed=seed, faults=faults)


@pytest.mark.slow
@pytest.mark.req("A22", "A23")
def test_seeds_with_a_neighbour_who_says_anything(
    seeds_of: Callable[[int, int], range],
) -> None:
    async def noisy(net: Simulation) -> None:
        await trade(net, noise=True)

    def draw(luck: Any) -> list[InjectedFault]:
        return [
            each
            for each in draw_faults(luck, connections=1, corrupt=True)
            if not isinstance(each, Cut) or each.connection is not None
        ] + [
            Corrupt(
                connection=0,
                octet=int(2 ** luck.uniform(0, 13)),
                mask=luck.randint(1, 255),
                back=luck.random() < 0.5,
            )
        ]

    check_seeds(noisy, seeds_of(30, 1_000), draw=draw)
