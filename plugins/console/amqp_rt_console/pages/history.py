"""Depth and rates of the nodes that users watch: one sample in ten seconds, for an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import trio
from msgspec import Struct

from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits

from .kinds import NODE
from .plots import Series

#: Seconds between two samples, and samples that are kept: an hour.
STEP_S: Final = 10.0
SAMPLES: Final = 360


class Sample(Struct, frozen=True):
    """Values of a node at one time."""

    #: Messages in the node, those included that are delivered and unsettled.
    depth: float
    #: Messages since the node was made.
    enqueued: float
    delivered: float


class NodeHistory:
    """Samples of one node, at equal distances; None where there was no answer."""

    def __init__(self) -> None:
        self._samples: deque[Sample | None] = deque(maxlen=SAMPLES)

    def add(self, row: Mapping[str, Any] | None) -> None:
        """Add the values of *row*, the attributes of the node; None if they are unknown."""
        sample = None
        if row is not None:
            sample = Sample(
                float(row.get("available", 0)) + float(row.get("acquired", 0)),
                float(row.get("enqueued", 0)),
                float(row.get("delivered", 0)),
            )
        self._samples.append(sample)

    def depths(self) -> list[Series]:
        """Return the line of the messages in the node."""
        return [
            Series("messages", [None if each is None else each.depth for each in self._samples])
        ]

    def rates(self) -> list[Series]:
        """Return the lines of messages a second, in and out; a node that was made anew begins with a gap."""
        return [
            Series("in, messages a second", self._rate(lambda each: each.enqueued)),
            Series("out, messages a second", self._rate(lambda each: each.delivered)),
        ]

    def _rate(self, count: Callable[[Sample], float]) -> list[float | None]:
        found: list[float | None] = []
        before: Sample | None = None
        for each in self._samples:
            if each is None or before is None or count(each) < count(before):
                found.append(None)
            else:
                found.append((count(each) - count(before)) / STEP_S)
            before = each
        return found


class NodeReader(Protocol):
    """Client of ``$management`` with the rights of a user."""

    async def read(self, kind: str, name: str) -> Mapping[str, Any]:
        """Return the attributes of the entity *name*.

        Raises:
            AmqpError: There is none, or the user may not see it.
        """


class WatchingSession(Protocol):
    """Session of a user, whose rights decide which nodes can be watched."""

    @property
    def management(self) -> NodeReader:
        """Client of ``$management``."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""


class Watches:
    """Nodes that sessions watch, ``console_watched_nodes_max`` of all sessions together.

    A session has its own samples, read with the rights of its user; they end with the session.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._watched: dict[WatchingSession, dict[str, NodeHistory]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._watched.values()))

    def of(self, session: WatchingSession) -> Mapping[str, NodeHistory]:
        """Return the histories of the nodes that *session* watches, by name."""
        return self._watched.get(session, {})

    async def watch(self, session: WatchingSession, name: str) -> None:
        """Watch node *name* from now on.

        Raises:
            AmqpError: There is no such node, the user may not manage it, or too many nodes are watched.
        """
        row = await session.management.read(NODE, name)
        if name in self.of(session):
            return
        if len(self) >= self._limits.console_watched_nodes_max:
            raise AmqpError(
                f"node {name!r:.100} is not watched: {len(self)} nodes are watched already"
                " (console_watched_nodes_max); stop watching another one",
                condition="amqp:resource-limit-exceeded",
            )
        history = self._watched.setdefault(session, {})[name] = NodeHistory()
        history.add(row)

    def stop(self, session: WatchingSession, name: str) -> None:
        """Forget the history of node *name*; without one nothing happens."""
        watched = self._watched.get(session)
        if watched is not None:
            watched.pop(name, None)
            if not watched:
                del self._watched[session]

    async def run(self) -> None:
        """Take a sample of each watched node every ten seconds, until cancelled."""
        due = trio.current_time()
        while True:
            due = max(due + STEP_S, trio.current_time())
            await trio.sleep_until(due)
            async with trio.open_nursery() as nursery:
                for session in list(self._watched):
                    if session.alive:
                        nursery.start_soon(self._sample, session)
                    else:
                        del self._watched[session]

    async def _sample(self, session: WatchingSession) -> None:
        for name, history in self._still_watched(session):
            row: Mapping[str, Any] | None = None
            # A session that does not answer must not delay the next samples of others.
            with trio.move_on_after(STEP_S / 2):
                try:
                    row = await session.management.read(NODE, name)
                except AmqpError:
                    row = None
            history.add(row)

    def _still_watched(self, session: WatchingSession) -> Iterator[tuple[str, NodeHistory]]:
        """Yield the nodes that *session* watches, with their histories; nodes may be added and removed in between."""
        for name in list(self.of(session)):
            history = self.of(session).get(name)
            if history is not None:
                yield name, history
