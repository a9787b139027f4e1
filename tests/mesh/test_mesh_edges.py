"""Edges: what their clients and nodes see over edge – interior – interior – edge, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from meshed import Members, client, line, members, until
from trio.testing import MockClock

from amqp_rt import Message, Peer, Receiver, Reject
from amqp_rt.errors import DeliveryNotAccepted, DeliveryRejected, LinkRefused
from amqp_rt.mesh import MeshRule
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.testing.network import SimulatedNetwork, SimulationTrace

pytestmark = pytest.mark.req("P4")


@asynccontextmanager
async def four(**options: Any) -> AsyncIterator[Members]:
    """Run two interior nodes A and B, and two edges: E, which prefers A, and F, which prefers B."""
    async with members(MemoryNetwork()) as made:
        await made.start("A", **options)
        await made.start("B", "A", **options)
        await made.start("E", "A", "B", role="edge", **options)
        await made.start("F", "B", "A", role="edge", **options)
        for name in "EF":
            await made.meshes[name].wait_ready()
        yield made


def uplinks(made: Members) -> list[str | None]:
    return [made.meshes[name]._engine.uplink for name in "EF"]


@pytest.mark.req("P1", "P7")
async def test_calls_pass_from_edge_to_edge(autojump_clock: MockClock) -> None:
    async with four() as made:
        assert uplinks(made) == ["A", "B"]

        @made.boxes["F"].rpc("price")
        async def price(sku: str) -> str:
            return f"{sku} costs 1"

        @made.boxes["F"].rpc("rows")
        async def rows(count: int) -> AsyncIterator[int]:
            for number in range(count):
                yield number

        with trio.fail_after(1):
            for name in ("E", "A", "B"):
                await made.meshes[name].reachable("price")
                # Code of the container, and its clients.
                assert await made.meshes[name].call("price", name, reply=str) == f"{name} costs 1"
        for name in ("E", "A", "B", "F"):
            async with client(made.urls[name], network=made.network) as peer:
                assert await peer.call("price", "x", reply=str, within=5) == "x costs 1"
                async with peer.stream("rows", 500, reply=int, credit=10) as replies:
                    assert [row async for row in replies] == list(range(500))
        # No link passes an edge, and every edge is no node of the graph.
        assert all(made.meshes[name]._host.hops == 0 for name in "EF")
        assert set(made.meshes["A"]._engine.paths().costs) == {"A", "B"}
        assert [each.node for each in made.meshes["A"].instances("price")] == ["B"]


async def test_outcomes_streams_and_sources_pass_from_edge_to_edge(
    autojump_clock: MockClock,
) -> None:
    async with four() as made:
        sizes = []

        @made.boxes["F"].node("orders")
        async def orders(body: bytes) -> None:
            if not body:
                raise Reject("nothing in it", condition="amqp:not-allowed")
            sizes.append(len(body))

        @made.boxes["F"].source("ticks")
        async def ticks() -> AsyncIterator[str]:
            for number in range(5):
                yield str(number)
            await trio.sleep_forever()

        await made.meshes["E"].reachable("orders")
        await made.meshes["E"].reachable("ticks")
        async with client(made.urls["E"], network=made.network) as peer:
            async with peer.sender("orders") as out, peer.sender() as relayed:
                for size in (100, 3_000_000):
                    await out.send(bytes(size))
                await relayed.send(Message(bytes(7), to="orders"))
                with pytest.raises(DeliveryRejected) as refused:
                    await out.send(b"")
                assert refused.value.condition == "amqp:not-allowed"
            async with peer.receiver("ticks", credit=2) as source:
                got = []
                for _ in range(5):
                    delivery = await source.receive()
                    got.append(delivery.message.body)
                    delivery.accept()
            since = trio.current_time()
            with pytest.raises(LinkRefused) as missing:
                async with peer.sender("nothing"):
                    pass
            assert missing.value.condition == "amqp:not-found"
            assert trio.current_time() - since < 3
        assert sizes == [100, 3_000_000, 7]
        assert got == list("01234")


@pytest.mark.parametrize("to", ["F", "B"])
async def test_clients_of_an_edge_have_a_link_each_where_links_are_routed(
    to: str, autojump_clock: MockClock
) -> None:
    """The edge does not know of which addresses that holds; its uplink says so."""
    async with four() as made:
        names = []

        @made.boxes[to].node.link("raw")
        async def raw(link: Receiver) -> None:
            names.append(link.name)
            async for delivery in link:
                delivery.accept()

        # A link that waits for its first destination is routed by message, as those of other nodes are.
        await made.meshes["A"].reachable("raw")
        await made.meshes["E"].reachable("raw")
        async with (
            client(made.urls["E"], network=made.network) as peer,
            peer.sender("raw") as one,
            peer.sender("raw") as two,
        ):
            await one.send("1")
            await two.send("2")
            assert len(names) == 2


async def test_the_second_uplink_takes_over_when_the_first_is_killed(
    autojump_clock: MockClock,
) -> None:
    async with four() as made:
        done: Counter[str] = Counter()
        started, go_on = trio.Event(), trio.Event()

        @made.boxes["E"].node("orders", slots=4)
        async def orders(order: str) -> None:
            await trio.sleep(0.005)
            done[order] += 1

        @made.boxes["F"].rpc("slow")
        async def slow(sku: str) -> str:
            started.set()
            await go_on.wait()
            return sku

        await made.meshes["F"].reachable("orders")
        await made.meshes["E"].reachable("slow")
        async with (
            client(made.urls["F"], network=made.network) as sending,
            client(made.urls["E"], network=made.network) as calling,
            sending.sender("orders") as out,
            trio.open_nursery() as nursery,
        ):
            accepted: list[str] = []
            doubtful: list[str] = []

            async def send(order: str) -> None:
                try:
                    await out.send(order)
                    accepted.append(order)
                except DeliveryNotAccepted:
                    doubtful.append(order)

            async def call() -> None:
                with pytest.raises(DeliveryNotAccepted):
                    await calling.call("slow", "1")

            nursery.start_soon(call)
            await started.wait()
            for number in range(300):
                if number == 100:
                    made.kill["A"]()
                    killed_at = trio.current_time()
                await send(str(number))
                if number == 101:
                    # The addresses are back, and so are messages.
                    assert trio.current_time() - killed_at < 1
            go_on.set()
            # The same link of the client goes on over the other uplink.
            assert uplinks(made) == ["B", "B"]
            assert await calling.call("slow", "2", reply=str, within=2) == "2"
        # What was accepted was processed once; what was under way has an outcome that says so.
        assert set(accepted) <= set(done) <= {*accepted, *doubtful}
        assert set(done.values()) == {1}
        assert len(doubtful) <= 1


async def test_an_uplink_that_leaves_loses_and_doubles_nothing(autojump_clock: MockClock) -> None:
    rules = [MeshRule("news", "multicast")]
    async with four(rules=rules) as made:
        done: Counter[str] = Counter()
        news: list[str] = []

        async def orders(order: str) -> None:
            await trio.sleep(0.003)
            done[order] += 1

        async def price(sku: str) -> str:
            await trio.sleep(0.003)
            return sku

        async def take(text: str) -> None:
            news.append(text)

        for name in "EF":
            made.boxes[name].node("orders", slots=4)(orders)
            made.boxes[name].rpc("price", slots=4)(price)
            made.boxes[name].node("news")(take)
        for name in "EF":
            await made.meshes[name].reachable("orders")
        sent: list[str] = []
        stop = trio.Event()

        async def produce(name: str) -> None:
            async with (
                client(made.urls[name], network=made.network) as peer,
                peer.sender("orders") as out,
            ):
                at = 0
                while not stop.is_set():
                    order = f"{name}-{at}"
                    await out.send(order)
                    sent.append(order)
                    assert await peer.call("price", order, reply=str, within=5) == order
                    at += 1

        async with trio.open_nursery() as nursery:
            for name in "EF":
                nursery.start_soon(produce, name)
            await trio.sleep(1)
            for name, other in ("AB", "BA"):
                made.boxes[name].stop()
                await made.ended[name].wait()
                assert uplinks(made) == [other, other]
                before = len(sent)
                await trio.sleep(1)
                assert len(sent) > before + 30
                await made.start(name, other, rules=rules)
                await until(
                    lambda name=name: all(name in made.meshes[edge]._engine.lines for edge in "EF")
                )
                await trio.sleep(2)
            stop.set()
        assert set(done) == set(sent)
        assert set(done.values()) == {1}
        # With two uplinks each, an edge is still one destination.
        async with client(made.urls["E"], network=made.network) as peer, peer.sender("news") as out:
            for number in range(5):
                await out.send(str(number))
        assert sorted(news) == sorted(list("01234") * 2)


async def test_edges_leave_in_turn_under_load(autojump_clock: MockClock) -> None:
    async with four() as made:
        done: Counter[str] = Counter()

        def serve(name: str) -> None:
            async def orders(order: str) -> None:
                await trio.sleep(0.003)
                done[order] += 1

            made.boxes[name].node("orders", slots=4)(orders)

        for name in "EF":
            serve(name)
        await made.meshes["A"].reachable("orders")
        sent: list[str] = []
        stop = trio.Event()

        async def produce(number: int) -> None:
            async with (
                client(made.urls["A"], f"c{number}", network=made.network) as peer,
                peer.sender("orders") as out,
            ):
                while not stop.is_set():
                    order = f"{number}-{len(sent)}"
                    await out.send(order)
                    sent.append(order)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(produce, number)
            await trio.sleep(1)
            for name, order in (("E", "AB"), ("F", "BA")):
                since = trio.current_time()
                made.boxes[name].stop()
                await made.ended[name].wait()
                assert trio.current_time() - since < 1.5
                await trio.sleep(1)
                await made.start(name, *order, role="edge")
                serve(name)
                await trio.sleep(1)
            stop.set()
        assert set(done) == set(sent)
        assert set(done.values()) == {1}
        assert len(sent) > 300


async def test_several_edges_of_one_uplink_share_an_address(autojump_clock: MockClock) -> None:
    async with members(MemoryNetwork()) as made:
        await made.start("A")
        await made.start("B", "A")
        got: Counter[str] = Counter()

        def serve(name: str) -> None:
            async def work(text: str) -> None:
                await trio.sleep(0.01)
                got[name] += 1

            made.boxes[name].node("work", slots=2)(work)

        for name in "EFGB":
            if name != "B":
                await made.start(name, "B", role="edge")
            serve(name)
            await made.meshes[name].wait_ready()
        async with (
            client(made.urls["A"], network=made.network) as peer,
            peer.sender("work") as out,
            trio.open_nursery() as nursery,
        ):
            await trio.sleep(1)
            for number in range(200):
                nursery.start_soon(out.send, str(number))
        assert sum(got.values()) == 200
        assert set(got) == set("BEFG")
        assert min(got.values()) > 20


async def test_links_for_replies_of_an_edge_end_with_their_callers(
    autojump_clock: MockClock,
) -> None:
    """A caller's address is never there again: no link of the edge waits for it at the uplink."""
    async with four() as made:

        @made.boxes["E"].rpc("price")
        async def price(sku: str) -> str:
            return sku

        await made.meshes["B"].reachable("price")
        for name in ("B", "A", "F"):
            async with client(made.urls[name], "caller", network=made.network) as peer:
                for number in range(3):
                    assert await peer.call("price", f"{number}", reply=str) == f"{number}"
        await trio.sleep(3)
        host = made.meshes["E"]._host
        assert all(link.over for link, _ in host._remote._links.values())
        links = made.meshes["A"]._host
        assert not [each for each, _ in links._routed if each.startswith("$mesh/")]
        assert (len(links.pinned), links.pinned.seeking, links.of_edges) == (0, 0, 0)


