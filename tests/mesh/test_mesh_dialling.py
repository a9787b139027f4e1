"""Whom members dial: from one seed, all find each other, and two members keep one connection; in virtual time."""

from __future__ import annotations

import logging
import socket
import ssl
from typing import Any

import pytest
import trio
import trio.abc
import trio.lowlevel
from certificates import certificates
from meshed import Members, members, until
from trio.testing import MockClock

from amqp_rt import Container
from amqp_rt.addresses import parse_url
from amqp_rt.mesh import Mesh, MeshError
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.net.tls import ClientTls, ServerTls

pytestmark = pytest.mark.req("P3")


def connections(made: Members) -> list[tuple[str, str]]:
    """Return the pairs of members with an open connection in which one of them is the member that dialled."""
    return sorted(
        (name, peer.node)
        for name, mesh in made.meshes.items()
        for peer in mesh._host._ways.neighbours.values()
        if peer.connection.dialled and peer.usable and peer.node != name
    )


async def test_members_find_each_other_from_one_seed(autojump_clock: MockClock) -> None:
    names = [f"n{at}" for at in range(5)]
    async with members(MemoryNetwork()) as made:
        for name in names:
            await made.start(name, *names[:1], urls=None)
        for name in names:
            await until(lambda name=name: len(made.meshes[name]._engine.paths().costs) == 5)
        await trio.sleep(20)
        pairs = connections(made)
        # Four are dialled by each: with five members, all.
        assert len({frozenset(each) for each in pairs}) == len(pairs) == 10
        lines = {name: dict(mesh._engine.lines) for name, mesh in made.meshes.items()}
        assert all(len(each) == 4 for each in lines.values())
        # Two that dialled each other at the same time may have replaced a line once.
        assert all(line.flaps.count <= 1 for each in lines.values() for line in each.values())


async def test_of_two_that_dial_each_other_the_connection_of_the_lower_id_stays(
    autojump_clock: MockClock,
) -> None:
    async with members(MemoryNetwork()) as made:
        made.urls["B"] = "memory://B"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.start, "A", "B")
            await trio.lowlevel.checkpoint()
            made.urls["A"] = "memory://A"
            nursery.start_soon(made.start, "B", "A")
        await trio.sleep(30)
        assert connections(made) == [("A", "B")]
        assert made.meshes["B"]._engine.lines["A"].state.value == "up"


async def test_a_member_that_returns_is_dialled_again(autojump_clock: MockClock) -> None:
    async with members(MemoryNetwork()) as made:
        await made.start("A")
        await made.start("B", "A")
        await until(lambda: len(made.meshes["B"]._engine.paths().costs) == 2)
        made.kill["A"]()
        await made.ended["A"].wait()
        await trio.sleep(60)
        assert len(made.meshes["B"]._engine.paths().costs) == 1
        await made.start("A")
        since = trio.current_time()
        await until(lambda: len(made.meshes["A"]._engine.paths().costs) == 2)
        assert trio.current_time() - since < 12


async def test_of_two_members_with_one_id_one_leaves(autojump_clock: MockClock) -> None:
    """Both would otherwise replace each other's connections for ever."""
    network = MemoryNetwork()
    left = []

    async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with (
                Container("B", network=network, drain_s=1) as twin,
                Mesh(twin, ["memory://A"], role="interior", urls=()) as mesh,
            ):
                await mesh.wait_ready()
                task_status.started()
                await trio.sleep_forever()
        except MeshError as error:
            left.append(str(error))

    async with members(network) as made:
        await made.start("A")
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            nursery.start_soon(run)
            await trio.sleep(60)
            assert len(left) == 1
            assert "has the id 'B' as well" in left[0]
            assert made.meshes["A"]._engine.lines["B"].state.value == "up"
            nursery.cancel_scope.cancel()


class OneHost(trio.abc.HostnameResolver):
    """Resolver that knows one name: this machine."""

    async def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        assert host in ("members.test", b"members.test")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("how", ["client-tls", "context"])
@pytest.mark.parametrize("certified", ["members.test", "127.0.0.1"])
async def test_members_found_by_a_name_have_certificates_for_it(certified: str, how: str) -> None:
    """Their URLs have addresses, for which certificates are rarely issued."""
    known = certificates()
    trio.socket.set_custom_hostname_resolver(OneHost())
    tls: ClientTls | ssl.SSLContext = ClientTls(known.ca)
    if how == "context":
        tls = ssl.create_default_context(cafile=str(known.ca))
    with trio.fail_after(10):
        async with (
            Container("A", tls=ServerTls(known.issue(certified)), drain_s=0) as first,
            Container("B", drain_s=0) as second,
        ):
            (url,) = await first.listen("amqps://127.0.0.1:0")
            seed = f"dns+a://members.test:{parse_url(url).port}?scheme=amqps"
            dial = {"tls": tls, "within": 1.0}
            async with (
                Mesh(first, role="interior", urls=()),
                Mesh(second, [seed], role="interior", urls=(), dial=dial) as mesh,
            ):
                if certified == "members.test":
                    await mesh.wait_ready()
                    assert mesh._engine.lines["A"].state.value == "up"
                else:
                    await until(
                        lambda: any(
                            each.pause_s > 1 for each in mesh._peers.dialling.places.values()
                        )
                    )
                    assert not mesh._engine.lines


