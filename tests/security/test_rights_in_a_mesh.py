"""Rights in a mesh: each row of the security matrix about members and edges, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import security_matrix as matrix
import trio
from meshed import Members, members, verifier
from trio.testing import MockClock

from amqp_rt import Access, Connection, Container, Message, Plain, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError, DeliveryNotAccepted
from amqp_rt.mesh.hops import ROUTE
from amqp_rt.mesh.peers import MeshMember, open_properties
from amqp_rt.mesh.records import PATTERN, TAKES, Offer
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P3", "SE18")

HELD = {"send": Rights.SEND, "listen": Rights.LISTEN, "manage": Rights.MANAGE}
#: Seconds in which a member that may join has joined.
JOINED_S = 2.0


def rules_of(user: str, right: str, address: str) -> list[Rule]:
    """Return the rules that give *user* the right at *address*."""
    if right == "nothing":
        return []
    where = "elsewhere" if right == "elsewhere" else address
    return [Rule(where, HELD.get(right, Rights.SEND), users=(user,))]


@asynccontextmanager
async def judge(rules: list[Rule], **options: Any) -> AsyncIterator[Members]:
    """Run A, to which B, E and others log in."""
    box = {
        "access": Access(rules),
        "users": verifier({"B": "pw", "E": "pw"}),
        "plain_in_clear": True,
    }
    async with members(MemoryNetwork()) as made:
        await made.start("A", box_options=box, **options)
        yield made


def login(user: str) -> dict[str, Any]:
    return {"auth": Plain(user, "pw"), "plain_in_clear": True}


@asynccontextmanager
async def guest(made: Members, role: str, mesh: str = "mesh") -> AsyncIterator[Connection]:
    """Connect B with the open of a member, whose frames are those of the test; of a client without a role."""
    said = open_properties(MeshMember(mesh, "B", 7, role, "", 1)) if role else {}
    async with Container("B", network=made.network) as box:

        async def records(record: Any) -> None:
            pass

        box.node("$mesh")(records)
        async with box.connect(
            made.urls["A"], properties=said, reconnect=None, **login("B")
        ) as peer:
            await trio.sleep(0.1)
            yield peer


# --- operations ------------------------------------------------------------------------------------

Operation = Callable[[Members], Awaitable[str]]


def joins(name: str = "B", **options: Any) -> Operation:
    """Return an operation: a member logs in as B."""

    async def join(made: Members) -> str:
        await made.start(name, "A", dial=login("B"), **options)
        await trio.sleep(JOINED_S)
        line = made.meshes["A"]._engine.lines.get(name)
        up = line is not None and line.state.value == "up"
        # Who has not joined is counted, with the reason.
        assert up is not any(made.meshes["A"].stats().members_refused.values())
        return matrix.ALLOWED if up else matrix.NOT_JOINED

    return join


async def joins_another(made: Members) -> str:
    async with guest(made, "interior", "another"):
        assert made.meshes["A"].stats().members_refused == {"it is of another mesh": 1}
        return matrix.ALLOWED if made.meshes["A"]._engine.lines else matrix.NOT_JOINED


def offers(
    offer: dict[str, Offer], found: str, name: str = "B", role: str = "interior"
) -> Operation:
    """Return an operation: a member offers an address, which is looked up as *found*."""

    async def ask(made: Members) -> str:
        await made.start(name, "A", offer=offer, role=role, dial=login(name))
        await trio.sleep(JOINED_S)
        return matrix.ALLOWED if made.meshes["A"].instances(found) else matrix.DROPPED

    return ask


def attaches(link: Callable[[Connection], Any], role: str) -> Operation:
    """Return an operation: B attaches a link, on a connection of its role."""

    async def ask(made: Members) -> str:
        async with guest(made, role) as peer:
            return await result(link(peer))

    return ask


async def result(link: Any) -> str:
    try:
        async with link:
            await link.wait_attached()
    except DeliveryNotAccepted as error:
        return type(error.info["outcome"]).__name__.lower()
    except AmqpError as error:
        return error.condition
    return matrix.ALLOWED


def along(peer: Connection) -> Any:
    return peer.sender("here", properties={ROUTE: ["A"]})


def records(peer: Connection) -> Any:
    return peer.sender("$mesh", settled=True)


AT_MESH: dict[str, Operation] = {
    "join as an interior member": joins(),
    "join as an edge": joins(role="edge"),
    "join under another name than that of the login": joins("C"),
    "join a mesh of another name": joins_another,
    "offer an address, as an interior member": offers({"x": Offer()}, "x"),
    "send records to $mesh, as an interior member": attaches(records, "interior"),
    "send records to $mesh, as an edge": attaches(records, "edge"),
    "send records to $mesh, as a client": attaches(records, ""),
    "receive from $mesh, as an interior member": attaches(
        lambda peer: peer.receiver("$mesh"), "interior"
    ),
    "attach a link along a route, as an interior member": attaches(along, "interior"),
    "attach a link along a route, as an edge": attaches(along, "edge"),
    "attach a link along a route, as a client": attaches(along, ""),
}


@pytest.mark.parametrize("right", matrix.RIGHTS)
async def test_who_may_be_a_member(right: str, autojump_clock: MockClock) -> None:
    assert set(AT_MESH) == set(matrix.RIGHTS_AT_MESH)
    wrong = []
    for name, operation in AT_MESH.items():
        async with judge(rules_of("B", right, "$mesh")) as made:

            async def take(text: str) -> None:
                pass

            made.boxes["A"].node("here")(take)
            found = await operation(made)
        if found != (expected := matrix.RIGHTS_AT_MESH[name][right]):
            wrong.append((name, found, expected))
    assert wrong == []


# --- edges -----------------------------------------------------------------------------------------


def uses(link: Callable[[Any], Any]) -> Operation:
    """Return an operation: the edge's own code attaches a link to q, which A has."""

    async def use(made: Members) -> str:
        await made.brokers["A"].declare(Queue("q"))
        made.brokers["A"].publish("q", Message("x").encode())
        await made.start("E", "A", role="edge", dial=login("E"))
        await made.meshes["E"].wait_ready()
        return await result(link(made.meshes["E"]))

    return use


