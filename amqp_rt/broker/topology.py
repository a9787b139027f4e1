"""Queues, exchanges and bindings that peers declare, if the protocol permits it (0-9-1 §3.1, 0-10).

A :class:`Topologies` belongs to a broker; a :class:`Topology` is the view of one peer on its virtual
host, limited to its rights (:class:`~amqp_rt.fronts.base.Topology`). Queues are ordinary nodes of
the broker, so that links of every protocol reach them. Properties that queues have only in these
protocols, such as deletion with the last consumer, are kept here.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Self, TypeAlias
from urllib.parse import quote, unquote

from msgspec import Struct
from msgspec.structs import replace

from ..addresses import EXCHANGES
from ..codec.primitives import write_value
from ..errors import AmqpError
from ..events import Peer
from ..fronts.base import (
    Exchange,
    IncomingDelivery,
    QueueDeclaration,
    QueueState,
    ReceivingEndpoint,
    ReceivingLink,
)
from ..limits import SECONDS_MAX, Limits
from ..loglimit import LogLimiter
from ..message import Message
from ..outcomes import RELEASED, Accepted, Error, Rejected, rejected
from ..security.access import EVERYWHERE, Decide, Passage, Rights, decide_passages
from ..transactions import TransactionalState
from ..values import Symbol
from .bindings import (
    LOOKS_OF_A_FRAME,
    RESERVED,
    SYSTEM,
    TYPES,
    Binding,
    Destination,
    Exchanges,
    RoutingTable,
    size_of,
)
from .durable import facts
from .durable.facts import FactKind
from .durable.journal import Journal
from .entries import Entry
from .filtering.views import MessageView
from .host import BrokerHost
from .kinds.queues import QueueNode
from .nodes import NAME_MAX, Declaration, Log, Queue, passages_of
from .spaces import VirtualHost

_log = logging.getLogger("amqp_rt.broker")

#: Function from a queue's declaration to the node to create, which has the same name. It raises
#: ``AmqpError`` with ``amqp:precondition-failed`` for a wrong argument.
QueueType: TypeAlias = Callable[[QueueDeclaration], Declaration]

#: Supported values of ``x-queue-type``, and of ``x-overflow`` with the overflow policies they mean.
_QUEUE_TYPES: Final = ("classic", "quorum", "stream")
_OVERFLOWS: Final = {
    "drop-head": "drop-head",
    "reject-publish": "reject",
    "reject-publish-dlx": "reject",
}


#: Credit of a link that sends to an exchange.
_WINDOW: Final = 1_000
#: Condition with which a queue that is out of service refuses everything.
_FAILED: Final = "amqp:internal-error"
#: Limit of one turn's work on messages to an exchange, in frames, and number of queues between two
#: checks of it.
_WORK_MAX: Final = 200
_QUEUES_OF_A_STEP: Final = 10
_TOO_LONG: Final = rejected(
    "amqp:resource-limit-exceeded",
    "the exchange leads to too many queues for a message of a transaction: send it outside of one",
)
_GONE: Final = rejected("amqp:not-found", "the queue has been deleted")
#: Message annotation with the routing key of a message published in 0-9-1.
_ROUTING_KEY: Final = Symbol("x-routing-key")


@lru_cache(maxsize=1024)
def exchange_address(name: str, key: str = "") -> str:
    """Return the address of an exchange, for rights and for peers of AMQP 1.0."""
    # Names that are not UTF-8 are encoded too, and lead to the error for an unknown exchange.
    address = EXCHANGES + quote(name, safe="", errors="surrogateescape")
    return f"{address}/{quote(key, safe='', errors='surrogateescape')}" if key else address


def split_exchange(address: str) -> tuple[str, str] | None:
    """Return the exchange and the routing key in *address*; None if it is no such address."""
    if not address.startswith(EXCHANGES):
        return None
    name, _, key = address.removeprefix(EXCHANGES).partition("/")
    return unquote(name, errors="surrogateescape"), unquote(key, errors="surrogateescape")


@lru_cache(maxsize=1024)
def _own_name(address: str) -> str:
    found = split_exchange(address)
    if found is None:
        return address
    name, key = found
    if name:
        return exchange_address(name)
    # The default exchange leads to the queue named by the key; without a key, to the queue named by
    # each message, which may be any.
    return key or EVERYWHERE


class _Declared(Struct):
    """Declaration of a queue; for an exclusive one, the only connection that may use it."""

    declared: QueueDeclaration
    owner: Any = None
    #: Seconds without use after which it is deleted (``x-expires``), and time of its last use.
    expires_s: float | None = None
    used_at: float = 0.0


class _Space:
    """Declarations in one virtual host."""

    def __init__(self, topologies: Topologies, name: str) -> None:
        self.name = name
        self._host = topologies.host
        self.queues: dict[str, _Declared] = {}
        #: Exchange and binding → key in the store, for stored bindings.
        self.stored: dict[tuple[str, Binding], bytes] = {}
        self.exchanges = Exchanges(
            self._has,
            types=topologies.types,
            limits=topologies.host.limits,
            on_unbound=partial(topologies.unbound, self),
            memory=topologies.host.memory,
        )
        #: Records of deleted queues, one for each message that is being handed to queues in turns.
        self.watched: dict[Deletions, None] = {}

    @property
    def nodes(self) -> VirtualHost:
        """Nodes of the virtual host."""
        return self._host.space(self.name)

    def _has(self, name: str) -> bool:
        return self.nodes.has(name)


class Deletions:
    """Names of the queues of a virtual host that are deleted within a ``with`` block.

    Such a name stays in the set if a queue is declared again under it within the block: the message
    that the block hands out was not routed to that queue.
    """

    __slots__ = ("_names", "_space")

    def __init__(self, space: _Space) -> None:
        self._space = space
        self._names: set[str] | None = None

    def __enter__(self) -> Self:
        self._space.watched[self] = None
        return self

    def __exit__(self, *error: object) -> None:
        del self._space.watched[self]

    def __contains__(self, name: object) -> bool:
        return self._names is not None and name in self._names

    def add(self, name: str) -> None:
        """Note that queue *name* is deleted."""
        if self._names is None:
            self._names = set()
        self._names.add(name)


class Topologies:
    """Declarations of peers in *host*, besides its nodes.

    Args:
        host: The broker.
        decide: Decides whether a peer has a right at an address.
        asks: Returns whether the application also has to authorize senders, for which a link is
            needed.
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
        #: Limits log lines about messages that cannot be routed.
        self.log_limiter = LogLimiter(host.limits)
        self._spaces: dict[str, _Space] = {}
        host.services.on_deleted = self._deleted
        host.services.ways = self

    def of(self, peer: Peer, connection: Any) -> Topology:
        """Return the topology for *peer* on *connection*, whose virtual host has to be known."""
        return Topology(self, peer, connection)

    def space(self, virtual_host: str) -> _Space:
        """Return the declarations in *virtual_host*."""
        found = self._spaces.get(virtual_host)
        if found is None:
            found = self._spaces[virtual_host] = _Space(self, virtual_host)
        return found

    # --- Addresses of exchanges (services.Ways) ---

    def own_name(self, address: str) -> str:
        """Return the name under which rights at the exchange at *address* are granted."""
        return _own_name(address)

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
        return ExchangeInlet(self, virtual_host, *found)

    def letter(self, virtual_host: str, address: str, entry: Entry) -> list[str] | None:
        """Return the queues to which the exchange at *address* routes a dead letter.

        None if that is no address of an exchange.

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
        for work in exchanges.routing(name, (key,), headers, names):
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

    def takes_no_letters(self, virtual_host: str, address: str) -> bool:
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

    def routing(
        self, virtual_host: str, name: str, key: str, payload: bytes, found: dict[str, None]
    ) -> Generator[int, None, None]:
        """Add to *found* the queues to which exchange *name* routes a message of AMQP 1.0.

        Without a *key*, the routing key is the message's subject. Yields the work done since the
        last step, in frames.

        Raises:
            AmqpError: There is no such exchange, or the message is malformed.
        """
        message = Message.decode(payload, self.host.limits)
        keys = (key or message.subject or "",)
        headers = message.application_properties
        yield from self.space(virtual_host).exchanges.routing(name, keys, headers, found)

    def _deleted(self, virtual_host: str, name: str) -> None:
        """Remove the declaration and the bindings of a node that was deleted, by any protocol."""
        space = self._spaces.get(virtual_host)
        if space is not None:
            known = space.queues.pop(name, None)
            if known is not None:
                self.host.memory.held -= size_of(known.declared.arguments)
            if known is not None and known.declared.durable:
                self._forget(facts.QUEUES, facts.digest_key(virtual_host, name))
            self.exchanges_gone(space, space.exchanges.forget(name))
            for each in space.watched:
                each.add(name)

    # --- Storing ---

    def keep_queue(self, space: _Space, known: _Declared) -> None:
        """Store the declaration of a queue, if it is durable and not exclusive."""
        declared = known.declared
        if declared.durable and not declared.exclusive:
            fields = [space.name, declared.name, declared.auto_delete, dict(declared.arguments)]
            self._keep(facts.QUEUES, facts.digest_key(space.name, declared.name), fields)

    def keep_exchange(self, space: _Space, declared: Exchange) -> None:
        """Store an exchange, if it is durable."""
        if declared.durable:
            self._keep(
                facts.EXCHANGES,
                facts.digest_key(space.name, declared.name),
                [
                    *(space.name, declared.name, declared.type, declared.auto_delete),
                    *(declared.internal, dict(declared.arguments)),
                ],
            )

    def exchanges_gone(self, space: _Space, names: Iterable[str]) -> None:
        """Remove the records of exchanges that were deleted, also with their last binding."""
        for name in names:
            self._forget(facts.EXCHANGES, facts.digest_key(space.name, name))

    def keep_binding(
        self, space: _Space, source: str, binding: Binding, arguments: Mapping[str, object]
    ) -> None:
        """Store a binding, if both its exchange and its destination are durable."""
        where = binding.destination
        if not space.exchanges.find(source).durable:
            return
        if where.is_exchange:
            durable = space.exchanges.find(where.name).durable
        else:
            durable = self._is_stored(space, where.name)
        if durable:
            key = space.stored[source, binding] = facts.digest_key(space.name, source, binding)
            self._keep(
                facts.BINDINGS,
                key,
                [space.name, source, where.name, where.is_exchange, binding.key, dict(arguments)],
            )

    def _is_stored(self, space: _Space, queue: str) -> bool:
        known = space.queues.get(queue)
        return known is None or (known.declared.durable and not known.declared.exclusive)

    def unbound(self, space: _Space, source: str, binding: Binding) -> None:
        """Remove the record of a binding that was removed."""
        key = space.stored.pop((source, binding), None)
        if key is not None:
            self._forget(facts.BINDINGS, key)

    def _keep(self, kind: FactKind[list[Any]], key: bytes, fields: list[Any]) -> None:
        if self.host.journal is not None:
            kind.keep(self.host.journal.loose, key, fields)

    def _forget(self, kind: FactKind[list[Any]], key: bytes) -> None:
        if self.host.journal is not None:
            kind.forget(self.host.journal.loose, key)

    async def restore(self, journal: Journal) -> None:
        """Restore stored declarations: queues, exchanges, and then their bindings."""
        restorers: list[tuple[FactKind[list[Any]], Callable[[bytes, list[Any]], None]]] = [
            (facts.QUEUES, self._restore_queue),
            (facts.EXCHANGES, self._restore_exchange),
            (facts.BINDINGS, self._restore_binding),
        ]
        for kind, restorer in restorers:
            for key, value in await kind.read(journal):
                try:
                    restorer(key, kind.decode(value))
                except (AmqpError, ValueError, TypeError) as error:
                    # Its node or exchange does not exist any more, or this release does not know it.
                    _log.warning("a fact of the topology is dropped: %s", error)
                    kind.forget(journal.loose, key)

    def _restore_queue(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, name, auto_delete, arguments = fields
        self.host.space(virtual_host).get(name)
        self.known_as(
            self.space(virtual_host),
            name,
            QueueDeclaration(
                name=name, durable=True, auto_delete=auto_delete, arguments=_texts(arguments)
            ),
        )

    def _restore_exchange(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, name, kind, auto_delete, internal, arguments = fields
        self.space(virtual_host).exchanges.declare(
            Exchange(
                name=name,
                type=kind,
                durable=True,
                auto_delete=auto_delete,
                internal=internal,
                arguments=_texts(arguments),
            ),
            restored=True,
        )

    def _restore_binding(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, source, name, is_exchange, routing_key, arguments = fields
        if not is_exchange:
            self.host.space(virtual_host).get(name)
        space = self.space(virtual_host)
        binding = space.exchanges.bind(
            source, Destination(name, is_exchange), routing_key, _texts(arguments), restored=True
        )
        if binding is not None:
            space.stored[source, binding] = key

    # --- Queues that are deleted automatically ---

    def known_as(
        self, space: _Space, name: str, declared: QueueDeclaration, owner: Any = None
    ) -> _Declared:
        """Register the declaration of queue *name*, whose node exists."""
        expires = declared.arguments.get("x-expires")
        self.host.memory.held += size_of(declared.arguments)
        known = space.queues[name] = _Declared(
            declared,
            owner,
            expires_s=int(expires) / 1000 if isinstance(expires, int) else None,
            used_at=self.host.clock.monotonic(),
        )
        if declared.auto_delete:
            space.nodes.watch_consumers(name, partial(self._left, space, name, known))
        return known

    def consumers(self, space: _Space, name: str) -> int:
        """Return the number of links that take messages from queue *name*."""
        links = space.nodes.consumers(name)
        return sum(not link.idle for link in links)

    def idle(self, space: _Space, name: str) -> None:
        """Note that a consumer takes no more messages; delete an auto-delete queue with its last."""
        known = space.queues.get(name)
        if known is None:
            return
        known.used_at = self.host.clock.monotonic()
        if not known.declared.auto_delete or not space.nodes.has(name):
            # The queue stays, or is being deleted, which is why its consumers leave.
            return
        if not self.consumers(space, name):
            space.nodes.delete(name)

    def _left(self, space: _Space, name: str, known: _Declared, link: Any) -> None:
        """Note that the link of a consumer of an auto-delete queue has ended."""
        if space.queues.get(name) is known and not link.idle:
            self.idle(space, name)

    def sweep(self) -> None:
        """Delete queues that were unused for too long (``x-expires``)."""
        now = self.host.clock.monotonic()
        for space in list(self._spaces.values()):
            for name, known in list(space.queues.items()):
                if known.expires_s is not None:
                    # An error with one queue must not keep the others.
                    self.host.guard(None, partial(self._sweep, space, name, known, now))

    def _sweep(self, space: _Space, name: str, known: _Declared, now: float) -> None:
        if space.queues.get(name) is not known:
            # It was deleted together with another one.
            return
        if self.consumers(space, name):
            known.used_at = now
        elif known.expires_s is not None and now - known.used_at >= known.expires_s:
            space.nodes.delete(name)


def _texts(arguments: Any) -> dict[str, object]:
    return {str(name): value for name, value in dict(arguments).items()}


class ExchangeInlet:
    """Endpoint for messages of 1.0 peers to an exchange (fronts.base.ReceivingEndpoint)."""

    def __init__(self, topologies: Topologies, virtual_host: str, name: str, key: str) -> None:
        self._all = topologies
        self._virtual_host = virtual_host
        self._name = name
        self._key = key
        #: Deliveries that wait for their turn, and the remaining work on the current one.
        self._waiting: deque[tuple[ReceivingLink, Any]] = deque()
        self._work: Generator[int, None, None] | None = None

    def on_attached(self, link: ReceivingLink) -> None:
        """Grant a fixed credit: queues without room refuse, as room in all cannot be promised."""
        link.grant(_WINDOW)

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Put each message into all its queues; release those without a queue.

        Long work continues in later turns, and later deliveries wait for it.
        """
        for delivery in deliveries:
            if type(delivery.state) is TransactionalState:
                self._deliver_now(link, delivery)
            else:
                self._waiting.append((link, delivery))
        if self._work is None:
            self.resume()
        self.on_flow(link)

    def _deliver_now(self, link: ReceivingLink, delivery: Any) -> None:
        """Handle a post of a transaction at once, since the discharge may precede the next turn.

        A message with more work than one turn allows is refused before any queue gets it.
        """
        left = _WORK_MAX
        names: dict[str, None] = {}
        try:
            for work in self._route(delivery, names):
                left -= work
                if left <= 0:
                    break
        except Exception as error:
            self._refuse(delivery, error)
            return
        if left <= 0 or len(names) > _WORK_MAX:
            delivery.settle(_TOO_LONG)
            return
        for _ in self._hand_out(link, delivery, names, ()):
            pass

    def resume(self) -> None:
        """Work on the waiting deliveries as far as one turn allows."""
        left = _WORK_MAX
        while self._work is not None or self._waiting:
            if self._work is None:
                self._work = self._spread(*self._waiting.popleft())
            for work in self._work:
                left -= work
                if left <= 0:
                    self._all.host.turns.go_on_later(self)
                    return
            self._work = None

    def _route(self, delivery: Any, names: dict[str, None]) -> Generator[int, None, None]:
        return self._all.routing(self._virtual_host, self._name, self._key, delivery.payload, names)

    def _spread(self, link: ReceivingLink, delivery: Any) -> Generator[int, None, None]:
        """Put a message into its queues; yield the work done since the last step, in frames."""
        names: dict[str, None] = {}
        with Deletions(self._all.space(self._virtual_host)) as gone:
            try:
                yield from self._route(delivery, names)
            except Exception as error:
                # Deliveries behind this one must not be affected.
                self._refuse(delivery, error)
                return
            yield from self._hand_out(link, delivery, names, gone)

    def _refuse(self, delivery: Any, error: Exception) -> None:
        """Reject *delivery*, which cannot be routed because of *error*."""
        if not isinstance(error, AmqpError):
            # Exchange types of the application, for example, may raise any exception.
            topologies = self._all
            left_out = topologies.log_limiter.admit(self._name, topologies.host.clock.wall())
            if left_out is not None:
                _log.error(
                    "message not routed: exchange %.200r of virtual host %r: unexpected error%s",
                    self._name,
                    self._virtual_host,
                    left_out,
                    exc_info=error,
                )
            error = AmqpError(
                f"exchange {self._name!r:.200}: an unexpected error, which is in the broker's log",
                condition=_FAILED,
            )
        delivery.settle(Rejected(Error.of(error)))

    def _hand_out(
        self, link: ReceivingLink, delivery: Any, names: dict[str, None], gone: Container[str]
    ) -> Generator[int, None, None]:
        host = self._all.host
        found: list[tuple[str, ReceivingEndpoint]] = []
        for name in names:
            each = None if name in gone else host.relay(name, link)
            if isinstance(each, Error) and each.condition == _FAILED:
                # A queue that is out of service must not miss its copy: the sender has to retry.
                delivery.settle(Rejected(each))
                return
            if each is not None and not isinstance(each, Error):
                found.append((name, each))
            if len(found) % _QUEUES_OF_A_STEP == _QUEUES_OF_A_STEP - 1:
                yield _QUEUES_OF_A_STEP
        if not found:
            delivery.settle(RELEASED)
        elif len(found) == 1 and len(names) < _QUEUES_OF_A_STEP:
            found[0][1].deliver(link, [delivery])
        else:
            payload = host.services.door.without_delivery_annotations(
                delivery.payload, delivery.message_format
            )
            copies = Copies(delivery, len(found), payload)
            for at, (name, inlet) in enumerate(found, 1):
                copy = Copy(copies)
                try:
                    if name in gone:
                        copy.settle(_GONE)
                    else:
                        inlet.deliver(link, [copy])
                except Exception as error:
                    # The other queues get their copies, and the sender gets this error.
                    copy.settle(Rejected(Error.of(host.fail(inlet, error))))
                if not at % _QUEUES_OF_A_STEP:
                    yield 5 * _QUEUES_OF_A_STEP

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Do nothing: only complete messages are handled."""

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Do nothing: the outcome is final."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Grant more credit if the link has little, unless too many deliveries wait."""
        if link.attached and link.credit * 2 <= _WINDOW and len(self._waiting) < _WINDOW:
            link.grant(_WINDOW)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Do nothing: no room was reserved for the link."""


class Copies:
    """Delivery to several queues, which is accepted when all of them have accepted it.

    Queues that were deleted since the delivery was routed do not count. If no other queue is left,
    the delivery is released, as an unroutable one is.
    """

    __slots__ = ("awaited", "delivery", "outcome", "payload")

    def __init__(self, delivery: IncomingDelivery, awaited: int, payload: bytes) -> None:
        self.delivery = delivery
        self.awaited = awaited
        self.payload = payload
        self.outcome: Any = None

    def settle(self, outcome: Any) -> None:
        """Count the outcome of one queue; settle the delivery with the last."""
        said = outcome.outcome if type(outcome) is TransactionalState else outcome
        counts = said is not outcome or not _is_gone(said)
        if counts and (self.outcome is None or type(said) is not Accepted):
            self.outcome = outcome
        self.awaited -= 1
        if not self.awaited:
            self.delivery.settle(RELEASED if self.outcome is None else self.outcome)


def _is_gone(outcome: Any) -> bool:
    """Return whether *outcome* is that of a queue that has been deleted."""
    if type(outcome) is not Rejected or outcome.error is None:
        return False
    return bool(outcome.error.condition == "amqp:not-found")


class Copy:
    """Delivery of :class:`Copies` to one queue."""

    __slots__ = ("_copies", "context", "local_state", "payload", "settled")

    aborted = False
    complete = True
    streamed = False

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        #: The same object for all queues, so that they share one body in memory and in the store.
        self.payload = copies.payload
        self.settled = copies.delivery.settled
        self.context: Any = None
        self.local_state: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the delivery that is not overridden here."""
        return getattr(self._copies.delivery, name)

    def settle(self, outcome: Any) -> None:
        """Settle the copy; only the first outcome counts."""
        if self.local_state is not None:
            return
        self.settled = True
        copies, self.local_state = self._copies, outcome
        copies.settle(outcome)

    def update(self, state: Any) -> None:
        """Do nothing: states of a single copy are not sent to the peer."""


