"""The live ladder of frames: those of connections that begin while a session watches, without secrets."""

from __future__ import annotations

from typing import Any, Final

import trio
from msgspec import Struct

from amqp_rt import Broker
from amqp_rt.errors import AmqpError
from amqp_rt.net.traces.watching import FrameWatch, WatchedRung

from ..sessions import WebSession
from .rendering import Page, Redirect
from .visits import Visit, url

#: Rungs that a page has when it is loaded.
_RUNGS: Final = 300
#: Seconds after which a watch ends: it makes each new connection slower.
WATCH_S: Final = 900.0
_ARROWS: Final = {True: "→", False: "←", None: ""}


class ShownRung(Struct, frozen=True):
    """A rung, as texts."""

    connection: int
    at: str
    arrow: str
    text: str
    bad: bool


def shown_rung(rung: WatchedRung) -> ShownRung:
    """Return *rung* as texts."""
    return ShownRung(
        rung.connection, f"{rung.at_s:.6f}", _ARROWS[rung.client], rung.text, bad=rung.bad
    )


class Ladders:
    """Watches of sessions, one for each that has started one.

    Args:
        broker: The broker whose connections are watched.
    """

    def __init__(self, broker: Broker) -> None:
        self._watches = broker.container.frame_watches
        self._of: dict[WebSession, tuple[FrameWatch, float]] = {}

    def start(self, session: WebSession) -> None:
        """Watch for *session* from now on.

        Raises:
            AmqpError: There are too many watches.
        """
        if session in self._of:
            return
        watch = self._watches.open_watch()
        if watch is None:
            raise AmqpError(
                "too many sessions watch frames (frame_watches_max): try again when one has stopped",
                condition="amqp:resource-limit-exceeded",
            )
        self._of[session] = watch, trio.current_time() + WATCH_S

    def stop(self, session: WebSession) -> None:
        """Watch no longer for *session*."""
        if (found := self._of.pop(session, None)) is not None:
            self._watches.close_watch(found[0])

    def of(self, session: WebSession) -> FrameWatch | None:
        """Return the watch of *session*, None if there is none or its time has passed."""
        found = self._of.get(session)
        if found is not None and found[1] < trio.current_time():
            self.stop(session)
            return None
        return None if found is None else found[0]

    async def run(self) -> None:
        """End watches whose session or time is over, until cancelled; then end all."""
        try:
            while True:
                await trio.sleep(10)
                for session in list(self._of):
                    if not session.alive:
                        self.stop(session)
                    self.of(session)
        finally:
            for session in list(self._of):
                self.stop(session)


async def show_ladder(visit: Visit, ladders: Ladders) -> Page:
    """Return the ladder, or the button that starts it."""
    await visit.check_manages()
    watch = ladders.of(visit.session)
    values: dict[str, Any] = {
        "watching": watch is not None,
        "rungs": [],
        "connections": 0,
        "count": 0,
    }
    if watch is not None:
        values |= {
            "rungs": [shown_rung(each) for each in watch.since(watch.count - _RUNGS)],
            "connections": watch.connections,
            "count": watch.count,
        }
    return Page(
        "ladder.html", "Frames", values, live=url("/live/ladder") if watch is not None else ""
    )


async def change_ladder(visit: Visit, ladders: Ladders) -> Redirect:
    """Start or stop the watch of the session."""
    await visit.check_manages()
    if visit.form.get("do") == "start":
        ladders.start(visit.session)
    else:
        ladders.stop(visit.session)
    return Redirect("/ladder")
