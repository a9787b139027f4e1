"""Timers of fronts that hold state without a connection, such as sessions that wait for their client."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import trio

from ..fronts.base import Front, LastingFront

log = logging.getLogger("amqp_rt.container")

#: Pause in seconds after a fault of a front, so that one that fails each time does not use up the processor.
_PAUSE_S: Final = 1.0


class TimerHome(Protocol):
    """Container, as timers use it."""

    @property
    def listener_nursery(self) -> trio.Nursery:
        """Nursery of the listeners, cancelled when the container begins to stop."""


class FrontTimers:
    """Calls :meth:`~amqp_rt.fronts.base.LastingFront.tick` of fronts when they are due.

    A front is watched from its first connection on: before that it has nothing to hold.

    Args:
        home: The container, which runs the timers with its listeners, until it begins to stop.
    """

    def __init__(self, home: TimerHome) -> None:
        self._home = home
        self._watched: dict[LastingFront, None] = {}
        #: All fronts that had a connection: whether one lasts takes longer to find out than its setup.
        self._known: set[Front] = set()

    def watch(self, front: Front) -> None:
        """Call *front* when it is due from now on, if it is such a front."""
        if front in self._known:
            return
        self._known.add(front)
        if isinstance(front, LastingFront):
            self._watched[front] = None
            self._home.listener_nursery.start_soon(self._run, front)

    async def _run(self, front: LastingFront) -> None:
        """Call ``tick`` at each deadline until cancelled; the state of *front* stays as it is then."""
        changed = trio.lowlevel.ParkingLot()

        def change() -> None:
            changed.unpark_all()

        front.on_deadline = change
        try:
            while True:
                # The deadline is read after every wait, so that no change of it is missed.
                with trio.move_on_at(front.deadline):
                    await changed.park()
                now = trio.current_time()
                if now < front.deadline:
                    continue
                try:
                    front.tick(now)
                except Exception:
                    # A fault of ours: it must not end the connections of other fronts.
                    log.exception("the timer of front %r failed", front.name)
                    await trio.sleep(_PAUSE_S)
        finally:
            front.on_deadline = _nothing

    def close(self) -> None:
        """End the state of all fronts: the container stops, and all connections have ended."""
        watched, self._watched = self._watched, {}
        for front in watched:
            try:
                front.close()
            except Exception:
                log.exception("closing front %r failed", front.name)


def _nothing() -> None:
    """Ignore a changed deadline: no timer runs."""