class Relay:
    """Link to the anonymous terminus, over which one message is sent."""

    def __init__(self, mesh: Any) -> None:
        self.link = mesh.sender()

    async def __aenter__(self) -> None:
        await self.link.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self.link.__aexit__(*error)

    async def wait_attached(self) -> None:
        await self.link.send(Message("x", to="q"))


OF_EDGES: dict[str, Operation] = {
    "offer q": offers({"q": Offer()}, "q", "E", "edge"),
    "offer a pattern that matches q and others": offers(
        {"{all:rest}": Offer(TAKES | PATTERN)}, "q", "E", "edge"
    ),
    "offer an address that begins with $": offers({"$q": Offer()}, "$q", "E", "edge"),
    "attach a link that sends to q": uses(lambda mesh: mesh.sender("q")),
    "attach a link that receives from q": uses(lambda mesh: mesh.receiver("q")),
    "send to q by the anonymous terminus": uses(Relay),
}


@pytest.mark.parametrize("right", matrix.RIGHTS)
async def test_what_an_edge_may_do(right: str, autojump_clock: MockClock) -> None:
    assert set(OF_EDGES) == set(matrix.RIGHTS_OF_EDGES)
    wrong = []
    rules = [Rule("$mesh", Rights.SEND, users=("E",)), *rules_of("E", right, "q")]
    for name, operation in OF_EDGES.items():
        options = {} if name.startswith("offer") else {"broker": {"volatile": True}}
        async with judge(rules, **options) as made:
            found = await operation(made)
        if found != (expected := matrix.RIGHTS_OF_EDGES[name][right]):
            wrong.append((name, found, expected))
    assert wrong == []