# --- receivers of clients as destinations --------------------------------------------------------------


@pytest.mark.parametrize(("server", "caller"), ["AA", "AB", "EE", "EF", "EA", "AE"])
async def test_a_receiver_of_a_client_is_a_destination_while_attached(
    server: str, caller: str, autojump_clock: MockClock
) -> None:
    async with four() as made:
        with trio.fail_after(60):
            async with client(made.urls[caller], "caller", network=made.network) as asking:
                async with client(made.urls[server], "server", network=made.network) as serving:

                    async def serve(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
                        async with (
                            serving.receiver("svc", credit=3) as requests,
                            serving.sender() as replies,
                        ):
                            task_status.started()
                            async for delivery in requests:
                                message = delivery.message
                                to = message.properties.reply_to
                                key = message.properties.message_id
                                await replies.send(
                                    Message(f"{message.body}!", to=to, correlation_id=key)
                                )
                                delivery.accept()

                    async with trio.open_nursery() as nursery:
                        await nursery.start(serve)
                        await made.meshes[caller].reachable("svc")
                        for number in range(5):
                            assert await asking.call("svc", str(number)) == f"{number}!"
                        nursery.cancel_scope.cancel()
                await until(lambda: not made.meshes["A"].instances("svc"))
                if caller in "AB":
                    with pytest.raises(LinkRefused):
                        async with asking.sender("svc"):
                            pass
            for name in made.meshes:
                assert not made.meshes[name]._host._ends._receivers


@pytest.mark.parametrize("where", "AE")
async def test_receivers_share_messages_or_each_get_them(
    where: str, autojump_clock: MockClock
) -> None:
    rules = [MeshRule("news", "multicast")]
    async with four(rules=rules) as made:
        got: Counter[str] = Counter()

        async def take(
            name: str, address: str, task_status: Any = trio.TASK_STATUS_IGNORED
        ) -> None:
            async with (
                client(made.urls[where], name, network=made.network) as peer,
                peer.receiver(address, credit=4) as receiver,
            ):
                task_status.started()
                async for delivery in receiver:
                    got[f"{name} {delivery.message.body}"] += 1
                    delivery.accept()

        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                for address in ("work", "news"):
                    await nursery.start(take, name, address)
            for address in ("work", "news"):
                await made.meshes["F"].reachable(address)
            async with client(made.urls["F"], network=made.network) as peer:
                for address in ("work", "news"):
                    async with peer.sender(address) as out:
                        for number in range(20):
                            await out.send(f"{address}{number}")
            nursery.cancel_scope.cancel()
        assert sum(count for text, count in got.items() if " work" in text) == 20
        assert {text.split()[0] for text in got if " work" in text} == {"one", "two"}
        assert all(got[f"{name} news{at}"] == 1 for name in ("one", "two") for at in range(20))


@pytest.mark.parametrize("distribution", ["balanced", "multicast"])
async def test_an_idle_sender_does_not_keep_the_credit_of_a_receiver(
    distribution: str, autojump_clock: MockClock
) -> None:
    rules = [MeshRule("news", distribution)]
    async with (
        line("A", "B", network=MemoryNetwork(), rules=rules) as made,
        client(made.urls["A"], "reader", network=made.network) as reading,
        reading.receiver("news", credit=2) as receiver,
    ):
        await made.meshes["B"].reachable("news")
        async with (
            client(made.urls["A"], "idle", network=made.network) as idle,
            client(made.urls["B"], "busy", network=made.network) as busy,
            idle.sender("news"),
            busy.sender("news") as out,
        ):
            for number in range(3):
                # Meanwhile the credit goes round.
                await trio.sleep(3 * number)
                with trio.fail_after(5):
                    receipt = out.send_nowait(number)
                    delivery = await receiver.receive()
                    delivery.accept()
                    assert await receipt.outcome() == ACCEPTED


async def test_a_receiver_at_an_edge_stays_when_the_uplink_changes(
    autojump_clock: MockClock,
) -> None:
    async with (
        four() as made,
        client(made.urls["E"], "server", network=made.network) as serving,
        client(made.urls["F"], "sender", network=made.network) as peer,
        serving.receiver("svc", credit=3) as requests,
        peer.sender("svc") as out,
    ):
        for text in ("before", "after"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(out.send, text)
                delivery = await requests.receive()
                assert delivery.message.body == text
                delivery.accept()
            if text == "before":
                made.kill["A"]()
                await until(lambda: uplinks(made) == ["B", "B"])


async def test_a_receiver_is_no_destination_where_rules_name_the_nodes(
    autojump_clock: MockClock,
) -> None:
    async with (
        four(rules=[MeshRule("orders", nodes=("B",))]) as made,
        client(made.urls["A"], network=made.network) as peer,
    ):
        with pytest.raises(LinkRefused) as refused:
            async with peer.receiver("orders"):
                pass
        assert refused.value.condition == "amqp:not-found"


async def test_no_client_names_the_user_whom_an_edge_sees(autojump_clock: MockClock) -> None:
    """A client of A says that its link is one of an edge for a user; G, an edge, learns who the client is."""
    async with members(MemoryNetwork()) as made:
        await made.start("A")
        await made.start("G", "A", role="edge")
        seen: list[tuple[str | None, str]] = []

        @made.boxes["G"].node.link("raw")
        async def raw(link: Receiver, peer: Peer) -> None:
            seen.append((peer.user, peer.container_id))
            async for delivery in link:
                delivery.accept()

        await made.meshes["A"].reachable("raw")
        async with client(made.urls["A"], network=made.network) as peer:
            leg = {
                "from": "E",
                "band": "link",
                "user": "admin",
                "client": "1",
                "container": "forged",
            }
            async with peer.sender("raw", properties={"x-opt-mesh-leg": leg}) as out:
                await out.send("1")
        assert seen == [(None, "client")]


async def test_messages_that_are_under_way_follow_an_edge_to_its_next_uplink(
    autojump_clock: MockClock,
) -> None:
    """A member that leaves hears of messages for its edge after the edge has left it; see :class:`EndAddress`."""
    async with trio.open_nursery() as nursery:
        network = SimulatedNetwork([], Random, SimulationTrace(), nursery)
        async with members(network.door("unused")) as made:
            for name, *seeds in (("A",), ("B", "A"), ("C", "A", "B"), ("E", "B", "C")):
                role = "edge" if name == "E" else "interior"
                door = network.door(name)
                await made.start(name, *seeds, role=role, box_options={"network": door})
            done: list[str] = []

            @made.boxes["E"].node("orders")
            async def orders(order: str) -> None:
                done.append(order)

            await until(lambda: made.way("A", "orders") == ("B",))
            door = network.door("client")
            async with (
                client(made.urls["A"], network=door) as peer,
                peer.sender("orders") as out,
            ):
                await out.send("first")
                with network.mute("A", to="B"):
                    # A hello that was on its way already.
                    await trio.sleep(0.3)
                    receipt = out.send_nowait("under way")
                    await trio.sleep(0.05)
                    nursery.start_soon(made.meshes["B"].drain)
                    await until(lambda: made.way("A", "orders") == ("C",))
                    await trio.sleep(0.1)
                    assert not receipt.done
                await receipt.accepted()
                await out.send("after")
            assert done == ["first", "under way", "after"]
            # The leg to the edge was kept for that message only.
            ends = made.meshes["B"]._host._ends
            await until(lambda: not any(fan.legs for fan in ends.fans()), within=1)
        nursery.cancel_scope.cancel()
