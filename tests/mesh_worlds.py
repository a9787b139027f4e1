"""A mesh of twelve containers in simulations, its edges and clients, and what must hold at every moment and in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from unittest.mock import patch
from weakref import WeakSet

import trio

from amqp_rt import Connection, Container, Message, Modify, Reject, Release
from amqp_rt.container.sending import Receipt
from amqp_rt.errors import AmqpError, ConnectFailed
from amqp_rt.limits import KIB, Limits
from amqp_rt.mesh import routed, transit
from amqp_rt.mesh.fans import STREAM_ABOVE, Fan
from amqp_rt.mesh.hops import PINNED, read_leg
from amqp_rt.mesh.mesh import Mesh
from amqp_rt.mesh.multicasts import Multicast
from amqp_rt.mesh.rules import MeshRule
from amqp_rt.mesh.splices import Splice
from amqp_rt.outcomes import Accepted, Modified, Rejected, Released
from amqp_rt.testing.faults import (
    Cut,
    Delay,
    Flap,
    HalfClose,
    InjectedFault,
    Jump,
    Kill,
    NetworkPartition,
    OneWay,
    Slow,
    Split,
    Stall,
)
from amqp_rt.testing.ledger import Broken
from amqp_rt.testing.simulation import SimulatedHost, Simulation

NODES: Final = tuple(f"n{number:02}" for number in range(12))
#: Nodes to which clients connect; they serve nothing but calls.
ENTRIES: Final = NODES[::4]
#: Edges, with the nodes that they use as uplinks.
EDGES: Final[dict[str, tuple[str, str]]] = {"e0": ("n02", "n09"), "e1": ("n09", "n06")}
#: Where messages are handled.
PLACES: Final = (*NODES, *EDGES)
CLIENTS: Final = ("c0", "c1", "c2", "c3")
#: Nodes that serve each address.
SERVED: Final[dict[str, tuple[int, ...]]] = {
    "work": (1, 5, 9),
    "fire": (2, 6),
    "near": (3, 7, 11),
    "row": (2, 10),
    "news": (1, 6, 7, 10),
    "pinned": (5,),
    "ticks": (3, 9),
    "price": (0, 5, 10),
    "rows": (6, 11),
}
#: Addresses that both edges serve, and no node.
SERVED_BY_EDGES: Final = ("far", "far-price")
RULES: Final = (
    MeshRule("near", "closest", resend=1),
    MeshRule("row", ordered=True),
    MeshRule("news", "multicast"),
    MeshRule("pinned", route="link"),
)
LIMITS: Final = Limits(frame_size_max=4 * KIB, idle_timeout_s=5, close_grace_s=2)
#: Virtual seconds of faults, and bounds of what must have happened how long after them.
FAULTS_S: Final = 8.0
SENT_S: Final = 60.0
EQUAL_S: Final = 60.0
#: Seconds for which legs stay without senders, instead of a minute.
IDLE_S: Final = 5.0
#: Seconds between two checks of all nodes.
_CHECK_S: Final = 0.1
#: Faults that neither lose connections nor make lines silent: all goes well with them.
_HARMLESS: Final = (Split, Jump)


#: Addresses to which links are routed as a whole: they end with any node of their path.
_PINNED: Final = ("pinned", "ticks")


class Drain(InjectedFault, frozen=True, kw_only=True):
    """A node leaves the mesh in good order, and is started again."""

    host: str
    at: float


def draw_mesh_faults(luck: Random) -> Sequence[InjectedFault]:
    """Draw faults of a mesh."""

    def node() -> str:
        return luck.choice(NODES)

    def connection() -> int:
        return luck.randrange(40)

    def at() -> float:
        return round(luck.uniform(0, FAULTS_S), 3)

    def seconds() -> float:
        return luck.choice([0.1, 0.5, 1.0, 3.0, 8.0])

    def octets() -> int:
        return int(2 ** luck.uniform(6, 15))

    def back() -> bool:
        return luck.random() < 0.5

    kinds: list[Callable[[], InjectedFault]] = [
        lambda: Split(connection=connection(), size=luck.choice([7, 64, 500])),
        lambda: Delay(connection=connection(), seconds=luck.choice([0.05, 0.3])),
        lambda: Slow(
            connection=connection(), octets_per_s=luck.choice([10_000, 50_000]), back=back()
        ),
        lambda: Cut(connection=connection(), octets=octets(), back=back()),
        lambda: Cut(frames=luck.randint(200, 20_000)),
        lambda: HalfClose(connection=connection(), octets=octets(), back=back()),
        lambda: Stall(connection=connection(), octets=octets(), seconds=seconds(), back=back()),
        lambda: NetworkPartition(host=luck.choice([*PLACES, *CLIENTS]), at=at(), seconds=seconds()),
        lambda: OneWay(host=node(), to=luck.choice([None, node()]), at=at(), seconds=seconds()),
        lambda: Flap(host=node(), at=at(), seconds=0.1, times=luck.choice([3, 10, 25])),
        lambda: Kill(host=node(), at=at(), silent=back()),
        lambda: Kill(host=node(), at=at(), silent=back()),
        lambda: Drain(host=node(), at=at()),
        lambda: Kill(host=luck.choice(list(EDGES)), at=at(), silent=back()),
        lambda: Jump(at=at(), seconds=luck.choice([-86_400.0, 5.0, 86_400.0])),
    ]
    return [luck.choice(kinds)() for _ in range(luck.choice([0, 1, 2, 3, 5, 8]))]


class Books:
    """Messages sent, what handlers did with each, and the outcomes that senders learned."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._numbers: Counter[str] = Counter()
        #: Bodies that have been sent, with address and whether they were sent settled.
        self.sent: dict[bytes, tuple[str, bool]] = {}
        #: Number of handlers that got a body, and that finished with it, by the body and node.
        self.begun: Counter[tuple[bytes, str]] = Counter()
        self.handled: Counter[tuple[bytes, str]] = Counter()
        #: What handlers have said of a body other than that it is accepted.
        self.returned: Counter[tuple[bytes, type]] = Counter()
        self.outcomes: dict[bytes, Any] = {}
        #: Messages and calls that got no outcome, or one that no handler chose.
        self.unhappy: list[str] = []
        self._latest: dict[tuple[str, str], int] = {}

    def body(self, sender: str, address: str, size: int, *, settled: bool) -> bytes:
        """Create a body that is sent once."""
        number = self._numbers[sender] = self._numbers[sender] + 1
        text = f"{sender} {number} {address} ".encode()
        body = text + bytes((number % 251,)) * (size - len(text))
        self.sent[body] = address, settled
        return body

    def fail(self, text: str) -> None:
        """Note that a promise was broken."""
        self.failures.append(f"{trio.current_time():.3f} {text}")

    def on_begin(self, node: str, address: str, body: bytes, *, ordered: bool) -> None:
        """Note that a handler got a message."""
        known = self.sent.get(body)
        if known is None or known[0] != address:
            self.fail(f"{address} at {node} got {body[:40]!r}, which was not sent there")
            return
        self.begun[body, node] += 1
        name = _short(body)
        released = self.returned[body, Released]
        times = sum(self.begun[body, each] for each in PLACES)
        if address == "news":
            if self.begun[body, node] > 1:
                self.fail(f"{name} came to {node} twice")
        elif times > 1 + released:
            self.fail(f"{name} was delivered {times} times, and released {released} times")
        if body in self.outcomes and type(self.outcomes[body]) is Released:
            self.fail(f"{name} was delivered to {node} after its sender had heard: released")
        if ordered:
            sender, number = name.split()[:2]
            if int(number) < self._latest.get((sender, node), 0):
                self.fail(f"{name} came to {node} after number {self._latest[sender, node]}")
            self._latest[sender, node] = int(number)

    def on_outcome(self, body: bytes, outcome: Any) -> None:
        """Note the outcome that a sender got, and check that it is true."""
        self.outcomes[body] = outcome
        name = _short(body)
        handled = sum(self.handled[body, each] for each in PLACES)
        if type(outcome) is Accepted and not handled:
            self.fail(f"{name} was accepted, and no handler has finished with it")
        if type(outcome) is Released and handled:
            self.fail(f"{name} was released, and a handler has finished with it")
        if type(outcome) is Rejected and not self.returned[body, Rejected]:
            self.fail(f"{name} was rejected, by no handler: {outcome}")
        chosen = handled if type(outcome) is Accepted else self.returned[body, type(outcome)]
        if not chosen:
            self.unhappy.append(f"{name}: {outcome}")

    def check(self) -> None:
        """Check what can be known in the end only."""
        for body, outcome in self.outcomes.items():
            if type(outcome) is Released and any(self.handled[body, each] for each in PLACES):
                self.fail(f"{_short(body)} was released, and handled later")
        if self.failures:
            raise Broken("\n".join(self.failures[:20]))


