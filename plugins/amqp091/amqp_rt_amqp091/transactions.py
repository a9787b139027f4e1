"""Transactions of a channel (0-9-1 §1.9), by a control link as in AMQP 1.0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from amqp_rt.fronts import (
    Accepted,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Error,
    Message,
    Outcome,
    Rejected,
    TransactionalState,
)
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontReceivingLink

from . import faults
from . import methods as m
from .confirms import Confirms
from .consumers import Consumers
from .execution import Execution
from .faults import Fault
from .links import SendingLink
from .outgoing import OutgoingDelivery
from .sessions import Session


class Transactions:
    """The current transaction of a channel, and the settlements that belong to it.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        consumers: Its consumers, which get credit after a commit.
        confirms: Whether it has confirms, and therefore no transactions.
    """

    def __init__(
        self, session: Session, execution: Execution, consumers: Consumers, confirms: Confirms
    ) -> None:
        self.session = session
        self.execution = execution
        self.consumers = consumers
        self.confirms = confirms
        #: Link to the coordinator of the broker; None unless transactions were selected.
        self.control: FrontReceivingLink | None = None
        self.txn_id: bytes = b""
        #: Deliveries whose outcomes were sent in the current transaction.
        self._enlisted: list[OutgoingDelivery] = []

    def select(self, method: m.TxSelect) -> None:
        """Use transactions on the channel from now on; the first begins at once.

        Raises:
            Fault: The channel has confirms.
        """
        session = self.session
        if self.confirms.selected:
            raise Fault(faults.PRECONDITION_FAILED, "a channel with confirms has no transactions")
        if self.control is not None:
            session.write(m.TxSelectOk())
            return
        link = FrontReceivingLink(session, session.engine, session.link_name("tx"), Coordinator())
        link.on_answer = partial(self._attached, method, link)
        link.on_end = partial(self._detached, method)
        self.execution.held_up = True
        session.request(link)

    def _attached(self, method: m.Method, link: FrontReceivingLink, refused: Error | None) -> None:
        if self.session.ended:
            return
        if refused is not None:
            self.session.links.discard(link)
            self.session.fail(Fault.of(refused), method)
            return
        self.control = link
        self._declare(method, m.TxSelectOk())

    def _detached(self, method: m.Method, error: Error | None) -> None:
        why = error or Error("amqp:internal-error", "the transactions of the channel have ended")
        self.session.fail(Fault.of(why), method)

    def _declare(self, method: m.Method, answer: m.Method) -> None:
        """Begin a transaction, and then send *answer*."""
        self._send(Declare(), partial(self._declared, method, answer))

    def _declared(self, method: m.Method, answer: m.Method, outcome: Any) -> None:
        if self.session.ended:
            return
        if isinstance(outcome, Declared):
            self.txn_id = outcome.txn_id
            self.session.write(answer)
            self.execution.resume()
        else:
            self.session.fail(_fault_of(outcome), method)

    def _send(self, request: object, on_outcome: Callable[[Any], None]) -> None:
        """Send *request* to the coordinator; the channel is held up until the outcome."""
        assert self.control is not None
        self.execution.held_up = True
        payload = Message(request, body_kind="value").encode()
        self.control.put([FrontDelivery(self.control, payload, on_outcome)])

    def commit(self, method: m.TxCommit) -> None:
        """Commit the current transaction and begin the next one."""
        self._discharge(method, m.TxCommitOk(), fail=False)

    def roll_back(self, method: m.TxRollback) -> None:
        """Roll back the current transaction and begin the next one."""
        self._discharge(method, m.TxRollbackOk(), fail=True)

    def _discharge(self, method: m.Method, answer: m.Method, *, fail: bool) -> None:
        session, execution = self.session, self.execution
        if self.control is None:
            raise Fault(faults.PRECONDITION_FAILED, "the channel has no transactions: select first")
        again = partial(
            execution.continue_with, partial(self._discharge, method, answer, fail=fail)
        )
        if any(
            isinstance(link, FrontReceivingLink) and link.wait_empty(again)
            for link in session.links
        ):
            # What was published before belongs to the transaction: the right to send it is still
            # being asked for, or its queue has no room yet.
            execution.held_up = True
            return
        enlisted, self._enlisted = self._enlisted, []
        self._send(
            Discharge(self.txn_id, fail),
            partial(self._discharged, method, answer, fail, enlisted),
        )

    def _discharged(
        self,
        method: m.Method,
        answer: m.Method,
        fail: bool,
        enlisted: list[OutgoingDelivery],
        outcome: Any,
    ) -> None:
        if self.session.ended:
            return
        done = isinstance(outcome, Accepted)
        for delivery in enlisted:
            delivery.enlisted = False
            if done and not fail:
                delivery.settled = True
                delivery.link.forget(delivery)
            else:
                # The deliveries are unsettled again, as before the transaction.
                delivery.state = None
        if not done:
            self.session.fail(_fault_of(outcome), method)
            return
        self._declare(method, answer)
        for link in {delivery.link for delivery in enlisted}:
            self.consumers.after_settling(link)
        self.consumers.offer_credit()

    def enlist(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Send *outcome* for *deliveries* as part of the current transaction."""
        by_link: dict[SendingLink, list[OutgoingDelivery]] = {}
        for delivery in deliveries:
            if not delivery.link.attached:
                delivery.link.forget(delivery)
                continue
            delivery.enlisted = True
            delivery.state = TransactionalState(self.txn_id, outcome)
            self._enlisted.append(delivery)
            by_link.setdefault(delivery.link, []).append(delivery)
        for link, chosen in by_link.items():
            if link.attached:
                link.endpoint.on_outcomes(link, chosen)

    def end(self) -> None:
        """Forget the control link and the deliveries, which refer to the session."""
        self.control = None
        self._enlisted.clear()


def _fault_of(outcome: Any) -> Fault:
    """Convert the outcome of a failed transaction to the fault that closes the channel."""
    error = outcome.error if isinstance(outcome, Rejected) else None
    if error is None:
        return Fault(faults.INTERNAL_ERROR, "the transaction failed")
    return Fault(faults.PRECONDITION_FAILED, error.description or str(error.condition))
