"""Durable messages too large for memory, which are written to the store while they arrive.

A message that proves larger than ``Limits.message_size_max`` is handed out before it is complete
(``stream_above`` of its link). The part before its body stays in memory; the body is written to the
store in pieces, under the sequence number that the message got when it began. The last piece and
the head are kept in one commit, which makes it a message: a transfer that was cut off before leaves
none.

The peer's window opens as pieces are kept, so that the memory for a message is bounded by the
backlog of the store.
"""

from __future__ import annotations

import logging
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Final

from ...codec.sections import walk_front
from ...errors import DecodeError
from ...outcomes import ACCEPTED, Error, Rejected, rejected
from ...transactions import TransactionalState
from ..entries import NOWHERE, Entry, UnacceptableMessage
from ..expiry import NEVER
from ..transactions import UNKNOWN_TRANSACTION
from .answers import refuse
from .units import Unit

if TYPE_CHECKING:
    from ...fronts.base import IncomingDelivery, ReceivingLink
    from ..producers import Producer
    from .duplicates import Arrived
    from .ledgers import QueueLedger

_log = logging.getLogger("amqp_rt.broker")

#: Bytes of a piece, and maximum number of bytes waiting for the store.
PIECE: Final = 256 * 1024
_AHEAD: Final = 8 * PIECE

_FULL: Final = rejected("amqp:resource-limit-exceeded", "there is no room for the message")
_GONE: Final = rejected("amqp:not-found", "the node has been deleted")


