"""Replies to addresses that other members have created: the links to these, kept for further replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import trio

from ..container.replies import Replies, ReplyLink
from ..errors import LinkDetached, LocalProtocolError
from ..termini import Source, Target
from .fans import ABSENT_S
from .hops import LegUse
from .ways import Ways, node_of

#: Seconds between two attempts to open a link.
_RETRY_S: Final = 0.1


class RemoteReplies:
    """Links for replies to addresses of other members.

    Args:
        replies: The replies of the container.
        ways: The ways from here.
    """

    def __init__(self, replies: Replies, ways: Ways) -> None:
        self._replies = replies
        self._ways = ways
        #: Links and their paths by address, the least recently used first.
        self._links: dict[str, tuple[ReplyLink, tuple[str, ...]]] = {}
        #: Links that get no further replies; streams that have begun on them go on.
        self._old: list[ReplyLink] = []
        #: Requests that are being answered, by the link of their replies.
        self._users: WeakKeyDictionary[ReplyLink, WeakSet[RemoteReply]] = WeakKeyDictionary()

    def path(self, address: str) -> RemoteReply:
        """Return the path of the replies to one request."""
        return RemoteReply(self, address)

    def link_to(self, address: str) -> ReplyLink | None:
        """Return a link to *address*, which may not be attached yet; None if there is no way at present."""
        known = self._links.pop(address, None)
        ways = self._ways
        if known is not None and not known[0].over:
            if ways.stands(known[1], back=True):
                self._links[address] = known
                return known[0]
            self._replace(known[0])
        node = node_of(address)
        path = None if node is None else ways.path_back(node)
        if path is None:
            return None
        link = ReplyLink(self._replies, address)
        try:
            ways.next(list(path), back=True).opener().attach_sender(
                ways.new_name(),
                link,
                source=Source(),
                target=Target(address=address),
                properties=ways.properties(list(path), LegUse(ways.node)),
            )
        except LocalProtocolError:
            return None
        while len(self._links) >= ways.limits.mesh_reply_links_max:
            oldest, _ = self._links.pop(next(iter(self._links)))
            if self._users.get(oldest):
                # A stream of replies does not count as a further use of its link.
                self._replace(oldest)
            else:
                _detach(oldest)
        self._links[address] = link, path
        return link

    def use(self, link: ReplyLink, path: RemoteReply) -> None:
        """Keep *link* as long as the request with *path* is being answered."""
        self._users.setdefault(link, WeakSet()).add(path)

    def _replace(self, link: ReplyLink) -> None:
        self._old.append(link)
        if len(self._old) > self._ways.limits.mesh_reply_links_max:
            _detach(self._old.pop(0))

    @property
    def leaving(self) -> bool:
        """Whether links are kept for streams only, so that :meth:`tend` has to be called again."""
        return bool(self._old)

    def tend(self, *, close: bool = False) -> None:
        """Detach links whose paths are not used any more, or all with *close*, once no request needs them."""
        for address, (link, path) in list(self._links.items()):
            # A destination that drains waits for the end of links to it; replies to come open one again.
            drains = self._ways.engine.database.draining(path[-1:])
            if close or link.over or drains or not self._ways.stands(path, back=True):
                del self._links[address]
                self._replace(link)
        kept = []
        for link in self._old:
            if link.over:
                continue
            if self._users.get(link):
                kept.append(link)
            else:
                _detach(link)
        self._old = kept


def _detach(link: ReplyLink) -> None:
    if link.link is not None:
        link.link.detach()


class RemoteReply:
    """Path of the replies to one request, which all take one link: none is missing in the middle of a stream.

    Args:
        replies: The links.
        address: The address of the caller.
    """

    def __init__(self, replies: RemoteReplies, address: str) -> None:
        self._replies = replies
        self._address = address
        self._link: ReplyLink | None = None

    def send_nowait(self, payload: Sequence[bytes]) -> bool:
        """Send at once if possible; return whether the reply was sent."""
        link = self._link or self._replies.link_to(self._address)
        return link is not None and link.send_nowait(payload)

    async def send(self, payload: Sequence[bytes]) -> None:
        """Send when there is a way, and credit. If cancelled, nothing is sent.

        Raises:
            LinkDetached: The caller is gone, or out of reach.
            LocalProtocolError: The reply is larger than a node on the way allows.
        """
        until = trio.current_time() + ABSENT_S
        while self._link is None:
            link = self._replies.link_to(self._address)
            if link is not None:
                self._replies.use(link, self)
                try:
                    await link.send(payload)
                except LinkDetached:
                    # Nodes on the way may learn later than this one where the caller is.
                    if link.link is not None or trio.current_time() >= until:
                        raise
                else:
                    self._link = link
                    return
            elif trio.current_time() >= until:
                raise LinkDetached(f"{self._address!r} is out of reach")
            await trio.sleep(_RETRY_S)
        await self._link.send(payload)
