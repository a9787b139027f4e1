"""Links on which clients send: single messages, and batches that are taken as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from amqp_rt.broker.building import FULL, Entry, Inlet, Intake, Producer, Transaction
from amqp_rt.errors import DecodeError
from amqp_rt.fronts import (
    ACCEPTED,
    Error,
    IncomingDelivery,
    Peer,
    ReceivingLink,
    Rejected,
    TransactionalState,
    rejected,
)
from amqp_rt.message import MESSAGE_FORMAT

from .conditions import TOO_LARGE
from .entity import Entity
from .messages import BATCH_FORMAT, Stored, StoredFactory, split_batch

if TYPE_CHECKING:
    from .host import HostServices

#: Work of a message in the unit of ``work_max``: about twenty microseconds.
_WORK_OF_A_MESSAGE: Final = 7

_GONE = rejected("amqp:not-found", "the entity has been deleted")
_UNKNOWN_TRANSACTION = Error(
    "amqp:transaction:unknown-id", "the message is posted in a transaction that is not open"
)
_TOO_MUCH = rejected(
    "amqp:resource-limit-exceeded", "the transaction has as many messages as it may have"
)


def _pass(item: object) -> None:
    """Do nothing."""


class _BatchPlace:
    """Place of a batch that is posted in a transaction: its messages are put together.

    Args:
        entity: The entity.
        messages: The messages of the batch.
    """

    def __init__(self, entity: Entity, messages: Sequence[Stored]) -> None:
        self._entity = entity
        self._messages = messages

    @property
    def deleted(self) -> bool:
        """Whether the entity has been deleted."""
        return self._entity.deleted

    def put(self, entry: Entry) -> None:
        """Put the messages; *entry* is the batch that they are from."""
        for each in self._messages:
            self._entity.receive(each)

    def fits(self, size: int) -> bool:
        """Return whether there is room for *size* bytes."""
        return self._entity.fits(size)

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for the batch until its transaction ends."""
        self._entity.reserve_room(entry)

    def release_room(self, entry: Entry) -> None:
        """Release the room of the batch."""
        self._entity.release_room(entry)

    def notify_waiting(self) -> None:
        """Notify those that wait for room."""
        self._entity.notify_waiting()


