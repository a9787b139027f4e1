"""Accounts of a queue: memory shared with other nodes, work of a turn, messages; and its ledger. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ..entries import Entry

#: Treatment of messages that exceed the limits of the queue.
BLOCK: Final = "block"
REJECT: Final = "reject"
DROP_HEAD: Final = "drop-head"

#: Deferrable work, such as ended links' deliveries to conclude, in one turn of the event loop for
#: all nodes that share their :class:`Memory`: a few milliseconds. Filters that examine messages count
#: as much as they have done.
WORK_OF_A_TURN: Final = 1_000
#: Units of that work for giving one message up, which may make a dead letter of it, and for deleting
#: the queue of one subscription; and for each further copy of that dead letter.
WORK_OF_AN_END: Final = 16
WORK_OF_A_LETTER: Final = 8


class Memory:
    """Memory account of messages in all nodes that share this object, in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: int = 0
        #: Deferrable work that may still be done in this turn of the event loop. The host refills
        #: it, and calls the nodes that have left some.
        self.work: int = WORK_OF_A_TURN
        #: Callbacks, by their owner, called one by one when there is room again.
        self.waiting: dict[Any, Callable[[], None]] = {}

    @property
    def scarce(self) -> bool:
        """Whether more than seven eighths are in use."""
        return self.held * 8 > self.limit * 7

    def wait(self, who: Any, on_room: Callable[[], None]) -> None:
        """If memory is scarce, call *on_room* once when it no longer is."""
        if self.scarce:
            self.waiting[who] = on_room

    def notify_waiting(self) -> None:
        """Call the waiting callbacks as long as there is room."""
        for who in list(self.waiting):
            if self.scarce:
                break
            on_room = self.waiting.pop(who, None)
            if on_room is not None:
                on_room()


class Counts:
    """Counters of a node since it was created."""

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


class Ledger(Protocol):
    """Store of one queue's messages. Called for entries that are ``stored``."""

    def remove(self, entry: Entry) -> None:
        """Remove *entry*."""

    def update(self, entry: Entry) -> None:
        """Write the changed state of *entry*, whose payload is unchanged."""

    def rewrite(self, entry: Entry) -> None:
        """Write *entry*, whose payload has changed."""

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        """Remove the messages from *first* to *last*, except *kept*."""

    def settle(self, delivery: Any, outcome: Any) -> None:
        """Settle *delivery* once the changes of its entry are on the disk."""