def _short(body: bytes) -> str:
    return b" ".join(body.split(b" ")[:3]).decode()


class MeshWorld:
    """Twelve containers with members of a mesh, and clients.

    Args:
        net: The simulation.
    """

    def __init__(self, net: Simulation) -> None:
        self.net = net
        self.books = Books()
        self.luck = net.luck("mesh")
        self.boxes: dict[str, Container] = {}
        self.meshes: dict[str, Mesh] = {}
        #: Edges that run.
        self.edges: dict[str, Mesh] = {}
        #: Nodes that have been told to leave, until they are there again.
        self.leaving: set[str] = set()
        self.stopping = False
        #: Whether nodes say where they listen, so that they dial each other beside their seeds.
        self.dials = self.luck.random() < 0.3
        #: Nodes that connect with destinations, which have to say where they listen.
        self.direct = {name for name in NODES if self.dials and self.luck.random() < 0.5}
        self.seeds = {
            name: sorted(
                {NODES[at - 1], *self.luck.sample(NODES[:at] or NODES, min(at, 1))} - {name}
            )
            for at, name in enumerate(NODES)
        }
        self.drained = {each.host for each in net.faults if isinstance(each, Drain)}
        #: All goes well: the faults are none that cost a message, or that delay hellos.
        self.harmless = all(
            isinstance(each, _HARMLESS) or (isinstance(each, Drain) and each.host not in ENTRIES)
            for each in net.faults
        )
        self.splices: WeakSet[Any] = WeakSet()
        self.visited: dict[str, set[str]] = {}

    # --- nodes -------------------------------------------------------------------------------

    async def node(self, host: SimulatedHost) -> None:
        """Run one node, again and again if it leaves."""
        name = host.name
        luck = self.net.luck(f"{name} {host.life}")
        while True:
            async with Container(name, network=host.network, limits=LIMITS, drain_s=3.0) as box:
                self._serve(name, box, luck)
                await box.listen(f"memory://{name}")
                async with Mesh(
                    box,
                    [f"memory://{each}" for each in self.seeds[name]],
                    role="interior",
                    zone=f"z{int(name[1:]) % 3}",
                    rules=RULES,
                    urls=None if self.dials else (),
                    direct=name in self.direct,
                    clock=host.clock,
                ) as mesh:
                    self.boxes[name], self.meshes[name] = box, mesh
                    self.leaving.discard(name)
                    self._watch(mesh)
                    try:
                        await box.serve()
                    finally:
                        del self.boxes[name]
                del self.meshes[name]
            self.net.trace.add(f"{name} has left")
            await trio.sleep(1)

    async def edge(self, host: SimulatedHost) -> None:
        """Run an edge."""
        name = host.name
        luck = self.net.luck(f"{name} {host.life}")
        async with Container(name, network=host.network, limits=LIMITS, drain_s=3.0) as box:
            box.node("far", slots=luck.choice([1, 4]))(self._handler(name, "far", luck))
            box.rpc("far-price")(self._price(name, "far-price"))
            async with Mesh(
                box,
                [f"memory://{each}" for each in EDGES[name]],
                role="edge",
                rules=RULES,
                clock=host.clock,
            ) as mesh:
                self.edges[name] = mesh
                try:
                    await box.serve()
                finally:
                    del self.edges[name]

    def _serve(self, name: str, box: Container, luck: Random) -> None:
        at = NODES.index(name)
        for address, places in SERVED.items():
            if at not in places:
                continue
            if address == "ticks":
                box.source(address)(self._ticks())
            elif address == "price":
                box.rpc(address)(self._price(name, "price"))
            elif address == "rows":
                box.rpc(address)(self._rows())
            else:
                slots = luck.choice([1, 2, 8])
                box.node(address, slots=slots)(self._handler(name, address, luck))

    def _handler(self, node: str, address: str, luck: Random) -> Callable[..., Awaitable[None]]:
        books = self.books
        fails = address in ("work", "near", "pinned", "far")

        async def take(body: bytes) -> None:
            books.on_begin(node, address, body, ordered=address == "row" and self.harmless)
            await trio.sleep(luck.choice([0.0, 0.001, 0.02, 0.3]))
            if fails and luck.random() < 0.1:
                kind, error = luck.choice(
                    [
                        (Released, Release()),
                        (Rejected, Reject("no", condition="amqp:not-allowed")),
                        (Modified, Modify(failed=True)),
                    ]
                )
                books.returned[body, kind] += 1
                raise error
            books.handled[body, node] += 1

        return take

    @staticmethod
    def _ticks() -> Callable[[], AsyncIterator[int]]:
        async def ticks() -> AsyncIterator[int]:
            number = 0
            while True:
                yield number
                number += 1
                await trio.sleep(0.2)

        return ticks

    def _price(self, node: str, address: str) -> Callable[[str], Awaitable[str]]:
        async def price(sku: str) -> str:
            body = sku.encode()
            self.books.on_begin(node, address, body, ordered=False)
            await trio.sleep(0.01)
            self.books.handled[body, node] += 1
            return f"price of {sku}"

        return price

    @staticmethod
    def _rows() -> Callable[[int], AsyncIterator[str]]:
        async def rows(count: int) -> AsyncIterator[str]:
            for number in range(count):
                yield f"{number} " + "x" * 300

        return rows

    async def drain(self, fault: Drain) -> None:
        """Let a node leave."""
        await self.net.network.stalled(fault.at)
        if self.net.network.is_calm:
            return
        if fault.host in self.boxes:
            self.net.trace.add(f"{fault.host} is to leave")
            self.leaving.add(fault.host)
            self.boxes[fault.host].stop()

    # --- clients -----------------------------------------------------------------------------

    async def connected(
        self, name: str, work: Callable[[Connection, Random], Awaitable[None]]
    ) -> None:
        """Call *work* with connections to entries until the faults have ended."""
        luck = self.net.luck(name)
        while not self.stopping:
            entry = ENTRIES[CLIENTS.index(name[:2]) % len(ENTRIES)]
            try:
                async with self.net.connect(
                    name[:2], f"memory://{entry}", container=name, limits=LIMITS, reconnect=None
                ) as peer:
                    while not self.stopping:
                        await work(peer, luck)
            except (AmqpError, ConnectFailed) as error:
                self.books.unhappy.append(f"{name}: {error!r}")
                await trio.sleep(luck.uniform(0.05, 0.5))

    def producer(
        self, name: str, address: str, *, settled: bool = False, sizes: Sequence[int] = (10, 300)
    ) -> Callable[[Connection, Random], Awaitable[None]]:
        """Return work that sends to *address*, a few messages at a time, and checks their outcomes."""
        books = self.books

        async def work(peer: Connection, luck: Random) -> None:
            async with peer.sender(address, settled=settled) as out:
                while not self.stopping:
                    receipts: list[tuple[bytes, Receipt]] = []
                    for _ in range(luck.randint(1, 6)):
                        size = luck.choice(sizes)
                        body = books.body(name, address, size, settled=settled)
                        # Of both bands, by the number of the message.
                        priority = 4 + len(receipts) % 2
                        receipts.append((body, out.send_nowait(Message(body, priority=priority))))
                    for body, receipt in receipts:
                        try:
                            outcome = await receipt.outcome()
                        except AmqpError as error:
                            books.unhappy.append(f"{_short(body)}: {error!r}")
                        else:
                            if not settled:
                                books.on_outcome(body, outcome)
                    await trio.sleep(luck.uniform(0, 0.4))

        return work

    async def caller(self, peer: Connection, luck: Random) -> None:
        """Call, and read streams."""
        await self._call(peer, luck, peer.new_name("call"), self.books.unhappy)

    async def _call(self, peer: Connection, luck: Random, name: str, unhappy: list[str]) -> None:
        books = self.books
        address = luck.choice(["price", "price", "far-price"])
        body = books.body(name, address, 0, settled=False)
        sku = body.decode()
        try:
            answer = await peer.call(address, sku, reply=str, within=20)
            if answer != f"price of {sku}":
                books.fail(f"{sku!r} was answered with {answer!r}")
        except AmqpError as error:
            unhappy.append(f"call {sku}: {error!r}")
        if luck.random() < 0.3:
            got: list[int] = []
            try:
                async with peer.stream("rows", 40, reply=str, credit=5, within=30) as rows:
                    async for row in rows:
                        got.append(int(row.split()[0]))  # noqa: PERF401  # what came before an error counts
                if got != list(range(40)):
                    books.fail(f"a stream ended without an error after {got}")
            except AmqpError as error:
                unhappy.append(f"stream: {error!r}")
            if got != list(range(len(got))):
                books.fail(f"rows of a stream are missing or doubled: {got}")
        await trio.sleep(luck.uniform(0.1, 0.6))

    async def member_calls(self) -> None:
        """Call from members themselves, edges among them."""
        luck = self.net.luck("member calls")
        while not self.stopping:
            member = self.meshes.get(name := luck.choice(PLACES)) or self.edges.get(name)
            if member is None or (name in NODES and name not in self.boxes):
                await trio.sleep(0.1)
                continue
            unhappy: list[str] = []
            try:
                async with member._container.local() as peer:
                    await self._call(peer, luck, "member", unhappy)
            except AmqpError as error:
                unhappy.append(f"member: {error!r}")
            if name not in self.leaving:
                # A program that stops its container cannot begin anything new with it.
                self.books.unhappy += unhappy

    async def reader(self, peer: Connection, luck: Random) -> None:
        """Read ticks, whose numbers have no gaps while the link stands."""
        async with peer.receiver("ticks", credit=3) as inbox:
            expected = 0
            while not self.stopping:
                delivery = await inbox.get(within=5)
                if delivery is None:
                    continue
                if delivery.body != expected:
                    self.books.fail(f"tick {delivery.body} came instead of {expected}")
                expected = delivery.body + 1
                delivery.accept()

    # --- what must hold ------------------------------------------------------------------------

    def _watch(self, mesh: Mesh) -> None:
        """Note which nodes the links of routes pass."""
        host = mesh._host
        node = host._ways.node
        hop = host._hop

        def watched(connection: Any, member: Any, link: Any, value: Any) -> None:
            if read_leg(link.properties).band != PINNED:
                seen = self.visited.setdefault(link.name, set())
                if node in seen:
                    self.books.fail(f"link {link.name!r} has passed {node} twice")
                seen.add(node)
            hop(connection, member, link, value)

        host._hop = watched  # type: ignore[method-assign]

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Keep a list of all joined links within the block."""
        made = self.splices

        class WatchedSplice(Splice):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                made.add(self)

        class WatchedMulticast(Multicast):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                made.add(self)

        with (
            patch.object(transit, "Splice", WatchedSplice),
            patch.object(transit, "Multicast", WatchedMulticast),
            patch.object(routed, "IDLE_S", IDLE_S),
            patch.object(routed, "KIND_IDLE_S", IDLE_S),
        ):
            yield

    async def check_always(self) -> None:
        """Check all nodes again and again, until cancelled."""
        while True:
            await trio.sleep(_CHECK_S)
            self.check_now()

    def check_now(self) -> None:
        """Check what holds at every moment between two steps of a task."""
        for splice in self.splices:
            if isinstance(splice, Splice):
                _check_splice(splice)
        for name, mesh in (*self.meshes.items(), *self.edges.items()):
            for (address, _), each in mesh._host._routed.items():
                _check_fan(f"{address} at {name}", each.fan)

    def unequal(self) -> str:
        """Return how the nodes differ; empty if they all know the same."""
        if len(self.boxes) < len(NODES):
            return f"only {sorted(self.boxes)} run"
        known: dict[str, Any] = {}
        for name in NODES:
            engine = self.meshes[name]._engine
            database = engine.database
            if len(engine.paths().costs) != len(NODES):
                return f"{name} reaches {sorted(engine.paths().costs)}"
            known[name] = (
                database.digest,
                database.versions(),
                {each: dict(database.claims[each]) for each in NODES},
                {each: dict(database.directory.of(each)) for each in NODES},
            )
            up = {
                n for n, line in engine.lines.items() if line.state.value == "up" and not line.edge
            }
            if up != set(database.claims[name]) or up != self._neighbours(name):
                return f"{name} has lines to {sorted(up)}, connections to {self._neighbours(name)}"
        for name in NODES[1:]:
            for at, what in enumerate(("digests", "versions", "links", "addresses")):
                if known[name][at] != known[NODES[0]][at]:
                    return f"{NODES[0]} and {name} differ in {what}"
        for address, places in SERVED.items():
            for name in NODES:
                found = {each.node for each in self.meshes[name].instances(address)}
                if found != {NODES[at] for at in places}:
                    return f"{name} finds {address} at {sorted(found)}"
        uplinks = {mesh._engine.uplink for mesh in self.edges.values() if mesh.joined}
        for address in SERVED_BY_EDGES:
            for name in NODES:
                found = {each.node for each in self.meshes[name].instances(address)}
                if found != uplinks or len(self.edges) < len(EDGES):
                    return f"{name} finds {address} at {sorted(found)}, edges use {uplinks}"
        return ""

    def _neighbours(self, name: str) -> set[str]:
        found = self.meshes[name]._host._ways.neighbours
        return {node for node, each in found.items() if node != name and not each.edge}

    def leaks(self) -> str:
        """Return what is left of links; empty if it is nothing."""
        for name, mesh in (*self.meshes.items(), *self.edges.items()):
            host = mesh._host
            counts = {
                "hops": host.hops,
                "placed": host.placed,
                "routed": len(host._routed),
                "trees": len(host._trees),
                "seeking": host.pinned.seeking,
                "joined": len(host.pinned),
                "clients": len(host._clients),
                "direct": len(host._ways.direct) + len(host._ways.returns),
            }
            for neighbour in host._ways.neighbours.values():
                counts[f"opened to {neighbour.node}"] = neighbour.opened
                counts[f"accepted of {neighbour.node}"] = neighbour.accepted
                counts[f"pinned to {neighbour.node}"] = len(neighbour._pinned)
                if neighbour.node != name:
                    engine: Any = neighbour.connection.engine
                    links = [
                        link
                        for session in engine.sessions.values()
                        for link in session.links.values()
                    ]
                    counts[f"links with {neighbour.node}: {[_address(each) for each in links]}"] = (
                        len(links) - 2
                    )
            left = {what: count for what, count in counts.items() if count}
            if left:
                return f"{name}: {left}"
        return ""


def _address(link: Any) -> str:
    terminus = link.target if link.target is not None and link.target.address else link.source
    return f"{terminus.address}"


def _check_splice(splice: Splice) -> None:
    inlet, outlet = splice.inlet, splice.outlet
    if not (inlet.attached and outlet.attached):
        return
    passing = splice._passing
    if inlet.credit > max(0, outlet.credit - len(passing.waiting)):
        raise Broken(
            f"a hop gives credit of {inlet.credit} with {outlet.credit} beyond, {len(passing.waiting)} wait"
        )
    held = sum(passing._cost(each) for each in passing.waiting)
    if held != passing.held:
        raise Broken(f"a hop counts {passing.held} octets that wait, and has {held}")


def _check_fan(name: str, fan: Fan) -> None:
    waiting = [each for some in fan._waiting.values() for each in some] + list(fan._again)
    held = sum(
        fan._limits.frame_size_max if each.delivery.streamed else len(each.delivery.payload)
        for each in waiting
    )
    if held != fan._held:
        raise Broken(f"{name}: {fan._held} octets are counted, {held} wait")
    counted = sum(not each.relayed and not each.tried for each in waiting)
    if counted != fan.slots.held:
        raise Broken(f"{name}: {fan.slots.held} messages are counted, {counted} wait")
    for kind, some in fan._waiting.items():
        if some and fan._choose(kind, some[0].tried) is not None and not some[0].delivery.aborted:
            raise Broken(f"{name}: a message waits while a leg has credit")
    slots = fan.slots
    free = slots.slots - slots.held - slots._outstanding
    if free > 0 and slots._waiting:
        raise Broken(f"{name}: {len(slots._waiting)} senders wait with {free} free")
    granted = sum(link.credit for link in slots._granted)
    if granted > slots.slots:
        raise Broken(f"{name}: credit of {granted} is granted, {slots.slots} are there")
    for leg in fan.legs:
        if leg.standing.outstanding < 0:
            raise Broken(f"{name}: a leg has {leg.standing.outstanding} messages under way")


async def chaos(net: Simulation) -> None:
    """Let clients use a mesh while faults happen; then check that all recovers and nothing is left."""
    world = MeshWorld(net)
    with world.probed():
        await _chaos(net, world)


async def _chaos(net: Simulation, world: MeshWorld) -> None:
    books = world.books
    for name in NODES:
        net.start(name, world.node)
    for name in EDGES:
        net.start(name, world.edge)
    async with trio.open_nursery() as everybody:
        everybody.start_soon(world.check_always)
        for fault in net.faults:
            if isinstance(fault, Drain):
                everybody.start_soon(world.drain, fault)
        await trio.sleep(1.5)
        with trio.move_on_after(FAULTS_S + SENT_S + 30) as limit:
            async with trio.open_nursery() as clients:
                producers: list[tuple[str, str, dict[str, Any]]] = [
                    ("c0-work", "work", {}),
                    ("c1-work", "work", {"sizes": (10, 300, 9_000)}),
                    ("c2-work", "work", {"sizes": (10, STREAM_ABOVE + 1_000)}),
                    ("c1-fire", "fire", {"settled": True}),
                    ("c2-near", "near", {}),
                    ("c0-row", "row", {}),
                    ("c1-row", "row", {}),
                    ("c0-news", "news", {}),
                    ("c2-news", "news", {"sizes": (10, 6_000)}),
                    ("c2-far", "far", {}),
                    ("c3-far", "far", {"sizes": (10, 9_000)}),
                    ("c3-pinned", "pinned", {}),
                    ("c0-pinned", "pinned", {"sizes": (10, 9_000)}),
                ]
                for name, address, options in producers:
                    clients.start_soon(
                        world.connected, name, world.producer(name, address, **options)
                    )
                clients.start_soon(world.connected, "c3-call", world.caller)
                clients.start_soon(world.connected, "c1-call", world.caller)
                clients.start_soon(world.connected, "c2-ticks", world.reader)
                clients.start_soon(world.connected, "c3-ticks", world.reader)
                clients.start_soon(world.member_calls)
                await trio.sleep(FAULTS_S)
                net.calm()
                world.stopping = True
        if limit.cancelled_caught:
            books.check()
            raise Broken("clients still wait for outcomes a minute after the last fault")
        unhappy = [
            each
            for each in books.unhappy
            if not world.drained or not any(address in each for address in _PINNED)
        ]
        if world.harmless and unhappy:
            raise Broken("without faults: " + "\n".join(unhappy[:10]))
        await _settle(world.unequal, EQUAL_S)
        await _settle(world.leaks, IDLE_S + 20)
        await _use(world)
        world.check_now()
        books.check()
        everybody.cancel_scope.cancel()


async def _settle(difference: Callable[[], str], seconds: float) -> None:
    """Wait until there is no difference.

    Raises:
        Broken: There is one for too long.
    """
    until = trio.current_time() + seconds
    while found := difference():
        if trio.current_time() > until:
            raise Broken(f"{seconds:g} s after the last fault: {found}")
        await trio.sleep(0.25)


async def _use(world: MeshWorld) -> None:
    """Call every address that answers, from every node and edge."""
    for name, mesh in (*world.meshes.items(), *world.edges.items()):
        for address in ("price", "far-price"):
            sku = world.books.body(f"last-{name}", address, 0, settled=False).decode()
            answer = await mesh.call(address, sku, reply=str, within=5)
            if answer != f"price of {sku}":
                raise Broken(f"{sku!r} was answered with {answer!r}")