class Sender(Producer):
    """Endpoint of one link that sends to an entity: messages, and batches of them.

    Args:
        intake: Room of the entity.
        entity: The entity.
        services: The broker's.
        size_max: Octets of a message or batch, None for the limit of the broker.
    """

    def __init__(
        self,
        intake: Intake,
        entity: Entity,
        services: HostServices,
        *,
        size_max: int | None = None,
    ) -> None:
        self.factory = StoredFactory("lenient", services.limits)
        super().__init__(
            intake,
            entity,
            self.factory,
            services.clock.wall,
            volatile=True,
            check=self._check,
            transactions=services.transactions,
        )
        self.entity = entity
        self._size_max = size_max
        #: Batches that are being taken. What comes on the link after them waits behind them.
        self._batches = 0

    def on_attached(self, link: ReceivingLink) -> None:
        """Handle the attach of both sides."""
        link.delivery_work = _WORK_OF_A_MESSAGE
        super().on_attached(link)

    def _check(self, entry: Entry, peer: Peer) -> Rejected | None:
        """Return why a message is refused, None if it is not."""
        size = entry.size if isinstance(entry, Stored) else len(entry.payload)
        return self._too_large(size) or self.entity.check(entry, peer)

    def _too_large(self, size: int) -> Rejected | None:
        """Return why a message or batch of *size* octets is refused, None if it is not."""
        if self._size_max is None or size <= self._size_max:
            return None
        return rejected(
            TOO_LARGE,
            f"it has {size} octets, and {self.entity.path!r} takes {self._size_max} at most",
        )

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Take messages and batches in the order in which they came, but for those in transactions."""
        single: list[IncomingDelivery] = []
        for delivery in deliveries:
            if delivery.message_format != BATCH_FORMAT:
                single.append(delivery)
                continue
            if single:
                self._deliver_single(link, single)
                single = []
                if not link.attached:
                    return
            self.intake.used(self)
            if delivery.state is not None:
                self._deliver_batch(link, delivery)
                self.intake.top_up(self)
            else:
                self._take_batch(link, delivery)
        if single:
            self._deliver_single(link, single)

    def _deliver_single(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Take messages, behind the batches that are being taken unless they belong to transactions."""
        if self._batches and all(each.state is None for each in deliveries):
            self.intake.used(self)
            self.entity.backlog.add([deliveries], lambda each: self._deliver_later(link, each))
        else:
            super().deliver(link, deliveries)

    def _deliver_later(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        super().deliver(link, deliveries)

    def _take_batch(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Take all messages of a batch or none, in several turns if there are many."""
        entity = self.entity
        refused = self._too_large(len(delivery.payload))
        if refused is not None or not entity.fits(len(delivery.payload)):
            delivery.settle(refused or FULL)
            self.intake.top_up(self)
            return
        self._batches += 1
        # The link gets credit when the batch is done, so that few of them wait in memory.
        entity.backlog.add(self._steps(link, delivery), _pass, self._batch_taken)
        entity.distribution.run_backlog()

    def _batch_taken(self) -> None:
        self._batches -= 1
        self.intake.top_up(self)

    def _steps(self, link: ReceivingLink, delivery: IncomingDelivery) -> Iterator[None]:
        """Take a batch, and yield between its messages."""
        entity = self.entity
        whole = Entry(delivery.payload, BATCH_FORMAT)
        entity.reserve_room(whole)
        messages: list[Stored] = []
        refused: Rejected | None = None
        try:
            now = self.wall()
            for payload in split_batch(delivery.payload, limits=self.factory.limits):
                message = self.factory.make_entry(payload, MESSAGE_FORMAT, now)
                message.publisher = link.peer.container_id
                messages.append(message)
                yield
        except DecodeError as error:
            refused = Rejected(Error.of(error))
        entity.release_room(whole)
        for message in messages:
            refused = refused or entity.check(message, link.peer)
        if entity.deleted:
            refused = _GONE
        if refused is None and not entity.fits(sum(each.size for each in messages)):
            refused = FULL
        if refused is not None:
            delivery.settle(refused)
            entity.notify_waiting()
            return
        for message in messages:
            entity.reserve_room(message)
        for message in messages:
            yield
            entity.release_room(message)
            entity.receive(message)
        delivery.settle(ACCEPTED)

    def _deliver_batch(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Post all messages of a batch in its transaction, or none."""
        transaction = (
            self.transaction_of(link, delivery)
            if isinstance(delivery.state, TransactionalState)
            else None
        )
        if transaction is None:
            link.detach(_UNKNOWN_TRANSACTION)
            return
        messages = self._messages_of(link, delivery, transaction)
        if isinstance(messages, Rejected):
            transaction.refuse(delivery, messages)
            return
        for each in messages:
            each.publisher = link.peer.container_id
        inlet = Inlet(self.intake, _BatchPlace(self.entity, messages), self.factory, self.wall)
        # Duplicates are found as the messages are put: the batch has no id.
        transaction.post(inlet, Entry(delivery.payload, BATCH_FORMAT), delivery)

    def _messages_of(
        self, link: ReceivingLink, delivery: IncomingDelivery, transaction: Transaction
    ) -> list[Stored] | Rejected:
        """Return the messages of a batch that can be posted in a transaction, or why it is refused."""
        if self.entity.deleted:
            return _GONE
        if transaction.error is not None:
            return Rejected(transaction.error)
        if not transaction.has_room:
            return _TOO_MUCH
        too_large = self._too_large(len(delivery.payload))
        if too_large is not None:
            return too_large
        try:
            payloads = split_batch(delivery.payload, limits=self.factory.limits)
            now = self.wall()
            messages = [self.factory.make_entry(each, MESSAGE_FORMAT, now) for each in payloads]
        except DecodeError as error:
            return Rejected(Error.of(error))
        for each in messages:
            refused = self.entity.check(each, link.peer)
            if refused is not None:
                return refused
        return messages if self.entity.fits(sum(each.size for each in messages)) else FULL
