"""Coordinator of a broker: transactions are declared and discharged on links to it (Part 4 §4.1)."""

from __future__ import annotations

from functools import partial
from typing import Final

from ..codec.composites import from_described
from ..errors import AmqpError, DecodeError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..message import Message
from ..outcomes import ACCEPTED, Error, Received, Rejected
from ..termini import Coordinator
from ..transactions import Declare, Declared, Discharge
from ..values import Symbol
from .durable.answers import InDoubt
from .transactions import Transaction, Transactions

#: Capabilities of the coordinator: several transactions in a session, each usable from all sessions
#: of the connection; no distributed transactions, and no promotion to one.
CAPABILITIES: Final = tuple(
    Symbol(each)
    for each in (
        "amqp:local-transactions",
        "amqp:multi-txns-per-ssn",
        "amqp:multi-ssns-per-txn",
    )
)

#: Credit of a control link, and bytes of a message there.
_CREDIT: Final = 100
_MESSAGE_MAX: Final = 16 * 1024

_REJECTED: Final = "amqp:rejected:list"


def attach_control(transactions: Transactions, link: ReceivingLink) -> None:
    """Make *link*, whose target is a coordinator, a control link of *transactions* (§4.5.1)."""
    link.accept(
        CoordinatorEndpoint(transactions, link),
        target=Coordinator(capabilities=CAPABILITIES),
        max_message_size=_MESSAGE_MAX,
    )


class CoordinatorEndpoint:
    """Control link: transactions are declared and discharged on it, and end with it (§4.1)."""

    def __init__(self, transactions: Transactions, link: ReceivingLink) -> None:
        self.link = link
        self._transactions = transactions
        self._open: dict[bytes, Transaction] = {}

    def on_attached(self, link: ReceivingLink) -> None:
        link.grant(_CREDIT)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        for delivery in deliveries:
            if not link.attached:
                return
            self._take(delivery)
        if link.credit * 2 <= _CREDIT:
            link.grant(_CREDIT)

    def _take(self, delivery: IncomingDelivery) -> None:
        if delivery.settled:
            # The sender needs the answer, and a settled message gets none (§4.2, §4.3).
            self.abort(Error("amqp:not-allowed", "declare and discharge are not sent settled"))
            return
        if delivery.state is not None and type(delivery.state) is not Received:
            self.abort(Error("amqp:not-allowed", "a control link has no transactional work"))
            return
        try:
            said = from_described(Message.decode(delivery.payload).body, Declare, Discharge)
        except DecodeError as error:
            self._refuse(delivery, Error.of(error))
            return
        except AmqpError as error:
            self._refuse(delivery, Error("amqp:decode-error", error.description))
            return
        if isinstance(said, Declare):
            self._declare(delivery, said)
        elif isinstance(said, Discharge):
            self._discharge(delivery, said)

    def _declare(self, delivery: IncomingDelivery, declare: Declare) -> None:
        if declare.global_id is not None:
            self._refuse(
                delivery, Error("amqp:not-implemented", "there are no distributed transactions")
            )
            return
        declared = self._transactions.declare(self)
        if isinstance(declared, Error):
            self._refuse(delivery, declared)
        else:
            self._open[declared.id] = declared
            delivery.settle(Declared(declared.id))

    def _discharge(self, delivery: IncomingDelivery, discharge: Discharge) -> None:
        txn_id = discharge.txn_id
        transaction = self._open.get(txn_id) if isinstance(txn_id, bytes) else None
        if transaction is None or transaction.is_discharged:
            self._refuse(
                delivery,
                Error("amqp:transaction:unknown-id", "no such transaction was declared here"),
            )
            return
        transaction.discharge(partial(self._end, transaction, delivery, bool(discharge.fail)))

    def _end(self, transaction: Transaction, delivery: IncomingDelivery, fail: bool) -> None:
        """Perform a discharge, after all earlier posts have been taken or refused."""
        del self._open[transaction.id]
        self._transactions.forget(self, transaction)
        if fail:
            transaction.roll_back()
            delivery.settle(ACCEPTED)
        elif transaction.error is not None:
            self._refuse(delivery, transaction.error)
        else:
            transaction.commit(partial(self._discharged, delivery))

    def _discharged(self, delivery: IncomingDelivery, error: Error | None) -> None:
        if error is None:
            delivery.settle(ACCEPTED)
        elif isinstance(error, InDoubt):
            self.abort(Error(error.condition, error.description))
        else:
            self._refuse(delivery, error)

    def _refuse(self, delivery: IncomingDelivery, error: Error) -> None:
        """Reject a request; detach if the link's source does not support *rejected* (§4.2)."""
        source = self.link.source
        if source is not None and source.outcomes and _REJECTED not in source.outcomes:
            self.abort(error)
        else:
            delivery.settle(Rejected(error))

    def abort(self, error: Error) -> None:
        """Roll back all transactions that were declared here, and detach with *error*."""
        self._roll_back()
        self.link.detach(error)

    def _roll_back(self) -> None:
        lost, self._open = self._open, {}
        for transaction in lost.values():
            self._transactions.forget(self, transaction)
            transaction.drop()

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: only complete messages are handled."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: an answer needs no confirmation."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Do nothing: credit is granted with deliveries."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Roll back transactions that were not discharged (§4.1)."""
        self._roll_back()
