"""Declarations of peers in all virtual hosts of a broker, and the exchanges that addresses lead to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...errors import AmqpError
from ...events import Peer
from ...fronts.base import Host, LinkConnection, ReceivingEndpoint, ReceivingLink
from ...loglimit import LogLimiter
from ...outcomes import Error
from ...security.access import Decide
from ...values import Symbol
from ..bindings import LOOKS_OF_A_FRAME, SYSTEM, TYPES, RoutingTable
from ..durable.journal import Journal
from ..entries import Entry
from ..filtering.views import MessageView
from ..host import BrokerHost
from .arguments import QueueType
from .declared import DeclaredSpace
from .exchange_addresses import own_name, split_exchange
from .inlets import ExchangeInlet
from .records import TopologyRecords
from .topology import Topology

_log = logging.getLogger("amqp_rt.broker")

#: Message annotation with the routing key of a message published in 0-9-1.
_ROUTING_KEY: Final = Symbol("x-routing-key")


class Topologies:
    """Declarations of peers in *host*, besides its nodes.

    Args:
        host: The broker.
        decide: Decides whether a peer has a right at an address.
        asks: Returns whether the application also has to authorize senders, for which a link is
            needed.
        routing: Hosts of which some may lead links to other containers.
        routed: Returns whether one of them does so for senders to an address, for which a link is needed, too; called
            if there are any, for addresses that no node here has.
        types: Types of exchanges besides those of the standard, by names that begin with ``x-``.
        queue_types: Custom values of ``x-queue-type``, which begin with ``x-`` too; each with the
            function from a queue's declaration to its node.

    Raises:
        ValueError: The name of a type does not begin with ``x-``.
    """

    def __init__(
        self,
        host: BrokerHost,
        decide: Decide,
        *,
        asks: Callable[[], bool] = lambda: False,
        routing: Sequence[Host] = (),
        routed: Callable[[str], bool] = lambda address: False,
        types: Mapping[str, Callable[[], RoutingTable]] | None = None,
        queue_types: Mapping[str, QueueType] | None = None,
    ) -> None:
        for what, names in (("an exchange type", types or ()), ("a queue type", queue_types or ())):
            for name in names:
                if not name.startswith("x-"):
                    raise ValueError(f"{what} of one's own begins with x-, and {name!r} not")
        self.queue_types = dict(queue_types or {})
        self.types = {**TYPES, **(types or {})}
        self.host = host
        self.decide = decide
        self.asks = asks
        self.routing = routing
        self.routed = routed
        #: Limits log lines about messages that cannot be routed.
        self.log_limiter = LogLimiter(host.limits)
        self._spaces: dict[str, DeclaredSpace] = {}
        self.records = TopologyRecords(host, self.space)
        host.services.on_deleted = self._deleted
        host.services.routed_addresses = self

    def of(self, peer: Peer, connection: LinkConnection) -> Topology:
        """Return the topology for *peer* on *connection*, whose virtual host has to be known."""
        return Topology(self, peer, connection)

    def space(self, virtual_host: str) -> DeclaredSpace:
        """Return the declarations in *virtual_host*."""
        found = self._spaces.get(virtual_host)
        if found is None:
            found = self._spaces[virtual_host] = DeclaredSpace(
                virtual_host, self.host, self.types, self.records.unbound
            )
        return found

    # --- Addresses of exchanges (services.Ways) ---

    def own_name(self, address: str) -> str:
        """Return the name under which rights at the exchange at *address* are granted."""
        return own_name(address)

    def inlet(
        self, virtual_host: str, address: str, link: ReceivingLink
    ) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to the exchange at *address*.

        None if that is no address of an exchange, an error if the exchange cannot be sent to.
        """
        found = split_exchange(address)
        if found is None:
            return None
        if not found[0]:
            return Error(
                "amqp:not-found", "the default exchange has no address: use those of the queues"
            )
        try:
            exchange = self.space(virtual_host).exchanges.find(found[0])
        except AmqpError as error:
            return Error.of(error)
        if exchange.internal:
            return Error("amqp:unauthorized-access", f"exchange {found[0]!r} is internal")
        if exchange.type == SYSTEM:
            return Error(
                "amqp:not-allowed",
                f"exchange {found[0]!r} leads to services: send to their own addresses",
            )
        return ExchangeInlet(self.space(virtual_host), *found, self.log_limiter)

    def dead_letter_nodes(
        self, virtual_host: str, address: str, entry: Entry, *, diverted: bool = False
    ) -> list[str] | None:
        """Return the queues to which the exchange at *address* routes a dead letter.

        None if that is no address of an exchange. With *diverted* it is the alternate exchange of a
        queue: a message that it cannot route does not go to another one.

        Raises:
            AmqpError: There is no such exchange, or the message is malformed.
        """
        found = split_exchange(address)
        if found is None:
            return None
        name, key = found
        view = MessageView(entry, self.host.limits)
        if not key:
            key = str(view.message_annotations().get(_ROUTING_KEY) or "")
        headers = view.application_properties()
        exchanges = self.space(virtual_host).exchanges
        if exchanges.find(name).type == SYSTEM:
            return []
        # A dead letter is written together with the removal of its message, so that all of it is
        # done now. The bound keeps one of them from delaying the whole broker.
        left = self.host.limits.dead_letter_looks_max
        names: dict[str, None] = {}
        for work in exchanges.routing(name, (key,), headers, names, diverted=diverted):
            left -= work * LOOKS_OF_A_FRAME
            self.host.memory.work -= work
            if left <= 0:
                self._log_shortened(virtual_host, name)
                break
        return list(names)

    def _log_shortened(self, virtual_host: str, name: str) -> None:
        """Warn that a dead letter is not sent to all queues of the exchange *name*."""
        left_out = self.log_limiter.admit(
            ("dead letter", virtual_host, name), self.host.clock.wall()
        )
        if left_out is not None:
            _log.warning(
                "dead letter not sent to all queues: exchange %.200r: the search was ended after %d"
                " bindings; use fewer bindings for dead letters%s",
                name,
                self.host.limits.dead_letter_looks_max,
                left_out,
            )

    def drops_dead_letters(self, virtual_host: str, address: str) -> bool:
        """Return whether *address* is that of a system exchange, which has no queues."""
        found = split_exchange(address)
        try:
            return (
                found is not None
                and self.space(virtual_host).exchanges.find(found[0]).type == SYSTEM
            )
        except AmqpError:
            # The exchange may be declared after the queue that refers to it.
            return False

    async def restore(self, journal: Journal) -> None:
        """Restore stored declarations: queues, exchanges, and then their bindings."""
        await self.records.restore(journal)

    def sweep(self) -> None:
        """Delete queues that were unused for too long (``x-expires``)."""
        for space in list(self._spaces.values()):
            space.sweep()

    def _deleted(self, virtual_host: str, name: str) -> None:
        """Remove the declaration and the bindings of a node that was deleted, by any protocol."""
        space = self._spaces.get(virtual_host)
        if space is not None:
            known = space.forget(name)
            if known is not None and known.declared.durable:
                self.records.forget_queue(space, name)
            self.records.exchanges_gone(space, space.exchanges.forget(name))
            for each in space.watched:
                each.add(name)
