"""Routing engines over simulated lines, in virtual time.

Lines deliver in order after a delay, as connections do; some lose messages, which connections do not, so that the repair by
digests is tested as well. A line that an engine reports as lost is closed and dialled again, as a host does.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.mesh.adjacency import LineState
from amqp_rt.mesh.paths import Paths
from amqp_rt.mesh.records import TAKES, Offer
from amqp_rt.mesh.routing import Effect, Leave, LineChanged, RoutingEngine, Send

#: Seconds until a host dials again.
REDIAL_S = 1.0


class Line:
    """Connection between two nodes, which may be cut in either direction."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.loss = 0.0
        #: Directions in which nothing arrives, as (from, to).
        self.cut: set[tuple[str, str]] = set()
        self.connected = False
        #: Number of the connection: what was under way on an earlier one does not arrive.
        self.number = 0


class Mesh:
    """Nodes, lines and time."""

    def __init__(self, seed: int = 0, limits: Limits = DEFAULT_LIMITS) -> None:
        self.random = Random(seed)
        self.limits = limits
        self.now = 1_000.0
        self.engines: dict[str, RoutingEngine] = {}
        self.lines: dict[frozenset[str], Line] = {}
        #: Lines of each node, by the other end.
        self.ends: dict[str, dict[str, Line]] = {}
        self.edges: set[str] = set()
        #: Nodes whose programs do not run, until when.
        self.blocked: dict[str, float] = {}
        self.sent: Counter[int] = Counter()
        self.octets: Counter[int] = Counter()
        self.left: dict[str, str] = {}
        #: Names of the simulation whose nodes have another id → the id.
        self.ids: dict[str, str] = {}
        #: Incarnation of the last start of each node.
        self.incarnations: dict[str, int] = {}
        #: States of lines as they were reported: (time, node, peer, state).
        self.reports: list[tuple[float, str, str, LineState]] = []
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._count = 0
        self._ticks: dict[str, float] = {}

    # --- what there is -----------------------------------------------------------------------------

    def start(self, node: str, *, wall_s: int = 1_790_000_000, **options: Any) -> RoutingEngine:
        """Start *node*, or start it again."""
        self.incarnations[node] = self.random.randrange(1, 2**62)
        engine = RoutingEngine(
            self.ids.get(node, node),
            self.incarnations[node],
            wall_s=wall_s,
            now=self.now,
            edge=node in self.edges,
            limits=self.limits,
            **options,
        )
        self.engines[node] = engine
        self.ends.setdefault(node, {})
        self._ticks[node] = inf
        self._plan(node)
        for peer, line in self.ends[node].items():
            # A connection of an earlier start is dead, even if its other end has not noticed.
            line.connected = False
            self.dial(node, peer)
        return engine

    def alias(self, node: str, name: str) -> None:
        """Start *node*, which uses the id *name* in the protocol."""
        self.ids[node] = name
        self.start(node)

    def stop(self, node: str, *, silent: bool = False) -> None:
        """Stop *node*; a silent end closes no connection."""
        del self.engines[node]
        for peer, line in self.ends[node].items():
            if not silent:
                self.close(node, peer)
            else:
                line.number += 1

    def link(self, one: str, other: str, delay_s: float = 0.001, *, loss: float = 0.0) -> Line:
        """Add a line between two nodes, and dial."""
        line = self.lines[frozenset((one, other))] = Line(delay_s)
        line.loss = loss
        self.ends.setdefault(one, {})[other] = line
        self.ends.setdefault(other, {})[one] = line
        self.dial(one, other)
        return line

    def unlink(self, one: str, other: str) -> None:
        """Close the line between two nodes for good."""
        self.close(one, other)
        del self.lines[frozenset((one, other))]
        del self.ends[one][other]
        del self.ends[other][one]

    def dial(self, one: str, other: str) -> None:
        """Connect two nodes if the line is there, works both ways, and is not connected."""
        line = self.ends.get(one, {}).get(other)
        if line is None or line.connected or self.left.keys() & {one, other}:
            return
        if line.cut or one not in self.engines or other not in self.engines:
            self.after(REDIAL_S, self.dial, one, other)
            return
        line.connected = True
        line.number += 1
        for a, b in ((one, other), (other, one)):
            peer = self.engines[b]
            effects = self.engines[a].connect(
                self.ids.get(b, b), peer.own.incarnation, now=self.now, edge=b in self.edges
            )
            self.carry_out(a, effects)

    def close(self, one: str, other: str) -> None:
        """Close a connection; both ends notice, unless the line is cut, and it is dialled again later."""
        line = self.ends[one].get(other)
        if line is None or not line.connected:
            return
        line.connected = False
        line.number += 1
        for a, b in ((one, other), (other, one)):
            if (b, a) not in line.cut and a in self.engines:
                self.carry_out(a, self.engines[a].disconnect(self.ids.get(b, b), now=self.now))
        self.after(REDIAL_S, self.dial, one, other)

    def _drop(self, one: str, other: str, number: int) -> None:
        line = self.ends[one].get(other)
        if line is not None and line.number == number:
            self.close(one, other)

    def graph(self, count: int, degree: int, **options: Any) -> list[str]:
        """Start *count* nodes on a ring with random further lines."""
        names = [f"node-{number:04}" for number in range(count)]
        for name in names:
            self.start(name, **options)
        for at, name in enumerate(names):
            self.link(name, names[(at + 1) % count])
        while len(self.lines) < count * degree // 2:
            one, other = self.random.sample(names, 2)
            if frozenset((one, other)) not in self.lines:
                self.link(one, other, self.random.uniform(0.0005, 0.005))
        return names

    # --- time --------------------------------------------------------------------------------------

    def after(self, seconds: float, call: Any, *args: Any) -> None:
        """Call *call* later."""
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, call, args))

    def run(self, seconds: float) -> None:
        """Let *seconds* pass."""
        until = self.now + seconds
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, args = heappop(events)
            call(*args)
        self.now = until

    def _plan(self, node: str) -> None:
        due = max(self.engines[node].deadline, self.now)
        if due < self._ticks[node]:
            self._ticks[node] = due
            self.after(due - self.now, self._tick, node, due)

    def _tick(self, node: str, due: float) -> None:
        if node not in self.engines or self._ticks[node] != due:
            return
        until = self.blocked.get(node, 0.0)
        if until > self.now:
            self._ticks[node] = until
            self.after(until - self.now, self._tick, node, until)
            return
        self._ticks[node] = inf
        self.carry_out(node, self.engines[node].tick(self.now))

    def _arrive(self, peer: str, node: str, data: bytes, line: Line, number: int) -> None:
        if line.number != number or (peer, node) in line.cut or node not in self.engines:
            return
        until = self.blocked.get(node, 0.0)
        if until > self.now:
            self.after(until - self.now, self._arrive, peer, node, data, line, number)
            return
        self.carry_out(
            node, self.engines[node].receive(self.ids.get(peer, peer), data, now=self.now)
        )

    def carry_out(self, node: str, effects: list[Effect]) -> None:
        """Do what an engine has asked for."""
        ends = self.ends[node]
        if self.ids:
            ends = {self.ids.get(name, name): line for name, line in ends.items()}
            names = {self.ids.get(name, name): name for name in self.ends[node]}
        else:
            names = {}
        for effect in effects:
            if isinstance(effect, Send):
                line = ends.get(effect.peer)
                # The kind is the second value of a list: 0xc0 or 0xd0, size, count, 0x55 or 0x54, kind.
                kind = effect.data[4] if effect.data[0] == 0xC0 else effect.data[10]
                self.sent[kind] += 1
                self.octets[kind] += len(effect.data)
                if line is None or not line.connected:
                    continue
                if line.loss and self.random.random() < line.loss:
                    continue
                self.after(
                    line.delay_s,
                    self._arrive,
                    node,
                    names.get(effect.peer, effect.peer),
                    effect.data,
                    line,
                    line.number,
                )
            elif isinstance(effect, LineChanged):
                self.reports.append((self.now, node, effect.peer, effect.state))
                peer = names.get(effect.peer, effect.peer)
                if effect.state is LineState.LOST and self.incarnations[peer] == effect.incarnation:
                    # Later, since this is called by the engine's host; not if it is connected anew by then.
                    number = ends[effect.peer].number if effect.peer in ends else 0
                    self.after(0.0, self._drop, node, peer, number)
            elif isinstance(effect, Leave):
                self.left[node] = effect.reason
                self.after(0.0, self._leave, node)
        if node in self.engines:
            self._plan(node)

    def _leave(self, node: str) -> None:
        if node in self.engines:
            self.stop(node)

    # --- what must hold ----------------------------------------------------------------------------

    def inject(self, peer: str, node: str, data: bytes) -> None:
        """Let *node* receive *data* as if *peer* had sent it."""
        self.carry_out(node, self.engines[node].receive(peer, data, now=self.now))

    def offer(self, node: str, *addresses: str, **options: Any) -> None:
        """Let *node* offer addresses."""
        for address in addresses:
            offer = Offer(TAKES, **options)
            self.carry_out(node, self.engines[node].offer(address, offer, now=self.now))

    def component(self, node: str) -> set[str]:
        """Return the interior nodes that working lines connect with *node*."""
        seen = {node}
        todo = [node]
        while todo:
            for other, line in self.ends[todo.pop()].items():
                if other in self.engines and other not in seen and other not in self.edges and not line.cut:  # fmt: skip
                    seen.add(other)
                    todo.append(other)
        return seen

    def check_quiet(self, *, paths_of: int = 5) -> None:
        """Check that all nodes of a component know the same, that paths are right, and that only hellos are sent."""
        before = dict(self.sent)
        self.run(2.0)
        more = {kind: count for kind, count in self.sent.items() if count != before.get(kind, 0)}
        assert set(more) <= {1}, f"kinds of messages sent in quiet: {set(more)}"
        rest = {node for node in self.engines if node not in self.edges}
        while rest:
            nodes = self.component(min(rest))
            rest -= nodes
            claims = {
                node: {
                    other: 1
                    for other, line in self.ends[node].items()
                    if other in nodes and not line.cut
                }
                for node in nodes
            }
            known = None
            for node in sorted(nodes):
                database = self.engines[node].database
                seen = (
                    {each: dict(database.claims[each]) for each in nodes},
                    {each: dict(database.directory.of(each)) for each in nodes},
                    database.versions(),
                    database.digest,
                )
                assert seen[0] == claims, node
                assert known is None or known == seen, node
                known = seen
            for node in self.random.sample(sorted(nodes), min(paths_of, len(nodes))):
                right = Paths(claims, node, limits=self.limits)
                ours = self.engines[node].paths()
                assert ours.costs == right.costs
                assert all(ours.path(each) == right.path(each) for each in nodes)
