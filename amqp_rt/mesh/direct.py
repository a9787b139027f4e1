"""Direct connections: to destinations that are no neighbours, so that links to them pass no other node."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple

import trio
from msgspec import Struct

from ..addresses import parse_url
from ..container.connections import Connection
from ..errors import AmqpError
from .discovery import Found
from .neighbours import Neighbour
from .ways import Ways

log = logging.getLogger("amqp_rt.mesh")

#: Seconds between two looks at whom to dial.
LOOK_S: Final = 1.0
#: Seconds without messages after which a direct connection makes room for another, and is closed without links.
UNUSED_S: Final = 10.0
#: Seconds until a destination that could not be dialled is dialled again; doubled with each failure.
_REDIAL_S: Final = 1.0
_REDIAL_MAX_S: Final = 60.0


class LinkUse(NamedTuple):
    """Use of one link of our clients to a destination."""

    node: str
    #: Ids to pass; empty for this node.
    path: tuple[str, ...]
    #: When the last message was sent; a link of one client counts as used all the time.
    used_at: float


class _DirectLine(Struct):
    """A destination that is or was dialled."""

    dialling: bool = False
    #: Links make room for others: when the last of them has ended, the connection is closed.
    leaving: Neighbour | None = None
    dial_at: float = -math.inf
    pause_s: float = _REDIAL_S


class DirectLines:
    """Direct connections that this node opens, ``mesh_direct_max`` at a time.

    A destination is dialled when messages go there over other nodes. When there is no room, one makes room to which none have gone
    for a while. Such a connection is no adjacency: no other node learns of it, and without it links take the path of the routing.
    The destination uses it for replies only.

    Args:
        ways: Has the connections.
        uses: Returns the links of our clients.
        dial: Opens a connection to a node, which closes with the block. Other nodes that answer there close it.
        on_left: Called when links have to leave a connection.
    """

    def __init__(
        self,
        ways: Ways,
        uses: Callable[[], Iterable[LinkUse]],
        dial: Callable[[str, Found], AbstractAsyncContextManager[Connection]],
        on_left: Callable[[], None],
    ) -> None:
        self._ways = ways
        self._uses = uses
        self._dial = dial
        self._on_left = on_left
        self._lines: dict[str, _DirectLine] = {}
        #: When the last message was sent to each destination that has links.
        self._used_at: dict[str, float] = {}

    async def run(self, stopping: Callable[[], bool]) -> None:
        """Dial and leave destinations until cancelled; not while *stopping* returns True."""
        async with trio.open_nursery() as nursery:
            while True:
                if not stopping():
                    for node in self._look(trio.current_time()):
                        self._lines[node].dialling = True
                        url = self._ways.urls_of(node)[0]
                        nursery.start_soon(self._stay_connected, node, url)
                await trio.sleep(LOOK_S)

    def _look(self, now: float) -> list[str]:
        """Leave destinations that are not used; return those to dial."""
        far = self._note_uses()
        ways = self._ways
        wanted = [
            node
            for node in far
            if node not in ways.neighbours
            and node not in ways.direct
            and now < self._used_at[node] + UNUSED_S
            and ways.urls_of(node)
        ]
        for node in [each for each, line in self._lines.items() if not line.dialling]:
            # A pause outlives a moment without links, and no longer: nodes come and go.
            if node not in wanted and now >= self._lines[node].dial_at:
                del self._lines[node]
        found: list[str] = []
        room = ways.limits.mesh_direct_max - sum(each.dialling for each in self._lines.values())
        for node in wanted:
            line = self._lines.setdefault(node, _DirectLine())
            if not line.dialling and now >= line.dial_at:
                found.append(node)
        self._leave(now, len(found) - room)
        return found[: max(room, 0)]

    def _note_uses(self) -> list[str]:
        """Note what was sent since the last look; return the nodes to which links lead over others, the latest used first."""
        used_at: dict[str, float] = {}
        far: dict[str, None] = {}
        for use in self._uses():
            # Links that take another way begin anew.
            before = used_at.get(use.node, self._used_at.get(use.node, -math.inf))
            used_at[use.node] = max(before, use.used_at)
            if len(use.path) > 1:
                far[use.node] = None
        self._used_at = used_at
        return sorted(far, key=lambda node: -self._used_at[node])

    def _leave(self, now: float, needed: int) -> None:
        """Close connections without links, and let *needed* others make room, the least recently used first."""
        direct = self._ways.direct
        unused = sorted(
            (
                node
                for node in self._lines
                if node in direct and now >= self._used_at.get(node, -math.inf) + UNUSED_S
            ),
            key=lambda node: self._used_at.get(node, -math.inf),
        )
        leaving = sum(each.leaving is not None for each in self._lines.values())
        for node in unused:
            # A connection that was opened a moment ago waits for the first of its links.
            if needed > leaving or node not in self._used_at:
                # Links to the node take the path of the routing, each between two messages.
                self._lines[node].leaving = direct.pop(node)
                self._on_left()
                leaving += 1
        for line in self._lines.values():
            if line.leaving is not None and not line.leaving.opened:
                line.leaving.lose("no link needs the direct connection any more")

    async def _stay_connected(self, node: str, url: str) -> None:
        """Dial *node*, and wait for the end of the connection."""
        line = self._lines[node]
        try:
            async with self._dial(node, Found(parse_url(url))) as connection:
                found = self._ways.direct.get(node)
                # Another node may listen at its URL by now.
                if found is not None and found.connection is connection:
                    line.pause_s = _REDIAL_S
                    await connection.wait_closed()
        except (AmqpError, OSError) as error:
            log.debug("mesh: no direct connection to %.100r: %s", node, error)
        finally:
            line.dialling = False
            line.leaving = None
            line.dial_at = trio.current_time() + line.pause_s
            line.pause_s = min(2 * line.pause_s, _REDIAL_MAX_S)
