"""Links of clients to addresses whose messages all destinations get: trees, which follow the routing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import LocalProtocolError
from ..fronts.base import ReceivingLink
from ..outcomes import Error
from .fans import ABSENT_S
from .hops import LegUse, Route, nodes_in, route_of
from .multicasts import Edge, Multicast, TreeBranch
from .ways import LegCount, Ways

#: Seconds until a branch that a node refused is opened again.
_RETRY_S = 0.1
_ABSENT = Error("amqp:not-found", "no destination of this address can be reached")


class RoutedTree:
    """Link of a client, with a branch for each next node on the way to a destination.

    A branch whose destinations have changed gets a successor, which takes over between two messages. Without a destination
    the client has no credit.

    Args:
        address: The address.
        link: The link, requested and not answered.
        user: The user for whom alone it is; empty for all.
        wait: Let the link wait for the first destination as long as it takes.
        worst: Let *accepted* count least among the outcomes.
        skips: Let settled messages skip destinations without credit.
        ways: The ways from here.
        now: The clock, in seconds.
        on_wait: Called when ``deadline`` may have become earlier.
        on_ended: Called when the link has ended, or was refused.
    """

    def __init__(
        self,
        address: str,
        link: ReceivingLink,
        user: str,
        *,
        wait: bool,
        worst: bool = False,
        skips: bool = False,
        ways: Ways,
        now: Callable[[], float],
        on_wait: Callable[[], None],
        on_ended: Callable[[RoutedTree], None],
    ) -> None:
        self.address = address
        self._link = link
        self.user = user
        self._ways = ways
        self._now = now
        self._on_wait = on_wait
        self._on_ended = on_ended
        self._worst = worst
        self._skips = skips
        self._until = math.inf if wait else now() + ABSENT_S
        self._retry_at = now()
        self._multicast: Multicast | None = None
        self._branches: dict[str, tuple[TreeBranch, Route, LegCount]] = {}
        self._counts: dict[TreeBranch, LegCount] = {}
        #: Settled messages that were lost with branches that have left.
        self._dropped = 0

    @property
    def deadline(self) -> float:
        """Time at which ``update`` has to be called."""
        return min(self._retry_at, math.inf if self._multicast is not None else self._until)

    @property
    def dropped(self) -> int:
        """Number of settled messages that were lost with a branch."""
        return self._dropped + (self._multicast.dropped if self._multicast is not None else 0)

    @property
    def skipped(self) -> int:
        """Number of copies that slow branches did not get."""
        return self._multicast.skipped if self._multicast is not None else 0

    def stuck(self, since: float) -> int:
        """Return the number of copies without an outcome that arrived before *since*."""
        branches = self._multicast.branches if self._multicast is not None else ()
        return sum(each.stuck(since) for each in branches)

    def open_branches(self) -> Iterator[tuple[str, list[str], TreeBranch]]:
        """Yield the branches in use, each with the next node, and the nodes that its part of the tree has."""
        for head, (branch, route, _) in self._branches.items():
            yield head, nodes_in(route), branch

    def update(self) -> None:
        """Open branches to the destinations that there are now, and retire those that lead elsewhere."""
        self._retry_at = math.inf
        wanted = self._routes()
        for head, route in wanted.items():
            known = self._branches.get(head)
            if known is not None and known[1] == route and not known[0].over:
                continue
            self._open(head, route)
        multicast = self._multicast
        if multicast is None:
            self._wait()
            return
        for head, (branch, _, _) in list(self._branches.items()):
            if head not in wanted:
                del self._branches[head]
                multicast.retire(branch)

    def _routes(self) -> dict[str, Route]:
        """Return the routes of a tree to all destinations, by the ids with which they begin."""
        ways = self._ways
        nodes = {each.node for each in ways.destinations(self.address)}
        trees, _ = ways.engine.paths().tree(nodes - {ways.node})
        routes = {tree[0]: route_of(tree, nodes) for tree in trees}
        if ways.node in nodes:
            routes[ways.node] = [ways.node]
        return routes

    def _properties(self, head: str, route: Route) -> dict[object, Any]:
        """Return the properties of the attach of the branch *head*."""
        leg = LegUse(self._ways.node, user=self.user, worst=self._worst, skips=self._skips)
        return self._ways.properties(route, leg)

    def _open(self, head: str, route: Route) -> None:
        ways = self._ways
        try:
            neighbour = ways.next(route)
            opener = neighbour.opener()
            edge = Edge(
                opener,
                ways.new_name(),
                self._properties(head, route),
            )
            if self._multicast is None:
                if self._link.session.ended:
                    self._on_ended(self)
                    return
                self._multicast = Multicast(
                    self._link,
                    [edge],
                    skip_slow=self._skips,
                    worst=self._worst,
                    limits=ways.limits,
                    refuse=self._refused,
                    on_ended=self._ended,
                    on_left=self._left,
                    now=self._now,
                )
                branch = self._multicast.branches[-1]
            else:
                branch = self._multicast.add(edge)
        except LocalProtocolError:
            self._retry()
            return
        count = self._counts[branch] = LegCount(neighbour, opener)
        old = self._branches.get(head)
        self._branches[head] = branch, route, count
        if old is not None and not old[0].over:
            self._multicast.retire(old[0])

    def _retry(self) -> None:
        self._retry_at = min(self._retry_at, self._now() + _RETRY_S)
        self._on_wait()

    def _wait(self) -> None:
        """Wait for a destination, or refuse the link."""
        if self._link.session.ended:
            self._on_ended(self)
        elif self._now() >= self._until:
            self._on_ended(self)
            self._link.refuse(_ABSENT)

    def _refused(self, error: Error) -> None:
        """Handle the refusal of all branches of the first tree: begin again."""
        self._multicast = None
        self._branches.clear()
        for each in self._counts.values():
            each.end()
        self._counts.clear()
        self._retry()

    def _left(self, branch: TreeBranch) -> None:
        self._dropped += branch.passing.dropped
        count = self._counts.pop(branch, None)
        if count is not None:
            count.end()
        for head, (known, _, _) in list(self._branches.items()):
            if known is branch:
                del self._branches[head]
                self._retry()

    def _ended(self, multicast: Multicast) -> None:
        for each in self._counts.values():
            each.end()
        self._counts.clear()
        self._on_ended(self)

    def close(self) -> None:
        """Retire all branches."""
        if self._multicast is not None:
            for branch, _, _ in self._branches.values():
                self._multicast.retire(branch)
        self._branches.clear()
