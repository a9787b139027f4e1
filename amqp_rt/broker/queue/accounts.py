"""Accounts that nodes of a broker keep, and the interface between a queue and its store. Pure.

:class:`Memory` counts the bytes of messages and the work of a turn, for all nodes of a broker together;
:class:`Counts` counts the messages of one node. Nodes change both directly. :class:`Ledger` is the store as a
queue sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ...outcomes import Outcome
from ..entries import Entry

#: Treatment of messages that exceed the limits of a queue (its ``overflow``).
BLOCK: Final = "block"
REJECT: Final = "reject"
DROP_HEAD: Final = "drop-head"

#: Results of outcomes: what happens to a message whose delivery has ended.
ACCEPTED: Final = 0
REQUEUED: Final = 1
DEAD_LETTERED: Final = 2
DROPPED: Final = 3
FAILED: Final = 4

#: Deferrable work that all nodes with the same :class:`Memory` may do together in one turn of the event
#: loop: a few milliseconds. The unit is the time that concluding one delivery of an ended link takes; a
#: filter that examines a message counts by its steps.
WORK_OF_A_TURN: Final = 1_000
#: Units for giving up one message, which may become a dead letter, and for deleting the queue of one
#: subscription.
WORK_OF_AN_END: Final = 16
#: Units for each copy of a dead letter, one for each node that takes it.
WORK_OF_A_LETTER: Final = 8


class Memory:
    """Memory account of the messages in all nodes that share this object.

    Bytes are those of encoded messages. Nodes add to ``held`` and subtract from it themselves, and check
    before whether a message fits.

    Args:
        limit: Most bytes that the nodes hold together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: int = 0
        #: Deferrable work that may still be done in this turn of the event loop. The broker's scheduler
        #: refills it for each turn, and then resumes the nodes that have unfinished work.
        self.work: int = WORK_OF_A_TURN
        #: Callbacks, one for each owner, called one by one when there is room again.
        self.waiting: dict[Any, Callable[[], None]] = {}

    @property
    def scarce(self) -> bool:
        """Whether more than seven eighths of the limit are in use: nodes then keep less in memory."""
        return self.held * 8 > self.limit * 7

    def wait(self, who: Any, on_room: Callable[[], None]) -> None:
        """If memory is scarce, call *on_room* once when it no longer is.

        Args:
            who: The owner of the callback, which replaces an earlier one of the same owner.
            on_room: The callback. It may use up the room, and wait again.
        """
        if self.scarce:
            self.waiting[who] = on_room

    def notify_waiting(self) -> None:
        """Call the waiting callbacks as long as memory is not scarce; nodes do so when they free some."""
        for who in list(self.waiting):
            if self.scarce:
                break
            on_room = self.waiting.pop(who, None)
            if on_room is not None:
                on_room()


class Counts:
    """Counters of a node, from zero when it is created or restored."""

    def __init__(self) -> None:
        self.enqueued: int = 0
        self.delivered: int = 0
        self.accepted: int = 0
        self.requeued: int = 0
        self.dead_lettered: int = 0
        self.expired: int = 0
        #: Archived without being accepted or dead-lettered: given up without a dead-letter address,
        #: purged, replaced by a later message, missing in the store, or deleted with the queue.
        self.dropped: int = 0

    def add(self, other: Any) -> None:
        """Add the counters of *other*, which has the same ones."""
        self.enqueued += other.enqueued
        self.delivered += other.delivered
        self.accepted += other.accepted
        self.requeued += other.requeued
        self.dead_lettered += other.dead_lettered
        self.expired += other.expired
        self.dropped += other.dropped


class Ledger(Protocol):
    """Interface of a queue to the store of its messages.

    Methods with an entry are called only if the entry is ``stored``. Changes are queued for the journal;
    no method waits for the disk.
    """

    def remove(self, entry: Entry) -> None:
        """Remove *entry*."""

    def update(self, entry: Entry) -> None:
        """Write the changed state of *entry*, whose payload is unchanged."""

    def rewrite(self, entry: Entry) -> None:
        """Write *entry*, whose payload has changed."""

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        """Remove the messages with sequence numbers from *first* to *last*, except *kept*."""

    def settle(self, delivery: Any, outcome: Outcome) -> None:
        """Settle *delivery* with *outcome* once the changes of its entry are on the disk."""
