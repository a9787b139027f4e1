"""Intake of messages at a node: credit of senders, checks and storing (Part 2 §2.6.7, S3 2.3.9).

Credit is a promise to hold the messages. An :class:`Intake` divides the room of one node among all
links that send to it, so that all promises together never exceed the room.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Protocol, TypeAlias

from ..compiling import mypyc_attr
from ..errors import AmqpError, DecodeError, WouldBlock
from ..events import Peer
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..loglimit import log_loss
from ..outcomes import ACCEPTED, Error, Received, Rejected, rejected
from ..termini import Target
from .durable import pieces
from .durable.duplicates import Arrived, Duplicates
from .durable.ledgers import QueueLedger
from .durable.units import CallOwner, Unit
from .entries import Entry, EntryFactory, UnacceptableMessage
from .expiry import NEVER, expiry
from .queue.accounts import Memory
from .transactions import UNKNOWN_TRANSACTION, Transaction, Transactions

_log = logging.getLogger("amqp_rt.broker")

#: Credit of a link if there is room for it.
WINDOW: Final = 1_000

FULL: Final = rejected("amqp:resource-limit-exceeded", "there is no room for the message")
#: A node that cannot store a durable message must not accept it (Part 3 §3.2.1).
NOT_KEPT: Final = rejected(
    "amqp:precondition-failed",
    "the message is durable, and the broker has no store: start it with --store FILE, or with"
    " --volatile to keep durable messages in memory",
)
_GONE: Final = rejected("amqp:not-found", "the node has been deleted")


class Place(Protocol):
    """Destination that messages are put into: a queue, a topic, or the entrance of a log."""

    @property
    def deleted(self) -> bool: ...

    def put(self, entry: Entry) -> None: ...

    def fits(self, size: int) -> bool: ...

    def why_full(self, name: str, size: int) -> str:
        """Return why the node *name* has no room for a message of *size* bytes."""

    def reserve_room(self, entry: Entry) -> None: ...

    def release_room(self, entry: Entry) -> None: ...

    def notify_waiting(self) -> None: ...


class HasRoom(CallOwner, Protocol):
    """Interface that an intake needs of a node."""

    memory: Memory
    #: Whether a sender waits for room: then call ``on_room`` when there is some.
    awaited: bool
    on_room: Callable[[], None]

    def room(self) -> int: ...


class Line(Protocol):
    """Messages that wait for their turn at a node before they are stored."""

    def call_in_line(self, call: Callable[[], None], entries: list[Entry]) -> bool:
        """Call *call* after all messages that wait; return False if there is nothing to wait for.

        Filters of the node have examined *entries* then, for which :meth:`IntakeLedger.receive` or
        :meth:`forget` follows.
        """

    def forget(self, entries: list[Entry]) -> None:
        """Forget *entries*, which have been received or are withdrawn."""

    def receive_in_turn(self, entry: Entry, remove: Callable[[], None]) -> bool:
        """Store *entry*, which takes the place of a message elsewhere, after all messages that wait.

        Return False if that is done. True means that a later turn does it, since filters need more
        time, and calls *remove* then: it adds the removal of that message to the same unit.
        """


class IntakeLedger(Protocol):
    """Writer of durable messages to the store, which puts them into their node afterwards."""

    @property
    def copies(self) -> int:
        """Number of copies of a message that are stored, at least 1."""

    @property
    def line(self) -> Line | None:
        """Messages that wait for their turn; None if the node takes every message at once."""

    @property
    def pieces(self) -> QueueLedger | None:
        """Writer of messages that arrive in pieces; None if the node takes none."""

    def wants(self, entry: Entry) -> bool: ...

    def reserve(self, entry: Entry) -> None: ...

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None: ...

    def receive(self, entries: list[Entry]) -> None: ...


class TargetKeeper(Protocol):
    """Terminus of links that send to a node, which remembers the outcomes of their messages."""

    def attached(self, link: ReceivingLink) -> None:
        """Record that *link* is attached."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call *call* when new messages may arrive."""

    def delivered(self, deliveries: list[IncomingDelivery]) -> None:
        """Remember the outcomes of *deliveries*, of some once they have one."""

    def end_link(self, link: ReceivingLink, closed: bool) -> object:
        """Record that *link* has ended."""


#: Returns the reason for which a message of a peer is rejected, or None.
Check: TypeAlias = Callable[[Entry, Peer], Rejected | None]


