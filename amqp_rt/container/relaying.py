"""Links of peers whose messages are passed on: to addresses that we created, and by their ``to``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..addresses import is_direct_reply
from ..errors import DecodeError
from ..fronts.base import Host, IncomingDelivery, LinkConnection, ReceivingEndpoint, ReceivingLink
from ..outcomes import Error, Rejected
from ..security.access import Rights
from ..termini import Source
from ..transactions import TransactionalState
from ..values import Symbol
from .connections import Connection
from .credit import CreditWindow
from .handling import ABANDONED
from .home import Home
from .nodes import Nodes
from .profiles import address_for
from .raising import Reject
from .replies import ReplyLink
from .routes import PREFETCH, RouteBinding
from .serving import Inbox, abandon, read_message


class Forward:
    """Link on which a peer sends to an address that we created; forwards to its owner."""

    def __init__(self, home: Home, reply_link: ReplyLink, link: ReceivingLink) -> None:
        self._home = home
        self._reply_link = reply_link
        self._link = link
        self._window = CreditWindow(link, messages=PREFETCH)

    def on_attached(self, link: ReceivingLink) -> None:
        if self._reply_link.over:
            self.address_ended()
            return
        self._reply_link.forwards[self] = None
        self._window.opened()

    def address_ended(self) -> None:
        """Detach: the address was deleted with its link, which messages that had arrived could not reach either."""
        self._link.detach(Error("amqp:resource-deleted", f"{self._reply_link.address!r} is gone"))

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        self._window.took(len(deliveries), sum([len(each.payload) for each in deliveries]))
        for each in deliveries:
            self._reply_link.forward(each, self._window)

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the link is not streaming."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the message has been forwarded already."""

    def on_flow(self, link: ReceivingLink) -> None:
        self._window.freed(0, 0)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        self._window.close()
        self._reply_link.forwards.pop(self, None)
        self._home.attaching.forget(link)


