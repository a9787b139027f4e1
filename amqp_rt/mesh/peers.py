"""Neighbours of a member: who is dialled, which connections stay, and the records that pass over them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import trio
from msgspec import Struct

from ..addresses import host_in
from ..container.connections import Connection
from ..container.container import Container
from ..container.links import MESH_MEMBER
from ..errors import LocalProtocolError
from ..events import Peer
from ..limits import Limits
from ..net.endpoints import is_loopback
from ..outcomes import Error
from ..security.access import Rights
from ..values import Symbol
from .adjacency import LineState
from .dialling import DUPLICATE, Dial, Dialling, is_loopback_url
from .discovery import Discovery
from .host import MeshHost
from .neighbours import MESH, Neighbour
from .records import COST_MAX, NUMBER_MAX
from .routing import Effect, Leave, LineChanged, RoutesChanged, RoutingEngine, Send
from .ways import Ways

log = logging.getLogger("amqp_rt.mesh")

VERSION: Final = 1
#: Entry of an error: the incarnation of a node with the same id as the peer.
_INCARNATION: Final = Symbol("x-opt-mesh-incarnation")
_ROLES: Final = ("interior", "edge")
_DUPLICATE: Final = Error(
    "amqp:connection:forced", "another connection of the two members stays", {DUPLICATE: True}
)


class MeshMember(Struct, frozen=True):
    """Member, as its open names it."""

    mesh: str
    node: str
    incarnation: int
    role: str
    zone: str
    cost: int
    #: Id of the node for which the connection is meant, if it is for links that end at one of the two nodes: the routing
    #: has no line of it. Empty for others.
    direct: str = ""


def member_of(properties: Mapping[object, object]) -> MeshMember | None:
    """Return the member that an open names; None if it names none, or is malformed."""
    value = properties.get(MESH_MEMBER)
    if not isinstance(value, dict):
        return None
    versions = value.get("versions")
    texts = [value.get(name) for name in ("mesh", "node", "role", "zone")]
    incarnation, cost = value.get("incarnation"), value.get("cost", 1)
    if not isinstance(versions, list) or VERSION not in versions:
        return None
    if not all(isinstance(each, str) and len(each) <= 255 for each in texts):
        return None
    if type(incarnation) is bool or not isinstance(incarnation, int):
        return None
    if not isinstance(cost, int) or not (0 < incarnation < NUMBER_MAX and 1 <= cost <= COST_MAX):
        return None
    mesh, node, role, zone = (str(each) for each in texts)
    if not node or "/" in node:
        return None
    direct = value.get("direct", "")
    if not isinstance(direct, str) or len(direct) > 255:
        return None
    return MeshMember(mesh, node, int(incarnation), role, zone, int(cost), str(direct))


class Peers:
    """Connections of this member to others, and the routing that follows from them.

    Args:
        container: The container.
        engine: The routing of this member.
        ways: Gets the neighbours.
        host: Gets the members that are connected, and changes of routes.
        member: What our open says.
        seeds: Seeds of other members.
        dial: Opens a connection.
        on_left: Called with a reason if the member has to leave the mesh.
    """

    def __init__(
        self,
        container: Container,
        engine: RoutingEngine,
        ways: Ways,
        host: MeshHost,
        member: MeshMember,
        *,
        discovery: Discovery,
        dial: Dial,
        on_left: Callable[[str], None],
    ) -> None:
        self._container = container
        self._engine = engine
        self._ways = ways
        self._host = host
        self._member = member
        self._discovery = discovery
        self.dialling = Dialling(
            *(engine, ways, discovery, dial),
            zone=member.zone,
            is_member=self._is_member,
            take_refusal=lambda connection: self._refusals.pop(connection, None),
        )
        self._on_left = on_left
        self._effects: deque[Effect] = deque()
        self._carrying_out = False
        self._woken = trio.Event()
        self._changed = trio.Event()
        #: Why a connection that named the mesh was not used, by its reason.
        self.refused: dict[str, int] = {}
        self.stopping = False
        #: Connections that are or were lines to members.
        self._joined: set[Connection] = set()
        #: Connections that we have dialled and whose member does not use them, until that is logged.
        self._refusals: dict[Connection, Error] = {}
        #: Members whose lines have been in another state than lost.
        self._heard: set[str] = set()

    # --- connections -----------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Use *connection*, which another container has opened, if that is a member."""
        connection.on_state = self.changed

    def changed(self, connection: Connection) -> None:
        """Follow the state of a connection: links of records may arrive together with the open."""
        self._follow(connection)

    def direct_changed(self, node: str, connection: Connection) -> None:
        """Follow the state of a connection that this node has opened as a direct one to *node*."""
        self._follow(connection, direct=node)

    def _follow(self, connection: Connection, *, direct: str = "") -> None:
        if connection.state == "open":
            self._join(connection, direct=direct)
        elif connection.state == "closed":
            self._learn_of_namesake(connection)
            self._ended(connection)

    def channel_max_for(self, peer: Peer) -> int | None:
        """Return the highest channel number for *peer*, if that is a member that has logged in; None for others.

        Each session of a client whose links are pinned has one of its own on each connection of their path.
        """
        member = member_of(peer.properties)
        if member is None or peer.user != member.node:
            return None
        if self._reason_to_refuse(peer, member, dialled=False):
            return None
        return channel_max_of(self._ways.limits)

    def neighbour(self, node: str) -> Neighbour | None:
        """Return the neighbour of that id; None without one."""
        return self._ways.neighbours.get(node)

    def _join(self, connection: Connection, *, direct: str) -> None:
        """Begin the line of *connection*, if a member is at its other end; *direct* names the one for which it is."""
        peer = connection.peer
        member = member_of(peer.properties)
        if member is None:
            return
        if member.node == self._ways.node:
            self._meet_self(connection, member)
            return
        why = self._reason_to_refuse(peer, member, dialled=connection.dialled)
        if why:
            self.refused[why] = self.refused.get(why, 0) + 1
            if not connection.dialled:
                self._host.refused_members[connection] = why
            # The peer may dial again and again, and chooses its id.
            text = self._container.log_limiter.admit(("mesh member", why), trio.current_time())
            if text is not None:
                log.warning(
                    "mesh: the connection with %.100r is not used: %s%s", member.node, why, text
                )
            return
        if direct or member.direct:
            meant, answers = direct, member.node
            if not connection.dialled:
                meant, answers = member.direct, self._ways.node
            if meant == answers:
                self._join_direct(connection, member)
            else:
                # Another member than the one meant has answered. A connection that the two have already stays.
                connection.close(_DUPLICATE)
            return
        old = self._ways.neighbours.get(member.node)
        if old is not None and old.usable:
            newer = old.incarnation != member.incarnation
            # Both ends come to the same result: the connection that the lower id has dialled stays.
            low_dialled = connection.dialled == (self._ways.node < member.node)
            if not newer and (old.connection.dialled == connection.dialled or not low_dialled):
                connection.close(_DUPLICATE)
                return
            self._drop(old, _replaced_by(member) if newer else _DUPLICATE)
        neighbour = Neighbour(
            member.node,
            member.incarnation,
            connection,
            edge=member.role == "edge",
            limits=self._ways.limits,
            on_lost=self._lose,
        )
        self._ways.neighbours[member.node] = neighbour
        self._host.members[connection.engine] = neighbour
        self._joined.add(connection)
        try:
            neighbour.start()
        except LocalProtocolError as fault:
            self._lose(neighbour, fault.description)
            return
        cost = max(member.cost, self._member.cost)
        self._carry_out(
            self._engine.connect(
                member.node,
                member.incarnation,
                now=trio.current_time(),
                cost=cost,
                edge=neighbour.edge,
            )
        )

    def _join_direct(self, connection: Connection, member: MeshMember) -> None:
        """Use a direct connection, in place of an older one."""
        known = self._ways.direct if connection.dialled else self._ways.returns
        old = known.get(member.node)
        if old is not None:
            self._drop(old, _DUPLICATE)
        neighbour = Neighbour(
            *(member.node, member.incarnation, connection),
            direct=True,
            limits=self._ways.limits,
            on_lost=self._lose,
        )
        known[member.node] = self._host.members[connection.engine] = neighbour
        # Links that take a longer way move to this one.
        self._host.routes_changed()

    def _is_member(self, connection: Connection) -> str | None:
        """Return the id of the member that was dialled; None if it is none of this mesh."""
        member = member_of(connection.peer.properties)
        return member.node if member is not None and member.mesh == self._member.mesh else None

    def _meet_self(self, connection: Connection, member: MeshMember) -> None:
        """Close a connection with ourselves; of two nodes with one id, the routing decides which leaves."""
        if member.incarnation != self._member.incarnation and member.mesh == self._member.mesh:
            self._carry_out(
                self._engine.connect(member.node, member.incarnation, now=trio.current_time())
            )
        connection.close(_DUPLICATE)

    def _reason_to_refuse(self, peer: Peer, member: MeshMember, *, dialled: bool) -> str:
        if self.stopping:
            return "this member leaves"
        if member.mesh != self._member.mesh:
            return "it is of another mesh"
        if member.role not in _ROLES:
            return "its role is not known"
        if self._engine.edge and (member.role == "edge" or not dialled):
            return self._reason_of_edge(member)
        if member.role == "edge" and member.node in self._engine.paths().costs:
            return "an interior node has its id"
        local = is_loopback_url(peer.address) if dialled else _is_local(peer.address)
        if not (peer.secure or local):
            return "the connection is not encrypted"
        if dialled:
            # Its certificate was verified.
            return ""
        permissions = self._container.permissions
        if local and not permissions.guarded:
            # A container without rules trusts its machine.
            return ""
        if peer.user is None:
            return "it has not logged in"
        if peer.user != member.node:
            return "it has logged in under another name than its id"
        wanted = Rights.SEND if member.role == "edge" else Rights.MANAGE
        # What ``authorize`` alone decides is not known here, and may take its time.
        asked_only = permissions.access is None and peer.tokens is None and permissions.guarded
        if asked_only or permissions.decide(peer, wanted, MESH) is not None:
            return "it may not join"
        if member.direct and (
            member.role == "edge" or member.node not in self._engine.paths().costs
        ):
            return "direct connections are for nodes within reach"
        return ""

    def _reason_of_edge(self, member: MeshMember) -> str:
        """Return why this edge does not use *member*, in words for both ends, which log it."""
        how = "with --mesh-role interior, or role='interior' in a program"
        if member.role == "edge":
            return f"both members are edges, which need an interior member: start one of them {how}"
        here = f"{self._ways.node!r:.100}"
        return f"{here} is an edge, which dials interior members and is not dialled: start {here} {how}"

    def _lose(self, neighbour: Neighbour, why: str) -> None:
        """Disconnect *neighbour*, which is of no use any more."""
        connection = neighbour.connection
        if neighbour.refusal is not None and connection.dialled:
            # The task that has dialled the neighbour logs it, once.
            self._refusals[connection] = neighbour.refusal
        elif not connection.engine_over:
            log.info("mesh: the connection with %.100r is closed: %s", neighbour.node, why)
        self._drop(neighbour, Error("amqp:connection:forced", why))

    def _drop(self, neighbour: Neighbour, error: Error) -> None:
        node = neighbour.node
        for direct in (self._ways.direct, self._ways.returns):
            if direct.get(node) is neighbour:
                del direct[node]
                self._host.routes_changed()
        if self._ways.neighbours.get(node) is neighbour:
            del self._ways.neighbours[node]
            self._carry_out(self._engine.disconnect(node, now=trio.current_time()))
        for engine, each in list(self._host.members.items()):
            if each is neighbour:
                del self._host.members[engine]
        neighbour.connection.close(error)
        self.dialling.look()

    def _learn_of_namesake(self, connection: Connection) -> None:
        """Leave if a neighbour has closed *connection* for another node with our id, whose incarnation is higher."""
        error = connection.ended_with
        if connection not in self._joined:
            # A client that only claims to be a member.
            return
        self._joined.discard(connection)
        if error is None:
            return
        other = (error.info or {}).get(_INCARNATION)
        if isinstance(other, int) and other > self._member.incarnation:
            self._on_left(f"another node of the mesh has the id {self._ways.node!r} as well")

    def _ended(self, connection: Connection) -> None:
        """Forget the member of *connection*, which has ended."""
        self._host.refused_members.pop(connection, None)
        for each in list(self._host.members.values()):
            if each.connection is connection:
                self._drop(each, Error("amqp:connection:forced"))

    # --- records and effects -----------------------------------------------------------------------

    def record(self, neighbour: Neighbour, data: bytes) -> None:
        """Handle a record of *neighbour*."""
        if self._ways.neighbours.get(neighbour.node) is neighbour:
            self.carry_out(self._engine.receive(neighbour.node, data, now=trio.current_time()))

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what the routing asks for."""
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        # Carrying out can end connections, which has effects in turn.
        self._effects.extend(effects)
        if not self._carrying_out:
            self._carrying_out = True
            try:
                while self._effects:
                    self._do(self._effects.popleft())
            finally:
                self._carrying_out = False
        self._woken.set()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            neighbour = self._ways.neighbours.get(effect.peer)
            if neighbour is not None:
                neighbour.send(effect.data)
        elif isinstance(effect, LineChanged):
            lost = effect.state is LineState.LOST
            # The end of a line over which nothing came is no news.
            news = not lost or effect.peer in self._heard
            (self._heard.discard if lost else self._heard.add)(effect.peer)
            log.log(
                logging.INFO if news else logging.DEBUG,
                "mesh %s: the line to %.100r is %s",
                self._ways.node,
                effect.peer,
                effect.state.value,
            )
            self._notify()
            neighbour = self._ways.neighbours.get(effect.peer)
            if lost and neighbour is not None:
                self._lose(neighbour, "the line is lost")
        elif isinstance(effect, RoutesChanged):
            self._host.routes_changed()
            self._notify()
            self.dialling.look()
        else:
            assert isinstance(effect, Leave)
            self._on_left(effect.reason)

    async def wait_changed(self) -> None:
        """Wait until lines or routes have changed."""
        await self._changed.wait()

    def _notify(self) -> None:
        # Each waiting task has the event of the time at which it began to wait.
        self._changed.set()
        self._changed = trio.Event()

    # --- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the routing and dial others, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            nursery.start_soon(self._discovery.run)
            nursery.start_soon(self.dialling.run, lambda: self.stopping)

    async def _tick(self) -> None:
        while True:
            self._woken = trio.Event()
            now = trio.current_time()
            if now >= self._engine.deadline:
                heard = {node: each.heard_at for node, each in self._ways.neighbours.items()}
                self._carry_out(self._engine.tick(now, heard))
                self._woken = trio.Event()
                await trio.lowlevel.checkpoint()
            with trio.move_on_at(self._engine.deadline):
                await self._woken.wait()


def _replaced_by(member: MeshMember) -> Error:
    """Return the error for the older connection of an id: a node that lives on has a namesake."""
    return Error(
        "amqp:not-allowed",
        f"another node has the id {member.node!r:.100}",
        {_INCARNATION: member.incarnation},
    )


def open_properties(member: MeshMember) -> dict[object, Any]:
    """Return the properties of our open."""
    return {
        MESH_MEMBER: {
            "versions": [VERSION],
            "mesh": member.mesh,
            "node": member.node,
            "incarnation": member.incarnation,
            "role": member.role,
            "zone": member.zone,
            "cost": member.cost,
            **({"direct": member.direct} if member.direct else {}),
        }
    }


def channel_max_of(limits: Limits) -> int:
    """Return the highest channel number on connections with members."""
    return max(limits.channel_max, limits.mesh_channel_max)


def _is_local(address: str) -> bool:
    if address in ("local", "unix") or address.startswith("memory"):
        return True
    try:
        return is_loopback(host_in(address))
    except ValueError:
        return False