class Arrival:
    """Arrival of one such message.

    Args:
        producer: Endpoint of its link.
        link: Its link.
        delivery: The incomplete delivery.
    """

    def __init__(self, producer: Producer, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        self._producer = producer
        self._link = link
        self._delivery = delivery
        self._data = bytearray()
        self._entry: Entry | None = None
        self._ledger: QueueLedger | None = None
        #: Bytes being written.
        self._writing = 0
        #: Why the message is rejected; its remaining bytes are dropped.
        self._refusal: Rejected | None = None
        self._over = False

    def resume(self) -> None:
        """Process the bytes that have arrived, unless the store is too far behind."""
        delivery = self._delivery
        transactions = self._producer.transactions
        if (
            transactions is None
            or not delivery.complete
            or type(delivery.state) is not TransactionalState
        ):
            self._take_more()
            return
        if not self._over:
            # A discharge that arrives while the rest is written is to follow the message.
            transactions.hold_post(self._link, delivery)
        self._take_more()
        if self._over:
            transactions.release_post(delivery)

    def _take_more(self) -> None:
        delivery = self._delivery
        if self._over:
            delivery.read_chunks()
            return
        if delivery.aborted:
            self._drop()
            return
        if self._writing >= _AHEAD:
            return
        if len(self._data) < _AHEAD:
            for chunk in delivery.read_chunks():
                if self._refusal is None:
                    self._data += chunk
        if self._entry is None and self._refusal is None:
            self._begin()
        if self._refusal is None and self._entry is not None:
            self._write(self._entry)
        # Accepted only once all bytes are on the disk, since until then it may be rejected.
        if delivery.complete and not self._data and self._writing <= 0 and not self._over:
            self._over = True
            self._end()

    def _begin(self) -> None:
        """Decode the part before the body and check whether the message can be taken.

        Large messages must be durable, not delayed, and not resumed.
        """
        producer = self._producer
        delivery = self._delivery
        ledger = None if producer.ledger is None else producer.ledger.pieces
        try:
            entry = producer.entry_factory.make_entry(
                bytes(self._data), delivery.message_format, producer.wall(), producer.ttl_s
            )
            front = (
                walk_front(entry.payload, producer.entry_factory.limits)[-1] if entry.durable else 0
            )
        except DecodeError as error:
            self._refuse(Rejected(Error.of(error)))
            return
        except UnacceptableMessage as error:
            transaction = producer.transaction_of(self._link, delivery)
            if transaction is not None:
                transaction.fail("a message was not welcome, and its link was detached")
            self._detach(Error.of(error))
            return
        if (
            not entry.durable
            or entry.sequence != NOWHERE
            or type(delivery.state) not in (NoneType, TransactionalState)
            or ledger is None
        ):
            self._detach(
                Error(
                    "amqp:link:message-size-exceeded",
                    f"of messages that are larger than {self._link.stream_above} bytes only those"
                    " are taken that are durable, not delayed, and not resumed",
                )
            )
            return
        if type(delivery.state) is TransactionalState:
            transaction = producer.transaction_of(self._link, delivery)
            if transaction is None:
                self._detach(UNKNOWN_TRANSACTION)
                return
            if transaction.error is not None:
                self._refuse(Rejected(transaction.error))
                return
        body = entry.payload[front:]
        entry.payload = entry.payload[:front]
        entry.publisher = self._link.peer.container_id
        refusal = producer.check(entry, self._link.peer) if producer.check is not None else None
        if refusal is not None:
            self._refuse(refusal)
            return
        self._data = bytearray(body)
        self._entry, self._ledger = entry, ledger
        ledger.expect(entry)

    def _write(self, entry: Entry) -> None:
        """Pass bytes to the store up to its allowed backlog, in whole pieces except the last."""
        assert self._ledger is not None
        complete = self._delivery.complete
        data = self._data
        room = _AHEAD - self._writing
        if not self._producer.node.fits(len(data)):
            self._refuse(self._producer.full(len(data)))
            return
        pieces: list[bytes] = []
        with memoryview(data) as view:
            at = 0
            while at < room and (len(view) - at >= PIECE or (complete and at < len(view))):
                pieces.append(bytes(view[at : at + PIECE]))
                at += PIECE
        del data[: PIECE * len(pieces)]
        if pieces:
            size = sum(map(len, pieces))
            self._writing += size
            self._ledger.write(entry, pieces, partial(self._written, size), self._not_written)

    def _written(self, size: int) -> None:
        self._writing -= size
        self.resume()

    def _not_written(self, error: Error) -> None:
        self._writing = 0
        if self._entry is not None:
            self._refuse(Rejected(error))
            self.resume()

    def _end(self) -> None:
        """Commit the message, all of which has arrived, or post or refuse it."""
        delivery, entry, ledger = self._delivery, self._entry, self._ledger
        if self._refusal is None and self._producer.is_gone:
            self._refuse(_GONE)
        if self._refusal is not None or entry is None or ledger is None:
            _log.warning("a large message was refused: %s", self._refusal)
            self._answer_refused(self._refusal or _FULL)
            return
        if type(delivery.state) is TransactionalState:
            self._post(entry)
            return
        if entry.expires_at != NEVER:
            self._producer.on_expiring()
        arrived: Arrived | None = None
        duplicates = self._producer.intake.duplicates
        identity = None if duplicates is None else duplicates.identify(entry)
        if duplicates is not None and identity is not None:
            first = duplicates.find(identity)
            if first is not None:
                self._take_back()
                first.answer(delivery)
                return
            arrived = duplicates.begin()
            arrived.add(identity, durable=True)

        def kept() -> None:
            delivery.settle(ACCEPTED)

        def refused(error: Error) -> None:
            refuse(delivery, error)

        ledger.complete(entry, kept, refused, partial(self._note, arrived, [delivery]))

    def _answer_refused(self, refusal: Rejected) -> None:
        delivery = self._delivery
        transaction = self._producer.transaction_of(self._link, delivery)
        if transaction is None:
            delivery.settle(refusal)
        else:
            transaction.refuse(delivery, refusal)

    def _post(self, entry: Entry) -> None:
        """Post the message in its transaction, whose discharge makes it visible (Part 4 §4.4.1)."""
        transaction = self._producer.transaction_of(self._link, self._delivery)
        if transaction is None:
            self._take_back()
            self._link.detach(UNKNOWN_TRANSACTION)
        elif transaction.error is not None or not transaction.has_room:
            self._take_back()
            error = transaction.error
            transaction.refuse(
                self._delivery, transaction.too_much() if error is None else Rejected(error)
            )
        else:
            transaction.post(self._producer, entry, self._delivery)

    def _note(
        self, arrived: Arrived | None, deliveries: list[IncomingDelivery], unit: Unit
    ) -> None:
        if arrived is not None:
            arrived.note(unit)
        note = self._producer.note
        if note is not None:
            note(unit, deliveries)

    def _refuse(self, refusal: Rejected) -> None:
        self._refusal = refusal
        self._data.clear()
        self._take_back()

    def _detach(self, error: Error) -> None:
        self._over = True
        self._data.clear()
        self._link.detach(error)

    def _drop(self) -> None:
        """Drop the message, whose sender aborted it."""
        self._over = True
        self._data.clear()
        self._take_back()

    def _take_back(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None and self._ledger is not None:
            self._ledger.cancel(entry)


def take(producer: Producer, link: ReceivingLink, delivery: IncomingDelivery) -> None:
    """Begin to receive a large message."""
    delivery.context = Arrival(producer, link, delivery)
    delivery.context.resume()


def resume_arrivals(deliveries: list[IncomingDelivery]) -> None:
    """Continue with large messages of which more has arrived, or that were aborted."""
    for delivery in deliveries:
        if isinstance(delivery.context, Arrival):
            delivery.context.resume()
