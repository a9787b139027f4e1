"""Transactions of a session (0-10 §tx), by a control link as in AMQP 1.0."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from amqp_rt.fronts import (
    ACCEPTED,
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
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontReceivingLink

from .assembling import Assembly
from .contexts import WAIT, Context
from .deliveries import Waiter
from .faults import CommandFault
from .handlers import Answer, Method
from .layouts import Command, ErrorCode, TxCommit, TxRollback, TxSelect

#: Deliveries that are settled, requeued or dropped between two checks of the work done, and the cost of that
#: in frames.
_DELIVERIES_OF_A_STEP: Final = 10
_STEP_WORK: Final = 20


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


class EnlistedDelivery(Protocol):
    """Message that is accepted in a transaction."""

    #: Whether its outcome depends on a transaction that has not ended.
    enlisted: bool
    #: Outcome after a rollback; None if the client holds it as before.
    outcome_on_rollback: Outcome | None
    remote_settled: bool
    state: Any
    #: The command that settles it.
    waiter: Waiter | None

    @property
    def link(self) -> EnlistedLink: ...

    def settle(self, state: Any = None) -> None:
        """Settle it: no later command can refer to it."""


class CurrentTransaction:
    """Transaction that transfers and accepts of a session belong to now, of class tx or dtx.

    Release, reject and acquire do not belong to it: they have their effect at once.

    Args:
        work_max: Maximum number of posts and accepts in one transaction.
    """

    def __init__(self, work_max: int) -> None:
        self.mode = TransactionMode.NONE
        #: State of deliveries in the transaction; None while there is none.
        self.state: TransactionalState | None = None
        #: Deliveries of this session that were posted in the transaction.
        self.posted = 0
        self._work_max = work_max
        #: State of messages accepted in the transaction.
        self._accepted: TransactionalState | None = None
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
        self._accepted = TransactionalState(txn_id, ACCEPTED)

    def check_room(self, count: int) -> None:
        """Check that *count* messages may still be accepted in the transaction.

        Raises:
            CommandFault: That is more work than a transaction may have (506).
        """
        if self.posted + len(self._enlisted) + count > self._work_max:
            raise CommandFault(
                f"a transaction has at most {self._work_max} transfers and accepts: commit more often",
                ErrorCode.RESOURCE_LIMIT_EXCEEDED,
            )

    def enlist(self, deliveries: Iterable[EnlistedDelivery]) -> None:
        """Accept *deliveries* as part of the transaction, which there has to be.

        If it has failed, the client holds them as before; the commit tells why.
        """
        state = self._accepted
        assert state is not None
        by_link: dict[EnlistedLink, list[EnlistedDelivery]] = {}
        for delivery in deliveries:
            if delivery.link.attached:
                by_link.setdefault(delivery.link, []).append(delivery)
            else:
                delivery.settle()
        for link, chosen in by_link.items():
            # The outcomes before may have ended it.
            if not link.attached:
                continue
            for delivery in chosen:
                delivery.state = state
                delivery.outcome_on_rollback = None
            link.endpoint.on_outcomes(link, chosen)
            for delivery in chosen:
                if delivery.state is state:
                    delivery.enlisted = True
                    self._enlisted.append(delivery)

    def leave(self) -> list[EnlistedDelivery]:
        """Let nothing more belong to the transaction; return the messages accepted in it.

        They are passed to :func:`conclude` when the transaction has ended.
        """
        self.state = self._accepted = None
        self.posted = 0
        enlisted, self._enlisted = self._enlisted, []
        return enlisted

    def on_ended(self) -> None:
        """Forget the messages, which refer to the session."""
        self.leave()


class Requeueing:
    """Counts messages whose outcomes after a rollback are not safe yet; wakes *context* after the last one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.left = 0

    def settled(self) -> None:
        """Note that the outcome of one message is safe."""
        self.left -= 1
        if not self.left:
            self._context.wake()


def conclude(
    context: Context, enlisted: Sequence[EnlistedDelivery], *, committed: bool
) -> Iterator[int]:
    """Settle *enlisted* if their transaction is *committed*, in steps, which yield what steps of a command do.

    Otherwise the client holds them as before, except those that it has released or rejected since: the
    last step comes after their queues have them.
    """
    requeueing = Requeueing(context)
    for at in range(0, len(enlisted), _DELIVERIES_OF_A_STEP):
        if at:
            yield _STEP_WORK
        by_link: dict[EnlistedLink, list[EnlistedDelivery]] = {}
        for delivery in enlisted[at : at + _DELIVERIES_OF_A_STEP]:
            delivery.enlisted = False
            if committed:
                delivery.settle()
                continue
            delivery.state = delivery.outcome_on_rollback
            if delivery.state is not None:
                delivery.remote_settled = True
                by_link.setdefault(delivery.link, []).append(delivery)
        for link, chosen in by_link.items():
            # The outcomes before may have ended it.
            if not link.attached:
                continue
            requeueing.left += len(chosen)
            for delivery in chosen:
                delivery.waiter = requeueing
            link.endpoint.on_outcomes(link, chosen)
    while requeueing.left:
        yield WAIT


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
        if fail:
            # They would wait for room that may never come, only to be rolled back.
            yield from drop_posts(self._context, state.txn_id)
        while not fail and posts_wait(self._context):
            yield WAIT
        enlisted = self._current.leave()
        outcome = yield from self._request(control, Discharge(state.txn_id, fail))
        done = isinstance(outcome, Accepted)
        yield from conclude(self._context, enlisted, committed=done and not fail)
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


def drop_posts(context: Context, txn_id: bytes) -> Iterator[int]:
    """Drop messages of transaction *txn_id* that wait for a right or for room: it is rolled back.

    Their transfers complete like those before them, in steps, each of which yields its work in frames.
    Links on which nothing else waits are ended, so that their queues reserve no room for them.
    """
    dropped: list[FrontDelivery] = []
    # All at once: none of them may reach a queue after the transaction has ended.
    for link in tuple(context.anchor.links):
        if isinstance(link, FrontReceivingLink) and (taken := link.take_back(txn_id)):
            dropped += taken
            if not link.wait_empty(context.wake):
                context.anchor.drop(link)
    state = TransactionalState(txn_id, ACCEPTED)
    for at, delivery in enumerate(dropped):
        if at and not at % _DELIVERIES_OF_A_STEP:
            yield _STEP_WORK
        delivery.settle(state)


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
