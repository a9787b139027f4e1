"""What happens to links and messages of clients when destinations come and go, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from meshed import client, line, members, until
from trio.testing import MockClock

from amqp_rt import Message, Plain
from amqp_rt.errors import DeliveryNotAccepted, LinkDetached, LinkRefused
from amqp_rt.limits import KIB, MIB
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.records import Offer
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3")


async def test_a_sender_may_wait_for_the_first_destination(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("jobs/*", absent="wait")]
    async with (
        line("A", "B", network=network, rules=rules) as made,
        client(made.urls["A"], network=network) as peer,
        peer.sender("jobs/1") as out,
        trio.open_nursery() as nursery,
    ):
        done = []

        async def job(text: str) -> None:
            done.append(text)

        nursery.start_soon(out.send, "first")
        await trio.sleep(30)
        assert not done
        made.boxes["B"].node("jobs/1")(job)
        await until(lambda: done == ["first"])


async def test_what_had_left_is_modified_when_its_destination_ends(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:

        async def job(text: str) -> None:
            await trio.sleep_forever()

        made.boxes["C"].node("jobs", slots=5)(job)
        await made.meshes["A"].reachable("jobs")
        async with client(made.urls["A"], network=network) as peer, peer.sender("jobs") as out:
            results: list[str] = []

            async def send(text: str) -> None:
                try:
                    await out.send(text)
                except DeliveryNotAccepted as error:
                    results.append(str(error))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, "one")
                await trio.sleep(0.1)
                since = trio.current_time()
                made.kill["C"]()
                await until(lambda: results)
                # It had left, and may have been processed: modified.
                assert trio.current_time() - since < 1
                assert "as a failed attempt" in results[0]


async def test_an_ended_client_takes_its_links_with_it(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:

        @made.boxes["C"].source("ticks")
        async def ticks() -> AsyncIterator[str]:
            while True:
                yield "tick"
                await trio.sleep(1)

        await made.meshes["A"].reachable("ticks")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.receiver("ticks", credit=1) as source,
        ):
            await source.receive()
            assert made.meshes["B"]._host.hops == 1
            assert made.meshes["C"]._host.placed == 1
        await until(lambda: not made.meshes["B"]._host.hops and not made.meshes["C"]._host.placed)


@pytest.mark.parametrize("killed", ["B", "C"])
async def test_a_pinned_link_ends_when_a_node_of_its_path_ends(
    killed: str, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:

        @made.boxes["C"].source("ticks")
        async def ticks() -> AsyncIterator[str]:
            yield "tick"
            await trio.sleep_forever()

        await made.meshes["A"].reachable("ticks")
        async with client(made.urls["A"], network=network) as peer:
            source = peer.receiver("ticks", credit=5)
            await source.__aenter__()
            await source.receive()
            made.kill[killed]()
            with pytest.raises(LinkDetached):
                await source.receive()
            assert not made.meshes["A"]._host._ways.neighbours["A"].opened


async def test_link_routes_pass_on_properties_modes_and_filters(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        seen: list[Any] = []

        @made.boxes["C"].source("rows", filters=["apache.org:selector-filter:string"])
        async def rows(link: Any = None) -> AsyncIterator[str]:
            yield "row"
            await trio.sleep_forever()

        await made.meshes["A"].reachable("rows")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.receiver(
                "rows", credit=1, selector="a = 1", snd_settle_mode=1, mode="copy"
            ) as source,
        ):
            delivery = await source.receive()
            assert delivery.settled
            seen.append(source.link.source.filter)
        assert list(seen[0]) == ["apache.org:selector-filter:string"]


async def test_the_anonymous_terminus_leads_to_addresses_of_the_mesh(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        got = []

        async def take(text: str) -> None:
            got.append(text)

        made.boxes["B"].node("one")(take)
        made.boxes["C"].node("two")(take)
        await made.meshes["A"].reachable("one")
        await made.meshes["A"].reachable("two")
        async with client(made.urls["A"], network=network) as peer, peer.sender() as out:
            for number in range(3):
                for address in ("one", "two"):
                    await out.send(Message(f"{address}{number}", to=address))
            # Legs are closed after a minute without messages, and opened again.
            await trio.sleep(120)
            assert not made.meshes["A"]._host._routed
            await out.send(Message("late", to="two"))
        assert sorted(got) == sorted(
            ["late", *(f"{a}{n}" for a in ("one", "two") for n in range(3))]
        )


async def test_large_messages_pass_in_pieces(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        sizes = []

        async def take(body: bytes) -> None:
            sizes.append(len(body))

        made.boxes["C"].node("big")(take)
        await made.meshes["A"].reachable("big")
        async with client(made.urls["A"], network=network) as peer, peer.sender("big") as out:
            for size in (100, 64 * KIB, 65 * KIB, 3 * MIB):
                await out.send(bytes(size))
        assert sizes == [100, 64 * KIB, 65 * KIB, 3 * MIB]


async def test_the_nearest_destination_is_used_with_closest(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("near", "closest")]
    async with line("A", "B", "C", network=network, rules=rules) as made:
        got: list[str] = []
        for name in ("B", "C"):
            made.boxes[name].node("near")(_of(got, name))
        await until(lambda: len(made.meshes["A"].instances("near")) == 2)
        async with client(made.urls["A"], network=network) as peer, peer.sender("near") as out:
            for _ in range(10):
                await out.send("x")
            assert got == ["B"] * 10
            made.boxes["B"].remove("near")
            await until(lambda: len(made.meshes["A"].instances("near")) == 1)
            await out.send("x")
            assert got[10:] == ["C"]


def _of(got: list[str], name: str) -> Any:
    async def take(text: str) -> None:
        got.append(name)

    return take


async def test_balanced_messages_reach_all_destinations_our_own_included(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with line("A", "B", "C", network=network) as made:
        got: list[str] = []
        for name in ("A", "B", "C"):
            made.boxes[name].node("work")(_of(got, name))
        await until(lambda: len(made.meshes["A"].instances("work")) == 3)
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(60):
                nursery.start_soon(out.send, "x")
        assert len(got) == 60
        assert set(got) == {"A", "B", "C"}


async def test_users_have_links_of_their_own_if_a_rule_says_so(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("mine", per_user=True)]
    box = {"users": {"ann": "a", "bob": "b", "B": "b", "A": "a"}, "plain_in_clear": True}
    async with members(network) as made:
        await made.start("A", box_options=box, rules=rules)
        dial = {"auth": Plain("B", "b"), "plain_in_clear": True}
        await made.start("B", "A", rules=rules, dial=dial)
        made.boxes["B"].node("mine")(_of([], "B"))
        await made.meshes["A"].reachable("mine")
        for name, password in (("ann", "a"), ("bob", "b")):
            async with (
                client(
                    made.urls["A"], network=network, auth=Plain(name, password), plain_in_clear=True
                ) as peer,
                peer.sender("mine") as out,
            ):
                await out.send("x")
        assert {user for _, user in made.meshes["A"]._host._routed} == {"ann", "bob"}
        joined = made.meshes["B"]._host.members.values()
        placed = [link for member in joined for link in member.placed._links]
        assert {each.properties["x-opt-mesh-leg"]["user"] for each in placed} == {"ann", "bob"}


async def test_a_refusal_is_that_of_the_destination(autojump_clock: MockClock) -> None:
    """C offers an address for which it has no node any more when the link arrives."""
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", offer={"gone": Offer()})
        await made.meshes["A"].reachable("gone")
        async with client(made.urls["A"], network=network) as peer:
            with pytest.raises(LinkRefused) as refused:
                async with peer.sender("gone"):
                    pass
            assert "'B' has no node 'gone'" in str(refused.value)


async def test_all_destinations_get_a_message_once_with_multicast(
    autojump_clock: MockClock,
) -> None:
    """A – B – C and B – D; all but D serve the address, and D does later, when C leaves."""
    network = MemoryNetwork()
    rules = [MeshRule("news/*", "multicast")]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B"), ("D", "B")):
            await made.start(name, *seeds, rules=rules)
        got: list[str] = []
        for name in ("A", "B", "C"):
            made.boxes[name].node("news/{topic}")(_topic(got, name))
        await until(lambda: len(made.meshes["A"].instances("news/x")) == 3)
        async with client(made.urls["A"], network=network) as peer, peer.sender("news/x") as out:
            await out.send("1")
            assert sorted(got) == ["A", "B", "C"]
            # One copy for each edge: C's passes B, which joins it with two.
            assert made.meshes["B"]._host.hops == 1
            made.boxes["D"].node("news/x")(_topic(got, "D"))
            await until(lambda: "D" in [each.node for each in made.meshes["A"].instances("news/x")])
            await trio.sleep(1)
            got.clear()
            await out.send("2")
            assert got == ["D"], "literal addresses win over patterns"


def _topic(got: list[str], name: str) -> Any:
    async def take(text: str, topic: str = "") -> None:
        got.append(name)

    return take


async def test_a_tree_follows_its_destinations(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast")]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B"), ("D", "B")):
            await made.start(name, *seeds, rules=rules)
        got: list[str] = []
        for name in ("B", "C"):
            made.boxes[name].node("news")(_of(got, name))
        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        async with client(made.urls["A"], network=network) as peer, peer.sender("news") as out:
            sent = 0
            stop = trio.Event()

            async def produce() -> None:
                nonlocal sent
                while not stop.is_set():
                    await out.send("x")
                    sent += 1
                    await trio.sleep(0.001)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(produce)
                await trio.sleep(1)
                made.boxes["D"].node("news")(_of(got, "D"))
                await trio.sleep(1)
                made.boxes["C"].stop()
                await trio.sleep(1)
                stop.set()
            # B was a destination all the time: each message once, whichever tree it took.
            assert got.count("B") == sent > 1_000
            assert 0 < got.count("C") < sent
            assert 0 < got.count("D") < sent
            got.clear()
            await out.send("last")
            assert sorted(got) == ["B", "D"]


async def test_any_client_can_send_to_a_dynamic_address_of_another_member(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with (
        line("A", "B", "C", network=network) as made,
        client(made.urls["A"], network=network) as asker,
        client(made.urls["C"], "other", network=network) as answerer,
    ):
        await until(lambda: len(made.meshes["C"]._engine.paths().costs) == 3)
        async with asker.receiver(dynamic=True, credit=5) as answers:
            assert answers.address.startswith("$mesh/A/")
            texts = []
            async with (
                answerer.sender(answers.address) as linked,
                answerer.sender() as relayed,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(linked.send, "linked")
                nursery.start_soon(relayed.send, Message("relayed", to=answers.address))
                for _ in range(2):
                    delivery = await answers.receive()
                    texts.append(delivery.message.body)
                    delivery.accept()
            assert len(texts) == 2
        with pytest.raises(LinkRefused):
            async with answerer.sender(answers.address):
                pass
