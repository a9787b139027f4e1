"""Transactions of an application: messages and outcomes that take effect together (Part 4).

``async with connection.transaction() as txn:`` declares one, and the end of the block discharges
it. All transactions of a session share one control link to the peer's coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import trio

from ..errors import AmqpError, LinkDetached, LocalProtocolError, TransactionRolledBack
from ..fronts.base import IncomingDelivery, Link
from ..message import Message
from ..outcomes import Error, Outcome, Rejected
from ..termini import STANDARD_OUTCOMES, Coordinator, Source
from ..transactions import Declare, Declared, Discharge, TransactionalState
from ..values import Symbol
from .links import fresh
from .sending import Receipt, Sender

if TYPE_CHECKING:
    from types import TracebackType

    from .links import Owner

#: Outcomes that a control link supports.
_OUTCOMES = tuple(Symbol(each) for each in (*STANDARD_OUTCOMES, "amqp:declared:list"))
#: Declarations and discharges of a session that may wait for an answer.
_PENDING_MAX = 10_000


class Retirable(Protocol):
    """Delivery of a receiver, whose outcome can be set in a transaction."""

    @property
    def link(self) -> Link:
        """Link of the delivery."""

    @property
    def raw(self) -> IncomingDelivery:
        """Delivery of the engine's link."""

    def settle(self, outcome: Outcome) -> None:
        """Set *outcome*, once the transaction is committed."""

    def retract_outcome(self, txn_id: bytes) -> bool:
        """Remove the outcome set in the transaction *txn_id*; return whether there was one."""


class Transaction:
    """Transaction whose messages and outcomes take effect when its block ends, or not at all.

    Created by ``connection.transaction()`` or ``session.transaction()``, used in ``async with``::

        async with connection.transaction() as txn:
            await out.send(invoice, transaction=txn)
            delivery.accept(transaction=txn)

    The end of the block commits it, and waits for the answer. An exception rolls it back: the
    messages are never delivered, and we still hold the deliveries as before. It is also rolled back
    if a message is refused, even if that exception was caught, and if the connection is lost. The
    peer may roll it back too, for example because it takes too long; then the end of the block
    raises.

    Senders and receivers of the whole connection may take part; those of other sessions only if the
    peer supports that.

    If cancelled in the block, or while its end waits for messages to leave, it is rolled back. If
    cancelled later, while the end waits for the peer's answer, it has been discharged and will be
    committed unless the peer refuses; no exception reports which. Once the answer has arrived,
    deliveries have their outcome, or we hold them as before.
    """

    def __init__(self, control: ControlLink) -> None:
        self._control = control
        self._id = b""
        #: Messages without an outcome.
        self._pending: set[Receipt] = set()
        #: Deliveries with an outcome set in the transaction, and the outcomes.
        self._retired: dict[Retirable, Outcome] = {}
        #: Cause why it cannot be committed; None if it can.
        self._error: AmqpError | None = None
        #: Whether the transaction is not declared yet, or has ended.
        self._over = True
        self._changes = trio.lowlevel.ParkingLot()

    # --- the block -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Declare the transaction. If cancelled, there is none.

        Raises:
            LinkRefused: The peer has no transactions.
            AmqpError: The peer allows no more of them, or the link or connection was lost.
        """
        if self._id:
            raise LocalProtocolError("a transaction has one block: ask for another")
        control = self._control
        await control.wait_attached()
        receipt = control.request(Declare())
        try:
            answer: object = await receipt.outcome()
        except trio.Cancelled:
            if not receipt.withdraw():
                control.abandon_declare(receipt)
            raise
        if not isinstance(answer, Declared):
            error = answer.error if isinstance(answer, Rejected) else None
            raise (error or Error("amqp:not-allowed", "it was not declared")).raised_as(AmqpError)
        self._id = answer.txn_id
        self._over = False
        control.declared.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit and wait for the answer; after an exception roll back without waiting.

        Raises:
            TransactionRolledBack: Nothing of the transaction has taken effect.
            LinkDetached: The link ended before the answer arrived: whether it was committed is in
                doubt.
            ConnectionLost: The connection was lost, with the same doubt.
        """
        if error is not None:
            self._roll_back()
            return
        try:
            while self._pending and self._error is None:
                await self._changes.park()
        except BaseException:
            self._roll_back()
            raise
        if self._error is not None:
            cause = self._error
            self._roll_back()
            if isinstance(cause, TransactionRolledBack):
                raise fresh(cause)
            raise TransactionRolledBack(
                f"a message was not accepted: {cause.description or cause.condition}",
                info=cause.info,
            ) from cause
        await self._commit()

    async def _commit(self) -> None:
        retired = self._end()
        try:
            receipt = self._control.discharge(self._id, retired)
        except AmqpError:
            retract_outcome(retired, self._id)
            raise
        outcome = await receipt.outcome()
        if isinstance(outcome, Rejected):
            refused = outcome.error or Error("amqp:transaction:rollback")
            raise refused.raised_as(TransactionRolledBack)

    def _roll_back(self) -> None:
        """Roll back: send the discharge, and do not wait."""
        if not self._over:
            retract_outcome(self._end(), self._id)
            self._control.request(Discharge(self._id, True))

    def _end(self) -> dict[Retirable, Outcome]:
        """End the transaction on our side, and return the outcomes set in it."""
        self._over = True
        self._control.declared.discard(self)
        for receipt in list(self._pending):
            receipt.withdraw()
        self._pending.clear()
        retired, self._retired = self._retired, {}
        return retired

    # --- work ----------------------------------------------------------------------------

    def state(self, outcome: Outcome | None = None) -> TransactionalState:
        """Return the state for a transfer or disposition within the transaction (§4.5.8)."""
        return TransactionalState(self._id, outcome)

    def add(self, receipt: Receipt, link: Link) -> None:
        """Add a message that is to be sent on *link*.

        Raises:
            TransactionRolledBack: The transaction cannot be committed any more.
            LocalProtocolError: Its block has ended, or *link* is of another connection.
        """
        self._check(link)
        self._pending.add(receipt)

    def done(self, receipt: Receipt, error: AmqpError | None) -> None:
        """Remove a message that has its outcome, or whose outcome was lost with *error*."""
        if receipt in self._pending:
            self._pending.discard(receipt)
            if error is not None and self._error is None:
                self._error = error
            self._changes.unpark_all()

    def retire(self, delivery: Retirable, outcome: Outcome) -> None:
        """Set *outcome* of *delivery* for the commit of the transaction.

        Raises:
            TransactionRolledBack: The transaction cannot be committed any more.
            LocalProtocolError: Its block has ended, *delivery* is of another connection, or has an
                outcome or needs none.
            LinkDetached: The link of *delivery* has ended, and no outcome can be set.
        """
        link = delivery.link
        if not link.attached:
            raise LinkDetached("the link on which it was delivered is gone")
        self._check(link)
        delivery.raw.update(self.state(outcome))
        self._retired[delivery] = outcome

    def _check(self, link: Link) -> None:
        if self._error is not None:
            raise fresh(self._error)
        if self._over:
            raise LocalProtocolError("the transaction is not open: work belongs into its block")
        if link.connection is not self._control.link.connection:
            raise LocalProtocolError("the link is of another connection than the transaction")

    def lost(self, error: AmqpError) -> None:
        """End the transaction, because its control link has ended."""
        self._error = TransactionRolledBack(
            f"its control link is gone: {error.description or error.condition}",
            info={"condition": error.condition},
        )
        retract_outcome(self._end(), self._id)
        self._changes.unpark_all()

    def __repr__(self) -> str:
        state = "over" if self._over else f"{len(self._pending)} messages without an outcome"
        return f"<Transaction {self._id.hex()}, {state}>"


