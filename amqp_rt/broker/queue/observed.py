"""Queue that reports the events of its messages (``$journal``).

A separate class, so that other queues do not even check whether they are observed.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from ...outcomes import Accepted, Error, Modified, Outcome, Rejected, Released
from ..entries import Entry
from .accounts import DEAD_LETTERED, DROPPED
from .paging import NOWHERE_PAGED
from .queue import MessageQueue
from .subscriptions import ConsumerLink, Subscription

PUBLISHED: Final = "published"
DELIVERED: Final = "delivered"
ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
RELEASED: Final = "released"
MODIFIED: Final = "modified"
#: Names of the outcomes in events.
_OUTCOMES: Final[dict[Any, str]] = {
    Accepted: ACCEPTED,
    Rejected: REJECTED,
    Released: RELEASED,
    Modified: MODIFIED,
}
EXPIRED: Final = "expired"
DEAD_LETTER: Final = "dead-lettered"
DROP: Final = "dropped"
MOVED: Final = "moved"


class QueueWatch(Protocol):
    """Recorder of the events of one queue."""

    def note(
        self, event: str, entry: Entry, sequence: int, link: ConsumerLink | None, reason: str
    ) -> None:
        """Record that *event* happened to *entry*, on *link* if that is not None."""


class ObservedQueue(MessageQueue):
    """Queue that reports every message to ``watch``; set that before the first message arrives."""

    watch: QueueWatch

    def put(self, entry: Entry) -> None:
        if not self.deleted:
            place = entry.sequence if entry.sequence >= 0 else self.place_next
            self.watch.note(PUBLISHED, entry, place, None, "")
        super().put(entry)

    def send(self, subscription: Subscription, entry: Entry) -> bool:
        handed = super().send(subscription, entry)
        if handed:
            self.watch.note(DELIVERED, entry, entry.sequence, subscription.link, "")
            if subscription.settled and subscription.acquiring is None:
                self.watch.note(ACCEPTED, entry, entry.sequence, subscription.link, "")
        return handed

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> None:
        if type(outcome) is Accepted and not self.deleted:
            self._note_outcome(subscription, entry, outcome)
        super().conclude(subscription, entry, outcome)

    def record_outcome(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> int:
        self._note_outcome(subscription, entry, outcome)
        return super().record_outcome(subscription, entry, outcome)

    def _note_outcome(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> None:
        reason = ""
        if type(outcome) is Rejected and outcome.error is not None:
            reason = str(outcome.error.condition)
        event = _OUTCOMES[type(outcome)]
        self.watch.note(event, entry, entry.sequence, subscription.link, reason)

    def apply_outcome(self, entry: Entry, result: int) -> None:
        if not self.deleted:
            if result == DEAD_LETTERED:
                self.watch.note(DEAD_LETTER, entry, entry.sequence, None, "")
            elif result == DROPPED:
                self.watch.note(DROP, entry, entry.sequence, None, "")
        super().apply_outcome(entry, result)

    def _discard(self, entry: Entry, reason: str, error: Error | None) -> None:
        if reason == EXPIRED:
            self.watch.note(EXPIRED, entry, entry.sequence, None, "")
        before = self.counts.dead_lettered
        super()._discard(entry, reason, error)
        event = DEAD_LETTER if self.counts.dead_lettered > before else DROP
        self.watch.note(event, entry, entry.sequence, None, reason)

    def _replaced(self, entry: Entry) -> bool:
        self.watch.note(DROP, entry, entry.sequence, None, "replaced")
        return super()._replaced(entry)

    def withdraw(self, count: int, before: int = NOWHERE_PAGED) -> list[Entry]:
        found = super().withdraw(count, before)
        for entry in found:
            self.watch.note(MOVED, entry, entry.sequence, None, "")
        return found

    def drop(self, count: int, before: int = NOWHERE_PAGED) -> int:
        found = super().withdraw(count, before)
        for entry in found:
            self.watch.note(DROP, entry, entry.sequence, None, "purged")
        self.counts.dropped += len(found)
        return len(found)
