"""Clients of other members whose links end here: what stands for the connection of each.

Links of many clients arrive over one connection, that of the last node on the way. What belongs to a connection, such as
transactions, exclusive nodes and termini that are kept for names of links, has to belong to the client instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..events import Peer
from ..fronts.base import LinkSession, ReceivingLink, SendingLink
from .hops import LegUse


class RemoteClient:
    """A client of another member, as the connection of its links (``fronts.base.LinkConnection``).

    Args:
        peer: The client, as far as the first node of the route has named it.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.over = False
        #: Functions that are called when its last session has ended.
        self.followers: dict[object, Callable[[], None]] = {}
        self.sessions: dict[LinkSession, None] = {}

    def end(self) -> None:
        """Note that its last session has ended."""
        self.over = True
        followers, self.followers = self.followers, {}
        for follower in followers.values():
            follower()


class RemoteClients:
    """Clients by the node to which they are connected, or the connection of an edge of ours, and the id that it has given to their connection."""

    def __init__(self) -> None:
        self._clients: dict[tuple[object, str], RemoteClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def carry(self, link: ReceivingLink | SendingLink, leg: LegUse) -> None:
        """Let *link*, which a member has requested, be one of the client that *leg* names.

        The client has the rights of its user here, but for those to attach, which its own node has judged.
        """
        peer = replace(
            link.peer,
            container_id=leg.container,
            user=leg.user or None,
            identity=None,
            mechanism=None,
            trusted=False,
            tokens=None,
            certificate=None,
            profile=None,
            properties={},
        )
        self._carry(link, leg.origin, leg.client, peer)

    def carry_from_edge(self, link: ReceivingLink | SendingLink, leg: LegUse) -> None:
        """Let *link*, which an edge of this node has requested, be one of the edge's client that *leg* names.

        The client has the rights of the edge.
        """
        peer = replace(link.peer, container_id=leg.container)
        # Only the edge's connection tells which rights it has.
        self._carry(link, link.connection, leg.client, peer)

    def _carry(
        self, link: ReceivingLink | SendingLink, origin: object, client_id: str, peer: Peer
    ) -> None:
        session: Any = link.session
        if not client_id or session.carrier is not None:
            return
        key = origin, client_id
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = RemoteClient(peer)
        client.sessions[session] = None
        session.carrier = client
        session.followers[self] = partial(self._ended, key, session)

    def _ended(self, key: tuple[object, str], session: LinkSession) -> None:
        client = self._clients[key]
        del client.sessions[session]
        if not client.sessions:
            del self._clients[key]
            client.end()
