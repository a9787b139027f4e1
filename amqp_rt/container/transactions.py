"""Transactions as an application holds them: sends and outcomes that happen together (Part 4).

``async with connection.transaction() as txn:`` declares one, and the end of the block discharges it.
All transactions of a session share one control link to the peer's coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, cast

import trio

from ..errors import AmqpError, LinkDetached, LocalProtocolError, TransactionRolledBack
from ..fronts.base import Link
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
    from .receiving import Delivery

#: Outcomes that a control link can hear.
_OUTCOMES = tuple(Symbol(each) for each in (*STANDARD_OUTCOMES, "amqp:declared:list"))
#: Transactions of a session that may wait for an answer.
_PENDING_MAX = 10_000


class Transaction:
    """What is sent and said in it takes effect together when its block ends, or not at all.

    Made by ``connection.transaction()`` or ``session.transaction()``, used in ``async with``::

        async with connection.transaction() as txn:
            await out.send(invoice, transaction=txn)
            delivery.accept(transaction=txn)

    At the end of the block it is committed, and that is waited for. An exception rolls it back:
    nobody ever sees the messages, and the deliveries are in our hands as before. So does a message
    that is refused, even if the exception was caught, and a lost connection. The peer may give it
    up as well, for example because it takes too long; the end of the block says so.

    Senders and receivers of the whole connection may take part; those of other sessions only if
    the peer can do that.

    Cancelled in the block, or while the end of it waits for messages to leave, it is rolled back.
    Cancelled later, while the end waits for the peer's answer, it has been discharged and will be
    committed unless the peer refuses; no exception says which. Once the answer is here, deliveries
    have their outcome, or are in our hands as before.
    """

    def __init__(self, control: ControlLink) -> None:
        self._control = control
        self._id = b""
        #: Messages without an outcome.
        self._pending: set[Receipt] = set()
        #: Deliveries of which something was said, and what.
        self._retired: dict[Delivery, Outcome] = {}
        #: Why it cannot be committed.
        self._error: AmqpError | None = None
        #: The peer does not know it: not yet, not any more.
        self._over = True
        self._changes = trio.lowlevel.ParkingLot()

    # --- the block -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Declare it. Cancelled, there is none.

        Raises:
            LinkRefused: The peer has no transactions.
            AmqpError: It allows no more of them, or the link or connection went.
        """
        if self._id:
            raise LocalProtocolError("a transaction has one block: ask for another")
        control = self._control
        await control.wait_attached()
        receipt = control.say(Declare())
        try:
            said: object = await receipt.outcome()
        except trio.Cancelled:
            if not receipt.withdraw():
                control.disown(receipt)
            raise
        if not isinstance(said, Declared):
            error = said.error if isinstance(said, Rejected) else None
            raise (error or Error("amqp:not-allowed", "it was not declared")).raised_as(AmqpError)
        self._id = said.txn_id
        self._over = False
        control.declared.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit and wait for that; after an exception roll back without waiting.

        Raises:
            TransactionRolledBack: Nothing of it has happened.
            LinkDetached: The link went before the answer came: whether it was committed is in doubt.
            ConnectionLost: So did the connection.
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
            unsay(retired, self._id)
            raise
        outcome = await receipt.outcome()
        if isinstance(outcome, Rejected):
            refused = outcome.error or Error("amqp:transaction:rollback")
            raise refused.raised_as(TransactionRolledBack)

    def _roll_back(self) -> None:
        """Nothing of it is to happen. Says so, and does not wait."""
        if not self._over:
            unsay(self._end(), self._id)
            self._control.say(Discharge(self._id, True))

    def _end(self) -> dict[Delivery, Outcome]:
        """It is over for us; what was said of deliveries in it."""
        self._over = True
        self._control.declared.discard(self)
        for receipt in list(self._pending):
            receipt.withdraw()
        self._pending.clear()
        retired, self._retired = self._retired, {}
        return retired

    # --- work ----------------------------------------------------------------------------

    def state(self, outcome: Outcome | None = None) -> TransactionalState:
        """What a transfer or a disposition says to be part of it (§4.5.8)."""
        return TransactionalState(self._id, outcome)

    def add(self, receipt: Receipt, link: Link) -> None:
        """A message that is to be sent on *link* takes part.

        Raises:
            TransactionRolledBack: It is of no use any more.
            LocalProtocolError: Its block has ended, or *link* is of another connection.
        """
        self._check(link)
        self._pending.add(receipt)

    def done(self, receipt: Receipt, error: AmqpError | None) -> None:
        """The outcome of a message is known, or why it never will be."""
        if receipt in self._pending:
            self._pending.discard(receipt)
            if error is not None and self._error is None:
                self._error = error
            self._changes.unpark_all()

    def retire(self, delivery: Delivery, outcome: Outcome) -> None:
        """Say *outcome* of *delivery*, provided that the transaction is committed.

        Raises:
            TransactionRolledBack: It is of no use any more.
            LocalProtocolError: Its block has ended, *delivery* is of another connection, or it has
                an outcome or needs none.
            LinkDetached: The link of *delivery* is gone, and nothing can be said of it.
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
        """The control link has gone, and the transaction with it."""
        self._error = TransactionRolledBack(
            f"its control link is gone: {error.description or error.condition}",
            info={"condition": error.condition},
        )
        unsay(self._end(), self._id)
        self._changes.unpark_all()

    def __repr__(self) -> str:
        state = "over" if self._over else f"{len(self._pending)} messages without an outcome"
        return f"<Transaction {self._id.hex()}, {state}>"


def unsay(retired: Iterable[Delivery], txn_id: bytes) -> None:
    """Take back what was said of deliveries in a transaction that was not committed."""
    for delivery in retired:
        delivery.unsay(txn_id)


class ControlLink(Sender):
    """The way to the peer's coordinator, for all transactions of a session (Part 4 §4.1)."""

    def __init__(self, session: Owner, name: str) -> None:
        super().__init__(
            session, None, name=name, settled=False, max_pending=_PENDING_MAX, keep_waiting=False
        )
        self._asked = Coordinator(capabilities=(Symbol("amqp:local-transactions"),))
        self._source = Source(outcomes=_OUTCOMES)
        #: Transactions that were not discharged.
        self.declared: set[Transaction] = set()
        #: Declarations whose tasks were cancelled: what they declare is rolled back.
        self.unwanted: set[Receipt] = set()
        #: Deliveries that get their outcome with the answer to a discharge, even if the task that
        #: waited for the answer was cancelled.
        self._retiring: dict[Receipt, tuple[bytes, dict[Delivery, Outcome]]] = {}

    def say(self, body: Declare | Discharge) -> Receipt:
        """Send *body*; the receipt tells the answer.

        Raises:
            LinkDetached: The link is gone.
            ConnectionLost: So is its connection.
        """
        return self.send_payload_nowait(Message(body).encode())

    def discharge(self, txn_id: bytes, retired: dict[Delivery, Outcome]) -> Receipt:
        """Commit a transaction; *retired* get their outcomes if the peer agrees.

        Raises:
            LinkDetached: The link is gone.
            ConnectionLost: So is its connection.
        """
        receipt = self.say(Discharge(txn_id, False))
        if retired:
            self._retiring[receipt] = txn_id, retired
            if receipt.done:
                self._retire(receipt)
        return receipt

    def disown(self, receipt: Receipt) -> None:
        """Roll back what a declaration declares, or has declared already."""
        if receipt.done:
            self._undeclare(receipt)
        else:
            self.unwanted.add(receipt)

    def _undeclare(self, receipt: Receipt) -> None:
        said = cast("Any", receipt.said)
        if isinstance(said, Declared) and self.attached:
            self.say(Discharge(said.txn_id, True))

    def _retire(self, receipt: Receipt) -> None:
        txn_id, retired = self._retiring.pop(receipt)
        committed = receipt.said is not None and not isinstance(receipt.said, Rejected)
        for delivery, outcome in retired.items():
            if delivery.unsay(txn_id) and committed:
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

    def _let_go(self, error: AmqpError) -> None:
        super()._let_go(error)
        self._lose(error)

    def _lose(self, error: AmqpError) -> None:
        for transaction in list(self.declared):
            transaction.lost(error)
