"""Links of clients that go to one destination, chosen when they attach, and stay there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, Final, NamedTuple

import trio

from ..errors import LocalProtocolError
from ..fronts.base import SENDER, LinkSession, ReceivingLink, SendingLink
from ..outcomes import Error
from ..termini import Coordinator, outlives_connection
from .fans import ABSENT_S
from .hops import PINNED, LegUse, Route
from .routing import MeshRoute
from .splices import Splice
from .ways import Ways

#: Address under which nodes offer to coordinate transactions; no link has it.
COORDINATOR: Final = "$coordinator"
#: Seconds between two attempts to find another path for a link that a node on the way refused.
RETRY_S: Final = 0.1
_ABSENT: Final = Error("amqp:not-found", "no destination of this address can be reached")
_NO_COORDINATOR: Final = Error(
    "amqp:not-implemented", "no node within reach coordinates transactions"
)


def _rank(name: str, node: str) -> bytes:
    """Return what orders nodes for *name*; names that differ only in a number have different orders too."""
    return blake2b(f"{name}\0{node}".encode(), digest_size=8).digest()


class PinnedLink(NamedTuple):
    """Link of a client, and where it leads."""

    node: str
    #: Empty for a link to this node.
    path: tuple[str, ...]
    link: ReceivingLink | SendingLink


class _Pin:
    """Where the pinned links of one session of a client lead."""

    def __init__(self) -> None:
        #: Links by the splice that joins them, the latest last.
        self.links: dict[Splice, PinnedLink] = {}
        #: Node that coordinates the session's transactions; None before the first of its control links.
        self.coordinator: str | None = None

    @property
    def node(self) -> str | None:
        """Node of the latest link; None without one."""
        return next(reversed(self.links.values())).node if self.links else None

    def path_to(self, node: str) -> tuple[str, ...] | None:
        """Return the path that a link of the session takes to *node*; None without one."""
        for each in self.links.values():
            if each.node == node:
                return each.path
        return None


class PinnedLinks:
    """Links of clients, each joined with a link along a path.

    Args:
        ways: The ways from here.
        on_wait: Called when :meth:`look_after` has to be called earlier.
        give_up: Called with the address, a link that has found no path to it, and the error with which to refuse it.
    """

    def __init__(
        self,
        ways: Ways,
        on_wait: Callable[[], None],
        give_up: Callable[[str, ReceivingLink | SendingLink, Error], None],
    ) -> None:
        self._ways = ways
        self._on_wait = on_wait
        self._give_up = give_up
        self._seeking: dict[Seeker, None] = {}
        self._pins: dict[LinkSession, _Pin] = {}
        #: Ids of the connections of clients.
        self._clients: dict[object, str] = {}
        self._numbers = count(1)
        #: Settled messages that were lost with a link.
        self.dropped = 0

    def __len__(self) -> int:
        """Return the number of links that are joined."""
        return sum(len(each.links) for each in self._pins.values())

    def stuck(self, since: float) -> int:
        """Return the number of messages without an outcome, in either direction, that were sent before *since*."""
        return sum(splice.stuck(since) for pin in self._pins.values() for splice in pin.links)

    def joined(self) -> Iterator[tuple[PinnedLink, Splice]]:
        """Yield the links that are joined, or about to be."""
        # A copy, since links end between two turns of a query.
        for pin in list(self._pins.values()):
            for splice, pinned in list(pin.links.items()):
                yield pinned, splice

    @property
    def seeking(self) -> int:
        """Number of links in search of a path."""
        return len(self._seeking)

    # --- where links go ----------------------------------------------------------------------------

    def route(self, address: str, link: ReceivingLink | SendingLink, node: str = "") -> None:
        """Join *link* with one to the best destination of *address*, or to *node*, now or when there is a path."""
        if len(self._seeking) >= self._ways.limits.mesh_seeking_max:
            link.refuse(Error("amqp:resource-limit-exceeded", "mesh_seeking_max links seek a path"))
        else:
            Seeker(self, address, link, node, trio.current_time() + ABSENT_S).attempt()

    def coordinator_of(self, session: LinkSession) -> str | None:
        """Return the node that coordinates transactions of *session*; None if none does."""
        pin = self._pins.get(session)
        return None if pin is None else pin.coordinator

    def coordinate(self, link: ReceivingLink | SendingLink, *, own: bool) -> bool:
        """Route *link*, a control link of transactions; return False if it belongs here.

        It goes where the links of its session are, since only the transactions of that node are of use to them. Without
        such, to the nearest node with a coordinator; rules say which nodes may offer that.

        Args:
            link: The link, requested and not answered.
            own: Whether this node coordinates transactions.
        """
        pin = self._pin(link.session)
        node = pin.coordinator or pin.node
        if node is None:
            # The uplink of an edge says which node it is, if the edge itself does not coordinate.
            found = [] if own and self._ways.engine.edge else self._ways.destinations(COORDINATOR)
            node = found[0].node if found else (self._ways.node if own else "")
        if node == self._ways.node and pin.node != node:
            pin.coordinator = node
            return False
        # Also where the links of the session lead over our connection to ourselves, to a broker outside.
        self.route(COORDINATOR, link, node)
        return True

    def _pin(self, session: LinkSession) -> _Pin:
        pin = self._pins.get(session)
        if pin is None:
            pin = self._pins[session] = _Pin()
            session.followers[self] = lambda: self._session_ended(session)
        return pin

    def _session_ended(self, session: LinkSession) -> None:
        self._pins.pop(session, None)

    def destinations(
        self, address: str, link: ReceivingLink | SendingLink, node: str
    ) -> list[MeshRoute]:
        """Return where *link* may go, the best first.

        If its terminus is to be kept, the order is the same from every node: a client that attaches again elsewhere finds it.
        """
        found = self._ways.destinations(address, gives=link.role == SENDER)
        if not node:
            if outlives_connection(link.source if link.role == SENDER else link.target):
                peer = link.peer
                name = f"{peer.user or ''}\0{peer.container_id}\0{link.name}"
                found.sort(key=lambda each: _rank(name, each.node))
            return found
        at_node = [each for each in found if each.node == node]
        return at_node or self._ways.at(node)

    # --- joining -----------------------------------------------------------------------------------

    def join(
        self, link: ReceivingLink | SendingLink, to: MeshRoute, refused: Callable[[Error], None]
    ) -> None:
        """Join *link* of a client with one to the destination *to*.

        Args:
            link: The link, requested and not answered.
            to: The destination.
            refused: Called with the error if a node on the way, or the destination, refuses the link.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        ways = self._ways
        pin = self._pin(link.session)
        # Links of one transaction take one way: a discharge must not arrive before messages that were sent before it.
        path = pin.path_to(to.node) or to.path
        route: Route = list(path) or [ways.node]

        def ended(splice: Splice) -> None:
            self.dropped += splice.dropped
            pin.links.pop(splice, None)

        splice = ways.join(
            link,
            route,
            of=link.session,
            properties=ways.properties(route, self.leg_of(link), link.properties),
            on_ended=ended,
            refuse=refused,
            now=trio.current_time,
        )
        pin.links[splice] = PinnedLink(to.node, path, link)
        if isinstance(link.target, Coordinator):
            pin.coordinator = to.node

    def leg_of(self, link: ReceivingLink | SendingLink) -> LegUse:
        """Return the use of a link to be joined with *link*, one of a client: it names the client."""
        peer = link.peer
        return LegUse(
            *(self._ways.node, PINNED, peer.user or ""),
            client=self._client_of(link.connection),
            container=peer.container_id,
        )

    def _client_of(self, connection: Any) -> str:
        """Return the id that other nodes know *connection* by."""
        found = self._clients.get(connection)
        if found is None:
            found = self._clients[connection] = (
                f"{self._ways.engine.own.incarnation:x}/{next(self._numbers)}"
            )
            connection.followers[self] = lambda: self._clients.pop(connection, None)
        return found

    # --- time --------------------------------------------------------------------------------------

    def seek(self, seeker: Seeker) -> None:
        """Try *seeker* again when its time has come, or paths have changed."""
        self._seeking[seeker] = None
        self._on_wait()

    def given_up(
        self, address: str, link: ReceivingLink | SendingLink, node: str, error: Error
    ) -> None:
        """Deal with *link*, which has found no path."""
        if node or address == COORDINATOR:
            # Transactions bind it to that node.
            link.refuse(error)
        else:
            self._give_up(address, link, error)

    def found(self, seeker: Seeker) -> None:
        """Forget a link that has found its path, or was refused."""
        self._seeking.pop(seeker, None)

    def look_after(self, now: float, *, changed: bool) -> float:
        """Try links in search of a path again; return when to call again.

        Args:
            now: The time.
            changed: Whether paths or destinations have changed.
        """
        due = math.inf
        for seeker in list(self._seeking):
            if changed or now >= seeker.retry_at:
                seeker.attempt()
            due = min(due, seeker.retry_at)
        return due


