"""State of the line to one neighbour of a mesh (pure).

A line is *up* when each end names the incarnation of the other in its hellos, so that a line which works one way is never half
up. It is *suspect* after three intervals of silence, and *lost* after five seconds. Lines that flap wait longer each time
before they are up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from math import inf
from typing import Final

from .database import Allowance
from .records import Hello

#: Seconds of silence after which a node says hello.
INTERVAL_S: Final = 0.25
#: Intervals without a frame after which a neighbour is suspect, and seconds after which it is lost.
SUSPECT_INTERVALS: Final = 3
LOST_S: Final = 5.0
#: Bounds of the interval that a neighbour may choose: a shorter one would make it suspect by chance.
_INTERVAL_LEAST_S: Final = 0.05
_INTERVAL_MOST_S: Final = 5.0
#: By how much a neighbour that is late, or has a late observer, may be silent longer.
PATIENCE_MAX: Final = 8.0
#: Seconds until a line that flapped once is up again; doubled with each further flap up to the maximum.
HOLD_S: Final = 0.25
HOLD_MAX_S: Final = 30.0
#: Seconds without a flap after which earlier ones are forgotten.
FLAPS_KEPT_S: Final = 60.0
#: Requests and tables of versions of one neighbour that are handled in a second.
_REQUESTS_MAX: Final = 20


class LineState(Enum):
    """State of a line."""

    #: Connected; the neighbour has not named us yet.
    DOWN = "down"
    #: The neighbour is heard; it does not name us yet, or has flapped and has to wait.
    HEARD = "heard"
    UP = "up"
    #: Was up, then silent, or no longer names us. Its legs are kept and get nothing new.
    SUSPECT = "suspect"
    #: Silent for too long: its legs break, and the connection is to be closed.
    LOST = "lost"


class Flaps:
    """Times that the line to one node ceased to be up, which outlive its connections."""

    __slots__ = ("at", "count", "up_from")

    def __init__(self) -> None:
        self.count = 0
        self.at = -inf
        #: Earliest time at which the line may be up again.
        self.up_from = -inf

    def add(self, now: float) -> None:
        """Count a flap, and hold the line down for a while."""
        if now - self.at > FLAPS_KEPT_S:
            self.count = 0
        # 2**7 exceeds the maximum; without a bound the power would overflow.
        hold = min(HOLD_S * 2 ** min(self.count, 7), HOLD_MAX_S)
        self.count += 1
        self.at = now
        self.up_from = now + hold


class Adjacency:
    """One neighbour: what it said last, and when.

    Args:
        node: Its id, as it has logged in.
        incarnation: Its incarnation, from its open.
        cost: Cost of the line in our direction.
        edge: It is an edge, for which this node is the uplink.
        flaps: Its flaps so far.
        now: Seconds of a monotonic clock.
    """

    def __init__(
        self, node: str, incarnation: int, *, cost: int, edge: bool, flaps: Flaps, now: float
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.cost = cost
        self.edge = edge
        self.flaps = flaps
        self.state = LineState.DOWN
        self.heard_at = now
        #: Whether it was silent for too long to be up, at the last ``step``.
        self.silent = False
        #: Whether it has said hello on this connection.
        self.greeted = False
        #: When something was sent to it last. The first hello is due at once.
        self.sent_at = -inf
        self.interval_s = INTERVAL_S
        #: Seconds by which it said that it is late.
        self.lateness_s = 0.0
        #: Whether its last hello named our incarnation.
        self.names_us = False
        #: It has said that it leaves.
        self.draining = False
        #: Digest of its last hello, and since when it differs from ours.
        self.digest = 0
        self.differs_since: float | None = None
        #: Its requests that we handle, and our requests because of gaps in what it sends.
        self.requests = Allowance(_REQUESTS_MAX)
        self.asks = Allowance(_REQUESTS_MAX)
        #: Messages that it asked for, encoded a few at a time.
        self.answers: list[Iterator[bytes]] = []
        #: When we last sent it our own records because it showed older ones.
        self.corrected_at = -inf

    @property
    def hears(self) -> int:
        """Incarnation to name in hellos: 0 while the neighbour is not heard."""
        return 0 if self.silent or self.state is LineState.DOWN else self.incarnation

    def on_hello(self, hello: Hello, ours: int) -> None:
        """Note what *hello* says; *ours* is our incarnation."""
        self.greeted = True
        interval = hello.interval_ms / 1_000
        self.interval_s = min(max(interval, _INTERVAL_LEAST_S), _INTERVAL_MOST_S)
        self.lateness_s = hello.lateness_ms / 1_000
        self.names_us = hello.heard == ours
        self.draining = hello.draining
        self.digest = hello.digest

    def _bounds(self, lateness_s: float) -> tuple[float, float]:
        """Return when it is suspect and when it is lost, given our own lateness."""
        late = max(self.lateness_s, lateness_s)
        patience = min(1 + late / self.interval_s, PATIENCE_MAX)
        suspect = SUSPECT_INTERVALS * self.interval_s * patience
        return self.heard_at + suspect, self.heard_at + max(LOST_S * patience, 2 * suspect)

    def step(self, now: float, lateness_s: float) -> bool:
        """Enter the state that follows from what was heard until *now*; return whether it changed."""
        before = self.state
        suspect_at, lost_at = self._bounds(lateness_s)
        self.silent = now >= suspect_at
        if now >= lost_at:
            self.lose(now)
        elif self.silent or not self.names_us:
            if before is LineState.UP:
                self._leave_up(now)
                self.state = LineState.SUSPECT
            elif before is LineState.HEARD and self.silent:
                self.state = LineState.DOWN
            elif before is LineState.DOWN and self.greeted and not self.silent:
                self.state = LineState.HEARD
        elif now >= self.flaps.up_from:
            self.state = LineState.UP
        elif before is LineState.DOWN:
            self.state = LineState.HEARD
        return self.state is not before

    def lose(self, now: float) -> None:
        """Enter the last state: the connection has closed."""
        self._leave_up(now)
        self.state = LineState.LOST

    def _leave_up(self, now: float) -> None:
        if self.state is LineState.UP:
            self.flaps.add(now)

    def deadline(self, now: float, lateness_s: float) -> float:
        """Return when ``step`` or a hello is due next, after a ``step`` at *now*."""
        suspect_at, lost_at = self._bounds(lateness_s)
        due = min(self.sent_at + INTERVAL_S, lost_at)
        if now < suspect_at:
            if self.state in (LineState.UP, LineState.HEARD):
                due = min(due, suspect_at)
            if self.names_us and self.state in (LineState.HEARD, LineState.SUSPECT):
                due = min(due, self.flaps.up_from)
        return due