class Topology:
    """Topology as one peer may see and change it (:class:`~amqp_rt.fronts.base.Topology`)."""

    def __init__(self, topologies: Topologies, peer: Peer, connection: Any) -> None:
        self._all = topologies
        self._host = topologies.host
        self._peer = peer
        self._connection = connection
        self._virtual_host = peer.virtual_host
        self._space = topologies.space(peer.virtual_host)

    @property
    def _nodes(self) -> VirtualHost:
        return self._space.nodes

    # --- queues ---

    def declare_queue(self, wanted: QueueDeclaration) -> QueueState:
        """Create a queue, or find an existing one with an equal declaration."""
        name = wanted.name
        _check_texts(name, wanted.arguments, self._host.limits)
        if wanted.durable and not wanted.exclusive:
            self._check_store(f"queue {name!r:.100}")
        implicit = False
        if name:
            found = self._nodes.name_of(name)
            if found is not None:
                self._judge(Rights.MANAGE, name)
                # The first declaration of a queue that was created for dead letters or on first use
                # determines its properties, so that the order of declarations does not matter.
                implicit = self._known(found) is None and self._nodes.is_implicit(found)
                if not implicit or found != name:
                    self._equal(found, wanted)
                    return self.queue(name)
            elif name.startswith(RESERVED):
                raise AmqpError(
                    f"names that begin with {RESERVED!r} are the broker's, such as {name!r}",
                    condition="amqp:unauthorized-access",
                )
        else:
            name = f"{RESERVED}gen-{uuid.uuid4().hex}"
        self._judge(Rights.MANAGE, name)
        memory = self._host.memory
        if memory.held + size_of(wanted.arguments) > memory.limit:
            raise AmqpError(
                f"queue {name!r:.100}: the broker has no room for its arguments",
                condition="amqp:resource-limit-exceeded",
            )
        node = self._node_of(name, wanted)
        self._judge_passages(passages_of(node, None, self._exists), waiting=True)
        owner = self._connection if wanted.exclusive else None
        if implicit:
            self._nodes.adopt(node, durable=wanted.durable and not wanted.exclusive, reserved=owner)
        elif wanted.exclusive or not wanted.durable:
            # Neither the queue nor its messages have to outlive the process.
            self._nodes.declare_transient(node, None if wanted.name else owner, reserved=owner)
        else:
            self._nodes.declare(node)
        known = self._all.known_as(self._space, name, wanted, owner)
        self._all.keep_queue(self._space, known)
        return self.queue(name)

    def _node_of(self, name: str, wanted: QueueDeclaration) -> Declaration:
        kind = wanted.arguments.get("x-queue-type")
        make = self._all.queue_types.get(kind) if isinstance(kind, str) else None
        try:
            return _node_of(name, wanted) if make is None else make(replace(wanted, name=name))
        except ValueError as error:
            raise _wrong(f"queue {name!r:.100}: {error}") from error

    def _equal(self, name: str, wanted: QueueDeclaration) -> None:
        """Refuse a declaration that differs from the existing one (errata: 405 before 406)."""
        known = self._known(name)
        if known is None:
            if wanted.exclusive:
                raise AmqpError(
                    f"queue {wanted.name!r} exists and is not exclusive: use another name, or delete"
                    " it first",
                    condition="amqp:resource-locked",
                )
            # It was declared by other means, whose options cannot be compared.
            return
        for field in ("durable", "exclusive", "auto_delete", "arguments"):
            before, now = getattr(known.declared, field), getattr(wanted, field)
            if before != now:
                raise AmqpError(
                    f"queue {wanted.name!r} has {field} {before!r}, not {now!r:.100}: "
                    "delete it first, or declare it equally",
                    condition="amqp:precondition-failed",
                )

    def _known(self, name: str) -> _Declared | None:
        """Return the declaration of queue *name*, None if peers did not declare it.

        Raises:
            AmqpError: The queue is exclusive to another connection.
        """
        known = self._space.queues.get(name)
        if known is not None and known.owner is not None and known.owner is not self._connection:
            raise AmqpError(
                f"queue {name!r} is exclusive to another connection",
                condition="amqp:resource-locked",
            )
        return known

    def queue(self, name: str) -> QueueState:
        """Return the current state of queue *name*."""
        self._judge_look(name)
        found = self._find(name)
        stats = self._nodes.get(found).stats()
        return QueueState(
            name=name,
            messages=stats.available,
            consumers=self._all.consumers(self._space, found),
        )

    def _find(self, name: str) -> str:
        """Return the name of the node at *name*, which may be an alias of it.

        Raises:
            AmqpError: There is no such queue, or it is exclusive to another connection.
        """
        found = self._nodes.name_of(name)
        if found is None:
            raise AmqpError(f"there is no queue {name!r:.100}", condition="amqp:not-found")
        known = self._known(found)
        if known is not None and known.expires_s is not None:
            known.used_at = self._host.clock.monotonic()
        return found

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue with its messages and bindings; return the number of waiting messages."""
        self._judge(Rights.MANAGE, name)
        found = self._find(name)
        if found != name:
            raise AmqpError(
                f"{name!r} is an alias of {found!r}: delete that",
                condition="amqp:precondition-failed",
            )
        stats = self._nodes.get(name).stats()
        if if_unused and self._all.consumers(self._space, name):
            raise AmqpError(f"queue {name!r} has consumers", condition="amqp:precondition-failed")
        if if_empty and stats.available:
            raise AmqpError(f"queue {name!r} has messages", condition="amqp:precondition-failed")
        self._nodes.delete(name)
        return stats.available

    def purge_queue(self, name: str) -> Generator[int, None, None]:
        """Drop the waiting messages of a queue step by step; yield the number dropped so far."""
        self._judge(Rights.MANAGE, name)
        found = self._find(name)
        return self._nodes.find_kind(found, QueueNode).purging()

    def wait_stored(self, queue: str, on_stored: Callable[[], None]) -> bool:
        """Call *on_stored* once messages that are being stored for *queue* have been added to it.

        Return False, without a call, if there are none.
        """
        found = self._nodes.name_of(queue)
        return found is not None and self._nodes.get(found).wait_stored(on_stored)

    def scarce(self, on_room: Callable[[], None]) -> bool:
        """Return whether memory is scarce; *on_room* is called once it no longer is."""
        memory = self._host.memory
        if memory.scarce:
            memory.wait(self, on_room)
            return True
        return False

    def idle(self, queue: str) -> None:
        """Note that a consumer of the peer takes no more messages."""
        self._all.idle(self._space, queue)

    def close(self) -> None:
        """Delete the exclusive queues of the connection, which has ended (0-9-1 §2.1.4.1)."""
        self._host.memory.waiting.pop(self, None)
        for name, known in list(self._space.queues.items()):
            if known.owner is self._connection:
                self._nodes.delete(name)

    # --- exchanges and bindings ---

    def declare_exchange(self, wanted: Exchange) -> None:
        """Create an exchange, or find an existing one with an equal declaration."""
        _check_texts(wanted.name, wanted.arguments, self._host.limits)
        own = exchange_address(wanted.name)
        self._judge(Rights.MANAGE, own)
        if wanted.alternate is not None and wanted.name not in self._space.exchanges:
            alternate = exchange_address(wanted.alternate)
            self._judge_passages([Passage(own, alternate, Rights.MANAGE)])
        if wanted.durable:
            self._check_store(f"exchange {wanted.name!r:.100}")
        if self._space.exchanges.declare(wanted):
            self._all.keep_exchange(self._space, wanted)

    def _check_store(self, what: str) -> None:
        """Check that the broker can store a durable object, which *what* describes.

        Raises:
            AmqpError: The broker has no store, and is not configured to do without (``volatile``).
        """
        if self._host.journal is None and not self._host.services.volatile:
            raise AmqpError(
                f"{what} cannot be durable: the broker has no store; start it with --store FILE, or"
                " with --volatile to keep durable things in memory",
                condition="amqp:precondition-failed",
            )

    def exchange(self, name: str) -> Exchange:
        """Return the declaration of exchange *name*."""
        self._judge_look(exchange_address(name))
        return self._space.exchanges.find(name)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange with its bindings."""
        self._judge(Rights.MANAGE, exchange_address(name))
        gone = self._space.exchanges.delete(name, if_unused=if_unused)
        self._all.exchanges_gone(self._space, gone)

    def bind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Bind queue *name* to *exchange*."""
        self._judge_binding(exchange, name)
        self._bind(exchange, Destination(self._find(name)), key, arguments)

    def unbind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Remove the binding of queue *name* to *exchange*, if it exists."""
        self._judge_binding(exchange, name)
        self._unbind(exchange, Destination(self._find(name)), key, arguments)

    def bind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Bind exchange *name* to *exchange*."""
        self._judge_binding(exchange, exchange_address(name))
        self._bind(exchange, Destination(name, is_exchange=True), key, arguments)

    def unbind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Remove the binding of exchange *name* to *exchange*, if it exists."""
        self._judge_binding(exchange, exchange_address(name))
        self._unbind(exchange, Destination(name, is_exchange=True), key, arguments)

    def _bind(
        self, exchange: str, where: Destination, key: str, arguments: Mapping[str, object]
    ) -> None:
        _check_texts(key, arguments, self._host.limits)
        binding = self._space.exchanges.bind(exchange, where, key, arguments)
        if binding is not None:
            self._all.keep_binding(self._space, exchange, binding, arguments)

    def _unbind(
        self, exchange: str, where: Destination, key: str, arguments: Mapping[str, object]
    ) -> None:
        gone = self._space.exchanges.unbind(exchange, where, key, arguments)
        self._all.exchanges_gone(self._space, gone)

    def _judge_binding(self, exchange: str, where: str) -> None:
        """Check the rights for a binding: to listen at *exchange*, and to manage *where*.

        A binding reads the messages of *exchange* and determines the input of *where*.
        """
        self._judge_passages(
            [Passage(exchange_address(exchange), where, Rights.LISTEN, Rights.MANAGE)]
        )

    # --- publishing ---

    def route(self, exchange: str, key: str, headers: Mapping[str, object]) -> list[str]:
        """Return the queues to which a named exchange routes a message."""
        names: dict[str, None] = {}
        for _ in self.routing(exchange, (key,), headers, names):
            pass
        return list(names)

    def routing(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Mapping[str, object],
        found: dict[str, None],
    ) -> Generator[int, None, None]:
        """Add to *found* the queues to which a named exchange routes a message with *keys*."""
        self._judge(Rights.SEND, exchange_address(exchange))
        declared = self._space.exchanges.find(exchange)
        if declared.internal:
            raise AmqpError(
                f"exchange {exchange!r} is internal: only other exchanges send to it",
                condition="amqp:unauthorized-access",
            )
        if declared.type == SYSTEM:
            for key in keys:
                self._judge(Rights.SEND, key)
        yield from self._space.exchanges.routing(exchange, keys, headers, found)

    def deletions(self) -> Deletions:
        """Collect the names of queues that are deleted within the block."""
        return Deletions(self._space)

    def inlet(
        self, queue: str, link: ReceivingLink, *, routed: bool
    ) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *queue*, as documented in fronts.base.Topology."""
        if self._all.asks():
            return None
        if not routed:
            refused = self._all.decide(self._peer, Rights.SEND, queue)
            if refused is not None:
                return refused
        return self._host.relay(queue, link)

    def _judge_look(self, address: str) -> None:
        """Refuse a peer without any right at *address*, so that it does not learn if that exists."""
        for wanted in (Rights.LISTEN, Rights.SEND, Rights.MANAGE):
            if self._all.decide(self._peer, wanted, address) is None:
                return
        raise AmqpError(
            f"{address!r} is not for you: it takes the right to listen, to send or to manage",
            condition="amqp:unauthorized-access",
        )

    def _judge(self, wanted: Rights, address: str) -> None:
        refused = self._all.decide(self._peer, wanted, address)
        if refused is not None:
            raise refused.raised_as(AmqpError)

    def _judge_passages(self, passages: list[Passage], *, waiting: bool = False) -> None:
        """Refuse a declaration that moves messages to addresses for which the peer has no right.

        *waiting* means that the application cannot authorize the move later: it authorizes
        publishers for each queue to which a binding or an alternate exchange leads, but a dead
        letter has no publisher.
        """
        refused = decide_passages(self._all.decide, self._peer, passages)
        if refused is None and waiting and passages and self._all.asks() and not self._peer.trusted:
            refused = Error(
                "amqp:unauthorized-access",
                f"messages of {passages[0].source!r} would go to {passages[0].target!r}, and "
                "authorize= cannot be asked here: declare it in the program of the broker, or by "
                "management",
            )
        if refused is not None:
            raise refused.raised_as(AmqpError)

    def _exists(self, address: str) -> bool:
        return self._nodes.name_of(address) is not None


def _check_texts(name: str, arguments: Mapping[str, object], limits: Limits) -> None:
    """Check, before anything is changed, that a name and arguments can be encoded in AMQP 1.0.

    Otherwise they could neither be stored nor sent to a peer.

    Raises:
        EncodeError: They cannot be encoded, such as octets that are not UTF-8.
        AmqpError: The arguments have more than ``arguments_bytes_max`` bytes.
    """
    out = bytearray()
    write_value(out, [name, dict(arguments)])
    if len(out) > len(name) + limits.arguments_bytes_max:
        raise _wrong(
            f"the arguments of {name!r:.50} have {len(out)} bytes, and {limits.arguments_bytes_max} at"
            " most are allowed"
        )


def _node_of(name: str, wanted: QueueDeclaration) -> Declaration:
    """Return the declaration of the node for a queue with these arguments.

    Raises:
        AmqpError: An argument is wrong (``amqp:precondition-failed``).
    """
    given = dict(wanted.arguments)
    kind = given.pop("x-queue-type", None)
    if kind is not None and kind not in _QUEUE_TYPES:
        raise _wrong(f"x-queue-type is one of {', '.join(_QUEUE_TYPES)}, not {kind!r:.50}")
    if len(name) > NAME_MAX:
        raise _wrong(f"the name of a queue has at most {NAME_MAX} characters")
    if kind == "stream":
        size = _number(given, "x-max-length-bytes")
        age = given.get("x-max-age")
        return Log(name, max_bytes=size, max_age_s=None if age is None else _age(age))
    options: dict[str, Any] = {}
    ttl = _number(given, "x-message-ttl", most=_MILLISECONDS_MAX)
    if ttl is not None:
        options["ttl_s"] = ttl / 1000
    options["length_max"] = _number(given, "x-max-length", least=0) or None
    options["bytes_max"] = _number(given, "x-max-length-bytes", least=0) or None
    overflow = given.get("x-overflow", "drop-head")
    if not isinstance(overflow, str) or overflow not in _OVERFLOWS:
        raise _wrong(f"x-overflow is one of {', '.join(_OVERFLOWS)}, not {overflow!r:.50}")
    if options["length_max"] or options["bytes_max"]:
        options["overflow"] = _OVERFLOWS[overflow]
    else:
        options["overflow"] = "reject"
    most = _number(given, "x-max-priority", least=0)
    if most:
        if most > 255:
            raise _wrong(f"x-max-priority is at most 255, not {most}")
        # With ten or more priorities, each value is its own priority; with fewer, values are grouped
        # around the middle one (Part 3 §3.2.1).
        options["priorities"] = max(most + 1, 10)
    returns = _number(given, "x-delivery-limit", least=0, most=_NUMBER_MAX - 1)
    # Clients of 0-9-1 requeue messages that did not fail: only the limit that they set applies.
    options["max_deliveries"] = 0 if returns is None else returns + 1
    single = given.get("x-single-active-consumer", False)
    if not isinstance(single, bool):
        raise _wrong(f"x-single-active-consumer is true or false, not {single!r:.50}")
    options["single_active"] = single
    exchange = given.get("x-dead-letter-exchange")
    key = given.get("x-dead-letter-routing-key")
    for argument in (exchange, key):
        if argument is not None and not isinstance(argument, str):
            raise _wrong(f"a dead-letter exchange and its key are texts, not {argument!r:.50}")
    if key is not None and exchange is None:
        raise _wrong("x-dead-letter-routing-key needs an x-dead-letter-exchange")
    if exchange == "" and key and key != name:
        options["dead_letter"] = key
    elif exchange is not None:
        options["dead_letter"] = exchange_address(str(exchange), str(key or ""))
    _number(given, "x-expires", most=_MILLISECONDS_MAX)
    return Queue(name, **options)


#: Largest number of 0-9-1, and longest time that a node can have.
_NUMBER_MAX: Final = 2**63 - 1
_MILLISECONDS_MAX: Final = int(SECONDS_MAX) * 1000


def _number(
    given: Mapping[str, object], name: str, least: int = 0, most: int = _NUMBER_MAX
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(f"{name} is a whole number from {least} to {most}, not {value!r:.50}")
    return int(value)


_UNITS: Final = {"Y": 31_536_000, "M": 2_592_000, "D": 86_400, "h": 3_600, "m": 60, "s": 1}


def _age(value: object) -> float:
    """Convert ``x-max-age`` of a stream, such as ``7D``, to seconds."""
    # No permitted time has more than nineteen digits.
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}[YMDhms]", value):
        age = int(value[:-1]) * _UNITS[value[-1]]
        if age <= SECONDS_MAX:
            return max(0.001, age)
    raise _wrong(
        "x-max-age is a number with Y, M, D, h, m or s behind it, and at most"
        f" {SECONDS_MAX:.0f}s, not {value!r:.50}"
    )


def _wrong(why: str) -> AmqpError:
    return AmqpError(why, condition="amqp:precondition-failed")


__all__ = ["Decide", "QueueType", "Topologies", "Topology", "exchange_address", "split_exchange"]
