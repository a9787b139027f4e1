"""Delivery states: which are outcomes, and how unsettled maps count them (Part 3 §3.4)."""

from __future__ import annotations

from enum import Enum

from ..outcomes import Accepted, Modified, Received, Rejected, Released
from ..transactions import Declared, DeliveryState, TransactionalState


def is_outcome(state: DeliveryState | None) -> bool:
    """Return whether *state* is terminal (Part 3 §3.4)."""
    kind = type(state)
    return (
        kind is Accepted
        or kind is Released
        or kind is Modified
        or kind is Rejected
        or kind is Declared
        or (type(state) is TransactionalState and state.outcome is not None)
    )


class Known(Enum):
    """State of a delivery in one side's unsettled map."""

    ABSENT = "absent"
    NULL = "null"
    RECEIVED = "received"
    OUTCOME = "outcome"


def known_of(state: DeliveryState | None) -> Known:
    """Classify a *state* of an unsettled map.

    A transactional state is provisional, and its transaction ended with its connection, so that it
    counts as null. So do states of other standards.
    """
    if type(state) is Received:
        return Known.RECEIVED
    if type(state) is not TransactionalState and is_outcome(state):
        return Known.OUTCOME
    return Known.NULL
