"""Links on which clients send: single messages, and batches that are taken as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from amqp_rt.broker.building import FULL, Entry, Inlet, Intake, Producer, Transactions
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

from .arrivals import StoredFactory
from .backlog import WORK_OF_A_CALL
from .conditions import TOO_LARGE
from .entity import Entity
from .messages import BATCH_FORMAT, split_batch
from .reservations import Reservation
from .steps import WORK_OF_FINDING, WORK_OF_READING, Steps, counted
from .stored import Stored

if TYPE_CHECKING:
    from .host import HostServices

#: Work of a message in the unit of ``work_max``: about twenty microseconds.
_WORK_OF_A_MESSAGE: Final = 7

_GONE = rejected("amqp:not-found", "the entity has been deleted")
_UNKNOWN_TRANSACTION = Error(
    "amqp:transaction:unknown-id", "the message is posted in a transaction that is not open"
)
#: Outcome of a post whose transaction ended with its control link before the post could be taken.
_ROLLED_BACK = Rejected(_UNKNOWN_TRANSACTION)
_TOO_MUCH = rejected(
    "amqp:resource-limit-exceeded", "the transaction has as many messages as it may have"
)


def _pass(item: object) -> None:
    """Do nothing."""


def _is_posted(delivery: IncomingDelivery) -> bool:
    """Return whether *delivery* is posted in a transaction."""
    return isinstance(delivery.state, TransactionalState)


class _Posts:
    """Place of what is posted in transactions: put at the discharge, behind posts that are being put.

    Args:
        entity: The entity.
        batch: Messages of a batch, which are put together; None for single messages.
    """

    def __init__(self, entity: Entity, batch: Sequence[Stored] | None = None) -> None:
        self._entity = entity
        self._batch = batch

    @property
    def deleted(self) -> bool:
        """Whether the entity has been deleted."""
        return self._entity.deleted

    def put(self, entry: Entry) -> None:
        """Put *entry*, or the messages of the batch: what this turn has no time for, in later ones."""
        entity = self._entity
        if self._batch is None and not entity.backlog.pending:
            entity.put(entry)
            return
        put = entity.put if self._batch is None else entity.receive
        room = Reservation(entity)
        room.hold(len(entry.payload))

        def put_next(each: Entry) -> None:
            room.release(len(each.payload))
            put(each)  # type: ignore[arg-type]

        def end() -> None:
            room.end()
            entity.notify_waiting()

        entity.backlog.add([entry] if self._batch is None else self._batch, put_next, end)
        entity.distribution.run_backlog()

    def fits(self, size: int) -> bool:
        """Return whether there is room for *size* bytes."""
        return self._entity.fits(size)

    def why_full(self, name: str, size: int) -> str:
        """Return why the entity has no room for *size* bytes."""
        return self._entity.why_full(name, size)

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for *entry* until its transaction ends."""
        self._entity.reserve_room(entry)

    def release_room(self, entry: Entry) -> None:
        """Release the room of *entry*."""
        self._entity.release_room(entry)

    def notify_waiting(self) -> None:
        """Notify those that wait for room."""
        self._entity.notify_waiting()


