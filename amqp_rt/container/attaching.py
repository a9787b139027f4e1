"""Attaching: the node, host or created address to which a peer's link belongs, and the right to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import takewhile
from typing import Final, TypeAlias, cast

import trio

from ..addresses import REPLY_TO, is_direct_reply
from ..errors import AmqpError
from ..fronts.base import RCV_FIRST, SENDER, Host, LinkConnection, ReceivingLink, SendingLink
from ..fronts.hosts import RoutingHost
from ..loglimit import log_refusal
from ..outcomes import Error
from ..security.access import CBS
from ..termini import Coordinator, Source, Target
from ..values import Symbol
from .connections import Connection
from .feeding import LinkHandler, SourceFeed
from .home import Home
from .item_streams import StreamInbox
from .nodes import Nodes
from .observed_feeding import ObservedLinkHandler
from .permissions import not_authorized
from .profiles import Profile, address_for
from .relaying import Forward, Relay
from .replies import Replies, is_paired, paired_properties
from .routes import RouteBinding
from .serving import Inbox, Workers

log = logging.getLogger("amqp_rt.container")

#: Links remembered for a connection before the first search for those that have ended.
_LINKS_KEPT: Final = 512

#: Identity of a link: (virtual host, user, container-id, whether we send, link name, connection).
#: The connection is set only for links to ``$cbs``, whose tokens belong to one connection. It is
#: None for other links, which may be attached again on another connection.
_Identity: TypeAlias = tuple[str, str | None, str, bool, str, object]


class Attaching:
    """Links that peers attach: found a place, judged, and registered under their names.

    Args:
        home: The container.
        nodes: Its nodes.
        replies: Its links for replies, and the addresses that it created.
        settle_second: Whether senders that ask for ``rcv-settle-mode`` second get it.
    """

    def __init__(self, home: Home, nodes: Nodes, replies: Replies, *, settle_second: bool) -> None:
        self._home = home
        self._nodes = nodes
        self._replies = replies
        self._settle_second = settle_second
        #: Hosts that are asked before the nodes.
        self.first_hosts: list[Host] = []
        #: Called with each link before anything is decided about it, and returns whether it has dealt with it. Links
        #: of nodes of a mesh are those of other peers, whose rights were judged where they are connected.
        self.transit: Callable[[Connection, ReceivingLink | SendingLink], bool] | None = None
        #: Links of peers to the anonymous terminus.
        self.relays: set[Relay] = set()
        #: Attach requests that wait for ``authorize``, by the link's identity in order of arrival.
        self._asking: dict[_Identity, dict[ReceivingLink | SendingLink, None]] = {}
        self._links: dict[_Identity, ReceivingLink | SendingLink] = {}
        #: Identities of links, in order, by their connection: an engine, or an anchor.
        self._links_of: dict[object, dict[_Identity, None]] = {}
        #: Anchors on each engine, and the engine of each anchor that is on one.
        self._anchors_on: dict[object, dict[LinkConnection, None]] = {}
        self._engine_of: dict[object, object] = {}

    def attach(self, connection: Connection, link: ReceivingLink | SendingLink) -> None:
        """Accept or refuse a link requested by the peer, at once or after ``authorize``.

        The address is looked up in the hosts of the listener's profile, in the hosts that are
        first, among our nodes, among the dynamic addresses that we created, then in the other hosts.
        A second attach of the same link takes it over (§2.6.1), but only after its right has been
        checked: otherwise any client could detach the links of others by their names.
        """
        if self._home.stopping:
            # The close will answer: a client does not attach a refused link again elsewhere.
            return
        if self.transit is not None and self.transit(connection, link):
            return
        if link.connection is not connection.engine:
            self._carry(connection, link.connection)
        if not _sends(link) and not self._may_settle_second(link):
            link.rcv_settle_mode = RCV_FIRST
        terminus = self._recalled(link) or _our_terminus(link)
        if isinstance(terminus, Error):
            # A peer without any right must not learn whether a source is kept for a link of this
            # name.
            self._refuse(link, self._home.permissions.decide_anywhere(link.peer) or terminus)
        elif (refused := self._authorize_attach(link, terminus)) is not None:
            self._refuse(link, refused)
        elif isinstance(terminus, Coordinator):
            # Rights are checked for the links whose deliveries are in the transaction, not here.
            self._place_coordinator(link)
        elif self._home.permissions.authorize is None or not terminus.address:
            self._take_over(link)
            self._place(connection, link, terminus)
        else:
            asking = self._asking.setdefault(_identity(link), {})
            asking[link] = None
            self._home.start_handler(self._place_if_allowed, connection, link, terminus, asking)

    def place(self, connection: Connection, link: ReceivingLink | SendingLink) -> None:
        """Accept or refuse *link*, whose right has been decided, as :meth:`attach` does otherwise."""
        remote = link.connection is not connection.engine
        if remote:
            self._carry(connection, link.connection)
        terminus = self._recalled(link) or _our_terminus(link)
        if isinstance(terminus, Error):
            self._refuse(link, terminus)
        elif (
            remote
            and isinstance(terminus, Source | Target)
            and (refused := self._refuse_takeover(link, terminus.address)) is not None
        ):
            self._refuse(link, refused)
        elif isinstance(terminus, Coordinator):
            self._place_coordinator(link)
        else:
            self._take_over(link)
            self._place(connection, link, terminus)

    def _place_coordinator(self, link: ReceivingLink | SendingLink) -> None:
        self._take_over(link)
        if not any(host.attach(link) for host in self._home.hosts):
            self._refuse(link, Error("amqp:not-implemented", "there are no transactions here"))

    def _may_settle_second(self, link: ReceivingLink | SendingLink) -> bool:
        profile: Profile | None = link.peer.profile
        if profile is None or profile.settle_second is None:
            return self._settle_second
        return profile.settle_second

    def _refuse(self, link: ReceivingLink | SendingLink, error: Error) -> None:
        """Refuse *link* with *error*, and log the refusal."""
        link.refuse(error)
        self._home.tallies.refused.add(str(error.condition))
        log_refusal(log, self._home.log_limiter, link, error, trio.current_time())

    def _take_over(self, link: ReceivingLink | SendingLink) -> None:
        """Register *link* under its identity, and detach an earlier link with the same one."""
        identity = _identity(link)
        old = self._links.get(identity)
        if old is not None and old is not link:
            old.detach(_STOLEN)
        known = self._links_of.setdefault(link.connection, {})
        if len(known) >= _LINKS_KEPT and len(known) & (len(known) - 1) == 0:
            # Hosts do not report links that have ended: search for them whenever the number
            # doubled.
            self._forget_gone(link.connection)
        known[identity] = None
        self._links[identity] = link

    def _recalled(self, link: ReceivingLink | SendingLink) -> Source | Error | None:
        """Return the source that a host keeps for *link*, if its attach names none.

        The source is set on the link as if the peer had requested it. The result is an Error if
        nothing is kept, and None if the attach names a source or is that of a sender.
        """
        if not _sends(link) or link.source is not None:
            return None
        for host in self._home.hosts:
            try:
                link.source = host.kept_source(cast("SendingLink", link))
            except AmqpError as error:
                return Error.of(error)
            if link.source is not None:
                return link.source
        return Error("amqp:not-found", f"no source is kept for a link {link.name!r}")

    async def _place_if_allowed(
        self,
        connection: Connection,
        link: ReceivingLink | SendingLink,
        terminus: Source | Target,
        asking: dict[ReceivingLink | SendingLink, None],
    ) -> None:
        """Place *link* if ``authorize`` allows it.

        *asking* holds the requests for links of this identity that wait for their answer, in order.
        """
        role = "receiver" if _sends(link) else "sender"
        identity = _identity(link)
        try:
            allowed = await self._home.permissions.is_allowed(link.peer, terminus.address, role)
        finally:
            stolen = link not in asking
            earlier = list(takewhile(lambda each: each is not link, asking))
            asking.pop(link, None)
        if self._home.stopping:
            return  # As in attach(): the close answers.
        elsewhere = (
            link.connection is not connection.engine
            and self._engine_of.get(link.connection) is not connection.engine
        )
        if stolen or elsewhere or connection.engine.over:
            self._refuse(link, _STOLEN)
        elif not allowed:
            self._refuse(link, not_authorized(terminus.address))
        elif (refused := self._authorize_attach(link, terminus)) is not None:
            self._refuse(link, refused)  # a token has expired meanwhile
        else:
            # Requests older than this one are refused when their answers arrive.
            for each in earlier:
                asking.pop(each, None)
            self._take_over(link)
            self._place(connection, link, terminus)
        if not asking and self._asking.get(identity) is asking:
            del self._asking[identity]

    def _authorize_attach(
        self, link: ReceivingLink | SendingLink, terminus: Source | Target | Coordinator
    ) -> Error | None:
        """Return why the peer may not attach *link* to *terminus*; None if it may.

        Without a user, a link is identified by the names of its container and itself, which other
        clients can use too. Taking over or ending the earlier link or terminus of these names
        therefore requires the right to that one as well.
        """
        refused = self._home.permissions.decide_link(link, terminus)
        return refused or self._refuse_takeover(link)

    def _refuse_takeover(
        self, link: ReceivingLink | SendingLink, allowed: object = None
    ) -> Error | None:
        """Return why *link* may not take over the link or terminus that has its names; None if it may.

        The right to the address *allowed* has been checked elsewhere.
        """
        permissions = self._home.permissions
        if link.peer.trusted or not permissions.guarded:
            return None
        taken: list[Source | Target | Coordinator | Error | None] = [
            host.kept_terminus(link) for host in self._home.hosts
        ]
        old = self._links.get(_identity(link)) if link.peer.user is None else None
        if old is not None and old.connection is not link.connection and old.attached:
            taken.append(_our_terminus(old))
        for each in taken:
            if allowed is not None and getattr(each, "address", None) == allowed:
                continue
            if isinstance(each, Source | Target | Coordinator) and permissions.decide_link(
                link, each
            ):
                return Error(
                    "amqp:unauthorized-access",
                    f"another client has a link {link.name!r:.100} to a node that you may not use: "
                    "use another name for the link or the container",
                )
        return None

    def reauthorize(self, connection: Connection, why: str) -> None:
        """Detach the links for which *connection* no longer has the right, and only those.

        Args:
            connection: The connection whose rights have changed.
            why: Beginning of the description in the detach.
        """
        self._judge(connection.engine, why)
        for anchor in list(self._anchors_on.get(connection.engine, ())):
            self._judge(anchor, why)
        for relay in list(self.relays):
            relay.forget(connection)

    def _judge(self, carrier: object, why: str) -> None:
        """Detach the links of *carrier*, an engine or an anchor, to which their peer has no right."""
        for identity in list(self._links_of.get(carrier, ())):
            link = self._links.get(identity)
            if link is None or link.connection is not carrier or not link.attached:
                continue
            terminus = _our_terminus(link)
            if isinstance(terminus, Error):
                continue
            refused = self._home.permissions.decide_link(link, terminus)
            if refused is not None:
                link.detach(Error(refused.condition, f"{why}: {refused.description}"))

    def moved(self, connection: Connection, anchor: LinkConnection) -> None:
        """Judge the links of *anchor* by the rights of *connection*, to which they have moved.

        Links to which it has no right are detached, all of them if it is one of another user or
        virtual host. The others are filed under the names that they have there, and end earlier links
        of these names like a second attach.
        """
        if self._home.stopping or anchor.over:
            return
        self._carry(connection, anchor)
        peer = connection.peer
        for identity in self._links_of.pop(anchor, ()):
            link = self._links.get(identity)
            if link is None or link.connection is not anchor:
                continue
            del self._links[identity]
            if (link.peer.virtual_host, link.peer.user) != (peer.virtual_host, peer.user):
                link.detach(Error("amqp:unauthorized-access", "the session is another user's"))
            elif link.attached:
                # Container-id and tokens are those of a connection.
                link.peer = peer
                self._take_over(link)
        self._judge(anchor, "the session was resumed on a connection without the right")
        for relay in list(self.relays):
            relay.moved(connection, anchor)

    def _carry(self, connection: Connection, anchor: LinkConnection) -> None:
        """Note that *anchor* is on *connection*, until it moves, or either of them ends."""
        engine = connection.engine
        if (old := self._engine_of.get(anchor)) is engine or anchor.over:
            return
        if old is not None:
            del self._anchors_on[old][anchor]
        self._engine_of[anchor] = engine
        self._anchors_on.setdefault(engine, {})[anchor] = None
        anchor.followers[self] = partial(self._anchor_ended, anchor)

    def _anchor_ended(self, anchor: LinkConnection) -> None:
        """Remove the links and requests of *anchor*, whose session has ended."""
        if (engine := self._engine_of.pop(anchor, None)) is not None:
            del self._anchors_on[engine][anchor]
        self.connection_ended(anchor)

    def _place(
        self,
        connection: Connection,
        link: ReceivingLink | SendingLink,
        terminus: Source | Target,
    ) -> None:
        link.asked = None if terminus.dynamic else terminus.address
        if _sends(link) and terminus.dynamic and REPLY_TO in terminus.capabilities:
            # Before all hosts: a broker would create a queue.
            self._replies.attach_direct(cast("SendingLink", link))
            return
        profile: Profile | None = link.peer.profile
        address = terminus.address = address_for(link.peer, terminus.address or "") or None
        if profile is not None and any(host.attach(link) for host in profile.hosts):
            return
        first_hosts = self.first_hosts
        for host in first_hosts:
            if host.attach(link):
                return
        if address and is_direct_reply(address):
            # Before the nodes: the pattern of one may match any address.
            self._place_at_created(link, address)
            return
        if address:
            try:
                found = self._nodes.find(address, sends=_sends(link))
            except ValueError as error:
                self._refuse(link, Error("amqp:not-found", str(error)))
                return
            if found is not None:
                workers, captures = found
                self._serve_link(
                    RouteBinding(
                        workers.route,
                        self._home,
                        connection,
                        link,
                        address,
                        captures,
                        asked=terminus,
                    ),
                    workers,
                    terminus,
                )
                return
            if address in self._replies.dynamic and isinstance(terminus, Target):
                # Before the other hosts: a broker may create a queue at whatever address it is asked for.
                self._place_at_created(link, address)
                return
        for host in self._home.hosts:
            if host not in first_hosts and host.attach(link):
                return
        if isinstance(terminus, Target):
            self._place_sender(connection, cast("ReceivingLink", link), terminus)
        elif terminus.dynamic:
            self._replies.attach_dynamic(cast("SendingLink", link))
        else:
            self._refuse(link, self._no_such(address))

    def _place_at_created(self, link: ReceivingLink | SendingLink, address: str) -> None:
        """Accept or refuse a link to *address*, at which there can only be a link for which we created it."""
        made = self._replies.dynamic.get(address)
        if made is None or _sends(link):
            self._refuse(link, self._no_such(address))
            return
        receiving = cast("ReceivingLink", link)
        receiving.accept(Forward(self._home, made, receiving), target=Target(address=address))

    def _serve_link(
        self, binding: RouteBinding, workers: Workers, terminus: Source | Target
    ) -> None:
        """Accept a link to one of our nodes."""
        route = binding.route
        if isinstance(terminus, Target):
            inbox_of = StreamInbox if route.takes_items else Inbox
            cast("ReceivingLink", binding.link).accept(
                self._link_handler(binding).receive()
                if route.kind == "link"
                else inbox_of(binding, workers),
                target=Target(address=terminus.address),
                # Peers can send this much before they have any right.
                max_message_size=(
                    self._home.limits.token_message_size_max if terminus.address == CBS else None
                ),
                streaming=route.streaming,
                properties=paired_properties(binding.link) if route.kind == "rpc" else None,
            )
            return
        sending = cast("SendingLink", binding.link)
        answered = Source(
            address=terminus.address,
            distribution_mode=Symbol(route.mode),
            filter=_applied(terminus.filter, route.filters),
            outcomes=terminus.outcomes,
        )
        if route.kind == "source":
            sending.accept(SourceFeed(binding), source=answered)
        elif route.kind == "link":
            sending.accept(self._link_handler(binding).send(), source=answered)
        else:
            self._replies.attach(sending, terminus.address, answered)

    def _link_handler(self, binding: RouteBinding) -> LinkHandler:
        return ObservedLinkHandler(binding) if self._home.observers else LinkHandler(binding)

    def _place_sender(self, connection: Connection, link: ReceivingLink, target: Target) -> None:
        """Accept or refuse a link to send to an address that neither a node nor a host has."""
        if target.dynamic:
            self._refuse(
                link,
                Error(
                    "amqp:not-implemented",
                    "messages sent to a dynamic target could not be received here",
                ),
            )
        elif target.address:
            self._refuse(link, self._no_such(target.address))
        else:
            relay = Relay(
                self._home,
                connection,
                link,
                nodes=self._nodes,
                created=self._replies.dynamic,
                first_hosts=self.first_hosts,
                relays=self.relays,
            )
            link.accept(relay, target=Target())

    def _no_such(self, address: str | None) -> Error:
        if not address:
            return Error("amqp:invalid-field", "the attach has no source address")
        return Error("amqp:not-found", f"{self._home.name!r} has no node {address!r}")

    def is_routed(self, address: str) -> bool:
        """Return whether one of the hosts that are first leads links to *address* elsewhere."""
        return any(
            isinstance(host, RoutingHost) and host.routes(address) for host in self.first_hosts
        )

    def forget(self, link: ReceivingLink | SendingLink) -> None:
        """Remove *link*, which has ended, so that its name is free; end its pair."""
        identity = _identity(link)
        if self._links.get(identity) is link:
            if is_paired(link):
                self._end_pair(link)
            del self._links[identity]
            if (known := self._links_of.get(link.connection)) is not None:
                known.pop(identity, None)

    def connection_ended(self, engine: object) -> None:
        """Remove the links and requests of *engine*, whose connection has ended.

        Those of anchors stay until the anchors end, or move to another connection.
        """
        for anchor in self._anchors_on.pop(engine, ()):
            del self._engine_of[anchor]
        links = self._links
        for identity in self._links_of.pop(engine, ()):
            # Another connection may have taken the link over.
            if (link := links.get(identity)) and link.connection is engine:
                del links[identity]

    def _end_pair(self, link: ReceivingLink | SendingLink) -> None:
        """Detach the other link of a pair whose first has ended."""
        host, user, container_id, sends, name, connection = _identity(link)
        other = self._links.get((host, user, container_id, not sends, name, connection))
        if (
            other is not None
            and other.attached
            and other.session is link.session
            and is_paired(other)
        ):
            other.detach()

    def _forget_gone(self, engine: object) -> None:
        for identity in list(self._links_of[engine]):
            link = self._links.get(identity)
            if link is None or link.connection is not engine:
                del self._links_of[engine][identity]
            elif not link.attached:
                del self._links_of[engine][identity]
                del self._links[identity]


def _sends(link: ReceivingLink | SendingLink) -> bool:
    """Whether we are the sender of *link*."""
    return link.role == SENDER


def _identity(link: ReceivingLink | SendingLink) -> _Identity:
    peer = link.peer
    sends = _sends(link)
    terminus = link.source if sends else link.target
    address = terminus.address if isinstance(terminus, (Source, Target)) else None
    own = isinstance(address, str) and address_for(peer, address) == CBS
    return (
        peer.virtual_host,
        peer.user,
        peer.container_id,
        sends,
        link.name,
        link.connection if own else None,
    )


def _our_terminus(link: ReceivingLink | SendingLink) -> Source | Target | Coordinator | Error:
    """Return our terminus of *link* as the peer requested it, or why there is none."""
    terminus = link.source if _sends(link) else link.target
    if isinstance(terminus, Coordinator):
        return terminus
    if terminus is None:
        return Error("amqp:invalid-field", "the attach names no node: its terminus is null")
    if terminus.address is not None and not isinstance(terminus.address, str):
        return Error("amqp:not-implemented", "addresses are strings here")
    return terminus


_STOLEN: Final = Error("amqp:link:stolen", "the link was attached again elsewhere")


def _applied(
    asked: Mapping[object, object] | None, known: Collection[str]
) -> Mapping[object, object] | None:
    """Return the filters in effect: only those that the node applies (Part 3 §3.5.8)."""
    return {name: value for name, value in (asked or {}).items() if name in known} or None