class Seeker:
    """Link of a client in search of a path to one destination.

    Args:
        pinned: The links.
        address: The link's address.
        link: The link, requested and not answered.
        node: The only node to which it may lead; empty for any that has the address.
        until: When it is refused, unless a node has accepted it.
    """

    def __init__(
        self,
        pinned: PinnedLinks,
        address: str,
        link: ReceivingLink | SendingLink,
        node: str,
        until: float,
    ) -> None:
        self._pinned = pinned
        self._address = address
        self._link = link
        self._node = node
        self._until = until
        self._error = _NO_COORDINATOR if address == COORDINATOR else _ABSENT
        self._trying = False
        self.retry_at = math.inf

    def attempt(self) -> None:
        """Try the best path, or refuse the link if the time is over."""
        link = self._link
        if self._trying:
            return
        if link.session.ended:
            self._pinned.found(self)
            return
        for each in self._pinned.destinations(self._address, link, self._node):
            try:
                self._trying = True
                self._pinned.join(link, each, self._refused)
            except LocalProtocolError:
                self._trying = False
                continue
            self.retry_at = math.inf
            self._pinned.found(self)
            return
        self._again()

    def _refused(self, error: Error) -> None:
        """Handle a refusal by the destination, or by a node on the way."""
        self._trying = False
        self._error = error
        if error.condition != "amqp:not-found" or self._link.session.ended:
            self._give_up()
        else:
            self._again()

    def _again(self) -> None:
        now = trio.current_time()
        if now >= self._until:
            self._give_up()
            return
        self.retry_at = min(now + RETRY_S, self._until)
        self._pinned.seek(self)

    def _give_up(self) -> None:
        self._pinned.found(self)
        if not self._link.session.ended:
            self._pinned.given_up(self._address, self._link, self._node, self._error)
