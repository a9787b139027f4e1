"""Links at the last node of their route: to edges of the node, and to receivers of its clients, which are destinations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, cast

import trio

from ..container.container import Container
from ..container.replies import is_paired
from ..errors import LocalProtocolError
from ..fronts.base import SENDER, ReceivingEndpoint, ReceivingLink, SendingLink
from ..outcomes import Error
from ..termini import Source
from .balance import Standing
from .fans import Fan
from .hops import END, LEG, PINNED, ROUTE, LegUse, Route, read_leg, write_leg
from .legs import Leg
from .records import EDGE, GIVES, LINK_ROUTED, TAKES, Offer
from .routed import Relayed, RoutedAddress
from .routing import Effect, MeshRoute
from .rules import MeshRules
from .splices import Splice
from .trees import RoutedTree
from .ways import Ways, node_of

#: Seconds until a link with unused credit is asked to return it, while another one has none; doubled up to the maximum. Links
#: of other nodes take all the credit that there is, so that this is the time until a further node can send.
_ROTATE_S: Final = 0.01
_ROTATE_MAX_S: Final = 1.0
#: Seconds for which messages for an edge that no longer offers an address may arrive: from nodes that learn of it later.
_LATE_S: Final = 2.0


class EndAddress(RoutedAddress):
    """Address of which messages end here: at the node's own nodes, its edges, and receivers of its clients.

    The legs to an edge stay for a moment if it offers the address no longer, as one does that leaves for another uplink.
    Otherwise the credit of the members that send to it would be gone at once, and messages which are under way would
    wait at a node in between until the link ends.
    """

    #: The destinations of the last update that found any, and until when their legs stay; no time while they are there.
    _last: Sequence[MeshRoute] = ()
    _last_until: float = math.inf

    def _wanted(self, address: str) -> list[MeshRoute]:
        found = ends_of(self._ways, address)
        if found:
            self._last, self._last_until = found, math.inf
            return found
        now = self._now()
        if self._last_until == math.inf:
            self._last_until = now + _LATE_S
        last = () if now >= self._last_due else self._last
        # A leg ends with the connection that it uses, and is not opened again.
        self._last = [each for each in last if each.node in self._legs]
        if not self._last:
            self._last_until = math.inf
        return self._last

    @property
    def _last_due(self) -> float:
        """Time from which legs to destinations that are gone are retired: at once without senders."""
        gone = self._last_until < math.inf
        return -math.inf if gone and not self.fan.senders else self._last_until

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called."""
        return min(super().deadline, self._last_due)

    def tick(self, now: float) -> None:
        """Do what is due at *now*."""
        if now >= self._last_due:
            self.update()
        super().tick(now)

    def _stands(self, path: tuple[str, ...]) -> bool:
        # A leg ends with the connection that it uses.
        return True

    def _properties(self, route: Route, kind: str) -> dict[object, Any]:
        return _marked(super()._properties(route, kind), route, self._ways.node, "")

    def _divides(self) -> bool:
        # Receivers have one link each, and would get none of the messages that have legs of their own.
        return not any(isinstance(each.context, EndReceiver) for each in self.fan.legs)

    def adopt(self, link: SendingLink, zone: str) -> Leg:
        """Accept *link*, a client's, as a destination."""
        for each in list(self._others):
            self._retire_other(each)
        return self.fan.adopt(link, Standing(cost=0, zone=zone), source=_source(link, self.address))

    def _left(self, leg: Leg) -> None:
        if isinstance(leg.context, EndReceiver):
            leg.context.ended()
        else:
            super()._left(leg)


