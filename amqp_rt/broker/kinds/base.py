"""Base of all kinds of nodes.

A kind of node is a class with a declaration. It makes the object that holds the messages, attaches links
to it, stores and restores it, and answers operators. The rest of the broker calls the methods below and
does not distinguish kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Protocol, Self

from msgspec import Struct

from ...errors import AmqpError
from ...fronts.base import LinkConnection, SendingEndpoint, SendingLink
from ...limits import Limits
from ...outcomes import Error
from ...termini import (
    PAUSES,
    DeleteOnClose,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
)
from ...values import Symbol
from ..dead_letters import DeadLetters
from ..durable import facts
from ..durable.facts import FactKind
from ..durable.journal import Journal
from ..durable.units import Unit
from ..nodes import Declaration
from ..producers import Check, Inlet, Intake, IntakeLedger, Place, Producer
from ..queue.queue import MessageQueue
from ..queue.subscriptions import ConsumerLink
from ..services import Services
from ..statistics import NodeStats
from ..termini import KeptTarget, Key, Terminus
from ..terms import Lifetime, Terms

SEALED: Final = Error("amqp:not-allowed", "only the broker itself writes there")


class Counted(Protocol):
    """Counts since the node was created, or restored when the broker started."""

    @property
    def enqueued(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def requeued(self) -> int: ...
    @property
    def dead_lettered(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def dropped(self) -> int: ...


class EndingEndpoint(Protocol):
    """Endpoint of a link of the node."""

    #: Functions called when the link has ended.
    on_end: list[Callable[[], None]]


class NodeLink(Protocol):
    """Link attached to a node: that of a peer, or one of the broker itself such as a lease's."""

    @property
    def name(self) -> str: ...

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Detach the link."""


class NodeConsumer(EndingEndpoint, SendingEndpoint, Protocol):
    """Endpoint of a link that receives from the node."""

    @property
    def link(self) -> ConsumerLink | None:
        """The link; None, or one that is not ``attached``, while there is none."""


def attached_links(consumers: Iterable[NodeConsumer]) -> list[ConsumerLink]:
    """Return the links of those of *consumers* that are attached."""
    links = [consumer.link for consumer in consumers]
    return [link for link in links if link is not None and link.attached]


class Holder(Protocol):
    """Object that holds the messages of a node, such as a queue."""

    deleted: bool

    @property
    def counts(self) -> Counted: ...
    @property
    def available(self) -> int: ...
    @property
    def acquired(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def consumers(self) -> Collection[Any]:
        """Consumers of the node, as many as links that receive from it."""

    def delete(self) -> None:
        """Drop the messages, and refuse later calls."""


class Space(Protocol):
    """Virtual host, as far as its nodes need it."""

    name: str
    services: Services
    nodes: dict[str, Node]
    dead_letters: DeadLetters

    def record(self, payload: bytes) -> None:
        """Append an event of a message to ``$journal``."""

    def delete_node(self, node: Node) -> int:
        """Delete *node* with its messages, and detach its links; return the number of its messages."""

    def delete_when_free(self, address: str) -> None:
        """Delete the node named *address* now, or once it has no work of prepared transactions."""

    def inlet(self, address: str) -> Inlet | Error | None:
        """Return the inlet of the node at *address*, None if there is none."""


class Node:
    """Node of a virtual host: its declaration, its messages, and the state of its links.

    A subclass makes ``held`` and the intake, and gives them to this constructor.

    Args:
        space: The virtual host.
        declared: The declaration.
        held: Holder of the messages.
        intake: Room of the node, which its senders share.
        place: Destination of arriving messages.
        ledger: Stores durable messages; None if the node stores none.
        number: Number in the store, 0 if the node is not stored.
        owner: Connection for which a dynamic node is created.
        volatile: Whether durable messages are accepted without a store.
        ttl_s: Time to live of messages without one.
        check: Returns the reason to reject a message of a peer, or None.
    """

    #: Name of this kind, and the class of its declarations.
    kind: ClassVar[str]
    declaration: ClassVar[type[Declaration]]
    #: Whether the node uses fields of messages' headers, such as the priority.
    uses_headers: ClassVar[bool] = True
    #: Capabilities that are offered to consumers.
    capabilities: ClassVar[tuple[Symbol, ...]] = (PAUSES,)
    #: Kinds of facts in the store that this kind of node restores. Their keys begin with the node's number.
    fact_kinds: ClassVar[tuple[FactKind[Any], ...]] = ()

    def __init__(
        self,
        space: Space,
        declared: Declaration,
        held: Holder,
        intake: Intake,
        place: Place,
        ledger: IntakeLedger | None = None,
        *,
        number: int = 0,
        owner: LinkConnection | None = None,
        volatile: bool = False,
        ttl_s: float | None = None,
        check: Check | None = None,
    ) -> None:
        services = space.services
        self.space = space
        self.services = services
        self.declared = declared
        self.held: Holder = held
        self.intake = intake
        self.ledger = ledger
        self.number = number
        #: Connection for which a dynamic node was created.
        self.owner = owner
        self.inlet = Inlet(
            intake,
            place,
            services.entry_factory_for(None, declared.name, temporary=owner is not None),
            services.clock.wall,
            ttl_s=ttl_s,
            ledger=ledger,
            transactions=services.transactions,
            volatile=volatile,
            check=check,
            successor=partial(space.inlet, declared.name),
        )
        self.inlet.address = declared.name
        #: Lifetime of a dynamic node, and whether the link for which it was created has ended.
        self.lifetime: Lifetime | None = None
        self.abandoned = False
        #: The only connection that may receive from the node; None for any.
        self.reserved: LinkConnection | None = None
        #: Called with the link of each consumer that has left.
        self.on_consumer_detached: Callable[[SendingLink], None] | None = None
        #: Whether the node was restored, or created for dead letters or on its first use, and has
        #: not been declared since.
        self.found = False
        #: Whether the node was created for dead letters or on its first use, and has not been
        #: declared since, or only by a declaration that does not outlive the process. Stored.
        self.implicit = False
        #: Termini of links that may be resumed, attached or not.
        self.termini: dict[Terminus, None] = {}
        #: Why the node is out of service until the broker is restarted.
        self.failure: AmqpError | None = None

    # --- Creating and changing ---

    @classmethod
    def make(
        cls,
        space: Space,
        declared: Any,
        *,
        number: int,
        owner: LinkConnection | None,
        transient: bool,
        new: bool,
    ) -> Self:
        """Create a node.

        Args:
            space: The virtual host.
            declared: The declaration, of the class :attr:`declaration`.
            number: Number in the store, 0 if the node is not stored.
            owner: Connection for which a dynamic node is created.
            transient: Whether the node is not stored, and accepts durable messages nevertheless.
            new: Whether its facts have to be stored, as it was not in the store before.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, declared: Any, limits: Limits) -> None:
        """Check *declared* against *limits*.

        Raises:
            AmqpError: A limit is exceeded.
        """

    @classmethod
    def numbers(cls, declared: Any) -> int:
        """Return how many numbers in the store a node takes."""
        return 1

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.declared.name

    def can_redeclare(self, declared: Declaration) -> bool:
        """Return whether the node can be redeclared as *declared*, with the messages that it has."""
        return type(declared) is type(self.declared)

    def redeclare(self, declared: Any) -> None:
        """Apply *declared*, which the node can become, to the messages and links that it has."""
        self.declared = declared

    def store_declaration(self) -> None:
        """Store the declaration, if the node is stored."""
        journal = self.services.journal
        if self.number and journal is not None:
            fact = facts.node_fact(self.declared, self.space.name, implicit=self.implicit)
            facts.NODES.put(journal.loose, facts.key_of(self.number), fact)

    def seal(self) -> None:
        """Let only the broker itself append from now on, to record events of messages.

        Raises:
            AmqpError: The node is no log.
        """
        raise AmqpError(
            f"{self.declared.name!r} exists and is no log: what becomes of messages cannot be recorded",
            condition="amqp:precondition-failed",
        )

    def begin_lifetime(self, lifetime: Lifetime) -> None:
        """Delete the node at the end of *lifetime*, as it was created for a link."""
        self.lifetime = lifetime

    # --- Restoring ---

    async def restore(self, journal: Journal) -> None:
        """Restore the messages from the store.

        Raises:
            AmqpError: The store cannot be read.
        """

    async def restore_subscription(self, journal: Journal, terminus: Terminus) -> None:
        """Restore the messages that the subscription of *terminus* has in the store."""

    def restore_fact(self, kind: FactKind[Any], key: bytes, value: Any) -> None:
        """Restore a fact of the node, of one of :attr:`fact_kinds`."""

    def restored(self) -> None:
        """Continue after all facts of the node were restored."""

    # --- State ---

    @property
    def delayed(self) -> int:
        """Number of messages that are not due yet."""
        return 0

    @property
    def waiting(self) -> int:
        """Number of messages that wait in a queue, for the log line after a restart."""
        return 0

    @property
    def is_empty(self) -> bool:
        """Whether the node has no messages."""
        return not (self.held.available or self.held.acquired or self.delayed)

    @property
    def is_sealed(self) -> bool:
        """Whether only the broker itself may append to the node."""
        return False

    @property
    def takes_pieces(self) -> bool:
        """Whether the node stores messages that are too large for the memory, in pieces."""
        return False

    @property
    def epochs_error(self) -> Error | None:
        """Why no epochs are published to the node; None if they are."""
        return None

    def owns(self, owner: object) -> bool:
        """Return whether *owner* is the node or a part of it, whose failure is that of the node."""
        return owner in (self, self.held, self.inlet, self.intake.duplicates)

    def consumers(self) -> list[NodeConsumer]:
        """Return the consumers, those that only browse included."""
        return list(self.held.consumers)

    def links(self) -> list[NodeLink]:
        """Return the attached links."""
        producers = self.intake.producers
        return [*attached_links(self.consumers()), *(each.link for each in producers)]

    def part(self, address: str, number: int) -> Node | None:
        """Return the node at *address*, which is partition *number* of this one; None if it has no partitions.

        Raises:
            AmqpError: There is no such partition.
        """
        return None

    @property
    def leased_queue(self) -> MessageQueue | None:
        """The queue whose messages can be leased; None if the node has none."""
        return None

    # --- Attaching ---

    def refuse_consumer(self, terms: Terms) -> Error | None:
        """Return why a new consumer with *terms* is refused; None if it is not."""
        return None

    def properties(self, terms: Terms) -> dict[object, object]:
        """Return the link properties with which a consumer with *terms* is answered."""
        return {}

    def sends_batches(self, link: SendingLink) -> bool:
        """Return whether *link* gets many records in one message."""
        return False

    def open_intake(self) -> tuple[Place, IntakeLedger | None]:
        """Return the destination of messages of one link, and the ledger that stores them."""
        return self.inlet.node, self.inlet.ledger

    def produce(self) -> Producer:
        """Create the endpoint of a link that sends to the node."""
        inlet = self.inlet
        place, ledger = self.open_intake()
        producer = Producer(
            self.intake,
            place,
            inlet.entry_factory,
            inlet.wall,
            ttl_s=inlet.ttl_s,
            ledger=ledger,
            transactions=inlet.transactions,
            volatile=inlet.volatile,
            on_expiring=inlet.on_expiring,
            check=inlet.check,
        )
        producer.address = inlet.address
        return producer

    def consume(self, terms: Terms, *, batches: bool = False) -> NodeConsumer:
        """Create the endpoint of a link that receives from the node."""
        raise NotImplementedError

    def open_terminus(self, key: Key, terms: Terms, number: int) -> Terminus:
        """Create a terminus for a link of the node, with *number* in the store, 0 for none."""
        terminus = self.make_terminus(key, terms, number)
        terminus.address = self.declared.name
        terminus.held = self.held
        terminus.on_end.append(partial(self._terminus_ended, terminus))
        self.termini[terminus] = None
        self.services.termini.add(terminus)
        return terminus

    def make_terminus(self, key: Key, terms: Terms, number: int) -> Terminus:
        """Create the object for :meth:`open_terminus`."""
        if terms.target is not None and not key[3]:
            return KeptTarget(self.services.termini, key, terms, number)
        return self.make_source(key, terms, number)

    def make_source(self, key: Key, terms: Terms, number: int) -> Terminus:
        """Create the source of a link, or the shared source of several, that receive from the node."""
        raise NotImplementedError

    def _terminus_ended(self, terminus: Terminus) -> None:
        """Remove *terminus*, which has ended, and its records in the store."""
        self.termini.pop(terminus, None)
        journal = self.services.journal
        if terminus.number and journal is not None:
            unit = journal.loose
            facts.TERMINI.remove(unit, facts.key_of(terminus.number))
            for kind, key in terminus.deliveries():
                kind.remove(unit, key)
            self.delete_stored_terminus(unit, terminus)
        if self.lifetime is not None:
            self.end_if_due()

    def delete_stored_terminus(self, unit: Unit, terminus: Terminus) -> None:
        """Remove from the store what this kind of node keeps there for *terminus*."""

    def stored_consumers(self) -> Sequence[NodeConsumer]:
        """Return the consumers whose messages are in the store."""
        return ()

    def detach_consumers(self, error: Error) -> None:
        """Detach the consumers of stored messages with *error*, since the store was given up.

        Outcomes can no longer be stored, and peers must not wait for them.
        """
        consumers = self.stored_consumers()
        if not consumers:
            return
        kept: set[NodeConsumer] = set()
        for terminus in self.termini:
            if terminus.number:
                kept.update(terminus.subscriptions())
        for consumer in consumers:
            if consumer.link is not None and consumer.link.attached:
                # A link whose terminus is in the store can be resumed: it is not closed.
                consumer.link.detach(error, closed=consumer not in kept)

    # --- The end ---

    def watch_link(
        self, endpoint: EndingEndpoint, on_end: Callable[[], None] | None = None
    ) -> None:
        """Call *on_end* when the endpoint's link has ended, and end a dynamic node then if due."""
        if on_end is not None:
            endpoint.on_end.append(on_end)
        if self.lifetime is not None:
            endpoint.on_end.append(self.end_if_due)

    def abandon(self) -> None:
        """Note that the link for which a dynamic node was created has ended."""
        self.abandoned = True
        self.end_if_due()

    def end_if_due(self) -> None:
        """Delete a dynamic node whose lifetime has ended (§3.5.10 to §3.5.13)."""
        if self.space.nodes.get(self.declared.name) is not self:
            return
        lifetime = self.lifetime
        if isinstance(lifetime, DeleteOnClose):
            over = self.abandoned
        elif isinstance(lifetime, DeleteOnNoMessages):
            over = self.abandoned and self.is_empty
        else:
            # Links that are attached or may be resumed.
            over = not (self.links() or self.termini)
            if isinstance(lifetime, DeleteOnNoLinksOrMessages):
                over = over and self.is_empty
        if over:
            self.services.leaving.pop(self, None)
            self.space.delete_when_free(self.declared.name)
        elif self.abandoned:
            self.services.leaving[self] = None

    def release_owner(self) -> None:
        """Stop counting a dynamic node as one of its connection's."""
        if self.owner is not None:
            dynamic = self.services.dynamic
            dynamic[self.owner] -= 1
            if not dynamic[self.owner]:
                del dynamic[self.owner]
            # The node and its queue refer to each other: until a full garbage collection they would
            # keep the connection in memory.
            self.owner = None

    def delete_stored(self, unit: Unit) -> None:
        """Remove the node and its messages from the store."""
        facts.NODES.remove(unit, facts.key_of(self.number))
        unit.clear(self.number)

    def close(self, name: str) -> bool:
        """End what the broker does for the node, which is being deleted.

        Returns:
            Whether the node goes on as *name*, to move its messages elsewhere. It calls ``delete_node``
            once more when it has none any more.
        """
        services = self.services
        # Like the owner: a node and its queue would keep the connection until a full collection.
        self.reserved = None
        services.expiring.pop(self, None)
        services.memory.waiting.pop(self.intake, None)
        duplicates = self.intake.duplicates
        if duplicates is not None:
            duplicates.clear()
            del services.windows[duplicates]
        return False

    def stop(self, failure: AmqpError) -> None:
        """Refuse later calls, as the node is out of service after *failure*."""
        self.held.deleted = True
        self.services.expiring.pop(self, None)
        self.services.leaving.pop(self, None)

    def sweep(self) -> None:
        """Do periodic work, such as to expire messages at the front of a queue."""

    # --- Operators ---

    def stats(self) -> NodeStats:
        """Return the statistics of the node."""
        held = self.held
        counts: Counted = held.counts
        available, acquired, delayed = held.available, held.acquired, self.delayed
        return NodeStats(
            name=self.declared.name,
            kind=self.kind,
            dynamic=self.owner is not None,
            available=available,
            acquired=acquired,
            delayed=delayed,
            messages=available + acquired + delayed,
            bytes=held.bytes,
            consumers=len(held.consumers),
            producers=len(self.intake.producers),
            enqueued=counts.enqueued,
            delivered=counts.delivered,
            accepted=counts.accepted,
            requeued=counts.requeued,
            dead_lettered=counts.dead_lettered,
            expired=counts.expired,
            dropped=counts.dropped,
            failure=None if self.failure is None else self.failure.description,
        )

    def kind_stats(self, *, alone: bool = False) -> Struct | None:
        """Return the statistics that only nodes of this kind have; None if there are none.

        Those of a node that is shown *alone* may be more than fits into lists.
        """
        return None

    async def purge(self) -> int:
        """Drop the messages that wait; return how many there were.

        Raises:
            AmqpError: The node keeps no messages for itself, or the store refuses the change.
        """
        raise AmqpError(
            f"{self.declared.name!r} is a {self.kind}, which has no messages of its own",
            condition="amqp:not-allowed",
        )

    def wait_stored(self, on_stored: Callable[[], None]) -> bool:
        """Call *on_stored* once messages that are being stored for the node have been added to it.

        Return False, without a call, if there are none.
        """
        return False
