"""Clients that a member redirects to the node that serves an address, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from meshed import client, members

from amqp_rt.events import Peer
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.redirects import redirect_to

pytestmark = pytest.mark.req("X27")

URLS = ["memory://B", "ws://10.0.0.2:80", "amqps://b.example:5671", "amqp://10.0.0.2:5672", "://"]


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        (Peer(), ("10.0.0.2", 5672)),
        (Peer(secure=True), ("b.example", 5671)),
        (Peer(trusted=True), None),
        (Peer(protocol="amqp0.9.1"), None),
    ],
)
def test_a_client_keeps_its_protocol(peer: Peer, place: tuple[str, int] | None) -> None:
    error = redirect_to(URLS, peer, "orders")
    if place is None:
        assert error is None
        return
    assert error is not None
    assert error.condition == "amqp:link:redirect"
    info = {str(key): value for key, value in (error.info or {}).items()}
    host, port = place
    assert info == {"hostname": host, "network-host": host, "port": port, "address": "orders"}


@pytest.mark.parametrize("says", [True, False])
async def test_a_client_follows_to_the_node_that_serves_the_address(says: bool) -> None:
    with trio.fail_after(20):
        rules = [MeshRule("orders", redirect=True), MeshRule("ticks", redirect=True)]
        async with members() as made:
            await made.start("A", rules=rules)
            await made.start("B", "A", urls=None if says else ())
            got = []

            @made.boxes["B"].node("orders")
            async def orders(text: str) -> None:
                got.append(text)

            @made.boxes["B"].source("ticks")
            async def ticks() -> AsyncIterator[str]:
                yield "tick"
                await trio.sleep_forever()

            await made.meshes["A"].reachable("orders")
            await made.meshes["A"].reachable("ticks")
            async with (
                client(made.urls["A"]) as peer,
                peer.sender("orders") as out,
                peer.receiver("ticks", credit=1) as source,
            ):
                await out.send("there")
                assert (await source.receive()).message.body == "tick"
                theirs = [each.peer.container_id for each in made.boxes["B"].connections]
                assert ("client" in theirs) == says
                assert bool(made.meshes["B"]._host.placed) != says
            # The container's own links are routed.
            async with made.meshes["A"].sender("orders") as out:
                await out.send("from A")
            assert got == ["there", "from A"]
