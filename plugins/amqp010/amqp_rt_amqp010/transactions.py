"""Transactions of a session (0-10 §tx), by a control link as in AMQP 1.0."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from enum import Enum
from typing import Any, Protocol

from amqp_rt.fronts import (
    SENDER,
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
from amqp_rt.fronts.links import FrontDelivery, FrontReceivingLink

from .contexts import WAIT, Context
from .faults import CommandFault
from .frames import Assembly
from .handlers import Answer, Method
from .layouts import Command, ErrorCode, TxCommit, TxRollback, TxSelect


class TransactionMode(Enum):
    """Kind of transactions that a session uses, from the first ``select`` on."""

    NONE = 0
    #: Class tx.
    LOCAL = 1
    #: Class dtx.
    DISTRIBUTED = 2


class EnlistedLink(Protocol):
    """Link of messages that are accepted in a transaction."""

    attached: bool
    endpoint: Any

    def forget(self, delivery: Any) -> None:
        """Remove *delivery*, to which no later command can refer."""


class EnlistedDelivery(Protocol):
    """Message that is accepted in a transaction."""

    #: Whether its outcome depends on a transaction that has not ended.
    enlisted: bool
    #: Outcome after a rollback; None if the client holds it as before.
    outcome_on_rollback: Outcome | None
    remote_settled: bool
    state: Any

    @property
    def link(self) -> EnlistedLink: ...

    def settle(self, state: Any = None) -> None:
        """Settle it: no later command can refer to it."""


class CurrentTransaction:
    """Transaction that transfers and accepts of a session belong to now, of class tx or dtx.

    Release, reject and acquire do not belong to it: they have their effect at once.
    """

    def __init__(self) -> None:
        self.mode = TransactionMode.NONE
        #: State of deliveries in the transaction; None while there is none.
        self.state: TransactionalState | None = None
        #: Messages accepted in the transaction.
        self._enlisted: list[EnlistedDelivery] = []

    def select(self, mode: TransactionMode) -> None:
        """Use transactions of kind *mode* from now on.

        Raises:
            CommandFault: The session uses transactions already (409, exceptions ``exactly-once`` and
                ``no-dtx``).
        """
        if self.mode is not TransactionMode.NONE:
            raise CommandFault(
                "transactions have been selected on the session before", ErrorCode.ILLEGAL_STATE
            )
        self.mode = mode

    def begin(self, txn_id: bytes) -> None:
        """Let transfers and accepts belong to transaction *txn_id* from now on."""
        self.state = TransactionalState(txn_id)

    def enlist(self, deliveries: Iterable[EnlistedDelivery], outcome: Outcome) -> None:
        """Pass on *outcome* of *deliveries* as part of the transaction, which there has to be."""
        assert self.state is not None
        by_link: dict[EnlistedLink, list[EnlistedDelivery]] = {}
        for delivery in deliveries:
            if not delivery.link.attached:
                delivery.settle()
                continue
            delivery.enlisted = True
            delivery.state = TransactionalState(self.state.txn_id, outcome)
            delivery.outcome_on_rollback = None
            self._enlisted.append(delivery)
            by_link.setdefault(delivery.link, []).append(delivery)
        for link, chosen in by_link.items():
            # The outcomes before may have ended it.
            if link.attached:
                link.endpoint.on_outcomes(link, chosen)

    def leave(self) -> list[EnlistedDelivery]:
        """Let nothing more belong to the transaction; return the messages accepted in it.

        They are passed to :func:`conclude` when the transaction has ended.
        """
        self.state = None
        enlisted, self._enlisted = self._enlisted, []
        return enlisted

    def on_ended(self) -> None:
        """Forget the messages, which refer to the session."""
        self.leave()


def conclude(enlisted: Iterable[EnlistedDelivery], *, committed: bool) -> None:
    """Settle *enlisted* if their transaction is *committed*.

    Otherwise the client holds them as before, except those that it has released or rejected since.
    """
    by_link: dict[EnlistedLink, list[EnlistedDelivery]] = {}
    for delivery in enlisted:
        delivery.enlisted = False
        if committed:
            delivery.settle()
            continue
        delivery.state = delivery.outcome_on_rollback
        if delivery.state is not None:
            delivery.remote_settled = True
            by_link.setdefault(delivery.link, []).append(delivery)
    for link, chosen in by_link.items():
        for delivery in chosen:
            link.forget(delivery)
        # The outcomes before may have ended it.
        if link.attached:
            link.endpoint.on_outcomes(link, chosen)


class Transactions:
    """Carries out ``tx.select``, ``tx.commit`` and ``tx.rollback``.

    Args:
        context: The session.
        current: Its current transaction.
        before_end: Called before a commit or rollback completes: completes transfers that came before it.
    """

    def __init__(
        self, context: Context, current: CurrentTransaction, before_end: Callable[[], None]
    ) -> None:
        self._context = context
        self._current = current
        self._before_end: Callable[[], None] | None = before_end
        #: Link to the coordinator of the broker; None unless transactions were selected.
        self._control: FrontReceivingLink | None = None

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {TxSelect: self.select, TxCommit: self.commit, TxRollback: self.roll_back}

    def select(self, number: int, command: TxSelect, assembly: Assembly) -> Answer:
        """Use transactions on the session from now on; the first begins at once.

        Raises:
            CommandFault: The session uses transactions already (409), or has a subscription with
                accept-mode none (530, exception ``explicit-accepts``).
        """
        for link in self._context.anchor.links:
            if link.role == SENDER and not getattr(link, "accepts", True) and not link.over:
                raise CommandFault(
                    "a session with transactions has no subscription with accept-mode none",
                    ErrorCode.NOT_ALLOWED,
                )
        self._current.select(TransactionMode.LOCAL)
        return self._context.run(number, command, self._select())

    def _select(self) -> Generator[int, None, Answer]:
        anchor = self._context.anchor
        link = FrontReceivingLink(anchor, anchor, anchor.link_name("tx"), Coordinator())
        reply = BrokerReply(self._context)
        link.on_answer = reply
        link.on_end = self._on_end
        self._context.report(anchor.request(link))
        while not reply.has_come:
            yield WAIT
        if isinstance(reply.value, Error):
            anchor.links.pop(link, None)
            raise CommandFault.of(reply.value)
        self._control = link
        yield from self._declare(link)
        return None

    def _on_end(self, error: Error | None) -> None:
        why = error or Error("amqp:internal-error", "the transactions of the session have ended")
        self._context.session.fail(_fault_of(why))

    def _declare(self, control: FrontReceivingLink) -> Generator[int, None, None]:
        outcome = yield from self._request(control, Declare())
        if not isinstance(outcome, Declared):
            raise _fault_of(outcome.error if isinstance(outcome, Rejected) else None)
        self._current.begin(outcome.txn_id)

    def _request(
        self, control: FrontReceivingLink, request: object
    ) -> Generator[int, None, object]:
        reply = BrokerReply(self._context)
        payload = Message(request, body_kind="value").encode()
        control.put([FrontDelivery(control, payload, reply)])
        while not reply.has_come:
            yield WAIT
        return reply.value

    def commit(self, number: int, command: TxCommit, assembly: Assembly) -> Answer:
        """Commit the current transaction and begin the next one; completes when it is durable.

        Raises:
            CommandFault: There are no transactions (409), or it was rolled back (406).
        """
        return self._context.run(number, command, self._discharge(fail=False))

    def roll_back(self, number: int, command: TxRollback, assembly: Assembly) -> Answer:
        """Roll back the current transaction and begin the next one; the client holds messages as before.

        Raises:
            CommandFault: There are no transactions (409).
        """
        return self._context.run(number, command, self._discharge(fail=True))

    def _discharge(self, *, fail: bool) -> Generator[int, None, Answer]:
        control, state = self._control, self._current.state
        if control is None or state is None:
            raise CommandFault(
                "the session has no transactions: select them first", ErrorCode.ILLEGAL_STATE
            )
        while posts_wait(self._context):
            yield WAIT
        enlisted = self._current.leave()
        outcome = yield from self._request(control, Discharge(state.txn_id, fail))
        done = isinstance(outcome, Accepted)
        conclude(enlisted, committed=done and not fail)
        if not done:
            raise _fault_of(outcome.error if isinstance(outcome, Rejected) else None)
        yield from self._declare(control)
        if self._before_end is not None:
            self._before_end()
        return None

    def on_ended(self) -> None:
        """Forget the control link, which refers to the session; the broker rolls back as it ends."""
        self._control = self._before_end = None
        self._current.on_ended()


def posts_wait(context: Context) -> bool:
    """Return whether messages of a transaction still wait for a right, or for room in their queues.

    Then *context* is woken when some do not any more.
    """
    return any(
        isinstance(link, FrontReceivingLink) and link.wait_empty(context.wake)
        for link in context.anchor.links
    )


class BrokerReply:
    """Reply of the broker that steps wait for; called once with it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.has_come = False
        self.value: object = None

    def __call__(self, value: object) -> None:
        self.value = value
        self.has_come = True
        self._context.wake()


def _fault_of(error: Error | None) -> CommandFault:
    """Convert the reason for which a transaction failed to a fault."""
    if error is None:
        return CommandFault("the transaction failed", ErrorCode.INTERNAL_ERROR)
    fault = CommandFault.of(error)
    if str(error.condition).startswith("amqp:transaction:"):
        fault.code = ErrorCode.PRECONDITION_FAILED
    return fault
