"""Bounds of what members and clients can make a node of a mesh hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from meshed import client, line, members, until, verifier
from trio.testing import MockClock

from amqp_rt import Access, Container, Limits, Plain, Rights, Rule
from amqp_rt.errors import LinkRefused, LocalProtocolError
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.neighbours import RecordSender
from amqp_rt.mesh.peers import MeshMember, open_properties
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder

pytestmark = pytest.mark.req("P3")


@pytest.mark.parametrize("bounded", ["A", "B"])
async def test_mesh_legs_max(bounded: str) -> None:
    """A, which opens the legs, has the bound; or B, which accepts them and opens the next."""
    with trio.fail_after(20):
        async with members() as made:
            for name, *seeds in (("A",), ("B", "A"), ("C", "B")):
                limits = Limits(mesh_legs_max=2) if name == bounded else Limits()
                await made.start(name, *seeds, box_options={"limits": limits})
            for number in range(3):

                async def take(text: str) -> None:
                    pass

                made.boxes["C"].node(f"n{number}")(take)
            for number in range(3):
                await made.meshes["A"].reachable(f"n{number}")
            async with client(made.urls["A"]) as peer:
                first = await peer.sender("n0").__aenter__()
                second = await peer.sender("n1").__aenter__()
                with pytest.raises(LinkRefused):
                    async with peer.sender("n2"):
                        pass
                await first.send("still served")
                await second.send("still served")


async def test_mesh_legs_max_of_links_that_end_here(autojump_clock: MockClock) -> None:
    """B accepts two; links that have ended do not count."""
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A", box_options={"limits": Limits(mesh_legs_max=2)})

        async def take(text: str) -> None:
            pass

        for number in range(4):
            made.boxes["B"].node(f"n{number}")(take)
            await made.meshes["A"].reachable(f"n{number}")
        async with client(made.urls["A"], network=network) as peer:
            async with peer.sender("n0") as first, peer.sender("n1") as second:
                with pytest.raises(LinkRefused):
                    async with peer.sender("n2"):
                        pass
                await first.send("still served")
                await second.send("still served")
            # The legs go a minute after the last sender.
            await trio.sleep(70)
            async with peer.sender("n3") as out:
                await out.send("x")


async def test_mesh_seeking_max(autojump_clock: MockClock) -> None:
    """Links that are routed one by one seek a destination for two seconds; those above the bound do not."""
    network = MemoryNetwork()
    rules = [MeshRule("jobs", route="link")]
    box = {"limits": Limits(mesh_seeking_max=2)}
    async with (
        line("A", "B", network=network, rules=rules, box_options=box) as made,
        client(made.urls["A"], network=network) as peer,
    ):
        ends: list[tuple[float, str]] = []

        async def attach() -> None:
            since = trio.current_time()
            try:
                async with peer.sender("jobs"):
                    ends.append((trio.current_time() - since, "attached"))
            except LinkRefused as refused:
                ends.append((round(trio.current_time() - since, 1), refused.condition))

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(attach)
                await trio.sleep(0.5)
                assert ends == [(0.0, "amqp:resource-limit-exceeded")]
            assert ends[1:] == [(2.0, "amqp:not-found")] * 2
            ends.clear()

        async def job(text: str) -> None: ...

        made.boxes["B"].node("jobs")(job)
        await made.meshes["A"].reachable("jobs")
        await attach()
        assert [how for _, how in ends] == ["attached"]


def test_mesh_records_waiting_max() -> None:
    """A neighbour that gives no credit is disconnected when one record more than the bound waits for it."""
    there = Recorder()
    joint = Joined(on_attach=lambda link: link.accept(there))
    joint.pump()
    lost: list[str] = []
    records = RecordSender(lost.append, most=64)
    joint.client.begin().attach_sender("r", records, target=Target(address="$mesh"))
    joint.pump()
    sent = [b"%d" % at for at in range(64)]
    for each in sent:
        records.send(each)
    assert not lost
    records.send(b"one more")
    assert lost == ["mesh_records_waiting_max (64) records wait for its credit"]
    # What waits is not mixed up, if credit comes after all.
    there.attached[0].grant(100)
    joint.pump()
    assert [each.payload.removeprefix(b"\x00\x53\x77") for each in there.deliveries] == sent


async def test_mesh_reply_links_max(autojump_clock: MockClock) -> None:
    """B keeps two links for replies to clients of A; a stream of replies keeps its own until it ends."""
    network = MemoryNetwork()
    box = {"limits": Limits(mesh_reply_links_max=2)}
    async with line("A", "B", network=network, box_options=box) as made:

        @made.boxes["B"].rpc("price")
        async def price(sku: str) -> str:
            return sku

        @made.boxes["B"].rpc("ticks")
        async def ticks(count: int) -> AsyncIterator[int]:
            for at in range(count):
                yield at
                await trio.sleep(1)

        for address in ("price", "ticks"):
            await made.meshes["A"].reachable(address)
        kept = made.meshes["B"]._host._remote
        host = made.meshes["A"]._host
        async with AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(client(made.urls["A"], f"c{at}", network=network))
                for at in range(5)
            ]
            got: list[int] = []
            started = trio.Event()

            async def read() -> None:
                async with peers[0].stream("ticks", 20, reply=int) as replies:
                    async for each in replies:
                        started.set()
                        got.append(each)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await started.wait()
                for at in (1, 2, 3, 4, 1, 2):
                    assert await peers[at].call("price", f"{at}", reply=str) == f"{at}"
                    assert len(kept._links) == 2
                # Those of two callers, and that of the stream.
                await until(lambda: host.placed == 3)
            assert got == list(range(20))
            await until(lambda: host.placed == 2)


@pytest.mark.parametrize("distribution", ["balanced", "multicast"])
async def test_mesh_receivers_max(distribution: str, autojump_clock: MockClock) -> None:
    """Receivers of one address at one node; one that has gone leaves its place to another."""
    rules = [MeshRule("svc", distribution)]
    async with members(MemoryNetwork()) as made:
        await made.start("A", rules=rules, box_options={"limits": Limits(mesh_receivers_max=2)})
        async with client(made.urls["A"], network=made.network) as peer, AsyncExitStack() as stack:
            await stack.enter_async_context(peer.receiver("svc"))
            async with peer.receiver("svc"):
                with pytest.raises(LinkRefused, match="mesh_receivers_max") as refused:
                    async with peer.receiver("svc"):
                        pass
                assert refused.value.condition == "amqp:resource-limit-exceeded"
                # Another address has room of its own.
                await stack.enter_async_context(peer.receiver("other"))
            await stack.enter_async_context(peer.receiver("svc"))
            with pytest.raises(LinkRefused, match="mesh_receivers_max"):
                async with peer.receiver("svc"):
                    pass


CHANNELS = Limits(channel_max=2, mesh_channel_max=5)
#: Login, and the member that the open names; the highest channel number that A allows.
GUESTS: dict[str, tuple[str, dict[str, Any] | None, int]] = {
    "member": ("B", {}, 5),
    "edge": ("E", {"node": "E", "role": "edge"}, 5),
    "client": ("B", None, 2),
    "member of another mesh": ("B", {"mesh": "other"}, 2),
    "member under another name than its login": ("B", {"node": "C"}, 2),
    "member without a right": ("ann", {"node": "ann"}, 2),
    "edge that would be a member": ("E", {"node": "E"}, 2),
    "member of a later version": ("B", {"versions": [2]}, 2),
    "member that has not logged in": ("", {}, 2),
}


@pytest.mark.parametrize("name", GUESTS)
async def test_mesh_channel_max(name: str, autojump_clock: MockClock) -> None:
    """Members that have logged in may have more sessions; at either bound, one more ends the connection."""
    user, member, most = GUESTS[name]
    network = MemoryNetwork()
    users = {each: each for each in ("B", "C", "E", "ann")}
    access = Access(
        [
            Rule("$mesh", Rights.MANAGE, users=("B", "C")),
            Rule("$mesh", Rights.SEND, users=("E",)),
            Rule("*", Rights.SEND, users=("ann",)),
        ]
    )
    box = {"limits": CHANNELS, "plain_in_clear": True}
    if user:
        box |= {"users": verifier(users), "access": access}
    async with members(network) as made:
        await made.start("A", box_options=box)
        said = open_properties(MeshMember("mesh", "B", 7, "interior", "", 1))
        said["x-opt-mesh"] |= member or {}
        options = {"auth": Plain(user, user), "plain_in_clear": True} if user else {}
        async with Container("client", network=network) as there:

            async def records(record: Any) -> None:
                pass

            there.node("$mesh")(records)
            async with there.connect(
                made.urls["A"],
                properties=said if member is not None else {},
                limits=Limits(channel_max=100),
                reconnect=None,
                **options,
            ) as peer:
                await trio.sleep(0.1)
                engine: Any = peer.engine
                # A member has a session for its records.
                while len(engine.sessions) <= most:
                    engine.begin()
                with pytest.raises(LocalProtocolError, match=f"at most {most + 1} sessions"):
                    engine.begin()
                await trio.sleep(0.1)
                assert peer.state == "open"
                # A peer that does not care what A allows.
                engine._remote_channel_max = 100
                engine.begin()
                await peer.wait_closed()
                assert peer.ended_with.condition == "amqp:connection:framing-error"
                assert f"channel {most + 1} is above the channel-max {most}" in str(peer.ended_with)


async def test_members_use_more_sessions_than_clients(autojump_clock: MockClock) -> None:
    """Two clients of A have links to B in many sessions, which have one each between A and B."""
    network = MemoryNetwork()
    rules = [MeshRule("jobs", route="link")]
    login = {"auth": Plain("B", "b"), "plain_in_clear": True}
    async with members(network) as made:
        box = {"users": verifier({"B": "b"}), "plain_in_clear": True}
        await made.start("A", rules=rules, box_options=box)
        await made.start("B", "A", rules=rules, dial=login)
        got: list[str] = []

        async def job(text: str) -> None:
            got.append(text)

        made.boxes["B"].node("jobs")(job)
        await made.meshes["A"].reachable("jobs")
        async with AsyncExitStack() as stack:
            for name in ("c", "d"):
                peer = await stack.enter_async_context(
                    client(made.urls["A"], name, network=network, **login)
                )
                for at in range(50):
                    session = await stack.enter_async_context(peer.session())
                    out = await stack.enter_async_context(session.sender("jobs"))
                    await out.send(f"{name}{at}")
        assert len(got) == 100
