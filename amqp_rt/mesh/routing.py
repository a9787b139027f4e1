"""Routing engine of one node of a mesh: lines to neighbours, flooding, paths (pure).

Time is an argument, and what is to be sent is a result. A host passes each message of a neighbour to ``receive``, calls ``tick`` at
``deadline``, and carries out the effects that both return, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import inf
from typing import Final

from msgspec import Struct

from ..errors import DecodeError
from ..limits import DEFAULT_LIMITS, Limits
from .adjacency import FLAPS_KEPT_S, INTERVAL_S, PATIENCE_MAX, Adjacency, Flaps, LineState
from .database import MeshDatabase, Verdict, mark_of
from .directory import Directory, admit_all
from .origination import NameLost, Origination
from .paths import Paths, within_reach
from .records import (
    EDGE,
    GIVES,
    MILLISECONDS_MAX,
    NUMBER_MAX,
    TAKES,
    Addresses,
    Ask,
    Digest,
    Hello,
    Links,
    Offer,
    Record,
    Version,
    decode_record,
    encode_record,
    portions,
)

#: Seconds for which digests differ before versions are compared.
REPAIR_S: Final = 1.0
#: Seconds from a change to the computation of reach and paths; doubled while changes go on.
HOLD_DOWN_S: Final = 0.01
HOLD_DOWN_MAX_S: Final = 1.0
#: Lateness below this is that of any busy program.
_LATE_S: Final = 0.05
#: Seconds for which we say that we are late.
_LATE_KEPT_S: Final = 5.0
#: Answers encoded for one neighbour in a turn: lists of 500 addresses, half a millisecond each.
_ANSWERS_A_TURN: Final = 8
#: Requests of one neighbour that wait for answers.
_ANSWERS_WAITING_MAX: Final = 4
#: What receivers of clients take is filed under this in place of an origin; no node has this id.
_RECEIVED: Final = ""
#: Messages accepted last whose copies are recognized without decoding, and octets of the longest.
_RECENT_MAX: Final = 1_024
_RECENT_SIZE_MAX: Final = 2_048


class Send(Struct, frozen=True):
    """Send *data* to a neighbour."""

    peer: str
    data: bytes


class LineChanged(Struct, frozen=True):
    """The line to a neighbour has another state. A lost one is forgotten: close its connection.

    The incarnation distinguishes the connection from a newer one of a neighbour that was started again.
    """

    peer: str
    incarnation: int
    state: LineState


class RoutesChanged(Struct, frozen=True):
    """Look-ups may have other results than before."""


class Leave(Struct, frozen=True):
    """The node has to leave the mesh; the engine does nothing more."""

    reason: str


class MeshRoute(Struct, frozen=True):
    """One node that serves an address, with the way to it."""

    node: str
    offer: Offer
    cost: int
    #: Ids to pass, the last of which is the node; empty for this node itself.
    path: tuple[str, ...]
    zone: str


Effect = Send | LineChanged | RoutesChanged | Leave


_NOBODY: Final[Mapping[str, float]] = {}


class RoutingEngine:
    """Routing of one node.

    Args:
        node: Its id, one segment of an address.
        incarnation: Random number of this start, from 1 below 2**62.
        wall_s: Seconds since 1970.
        now: Seconds of the monotonic clock that all other calls use.
        edge: The node only has uplinks, one of which offers its addresses as its own.
        admit: Whether rules let an origin offer an address.
        admit_edge: Whether its rights let an edge of this node offer an address.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        *,
        wall_s: int,
        now: float,
        edge: bool = False,
        zone: str = "",
        urls: tuple[str, ...] = (),
        limits: Limits = DEFAULT_LIMITS,
        admit: Callable[[str, str, Offer], bool] = admit_all,
        admit_edge: Callable[[str, str, Offer], bool] = admit_all,
    ) -> None:
        self.node = node
        self.edge = edge
        self._limits = limits
        self.own = Origination(
            node, incarnation, wall_s=wall_s, zone=zone, urls=urls, limits=limits
        )
        self.database = MeshDatabase(limits, admit)
        self.database.set_reach({node}, now)
        #: Addresses of our edges.
        self._edges = MeshDatabase(limits, admit_edge, nodes_max=limits.mesh_edges_max)
        #: Of an edge: the neighbour that offers its addresses, and to which its links go. Another one is chosen only when this
        #: one fails or drains: each message of a multicast address would otherwise arrive over either.
        self.uplink: str | None = None
        self.lines: dict[str, Adjacency] = {}
        self._flaps: dict[str, Flaps] = {}
        self._own = Directory(limits)
        #: Addresses of edges that are not offered, because this node has no room for more.
        self._left_out = 0
        #: Our addresses to which nothing new is to come.
        self._ailing: set[str] = set()
        self._draining = False
        self._left = False
        #: Messages that were malformed, or that a neighbour had no right to send.
        self.refused = 0
        self._recent: dict[bytes, None] = {}
        self._effects: list[Effect] = []
        self._due = now
        self._lateness_s = 0.0
        self._late_at = -inf
        self._compute_at = inf
        self._hold_down_s = HOLD_DOWN_S
        self._computed_at = -inf
        self._paths: Paths | None = None

    @property
    def deadline(self) -> float:
        """When ``tick`` is due; infinite after the node has left."""
        return inf if self._left else self._due

    # --- calls of the host -------------------------------------------------------------------------

    def connect(
        self, peer: str, incarnation: int, *, now: float, cost: int = 1, edge: bool = False
    ) -> list[Effect]:
        """Begin the line to *peer*, which has logged in as that id; an older line to it is lost first.

        A line that is refused is reported as lost.
        """
        if peer in self.lines:
            self._lose(self.lines[peer], now)
        refused = LineChanged(peer, incarnation, LineState.LOST)
        if self._left:
            return [refused]
        if peer == self.node:
            if incarnation > self.own.incarnation:
                self._leave(f"another node of the mesh has the id {peer!r} as well")
            else:
                self._effects.append(refused)
            return self._take()
        count = sum(line.edge == edge for line in self.lines.values())
        if count >= (self._limits.mesh_edges_max if edge else self._limits.mesh_neighbours_max):
            self.refused += 1
            self._effects.append(refused)
            return self._take()
        line = Adjacency(
            peer, incarnation, cost=cost, edge=edge, flaps=self._flaps_of(peer, now), now=now
        )
        self.lines[peer] = line
        self._say_hello(line, now)
        self._wake(now + INTERVAL_S)
        return self._take()

    @property
    def joined(self) -> bool:
        """Whether another node is within reach, and knows the addresses of an edge."""
        if not self.edge:
            return len(self.paths().costs) > 1
        line = self.lines.get(self.uplink or "")
        return line is not None and not self.own.addresses_changed and line.digest == self._mark()

    def disconnect(self, peer: str, *, now: float) -> list[Effect]:
        """End the line to *peer*, whose connection has closed."""
        line = self.lines.get(peer)
        if line is not None:
            self._lose(line, now)
            if not self._left:
                self._announce(now)
        return self._take()

    def receive(self, peer: str, data: bytes, *, now: float) -> list[Effect]:
        """Handle one message of *peer*. Malformed ones and those without a right are counted and ignored."""
        line = self.lines.get(peer)
        if line is None or self._left:
            return []
        if now - self._due > _LATE_S:
            self._be_late(now)
        line.heard_at = now
        if data not in self._recent:
            try:
                record = decode_record(data, self._limits)
                if record is not None:
                    self._handle(line, record, data, now)
            except DecodeError:
                self.refused += 1
            except NameLost as error:
                self._leave(str(error))
                return self._take()
            self._step(line, now)
            self._announce(now)
        return self._take()

    def tick(self, now: float, heard: Mapping[str, float] = _NOBODY) -> list[Effect]:
        """Do what is due at *now*.

        Args:
            now: The time.
            heard: When octets of each neighbour arrived last: a slow line full of other data is not silent.
        """
        if self._left:
            return []
        for line in self.lines.values():
            line.heard_at = max(line.heard_at, heard.get(line.node, line.heard_at))
        if now - self._due > _LATE_S:
            self._be_late(now)
        elif now - self._late_at > _LATE_KEPT_S:
            self._lateness_s = 0.0
        for line in list(self.lines.values()):
            self._step(line, now)
            if line.node in self.lines:
                self._serve(line, now)
        self._announce(now)
        if now >= self._compute_at:
            self._compute(now)
        if self.database.expire(now):
            self._recent.clear()
        self._due = self._next(now)
        return self._take()

    def offer(
        self, address: str, offer: Offer, *, now: float, received: bool = False
    ) -> list[Effect]:
        """Offer *address*, or change how it is offered; *received* is for what receivers of clients take."""
        self._own.add(_RECEIVED if received else self.node, address, offer)
        self._addresses_changed(now)
        return self._take()

    def withdraw(self, address: str, *, now: float, received: bool = False) -> list[Effect]:
        """Offer *address* no longer."""
        origin = _RECEIVED if received else self.node
        if address in self._own.of(origin):
            self._own.remove(origin, address)
            self._addresses_changed(now)
        return self._take()

    def set_health(self, address: str, *, alive: bool, now: float) -> list[Effect]:
        """Offer *address* with its weight, or with weight 0: then other nodes know it and use it no longer."""
        if alive == (address in self._ailing):
            (self._ailing.discard if alive else self._ailing.add)(address)
            self._addresses_changed(now)
        return self._take()

    def drain(self, *, now: float) -> list[Effect]:
        """Withdraw all addresses, those of edges too, and ask others to avoid this node, and edges to leave it."""
        self._draining = True
        self.own.links_changed = True
        for line in self.lines.values():
            if line.edge:
                self._say_hello(line, now)
        self._addresses_changed(now)
        return self._take()

    @property
    def draining(self) -> bool:
        """Whether this node drains."""
        return self._draining

    def edge_addresses(self, edge: str) -> int:
        """Return how many addresses an edge of this node offers."""
        return len(self._edges.directory.of(edge))

    def dropped(self) -> dict[str, int]:
        """Return how many offers of other nodes, and of our edges, were dropped, by the reason."""
        found = dict(self.database.directory.dropped)
        for other in (self._edges.directory.dropped, self._own.dropped):
            for reason, count in other.items():
                found[reason] = found.get(reason, 0) + count
        if self._left_out:
            found["addresses of edges"] = self._left_out
        return found

    def lookup(self, address: str) -> list[MeshRoute]:
        """Return the nodes within reach that serve *address*, the nearest first.

        If they differ about the distribution, that of the lowest id holds for all.
        """
        return self._reached(self.database.directory.find(address))

    def lookup_pattern(self, pattern: str) -> list[MeshRoute]:
        """Return the nodes within reach that offer *pattern*, given as its text."""
        return self._reached(self.database.directory.of_pattern(pattern))

    def _reached(self, offers: Mapping[str, Offer]) -> list[MeshRoute]:
        paths = self.paths()
        found = []
        for node in sorted(offers):
            path = paths.path(node)
            if path is not None:
                links = self.database.links(node)
                zone = links.zone if links is not None else ""
                found.append(MeshRoute(node, offers[node], paths.costs[node], path, zone))
        if found:
            first = found[0].offer.distribution
            found = [
                each
                if each.offer.distribution == first
                else MeshRoute(
                    each.node,
                    Offer(each.offer.flags, first, each.offer.weight),
                    *(each.cost, each.path, each.zone),
                )
                for each in found
            ]
        return sorted(found, key=lambda each: (each.cost, each.node))

    def edges(self, address: str, flag: int) -> list[str]:
        """Return the edges of this node that offer *address* with *flag*."""
        found = self._edges.directory.find(address)
        return sorted(
            edge
            for edge, offer in found.items()
            if offer.flags & flag
            and (line := self.lines.get(edge)) is not None
            and line.state is LineState.UP
        )

    def offers(self, address: str, flag: int = TAKES | GIVES, *, received: bool = True) -> bool:
        """Return whether this node, and not only an edge of it, offers *address*.

        Args:
            address: The address.
            flag: ``TAKES``, ``GIVES``, or both for either.
            received: Whether receivers of its clients count.
        """
        return any(
            offer.flags & flag and (received or origin == self.node)
            for origin, offer in self._own.find(address).items()
        )

    def paths(self) -> Paths:
        """Return the paths to all nodes, computed when first asked for after a change."""
        if self._paths is None:
            claims = self.database.claims
            avoid = self.database.draining(claims)
            self._paths = Paths(claims, self.node, avoid=avoid, limits=self._limits)
        return self._paths

    # --- messages ----------------------------------------------------------------------------------

    def _handle(self, line: Adjacency, record: Record, data: bytes, now: float) -> None:
        if isinstance(record, Hello):
            if record.node != line.node or record.incarnation != line.incarnation:
                self.refused += 1
                return
            before = self.edge and self.joined
            line.on_hello(record, self.own.incarnation)
            self._choose_uplink()
            self._compare(line, now)
            if self.edge and self.joined != before:
                self._effects.append(RoutesChanged())
        elif isinstance(record, Addresses) and line.edge and record.origin == line.node:
            self._on_edge_addresses(line, record, now)
        elif line.edge or self.edge:
            # An uplink tells an edge nothing but hellos, and an edge tells of its addresses only.
            self.refused += 1
        elif isinstance(record, Links):
            self._on_links(line, record, data, now)
        elif isinstance(record, Addresses):
            self._on_addresses(line, record, data, now)
        elif not line.requests.take(now):
            self.refused += 1
        elif isinstance(record, Digest):
            self._on_digest(line, record, now)
        elif len(line.answers) < _ANSWERS_WAITING_MAX:
            line.answers.append(self.database.answers(record.versions))
            self._wake(now)

    def _on_links(self, line: Adjacency, record: Links, data: bytes, now: float) -> None:
        if record.origin == self.node:
            ours = self.database.links(self.node)
            if ours is None or record == ours:
                if ours is None:
                    self.own.contest(record, now)
                return
            if (record.epoch, record.seq) >= (ours.epoch, ours.seq):
                self.own.contest(record, now)
            else:
                self._correct(line, Version(record.epoch, record.seq, NUMBER_MAX), now)
            return
        before = self.database.links(record.origin)
        verdict = self.database.put_links(record, now)
        if verdict is Verdict.NEWER:
            self._flood(data, now, besides=line)
            if before is None or before.costs != record.costs or before.draining != record.draining:
                self._graph_changed(now)
        elif verdict is Verdict.OLDER and record.origin == line.node:
            # It was here before with a later clock: show it, so that it claims a higher epoch.
            known = Version(record.epoch, record.seq, NUMBER_MAX)
            self._correct(line, known, now, origin=record.origin)

    def _on_addresses(self, line: Adjacency, record: Addresses, data: bytes, now: float) -> None:
        if record.origin == self.node:
            ours = self.database.version(self.node)
            if (record.epoch, record.seq) > (ours.epoch, ours.addresses):
                self.own.claim(record.epoch)
            return
        verdict = self.database.put_addresses(record, now)
        if verdict is Verdict.NEWER:
            self._flood(data, now, besides=line)
            self._effects.append(RoutesChanged())
        elif verdict is Verdict.GAP and line.asks.take(now):
            ask = Ask({record.origin: self.database.version(record.origin)})
            self._send(line, encode_record(ask), now)

    def _on_edge_addresses(self, line: Adjacency, record: Addresses, now: float) -> None:
        if self._edges.put_addresses(record, now) is Verdict.NEWER:
            self._addresses_changed(now)
            self._effects.append(RoutesChanged())

    def _on_digest(self, line: Adjacency, record: Digest, now: float) -> None:
        theirs = dict(record.versions)
        own = theirs.pop(self.node, None)
        if own is not None:
            ours = self.database.version(self.node)
            # In an epoch of ours, only what we said is known; anything else is of an earlier start.
            if own.epoch > ours.epoch or (
                own.epoch == ours.epoch
                and (own.links > ours.links or own.addresses > ours.addresses)
            ):
                self.own.claim(own.epoch)
        missing = self.database.missing(theirs)
        for names in portions(missing, self._limits) if missing else ():
            ask = Ask({name: missing[name] for name in names})
            self._send(line, encode_record(ask), now)

    def _correct(
        self, line: Adjacency, shown: Version, now: float, *, origin: str | None = None
    ) -> None:
        """Send newer links of *origin*, by default ours, to a neighbour that shows older ones."""
        if now - line.corrected_at < 1 / self._limits.mesh_updates_max:
            return
        line.corrected_at = now
        for data in self.database.answers({origin or self.node: shown}):
            self._send(line, data, now)

    def _flood(self, data: bytes, now: float, *, besides: Adjacency | None = None) -> None:
        if len(data) <= _RECENT_SIZE_MAX and besides is not None:
            if len(self._recent) >= _RECENT_MAX:
                del self._recent[next(iter(self._recent))]
            self._recent[data] = None
        for line in self.lines.values():
            if line is not besides and line.state is LineState.UP and not line.edge:
                self._send(line, data, now)

    def _send(self, line: Adjacency, data: bytes, now: float) -> None:
        line.sent_at = now
        self._effects.append(Send(line.node, data))

    def _say_hello(self, line: Adjacency, now: float) -> None:
        digest = self.database.digest
        if line.edge:
            known = self._edges.version(line.node)
            digest = mark_of(line.node, Version(known.epoch, 0, known.addresses))
        lateness_ms = min(int(self._lateness_s * 1_000), MILLISECONDS_MAX)
        hello = Hello(
            *(self.node, self.own.incarnation, line.hears, int(INTERVAL_S * 1_000)),
            *(digest, lateness_ms, self._draining),
        )
        self._send(line, encode_record(hello), now)

    # --- lines -------------------------------------------------------------------------------------

    def _step(self, line: Adjacency, now: float) -> None:
        if line.step(now, self._lateness_s):
            self._line_changed(line, now)

    def _lose(self, line: Adjacency, now: float) -> None:
        line.lose(now)
        self._line_changed(line, now)

    def _line_changed(self, line: Adjacency, now: float) -> None:
        """Tell what follows from the state that *line* has entered."""
        state = line.state
        self._effects.append(LineChanged(line.node, line.incarnation, state))
        if line.edge:
            up = {each.node for each in self.lines.values() if each.edge and each.state is LineState.UP}  # fmt: skip
            self._edges.set_reach(up, now)
            self.own.addresses_changed = True
            self._effects.append(RoutesChanged())
        else:
            self.own.links_changed = True
        if state is LineState.LOST:
            del self.lines[line.node]
            if line.edge and line.node in self._edges:
                self._edges.forget(line.node)
        else:
            self._say_hello(line, now)
        self._choose_uplink()
        if state is LineState.UP and not line.edge:
            line.differs_since = None
            if self.edge:
                self._send_own_list(line, now)
            else:
                self._send_versions(line, now)
        self._wake(now)

    def _choose_uplink(self) -> None:
        """Keep the uplink of an edge while it is up and stays; otherwise choose the one that has been there longest."""
        if not self.edge:
            return
        up = [each for each in self.lines.values() if each.state is LineState.UP]
        stay = [each.node for each in up if not each.draining] or [each.node for each in up]
        if self.uplink in stay:
            return
        self.uplink = stay[0] if stay else None
        self._effects.append(RoutesChanged())
        if self.uplink is not None:
            self.own.announce_anew()

    def _serve(self, line: Adjacency, now: float) -> None:
        """Send what is due to one neighbour: answers, versions if the databases differ, a hello."""
        left = _ANSWERS_A_TURN
        while line.answers and left:
            messages = list(islice(line.answers[0], left))
            for data in messages:
                self._send(line, data, now)
            if len(messages) < left:
                line.answers.pop(0)
            left -= len(messages)
        if (
            line.state is LineState.UP
            and line.differs_since is not None
            and now >= line.differs_since + REPAIR_S
        ):
            self._compare(line, now)
            if line.differs_since is not None:
                line.differs_since = now
                if self.edge:
                    self._send_own_list(line, now)
                else:
                    self._send_versions(line, now)
        if now >= line.sent_at + INTERVAL_S:
            self._say_hello(line, now)

    def _compare(self, line: Adjacency, now: float) -> None:
        """Note whether the digest that *line* told last differs from ours."""
        ours = self._mark() if self.edge else self.database.digest
        if line.edge or line.digest == ours:
            line.differs_since = None
        elif line.differs_since is None:
            line.differs_since = now
            self._wake(now + REPAIR_S)

    def _mark(self) -> int:
        """Return the digest of an uplink that knows all addresses of this edge."""
        known = self.database.version(self.node)
        return mark_of(self.node, Version(known.epoch, 0, known.addresses))

    def _send_versions(self, line: Adjacency, now: float) -> None:
        # Our lines as they are, not as announced, and no reach of before: a record that came just before this line was up is
        # not flooded to it, and would be missing there until the digests are compared.
        ours = {each.node: each.cost for each in self._neighbours()}
        reach = within_reach({**self.database.claims, self.node: ours}, self.node)
        versions = self.database.versions(line.node, *reach)
        for names in portions(versions, self._limits):
            digest = Digest({name: versions[name] for name in names})
            self._send(line, encode_record(digest), now)

    def _send_own_list(self, line: Adjacency, now: float) -> None:
        """Send all addresses of this edge to its uplink; another one gets an empty list of the same number."""
        version = self.database.version(self.node)
        if not version.addresses:
            return
        if line.node == self.uplink:
            for data in self.database.list_of(self.node):
                self._send(line, data, now)
        else:
            none = Addresses(self.node, version.epoch, 0, version.addresses, 0, 1, {})
            self._send(line, encode_record(none), now)

    def _flaps_of(self, peer: str, now: float) -> Flaps:
        flaps = self._flaps.get(peer)
        if flaps is None:
            # More than lines, so that one of them can make room.
            limits = self._limits
            most = max(limits.mesh_nodes_max, limits.mesh_neighbours_max) + limits.mesh_edges_max
            if len(self._flaps) >= most:
                kept = {
                    node: each for node, each in self._flaps.items()
                    if node in self.lines or now - each.at <= FLAPS_KEPT_S
                }  # fmt: skip
                # Of those that flapped within a minute, the one that was added first makes room.
                if len(kept) >= most:
                    del kept[next(node for node in kept if node not in self.lines)]
                self._flaps = kept
            flaps = self._flaps[peer] = Flaps()
        return flaps

    def _be_late(self, now: float) -> None:
        """Note that this program did not run: time that it did not observe does not count as silence."""
        late = now - self._due
        for line in self.lines.values():
            line.heard_at = min(line.heard_at + late, now)
        self._lateness_s = min(late, PATIENCE_MAX * INTERVAL_S)
        self._late_at = now
        self._due = now

    # --- our own records, and what follows from those of all ---------------------------------------

    def _addresses_changed(self, now: float) -> None:
        self.own.addresses_changed = True
        if not self._left:
            self._announce(now)

    def _announce(self, now: float) -> None:
        """Flood what changed of ourselves, as far as the rate allows."""
        if now < self.own.due:
            self._wake(self.own.due)
            return
        if self.edge:
            self.own.links_changed = False
        else:
            costs = {each.node: each.cost for each in self._neighbours()}
            links = self.own.links(costs, draining=self._draining, now=now)
            if links is not None:
                self.database.put_links(links, now, ours=True)
                self._flood(encode_record(links), now)
                self._graph_changed(now)
        if self.own.addresses_changed:
            records = self.own.addresses(self._offered(), now=now)
            for record in records:
                self.database.put_addresses(record, now, ours=True)
                if not self.edge:
                    self._flood(encode_record(record), now)
                elif self.uplink in self.lines:
                    self._send(self.lines[self.uplink], encode_record(record), now)
            if records:
                self._effects.append(RoutesChanged())
                for line in self.lines.values() if self.edge else ():
                    if line.node != self.uplink and line.state is LineState.UP:
                        self._send_own_list(line, now)
        self._wake(self.own.due)

    def _neighbours(self) -> Iterator[Adjacency]:
        for line in self.lines.values():
            if line.state is LineState.UP and not line.edge:
                yield line

    def _offered(self) -> dict[str, Offer]:
        """Return our addresses and those of our edges that are up."""
        if self._draining:
            return {}
        # Those of edges come last: they cannot take the room of our own.
        offers = {
            **self._own.of(_RECEIVED),
            **{
                address: Offer(each.flags, each.distribution, 0)
                if address in self._ailing
                else each
                for address, each in self._own.of(self.node).items()
            },
        }
        edges = [each.node for each in self.lines.values() if each.edge and each.state is LineState.UP]  # fmt: skip
        for edge in edges:
            # Stands for all addresses ``$mesh/EDGE/…``: as a pattern it would count as one, and be looked for among those.
            offers[f"$mesh/{edge}"] = Offer(TAKES | EDGE, "closest")
        self._left_out = 0
        for edge in edges:
            for address, each in self._edges.directory.of(edge).items():
                other = offers.get(address)
                if other is not None:
                    flags = each.flags | other.flags | EDGE
                    offers[address] = Offer(flags, other.distribution, other.weight or each.weight)
                elif len(offers) < self._limits.mesh_node_addresses_max:
                    offers[address] = Offer(each.flags | EDGE, each.distribution, each.weight)
                else:
                    self._left_out += 1
        return offers

    def _graph_changed(self, now: float) -> None:
        """Compute reach and paths soon: at first after 10 ms, less often while changes go on."""
        if self._compute_at == inf:
            if now - self._computed_at > 2 * self._hold_down_s:
                self._hold_down_s = HOLD_DOWN_S
            self._compute_at = now + self._hold_down_s
            self._hold_down_s = min(2 * self._hold_down_s, HOLD_DOWN_MAX_S)
            self._wake(self._compute_at)

    def _compute(self, now: float) -> None:
        self._compute_at = inf
        self._computed_at = now
        self.database.set_reach(within_reach(self.database.claims, self.node), now)
        self._paths = None
        self._effects.append(RoutesChanged())

    def _next(self, now: float) -> float:
        due = min(self._compute_at, self.own.due, self.database.expires_at or inf)
        for line in self.lines.values():
            if line.answers:
                return now
            due = min(due, line.deadline(now, self._lateness_s))
            if line.differs_since is not None and line.state is LineState.UP:
                due = min(due, line.differs_since + REPAIR_S)
        return due

    def _wake(self, at: float) -> None:
        self._due = min(self._due, at)

    def _leave(self, reason: str) -> None:
        self._left = True
        self._effects.append(Leave(reason))

    def _take(self) -> list[Effect]:
        effects = self._effects
        self._effects = []
        return effects
