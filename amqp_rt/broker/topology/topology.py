"""Topology of one peer: what it may declare, bind, see and publish in its virtual host."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ...errors import AmqpError
from ...events import Peer
from ...fronts.base import (
    BindingMatch,
    D,
    Exchange,
    LinkConnection,
    QueueDeclaration,
    QueueState,
    ReceivingEndpoint,
    ReceivingLink,
)
from ...outcomes import Error
from ...security.access import Passage, Rights, decide_passages
from ..binding_arguments import thawed_arguments
from ..bindings import (
    NAME_MAX,
    RESERVED,
    SYSTEM,
    Binding,
    Destination,
    size_of,
)
from ..kinds.queues import QueueNode
from ..nodes import Declaration, passages_of
from ..spaces import VirtualHost
from .arguments import check_texts, node_of, wrong
from .declared import DeclaredQueue, Deletions
from .exchange_addresses import exchange_address
from .last_messages import LastMessage

if TYPE_CHECKING:
    from .topologies import Topologies

#: Bindings that are checked or removed in one step; one takes some 20 microseconds.
_BINDINGS_OF_A_STEP: Final = 50


class Topology:
    """Topology as one peer may see and change it (:class:`~amqp_rt.fronts.base.Topology`)."""

    def __init__(self, topologies: Topologies, peer: Peer, connection: LinkConnection) -> None:
        self._all = topologies
        self._host = topologies.host
        self._peer = peer
        self._connection = connection
        self._virtual_host = peer.virtual_host
        self._space = topologies.space(peer.virtual_host)
        #: Bindings that end with the owner, with their exchanges.
        self._scoped: dict[tuple[str, Binding], None] = {}

    @property
    def _nodes(self) -> VirtualHost:
        return self._space.nodes

    # --- queues ---

    def declare_queue(self, wanted: QueueDeclaration) -> QueueState:
        """Create a queue, or find an existing one with an equal declaration."""
        name = wanted.name
        check_texts(name, wanted.arguments, self._host.limits)
        if wanted.is_stored and not wanted.sticky:
            self._check_store(f"queue {name!r:.100}")
        implicit = False
        if name:
            found = self._nodes.name_of(name)
            if found is not None:
                self._authorize(Rights.MANAGE, name)
                # The first declaration of a queue that was created for dead letters or on first use
                # determines its properties, so that the order of declarations does not matter.
                implicit = self._known(found) is None and self._nodes.is_implicit(found)
                if not implicit or found != name:
                    if wanted.sticky:
                        self._find_again(found, wanted)
                    else:
                        self._equal(found, wanted)
                    return self.queue(name)
            elif name.startswith(RESERVED):
                raise AmqpError(
                    f"names that begin with {RESERVED!r} are the broker's, such as {name!r}",
                    condition="amqp:unauthorized-access",
                )
        else:
            name = f"{RESERVED}gen-{uuid.uuid4().hex}"
        if wanted.is_stored and wanted.sticky:
            # Of a queue that exists the field is ignored.
            self._check_store(f"queue {name!r:.100}")
        self._authorize(Rights.MANAGE, name)
        if wanted.alternate:
            # A missing one is reported now, and not at the first message that it would get.
            self._space.exchanges.find(wanted.alternate)
        memory = self._host.memory
        if memory.held + size_of(wanted.arguments) > memory.limit:
            raise AmqpError(
                f"queue {name!r:.100}: the broker has no room for its arguments",
                condition="amqp:resource-limit-exceeded",
            )
        node = self._node_of(name, wanted)
        self._authorize_passages(passages_of(node, None, self._exists), waiting=True)
        owner = self._connection if wanted.exclusive else None
        if implicit:
            self._nodes.adopt(node, durable=wanted.is_stored, reserved=owner)
        elif not wanted.is_stored:
            # Neither the queue nor its messages have to outlive the process.
            self._nodes.declare_transient(node, None if wanted.name else owner, reserved=owner)
        else:
            self._nodes.declare(node)
            if owner is not None:
                self._nodes.get(name).reserved = owner
        known = self._space.register(name, wanted, owner)
        self._all.records.keep_queue(self._space, known)
        return self.queue(name)

    def _node_of(self, name: str, wanted: QueueDeclaration) -> Declaration:
        kind = wanted.arguments.get("x-queue-type")
        make = self._all.queue_types.get(kind) if isinstance(kind, str) else None
        try:
            return node_of(name, wanted) if make is None else make(replace(wanted, name=name))
        except ValueError as error:
            raise wrong(f"queue {name!r:.100}: {error}") from error

    def _find_again(self, name: str, wanted: QueueDeclaration) -> None:
        """Accept the existing queue *name* as it is, and make it exclusive if *wanted* is.

        Raises:
            AmqpError: It has another alternate exchange (``amqp:not-allowed``), or it is used by others and
                cannot become exclusive (``amqp:resource-locked``).
        """
        known = self._known(name)
        before = "" if known is None else known.declared.alternate
        if wanted.alternate and wanted.alternate != before:
            raise AmqpError(
                f"queue {name!r:.100} has the alternate exchange {before!r:.100}, not"
                f" {wanted.alternate!r:.100}: delete it first, or declare it equally",
                condition="amqp:not-allowed",
            )
        if not wanted.exclusive or (known is not None and known.owner is not None):
            return
        if known is None or self._nodes.consumers(name):
            raise AmqpError(
                f"queue {name!r:.100} is in use and cannot become exclusive: use another name",
                condition="amqp:resource-locked",
            )
        known.owner = self._nodes.get(name).reserved = self._connection
        # It was there before its owner, and so it stays.
        known.declared = replace(known.declared, exclusive=True, outlives_owner=True)

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
        for field in ("durable", "exclusive", "auto_delete", "arguments", "alternate"):
            before, now = getattr(known.declared, field), getattr(wanted, field)
            if before != now:
                raise AmqpError(
                    f"queue {wanted.name!r} has {field} {before!r}, not {now!r:.100}: "
                    "delete it first, or declare it equally",
                    condition="amqp:precondition-failed",
                )

    def _known(self, name: str) -> DeclaredQueue | None:
        """Return the declaration of queue *name*, None if peers did not declare it.

        Raises:
            AmqpError: The queue is exclusive to another connection.
        """
        known = self._space.queues.get(name)
        if known is not None and known.owner is not None and known.owner is not self._connection:
            raise AmqpError(
                f"queue {name!r} is exclusive to another connection or session",
                condition="amqp:resource-locked",
            )
        return known

    def queue(self, name: str) -> QueueState:
        """Return the current state of queue *name*."""
        self._authorize_lookup(name)
        found = self._find(name)
        stats = self._nodes.get(found).stats()
        known = self._space.queues.get(found)
        return QueueState(
            name=name,
            messages=stats.available,
            consumers=self._space.consumers(found),
            declared=None if known is None else known.declared,
        )

    def declaration(self, name: str) -> QueueDeclaration | None:
        """Return how peers declared queue *name*, None if it was declared by other means."""
        self._authorize_lookup(name)
        known = self._space.queues.get(self._find(name))
        return None if known is None else known.declared

    def _find(self, name: str) -> str:
        """Return the name of the node at *name*, which may be an alias of it.

        Raises:
            AmqpError: There is no such queue, or it is exclusive to another connection.
        """
        found = self._nodes.name_of(name)
        if found is None:
            raise AmqpError(f"there is no queue {name!r:.100}", condition="amqp:not-found")
        known = self._known(found)
        if known is not None and known.expires_s is not None and not known.is_leaving:
            known.used_at = self._host.clock.monotonic()
        return found

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue with its messages and bindings; return the number of waiting messages."""
        self._authorize(Rights.MANAGE, name)
        found = self._find(name)
        if found != name:
            raise AmqpError(
                f"{name!r} is an alias of {found!r}: delete that",
                condition="amqp:precondition-failed",
            )
        stats = self._nodes.get(name).stats()
        if if_unused and self._space.consumers(name):
            raise AmqpError(f"queue {name!r} has consumers", condition="amqp:precondition-failed")
        if if_empty and stats.available:
            raise AmqpError(f"queue {name!r} has messages", condition="amqp:precondition-failed")
        self._nodes.delete(name)
        return stats.available

    def purge_queue(self, name: str) -> Generator[int, None, None]:
        """Drop the waiting messages of a queue step by step; yield the number dropped so far."""
        self._authorize(Rights.MANAGE, name)
        found = self._find(name)
        return self._nodes.find_kind(found, QueueNode).purging()

    def wait_stored(self, queue: str, on_stored: Callable[[], None]) -> bool:
        """Call *on_stored* once messages that are being stored for *queue* have been added to it.

        Return False, without a call, if there are none.
        """
        found = self._nodes.name_of(queue)
        return found is not None and self._nodes.get(found).wait_stored(on_stored)

    def is_ready(self, queue: str) -> bool:
        """Return whether a consumer of *queue* has credit and room for a message."""
        found = self._nodes.name_of(queue)
        return found is not None and any(
            link.credit > 0 and link.writable and not link.idle
            for link in self._nodes.consumers(found)
        )

    def wall(self) -> float:
        """Return the time of the broker's clock, by which messages expire."""
        return self._host.clock.wall()

    def scarce(self, on_room: Callable[[], None]) -> bool:
        """Return whether memory is scarce; *on_room* is called once it no longer is."""
        memory = self._host.memory
        if memory.scarce:
            memory.wait(self, on_room)
            return True
        return False

    def idle(self, queue: str) -> None:
        """Note that a consumer of the peer takes no more messages."""
        self._space.idle(queue)

    def claim(self, queue: str, link: object, copies: Sequence[D]) -> list[D]:
        """Acquire messages of which *link* has sent *copies* from *queue*; return the copies of those."""
        self._authorize(Rights.LISTEN, queue)
        held = self._nodes.get(self._find(queue)).leased_queue
        for browser in () if held is None else held.browsers.values():
            if browser.link is link:
                return browser.acquire(copies)
        return []

    def moved(self, peer: Peer) -> None:
        """Use the rights of *peer* from now on: the owner has moved to its connection.

        Raises:
            ValueError: It is another user, or in another virtual host.
        """
        before = self._peer
        if (peer.virtual_host, peer.user) != (before.virtual_host, before.user):
            raise ValueError("a session moves between connections of one user and virtual host")
        self._peer = peer

    def close(self) -> None:
        """Delete the exclusive queues of the owner, which has ended (0-9-1 §2.1.4.1), and scoped bindings.

        Queues that outlive it are free for others; an auto-delete one is deleted unless others use it.
        """
        self._host.memory.waiting.pop(self, None)
        # A removal may delete its exchange, with other bindings.
        while self._scoped:
            exchange, binding = next(iter(self._scoped))
            del self._scoped[exchange, binding]
            gone = self._space.exchanges.remove(exchange, binding)
            self._all.records.exchanges_gone(self._space, gone)
        for name, known in list(self._space.queues.items()):
            if known.owner is not self._connection:
                continue
            if not known.declared.outlives_owner:
                self._nodes.delete_when_free(name)
                continue
            known.owner = self._nodes.get(name).reserved = None
            known.declared = replace(known.declared, exclusive=False)
            self._space.idle(name)

    # --- exchanges and bindings ---

    def declare_exchange(
        self,
        wanted: Exchange,
        *,
        sticky: bool = False,
        name_max: int = NAME_MAX,
        free_name: bool = False,
    ) -> None:
        """Create an exchange, or find an existing one with an equal declaration."""
        check_texts(wanted.name, wanted.arguments, self._host.limits)
        own = exchange_address(wanted.name)
        self._authorize(Rights.MANAGE, own)
        if sticky:
            if wanted.name in self._space.exchanges:
                self._find_exchange_again(wanted)
                return
            if wanted.alternate is not None:
                # A missing one is reported now, and not at the first message that it would get.
                self._space.exchanges.find(wanted.alternate)
        if wanted.alternate is not None and wanted.name not in self._space.exchanges:
            alternate = exchange_address(wanted.alternate)
            self._authorize_passages([Passage(own, alternate, Rights.MANAGE)])
        if wanted.durable:
            self._check_store(f"exchange {wanted.name!r:.100}")
        if self._space.exchanges.declare(wanted, name_max=name_max, free_name=free_name):
            self._all.records.keep_exchange(self._space, wanted)

    def _find_exchange_again(self, wanted: Exchange) -> None:
        """Accept the existing exchange of that name as it is.

        Raises:
            AmqpError: It has another type or alternate exchange (``amqp:not-allowed``).
        """
        before = self._space.exchanges.find(wanted.name)
        differing = "type" if wanted.type not in ("", before.type) else ""
        if wanted.alternate not in (None, before.alternate):
            differing = "alternate"
        if differing:
            raise AmqpError(
                f"exchange {wanted.name!r:.100} has {differing} {getattr(before, differing)!r:.100}, not"
                f" {getattr(wanted, differing)!r:.100}: delete it first, or declare it equally",
                condition="amqp:not-allowed",
            )

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
        self._authorize_lookup(exchange_address(name))
        return self._space.exchanges.find(name)

    def delete_exchange(
        self, name: str, *, if_unused: bool = False, unless_alternate: bool = False
    ) -> None:
        """Delete an exchange with its bindings; with *unless_alternate* only if it is no alternate."""
        self._authorize(Rights.MANAGE, exchange_address(name))
        if unless_alternate and self._space.is_alternate(name):
            raise AmqpError(
                f"exchange {name!r:.100} is the alternate of a queue or an exchange: delete that first",
                condition="amqp:not-allowed",
            )
        gone = self._space.exchanges.delete(name, if_unused=if_unused)
        self._all.records.exchanges_gone(self._space, gone)

    def bind_queue(
        self,
        name: str,
        exchange: str,
        key: str,
        arguments: Mapping[str, object],
        *,
        once: bool = False,
        scoped: bool = False,
    ) -> None:
        """Bind queue *name* to *exchange*, as documented in fronts.base.Topology."""
        self._authorize_binding(exchange, name)
        where = Destination(self._find(name))
        most = self._host.limits.scoped_bindings_max
        if scoped and len(self._scoped) >= most:
            raise AmqpError(
                f"there are {most} bindings that end with their session, and no more are allowed",
                condition="amqp:resource-limit-exceeded",
            )
        if not (once and self._space.exchanges.leading_to(exchange, where, key)):
            self._bind(exchange, where, key, arguments, scoped=scoped)

    def bind_alone(
        self,
        name: str,
        exchange: str,
        key: str,
        arguments: Mapping[str, object],
        *,
        scoped: bool = False,
    ) -> Generator[int, None, None]:
        """Bind queue *name* once, and remove the bindings of others, as documented in fronts.base.Topology."""
        self._authorize_binding(exchange, name)
        own = Destination(self._find(name))
        exchanges = self._space.exchanges
        # One copy of them all is quick, even if they are 100,000.
        found = exchanges.with_key(exchange, key)
        for count, each in enumerate(found, 1):
            if not each.destination.is_exchange and each.destination != own:
                self._authorize_removal(exchange, each)
            if not count % _BINDINGS_OF_A_STEP:
                yield _BINDINGS_OF_A_STEP
        self.bind_queue(name, exchange, key, arguments, once=True, scoped=scoped)
        for count, each in enumerate(found, 1):
            if exchange not in exchanges:
                return
            if not each.destination.is_exchange and each.destination != own:
                # Between two steps a queue may have been replaced by one that is exclusive to another peer.
                with suppress(AmqpError):
                    self._authorize_removal(exchange, each)
                    gone = exchanges.remove(exchange, each)
                    self._all.records.exchanges_gone(self._space, gone)
            if not count % _BINDINGS_OF_A_STEP:
                yield _BINDINGS_OF_A_STEP

    def _authorize_removal(self, exchange: str, binding: Binding) -> None:
        """Check that the peer may remove a *binding* of a queue to *exchange*.

        Raises:
            AmqpError: It may not, or the queue is exclusive to another one.
        """
        self._authorize_binding(exchange, binding.destination.name)
        self._known(binding.destination.name)

    def unbind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> bool:
        """Remove the binding of queue *name* to *exchange*; return whether it existed."""
        self._authorize_binding(exchange, name)
        where = Destination(self._find(name))
        exchanges = self._space.exchanges
        binding = exchanges.find_binding(exchange, where, key, arguments)
        if binding is not None:
            self._all.records.exchanges_gone(self._space, exchanges.remove(exchange, binding))
        return binding is not None

    def unbind_key(self, name: str, exchange: str, key: str) -> Generator[int, None, bool]:
        """Remove all bindings of queue *name* with *key*, as documented in fronts.base.Topology."""
        self._authorize_binding(exchange, name)
        where = Destination(self._find(name))
        exchanges = self._space.exchanges
        exchanges.find(exchange)
        # One copy of them all is quick, even if they are 100,000.
        found = exchanges.leading_to(exchange, where, key)
        for count, each in enumerate(found, 1):
            # Between two steps the queue may have been replaced by one that is exclusive to another peer.
            with suppress(AmqpError):
                self._authorize_removal(exchange, each)
                gone = exchanges.remove(exchange, each)
                self._all.records.exchanges_gone(self._space, gone)
            if exchange not in exchanges:
                break
            if not count % _BINDINGS_OF_A_STEP:
                yield _BINDINGS_OF_A_STEP
                if exchange not in exchanges:
                    break
        return bool(found)

    def bound(
        self,
        exchange: str,
        queue: str | None = None,
        key: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> BindingMatch:
        """Return what there is of such a binding of *exchange*; what is None matches any."""
        self._authorize_lookup(exchange_address(exchange))
        exchanges = self._space.exchanges
        has_queue = True
        where: Destination | None = None
        if queue is not None:
            self._authorize_lookup(queue)
            name = self._nodes.name_of(queue)
            has_queue = name is not None
            if name is not None:
                self._known(name)
                where = Destination(name)
        return BindingMatch(
            exchange=exchange in exchanges,
            queue=has_queue,
            queue_matched=has_queue and exchanges.is_bound(exchange, where),
            key_matched=has_queue and exchanges.is_bound(exchange, where, key),
            arguments_matched=has_queue and exchanges.is_bound(exchange, where, key, arguments),
        )

    def arguments_of(
        self, exchange: str, name: str, key: str, *, is_exchange: bool = False
    ) -> list[dict[str, object]]:
        """Return the arguments of bindings, as documented in fronts.base.Topology."""
        self._authorize_lookup(exchange_address(exchange))
        self._authorize_lookup(exchange_address(name) if is_exchange else name)
        exchanges = self._space.exchanges
        for wanted in (exchange, name) if is_exchange else (exchange,):
            exchanges.find(wanted)
        where = (
            Destination(name, is_exchange=True) if is_exchange else Destination(self._find(name))
        )
        found = exchanges.leading_to(exchange, where, key)
        most = self._host.limits.bindings_listed_max
        if len(found) > most:
            raise AmqpError(
                f"{len(found)} bindings of exchange {exchange!r:.100} to {name!r:.100} have that key, and at"
                f" most {most} are listed (bindings_listed_max)",
                condition="amqp:resource-limit-exceeded",
            )
        return [thawed_arguments(each.arguments) for each in found]

    def bind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Bind exchange *name* to *exchange*."""
        self._authorize_binding(exchange, exchange_address(name))
        self._bind(exchange, Destination(name, is_exchange=True), key, arguments)

    def unbind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Remove the binding of exchange *name* to *exchange*, if it exists."""
        self._authorize_binding(exchange, exchange_address(name))
        self._unbind(exchange, Destination(name, is_exchange=True), key, arguments)

    def _bind(
        self,
        exchange: str,
        where: Destination,
        key: str,
        arguments: Mapping[str, object],
        *,
        scoped: bool = False,
    ) -> None:
        check_texts(key, arguments, self._host.limits)
        binding = self._space.exchanges.bind(exchange, where, key, arguments)
        if binding is None:
            return
        if scoped:
            self._scoped[exchange, binding] = None
            self._space.scoped[exchange, binding] = self._scoped
        else:
            self._all.records.keep_binding(self._space, exchange, binding, arguments)
        self._space.last_messages.send(exchange, binding)

    def _unbind(
        self, exchange: str, where: Destination, key: str, arguments: Mapping[str, object]
    ) -> None:
        gone = self._space.exchanges.unbind(exchange, where, key, arguments)
        self._all.records.exchanges_gone(self._space, gone)

    def _authorize_binding(self, exchange: str, where: str) -> None:
        """Check the rights for a binding: to listen at *exchange*, and to manage *where*.

        A binding reads the messages of *exchange* and determines the input of *where*.
        """
        self._authorize_passages(
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
        *,
        alternate: bool = True,
        chained: bool = True,
    ) -> Generator[int, None, None]:
        """Add to *found* the queues to which a named exchange routes a message with *keys*."""
        self._authorize(Rights.SEND, exchange_address(exchange))
        declared = self._space.exchanges.find(exchange)
        if declared.internal:
            raise AmqpError(
                f"exchange {exchange!r} is internal: only other exchanges send to it",
                condition="amqp:unauthorized-access",
            )
        if declared.type == SYSTEM:
            for key in keys:
                self._authorize(Rights.SEND, key)
        yield from self._space.exchanges.routing(
            exchange, keys, headers, found, alternate=alternate, chained=chained
        )

    def count_message(self, exchange: str, argument: str) -> int:
        """Return the number of one more message of *exchange*, as documented in fronts.base.Topology."""
        return self._space.exchanges.count_message(exchange, argument)

    def remembers(self, exchange: str) -> bool:
        """Return whether *exchange* remembers its last message, as documented in fronts.base.Topology."""
        return self._space.last_messages.wanted(exchange)

    def remember(
        self, exchange: str, keys: Sequence[str], headers: Mapping[str, object], payload: bytes
    ) -> None:
        """Remember a message of *exchange*, as documented in fronts.base.Topology."""
        message = LastMessage(payload, 0, keys, headers, self._peer.container_id)
        self._space.last_messages.remember(exchange, message)

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
        if self._all.routing and self._nodes.name_of(queue) is None and self._all.routed(queue):
            # Before the broker creates a queue there on its first use.
            return None
        return self._host.relay(queue, link)

    def _authorize_lookup(self, address: str) -> None:
        """Refuse a peer without any right at *address*, so that it does not learn if that exists."""
        for wanted in (Rights.LISTEN, Rights.SEND, Rights.MANAGE):
            if self._all.decide(self._peer, wanted, address) is None:
                return
        raise AmqpError(
            f"{address!r} is not for you: it takes the right to listen, to send or to manage",
            condition="amqp:unauthorized-access",
        )

    def _authorize(self, wanted: Rights, address: str) -> None:
        refused = self._all.decide(self._peer, wanted, address)
        if refused is not None:
            raise refused.raised_as(AmqpError)

    def _authorize_passages(self, passages: list[Passage], *, waiting: bool = False) -> None:
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
