"""Links that attach to nodes: which node they reach, on which terms, and what is kept of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import msgspec

from ..batches import RECORD_BATCHES
from ..errors import AmqpError, LinkRefused
from ..fronts.base import SENDER, Link, ReceivingEndpoint, ReceivingLink, SendingLink
from ..loglimit import log_refusal
from ..outcomes import Error
from ..termini import Coordinator, DeleteOnClose, Source, Target
from .coordinators import attach_control
from .kinds.base import SEALED, Node
from .services import Services
from .spaces import VirtualHost, VirtualHosts
from .staging.attempts import claim_of
from .termini import Key, Terminus
from .terms import SHARED, Means, Terms, answer, dynamic_declaration

_log: Final = logging.getLogger("amqp_rt.broker")


class LinkAcceptor:
    """Accepts or refuses the links of peers.

    Args:
        services: The broker's services.
        spaces: Its virtual hosts.
    """

    def __init__(self, services: Services, spaces: VirtualHosts) -> None:
        self._services = services
        self._spaces = spaces

    def _refuse(self, link: ReceivingLink | SendingLink, error: Error) -> None:
        """Refuse *link* with *error*, and log the refusal."""
        services = self._services
        link.refuse(error)
        services.refused.add(str(error.condition))
        log_refusal(_log, services.log_limiter, link, error, services.clock.monotonic())

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*; return False if its address is not ours."""
        sending = link.role == SENDER
        terminus = link.source if sending else link.target
        if isinstance(terminus, Coordinator):
            attach_control(self._services.transactions, cast("ReceivingLink", link))
            return True
        if not isinstance(terminus, Source | Target):
            return False
        space = self._spaces.get(link.peer.virtual_host)
        try:
            if not sending and self._attach_way(cast("ReceivingLink", link), space, terminus):
                return True
            return self._attach_node(link, space, terminus, sending)
        except _Refused as refused:
            self._refuse(link, refused.error)
            return True

    def _attach_way(
        self, link: ReceivingLink, space: VirtualHost, terminus: Source | Target
    ) -> bool:
        """Attach a sender to an address that leads to several nodes; return False if it is none.

        Raises:
            _Refused: Nothing there takes messages.
        """
        ways, address = self._services.routed_addresses, terminus.address
        way = None
        if ways is not None and isinstance(address, str):
            way = ways.inlet(space.name, address, link)
        if isinstance(way, Error):
            raise _Refused(way)
        if way is None:
            return False
        link.accept(
            way,
            target=Target(address=address),
            max_message_size=self._services.limits.message_size_max,
        )
        return True

    def _attach_node(
        self,
        link: ReceivingLink | SendingLink,
        space: VirtualHost,
        terminus: Source | Target,
        sending: bool,
    ) -> bool:
        """Attach *link* to the node of its terminus; return False if there is none.

        Raises:
            _Refused: The link is refused.
        """
        key = self._key(space, link, terminus)
        kept = self._services.termini.find(key)
        address = terminus.address
        if kept is not None:
            if kept.error is not None:
                error = kept.error
                self._refuse(link, error)
                kept.end()
                return True
            if terminus.dynamic and kept.kept.dynamic and address is None:
                # The node that was created for the terminus still exists.
                address = kept.address
        made = kept is not None and terminus.dynamic and address == kept.address
        shown = _dynamic_address(link, address) if made else address
        try:
            if terminus.dynamic and not made:
                self._attach_dynamic(space, link, terminus, sending, key)
                return True
            node = space.resolve(address)
        except AmqpError as error:
            raise _Refused(Error.of(error)) from error
        if node is None:
            return False
        terms = self._terms(node, link, sending, shown, kept, made=made)
        if self._attach_special(node, link, terms, sending):
            return True
        self._end_other(node, kept, terms)
        if made:
            node.release_owner()
            node.owner = link.connection
            self._services.dynamic[node.owner] += 1
        if sending and (kept is None or kept.over):
            refusal = node.refuse_consumer(terms)
            if refusal is not None:
                raise _Refused(refusal)
        self._accept(node, link, terms, sending, key)
        return True

    def _terms(
        self,
        node: Node,
        link: ReceivingLink | SendingLink,
        sending: bool,
        address: Any,
        kept: Terminus | None,
        *,
        made: bool,
    ) -> Terms:
        """Return the terms of *link* at *node*.

        Raises:
            _Refused: The link is refused.
        """
        services = self._services
        terms = answer(
            link,
            node.declared,
            sending=sending,
            lifetime=node.lifetime if made else None,
            # The link for which the node was created may be resumed on another connection.
            owner=node.owner if isinstance(node.lifetime, DeleteOnClose) and not made else None,
            means=Means(
                room=kept is not None or services.termini.has_room(link),
                stored=node.number > 0,
                volatile=services.volatile,
                filters=services.filters,
            ),
            address=address,
            now=services.clock.wall(),
            limits=services.limits,
        )
        if not sending and node.is_sealed:
            terms = SEALED
        if sending and node.reserved is not None and node.reserved is not link.connection:
            terms = Error(
                "amqp:resource-locked",
                f"{node.declared.name!r} is exclusive to another connection or session",
            )
        if isinstance(terms, Error):
            raise _Refused(terms)
        return terms

    def _attach_special(
        self, node: Node, link: ReceivingLink | SendingLink, terms: Terms, sending: bool
    ) -> bool:
        """Attach a link that reads leased messages or stages messages; return False for any other.

        Raises:
            _Refused: The link is refused.
        """
        if sending:
            return self._services.leases.attach(node, cast("SendingLink", link))
        claim = claim_of(cast("ReceivingLink", link))
        if claim is not None:
            claim = node.epochs_error or claim
        if isinstance(claim, Error):
            raise _Refused(claim)
        if claim is None:
            return False
        self._services.staging.attach(node, cast("ReceivingLink", link), claim, terms.target)
        return True

    def _end_other(self, node: Node, kept: Terminus | None, terms: Terms) -> None:
        """End the terminus *kept* under the name of a link if *terms* are those of another one.

        Raises:
            _Refused: Other links share it.
        """
        if kept is None:
            return
        kept.interrupt()
        if kept.over or kept.is_resumed_by(terms, node.declared.name):
            return
        if kept.has_other_links:
            raise _Refused(
                Error(
                    "amqp:precondition-failed",
                    "the subscription has other links, and another address or filter",
                )
            )
        # A link with other terms replaces the kept one (S3 2.3.2, see docs/conformance.md).
        kept.end()

    def _attach_dynamic(
        self,
        space: VirtualHost,
        link: ReceivingLink | SendingLink,
        terminus: Source | Target,
        sending: bool,
        key: Key,
    ) -> None:
        """Create a dynamic node for *link*, and attach it.

        Raises:
            AmqpError: There are too many nodes.
            _Refused: The link is refused.
        """
        services = self._services
        found = dynamic_declaration(link, terminus)
        if isinstance(found, Error):
            raise _Refused(found)
        declared, lifetime = found
        owner = link.connection
        if services.dynamic[owner] >= services.limits.dynamic_nodes_max:
            raise LinkRefused(
                "the connection has too many dynamic nodes",
                condition="amqp:resource-limit-exceeded",
            )
        terms = answer(
            link,
            declared,
            sending=sending,
            lifetime=lifetime,
            means=Means(
                room=services.termini.has_room(link),
                volatile=services.volatile,
                filters=services.filters,
            ),
            address=_dynamic_address(link, declared.name),
            now=services.clock.wall(),
            limits=services.limits,
        )
        if isinstance(terms, Error):
            raise _Refused(terms)
        kept = services.termini.find(key)
        if kept is not None:
            kept.interrupt()
            kept.end()
        node = space.make(declared, owner)
        node.begin_lifetime(lifetime)
        services.dynamic[owner] += 1
        self._accept(node, link, terms, sending, key, first=True)

    def _accept(
        self,
        node: Node,
        link: ReceivingLink | SendingLink,
        terms: Terms,
        sending: bool,
        key: Key,
        *,
        first: bool = False,
    ) -> None:
        """Accept *link* at *node*; the *first* link of a dynamic node is the one that it was created for."""
        kept = self._terminus(node, terms, sending, key, first=first)
        on_end = node.abandon if first and kept is None else None
        if sending:
            self._accept_consumer(node, cast("SendingLink", link), terms, kept, on_end)
        else:
            self._accept_producer(node, cast("ReceivingLink", link), terms, kept, on_end)

    def _terminus(
        self, node: Node, terms: Terms, sending: bool, key: Key, *, first: bool
    ) -> Terminus | None:
        """Return the terminus to keep for a link with *terms*, None if nothing is kept of it."""
        services = self._services
        kept = services.termini.find(key)
        if kept is None and (terms.keeps or terms.shared):
            number = 0
            terminus = terms.source if sending else terms.target
            if (
                isinstance(terminus, Source | Target)
                and terminus.durable
                and services.journal is not None
            ):
                number = services.new_number()
            kept = node.open_terminus(key, terms, number)
            if number:
                services.termini.keep(kept, node.number)
            if first:
                kept.on_end.append(node.abandon)
        elif kept is not None and kept.number:
            kept.set_terms(terms)
            services.termini.keep(kept, node.number)
        return kept

    def _accept_consumer(
        self,
        node: Node,
        link: SendingLink,
        terms: Terms,
        kept: Terminus | None,
        on_end: Callable[[], None] | None,
    ) -> None:
        properties = {**(terms.properties or {}), **node.properties(terms)}
        options: dict[str, Any] = {"properties": properties} if properties else {}
        if node.capabilities:
            options["offered_capabilities"] = node.capabilities
        if kept is not None:
            if node.on_consumer_detached is not None:
                kept.on_end.append(partial(node.on_consumer_detached, link))
            kept.accept_consumer(link, terms, **options)
            return
        batches = node.sends_batches(link)
        if batches:
            options["offered_capabilities"] = (*node.capabilities, RECORD_BATCHES)
        endpoint = node.consume(terms, batches=batches)
        node.watch_link(endpoint, on_end)
        if node.on_consumer_detached is not None:
            endpoint.on_end.append(partial(node.on_consumer_detached, link))
        link.accept(
            endpoint,
            source=terms.source,
            target=terms.target,
            snd_settle_mode=terms.snd_settle_mode,
            **options,
        )

    def _accept_producer(
        self,
        node: Node,
        link: ReceivingLink,
        terms: Terms,
        kept: Terminus | None,
        on_end: Callable[[], None] | None,
    ) -> None:
        limits = self._services.limits
        producer = node.produce()
        if (profile := link.peer.profile) is not None:
            producer.entry_factory = self._services.entry_factory_for(
                profile.annotations, node.name
            )
        options: dict[str, Any] = {"max_message_size": limits.message_size_max}
        if terms.properties:
            options["properties"] = dict(terms.properties)
        if node.takes_pieces:
            # Larger messages are written to the store while they arrive.
            options["max_message_size"] = limits.streaming_message_size_max
            options["stream_above"] = limits.message_size_max
        node.watch_link(producer, on_end)
        if kept is None:
            link.accept(producer, source=terms.source, target=terms.target, **options)
        else:
            kept.accept_producer(link, terms, producer, **options)

    # --- Kept termini and addresses ---

    def _key(self, space: VirtualHost, link: Link, terminus: Source | Target) -> Key:
        """Return the key under which the terminus of *link*, which requests *terminus*, is kept."""
        if isinstance(terminus, Source) and SHARED in terminus.capabilities:
            return self._services.termini.shared_key(space.name, link, terminus)
        return self._services.termini.key(space.name, link)

    def kept_source(self, link: SendingLink) -> Source | None:
        """Return the source kept for *link*, whose peer gives none; None if none is kept.

        Raises:
            AmqpError: It is that of a shared subscription with attached links.
        """
        space = self._spaces.get(link.peer.virtual_host)
        kept = self._services.termini.named(space.name, link)
        if kept is None or not isinstance(kept.kept, Source):
            return None
        if kept.has_other_links:
            # A peer that attaches without a source address wants to end the subscription.
            raise AmqpError(
                f"the subscription {link.name!r} has links", condition="amqp:resource-locked"
            )
        return msgspec.structs.replace(kept.kept)

    def kept_terminus(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """Return the terminus kept under the name of *link* for any user; None if there is none."""
        terminus = link.source if link.role == SENDER else link.target
        if not isinstance(terminus, Source | Target):
            return None
        key = self._key(self._spaces.get(link.peer.virtual_host), link, terminus)
        # A terminus kept for a user is found by links of that user only.
        kept = None if key[1] else self._services.termini.find(key)
        return None if kept is None else kept.kept

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* on *link*, which has an anonymous terminus.

        None if the address is not ours, an error if it cannot be used.
        """
        space, ways = self._spaces.get(link.peer.virtual_host), self._services.routed_addresses
        if ways is not None:
            way = ways.inlet(space.name, address, link)
            if way is not None:
                return way
        try:
            node = space.resolve(address)
        except AmqpError as error:
            return Error.of(error)
        if node is not None and node.is_sealed:
            return SEALED
        return None if node is None else node.inlet


def _dynamic_address(link: Link, name: str) -> str:
    """Return the address to answer on *link* for the dynamic node *name*."""
    profile = link.peer.profile
    if profile is None or profile.dynamic_address is None:
        return name
    return str(profile.dynamic_address(name))


class _Refused(Exception):
    """Refusal of a link with an error."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.description)
        self.error = error
