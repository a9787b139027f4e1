"""Outcomes of messages that a session has got: ``message.accept``, ``reject``, ``release`` and ``acquire``.

Ids of transfers that are gone, or were never sent, are ignored. A set of ids is compared with the tables of
the session, so that its cost does not depend on the ranges that a client sends.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from amqp_rt.fronts import ACCEPTED, RELEASED, Error, Outcome, Rejected
from amqp_rt.fronts.links import REQUEUED

from .assembling import Assembly
from .contexts import Context, Steps
from .deliveries import Deliveries, OutgoingDelivery
from .faults import CommandFault
from .handlers import LATER, Answer, Method
from .layouts import (
    Acquired,
    Command,
    ErrorCode,
    MessageAccept,
    MessageAcquire,
    MessageReject,
    MessageRelease,
    RejectCode,
)
from .links import SendingLink
from .serials import RangeSet
from .sessions import Session
from .transactions import CurrentTransaction

#: Deliveries that are settled between two checks of the work done, and the cost of each in frames:
#: settling one may send another.
_DELIVERIES_OF_A_STEP: Final = 10
_DELIVERY_WORK: Final = 5
#: Numbers that are compared with a command between two checks, and the cost of that in frames.
_NUMBERS_OF_A_STEP: Final = 500
_NUMBERS_WORK: Final = 20
#: Messages that are acquired between two checks; those of a queue that were requeued before, or have
#: priorities, are all looked through for that.
_COPIES_OF_A_STEP: Final = 100
#: Conditions of rejected messages, by reject-code, as their history shows them.
_REJECTED: Final = {
    RejectCode.UNSPECIFIED: "amqp-0-10:unspecified",
    RejectCode.UNROUTABLE: "amqp-0-10:unroutable",
    RejectCode.IMMEDIATE: "amqp-0-10:immediate",
}


class Settlement:
    """A command that completes when the outcomes of its deliveries are safe.

    Args:
        session: The session.
        number: The command.
    """

    __slots__ = ("_left", "_number", "_session")

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self._number = number
        #: Outcomes that are not safe yet, and one more until all have been passed on.
        self._left = 1

    def add(self) -> None:
        """Wait for one more outcome."""
        self._left += 1

    def settled(self) -> None:
        """Note that an outcome is safe, or that all have been passed on."""
        self._left -= 1
        if not self._left:
            self._session.complete(self._number)


class Settling:
    """Passes the outcomes that a client sends to the queues.

    Args:
        context: Context of the session.
        deliveries: Messages that it has got.
        current: Its current transaction, to which acceptance belongs while there is one.
    """

    def __init__(
        self,
        context: Context,
        deliveries: Deliveries,
        current: CurrentTransaction,
    ) -> None:
        self.context = context
        self.deliveries = deliveries
        self.current = current

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            MessageAccept: self.accept,
            MessageReject: self.reject,
            MessageRelease: self.release,
            MessageAcquire: self.acquire,
        }

    # --- commands ---------------------------------------------------------------------------------

    def accept(self, number: int, command: MessageAccept, assembly: Assembly) -> Answer:
        """Accept messages: at once, or with the transaction of the session.

        The command completes when that is on disk, for messages that are.
        """
        return self.accept_all(number, command, command.transfers)

    def reject(self, number: int, command: MessageReject, assembly: Assembly) -> Answer:
        """Reject messages, which go to the alternate exchange of their queue, at once.

        Raises:
            CommandFault: There is no such code (542).
        """
        code = command.code or 0
        condition = _REJECTED.get(RejectCode(code)) if code <= max(RejectCode) else None
        if condition is None:
            text = f"there is no reject-code {code}"
            raise CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=1)
        outcome = Rejected(Error(condition, command.text or None))
        return self.settle(number, command, command.transfers, outcome)

    def release(self, number: int, command: MessageRelease, assembly: Assembly) -> Answer:
        """Make messages available again, at once and at their position."""
        outcome = REQUEUED if command.set_redelivered else RELEASED
        return self.settle(number, command, command.transfers, outcome)

    def acquire(self, number: int, command: MessageAcquire, assembly: Assembly) -> Answer:
        """Acquire messages that were sent without; the result names those that could be acquired."""
        if command.transfers is None:
            return Acquired(transfers=RangeSet())
        return self.context.run(number, command, self._acquire_in_steps(command.transfers))

    # --- for other classes ------------------------------------------------------------------------

    def accept_all(self, number: int, command: Command, transfers: RangeSet | None) -> Answer:
        """Accept deliveries *transfers* for command *number*: at once, or with the transaction of the session."""
        if self.current.state is None:
            return self.settle(number, command, transfers, ACCEPTED)
        if transfers is None:
            return None
        if len(transfers) > _DELIVERIES_OF_A_STEP:
            return self.context.run(number, command, self._enlist_in_steps(transfers))
        found = self._named(transfers)
        self.current.check_room(len(found))
        self.current.enlist(found)
        return None

    def settle(
        self, number: int, command: Command, transfers: RangeSet | None, outcome: Outcome
    ) -> Answer:
        """Settle deliveries *transfers* with *outcome* for command *number*; many of them a few at a time."""
        if transfers is None:
            return None
        if len(transfers) > _DELIVERIES_OF_A_STEP:
            return self.context.run(
                number, command, self._settle_in_steps(number, transfers, outcome)
            )
        deliveries = self._named(transfers, _on_rollback(outcome))
        if not deliveries:
            return None
        settlement = Settlement(self.context.session, number)
        self.pass_on(deliveries, outcome, settlement)
        settlement.settled()
        return LATER

    def pass_on(
        self, deliveries: list[OutgoingDelivery], outcome: Outcome, settlement: Settlement | None
    ) -> None:
        """Give *deliveries* an outcome; *settlement*, if there is one, waits until it is safe."""
        connection = self.context.connection
        conclude = self.conclude
        for delivery in deliveries:
            link = delivery.link
            # It is held until the queue has its outcome, and has that outcome if the link ends before.
            delivery.state = outcome
            delivery.remote_settled = True
            delivery.waiter = settlement
            if settlement is not None:
                settlement.add()
            if connection is not None:
                connection.answer(conclude, link, delivery)
            else:
                conclude(link, [delivery])

    # --- private ----------------------------------------------------------------------------------

    def _named(
        self, transfers: RangeSet, on_rollback: Outcome | None = None
    ) -> list[OutgoingDelivery]:
        """Return the acquired deliveries among *transfers* that have no outcome; forget copies there.

        Those accepted in the transaction get the outcome *on_rollback*.
        """
        deliveries = self.deliveries
        if deliveries.copies:
            self._forget_copies(transfers.among(deliveries.copies))
        return self._open(transfers.among(deliveries.held), on_rollback)

    def _named_in_steps(
        self, transfers: RangeSet, on_rollback: Outcome | None = None
    ) -> Generator[int, None, list[OutgoingDelivery]]:
        """Return what :meth:`_named` does; each step looks at some of the deliveries."""
        deliveries = self.deliveries
        found: list[OutgoingDelivery] = []
        if deliveries.copies:
            for some in transfers.parts_among(deliveries.copies, _NUMBERS_OF_A_STEP):
                self._forget_copies(some)
                yield _NUMBERS_WORK
        for some in transfers.parts_among(deliveries.held, _NUMBERS_OF_A_STEP):
            found += self._open(some, on_rollback)
            yield _NUMBERS_WORK
        return found

    def _forget_copies(self, numbers: list[int]) -> None:
        """Forget copies, which were never acquired: the queue does not change."""
        copies = self.deliveries.copies
        for number in numbers:
            copy = copies[number]
            copy.link.forget(copy)

    def _open(self, numbers: list[int], on_rollback: Outcome | None) -> list[OutgoingDelivery]:
        """Return the deliveries *numbers* without an outcome.

        Others that are accepted in the transaction get the outcome *on_rollback* if it is rolled back:
        clients of qpid.messaging release all that they have before they roll back.
        """
        held = self.deliveries.held
        found: list[OutgoingDelivery] = []
        for number in numbers:
            delivery = held[number]
            if delivery.enlisted:
                if on_rollback is not None and self.current.state is not None:
                    delivery.outcome_on_rollback = on_rollback
            elif not delivery.remote_settled:
                found.append(delivery)
        return found

    def _settle_in_steps(self, number: int, transfers: RangeSet, outcome: Outcome) -> Steps:
        deliveries = yield from self._named_in_steps(transfers, _on_rollback(outcome))
        if not deliveries:
            return None
        settlement = Settlement(self.context.session, number)
        held = self.deliveries.held
        for at in range(0, len(deliveries), _DELIVERIES_OF_A_STEP):
            # Some may be gone with their queue meanwhile.
            chosen = [
                each
                for each in deliveries[at : at + _DELIVERIES_OF_A_STEP]
                if each.number in held and not each.enlisted and not each.remote_settled
            ]
            self.pass_on(chosen, outcome, settlement)
            connection = self.context.connection
            if connection is not None:
                connection.flush()
            yield _DELIVERY_WORK * _DELIVERIES_OF_A_STEP
        settlement.settled()
        return LATER

    def _enlist_in_steps(self, transfers: RangeSet) -> Steps:
        deliveries = yield from self._named_in_steps(transfers)
        self.current.check_room(len(deliveries))
        held = self.deliveries.held
        for at in range(0, len(deliveries), _DELIVERIES_OF_A_STEP):
            # Some may be gone with their queue meanwhile.
            chosen = deliveries[at : at + _DELIVERIES_OF_A_STEP]
            self.current.enlist([each for each in chosen if each.number in held])
            yield _DELIVERY_WORK * _DELIVERIES_OF_A_STEP
            if self.current.state is None:
                # The transaction has ended with its session.
                return None
        return None

    def _acquire_in_steps(self, transfers: RangeSet) -> Steps:
        deliveries, topology = self.deliveries, self.context.topology
        acquired = RangeSet()
        for numbers in transfers.parts_among(deliveries.copies, _COPIES_OF_A_STEP):
            by_link: dict[SendingLink, list[OutgoingDelivery]] = {}
            for number in numbers:
                copy = deliveries.copies.get(number)
                if copy is not None and not deliveries.is_full:
                    by_link.setdefault(copy.link, []).append(copy)
            for link, copies in by_link.items():
                if topology is None or not link.attached:
                    continue
                for claimed in topology.claim(link.address, link, copies):
                    del deliveries.copies[claimed.number]
                    deliveries.held[claimed.number] = claimed
                    acquired.add(claimed.number)
            yield _COPIES_OF_A_STEP
        return Acquired(transfers=acquired)

    def conclude(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes of *deliveries* to the queue of *link*."""
        if link.attached:
            link.endpoint.on_outcomes(link, deliveries)
        else:
            # The queue was deleted meanwhile.
            for delivery in deliveries:
                delivery.settle(delivery.state)


def _on_rollback(outcome: Outcome) -> Outcome | None:
    """Return what a message gets on a rollback that was accepted before *outcome*; None if held as before."""
    return None if outcome is ACCEPTED else outcome
