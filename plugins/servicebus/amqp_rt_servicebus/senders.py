"""Links on which clients send: single messages, and batches that are taken as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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

_GONE = rejected("amqp:not-found", "the entity has been deleted")
_UNKNOWN_TRANSACTION = Error(
    "amqp:transaction:unknown-id", "the message is posted in a transaction that is not open"
)
_TOO_MUCH = rejected(
    "amqp:resource-limit-exceeded", "the transaction has as many messages as it may have"
)


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
        """Take messages and batches in the order in which they came."""
        single: list[IncomingDelivery] = []
        for delivery in deliveries:
            if delivery.message_format != BATCH_FORMAT:
                single.append(delivery)
                continue
            if single:
                super().deliver(link, single)
                single = []
                if not link.attached:
                    return
            self.intake.used(self)
            self._deliver_batch(link, delivery)
            self.intake.top_up(self)
        if single:
            super().deliver(link, single)

    def _deliver_batch(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Take all messages of a batch, or none."""
        transaction: Transaction | None = None
        if isinstance(delivery.state, TransactionalState):
            transaction = self.transaction_of(link, delivery)
            if transaction is None:
                link.detach(_UNKNOWN_TRANSACTION)
                return
        messages = self._messages_of(link, delivery, transaction)
        if isinstance(messages, Rejected):
            if transaction is not None:
                transaction.refuse(delivery, messages)
            else:
                delivery.settle(messages)
            return
        for each in messages:
            each.publisher = link.peer.container_id
        if transaction is not None:
            inlet = Inlet(self.intake, _BatchPlace(self.entity, messages), self.factory, self.wall)
            # Duplicates are found as the messages are put: the batch has no id.
            transaction.post(inlet, Entry(delivery.payload, BATCH_FORMAT), delivery)
            return
        for each in messages:
            self.entity.receive(each)
        delivery.settle(ACCEPTED)

    def _messages_of(
        self, link: ReceivingLink, delivery: IncomingDelivery, transaction: Transaction | None
    ) -> list[Stored] | Rejected:
        """Return the messages of a batch that can be taken, or why it is refused."""
        if self.entity.deleted:
            return _GONE
        if transaction is not None and transaction.error is not None:
            return Rejected(transaction.error)
        if transaction is not None and not transaction.has_room:
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