class EndTree(RoutedTree):
    """Link whose messages go to each of the node's own nodes, its edges, and receivers of its clients.

    Args:
        receivers: Returns the keys of the receivers.
        options: See :class:`RoutedTree`.
    """

    def __init__(self, *args: Any, receivers: Callable[[], list[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._receivers = receivers

    def _routes(self) -> dict[str, Route]:
        routes: dict[str, Route] = {
            each.node: [each.node] for each in ends_of(self._ways, self.address)
        }
        # A key has a slash, and the id of a node has none.
        routes.update((key, [self._ways.node]) for key in self._receivers())
        return routes

    def _properties(self, head: str, route: Route) -> dict[object, Any]:
        end = "" if head == self._ways.node else head
        return _marked(super()._properties(head, route), route, self._ways.node, end)


class EndReceiver:
    """Receiver of a client that is a destination.

    Args:
        ends: Those of the node.
        address: The address.
        key: Names it within the node.
        fan: Fan of its own, for an address whose destinations get all messages; None for the fan that receivers share.
    """

    def __init__(self, ends: Ends, address: str, key: str, fan: Fan | None) -> None:
        self._ends = ends
        self.address = address
        self.key = key
        self.fan = fan

    def ended(self, _leg: Leg | None = None) -> None:
        """Forget it: its link has ended."""
        self._ends.forget(self)


class Ends:
    """Destinations at this node which are not its own nodes.

    Args:
        container: The container.
        ways: The ways from here.
        rules: Rules for addresses.
        zone: Our zone.
        leg_of: Returns the use of a link that is joined with one of a client.
        grow: Keeps a tree up to date.
        felled: Called with a tree that has ended.
        carry_out: Carries out what the routing asks for.
        on_wait: Called when :meth:`look_after` has to be called earlier.
    """

    def __init__(
        self,
        container: Container,
        ways: Ways,
        rules: MeshRules,
        *,
        zone: str,
        leg_of: Callable[[ReceivingLink | SendingLink], LegUse],
        grow: Callable[[RoutedTree], None],
        felled: Callable[[RoutedTree], None],
        carry_out: Callable[[list[Effect]], None],
        on_wait: Callable[[], None],
    ) -> None:
        self._container = container
        self._ways = ways
        self._rules = rules
        self._zone = zone
        self._leg_of = leg_of
        self._grow = grow
        self._felled = felled
        self._carry_out = carry_out
        self._on_wait = on_wait
        self._addresses: dict[str, EndAddress] = {}
        self._receivers: dict[str, dict[str, EndReceiver]] = {}
        self._numbers = count(1)
        self._rotate_at = math.inf
        self._rotate_s = _ROTATE_S
        #: Settled messages that were lost with a link to an edge.
        self.dropped = 0

    # --- links that arrive -------------------------------------------------------------------------

    def attach(self, link: ReceivingLink | SendingLink, address: str) -> bool:
        """Deal with *link* if it leads to an edge or to a receiver of a client; return False if it leads to an own node."""
        end = link.properties.get(END) if link.peer.trusted else None
        if isinstance(end, str):
            receiver = self._receivers.get(address, {}).get(end)
            if receiver is None or receiver.fan is None:
                return False
            receiver.fan.join(cast("ReceivingLink", link))
            # Others may hold the credit that it needs.
            self._on_wait()
            return True
        engine = self._ways.engine
        node = node_of(address)
        if node is not None:
            neighbour = self._ways.neighbours.get(node)
            if neighbour is None or not neighbour.edge:
                return False
            self._to_edge(link, node)
            return True
        gives = link.role == SENDER
        edges = engine.edges(address, GIVES if gives else TAKES)
        if not edges and (gives or address not in self._receivers):
            return False
        own = engine.offers(address, GIVES if gives else TAKES, received=False)
        leg = read_leg(link.properties)
        rule = self._rules.rule_for(address)
        if ROUTE in link.properties:
            # The first node has chosen this one for the link.
            pinned = gives or rule.route == "link" or leg.band == PINNED
        else:
            offer = engine.database.directory.find(address).get(engine.node, Offer())
            linked = rule.route == "link" or offer.flags & LINK_ROUTED
            pinned = gives or is_paired(link) or bool(linked)
        if pinned and own:
            return False
        if pinned and edges:
            self._to_edge(link, edges[0])
            return True
        self._distribute(cast("ReceivingLink", link), address, leg)
        return True

    def _distribute(self, link: ReceivingLink, address: str, leg: LegUse) -> None:
        if self._distribution(address) != "multicast":
            self._address(address).fan.join(link)
            self._on_wait()
            return
        tree = EndTree(
            address,
            link,
            leg.user,
            receivers=lambda: list(self._receivers.get(address, ())),
            wait=False,
            ways=self._ways,
            now=trio.current_time,
            on_wait=self._on_wait,
            on_ended=self._felled,
        )
        self._grow(tree)

    def relay(self, address: str) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages from anonymous termini; None if they go to an own node."""
        engine = self._ways.engine
        if not engine.edges(address, TAKES) and address not in self._receivers:
            return None
        if self._distribution(address) == "multicast":
            return Error("amqp:not-allowed", f"{address!r} has to be attached to")
        return Relayed(lambda: self._address(address))

    def _distribution(self, address: str) -> str:
        rule = self._rules.find(address)
        if rule is not None:
            return rule.distribution
        engine = self._ways.engine
        offer = engine.database.directory.find(address).get(engine.node)
        return "balanced" if offer is None else offer.distribution

    def _address(self, address: str) -> EndAddress:
        found = self._addresses.get(address)
        if found is None:
            rule = self._rules.rule_for(address)
            found = self._addresses[address] = EndAddress(
                *(address, "", rule),
                closest=self._distribution(address) == "closest",
                ways=self._ways,
                now=trio.current_time,
                zone=self._zone,
                on_wait=self._on_wait,
            )
            found.update()
            self._on_wait()
        return found

    def _to_edge(self, link: ReceivingLink | SendingLink, edge: str) -> None:
        """Join *link* with one to *edge*."""
        properties = {**link.properties, ROUTE: [edge]}
        if ROUTE not in link.properties:
            # The first node of the route says who the client is: no client does, nor another edge.
            properties[LEG] = write_leg(self._leg_of(link))

        def ended(splice: Splice) -> None:
            self.dropped += splice.dropped

        try:
            self._ways.join(link, [edge], of=link.session, properties=properties, on_ended=ended)
        except LocalProtocolError as fault:
            link.refuse(Error("amqp:not-found", fault.description))

    # --- receivers of clients ------------------------------------------------------------------------

    def receive(self, link: SendingLink, address: str) -> bool:
        """Make *link* of a client a destination of *address*, of which no node gives messages; return False if it may not."""
        ways = self._ways
        distribution = self._rules.rule_for(address).distribution
        offer = Offer(TAKES, distribution)
        if address.startswith("$") or not self._rules.admit(ways.node, address, offer):
            return False
        if read_leg(link.properties).origin:
            # An edge, whose client it is, makes it a destination itself, and stays one with another uplink.
            return False
        known = self._receivers.setdefault(address, {})
        if len(known) >= ways.limits.mesh_receivers_max:
            link.refuse(
                Error(
                    "amqp:resource-limit-exceeded",
                    f"{address!r:.200} has mesh_receivers_max receivers",
                )
            )
            return True
        key = f"{ways.node}/{next(self._numbers)}"
        fan: Fan | None = None
        receiver = EndReceiver(self, address, key, fan)
        known[key] = receiver
        if distribution == "multicast":
            fan = receiver.fan = Fan(
                now=trio.current_time, limits=ways.limits, on_left=receiver.ended
            )
            fan.adopt(link, Standing(cost=0, zone=self._zone), source=_source(link, address))
        else:
            self._address(address).adopt(link, self._zone).context = receiver
        self._carry_out(ways.engine.offer(address, offer, now=trio.current_time(), received=True))
        return True

    def forget(self, receiver: EndReceiver) -> None:
        """Forget *receiver*, and offer its address no longer if it was the last one."""
        known = self._receivers.get(receiver.address, {})
        known.pop(receiver.key, None)
        if not known:
            self._receivers.pop(receiver.address, None)
            engine = self._ways.engine
            now = trio.current_time()
            self._carry_out(engine.withdraw(receiver.address, now=now, received=True))

    # --- time ----------------------------------------------------------------------------------------

    def look_after(self, now: float, *, changed: bool, sweep: bool) -> float:
        """Do what is due at *now*; return when to call again.

        Args:
            now: The time.
            changed: Whether destinations have changed.
            sweep: Whether to forget what is not used.
        """
        rotate = now >= self._rotate_at
        due = math.inf
        for address, each in list(self._addresses.items()):
            if changed:
                each.update()
            each.tick(now)
            if sweep and each.idle and address not in self._receivers:
                del self._addresses[address]
                self.dropped += each.fan.dropped
                each.close()
                continue
            due = min(due, each.deadline)
        for receivers in list(self._receivers.values()):
            for receiver in list(receivers.values()):
                if receiver.fan is not None:
                    if now >= receiver.fan.deadline:
                        receiver.fan.tick(now)
                    due = min(due, receiver.fan.deadline)
        starved = False
        for fan in self.fans():
            if rotate:
                fan.rotate()
            starved = starved or fan.slots.starved
        if not starved:
            self._rotate_at = math.inf
            self._rotate_s = _ROTATE_S
        elif rotate or self._rotate_at == math.inf:
            self._rotate_at = now + self._rotate_s
            self._rotate_s = min(2 * self._rotate_s, _ROTATE_MAX_S)
        return min(due, self._rotate_at)

    def fans(self) -> Iterator[Fan]:
        """Return what distributes messages here."""
        for each in self._addresses.values():
            yield each.fan
        for receivers in self._receivers.values():
            for receiver in receivers.values():
                if receiver.fan is not None:
                    yield receiver.fan

    @property
    def waits(self) -> bool:
        """Whether :meth:`look_after` has to be called every second."""
        return bool(self._addresses or self._receivers)


def ends_of(ways: Ways, address: str) -> list[MeshRoute]:
    """Return the ends of *address* at this node, each with a path from it: edges, and the node itself for its own nodes."""
    engine = ways.engine
    offer = engine.database.directory.find(address).get(ways.node, Offer())
    found = []
    if engine.offers(address, TAKES, received=False):
        found.append(MeshRoute(ways.node, offer, 0, (), ""))
    for edge in engine.edges(address, TAKES):
        cost = engine.lines[edge].cost
        found.append(
            MeshRoute(edge, Offer(offer.flags | EDGE, offer.distribution), cost, (edge,), "")
        )
    return found


def _marked(
    properties: Mapping[object, Any], route: Route, node: str, end: str
) -> dict[object, Any]:
    """Return the properties of an attach, with its end if it is one to this node itself."""
    return {**properties, END: end} if route == [node] else dict(properties)


def _source(link: SendingLink, address: str) -> Source:
    asked = link.source or Source()
    return Source(address=address, outcomes=asked.outcomes, distribution_mode="move")