async def test_a_seed_that_is_no_member_is_told_and_one_that_has_left_is_not(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    options = {"role": "interior", "urls": ()}
    async with (
        Container("seed", network=network) as seed,
        Container("member", network=network) as member,
    ):
        await seed.listen("memory://seed")
        async with Mesh(member, ["memory://seed"], **options) as mesh:
            await trio.sleep(5)
            assert caplog.text.count("mesh: no member of this mesh at memory://seed") == 1
            async with Mesh(seed, **options):
                await until(lambda: len(mesh._engine.paths().costs) == 2, within=60)
            caplog.clear()
            caplog.set_level(logging.DEBUG, "amqp_rt.mesh")
            await trio.sleep(60)  # the container listens as before
        told = [each for each in caplog.records if "no member of this mesh" in each.getMessage()]
        assert told
        assert {each.levelno for each in told} == {logging.DEBUG}


async def test_a_refused_member_says_once_why_and_what_to_do(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """On one machine both are edges unless they state a role, and the first edge has to be dialled."""
    caplog.set_level(logging.INFO, "amqp_rt.mesh")
    async with members(MemoryNetwork()) as made:
        await made.start("A", role="edge")
        await made.start("B", "A")
        await trio.sleep(60)
        why = "'A' is an edge, which dials interior members and is not dialled: start 'A' with --mesh-role interior"
        said = [each for each in caplog.records if "refuses this member" in each.getMessage()]
        assert [each.levelno for each in said] == [logging.WARNING]
        assert f"'A' at {made.urls['A']} refuses this member: amqp:not-allowed: " in caplog.text
        assert why in said[0].getMessage()
        # Each attempt that A refuses has its line there, and pauses become longer.
        assert 1 < sum(made.meshes["A"].stats().members_refused.values()) < 15
        assert len(caplog.records) < 30
        assert not made.meshes["A"]._host.refused_members
        caplog.clear()
        made.kill["A"]()
        await made.ended["A"].wait()
        await made.start("A")
        await until(lambda: len(made.meshes["B"]._engine.paths().costs) == 2, within=60)


async def test_of_two_edges_the_one_that_dials_says_that_an_interior_member_is_needed(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(MemoryNetwork()) as made:
        await made.start("A", role="edge")
        await made.start("B", "A", role="edge")
        await trio.sleep(60)
    said = [
        each.getMessage()
        for each in caplog.records
        if "both members are edges" in each.msg % each.args
    ]
    assert len(said) == 2
    assert all("start one of them with --mesh-role interior" in each for each in said)


async def test_a_seed_that_is_not_reached_is_logged_once_and_when_the_reason_changes(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()

    def warnings() -> list[str]:
        found = [each for each in caplog.records if each.name == "amqp_rt.mesh"]
        return [each.getMessage() for each in found if each.levelno >= logging.WARNING]

    async with (
        Container("seed", network=network) as seed,
        Container("member", network=network) as member,
        Mesh(member, ["memory://seed"], role="interior", urls=()) as mesh,
    ):
        await trio.sleep(60)
        (said,) = warnings()
        assert said.startswith(
            "mesh: the seed memory://seed is not reached: cannot connect to memory"
        )
        assert said.endswith("; this member keeps trying")
        await seed.listen("memory://seed")
        await trio.sleep(60)
        assert len(warnings()) == 2
        assert warnings()[1].startswith("mesh: no member of this mesh at memory://seed")
        async with Mesh(seed, role="interior", urls=()):
            await until(lambda: len(mesh._engine.paths().costs) == 2, within=60)
        assert len(warnings()) == 2


async def test_members_that_are_seeds_of_each_other_and_of_themselves_warn_of_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    urls = ["memory://A", "memory://B"]
    options = {"role": "interior", "urls": ()}
    async with Container("A", network=network) as a, Container("B", network=network) as b:
        for box, url in ((a, urls[0]), (b, urls[1])):
            await box.listen(url)
        async with Mesh(a, urls, **options) as mesh, Mesh(b, urls, **options):
            await until(lambda: len(mesh._engine.paths().costs) == 2)
            await trio.sleep(60)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
