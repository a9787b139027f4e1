"""The way into a node: credit for those who send to it, and the door (Part 2 §2.6.7, S3 2.3.9).

Credit is a promise to hold what comes. An :class:`Intake` shares the room of one node among all
links that send to it, so that the promises together are never more than the room.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from ..errors import DecodeError, WouldBlock
from ..events import Peer
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..loglimit import log_loss
from ..outcomes import ACCEPTED, Error, Received, Rejected, rejected
from ..termini import Target
from . import pieces
from .duplicates import Arrived, Duplicates
from .entries import Door, Entry, Unwelcome
from .expiry import NEVER, expiry
from .journal import Unit
from .queues import Memory
from .transactions import TOO_MUCH, UNKNOWN_TRANSACTION, Transaction, Transactions

_log = logging.getLogger("amqp_rt.broker")

#: Credit of a link when there is room for it.
WINDOW: Final = 1_000

_FULL: Final = rejected("amqp:resource-limit-exceeded", "there is no room for the message")
#: Who cannot keep a durable message must not take it (Part 3 §3.2.1).
_NOT_KEPT: Final = rejected(
    "amqp:precondition-failed",
    "the message is durable, and the broker has no store: start it with --store FILE, or with"
    " --volatile to keep durable messages in memory",
)
_GONE: Final = rejected("amqp:not-found", "the node has been deleted")


class Place(Protocol):
    """What messages are put into: a queue, a topic, or the entrance of a log."""

    @property
    def deleted(self) -> bool: ...

    def put(self, entry: Entry) -> None: ...

    def fits(self, size: int) -> bool: ...

    def hold(self, entry: Entry) -> None: ...

    def let_go(self, entry: Entry) -> None: ...

    def room_again(self) -> None: ...


class Node(Protocol):
    """What an intake needs of a node."""

    memory: Memory
    #: Somebody waits for room: call ``on_room`` when there is some.
    awaited: bool
    on_room: Callable[[], None]

    def room(self) -> int: ...


class Ledger(Protocol):
    """Keeps durable messages, and puts them into their node once they are kept."""

    def wants(self, entry: Entry) -> bool: ...

    def reserve(self, entry: Entry) -> None: ...

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None: ...

    def receive(self, entry: Entry) -> None: ...


#: Why a message of a peer is refused, None if it is not.
Check: TypeAlias = Callable[[Entry, Peer], Rejected | None]


def _nothing() -> None:
    """Nobody wants to know."""


class Inlet:
    """Takes messages into a node. Who granted the credit is somebody else's business.

    Args:
        intake: The node's room.
        place: Where the messages go.
        door: Makes entries of payloads.
        wall: The wall clock.
        ttl_s: Time to live at the node.
        on_expiring: Called when a message with a time to live was put.
        ledger: Keeps durable messages; None if the node keeps none.
        transactions: Those in which messages may be posted; None if there are none.
        volatile: Durable messages are taken although nothing keeps them.
        check: Says why a message is refused that one of its peers has sent, if it is.
        successor: Gives the inlet of the address once the node has been deleted, if there is one, or
            why there is none.
    """

    def __init__(
        self,
        intake: Intake,
        place: Place,
        door: Door,
        wall: Callable[[], float],
        *,
        ttl_s: float | None = None,
        ledger: Ledger | None = None,
        transactions: Transactions | None = None,
        volatile: bool = False,
        on_expiring: Callable[[], None] = _nothing,
        check: Check | None = None,
        successor: Callable[[], Inlet | Error | None] = _nothing,
    ) -> None:
        self.intake = intake
        self.node = place
        self.door = door
        self.wall = wall
        self.ttl_s = ttl_s
        self.ledger = ledger
        self.transactions = transactions
        self.volatile = volatile
        self.on_expiring = on_expiring
        self.check = check
        self.successor = successor
        #: Keeps together with messages that they have come.
        self.note: Callable[[Unit, list[IncomingDelivery]], None] | None = None

    def admits(self, size: int) -> bool:
        """Whether a message of *size* bytes may come in although nobody promised it room."""
        return self.intake.room() > 0 and self.node.fits(size)

    def publish(self, payload: bytes, message_format: int = 0) -> None:
        """Put one encoded message.

        Raises:
            DecodeError: Its header or annotations are malformed.
            Unwelcome: Its annotations break a rule.
            WouldBlock: There is no room.
        """
        entry = self.door.admit(payload, message_format, self.wall(), self.ttl_s)
        # It is the process itself that sends it.
        entry.returnable = True
        duplicates = self.intake.duplicates
        identity = None if duplicates is None else duplicates.identify(entry)
        if duplicates is not None and duplicates.find(identity) is not None:
            return
        if not self.admits(len(payload)):
            raise WouldBlock("there is no room for the message")
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
        """Warn of a message that was refused and whose sender cannot learn so."""
        address = link.target.address if isinstance(link.target, Target) else None
        log_loss(
            _log,
            self.door.log_limiter,
            self.wall(),
            event="message dropped: refused at",
            address=address,
            payload=payload,
            message_format=message_format,
            why=f"settled by its sender {link.peer.container_id!r:.200}",
            error=error,
            key=("settled", None if error is None else error.condition),
        )

    def take(self, entry: Entry) -> None:
        """Put a message that is in the broker already, and has to go somewhere: room or not."""
        entry.expires_at = min(entry.expires_at, expiry(None, self.ttl_s, self.wall()))
        if entry.expires_at != NEVER:
            self.on_expiring()
        if self.ledger is not None and self.ledger.wants(entry):
            # Of a node that has failed this is in the store, and comes when the broker is started again.
            self.ledger.receive(entry)
        elif self.node.deleted:
            _log.warning("a message was dropped: its node is out of service, and does not store it")
        else:
            self.node.put(entry)

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Put what is well-formed and refuse what is not, answering in order."""
        node = self.node
        if node.deleted:
            # A relay may know the address for longer than the node lives.
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
            return
        admit = self.door.admit
        ledger = self.ledger
        check = self.check
        duplicates = self.intake.duplicates
        now = self.wall()
        publisher = link.peer.container_id
        #: To be kept before they are put, and the deliveries that brought them.
        durable: list[Entry] = []
        waiting: list[IncomingDelivery] = []
        #: The ids of those, and of what needs not be kept.
        pending: Arrived | None = None
        safe: Arrived | None = None
        identity: bytes | None = None
        fault: Error | None = None
        for delivery in deliveries:
            payload = delivery.payload
            refusal: Rejected | None = None
            transaction: Transaction | None = None
            if delivery.state is not None and type(delivery.state) is not Received:
                # Only a transaction has something to say before we do.
                transaction = self.transaction_of(link, delivery)
                if transaction is None:
                    fault = UNKNOWN_TRANSACTION
                    break
                if transaction.error is not None:
                    transaction.refuse(delivery, Rejected(transaction.error))
                    continue
                if not transaction.has_room:
                    transaction.refuse(delivery, TOO_MUCH)
                    continue
            try:
                entry = admit(payload, delivery.message_format, now, self.ttl_s)
                if entry.durable and ledger is None and not self.volatile:
                    refusal = _NOT_KEPT
                elif check is not None:
                    refusal = check(entry, link.peer)
                if duplicates is not None and refusal is None and transaction is None:
                    # Room or not: it needs none if it is here already.
                    identity = duplicates.identify(entry)
                    first = duplicates.find(identity)
                    if first is not None:
                        first.answer(delivery)
                        continue
                if refusal is None and not self.admits(len(payload)):
                    refusal = _FULL
            except DecodeError as error:
                refusal = Rejected(Error.of(error))
            except Unwelcome as error:
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
            # What came before a fault is answered before the link is.
            ledger.stage(durable, waiting, end, self._noting(pending))
        elif end is not None:
            end()

    def _noting(
        self, arrived: Arrived | None
    ) -> Callable[[Unit, list[IncomingDelivery]], None] | None:
        """What is to be kept together with messages, their ids included."""
        if arrived is None:
            return self.note
        note = self.note

        def both(unit: Unit, deliveries: list[IncomingDelivery]) -> None:
            arrived.note(unit)
            if note is not None:
                note(unit, deliveries)

        return both

    def transaction_of(self, link: ReceivingLink, delivery: IncomingDelivery) -> Transaction | None:
        """The transaction that *delivery* says it is posted in, None if there is none."""
        transactions = self.transactions
        return None if transactions is None else transactions.find_for(link, delivery)

    # A relay delivers and nothing else; these are for links of our own.

    def on_attached(self, link: ReceivingLink) -> None:
        """Nothing to grant."""

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Messages come whole."""

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Our outcome stands, whatever the sender says (Part 2 §2.6.12)."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Nothing to grant."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Nothing to take back."""