class _PostInlet(Inlet):
    """Inlet for single messages that are posted in transactions; they have the credit of their link."""

    def admits(self, size: int) -> bool:
        """Return whether *size* bytes fit."""
        return self.node.fits(size)


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
        self._transactions: Transactions = services.transactions
        self._posts = _PostInlet(
            intake,
            _Posts(entity),
            self.factory,
            services.clock.wall,
            volatile=True,
            check=self._check,
            transactions=services.transactions,
        )
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

    # --- Order ---

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Take messages and batches in the order in which they came."""
        #: Single messages that follow each other, all posted in transactions or all not.
        single: list[IncomingDelivery] = []
        for delivery in deliveries:
            is_batch = delivery.message_format == BATCH_FORMAT
            if single and (is_batch or _is_posted(single[0]) is not _is_posted(delivery)):
                self._deliver_single(link, single)
                single = []
                if not link.attached:
                    return
            if is_batch:
                self.intake.used(self)
                self._take_batch(link, delivery)
            else:
                single.append(delivery)
        if single:
            self._deliver_single(link, single)

    def _deliver_single(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Take messages, behind the batches that are being taken."""
        if not self._batches:
            self._deliver_now(link, deliveries)
            return
        self.intake.used(self)
        held = {each: None for each in deliveries if self._hold_discharge(link, each)}

        def deliver(waited: list[IncomingDelivery]) -> None:
            lost = {each: None for each in held if self.transaction_of(link, each) is None}
            for each in lost:
                each.settle(_ROLLED_BACK)
            left = [each for each in waited if each not in lost] if lost else waited
            if left:
                self._deliver_now(link, left)
            self._release_discharges(held)

        def drop() -> None:
            for each in held:
                self._refuse(link, each, _GONE)
            self._release_discharges(held)

        self.entity.backlog.add([deliveries], deliver, dropped=drop)

    def _deliver_now(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        if _is_posted(deliveries[0]):
            self.intake.used(self)
            self._posts.deliver(link, deliveries)
            self.intake.top_up(self)
        else:
            super().deliver(link, deliveries)

    def _hold_discharge(self, link: ReceivingLink, delivery: IncomingDelivery) -> bool:
        """Delay the discharge of the transaction in which *delivery* is posted; return False if there is none."""
        return _is_posted(delivery) and self._transactions.hold_post(link, delivery)

    def _release_discharges(self, deliveries: Iterable[IncomingDelivery]) -> None:
        for each in deliveries:
            self._transactions.release_post(each)

    def _refuse(self, link: ReceivingLink, delivery: IncomingDelivery, refused: Rejected) -> None:
        """Refuse *delivery*, within its transaction if it is posted in one."""
        if not _is_posted(delivery):
            delivery.settle(refused)
            return
        transaction = self.transaction_of(link, delivery)
        if transaction is not None:
            transaction.refuse(delivery, refused)

    # --- Batches ---

    def _take_batch(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Take all messages of a batch or none, in several turns if there are many."""
        entity = self.entity
        posted = delivery.state is not None
        if posted and (not _is_posted(delivery) or self.transaction_of(link, delivery) is None):
            link.detach(_UNKNOWN_TRANSACTION)
            return
        size = len(delivery.payload)
        refused = _GONE if entity.deleted else self._too_large(size)
        room = Reservation(entity)
        if refused is not None or not room.take(size):
            self._refuse(link, delivery, refused or FULL)
            self.intake.top_up(self)
            return
        self._batches += 1
        held = [delivery] if self._hold_discharge(link, delivery) else []

        def taken() -> None:
            room.end()
            entity.notify_waiting()
            self._batches -= 1
            self._release_discharges(held)
            # The link gets credit when the batch is done, so that few of them wait in memory.
            self.intake.top_up(self)

        def drop() -> None:
            self._refuse(link, delivery, _GONE)
            taken()

        steps = (self._post if posted else self._put)(link, delivery, room)
        entity.backlog.add(counted(steps, entity.memory), _pass, taken, dropped=drop, work=0)
        entity.distribution.run_backlog()

    def _put(
        self, link: ReceivingLink, delivery: IncomingDelivery, room: Reservation
    ) -> Steps[None]:
        """Read the messages of a batch, then put them."""
        entity = self.entity
        messages = yield from self._read(link, delivery)
        if isinstance(messages, Rejected):
            delivery.settle(messages)
            return
        for message in messages:
            room.release(message.size)
            entity.receive(message)
            yield WORK_OF_A_CALL
        delivery.settle(ACCEPTED)

    def _post(
        self, link: ReceivingLink, delivery: IncomingDelivery, room: Reservation
    ) -> Steps[None]:
        """Read the messages of a batch, then post it in its transaction."""
        messages = yield from self._read(link, delivery)
        transaction = self.transaction_of(link, delivery)
        if transaction is None:
            delivery.settle(_ROLLED_BACK)
            return
        if transaction.error is not None:
            transaction.refuse(delivery, Rejected(transaction.error))
        elif isinstance(messages, Rejected):
            transaction.refuse(delivery, messages)
        elif not transaction.has_room_for(len(messages)):
            transaction.refuse(delivery, _TOO_MUCH)
        else:
            room.end()
            inlet = Inlet(self.intake, _Posts(self.entity, messages), self.factory, self.wall)
            # Duplicates are found as the messages are put: the batch has no id.
            entry = Entry(delivery.payload, BATCH_FORMAT)
            transaction.post(inlet, entry, delivery, messages=len(messages))

    def _read(
        self, link: ReceivingLink, delivery: IncomingDelivery
    ) -> Steps[Sequence[Stored] | Rejected]:
        """Read and check the messages of a batch; return why it is refused, if it is."""
        entity = self.entity
        messages: list[Stored] = []
        options = entity.options
        try:
            now = self.wall()
            for payload in split_batch(delivery.payload, limits=self.factory.limits):
                message = self.factory.make_entry(payload, MESSAGE_FORMAT, now)
                message.publisher = link.peer.container_id
                refused = entity.check(message, link.peer)
                if refused is not None:
                    return refused
                messages.append(message)
                yield WORK_OF_READING
        except DecodeError as error:
            return Rejected(Error.of(error))
        while options is not entity.options:
            # The entity may have been disabled in between, or take smaller messages only.
            options = entity.options
            for message in messages:
                refused = entity.check(message, link.peer)
                if refused is not None:
                    return refused
                yield WORK_OF_FINDING
        return messages
