"""Answers to the deliveries whose messages were stored, were not, or may have been."""

from __future__ import annotations

from ...errors import AmqpError
from ...fronts.base import IncomingDelivery
from ...outcomes import ACCEPTED, Error, Rejected


class InDoubt(Error, gc=False):
    """Error of changes of which it is unknown whether they were stored: any outcome might be wrong."""


class Unanswered(InDoubt, gc=False):
    """Error of changes after another broker may have taken the store: peers get no answer, but connect to that
    broker and send them again."""


def accept(delivery: IncomingDelivery) -> None:
    """Accept *delivery*, whose message is stored."""
    delivery.settle(ACCEPTED)


def refuse(delivery: IncomingDelivery, error: Error) -> None:
    """Reject *delivery* because of *error*; if the result is unknown, send no outcome and detach its
    link instead, so that the sender learns of it. If the store was lost, its connection closes."""
    if isinstance(error, Unanswered):
        return
    if isinstance(error, InDoubt):
        delivery.link.detach(Error(error.condition, error.description))
    else:
        delivery.settle(Rejected(error))


def no_outcomes(failure: AmqpError) -> Error:
    """Return the error for links whose outcomes can no longer be stored."""
    return Error(
        "amqp:internal-error",
        "outcomes of durable messages cannot be kept any more, because the store of the broker was"
        f" given up: {failure}; settle them again when the broker has been started again",
    )
