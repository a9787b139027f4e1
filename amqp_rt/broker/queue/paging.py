"""Paging: the part of a queue that is in the store only, and not in memory. Pure.

The messages of a paged queue form three ranges of sequence numbers: those in memory, at the front;
those in the store only, from ``MessageQueue.paged_from`` to ``last``; and those being written to
the store. All messages of the middle range are in the store under their sequence numbers, so that
it can be read in order, and while it exists every new message is appended to it.

A few messages within the middle range are in memory, because consumers with filters took them out
of turn or they are delayed. ``out`` lists them, since a read returns them with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..entries import Entry

#: A sequence number above all others: that of the first message outside memory if there is none.
NOWHERE_PAGED: Final = 1 << 60
#: Messages read at a time, at most.
CHUNK: Final = 2_000
#: The same for one consumer with filters or browser.
AHEAD: Final = 500


class Ahead:
    """Messages read for one browser or consumer with filters, beyond those in memory."""

    __slots__ = ("_entries", "_position", "_taken", "end", "wanted")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        #: Index of the next one to look at, and sequence numbers of those taken by others since.
        self._position = 0
        self._taken: set[int] = set()
        #: Sequence number after the last message that was looked at.
        self.end = 0
        #: Whether a read was requested and has not ended.
        self.wanted = False

    def fill(self, entries: list[Entry]) -> None:
        """Take the result of a read."""
        self._entries = entries
        self._position = 0
        self._taken.clear()
        self.wanted = False

    def next(self, cursor: int, paging: Paging) -> Entry | None:
        """Return the next message from *cursor* on, None if all those read have been looked at."""
        entries = self._entries
        while self._position < len(entries):
            entry = entries[self._position]
            sequence = entry.sequence
            if sequence > paging.last:
                # Already in the store, but the queue has not been notified of the commit yet.
                break
            self._position += 1
            self.end = sequence + 1
            if sequence >= cursor and sequence not in paging.out and sequence not in self._taken:
                return entry
        self._entries = []
        self._position = 0
        self._taken.clear()
        return None

    def step_back(self) -> None:
        """Return to the message that :meth:`next` returned last, which was not looked at."""
        self._position -= 1

    def miss(self, sequence: int) -> None:
        """Skip the message at *sequence*, which another consumer has taken."""
        entries = self._entries
        if self._position < len(entries) and sequence <= entries[-1].sequence:
            self._taken.add(sequence)


class Paging:
    """State of the part of a queue that is not in memory.

    Args:
        bytes_max: Bytes of messages in memory beyond which new ones stay in the store only.
        messages_max: The same in messages.
        ask: Requests a read, after which ``MessageQueue.load`` or ``MessageQueue.show`` is called.
    """

    __slots__ = (
        "ahead",
        "ask",
        "asked",
        "bytes",
        "bytes_max",
        "epoch",
        "gone",
        "last",
        "messages_max",
        "out",
        "reads",
    )

    def __init__(self, bytes_max: int, messages_max: int, ask: Callable[[], None]) -> None:
        self.bytes_max = bytes_max
        self.messages_max = messages_max
        self.ask = ask
        #: Whether the next messages were requested and have not been read.
        self.asked = False
        #: Bytes in the store only, and the last sequence number of the middle range.
        self.bytes = 0
        self.last = -1
        #: Number of the present middle range: the results of reads of an earlier one are outdated.
        self.epoch = 0
        #: Messages in memory within the middle range; None for those that have left memory since.
        self.out: dict[int, Entry | None] = {}
        #: Reads under way, and sequence numbers of messages deleted from the store since the first
        #: began.
        self.reads = 0
        self.gone: list[int] = []
        #: By the identity of the subscription.
        self.ahead: dict[int, Ahead] = {}

    def reset(self) -> None:
        """Clear the state, since all messages are in memory."""
        self.epoch += 1
        self.asked = False
        self.bytes = 0
        self.last = -1
        self.out.clear()
        self.gone.clear()
        self.ahead.clear()

    def look_ahead(self, identity: int) -> Ahead:
        """Return the messages read ahead for the subscription *identity*."""
        found = self.ahead.get(identity)
        if found is None:
            found = self.ahead[identity] = Ahead()
        return found

    def take(self, entry: Entry) -> None:
        """Record that *entry* was loaded into memory out of its turn."""
        self.out[entry.sequence] = entry
        for ahead in self.ahead.values():
            ahead.miss(entry.sequence)

    def reads_for(self, identity: int) -> bool:
        """Return whether a read for the subscription *identity* is under way."""
        ahead = self.ahead.get(identity)
        return ahead is not None and ahead.wanted

    def want(self, ahead: Ahead) -> None:
        """Request a read for the subscription of *ahead*."""
        if not ahead.wanted:
            ahead.wanted = True
            self.ask()

    def forget(self, sequence: int) -> None:
        """Record that the message at *sequence* was deleted from the store.

        A read under way may still return it, so it stays in ``out`` until the read has ended.
        """
        if sequence in self.out:
            if self.reads:
                self.gone.append(sequence)
            else:
                del self.out[sequence]

    def read(self) -> None:
        """Record the end of a read."""
        self.reads -= 1
        if not self.reads:
            for sequence in self.gone:
                self.out.pop(sequence, None)
            self.gone.clear()

    def pass_to(self, sequence: int) -> None:
        """Record that all messages before *sequence* are in memory."""
        if self.out:
            self.out = {place: entry for place, entry in self.out.items() if place >= sequence}