class Relay:
    """Link to the anonymous terminus: each message is routed by its ``to``.

    The first message for an address resolves it, as an attach would, and later ones follow.
    Messages for an address whose right is still being checked wait, within the link's credit.

    Args:
        home: The container.
        connection: The connection of *link*.
        link: The link, on which the peer sends.
        nodes: The container's nodes.
        created: Addresses that the container created, with their links.
        first_hosts: Hosts that are asked before the nodes.
        relays: Registry of the links that are attached.
    """

    def __init__(
        self,
        home: Home,
        connection: Connection,
        link: ReceivingLink,
        *,
        nodes: Nodes,
        created: Mapping[str, ReplyLink],
        first_hosts: Sequence[Host],
        relays: set[Relay],
    ) -> None:
        self._home = home
        self._nodes = nodes
        self._created = created
        self._first_hosts = first_hosts
        self._relays = relays
        self._connection = connection
        self._link = link
        self._window = CreditWindow(link, messages=PREFETCH)
        #: By address, the least recently used first.
        self._targets: OrderedDict[str, _Target] = OrderedDict()
        #: Whether the link has ended.
        self._over = False

    def on_attached(self, link: ReceivingLink) -> None:
        self._relays.add(self)
        self._window.opened()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        batches: dict[str, list[IncomingDelivery]] = {}
        for each in deliveries:
            try:
                to = read_message(each).properties.to
            except (DecodeError, Reject) as error:
                self._refuse(each, Error.of(error))
                continue
            if to:
                batches.setdefault(to, []).append(each)
            else:
                self._refuse(each, Error("amqp:precondition-failed", "the message has no `to`"))
        for address, batch in batches.items():
            self._pass_on(address, batch)
        self._window.freed(0, 0)

    def _pass_on(self, address: str, batch: list[IncomingDelivery]) -> None:
        target = self._targets.get(address)
        if target is None or target.over:
            target = self._targets[address] = _Target()
            home = self._home
            if home.permissions.authorize is None:
                # Resolve at once: a wait would hold up the transaction of a message.
                refused = home.permissions.decide(self._link.peer, Rights.SEND, address)
                target.resolved(self._resolve(address) if refused is None else refused)
                target.waiting = None
            else:
                home.start_handler(self._ask, address, target)
            self._make_room(target)
        else:
            self._targets.move_to_end(address)
        if target.waiting is not None:
            self._window.took(len(batch), sum([len(each.payload) for each in batch]))
            target.waiting += batch
            # A discharge that arrives before ``authorize`` has answered has to wait for these.
            for each in batch:
                if _is_posted(each):
                    for host in self._home.hosts:
                        host.hold_post(self._link, each)
        else:
            self._forward(address, target, batch)

    def _make_room(self, newest: _Target) -> None:
        """Drop the least recently used targets, except *newest* and those that wait.

        If a target with waiting messages were dropped, later messages for its address would
        overtake them. Each of these has at least one message, so the credit of the link limits
        their number.
        """
        surplus = len(self._targets) - self._home.limits.relay_targets_max
        for address, target in list(self._targets.items()) if surplus > 0 else ():
            if surplus and target.waiting is None and target is not newest:
                del self._targets[address]
                target.drop()
                surplus -= 1

    def _forward(self, address: str, target: _Target, batch: list[IncomingDelivery]) -> None:
        if target.error is not None:
            # Resolve the address again for the next message, which may succeed.
            if self._targets.get(address) is target:
                del self._targets[address]
            for each in batch:
                self._refuse(each, target.error)
        elif isinstance(target.endpoint, ReplyLink):
            self._window.took(len(batch), sum([len(each.payload) for each in batch]))
            for each in batch:
                target.endpoint.forward(each, self._window)
        elif target.endpoint is not None:
            target.endpoint.deliver(self._link, batch)

    async def _ask(self, address: str, target: _Target) -> None:
        """Check the peer's right to send to *address*, then hand over the waiting messages."""
        refused = await self._home.permissions.may_send(self._link.peer, address)
        batch, target.waiting = target.waiting or [], None
        self._window.freed(len(batch), sum([len(each.payload) for each in batch]))
        if self._over:
            # The peer redelivers messages that it has not settled; settled ones exist only here,
            # and messages posted in a transaction belong to it.
            batch = [each for each in batch if each.settled or _is_posted(each)]
            if not batch:
                return
        target.resolved(self._resolve(address) if refused is None else refused)
        try:
            self._forward(address, target, batch)
        finally:
            for each in batch:
                if _is_posted(each):
                    for host in self._home.hosts:
                        host.release_post(each)
        if self._over:
            self._leave(target, None, closed=True)
        else:
            self._make_room(target)

    def _resolve(self, address: str) -> ReceivingEndpoint | ReplyLink | Error:
        """Return the destination of messages for *address*, or the error of an attach to it."""
        home = self._home
        peer = self._link.peer
        address = address_for(peer, address)
        own: tuple[Host, ...] = () if peer.profile is None else peer.profile.hosts
        for host in (*own, *self._first_hosts):
            endpoint = host.relay(address, self._link)
            if endpoint is not None:
                return endpoint
        if is_direct_reply(address):
            # Before the nodes: the pattern of one may match any address.
            return self._created.get(address) or Error("amqp:not-found", f"{address!r} is gone")
        try:
            found = self._nodes.find(address)
        except ValueError as error:
            return Error("amqp:not-found", str(error))
        if found is not None:
            workers, captures = found
            route = workers.route
            if route.kind not in ("node", "rpc") or route.streaming or route.takes_items:
                return Error("amqp:not-allowed", f"{address!r} has to be attached to")
            binding = RouteBinding(route, home, self._connection, self._link, address, captures)
            return Inbox(binding, workers, self._window)
        made = self._created.get(address)
        if made is not None:
            return made
        for host in home.hosts:
            if host in self._first_hosts:
                continue
            endpoint = host.relay(address, self._link)
            if endpoint is not None:
                return endpoint
        return Error("amqp:not-found", f"there is no node {address!r}")

    def _refuse(self, delivery: IncomingDelivery, error: Error) -> None:
        """Reject a message that cannot be routed, with the error that an attach would get.

        A message posted in a transaction of a host is refused within the transaction. If the sender
        cannot receive a rejection, its link is detached instead.
        """
        told = Error(error.condition, error.description, {Symbol("delivery-tag"): delivery.tag})
        if _is_posted(delivery) and any(
            host.refuse_post(self._link, delivery, Rejected(told)) for host in self._home.hosts
        ):
            return
        outcomes = (self._link.source or Source()).outcomes
        if delivery.settled or (outcomes and "amqp:rejected:list" not in outcomes):
            self._link.detach(told)
        else:
            delivery.settle(Rejected(told))

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the link is not streaming."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        if any(target.waiting for target in self._targets.values()):
            settled = set(deliveries)
            for target in self._targets.values():
                for each in settled.intersection(target.waiting or ()):
                    # If the address turns out to be an rpc, its caller has given up.
                    each.context = ABANDONED
        others = [each for each in deliveries if not abandon(each)]
        if others:
            for target in self._targets.values():
                if target.endpoint is not None and not isinstance(
                    target.endpoint, ReplyLink | Inbox
                ):
                    target.endpoint.on_settled(link, others)

    def on_flow(self, link: ReceivingLink) -> None:
        self._window.freed(0, 0)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        self._over = True
        self._window.close()
        for target in self._targets.values():
            self._leave(target, error, closed=closed)
        self._targets.clear()
        self._relays.discard(self)
        self._home.attaching.forget(link)

    def _leave(self, target: _Target, error: Error | None, *, closed: bool) -> None:
        """Notify the endpoint of *target* that the link has ended."""
        if target.endpoint is not None and not isinstance(target.endpoint, ReplyLink):
            target.endpoint.on_detached(self._link, error, closed)

    def forget(self, connection: Connection) -> None:
        """Drop the resolved targets, because the rights of *connection* have changed."""
        if connection is self._connection:
            for address, target in list(self._targets.items()):
                if target.waiting is None:
                    del self._targets[address]
                    target.drop()

    def moved(self, connection: Connection, anchor: LinkConnection) -> None:
        """Use the rights of *connection* from now on if the link is one of *anchor*."""
        if self._link.connection is anchor:
            self._connection = connection
            self.forget(connection)

    def stop(self) -> None:
        """Take back the credit. Messages that wait for a handler are released by its route."""
        self._window.close()


def _is_posted(delivery: IncomingDelivery) -> bool:
    """Whether *delivery* is posted in a transaction."""
    return type(delivery.state) is TransactionalState


class _Target:
    """State of one address of an anonymous terminus."""

    __slots__ = ("endpoint", "error", "waiting")

    def __init__(self) -> None:
        self.endpoint: ReceivingEndpoint | ReplyLink | None = None
        self.error: Error | None = None
        #: Messages that arrived before the address was resolved; None afterwards.
        self.waiting: list[IncomingDelivery] | None = []

    def resolved(self, found: ReceivingEndpoint | ReplyLink | Error) -> None:
        if isinstance(found, Error):
            self.error = found
        else:
            self.endpoint = found

    @property
    def over(self) -> bool:
        """Whether the destination that was found has ended."""
        return isinstance(self.endpoint, ReplyLink | Inbox) and self.endpoint.over

    def drop(self) -> None:
        """Release the target; the next message resolves the address again."""
        if isinstance(self.endpoint, Inbox):
            self.endpoint.retire()