class Producer(Inlet):
    """One link that sends to a node, and the credit that it has."""

    def __init__(
        self,
        intake: Intake,
        place: Place,
        door: Door,
        wall: Callable[[], float],
        *,
        ttl_s: float | None = None,
        ledger: Ledger | None = None,
        transactions: Transactions | None = None,
        volatile: bool = False,
        on_expiring: Callable[[], None] = _nothing,
        check: Check | None = None,
    ) -> None:
        super().__init__(
            intake,
            place,
            door,
            wall,
            ttl_s=ttl_s,
            ledger=ledger,
            transactions=transactions,
            volatile=volatile,
            on_expiring=on_expiring,
            check=check,
        )
        self.link: Any = None
        #: Credit that the link has, and that it had after the last grant.
        self.promised = 0
        self.granted = 0
        #: There was no room for more.
        self.waiting = False
        #: Messages may come before any credit, and some of those in hand may have.
        self.early = door.limits.early_deliveries_max > 0
        self.unpromised = False
        #: The terminus that it is the endpoint of, an object with ``attached(link)``,
        #: ``when_ready(call)``, ``delivered(deliveries)`` and ``left(link, closed)``; None if
        #: nothing is kept of it.
        self.keeper: Any = None
        #: Called when the link is over, if nothing is kept of it.
        self.on_left: list[Callable[[], None]] = []

    def admits(self, size: int) -> bool:
        """Credit was promised; only bytes can still be too many."""
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

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        # What was promised is used, before the messages that it was promised for take room.
        self.unpromised = self.early and len(deliveries) > self.promised
        self.intake.used(self)
        if link.has_streamed:
            self._deliver_large(link, deliveries)
        else:
            super().deliver(link, deliveries)
        if self.keeper is not None:
            self.keeper.delivered([delivery for delivery in deliveries if delivery.complete])
        self.intake.top_up(self)

    def _deliver_large(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Some of *deliveries*, or some before them, are too large to come whole."""
        whole: list[Any] = []
        for delivery in deliveries:
            if not delivery.streamed:
                whole.append(delivery)
                continue
            if whole:
                super().deliver(link, whole)
                whole = []
            pieces.take(self, link, delivery)
        if whole:
            super().deliver(link, whole)

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """More of a large message has come, or it was given up."""
        pieces.go_on(deliveries)
        if self.keeper is not None:
            self.keeper.delivered([delivery for delivery in deliveries if delivery.complete])
        self.intake.used(self)
        self.intake.top_up(self)

    def on_flow(self, link: ReceivingLink) -> None:
        """Credit was used for an aborted message, or given back."""
        self.intake.used(self)
        self.intake.top_up(self)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        self.intake.closed(self)
        if self.keeper is not None:
            self.keeper.left(link, closed)
        # They refer to this: no cycle is to keep the link.
        called, self.on_left = self.on_left, []
        for on_left in called:
            on_left()
        # Deliveries refer to their link; those that wait for the disk are answered by themselves.
        link.unsettled = []


class Intake:
    """Shares the room of *node* among the links that send to it."""

    def __init__(self, node: Node, window: int = WINDOW) -> None:
        self.node = node
        self.window = window
        #: Knows again what comes twice; None if nothing does.
        self.duplicates: Duplicates | None = None
        self.producers: set[Producer] = set()
        #: Credit of all of them together.
        self.promised = 0
        #: Those for whom there was no room, in the order in which they came, and some that have
        #: stopped waiting since.
        self._waiting: deque[Producer] = deque()
        node.on_room = self.on_room

    def opened(self, producer: Producer) -> None:
        """A link has attached."""
        self.producers.add(producer)
        self._give(producer)

    def closed(self, producer: Producer) -> None:
        """A link is over; what it was promised is free again."""
        self.promised -= producer.promised
        producer.promised = 0
        producer.waiting = False
        self.producers.discard(producer)
        if len(self._waiting) > 2 * len(self.producers) + 16:
            self._waiting = deque(each for each in self._waiting if each.waiting)
        self.on_room()

    def used(self, producer: Producer) -> None:
        """The link's credit has changed: messages have come, or it gave some back."""
        credit = producer.link.credit
        self.promised += credit - producer.promised
        producer.promised = credit

    def top_up(self, producer: Producer) -> None:
        """Give new credit once half of the last is used, so that one flow pays for many."""
        if (
            producer.promised * 2 <= producer.granted
            and not producer.waiting
            and producer in self.producers
        ):
            self._give(producer)

    def on_room(self) -> None:
        """Messages have gone, or promises were given back: serve who waits."""
        self.node.awaited = False
        for _ in range(len(self._waiting)):
            if self.room() <= 0:
                self._wait()
                break
            producer = self._waiting.popleft()
            if producer.waiting:
                producer.waiting = False
                self._give(producer)

    def room(self) -> int:
        """Messages that may still be promised."""
        return self.node.room() - self.promised

    def _give(self, producer: Producer) -> None:
        room = self.room()
        more = self.window - producer.promised
        sharing = len(self.producers)
        if room < more * sharing:
            # Not all could have that much. Something is left for whoever comes next.
            more = min(more, max(room // (sharing + 1), min(room, 1)))
        if more <= 0:
            producer.waiting = True
            self._waiting.append(producer)
            self._wait()
            return
        self.promised += more
        producer.promised = producer.granted = producer.promised + more
        producer.link.grant(producer.promised)

    def _wait(self) -> None:
        self.node.awaited = True
        self.node.memory.wait(self, self.on_room)