def _nothing() -> None:
    """Do nothing."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Inlet:
    """Endpoint that puts messages into a node. Credit is granted elsewhere.

    Args:
        intake: The node's room.
        place: Destination of the messages.
        entry_factory: Makes entries of payloads.
        wall: The wall clock.
        ttl_s: Time to live at the node.
        on_expiring: Called when a message with a time to live was put.
        ledger: Stores durable messages; None if the node stores none.
        transactions: Transactions in which messages may be posted; None if there are none.
        volatile: Whether durable messages are accepted without a store.
        check: Returns the reason to reject a message of a peer, or None.
        successor: Called once the node has been deleted; returns the inlet of the address's new
            node, the error to reject messages with, or None for *not-found*.
    """

    def __init__(
        self,
        intake: Intake,
        place: Place,
        entry_factory: EntryFactory,
        wall: Callable[[], float],
        *,
        ttl_s: float | None = None,
        ledger: IntakeLedger | None = None,
        transactions: Transactions | None = None,
        volatile: bool = False,
        on_expiring: Callable[[], None] = _nothing,
        check: Check | None = None,
        successor: Callable[[], Inlet | Error | None] = _nothing,
    ) -> None:
        self.intake = intake
        self.node = place
        self.entry_factory = entry_factory
        self.wall = wall
        self.ttl_s = ttl_s
        self.ledger = ledger
        self.transactions = transactions
        self.volatile = volatile
        self.on_expiring = on_expiring
        self.check = check
        self.successor = successor
        #: Whether the node has been deleted, although its messages have not left it yet.
        self.closed = False
        #: Address of the node in its virtual host; empty if it has none.
        self.address = ""
        #: Adds to the unit of messages that their deliveries have arrived.
        self.note: Callable[[Unit, list[IncomingDelivery]], None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the node has been deleted, or is out of service."""
        return self.closed or self.node.deleted

    def admits(self, size: int) -> bool:
        """Return whether a message of *size* bytes may enter without a promise of room."""
        return self.intake.room() > 0 and self.node.fits(size)

    def full(self, size: int) -> Rejected:
        """Return the outcome of a message of *size* bytes for which there is no room."""
        return rejected("amqp:resource-limit-exceeded", self.node.why_full(self.address, size))

    def publish(self, payload: bytes, message_format: int = 0) -> None:
        """Put one encoded message of this process. A duplicate is dropped.

        Raises:
            DecodeError: Its header or annotations are malformed.
            UnacceptableMessage: Its annotations break a rule.
            WouldBlock: There is no room.
        """
        entry = self.entry_factory.make_entry(payload, message_format, self.wall(), self.ttl_s)
        # The process itself may send anywhere.
        entry.returnable = True
        self._add(entry)

    def repeat(
        self, payload: bytes, message_format: int, arrived_at: float, publisher: str
    ) -> None:
        """Put one encoded message that *publisher* has sent to an exchange. A duplicate is dropped.

        Args:
            payload: The message.
            message_format: Its format.
            arrived_at: Time of the wall clock at which it was sent; one that has expired since is dropped.
            publisher: Container-id of its sender.

        Raises:
            AmqpError: The node has been deleted or is out of service, does not keep durable messages, or
                has no room, or the message breaks a rule.
        """
        if self.is_gone:
            raise AmqpError("the node has been deleted", condition="amqp:not-found")
        entry = self.entry_factory.make_entry(payload, message_format, arrived_at, self.ttl_s)
        entry.publisher = publisher
        if entry.durable and self.ledger is None and not self.volatile:
            assert NOT_KEPT.error is not None
            raise NOT_KEPT.error.raised_as(AmqpError)
        if entry.expires_at > self.wall():
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        """Put *entry*, unless it is a duplicate.

        Raises:
            WouldBlock: There is no room.
        """
        duplicates = self.intake.duplicates
        identity = None if duplicates is None else duplicates.identify(entry)
        if duplicates is not None and duplicates.find(identity) is not None:
            return
        if not self.admits(len(entry.payload)):
            raise WouldBlock(self.node.why_full(self.address, len(entry.payload)))
        if entry.expires_at != NEVER:
            self.on_expiring()
        staged = self.ledger is not None and self.ledger.wants(entry)
        arrived: Arrived | None = None
        if duplicates is not None and identity is not None:
            arrived = duplicates.begin(kept=not staged)
            arrived.add(identity, durable=entry.durable)
        if self.ledger is not None and staged:
            self.ledger.reserve(entry)
            self.ledger.stage([entry], [], None, self._noting(arrived))
        else:
            self.node.put(entry)

    def _log_drop(
        self, payload: bytes, message_format: int, link: ReceivingLink, error: Error | None
    ) -> None:
        """Log that a message was refused whose sender has settled it and cannot learn so."""
        address = link.target.address if isinstance(link.target, Target) else None
        log_loss(
            _log,
            self.entry_factory.log_limiter,
            self.wall(),
            event="message dropped: refused at",
            address=address,
            payload=payload,
            message_format=message_format,
            why=f"settled by its sender {link.peer.container_id!r:.200}",
            error=error,
            key=("settled", None if error is None else error.condition),
        )

    def take_in_turn(self, entry: Entry, remove: Callable[[], None]) -> bool:
        """Put a message of another node as :meth:`take` does; in a later turn if filters need more time.

        Args:
            entry: The message, which takes the place of another one.
            remove: Called in that later turn, to remove the other message from the store together with
                storing *entry*.

        Returns:
            Whether *remove* will be called.
        """
        ledger = self.ledger
        if ledger is None or ledger.line is None or not ledger.wants(entry):
            self.take(entry)
            return False
        self._limit_ttl(entry)
        return ledger.line.receive_in_turn(entry, remove)

    def _limit_ttl(self, entry: Entry) -> None:
        """Apply the node's time to live to *entry*, which comes from another node."""
        entry.expires_at = min(entry.expires_at, expiry(None, self.ttl_s, self.wall()))
        if entry.expires_at != NEVER:
            self.on_expiring()

    def take(self, entry: Entry) -> None:
        """Put a message of another node of this broker, whether or not there is room."""
        self._limit_ttl(entry)
        if self.ledger is not None and self.ledger.wants(entry):
            # After a failure of the node it stays in the store until the broker is restarted.
            self.ledger.receive([entry])
        elif self.node.deleted:
            _log.warning("a message was dropped: its node is out of service, and does not store it")
        else:
            self.node.put(entry)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Put valid messages and reject the others, settling in order.

        A message that breaks a rule of the link, or is in an unknown transaction, detaches the
        link.
        """
        node = self.node
        if self.closed or node.deleted:
            self._deliver_onward(link, deliveries)
            return
        factory = self.entry_factory
        ledger = self.ledger
        check = self.check
        duplicates = self.intake.duplicates
        now = self.wall()
        publisher = link.peer.container_id
        #: Entries to be stored before they are put, and their deliveries.
        durable: list[Entry] = []
        waiting: list[IncomingDelivery] = []
        #: Ids of those, and of messages that need no storing.
        pending: Arrived | None = None
        safe: Arrived | None = None
        identity: bytes | None = None
        fault: Error | None = None
        for delivery in deliveries:
            payload = delivery.payload
            refusal: Rejected | None = None
            transaction: Transaction | None = None
            if delivery.state is not None and type(delivery.state) is not Received:
                # Before our outcome only a transaction may set a state.
                transaction = self.transaction_of(link, delivery)
                if transaction is None:
                    fault = UNKNOWN_TRANSACTION
                    break
                if transaction.error is not None:
                    transaction.refuse(delivery, Rejected(transaction.error))
                    continue
                if not transaction.has_room:
                    transaction.refuse(delivery, transaction.too_much())
                    continue
            try:
                entry = factory.make_entry(payload, delivery.message_format, now, self.ttl_s)
                if entry.durable and ledger is None and not self.volatile:
                    refusal = NOT_KEPT
                elif check is not None:
                    refusal = check(entry, link.peer)
                if duplicates is not None and refusal is None and transaction is None:
                    # Answer duplicates before checking for room: they take none.
                    identity = duplicates.identify(entry)
                    first = duplicates.find(identity)
                    if first is not None:
                        first.answer(delivery)
                        continue
                if refusal is None and not self.admits(len(payload)):
                    refusal = self.full(len(payload))
            except DecodeError as error:
                refusal = Rejected(Error.of(error))
            except UnacceptableMessage as error:
                fault = Error.of(error)
                if transaction is not None:
                    transaction.fail("a message was not welcome, and its link was detached")
                break
            if refusal is not None and transaction is not None:
                transaction.refuse(delivery, refusal)
                continue
            if refusal is not None:
                if delivery.settled:
                    self._log_drop(payload, delivery.message_format, link, refusal.error)
                delivery.settle(refusal)
                continue
            entry.publisher = publisher
            if entry.expires_at != NEVER:
                self.on_expiring()
            if transaction is not None:
                transaction.post(self, entry, delivery)
            elif ledger is not None and ledger.wants(entry):
                ledger.reserve(entry)
                durable.append(entry)
                waiting.append(delivery)
                if duplicates is not None and identity is not None:
                    pending = pending or duplicates.begin()
                    pending.add(identity, durable=entry.durable)
            else:
                if duplicates is not None and identity is not None:
                    safe = safe or duplicates.begin(kept=True)
                    safe.add(identity, durable=False)
                node.put(entry)
                delivery.settle(ACCEPTED)
        end = None if fault is None else partial(link.detach, fault)
        if ledger is not None and durable:
            # Messages before a fault are settled before the link is detached.
            ledger.stage(durable, waiting, end, self._noting(pending))
        elif end is not None:
            end()

    def _deliver_onward(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Deliver to the node that has taken the place of a deleted one, or reject the messages."""
        # A relay may use the address for longer than the node exists.
        successor = self.successor()
        if isinstance(successor, Inlet):
            successor.deliver(link, deliveries)
            return
        gone = _GONE if successor is None else Rejected(successor)
        for delivery in deliveries:
            under = self.transaction_of(link, delivery)
            if under is None:
                delivery.settle(gone)
            else:
                under.refuse(delivery, gone)

    def _noting(
        self, arrived: Arrived | None
    ) -> Callable[[Unit, list[IncomingDelivery]], None] | None:
        """Return the function that adds the ids of *arrived*, and ``note``, to a unit."""
        if arrived is None:
            return self.note
        note = self.note

        def both(unit: Unit, deliveries: list[IncomingDelivery]) -> None:
            arrived.note(unit)
            if note is not None:
                note(unit, deliveries)

        return both

    def transaction_of(self, link: ReceivingLink, delivery: IncomingDelivery) -> Transaction | None:
        """Return the transaction in which *delivery* is posted, None if there is none."""
        transactions = self.transactions
        return None if transactions is None else transactions.find_for(link, delivery)

    # A relay only calls deliver; these methods are for links whose endpoint is an inlet.

    def on_attached(self, link: ReceivingLink) -> None:
        """Do nothing: credit is granted elsewhere."""

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: messages arrive complete."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: our outcome stands, even if the sender differs (Part 2 §2.6.12)."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Do nothing: credit is granted elsewhere."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Do nothing: no credit has to be taken back."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Producer(Inlet):
    """Endpoint of one link that sends to a node, with its credit."""

    #: Whether deliveries may hold something else than one message, even if none is streamed.
    mixed: ClassVar[bool] = False
    #: Its link, from the attach on.
    link: ReceivingLink

    def __init__(
        self,
        intake: Intake,
        place: Place,
        entry_factory: EntryFactory,
        wall: Callable[[], float],
        *,
        ttl_s: float | None = None,
        ledger: IntakeLedger | None = None,
        transactions: Transactions | None = None,
        volatile: bool = False,
        on_expiring: Callable[[], None] = _nothing,
        check: Check | None = None,
    ) -> None:
        super().__init__(
            intake,
            place,
            entry_factory,
            wall,
            ttl_s=ttl_s,
            ledger=ledger,
            transactions=transactions,
            volatile=volatile,
            on_expiring=on_expiring,
            check=check,
        )
        #: The link's present credit, and its credit after the last grant.
        self.promised = 0
        self.granted = 0
        #: Whether messages may arrive before any credit, and whether the present batch may have
        #: such.
        self.early = entry_factory.limits.early_deliveries_max > 0
        self.unpromised = False
        #: Terminus whose endpoint this is; None if the terminus is not kept.
        self.keeper: TargetKeeper | None = None
        #: Functions called when the link has ended, if the terminus is not kept.
        self.on_end: list[Callable[[], None]] = []

    def admits(self, size: int) -> bool:
        """Return whether *size* bytes fit; messages with credit have their room already."""
        return self.node.fits(size) and not (self.unpromised and self.intake.room() <= 0)

    def on_attached(self, link: ReceivingLink) -> None:
        self.link = link
        if self.keeper is not None:
            self.keeper.attached(link)
            self.keeper.when_ready(self._open)
        else:
            self.intake.opened(self)

    def _open(self) -> None:
        if self.link.attached:
            self.intake.opened(self)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        # Count the credit as used before the messages themselves take room.
        self.unpromised = self.early and len(deliveries) > self.promised
        self.intake.used(self)
        if self.mixed or link.has_streamed:
            self._deliver_mixed(link, deliveries)
        else:
            super().deliver(link, deliveries)
        if self.keeper is not None:
            self.keeper.delivered([delivery for delivery in deliveries if delivery.complete])
        self.intake.top_up(self)

    def _deliver_mixed(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Process *deliveries* of which some may be other than one message that has arrived complete."""
        single: list[IncomingDelivery] = []
        for delivery in deliveries:
            if self._is_single(delivery):
                single.append(delivery)
                continue
            if single:
                super().deliver(link, single)
                single = []
            if not self._deliver_other(link, delivery):
                # The link is detached: later deliveries are ignored.
                return
        if single:
            super().deliver(link, single)

    def _is_single(self, delivery: IncomingDelivery) -> bool:
        """Return whether *delivery* is one message that arrives complete."""
        return not delivery.streamed

    def _deliver_other(self, link: ReceivingLink, delivery: IncomingDelivery) -> bool:
        """Begin with a message too large to arrive complete; return whether the link continues."""
        pieces.take(self, link, delivery)
        return True

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Continue with large messages of which more has arrived, or that were aborted."""
        pieces.resume_arrivals(deliveries)
        if self.keeper is not None:
            self.keeper.delivered([delivery for delivery in deliveries if delivery.complete])
        self.intake.used(self)
        self.intake.top_up(self)

    def on_flow(self, link: ReceivingLink) -> None:
        """Update the credit, which an aborted message used or the sender gave back."""
        self.intake.used(self)
        self.intake.top_up(self)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        self.intake.closed(self)
        if self.keeper is not None:
            self.keeper.end_link(link, closed)
        # The functions refer to this object: without them no cycle keeps the link in memory.
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()
        # Deliveries refer to their link; those waiting for the disk are settled independently.
        link.unsettled = []


@mypyc_attr(allow_interpreted_subclasses=True)
class Intake:
    """Room of *node*, shared among the links that send to it."""

    def __init__(self, node: HasRoom, window: int = WINDOW) -> None:
        self.node = node
        self.window = window
        #: Duplicate-detection window; None if the node has none.
        self.duplicates: Duplicates | None = None
        self.producers: set[Producer] = set()
        #: Total credit of all of them.
        self.promised = 0
        #: Producers waiting for room, in order of arrival. An ordered dict removes any of them at once,
        #: and gives out the first at once, too.
        self._waiting: OrderedDict[Producer, None] = OrderedDict()
        node.on_room = self.on_room

    def opened(self, producer: Producer) -> None:
        """Add the producer of a link that has attached, and grant credit."""
        self.producers.add(producer)
        self._give(producer)

    def closed(self, producer: Producer) -> None:
        """Remove the producer of a link that has ended; its credit is free for others."""
        self.promised -= producer.promised
        producer.promised = 0
        self.producers.discard(producer)
        self._waiting.pop(producer, None)
        self.on_room()

    def used(self, producer: Producer) -> None:
        """Update the link's credit after messages arrived or the sender gave some back."""
        credit = producer.link.credit
        self.promised += credit - producer.promised
        producer.promised = credit

    def top_up(self, producer: Producer) -> None:
        """Grant new credit once half of the last is used, so that one flow serves many messages."""
        if (
            producer.promised * 2 <= producer.granted
            and producer not in self._waiting
            and producer in self.producers
        ):
            self._give(producer)

    def on_room(self) -> None:
        """Grant credit to waiting producers, after messages have left or credit became free."""
        self.node.awaited = False
        for _ in range(len(self._waiting)):
            if self.room() <= 0:
                self._wait()
                break
            producer, _ = self._waiting.popitem(last=False)
            self._give(producer)

    def room(self) -> int:
        """Return the number of messages for which credit may still be granted."""
        return self.node.room() - self.promised

    def _give(self, producer: Producer) -> None:
        room = self.room()
        more = self.window - producer.promised
        sharing = len(self.producers)
        if room < more * sharing:
            # There is too little for all of them. Leave some for a link that attaches later.
            more = min(more, max(room // (sharing + 1), min(room, 1)))
        if more <= 0:
            self._waiting[producer] = None
            self._wait()
            return
        self.promised += more
        producer.promised = producer.granted = producer.promised + more
        producer.link.grant(producer.promised)

    def _wait(self) -> None:
        self.node.awaited = True
        self.node.memory.wait(self, self.on_room)
