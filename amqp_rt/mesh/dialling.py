"""Dialling of other members: which places, in which order, and when again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import trio
from msgspec import Struct

from ..addresses import parse_url
from ..container.connections import Connection
from ..errors import AmqpError
from ..loglimit import error_text
from ..net.endpoints import is_loopback
from ..outcomes import Error
from ..values import Symbol
from .discovery import Discovery, Found
from .routing import RoutingEngine
from .ways import Ways, weight_of

log = logging.getLogger("amqp_rt.mesh")

#: Neighbours that a node dials, and of these in its own zone.
DIALLED: Final = 4
DIALLED_IN_ZONE: Final = 3
#: Uplinks that an edge is connected with.
UPLINKS: Final = 2
#: Seconds between two looks at whom to dial, and until a place that failed is dialled again.
LOOK_S: Final = 1.0
REDIAL_S: Final = 1.0
REDIAL_MAX_S: Final = 10.0
#: Entry of the error with which a member closes a connection because another one with the peer stays.
DUPLICATE: Final = Symbol("x-opt-mesh-duplicate")


class Dial(Protocol):
    """Opens a connection to a place, which closes with the block."""

    def __call__(self, found: Found) -> AbstractAsyncContextManager[Connection]:
        """Return the block."""


class _Place(Struct):
    """Where a member may listen, and what became of the last attempt."""

    found: Found
    #: Node that was there last; empty if that is not known.
    node: str = ""
    dialling: bool = False
    dial_at: float = -math.inf
    pause_s: float = REDIAL_S
    #: Why the last attempt failed, as it was logged; empty if it did not.
    failure: str = ""


class Dialling:
    """Places at which members may listen, and connections with these.

    Args:
        engine: The routing of this member.
        ways: Has the neighbours.
        discovery: Has the places that the seeds name.
        dial: Opens a connection.
        zone: Zone of this member.
        is_member: Returns the id of the member of the mesh at the other end of a connection; None if that is none.
        take_refusal: Returns the error with which the member at the other end has refused to use a connection; None if it
            has not.
    """

    def __init__(
        self,
        engine: RoutingEngine,
        ways: Ways,
        discovery: Discovery,
        dial: Dial,
        *,
        zone: str,
        is_member: Callable[[Connection], str | None],
        take_refusal: Callable[[Connection], Error | None],
    ) -> None:
        self._engine = engine
        self._ways = ways
        self._discovery = discovery
        self._dial = dial
        self._zone = zone
        self._is_member = is_member
        self._take_refusal = take_refusal
        self.places: dict[str, _Place] = {}
        self._wakeup = trio.Event()
        #: When an edge dialled last.
        self._dialled_at = -math.inf
        self._nursery: trio.Nursery

    def look(self) -> None:
        """Look soon at whom to dial."""
        self._wakeup.set()

    async def run(self, stopping: Callable[[], bool]) -> None:
        """Dial others until cancelled; no new ones while *stopping* returns True."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                self._wakeup = trio.Event()
                if not stopping():
                    if self._engine.edge:
                        self._dial_uplink()
                    else:
                        self._dial_some()
                with trio.move_on_after(LOOK_S):
                    await self._wakeup.wait()
                # Records arrive in bursts; each may bring URLs.
                await trio.sleep(0.01)

    def _dial_uplink(self) -> None:
        """Dial the first place of the seeds without a connection, as long as there are fewer uplinks than an edge has.

        A place that has not answered after a second does not hold up the next one.
        """
        now = trio.current_time()
        order = {str(found.url): (at, found) for at, found in self._discovery.in_order()}
        for key in list(self.places):
            if key not in order and not self.places[key].dialling:
                del self.places[key]
        for key, (_, found) in order.items():
            self.places.setdefault(key, _Place(found)).found = found
        uplinks = {each.node for each in self._ways.neighbours.values()} - {self._ways.node}
        pending = sum(each.dialling and each.node not in uplinks for each in self.places.values())
        if len(uplinks) >= UPLINKS or (pending and now < self._dialled_at + LOOK_S):
            return
        # Places of one seed come in an order of this edge, so that not all use the same.
        for key in sorted(order, key=lambda key: (order[key][0], weight_of(self._ways.node, key))):
            place = self.places[key]
            if not place.dialling and now >= place.dial_at and place.node not in uplinks:
                self._dialled_at = now
                self._start(place)
                return

    def _start(self, place: _Place) -> None:
        place.dialling = True
        self._nursery.start_soon(self._run_dialled, place)

    def _dial_some(self) -> None:
        now = trio.current_time()
        for found in self._discovery.places:
            # Another node may have named the URL before, without the name of its certificate.
            self.places.setdefault(str(found.url), _Place(found)).found = found
        seeds = {str(found.url) for found in self._discovery.places}
        wanted = self._wanted()
        for key in list(self.places):
            place = self.places[key]
            if key not in seeds and place.node not in wanted and not place.dialling:
                del self.places[key]
        for node, url in wanted.items():
            try:
                place = self.places.setdefault(url, _Place(Found(parse_url(url))))
            except AmqpError:
                continue
            place.node = node
        ours = self._ways.neighbours
        idle = [
            place
            for key, place in sorted(
                self.places.items(), key=lambda item: weight_of(self._ways.node, item[0])
            )
            if not place.dialling and now >= place.dial_at and place.node != self._ways.node
        ]
        for place in idle:
            if place.node in ours:
                continue
            if place.node not in wanted and place.node in self._engine.paths().costs:
                # Others lead there. Only places out of reach are dialled again and again.
                continue
            busy = sum(each.dialling and not each.node for each in self.places.values())
            if not place.node and busy >= DIALLED:
                continue
            self._start(place)

    def _wanted(self) -> dict[str, str]:
        """Return the nodes to dial, with a URL of each."""
        engine = self._engine
        here = self._ways.node
        reached = [
            links
            for node in engine.paths().costs
            if node != here and (links := engine.database.links(node)) is not None and links.urls
        ]
        reached.sort(key=lambda links: weight_of(here, links.origin))
        near = [each for each in reached if each.zone == self._zone][:DIALLED_IN_ZONE]
        rest = [each for each in reached if each not in near][: DIALLED - len(near)]
        return {each.origin: each.urls[0] for each in (*near, *rest)}

    async def _run_dialled(self, place: _Place) -> None:
        """Dial *place*, and wait for the end of the connection."""
        try:
            async with self._dial(place.found) as connection:
                node = self._is_member(connection)
                if node is None:
                    failure = f"no member of this mesh at {place.found.url}"
                    if place.node:
                        # One that was a member has left while its container still listens: nothing to warn of.
                        log.debug("mesh: %s", failure)
                    else:
                        self._log_failure(place, failure)
                    return
                place.node = node
                self.look()
                await connection.wait_closed()
                refusal = self._take_refusal(connection)
                if refusal is None:
                    place.pause_s = REDIAL_S
                    place.failure = ""
                else:
                    self._log_failure(
                        place,
                        f"{node!r:.100} at {place.found.url} refuses this member: {error_text(refusal)}",
                    )
        except (AmqpError, OSError) as error:
            if place.node or DUPLICATE in getattr(error, "info", ()):
                # The end of the line to a member that was there was logged; and one that closes a second connection of
                # two members, or one with ourselves, was reached.
                log.debug("mesh: %s cannot be dialled: %s", place.found.url, error)
            else:
                self._log_failure(place, f"the seed {place.found.url} is not reached: {error}")
        finally:
            place.dialling = False
            place.dial_at = trio.current_time() + place.pause_s
            place.pause_s = min(2 * place.pause_s, REDIAL_MAX_S)
            self.look()

    def _log_failure(self, place: _Place, failure: str) -> None:
        """Log why *place* cannot be used: once as a warning, then at debug level until the reason changes."""
        level = logging.DEBUG if failure == place.failure else logging.WARNING
        place.failure = failure
        log.log(level, "mesh: %s; this member keeps trying", failure)


def is_loopback_url(url: str) -> bool:
    """Return whether *url* leads to this machine, or to this process."""
    where = parse_url(url, listening=True)
    if where.scheme not in ("amqp", "amqps", "ws", "wss"):
        return True
    try:
        return is_loopback(where.host)
    except ValueError:
        return where.host == "localhost"
