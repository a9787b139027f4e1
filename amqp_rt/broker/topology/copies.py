"""Copies of one delivery for several queues."""

from __future__ import annotations

from typing import Any

from ...fronts.base import IncomingDelivery
from ...outcomes import RELEASED, Accepted, Rejected
from ...transactions import DeliveryState, TransactionalState


class Copies:
    """Delivery to several queues, which is accepted when all of them have accepted it.

    Queues that were deleted since the delivery was routed do not count. If no other queue is left,
    the delivery is released, as an unroutable one is.
    """

    __slots__ = ("awaited", "delivery", "outcome", "payload")

    def __init__(self, delivery: IncomingDelivery, awaited: int, payload: bytes) -> None:
        self.delivery = delivery
        self.awaited = awaited
        self.payload = payload
        self.outcome: DeliveryState | None = None

    def settle(self, outcome: DeliveryState) -> None:
        """Count the outcome of one queue; settle the delivery with the last."""
        said = outcome.outcome if type(outcome) is TransactionalState else outcome
        counts = said is not outcome or not _is_gone(said)
        if counts and (self.outcome is None or type(said) is not Accepted):
            self.outcome = outcome
        self.awaited -= 1
        if not self.awaited:
            self.delivery.settle(RELEASED if self.outcome is None else self.outcome)


def _is_gone(outcome: object) -> bool:
    """Return whether *outcome* is that of a queue that has been deleted."""
    if type(outcome) is not Rejected or outcome.error is None:
        return False
    return outcome.error.condition == "amqp:not-found"


class Copy:
    """Delivery of :class:`Copies` to one queue."""

    __slots__ = ("_copies", "context", "local_state", "payload", "settled")

    aborted = False
    complete = True
    streamed = False

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        #: The same object for all queues, so that they share one body in memory and in the store.
        self.payload = copies.payload
        self.settled = copies.delivery.settled
        self.context: Any = None
        self.local_state: DeliveryState | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the delivery that is not overridden here."""
        return getattr(self._copies.delivery, name)

    def settle(self, outcome: DeliveryState) -> None:
        """Settle the copy; only the first outcome counts."""
        if self.local_state is not None:
            return
        self.settled = True
        copies, self.local_state = self._copies, outcome
        copies.settle(outcome)

    def update(self, state: DeliveryState) -> None:
        """Do nothing: states of a single copy are not sent to the peer."""
