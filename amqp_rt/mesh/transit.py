"""Links of other members that pass through this node on their routes."""

from __future__ import annotations

from ..errors import LocalProtocolError
from ..fronts.base import ReceivingLink, SendingLink
from .hops import LOW, ROUTE, LegUse, Route
from .multicasts import Edge, Multicast
from .neighbours import Neighbour
from .splices import Splice
from .ways import LegCount, Ways


class Transit:
    """Links that pass through, each joined with links to the next nodes.

    Args:
        ways: The ways from here.
    """

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        #: Links that pass through now.
        self.hops = 0
        #: Those of them that branch here.
        self.branching: dict[Multicast, None] = {}
        #: Of what has ended: settled messages that were lost, and copies that slow destinations did not get.
        self._dropped = 0
        self._skipped = 0

    @property
    def dropped(self) -> int:
        """Number of settled messages that were lost with a link."""
        return self._dropped + sum(each.dropped for each in self.branching)

    @property
    def skipped(self) -> int:
        """Number of copies of settled messages that slow destinations did not get."""
        return self._skipped + sum(each.skipped for each in self.branching)

    def pass_on(
        self, member: Neighbour, link: ReceivingLink | SendingLink, rest: Route, leg: LegUse
    ) -> None:
        """Join *link*, which *member* has requested, with one along *rest* of its route.

        Raises:
            LocalProtocolError: No link can be opened.
        """

        def ended(splice: Splice) -> None:
            self._dropped += splice.dropped
            self.hops -= 1
            member.accepted -= 1

        self._ways.join(
            link,
            rest,
            of=None if leg.band == LOW else link.session,
            properties={**link.properties, ROUTE: rest},
            on_ended=ended,
        )
        self.hops += 1
        member.accepted += 1

    def branch(
        self, member: Neighbour, link: ReceivingLink, branches: list[Route], leg: LegUse
    ) -> None:
        """Join *link*, which *member* has requested, with one along each of *branches*.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        ways = self._ways
        counts: list[LegCount] = []
        edges = []
        for route in branches:
            # An empty route ends here, and is placed like a link of our own.
            onward: Route = route or [ways.node]
            try:
                neighbour = ways.next(onward)
                opener = neighbour.opener()
            except LocalProtocolError:
                # The others still get the messages; the first node learns of this one by the routing.
                continue
            counts.append(LegCount(neighbour, opener))
            edges.append(Edge(opener, ways.new_name(), {**link.properties, ROUTE: onward}))
        if not edges:
            raise LocalProtocolError("no branch of the route can be reached")

        def ended(multicast: Multicast) -> None:
            self.branching.pop(multicast, None)
            self._dropped += multicast.dropped
            self._skipped += multicast.skipped
            self.hops -= 1
            member.accepted -= 1
            for each in counts:
                each.end()

        try:
            multicast = Multicast(
                link,
                edges,
                skip_slow=leg.skips,
                worst=leg.worst,
                limits=ways.limits,
                on_ended=ended,
            )
        except LocalProtocolError:
            for each in counts:
                each.end()
            raise
        self.branching[multicast] = None
        self.hops += 1
        member.accepted += 1