def retract_outcome(retired: Iterable[Retirable], txn_id: bytes) -> None:
    """Remove the outcomes set in a transaction that was not committed."""
    for delivery in retired:
        delivery.retract_outcome(txn_id)


class ControlLink(Sender):
    """Link to the peer's coordinator, for all transactions of a session (Part 4 §4.1)."""

    def __init__(self, session: Owner, name: str) -> None:
        super().__init__(
            session, None, name=name, settled=False, max_pending=_PENDING_MAX, keep_waiting=False
        )
        self._asked = Coordinator(capabilities=(Symbol("amqp:local-transactions"),))
        self._source = Source(outcomes=_OUTCOMES)
        #: Transactions that were declared and not discharged.
        self.declared: set[Transaction] = set()
        #: Declarations whose tasks were cancelled: the transactions they declare are rolled back.
        self.unwanted: set[Receipt] = set()
        #: Deliveries that get their outcome with the answer to a discharge, even if the task that
        #: waited for the answer was cancelled.
        self._retiring: dict[Receipt, tuple[bytes, dict[Retirable, Outcome]]] = {}

    def request(self, body: Declare | Discharge) -> Receipt:
        """Send *body*; the receipt gets the answer.

        Raises:
            LinkDetached: The link has ended.
            ConnectionLost: The connection has ended permanently.
        """
        return self.send_payload_nowait(Message(body).encode())

    def discharge(self, txn_id: bytes, retired: dict[Retirable, Outcome]) -> Receipt:
        """Commit a transaction; *retired* get their outcomes if the peer agrees.

        Raises:
            LinkDetached: The link has ended.
            ConnectionLost: The connection has ended permanently.
        """
        receipt = self.request(Discharge(txn_id, False))
        if retired:
            self._retiring[receipt] = txn_id, retired
            if receipt.done:
                self._retire(receipt)
        return receipt

    def abandon_declare(self, receipt: Receipt) -> None:
        """Roll back the transaction of a declaration, which may still be unanswered."""
        if receipt.done:
            self._undeclare(receipt)
        else:
            self.unwanted.add(receipt)

    def _undeclare(self, receipt: Receipt) -> None:
        answer = cast("Any", receipt.known_outcome)
        if isinstance(answer, Declared) and self.attached:
            self.request(Discharge(answer.txn_id, True))

    def _retire(self, receipt: Receipt) -> None:
        txn_id, retired = self._retiring.pop(receipt)
        committed = receipt.known_outcome is not None and not isinstance(
            receipt.known_outcome, Rejected
        )
        for delivery, outcome in retired.items():
            if delivery.retract_outcome(txn_id) and committed:
                delivery.settle(outcome)

    def done(self, receipt: Receipt) -> None:
        super().done(receipt)
        if receipt in self.unwanted:
            self.unwanted.discard(receipt)
            self._undeclare(receipt)
        if receipt in self._retiring:
            self._retire(receipt)

    def _interrupted(self, error: Error | None) -> None:
        super()._interrupted(error)
        why = "the connection was lost" if error is None else error.description or error.condition
        self._lose(LinkDetached(str(why)))

    def _fail_waiting(self, error: AmqpError) -> None:
        super()._fail_waiting(error)
        self._lose(error)

    def _lose(self, error: AmqpError) -> None:
        for transaction in list(self.declared):
            transaction.lost(error)
