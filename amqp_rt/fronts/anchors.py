"""Sessions that outlive their connections, as containers and brokers see them (:mod:`amqp_rt.fronts.base`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from ..events import AttachRequested, Event, LinksMoved, Peer
from ..limits import Limits
from ..outcomes import Rejected
from .links import FrontLink

__all__ = ["Anchor"]


class Anchor:
    """Session, and at the same time connection, of links that outlive connections.

    Whatever follows the session or the connection of a link follows the anchor: transactions, exclusive
    nodes, termini, answers to requests. It stays while the session moves from connection to connection,
    and ends them all with :meth:`end`.

    Args:
        limits: Bounds on resources that the peer may use.
        peer: The peer of the connection on which the session begins.
        name: Prefix of the names of links, unique among the anchors of a user.
    """

    def __init__(self, limits: Limits, peer: Peer, name: str) -> None:
        self.limits = limits
        #: The peer of the present connection, or of the latest one.
        self.peer = peer
        self.name = name
        self.links: dict[FrontLink, None] = {}
        #: Functions that are called when the session has ended.
        self.followers: dict[object, Callable[[], None]] = {}
        #: Whether the session has ended.
        self.ended = False
        self._names = count(1)

    @property
    def over(self) -> bool:
        """Whether the session has ended, and the connection with it, as links see it."""
        return self.ended

    def next_name(self) -> int:
        """Return a number unique to one link of the session."""
        return next(self._names)

    def link_name(self, purpose: str) -> str:
        """Return a name for a link, unique among the links of a user."""
        return f"{self.name}-{purpose}-{self.next_name()}"

    def request(self, link: FrontLink) -> Event:
        """File *link*, and return the event that requests its attach."""
        self.links[link] = None
        return AttachRequested(link)

    def drop(self, link: FrontLink) -> None:
        """End *link*, which is not needed any more."""
        self.links.pop(link, None)
        link.end(None, True)

    def moved(self, peer: Peer) -> Event:
        """Note that the session is on the connection of *peer* from now on.

        Returns the event that the engine of that connection has to report before any other of this
        session: the container then judges the links by the rights of that connection.
        """
        self.peer = peer
        return LinksMoved(self)

    def report_refusal(self, outcome: Rejected) -> None:
        """Ignore the rejection of a message whose publisher awaits no outcome."""

    def end(self) -> None:
        """End the session: its links, whose deliveries are requeued, and then its followers."""
        if self.ended:
            return
        self.ended = True
        links, self.links = self.links, {}
        for link in links:
            link.end(None, True)
        followers, self.followers = self.followers, {}
        for follower in followers.values():
            follower()
