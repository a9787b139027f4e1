"""Membership of a container in a mesh."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from ipaddress import ip_address
from random import SystemRandom
from typing import Any, Final, Literal, Self

import trio
from msgspec.structs import replace

from ..addresses import Pattern, parse_url
from ..clock import Clock, SystemClock
from ..container.blocks import TrioBlock
from ..container.connections import Connection
from ..container.container import Container
from ..container.local import local
from ..container.replies import accept_failed
from ..errors import AmqpError
from ..net.tls import with_name
from ..security.access import Rights
from .adjacency import LOST_S
from .bridges import Bridge, check_together
from .bridging import Bridges
from .dialling import is_loopback_url
from .direct import DirectLines
from .discovery import Discovery, Found, Seed
from .health import Alive, Health
from .host import AbsentHost, MeshHost
from .instances import MeshInstance, instance_of
from .managing import MeshStatus, managed
from .neighbours import Neighbour
from .offering import OwnOffers
from .peers import MeshMember, Peers, channel_max_of, open_properties
from .records import NUMBER_MAX, PATTERN, Offer, check_offer
from .routing import Effect, RoutingEngine
from .rules import MeshRule, MeshRules
from .statistics import MeshStats
from .ways import Ways

log = logging.getLogger("amqp_rt.mesh")

#: Seconds for one attempt to connect with a member.
_DIALLED_WITHIN_S: Final = 5.0
#: Seconds for which a node that drains waits for its edges to use other uplinks.
_EDGES_LEAVE_S: Final = 2.0
#: Seconds between two looks at whether a drain is complete.
_DRAIN_LOOK_S: Final = 0.02


class MeshError(AmqpError):
    """The container has to leave the mesh, for example because another member has its id."""

    default_condition = "amqp:not-allowed"


class Mesh(TrioBlock):
    """Membership of a container in a mesh of containers.

    Addresses that any member offers can be used at each of them, by its clients and by its own code. Leaving the block
    withdraws the addresses of the container, lets what is under way be answered, and disconnects.

    Args:
        container: The container; its name is the id of the node, and has no ``/``.
        seeds: Where other members listen; see :mod:`amqp_rt.mesh.discovery`.
        name: Name of the mesh.
        role: ``interior`` nodes pass on links of others. ``edge``: the node uses others only. By default that of a
            container which listens on other interfaces than loopback is ``interior``.
        zone: Zone of the node, which is preferred.
        offer: Addresses to offer, by default those of the container's nodes, and of the queues, topics and logs of its
            broker, if it has one: of the default virtual host, but for dynamic and exclusive ones. Such a node also offers to
            coordinate transactions, as ``$coordinator``.
        rules: Rules for addresses; the first that matches holds.
        urls: Where others can dial this node, by default where it listens.
        cost: Cost of the connections of this node.
        direct: Connect with destinations in use, so that links to them pass no other node: up to ``mesh_direct_max``, which
            other nodes do not learn of. For interior nodes, and for destinations that say where they listen.
        bridges: Bridges to brokers outside of the mesh; of an interior node only.
        dial: Options of :func:`amqp_rt.connect` for connections to other members, such as ``auth`` and ``tls``.
        clock: Its wall time numbers the starts of this node; by default the clock of the system.

    Raises:
        ValueError: An argument cannot be used.
    """

    _public_name = "Mesh"

    def __init__(
        self,
        container: Container,
        seeds: Sequence[Seed] = (),
        *,
        name: str = "mesh",
        role: Literal["auto", "interior", "edge"] = "auto",
        zone: str = "",
        offer: Mapping[str, Offer] | None = None,
        rules: Iterable[MeshRule] = (),
        urls: Sequence[str] | None = None,
        cost: int = 1,
        direct: bool = False,
        bridges: Sequence[Bridge] = (),
        dial: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        if not container.name or "/" in container.name:
            raise ValueError(
                f"the container-id {container.name!r} is no id of a node: no '/' in it"
            )
        if role not in ("auto", "interior", "edge"):
            raise ValueError(f"role is auto, interior or edge, not {role!r}")
        self._container = container
        self._name = name
        self._role = role
        self._zone = zone
        for address, each in (offer or {}).items():
            check_offer(address, each, container.limits)
        self._offer = offer
        self._rules = MeshRules(rules)
        self._urls = urls
        self._cost = cost
        self._direct = direct
        check_together(bridges)
        self._bridged = tuple(bridges)
        if role == "edge":
            self._refuse_for_edges()
        self._options = dict(dial or {})
        self._clock = clock or SystemClock()
        self._failure: MeshError | None = None
        #: Names among the seeds stand for no places until they are resolved.
        self._seeded = bool(seeds)
        self._discovery = Discovery(seeds, self._look, container.log_limiter)
        self._peers: Peers | None = None
        self._health = Health(self._health_changed)
        self._engine: RoutingEngine
        self._host: MeshHost
        self._bridges: Bridges
        self._status: MeshStatus
        self._local: Connection
        self._scope = trio.CancelScope()

    def _look(self) -> None:
        if self._peers is not None:
            self._peers.dialling.look()

    # --- lifetime --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Self]:
        container = self._container
        incarnation = SystemRandom().randrange(1, NUMBER_MAX)
        listened = list(container.entry.urls)
        role = self._role_with(listened)
        urls = tuple(_dialable(listened) if self._urls is None else self._urls)
        engine = self._engine = RoutingEngine(
            container.name,
            incarnation,
            wall_s=int(self._clock.wall()),
            now=trio.current_time(),
            edge=role == "edge",
            zone=self._zone,
            urls=urls,
            limits=container.limits,
            admit=self._admit,
            admit_edge=self._admit_edge,
        )
        ways = Ways(engine, container.limits)
        host = self._host = MeshHost(
            *(container, ways, self._rules),
            zone=self._zone,
            on_record=self._on_record,
            carry_out=self._carry_out,
        )
        last = AbsentHost(host)
        member = MeshMember(self._name, container.name, incarnation, role, self._zone, self._cost)
        properties = open_properties(member)
        peers = self._peers = Peers(
            container,
            engine,
            ways,
            host,
            member,
            discovery=self._discovery,
            dial=lambda found: self._dial(found, properties, self._changed),
            on_left=self._leave,
        )
        status = self._status = MeshStatus(
            member,
            engine=engine,
            ways=ways,
            host=host,
            peers=peers,
            joined=lambda: self.joined,
            drain=self.drain,
            now=trio.current_time,
        )
        failure: BaseException | None = None
        async with self._connect_home() as own, trio.open_nursery() as nursery:
            self._local = own
            home = Neighbour(container.name, incarnation, own, limits=container.limits)
            ways.neighbours[container.name] = home
            (accepted,) = [
                each
                for each in container.connections
                if each.peer.trusted and each.peer.container_id == container.name
            ][-1:]
            host.members[accepted.engine] = home
            bridges = self._bridges = Bridges(
                self._bridged, container, own, self._name, self._rules
            )
            host.bridges = bridges
            offers = self._enter(peers, last, properties)
            container.add_host(bridges, first=True)
            nursery.start_soon(offers.run)
            nursery.start_soon(peers.run)
            if self._direct:
                nursery.start_soon(self._direct_lines(member, ways).run, lambda: peers.stopping)
            nursery.start_soon(host.run)
            await nursery.start(self._health.run)
            nursery.start_soon(bridges.run)
            try:
                with self._scope, managed(container, status):
                    yield self
            except BaseException as error:
                # Raised again below: the nursery would wrap the exception in a group.
                failure = error
            try:
                if failure is None and self._failure is None:
                    with trio.move_on_after(container.drain_s) as drain:
                        await self.drain()
                        await self._wait_drained()
                    if drain.cancelled_caught:
                        log.warning("mesh: links of %r were not drained in time", container.name)
            finally:
                peers.stopping = True
                container.remove_host(bridges)
                self._exit(last, offers)
                for each in (
                    *ways.neighbours.values(),
                    *ways.direct.values(),
                    *ways.returns.values(),
                ):
                    if each is not home:
                        each.lose("the member leaves the mesh")
                nursery.cancel_scope.cancel()
        failure = failure or self._failure
        if failure is not None:
            raise failure

    def _role_with(self, listened: Iterable[str]) -> str:
        """Return the role of the node, whose container listens at the URLs *listened*."""
        if self._role != "auto":
            return self._role
        if any(not is_loopback_url(each) for each in listened):
            return "interior"
        self._refuse_for_edges()
        return "edge"

    def _refuse_for_edges(self) -> None:
        """Check that an edge was not given what only interior nodes can do.

        Raises:
            ValueError: It was.
        """
        if self._direct:
            raise ValueError(
                "direct is for interior nodes, and an edge uses its uplink: state role='interior', or leave it out"
            )
        if self._bridged:
            # Links to what a bridge reaches come along routes, and an edge passes on none.
            raise ValueError(
                f"bridge {self._bridged[0].name!r}: an edge has no bridges; state role='interior', or give the bridge to an "
                "interior member"
            )

    def _enter(self, peers: Peers, last: AbsentHost, properties: Mapping[object, Any]) -> OwnOffers:
        """Let the container ask the mesh about connections, links, replies and nodes."""
        container, host = self._container, self._host
        container.entry.open_properties.update(properties)
        container.entry.on_opened = peers.opened
        container.entry.channel_max_for = peers.channel_max_for
        container.attaching.transit = host.transit
        container.replies.prefix = f"$mesh/{container.name}/"
        container.replies.elsewhere = host.reply_path
        container.replies.failed_outcome = host.failed_outcome
        container.add_host(host, first=True)
        container.add_host(last)
        offers = OwnOffers(
            container,
            self._engine,
            self._rules,
            self._offer,
            outside=self._bridges.offers,
            carry_out=peers.carry_out,
        )
        self._bridges.on_change = offers.renew
        offers.start()
        self._host.coordinates = offers.coordinates
        return offers

    def _exit(self, last: AbsentHost, offers: OwnOffers) -> None:
        """Leave the container as it was without a mesh."""
        container = self._container
        container.entry.on_opened = None
        container.entry.channel_max_for = None
        container.entry.open_properties.clear()
        container.attaching.transit = None
        container.replies.prefix = ""
        container.replies.elsewhere = None
        container.replies.failed_outcome = accept_failed
        self._bridges.on_change = None
        offers.stop()
        container.remove_host(self._host)
        container.remove_host(last)

    def _on_record(self, neighbour: Neighbour, data: bytes) -> None:
        assert self._peers is not None
        self._peers.record(neighbour, data)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        assert self._peers is not None
        self._peers.carry_out(effects)

    def _connect_home(self) -> AbstractAsyncContextManager[Connection]:
        """Connect to the container itself, with as many sessions as to another member: each session of a client may need one."""
        limits = self._container.limits
        return local(self._container, limits=replace(limits, channel_max=channel_max_of(limits)))

    def _direct_lines(self, member: MeshMember, ways: Ways) -> DirectLines:
        peers = self._peers
        assert peers is not None

        def dial(node: str, found: Found) -> Any:
            properties = open_properties(replace(member, direct=node))
            changed = partial(peers.direct_changed, node)
            # There are no hellos: a peer that is silent for as long as a lost line is given up by the idle timeout.
            return self._dial(found, properties, changed, idle_s=LOST_S / 2)

        return DirectLines(ways, self._host.link_uses, dial, self._host.routes_changed)

    def _dial(
        self,
        found: Found,
        properties: Mapping[object, Any],
        on_state: Callable[[Connection], None],
        *,
        idle_s: float = 0.0,
    ) -> Any:
        options = {"within": _DIALLED_WITHIN_S, "reconnect": None, **self._options}
        limits = options.get("limits") or self._container.limits
        idle_s = min(filter(None, (limits.idle_timeout_s, idle_s)), default=0.0)
        options["limits"] = replace(
            limits, channel_max=channel_max_of(limits), idle_timeout_s=idle_s
        )
        if found.server_name is not None:
            options["tls"] = with_name(options.get("tls"), found.server_name)
        return self._container.connect(
            str(found.url), properties=properties, on_state=on_state, **options
        )

    def _changed(self, connection: Connection) -> None:
        assert self._peers is not None
        self._peers.changed(connection)

    def _leave(self, reason: str) -> None:
        self._failure = MeshError(reason)
        self._scope.cancel()

    async def drain(self) -> None:
        """Withdraw the addresses of this node: its clients are still served, others send nothing new."""
        assert self._peers is not None
        self._bridges.hold()
        self._peers.carry_out(self._engine.drain(now=trio.current_time()))
        await trio.lowlevel.checkpoint()

    async def _wait_drained(self) -> None:
        """Wait until links of others have ended, and what our clients have sent has been answered."""
        host, bridges = self._host, self._bridges
        # What was pulled is still sent on.
        while bridges.busy:  # noqa: ASYNC110
            await trio.sleep(_DRAIN_LOOK_S)
        # Edges learn of it and go to other uplinks, if they have any.
        with trio.move_on_after(_EDGES_LEAVE_S):
            while host.of_edges:  # noqa: ASYNC110
                await trio.sleep(_DRAIN_LOOK_S)
        host.close()
        # Links of several kinds end, of which only some report it.
        while host.hops or host.busy or host.placed:  # noqa: ASYNC110
            await trio.sleep(_DRAIN_LOOK_S)
        await bridges.close()

    # --- addresses -------------------------------------------------------------------------------

    def health(self, address: str, alive: Alive) -> None:
        """State whether the container's own instance of *address* is alive, or how to find out.

        While it is not, nothing new comes to it: members send to other instances, and what is under way is answered.
        Without another instance, clients wait as without any. Links that its own clients have opened while this node
        alone served the address, without a rule for it, stay.

        Args:
            address: An address of this container, as it was declared.
            alive: True or False; or a function that returns it, at once or when awaited, which is called once a second from
                now on. A function that raises, or takes more than five seconds, counts as False.
        """
        self._health.set(address, alive)

    def _health_changed(self, address: str, alive: bool) -> None:
        assert self._peers is not None
        self._peers.carry_out(
            self._engine.set_health(address, alive=alive, now=trio.current_time())
        )

    def _admit(self, origin: str, address: str, offer: Offer) -> bool:
        # Links to addresses of replies go by the id of a node; no rule gives them.
        return address.startswith("$mesh/") or self._rules.admit(origin, address, offer)

    def _admit_edge(self, edge: str, address: str, offer: Offer) -> bool:
        assert self._peers is not None
        neighbour = self._peers.neighbour(edge)
        if neighbour is None or address.startswith("$"):
            return False
        name = Pattern(address).wild if offer.flags & PATTERN else address
        peer = neighbour.connection.peer
        return self._container.permissions.decide(peer, Rights.LISTEN, name) is None

    # --- use -------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether this node is connected with another member, as an edge with one that has its addresses; without seeds at once."""
        return not self._seeded or self._engine.joined

    async def wait_ready(self) -> None:
        """Wait until this node is connected with another member; a mesh without seeds is ready at once.

        An edge waits until its uplink has its addresses.
        """
        await trio.lowlevel.checkpoint()
        assert self._peers is not None
        while not self.joined:
            await self._peers.wait_changed()

    async def reachable(self, address: str) -> None:
        """Wait until some node within reach serves *address*.

        An edge knows its own addresses only, and asks its uplink by a link to *address*.

        Raises:
            LinkRefused: The uplink does not let this edge use the address.
        """
        await trio.lowlevel.checkpoint()
        assert self._peers is not None
        if self._engine.edge and not self._engine.offers(address):
            await self._host.reach(address)
            return
        while not any(each.offer.weight for each in self._engine.lookup(address)):
            await self._peers.wait_changed()

    def instances(self, address: str) -> list[MeshInstance]:
        """Return the nodes that serve *address*, the nearest first, with their health, load, latencies and outcomes.

        An edge knows its own addresses only.
        """
        legs = self._host.legs_to(address)
        now = trio.current_time()
        return [
            instance_of(each, legs.get(each.node, ()), now) for each in self._engine.lookup(address)
        ]

    def stats(self) -> MeshStats:
        """Return what this node knows of the members, and counts of its links and messages.

        Takes time in proportion to the members, links and messages without an outcome: it is for monitoring, every few seconds.
        """
        return self._status.stats(
            bridges=self._bridges.states(), bridges_refused=self._bridges.refused()
        )

    @property
    def connection(self) -> Connection:
        """Connection to the container itself, whose addresses are those of the whole mesh."""
        return self._local

    async def call(self, address: str, *args: Any, **options: Any) -> Any:
        """Call an address of the mesh; see :meth:`Connection.call`."""
        return await self._local.call(address, *args, **options)

    def sender(self, address: str | None = None, **options: Any) -> Any:
        """Create a sender to an address of the mesh; see :meth:`Connection.sender`."""
        return self._local.sender(address, **options)

    def receiver(self, address: str | None = None, **options: Any) -> Any:
        """Create a receiver from an address of the mesh; see :meth:`Connection.receiver`."""
        return self._local.receiver(address, **options)

    def __repr__(self) -> str:
        return f"<Mesh {self._name!r}, node {self._container.name!r}>"


def _dialable(urls: Iterable[str]) -> list[str]:
    """Return those of *urls* that lead here from elsewhere: a wildcard address does not."""
    return [each for each in urls if not _is_wildcard(parse_url(each, listening=True).host)]


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False
