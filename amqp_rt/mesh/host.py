"""Links of a mesh in a container: those of other members, and those of clients to addresses that other members serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import trio

from ..container.connections import Connection
from ..container.container import Container
from ..container.replies import is_paired
from ..errors import LinkRefused, LocalProtocolError
from ..fronts.base import (
    RECEIVER,
    SENDER,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
)
from ..fronts.hosts import BareHost
from ..outcomes import ACCEPTED, Error, Outcome
from ..security.access import CBS, MANAGEMENT
from ..termini import Coordinator, DeleteOnClose, Source, Target
from ..values import Described
from .bridging import Bridges
from .clients import RemoteClients
from .direct import LinkUse
from .ends import Ends
from .fans import Fan
from .hops import (
    LINKED,
    PINNED,
    ROUTE,
    RouteRefused,
    branches_of,
    read_leg,
    read_route,
)
from .legs import Leg
from .neighbours import MESH, Neighbour
from .passing import FAILED_ANSWER
from .pinned import PinnedLinks
from .placed import LoadReports
from .records import LINK_ROUTED
from .redirects import redirect_to
from .replying import RemoteReplies, RemoteReply
from .routed import Relayed, RoutedAddress
from .routing import Effect, MeshRoute
from .rules import MeshRule, MeshRules
from .tracing import context_writer
from .transit import Transit
from .trees import RoutedTree
from .ways import Ways, node_of

#: Seconds after which senders that do not use their credit are asked to return it, if others have none.
_ROTATE_S: Final = 1.0
#: Routed addresses that are updated, or called, before other tasks get a turn.
_TURN: Final = 64
#: Seconds between two looks at whether the uplink has accepted a link.
_REACH_S: Final = 0.05


class MeshHost(BareHost):
    """Host of the addresses that other members serve.

    Args:
        container: The container.
        ways: The ways from here.
        rules: Rules for addresses.
        zone: Our zone.
        on_record: Called with each record of a neighbour.
        carry_out: Carries out what the routing asks for.
    """

    def __init__(
        self,
        container: Container,
        ways: Ways,
        rules: MeshRules,
        *,
        zone: str,
        on_record: Callable[[Neighbour, bytes], None],
        carry_out: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._container = container
        self._ways = ways
        self._rules = rules
        self._zone = zone
        self._on_record = on_record
        #: Members that are connected, by the engine of their connection.
        self.members: dict[object, Neighbour] = {}
        #: Connections with members that are not used for the mesh → why.
        self.refused_members: dict[Connection, str] = {}
        self._routed: dict[tuple[str, str], RoutedAddress] = {}
        self._trees: dict[RoutedTree, None] = {}
        self.pinned = PinnedLinks(ways, self.wake, self.give_up)
        self._clients = RemoteClients()
        #: Whether the container itself coordinates transactions.
        self.coordinates = False
        #: Bridges of this member.
        self.bridges: Bridges | None = None
        self._remote = RemoteReplies(container.replies, ways)
        self._ends = Ends(
            *(container, ways, rules),
            zone=zone,
            leg_of=self.pinned.leg_of,
            grow=self._keep,
            felled=self._felled,
            carry_out=carry_out,
            on_wait=self.wake,
        )
        #: Links of our edges to addresses of the mesh.
        self._of_edges: list[ReceivingLink | SendingLink] = []
        self._wakeup = trio.Event()
        self._changed = False
        self._transit = Transit(ways)
        #: Addresses without senders whose last legs have not ended.
        self._leaving: list[RoutedAddress] = []
        #: Of what has ended: settled messages that were lost, and copies that slow destinations did not get.
        self._dropped = 0
        self._skipped = 0
        self._reports = LoadReports()
        #: Links refused because of their routes.
        self.refused = 0

    def routed_addresses(self) -> list[RoutedAddress]:
        """Return the addresses to which messages of our clients are routed."""
        return list(self._routed.values())

    def link_uses(self) -> Iterator[LinkUse]:
        """Yield the uses of links of our clients to their destinations."""
        now = trio.current_time()
        for each in self._routed.values():
            for node, path, leg in each.open_legs():
                yield LinkUse(node, path, -math.inf if leg.last is None else leg.last.since)
        for pinned, _ in self.pinned.joined():
            yield LinkUse(pinned.node, pinned.path, now)

    def trees(self) -> list[RoutedTree]:
        """Return the links of our clients whose messages go to several destinations."""
        return list(self._trees)

    # --- links of members ------------------------------------------------------------------------

    def transit(self, connection: Connection, link: ReceivingLink | SendingLink) -> bool:
        """Deal with *link* if it is one of a mesh: a link of records, or one on its way along a route."""
        if self.bridges is not None and self.bridges.is_outside(connection):
            self._refuse(link, Error("amqp:not-allowed", "a bridge opens the links itself"))
            return True
        value = link.properties.get(ROUTE)
        if value is not None:
            member = self.members.get(connection.engine)
            if member is None or member.edge:
                # No node judges the rights of a link that has a route; an edge has those of a client.
                text = "routes are for members of the mesh that are no edges"
                self._refuse(link, Error("amqp:not-allowed", text))
            elif not self._has_room(member):
                self._refuse(link, Error("amqp:resource-limit-exceeded", "mesh_legs_max links"))
            else:
                self._hop(connection, member, link, value)
            return True
        member = self.members.get(connection.engine)
        terminus = link.source if link.role == SENDER else link.target
        if not isinstance(terminus, Source | Target) or terminus.address != MESH:
            if member is not None and member.edge:
                self._clients.carry_from_edge(link, read_leg(link.properties))
            return False
        if member is None or link.role == SENDER:
            why = self.refused_members.get(connection)
            text = why or f"{MESH!r} is for members of the mesh"
            self._refuse(link, Error("amqp:not-allowed", text))
        else:
            member.receive_from(cast("ReceivingLink", link), self._on_record)
        return True

    def _has_room(self, member: Neighbour) -> bool:
        """Return whether *member* may have a further link here."""
        most = self._ways.limits.mesh_legs_max
        return (
            member.accepted + len(member.placed) < most
            or member.accepted + member.placed.sweep(trio.current_time()) < most
        )

    def _refuse(self, link: ReceivingLink | SendingLink, error: Error) -> None:
        self.refused += 1
        link.refuse(error)

    def _hop(
        self,
        connection: Connection,
        member: Neighbour,
        link: ReceivingLink | SendingLink,
        value: object,
    ) -> None:
        ways = self._ways
        try:
            rest = read_route(value, ways.node, ways.limits)
        except RouteRefused as fault:
            self._refuse(link, Error.of(fault))
            return
        leg = read_leg(link.properties)
        member.narrow(link, leg.band)
        if not rest:
            member.placed.add(link, trio.current_time())
            if link.role == RECEIVER and leg.band != PINNED:
                self._report_load(cast("ReceivingLink", link))
            if not member.edge:
                self._clients.carry(link, leg)
            self._container.attaching.place(connection, link)
            return
        if ways.engine.edge and member.node != ways.node:
            self._refuse(link, Error("amqp:not-allowed", "no links pass through an edge"))
            return
        branches = branches_of(rest)
        try:
            if branches is None:
                self._transit.pass_on(member, link, rest, leg)
            elif link.role == RECEIVER:
                self._transit.branch(member, cast("ReceivingLink", link), branches, leg)
            else:
                self._refuse(link, Error("amqp:invalid-field", "links of receivers do not branch"))
        except LocalProtocolError as fault:
            self._refuse(link, Error("amqp:not-found", fault.description))

    def _report_load(self, link: ReceivingLink) -> None:
        """Let the flows of *link* say how busy the node is to which it leads, if it is one of the container's."""
        target = link.target
        if isinstance(target, Target) and target.address:
            try:
                found = self._container.nodes.find(target.address)
            except ValueError:
                # The link will be refused: a capture cannot be converted.
                return
            if found is not None:
                self._reports.follow(found[0], link)
                self.wake()

    # --- links of clients --------------------------------------------------------------------------

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Route *link* if its address is served elsewhere; create the address of a reply link."""
        if link.role == SENDER and _is_for_replies(link.source):
            # Also beside a broker, whose dynamic queues have names that lead nowhere from other members.
            self._container.replies.attach_dynamic(cast("SendingLink", link))
            return True
        address = self._address_of(link)
        if (gone := self._refuse_created(address, link.role == SENDER)) is not None:
            link.refuse(gone)
            return True
        if ROUTE not in link.properties and isinstance(link.target, Coordinator):
            return self.pinned.coordinate(link, own=self.coordinates)
        if address is None:
            return False
        if ROUTE in link.properties:
            return self._ends.attach(link, address)
        if self._is_linked_edge(address, link):
            link.refuse(
                Error("amqp:not-allowed", "links to the address are routed", {LINKED: True})
            )
            return True
        gives = link.role == SENDER
        node = self.pinned.coordinator_of(link.session)
        if node is not None and self._is_at(node, address, gives=gives):
            # Messages and outcomes on the link can be in transactions of the session.
            if node == self._ways.node and not self._leads_outside(address):
                return False
            self.pinned.route(address, link, node)
            return True
        if not self._is_routed(address, gives=gives):
            return self._ends.attach(link, address)
        self._route(address, link)
        return True

    def _refuse_created(self, address: str | None, gives: bool) -> Error | None:
        """Return why a link to *address* is refused, if it is one that was created here; None otherwise.

        These addresses exist for one link each. A broker beside us would create a queue at an address whose link has ended.
        """
        if address is None or node_of(address) != self._ways.node:
            return None
        if not gives and address in self._container.replies.dynamic:
            return None
        return Error(
            "amqp:not-found", f"{address!r} is not the address of a link that receives here"
        )

    def _is_at(self, node: str, address: str, *, gives: bool) -> bool:
        if self._ways.engine.edge:
            # What the uplink has is asked for when own nodes have been.
            return node == self._ways.node and self._ways.engine.offers(address)
        return any(each.node == node for each in self._ways.destinations(address, gives=gives))

    def _is_linked_edge(self, address: str, link: ReceivingLink | SendingLink) -> bool:
        """Return whether *link* is one of an edge for several clients, each of which needs a link of its own."""
        leg = read_leg(link.properties)
        if link.role == SENDER or not leg.origin or leg.band == PINNED:
            return False
        found = self._ways.destinations(address)
        if not found:
            return bool(self._ways.destinations(address, gives=True))
        return self._is_pinned(address, found)

    def attach_absent(self, link: ReceivingLink | SendingLink) -> bool:
        """Let *link* wait for a destination: no node or host of the container has its address."""
        address = self._address_of(link)
        if (
            address is None
            or ROUTE in link.properties
            or _is_ours(address)
            or address in self._container.replies.dynamic
        ):
            return False
        node = self.pinned.coordinator_of(link.session)
        if node is not None and node != self._ways.node:
            # The node may create the address on its first use.
            self.pinned.route(address, link, node)
            return True
        rule = self._rules.rule_for(address)
        if link.role == SENDER and rule.absent == "wait":
            # Nothing can be agreed with a destination that is not there.
            return False
        self._route(address, link)
        return True

    @staticmethod
    def _address_of(link: ReceivingLink | SendingLink) -> str | None:
        terminus = link.source if link.role == SENDER else link.target
        if not isinstance(terminus, Source | Target) or terminus.dynamic:
            return None
        return terminus.address or None

    def routes(self, address: str) -> bool:
        """Return whether other members serve *address*, so that links of senders are led to them."""
        return self._is_routed(address, gives=False)

    def _is_routed(self, address: str, *, gives: bool) -> bool:
        """Return whether other members serve *address*, so that the mesh decides about links to it."""
        node = node_of(address)
        if node is not None:
            return node != self._ways.node
        engine = self._ways.engine
        if engine.edge:
            if gives or engine.uplink is None or not engine.offers(address):
                # Own nodes come first; what they have not is looked for at the uplink after that.
                return False
            return self._rules.rule_for(address).distribution != "closest"
        if _is_ours(address):
            return False
        found = self._ways.destinations(address, gives=gives)
        if self._leads_outside(address):
            return True
        if not found:
            # Nothing new comes to our own node if that is not alive.
            return self._ways.ails(address)
        if all(each.node == self._ways.node for each in found):
            # Links to an address that a rule distributes get further destinations when these appear.
            rule = None if gives else self._rules.find(address)
            return rule is not None and rule.route == "message" and rule.distribution != "closest"
        if found[0].node != self._ways.node:
            return True
        # The nearest destination is this node: links that go to one node are served as without a mesh.
        one = gives or found[0].offer.distribution == "closest" or self._is_pinned(address, found)
        return not one

    def _leads_outside(self, address: str) -> bool:
        """Return whether a bridge of ours joins links to *address* with links of the broker outside."""
        return self.bridges is not None and self.bridges.leads_outside(address)

    def _is_pinned(self, address: str, found: list[MeshRoute]) -> bool:
        """Return whether links of senders to *address*, which *found* serve, go to one destination."""
        rule = self._rules.rule_for(address)
        return rule.route == "link" or any(each.offer.flags & LINK_ROUTED for each in found)

    def _route(self, address: str, link: ReceivingLink | SendingLink) -> None:
        rule = self._rules.rule_for(address)
        gives = link.role == SENDER
        found = self._ways.destinations(address, gives=gives)
        if read_leg(link.properties).origin:
            self._of_edges.append(link)
        # The address of a reply exists for one link at its node: a link to it ends with that, instead of waiting for another one.
        pinned = (
            gives
            or is_paired(link)
            or node_of(address) is not None
            or self._is_pinned(address, found)
        )
        distribution = found[0].offer.distribution if found else rule.distribution
        if self._ways.engine.edge:
            distribution = "balanced"
        elif rule.redirect and found:
            elsewhere = redirect_to(self._ways.urls_of(found[0].node), link.peer, address)
            if elsewhere is not None:
                link.refuse(elsewhere)
                return
        if not pinned and distribution == "multicast":
            self._grow(address, cast("ReceivingLink", link), rule)
        elif not pinned:
            link = cast("ReceivingLink", link)
            routed = self.routed(address, link.peer.user or "")
            if routed.linked:
                self.pinned.route(address, link)
            else:
                routed.fan.join(link, wait=rule.absent == "wait")
        else:
            self.pinned.route(address, link)

    def _grow(self, address: str, link: ReceivingLink, rule: MeshRule) -> None:
        tree = RoutedTree(
            address,
            link,
            (link.peer.user or "") if rule.per_user else "",
            wait=rule.absent == "wait",
            worst=rule.outcomes == "worst",
            skips=rule.slow == "skip",
            ways=self._ways,
            now=trio.current_time,
            on_wait=self.wake,
            on_ended=self._felled,
        )
        self._keep(tree)

    def _keep(self, tree: RoutedTree) -> None:
        self._trees[tree] = None
        tree.update()
        self.wake()

    def _felled(self, tree: RoutedTree) -> None:
        if tree in self._trees:
            del self._trees[tree]
            self._dropped += tree.dropped
            self._skipped += tree.skipped

    def give_up(self, address: str, link: ReceivingLink | SendingLink, error: Error) -> None:
        """Refuse *link*, which has found no path; a receiver becomes a destination if no node gives messages to it."""
        if (
            link.role == SENDER
            and error.condition == "amqp:not-found"
            and self._ends.receive(cast("SendingLink", link), address)
        ):
            return
        link.refuse(error)

    def routed(self, address: str, user: str) -> RoutedAddress:
        """Return the routed address, a new one if there is none."""
        rule = self._rules.rule_for(address)
        key = (address, user if rule.per_user else "")
        found = self._routed.get(key)
        if found is None:
            offers = self._ways.destinations(address)
            distribution = offers[0].offer.distribution if offers else rule.distribution
            found = self._routed[key] = RoutedAddress(
                *key,
                rule,
                closest=distribution == "closest",
                ways=self._ways,
                now=trio.current_time,
                zone=self._zone,
                on_wait=self.wake,
                on_refused=self._leg_refused,
                revise=context_writer(self._container.observers, address, self._ways.limits),
            )
            found.update()
            self.wake()
        return found

    def _leg_refused(self, routed: RoutedAddress, error: Error) -> None:
        """Handle the refusal of a leg, which of an edge is its link to the uplink, with the rights of an edge."""
        if not self._ways.engine.edge or error.condition == "amqp:not-found":
            return
        for link in routed.fan.withdraw():
            if link.session.ended:
                continue
            if routed.linked:
                self.pinned.route(routed.address, link)
            else:
                link.refuse(error)

    async def reach(self, address: str) -> None:
        """Wait until the uplink of this edge accepts links to *address*.

        Raises:
            LinkRefused: The uplink does not let this edge use the address.
        """
        while True:
            routed = self.routed(address, "")
            routed.touch()
            if routed.fan.reachable and any(each.answered for each in routed.fan.legs):
                return
            if routed.linked:
                return
            refusal = routed.fan.refusal
            if refusal is not None and refusal.condition != "amqp:not-found":
                raise LinkRefused(
                    refusal.description or refusal.condition, condition=refusal.condition
                )
            await trio.sleep(_REACH_S)

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* that come through an anonymous terminus."""
        if (gone := self._refuse_created(address, False)) is not None:
            return gone
        if not self._is_routed(address, gives=False):
            return self._ends.relay(address)
        return self._relay(address, link)

    def _relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error:
        found = self._ways.destinations(address)
        if found and found[0].offer.distribution == "multicast":
            return Error("amqp:not-allowed", f"{address!r} has to be attached to")
        user = link.peer.user or ""
        return Relayed(lambda: self.routed(address, user))

    def legs_to(self, address: str) -> dict[str, list[Leg]]:
        """Return the legs for messages to *address*, of all users, by destination."""
        found: dict[str, list[Leg]] = {}
        for (name, _), routed in self._routed.items():
            if name == address:
                for node, _, leg in routed.open_legs():
                    found.setdefault(node, []).append(leg)
        return found

    def relay_absent(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address*, which has no destination; None without a rule for that.

        An edge asks its uplink for what nothing here has.
        """
        if self._ways.engine.edge:
            return None if node_of(address) == self._ways.node else self._relay(address, link)
        rule = self._rules.find(address)
        if rule is None or rule.distribution == "multicast" or rule.route == "link":
            return None
        if rule.absent != "wait" and rule.fallback is None:
            return None
        user = link.peer.user or ""
        return Relayed(lambda: self.routed(address, user))

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Return whether *address* was created for a link at another member, and cannot be guessed."""
        node = node_of(address)
        return node is not None and node != self._ways.node and address.count("/") >= 4

    # --- replies -------------------------------------------------------------------------------------

    def reply_path(self, address: str) -> RemoteReply | None:
        """Return the path of replies to an address that another member has created; None if it is none."""
        node = node_of(address)
        if node is None or node == self._ways.node:
            return None
        return self._remote.path(address)

    @staticmethod
    def failed_outcome(link: ReceivingLink) -> Outcome:
        """Return the outcome of a request that was answered with a failure: legs tell it to the first node of the route."""
        leg = ROUTE in link.properties and read_leg(link.properties).band != PINNED
        return FAILED_ANSWER if leg else ACCEPTED

    # --- time ----------------------------------------------------------------------------------------

    def routes_changed(self) -> None:
        """Let legs and links in search of a path follow the routing, soon."""
        self._changed = True
        self.wake()

    def wake(self) -> None:
        """Let :meth:`run` look at what is due."""
        self._wakeup.set()

    async def run(self) -> None:
        """Keep legs and links up to date until cancelled."""
        rotate_at = trio.current_time() + _ROTATE_S
        while True:
            self._wakeup = trio.Event()
            changed, self._changed = self._changed, False
            now = trio.current_time()
            rotate = now >= rotate_at
            if rotate:
                rotate_at = now + _ROTATE_S
            due = await self._look_after(changed=changed, rotate=rotate)
            waits = self._remote.leaving or self._reports or self._ends.waits
            if self._routed or self._leaving or self.pinned.seeking or waits:
                due = min(due, rotate_at)
            with trio.move_on_at(due):
                await self._wakeup.wait()
            await trio.lowlevel.checkpoint()

    async def _look_after(self, *, changed: bool, rotate: bool) -> float:
        """Call what is due; return when to call again."""
        due = math.inf
        if rotate:
            await self._reports.tell()
        if changed or rotate:
            self._remote.tend()
        for at, (key, each) in enumerate(list(self._routed.items())):
            if at % _TURN == _TURN - 1:
                await trio.lowlevel.checkpoint()
            if self._routed.get(key) is not each:
                continue
            if changed:
                each.update()
            each.tick(trio.current_time())
            if rotate:
                each.fan.rotate()
                if each.idle:
                    del self._routed[key]
                    each.close()
                    self._leaving.append(each)
                    continue
            due = min(due, each.deadline)
        if rotate:
            self._forget_left()
        now = trio.current_time()
        for tree in list(self._trees):
            if changed or now >= tree.deadline:
                tree.update()
            due = min(due, tree.deadline)
        due = min(due, self.pinned.look_after(now, changed=changed))
        return min(due, self._ends.look_after(now, changed=changed, sweep=rotate))

    def _forget_left(self) -> None:
        """Forget the addresses whose last legs have ended, and count what was lost with these."""
        left = [each for each in self._leaving if not each.fan.legs]
        if left:
            self._leaving = [each for each in self._leaving if each.fan.legs]
            self._dropped += sum(each.fan.dropped for each in left)

    def close(self) -> None:
        """Retire all legs, which are detached when what is under way has been answered."""
        for each in self._routed.values():
            each.close()
        for tree in self._trees:
            tree.close()
        self._remote.tend(close=True)

    @property
    def hops(self) -> int:
        """Number of links of other members that pass through."""
        return self._transit.hops

    @property
    def of_edges(self) -> int:
        """Number of links of our edges to addresses of the mesh."""
        self._of_edges = [each for each in self._of_edges if each.attached]
        return len(self._of_edges)

    @property
    def placed(self) -> int:
        """Number of attached links that end here, those of our own clients through the mesh included."""
        return sum(each.placed.attached() for each in self.members.values())

    def _fans(self) -> Iterator[Fan]:
        for each in (*self._routed.values(), *self._leaving):
            yield each.fan
        yield from self._ends.fans()

    @property
    def dropped(self) -> int:
        """Number of settled messages that were lost: with a link, or without a destination. On hops, of links that have ended."""
        fans = sum(each.dropped for each in self._fans())
        trees = sum(each.dropped for each in self._trees)
        others = self.pinned.dropped + self._transit.dropped + self._ends.dropped
        return self._dropped + fans + trees + others

    @property
    def skipped(self) -> int:
        """Number of copies of settled messages that slow destinations did not get."""
        trees = sum(each.skipped for each in self._trees)
        return self._skipped + trees + self._transit.skipped

    @property
    def waiting(self) -> int:
        """Number of messages of our clients that wait for a destination's credit."""
        return sum(each.waiting for each in self._fans())

    def stuck(self, since: float) -> int:
        """Return the number of messages of our clients without an outcome that were sent before *since*."""
        legs = sum(leg.stuck(since) for fan in self._fans() for leg in fan.legs)
        return legs + sum(each.stuck(since) for each in self._trees) + self.pinned.stuck(since)

    @property
    def busy(self) -> bool:
        """Whether messages of our clients are under way."""
        return any(each.fan.waiting or each.fan.legs for each in self._routed.values())


def _is_for_replies(source: object) -> bool:
    """Return whether *source* is dynamic, for as long as its link, and asks for nothing else, such as a kind of node."""
    if not isinstance(source, Source) or not source.dynamic or source.address or source.durable:
        return False
    asked = dict(source.dynamic_node_properties or {})
    lifetime = asked.pop("lifetime-policy", None)
    if isinstance(lifetime, Described):
        # delete-on-close, by its code or by its name (Part 3 §3.5.10).
        closes = lifetime.descriptor in (0x2B, "amqp:delete-on-close:list")
    else:
        closes = lifetime is None or isinstance(lifetime, DeleteOnClose)
    return closes and not asked and not source.capabilities


def _is_ours(address: str) -> bool:
    """Return whether requests to *address* are for this container alone: a pattern of another node must not attract them."""
    return address in (CBS, MANAGEMENT) or address.endswith(f"/{MANAGEMENT}")


class AbsentHost(BareHost):
    """Last host of a container: takes links to unknown addresses, which wait for a destination.

    Args:
        host: The host of the mesh.
    """

    def __init__(self, host: MeshHost) -> None:
        self._host = host

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Let *link* wait."""
        return self._host.attach_absent(link)

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* at an uplink, or where a rule lets them wait or has a fallback."""
        return self._host.relay_absent(address, link)
