"""Addresses to which messages are routed from here: a fan, whose legs follow the routing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from ..errors import LocalProtocolError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..outcomes import Error
from ..termini import Source, Target
from .balance import Answers, Standing
from .fans import Fan, Ingress
from .hops import HIGH, LINKED, LOW, STREAMS, LegUse, Route
from .legs import Leg
from .routing import MeshRoute
from .rules import MeshRule
from .ways import LegCount, Ways, spread

#: Seconds for which legs stay after the last sender has gone.
IDLE_S = 60.0
#: Seconds without messages after which legs for high priorities, and for messages that are streamed, are closed: while they are
#: open, a destination may hold slots for them.
KIND_IDLE_S = 10.0
#: Seconds until such legs are opened again after a refusal; the others are used meanwhile.
_KIND_RETRY_S = 5.0
#: Seconds until a leg that a node refused is opened again; doubled with each refusal.
_RETRY_S = 0.1
_RETRY_MAX_S = 5.0


class _OpenLeg(Struct):
    """A leg, the path that it takes, and the count of its link."""

    leg: Leg
    #: The address that the leg leads to: the fallback, or that of the senders.
    address: str
    path: tuple[str, ...]
    opened: LegCount


class RoutedAddress:
    """Address as this node routes messages of its clients to it.

    Args:
        address: The address.
        user: The user for whom alone it is; empty for all.
        rule: The rule for the address.
        closest: Use only the destinations of least cost.
        ways: The ways from this node.
        now: The clock, in seconds.
        zone: Our zone.
        on_wait: Called when ``deadline`` may have become earlier.
        on_refused: Called with the error when a leg was refused.
        revise: Revision of messages, see :class:`~amqp_rt.mesh.fans.Fan`.
    """

    def __init__(
        self,
        address: str,
        user: str,
        rule: MeshRule,
        *,
        closest: bool,
        ways: Ways,
        now: Callable[[], float],
        zone: str,
        on_wait: Callable[[], None],
        on_refused: Callable[[RoutedAddress, Error], None] = lambda routed, error: None,
        revise: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.address = address
        self.user = user
        self._fallback = rule.fallback
        #: Zone of the destinations to prefer; the nearest are used in any zone.
        self._zone = "" if closest else zone
        self._ways = ways
        self._now = now
        self._on_wait = on_wait
        self._on_refused = on_refused
        #: The uplink has said that links to the address are routed.
        self.linked = False
        self.fan = Fan(
            now=now,
            zone=zone,
            closest=closest,
            ordered=rule.ordered,
            resend=rule.resend,
            limits=ways.limits,
            on_left=self._left,
            on_wait=on_wait,
            on_kind=self._need,
            revise=revise,
        )
        #: Endpoint of messages from anonymous termini.
        self.relayed: Ingress = self.fan.relay()
        self._legs: dict[str, _OpenLeg] = {}
        #: Legs for high priorities, and for messages that are streamed.
        self._others: dict[Leg, tuple[str, _OpenLeg]] = {}
        #: When legs of a kind were needed last, and when they may be opened again.
        self._needed_at: dict[str, float] = {}
        self._opens_at: dict[str, float] = {}
        #: Outcomes by destination, of this leg to it and earlier ones.
        self._answers: dict[str, Answers] = {}
        self._retry_at = math.inf
        self._retry_s = _RETRY_S
        self._used_at = now()
        self._closing = False

    def open_legs(self) -> Iterator[tuple[str, tuple[str, ...], Leg]]:
        """Yield the legs in use, each with its destination and the path to it, which is empty for this node."""
        for node, each in (*self._legs.items(), *self._others.values()):
            yield node, each.path, each.leg

    def touch(self) -> None:
        """Keep the legs for another while."""
        self._used_at = self._now()

    @property
    def idle(self) -> bool:
        """Whether there has been no sender for a while."""
        fan = self.fan
        if fan.senders or fan.waiting:
            self._used_at = self._now()
            return False
        return not fan.legs or self._now() >= self._used_at + IDLE_S

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called."""
        return min(self.fan.deadline, self._retry_at)

    def tick(self, now: float) -> None:
        """Do what is due at *now*."""
        if now >= self._retry_at:
            self.update()
        for kind in (HIGH, STREAMS):
            if self.fan.waits_for(kind):
                # Destinations that came, or were refused a leg, after the messages.
                self._need(kind)
        for leg in list(self._others):
            if leg.busy or self.fan.waits_for(leg.kind):
                self._needed_at[leg.kind] = now
            elif now >= self._needed_at[leg.kind] + KIND_IDLE_S:
                self._retire_other(leg)
        if now >= self.fan.deadline:
            self.fan.tick(now)

    def update(self) -> None:
        """Open legs to the destinations that there are now, and retire those that lead elsewhere."""
        self._retry_at = math.inf
        if self._closing:
            return
        ways = self._ways
        address = self.address
        found = self._wanted(address)
        if not found and self._fallback is not None:
            address = self._fallback
            found = self._wanted(address)
        wanted = {
            each.node: each for each in spread(found, ways.limits.fan_legs_max, zone=self._zone)
        }
        for node, known in list(self._legs.items()):
            if node not in wanted or known.address != address or not self._stands(known.path):
                del self._legs[node]
                self.fan.retire(known.leg)
        for leg, (node, known) in list(self._others.items()):
            if node not in wanted or known.address != address or not self._stands(known.path):
                # Another one is opened for the next message.
                self._retire_other(leg)
        for node, each in wanted.items():
            if node in self._legs:
                self._legs[node].leg.standing.weight = each.offer.weight
                continue
            standing = Standing(cost=each.cost, zone=each.zone, weight=each.offer.weight)
            self._open(node, address, each.path or (ways.node,), standing)

    def _wanted(self, address: str) -> list[MeshRoute]:
        """Return the destinations of *address*, the best first."""
        return self._ways.destinations(address)

    def _stands(self, path: tuple[str, ...]) -> bool:
        """Return whether legs still take *path*."""
        return self._ways.stands(path)

    def _properties(self, route: Route, kind: str) -> dict[object, Any]:
        """Return the properties of the attach of a leg of *kind*."""
        return self._ways.properties(route, LegUse(self._ways.node, kind, self.user))

    def _open(self, node: str, address: str, path: tuple[str, ...], standing: Standing) -> None:
        try:
            opened = self._attach(node, address, path, standing, LOW)
        except LocalProtocolError:
            self._retry()
            return
        if opened is not None:
            self._legs[node] = opened

    def _attach(
        self, node: str, address: str, path: tuple[str, ...], standing: Standing, kind: str
    ) -> _OpenLeg | None:
        """Open a leg; None beyond the limit, for which legs that retire do not count.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        ways = self._ways
        route: Route = list(path)
        neighbour = ways.next(route)
        opener = neighbour.opener(band=kind)
        count = LegCount(neighbour, opener)
        leg: Leg | None = None
        try:
            leg = self.fan.add(
                opener,
                ways.new_name(),
                standing,
                kind=kind,
                properties=self._properties(route, kind),
                source=Source(),
                target=Target(address=address),
            )
        finally:
            if leg is None:
                count.end()
        if leg is None:
            return None
        leg.context = count
        if node not in self._answers and len(self._answers) >= ways.limits.mesh_nodes_max:
            del self._answers[next(iter(self._answers))]
        leg.answers = self._answers.setdefault(node, leg.answers)
        return _OpenLeg(leg, address, path if path != (ways.node,) else (), count)

    def _need(self, kind: str) -> None:
        """Open legs of *kind* for a message that comes or waits, one to each destination; of streams more while no other
        one takes it."""
        now = self._now()
        self._needed_at[kind] = now
        if self._closing or now < self._opens_at.get(kind, -math.inf) or not self._divides():
            return
        idle = {
            leg: node
            for leg, (node, _) in self._others.items()
            if leg.kind == kind and (kind != STREAMS or not leg.busy)
        }
        if kind == STREAMS and any(not leg.answered or leg.link.credit > 0 for leg in idle):
            return
        free = set(idle.values())
        for node, low in list(self._legs.items()):
            if node in free or not low.leg.answered:
                continue
            known = low.leg.standing
            standing = Standing(cost=known.cost, zone=known.zone, weight=known.weight)
            path = low.path or (self._ways.node,)
            try:
                opened = self._attach(node, low.address, path, standing, kind)
            except LocalProtocolError:
                self._opens_at[kind] = now + _KIND_RETRY_S
                return
            if opened is None:
                return
            self._others[opened.leg] = node, opened

    def _divides(self) -> bool:
        """Return whether each destination can have several legs."""
        return True

    def _retire_other(self, leg: Leg) -> None:
        del self._others[leg]
        self.fan.retire(leg)

    def _retry(self) -> None:
        self._retry_at = min(self._retry_at, self._now() + self._retry_s)
        self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
        self._on_wait()

    def _left(self, leg: Leg) -> None:
        if leg.context is not None:
            leg.context.end()
        if leg.kind != LOW:
            if self._others.pop(leg, None) is not None and not leg.answered:
                self._opens_at[leg.kind] = self._now() + _KIND_RETRY_S
            return
        refusal = self.fan.refusal
        if not leg.answered and refusal is not None:
            self.linked = bool((refusal.info or {}).get(LINKED))
            self._on_refused(self, refusal)
            if self.linked:
                self.close()
        for node, each in self._legs.items():
            if each.leg is leg:
                del self._legs[node]
                if leg.answered:
                    self._retry_s = _RETRY_S
                self._retry()
                break

    def close(self) -> None:
        """Retire all legs."""
        self._closing = True
        for each in self._legs.values():
            self.fan.retire(each.leg)
        self._legs.clear()
        for leg in list(self._others):
            self._retire_other(leg)


class Relayed:
    """Endpoint of messages to one address from an anonymous terminus, which outlives the legs.

    Args:
        find: Returns the routed address, a new one if the last has been idle.
    """

    def __init__(self, find: Callable[[], RoutedAddress]) -> None:
        self._find = find

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Distribute messages."""
        routed = self._find()
        routed.touch()
        routed.relayed.deliver(link, deliveries)

    def on_attached(self, link: ReceivingLink) -> None:
        """Do nothing: the link was attached before."""

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the link is not streaming."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Settle what the sender has settled."""
        self._find().relayed.on_settled(link, deliveries)

    def on_flow(self, link: ReceivingLink) -> None:
        """Do nothing: the link has credit of its own."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Do nothing: what has arrived is still sent."""
