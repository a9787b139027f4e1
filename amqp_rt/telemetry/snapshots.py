"""Values of a container and its broker at a time, taken in slices so that no connection waits for them.

A snapshot has plain values only, so that a thread can render it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import translate
from typing import Any, Final, Protocol, cast, runtime_checkable

import trio
from msgspec import Struct, field, structs

from ..broker.expiry import REASONS
from ..broker.host import BrokerHost
from ..broker.kinds.base import Node
from ..broker.queue.accounts import Counts
from ..container.container import Container
from ..fronts.base import SENDER
from ..tallies import OTHER, Distribution

#: Nodes, links or cursors that are read before other tasks get their turn.
_SLICE: Final = 250
#: Cursors of groups of logs that are named.
LAGS_MAX: Final = 1_000

#: States of messages, as in :class:`~amqp_rt.broker.statistics.NodeStats`.
STATES: Final = ("available", "acquired", "delayed")
#: Counts of a node that have a total.
TOTALS: Final = ("enqueued", "delivered", "accepted", "requeued", "expired", "dropped")
#: Outcomes of handlers: fields of :class:`~amqp_rt.container.routes.Stats`.
OUTCOMES: Final = ("accepted", "rejected", "released", "modified", "cancelled")


@runtime_checkable
class SizedStore(Protocol):
    """Store that knows its size."""

    def size_on_disk(self) -> int:
        """Return the bytes of the store. May be called from any thread."""


class NodeValues(Struct, frozen=True):
    """Values of one node."""

    virtual_host: str
    kind: str
    name: str
    messages: tuple[int, int, int]
    bytes: int


class Snapshot(Struct):
    """Values of a container, and of its broker if it has one."""

    #: Number of messages by virtual host, kind and state; bytes by virtual host and kind.
    messages: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Counts of all nodes that there are or were, by virtual host and kind.
    totals: dict[tuple[str, str], Counts] = field(default_factory=dict)
    dead_lettered: dict[str, int] = field(default_factory=dict)
    #: Nodes that were asked for, and the number of those beyond the limit.
    nodes: list[NodeValues] = field(default_factory=list)
    left_out: int = 0
    #: Connections by protocol: open ones, and counts of opened and closed ones.
    connections: Counter[str] = field(default_factory=Counter)
    opened: dict[str, int] = field(default_factory=dict)
    closed: dict[str, int] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    #: Links by the role of the peer.
    links: Counter[str] = field(default_factory=Counter)
    logins_failed: dict[str, int] = field(default_factory=dict)
    memory: tuple[int, int] | None = None
    store: SizedStore | None = None
    commit_seconds: Distribution | None = None
    batch_messages: Distribution | None = None
    #: Records that a group has not read: virtual host, log, group, number.
    lags: list[tuple[str, str, str, int]] = field(default_factory=list)
    #: What is stuck, by cause.
    stuck: dict[str, int] = field(default_factory=dict)
    #: Running handlers, and outcomes, by route.
    running: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)


class _Slices:
    """Gives other tasks their turn after every few steps."""

    def __init__(self) -> None:
        self._steps = 0

    async def step(self, cost: int = 1) -> None:
        self._steps += cost
        if self._steps >= _SLICE:
            self._steps = 0
            await trio.lowlevel.checkpoint()


async def take_snapshot(
    container: Container, broker: BrokerHost | None, *, named: str | None = None
) -> Snapshot:
    """Return the present values; what changes meanwhile may be in it or not.

    Args:
        container: The container.
        broker: Its broker.
        named: Pattern with ``*`` and ``?`` of the nodes whose own values are wanted; None for none.

    If cancelled, there is no snapshot.
    """
    found = Snapshot()
    slices = _Slices()
    if broker is not None:
        await _add_nodes(found, container, broker, named, slices)
        await _add_lags(found, broker, slices)
        _add_broker(found, broker)
    tallies = container.tallies
    for counts, into in ((tallies.opened, found.opened), (tallies.closed, found.closed)):
        into.update(counts.items())
    found.refused.update(dict(tallies.refused.items()))
    found.logins_failed.update(tallies.logins_failed.items())
    await _add_connections(found, container, slices)
    _add_handlers(found, container)
    found.stuck.update(tallies.stuck)
    return found


async def _add_nodes(
    found: Snapshot, container: Container, broker: BrokerHost, named: str | None, slices: _Slices
) -> None:
    most = container.limits.metrics_nodes_max
    # Not fnmatch(), which keeps the patterns of thousands of strangers.
    pattern = None if named is None else re.compile(translate(named))
    for space in list(broker.spaces):
        for kind, counts in space.retired.items():
            found.totals.setdefault((space.name, kind), Counts()).add(counts)
        # Of nodes that are deleted meanwhile, the counts are read once: now, or when they were there.
        retiring: list[Node] = []
        read: set[Node] = set()
        space.retiring.append(retiring)
        try:
            for name in space.names:
                await slices.step()
                node = space.nodes.get(name)
                if node is not None:
                    read.add(node)
                    _add_node(found, space.name, node, pattern, most)
        finally:
            space.retiring.remove(retiring)
        for gone in retiring:
            if gone not in read:
                found.totals.setdefault((space.name, gone.kind), Counts()).add(gone.held.counts)


def _add_node(
    found: Snapshot, host: str, node: Node, pattern: re.Pattern[str] | None, most: int
) -> None:
    values = _values_of(host, node)
    for state, count in zip(STATES, values.messages, strict=True):
        found.messages[host, node.kind, state] += count
    found.bytes[host, node.kind] += values.bytes
    found.totals.setdefault((host, node.kind), Counts()).add(node.held.counts)
    if pattern is not None and pattern.match(node.name):
        if len(found.nodes) < most:
            found.nodes.append(values)
        else:
            found.left_out += 1


async def _add_lags(found: Snapshot, broker: BrokerHost, slices: _Slices) -> None:
    for log, periodic in list(broker.services.logs.items()):
        node = cast("Node", periodic)
        for group, lag in log.lags():
            await slices.step(10)
            if len(found.lags) < LAGS_MAX:
                found.lags.append((node.space.name, node.name, group, lag))
            else:
                found.left_out += 1


def _values_of(virtual_host: str, node: Node) -> NodeValues:
    held = node.held
    return NodeValues(
        virtual_host,
        node.kind,
        node.name,
        (held.available, held.acquired, node.delayed),
        held.bytes,
    )


def _add_broker(found: Snapshot, broker: BrokerHost) -> None:
    services = broker.services
    found.memory = (services.memory.held, services.memory.limit)
    # Each reason from the beginning: of a series that begins with its first message, rates leave that out.
    found.dead_lettered.update(dict.fromkeys(REASONS, 0))
    found.dead_lettered.update(services.dead_lettered.items())
    found.refused.update(dict(services.refused.items()))
    journal = services.journal
    if journal is not None:
        found.commit_seconds = journal.commit_seconds.copy()
        found.batch_messages = journal.batch_messages.copy()
        if isinstance(journal.store, SizedStore):
            found.store = journal.store


async def _add_connections(found: Snapshot, container: Container, slices: _Slices) -> None:
    for connection in list(container.connections):
        if connection.engine_over:
            continue
        found.connections[connection.peer.protocol] += 1
        for session in list(connection.engine.sessions.values()):
            found.sessions += 1
            links = _attached(session)
            for link in links:
                found.links["receiver" if link.role == SENDER else "sender"] += 1
            await slices.step(1 + len(links))


def _attached(session: Any) -> list[Any]:
    found: Iterator[Any] = iter(list(session.links.values()))
    return [link for link in found if link.attached]


def _add_handlers(found: Snapshot, container: Container) -> None:
    most = container.limits.metrics_nodes_max
    for workers in list(container.nodes.workers):
        route = workers.route
        name = (
            route.address if len(found.running) < most or route.address in found.running else OTHER
        )
        found.running[name] += workers.running
        for outcome in OUTCOMES:
            found.outcomes[name, outcome] += getattr(route.stats, outcome)
    for name, stats in container.nodes.retired.items():
        for outcome in OUTCOMES:
            found.outcomes[name, outcome] += structs.asdict(stats)[outcome]
