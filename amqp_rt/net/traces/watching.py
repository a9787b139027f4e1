"""Frames of connections as they pass, for operators: the rungs of their ladders, without secrets and messages.

A :class:`FrameWatch` follows the connections that begin while it is open: secrets can be masked only in octets that are
followed from their beginning. Without an open watch, connections are not followed at all.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from msgspec import Struct

from ...clock import Clock
from ...limits import DEFAULT_LIMITS, Limits
from .drawing import Climber, Rung
from .recording import Kind, Mask, TraceRecord

__all__ = ["FrameWatch", "FrameWatches", "WatchedRung"]

#: Characters shown of the address of a peer.
_ADDRESS_MAX: Final = 200


class WatchedRung(Struct, frozen=True):
    """A frame, or another event of a connection."""

    #: Number of the connection, from 1 for each watch.
    connection: int
    #: Seconds since the connection began.
    at_s: float
    #: Whether the side that dialled caused it, else the other one; None for neither.
    client: bool | None
    text: str
    #: Whether it is malformed or unexpected.
    bad: bool


class FrameWatch:
    """Last rungs of the connections that begin while it is open.

    Args:
        connections_max: Connections that it follows; later ones are only counted.
        rungs_max: Rungs that it keeps, the latest ones.
    """

    def __init__(self, connections_max: int, rungs_max: int) -> None:
        self._connections_max = connections_max
        self._rungs: deque[WatchedRung] = deque(maxlen=rungs_max)
        self.connections = 0
        #: Number of all rungs so far, those included that are no longer kept.
        self.count = 0
        self.is_open = True

    def since(self, count: int) -> list[WatchedRung]:
        """Return the rungs after the first *count* ones, as far as they are kept."""
        first = self.count - len(self._rungs)
        return list(islice(self._rungs, max(0, count - first), None))

    def begin(self) -> int | None:
        """Return the number of a connection that begins; None if it is not followed."""
        self.connections += 1
        return self.connections if self.connections <= self._connections_max else None

    def add(self, connection: int, rung: Rung) -> None:
        """Keep *rung* of the connection with this number."""
        self._rungs.append(WatchedRung(connection, rung.at_s, rung.client, rung.text, bad=rung.bad))
        self.count += 1


class FrameWatches:
    """The open watches of a container."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._open: list[FrameWatch] = []

    def __bool__(self) -> bool:
        """Whether a watch is open."""
        return bool(self._open)

    def open_watch(self) -> FrameWatch | None:
        """Open a watch, to be closed by :meth:`close_watch`; None if ``frame_watches_max`` are open."""
        if len(self._open) >= self._limits.frame_watches_max:
            return None
        watch = FrameWatch(
            self._limits.frame_watch_connections_max, self._limits.frame_watch_rungs_max
        )
        self._open.append(watch)
        return watch

    def close_watch(self, watch: FrameWatch) -> None:
        """Close *watch*, which gets no further rungs. A second call has no effect."""
        if watch.is_open:
            watch.is_open = False
            self._open.remove(watch)

    def open(self, *, client: bool, address: str, clock: Clock) -> FramesOfConnection | None:
        """Follow a connection that begins, for the open watches; None without one."""
        followed = [(each, number) for each in self._open if (number := each.begin()) is not None]
        if not followed:
            return None
        return FramesOfConnection(followed, client=client, address=address, clock=clock)


class FramesOfConnection:
    """Input and output of one connection, on their way to watches (:class:`~.recording.TraceSink`)."""

    def __init__(
        self,
        followed: list[tuple[FrameWatch, int]],
        *,
        client: bool,
        address: str,
        clock: Clock,
    ) -> None:
        self._followed = followed
        self._clock = clock
        self._began = clock.monotonic()
        self._masks = Mask.pair(client=client)
        self._climber: Climber | None = Climber(client=client)
        self._draw(Rung(0.0, None, f"a connection with {address[:_ADDRESS_MAX] or 'a peer'}"))

    def received(self, data: bytes) -> None:
        """Draw the frames that *data* from the peer completes."""
        self._octets(Kind.RECEIVED, data)

    def sent(self, data: bytes) -> None:
        """Draw the frames that *data* to the peer completes."""
        self._octets(Kind.SENT, data)

    def received_eof(self) -> None:
        """Draw the end of the peer's half of the stream."""
        self._record(Kind.RECEIVED_EOF, b"")

    def close(self) -> None:
        """Draw the end of the connection."""
        if self._climber is not None:
            for rung in self._climber.top():
                self._draw(rung)
        self._record(Kind.END, b"")

    def _octets(self, kind: Kind, data: bytes) -> None:
        if self._climber is None or not data:
            return
        kind, shown = self._masks[kind is Kind.SENT].record(kind, data)
        if shown:
            self._record(kind, shown)

    def _record(self, kind: Kind, data: bytes) -> None:
        if self._climber is None:
            return
        at_s = max(0.0, self._clock.monotonic() - self._began)
        for rung in self._climber.climb(TraceRecord(kind, at_s, data)):
            self._draw(rung)

    def _draw(self, rung: Rung) -> None:
        watching = False
        for watch, number in self._followed:
            if watch.is_open:
                watching = True
                watch.add(number, rung)
        if not watching:
            # Octets that are not followed leave a gap: no later watch can continue here.
            self._climber = None
            self._followed = []
