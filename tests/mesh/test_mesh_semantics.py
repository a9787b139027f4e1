"""Rows of the design's tables of semantics over several nodes: who gets a message, in which order, and when it comes back.

All in virtual time, with clients of A, from which other nodes are reached over B.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from meshed import Members, client, line, members, until
from trio.testing import MockClock

from amqp_rt import Message, Release
from amqp_rt.broker import Queue
from amqp_rt.errors import DeliveryNotAccepted, LinkDetached
from amqp_rt.limits import MIB
from amqp_rt.mesh import MeshRule
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import Released

pytestmark = [pytest.mark.req("P2"), pytest.mark.req("P3")]


async def star(made: Members, *names: str, **options: Any) -> None:
    """Start A, and B behind it, with which all others are connected."""
    await made.start("A", **options)
    await made.start("B", "A", **options)
    for name in names:
        await made.start(name, "B", **options)


def at(
    name: str, got: list[tuple[str, str]], seconds: float = 0
) -> Callable[[str], Awaitable[None]]:
    async def take(text: str) -> None:
        got.append((name, text))
        await trio.sleep(seconds)

    return take


# --- who gets a message ----------------------------------------------------------------------------


@pytest.mark.parametrize("resend", [0, 1, 2])
async def test_resend_is_a_number_of_further_destinations(
    resend: int, autojump_clock: MockClock
) -> None:
    """All of three release it: so many see it, each once, and then the sender learns of the release."""
    async with members(MemoryNetwork()) as made:
        await star(made, "C", "D", "E", rules=[MeshRule("jobs", resend=resend)])
        got: list[str] = []

        def releasing(name: str) -> Callable[[str], Awaitable[None]]:
            async def release(text: str) -> None:
                got.append(name)
                raise Release

            return release

        for name in "CDE":
            made.boxes[name].node("jobs")(releasing(name))
        await until(lambda: len(made.meshes["A"].instances("jobs")) == 3)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("jobs") as out:
            await trio.sleep(1)
            with pytest.raises(DeliveryNotAccepted) as refused:
                await out.send("x")
            assert type(refused.value.info["outcome"]) is Released
        assert len(got) == len(set(got)) == resend + 1


async def test_a_released_message_is_handled_by_another_destination(
    autojump_clock: MockClock,
) -> None:
    async with members(MemoryNetwork()) as made:
        await star(made, "C", "D", rules=[MeshRule("jobs", resend=1)])
        got: list[tuple[str, str]] = []

        async def release(text: str) -> None:
            raise Release

        made.boxes["C"].node("jobs")(release)
        made.boxes["D"].node("jobs")(at("D", got))
        await until(lambda: len(made.meshes["A"].instances("jobs")) == 2)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("jobs") as out:
            for number in range(20):
                await out.send(f"{number}")
        assert got == [("D", f"{number}") for number in range(20)]


async def test_the_own_zone_gets_messages_until_its_slots_are_busy(
    autojump_clock: MockClock,
) -> None:
    async with members(MemoryNetwork()) as made:
        await made.start("A", zone="z1")
        await made.start("B", "A", zone="z2")
        got: list[tuple[str, str]] = []
        for name, zone in (("C", "z1"), ("D", "z2")):
            await made.start(name, "B", zone=zone)
            made.boxes[name].node("work", slots=2, prefetch=8)(at(name, got, 0.1))
        await until(lambda: len(made.meshes["A"].instances("work")) == 2)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("work") as out:
            for _ in range(10):
                await out.send("one by one")
            assert {name for name, _ in got} == {"C"}
            got.clear()
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(out.send, "all at once")
        counts = [[name for name, _ in got].count(each) for each in "CD"]
        assert sum(counts) == 40
        assert min(counts) >= 10, counts


# --- order -----------------------------------------------------------------------------------------


async def test_ordered_messages_stay_in_order_when_their_destination_leaves(
    autojump_clock: MockClock,
) -> None:
    async with members(MemoryNetwork()) as made:
        await star(made, "C", "D", rules=[MeshRule("row", ordered=True)])
        got: list[tuple[str, str]] = []
        for name in "CD":
            made.boxes[name].node("row", slots=1)(at(name, got, 0.02))
        await until(lambda: len(made.meshes["A"].instances("row")) == 2)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("row") as out:
            receipts = []
            for number in range(200):
                receipts.append(out.send_nowait(f"{number}"))
                await trio.sleep(0.01)
                if number == 50:
                    # The node that is used now.
                    first = got[-1][0]
                    made.boxes[first].stop()
            for each in receipts:
                await each.accepted()
        assert [int(text) for _, text in got] == list(range(200))
        # One after the other.
        assert [name for name, _ in got] == sorted([name for name, _ in got], reverse=first == "D")
        assert {name for name, _ in got} == {"C", "D"}


async def test_copies_keep_the_order_of_their_sender_when_the_tree_changes(
    autojump_clock: MockClock,
) -> None:
    async with members(MemoryNetwork()) as made:
        await star(made, "C", "D", rules=[MeshRule("news", "multicast")])
        got: list[tuple[str, str]] = []
        for name in "BC":
            made.boxes[name].node("news", slots=1)(at(name, got, 0.001))
        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("news") as out:
            for number in range(300):
                await out.send(f"{number}")
                if number == 100:
                    made.boxes["D"].node("news", slots=1)(at("D", got))
                if number == 200:
                    made.boxes["C"].stop()
        for name, least in (("B", 300), ("C", 200), ("D", 100)):
            numbers = [int(text) for each, text in got if each == name]
            assert numbers == sorted(set(numbers))
            assert len(numbers) >= least - 30


# --- settlement, credit and drain ------------------------------------------------------------------


@pytest.mark.parametrize("route", ["message", "link"])
async def test_settling_second_leaves_nothing_unsettled(
    route: Any, autojump_clock: MockClock
) -> None:
    """The link of a client to a queue settles second as the queue does; one to nodes as far as these do."""
    network = MemoryNetwork()
    rules = [MeshRule("jobs", route=route)]
    async with members(network) as made:
        await made.start("A", rules=rules)
        await made.start("B", "A", rules=rules)
        await made.start("C", "B", rules=rules, broker={"volatile": True})
        await made.brokers["C"].declare(Queue("jobs"))
        await made.meshes["A"].reachable("jobs")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.sender("jobs", rcv_settle_mode=1) as out:
                assert out.link.rcv_settle_mode == (1 if route == "link" else 0)
                for number in range(10):
                    await out.send(f"{number}")
            async with peer.receiver("jobs", credit=4) as inbox:
                for number in range(10):
                    delivery = await inbox.receive()
                    assert delivery.body == f"{number}"
                    delivery.accept()
            await trio.sleep(15)
            assert [made.meshes[each].stats().stuck for each in "ABC"] == [0, 0, 0]
            left = made.brokers["C"].stats("jobs")
            assert (left.available, left.acquired) == (0, 0)


async def test_a_drain_over_two_hops_brings_what_there_is_and_ends(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A")
        await made.start("C", "B", broker={"volatile": True})
        await made.brokers["C"].declare(Queue("jobs"))
        await made.meshes["A"].reachable("jobs")
        for number in range(3):
            made.brokers["C"].publish("jobs", Message(f"{number}").encode())
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.receiver("jobs", credit=10) as inbox,
        ):
            with trio.fail_after(1):
                await inbox.drain()
            assert inbox.credit == 0
            for number in range(3):
                delivery = await inbox.receive(within=0)
                assert delivery.body == f"{number}"
                delivery.accept()
            # What comes later waits for credit.
            made.brokers["C"].publish("jobs", Message("later").encode())
            await trio.sleep(5)
            assert made.brokers["C"].stats("jobs").available == 1
            inbox.start()
            assert (await inbox.receive(within=1)).body == "later"


async def test_the_anonymous_terminus_gives_a_message_without_credit_back_after_a_second(
    autojump_clock: MockClock,
) -> None:
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        go = trio.Event()
        got: list[str] = []

        async def busy(text: str) -> None:
            got.append(text)
            await go.wait()

        made.boxes["C"].node("busy", slots=1, prefetch=1)(busy)
        made.boxes["C"].node("idle")(at("C", []))
        for address in ("busy", "idle"):
            await made.meshes["A"].reachable(address)
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender() as out,
            trio.open_nursery() as nursery,
        ):
            for number in range(2):
                nursery.start_soon(out.send, Message(f"{number}", to="busy"))
                await trio.sleep(0.1)
            since = trio.current_time()
            with pytest.raises(DeliveryNotAccepted) as refused:
                await out.send(Message("2", to="busy"))
            assert type(refused.value.info["outcome"]) is Released
            assert 0.9 < trio.current_time() - since < 1.2
            # Other addresses of the link have not waited.
            await out.send(Message("x", to="idle"))
            go.set()
        assert got == ["0", "1"]


# --- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaving", ["B", "C"])
async def test_pinned_links_are_detached_when_a_node_of_their_path_has_drained(
    leaving: str, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A")
        await made.start("C", "B", broker={"volatile": True})
        await made.brokers["C"].declare(Queue("jobs"))
        await made.meshes["A"].reachable("jobs")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.receiver("jobs", credit=5) as inbox:
                made.brokers["C"].publish("jobs", Message("1").encode())
                (await inbox.receive()).accept()
                since = trio.current_time()
                made.boxes[leaving].stop()
                # While the node drains, the link works.
                await trio.sleep(1)
                if leaving == "B":
                    made.brokers["C"].publish("jobs", Message("2").encode())
                    (await inbox.receive()).accept()
                with pytest.raises(LinkDetached) as detached:
                    await inbox.receive()
                assert detached.value.condition == "amqp:link:detach-forced"
                assert 1.5 < trio.current_time() - since < 2.5
            assert peer.state == "open"


async def test_a_sender_that_is_lost_within_a_message_leaves_no_part_of_it(
    autojump_clock: MockClock,
) -> None:
    async with line("A", "B", "C", network=MemoryNetwork()) as made:
        sizes: list[int] = []

        async def take(body: bytes) -> None:
            sizes.append(len(body))

        made.boxes["C"].node("big")(take)
        await made.meshes["A"].reachable("big")
        with trio.CancelScope() as lost:
            async with (
                client(made.urls["A"], "lost", network=made.network) as peer,
                peer.sender("big") as out,
                out.stream() as body,
            ):
                await body.write(bytes(MIB // 2))
                await trio.sleep(1)
                engine: Any = peer.engine
                engine.close()
                lost.cancel()
                await trio.sleep(1)
        async with client(made.urls["A"], network=made.network) as peer, peer.sender("big") as out:
            await out.send(bytes(MIB))
            assert sizes == [MIB]
        await until(lambda: not made.meshes["A"].stats().stuck)
        await trio.sleep(70)
        assert [made.meshes[each].stats().hops for each in "ABC"] == [0, 0, 0]
