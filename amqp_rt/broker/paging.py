"""What a queue holds in its store only, and not in memory (B24). Pure.

The messages of a queue that is paged are in three runs, by their places: those in memory, at the
front; those that are only in the store, from ``first`` to ``last``; and those on their way into the
store. All of the middle run is in the store, at its place, so that it can be read in order, and
every message that comes while there is a middle run goes to its end.

A few messages within the middle run are not part of it: consumers with filters took them out of turn,
or they are delayed. ``out`` knows them, because they are read with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .entries import Entry

#: A place that no message has: that of the first one outside memory if there is none.
NOWHERE_PAGED: Final = 1 << 60
#: Messages that are read at a time, at most.
CHUNK: Final = 2_000
#: The same for one consumer that looks for what it wants.
AHEAD: Final = 500


class Ahead:
    """What was read for one browser or consumer with filters, beyond what is in memory."""

    __slots__ = ("_entries", "_position", "_taken", "end", "wanted")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        #: The next of them to look at, and places of those that others have taken since.
        self._position = 0
        self._taken: set[int] = set()
        #: What comes after everything that was looked at.
        self.end = 0
        #: More is to be read, and has not come.
        self.wanted = False

    def fill(self, entries: list[Entry]) -> None:
        """*entries* are what was wanted."""
        self._entries = entries
        self._position = 0
        self._taken.clear()
        self.wanted = False

    def next(self, cursor: int, paging: Paging) -> Entry | None:
        """The next message from *cursor* on, None if all that were read have been looked at."""
        entries = self._entries
        while self._position < len(entries):
            entry = entries[self._position]
            sequence = entry.sequence
            if sequence > paging.last:
                # It is in the store, and nobody has been told.
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
        """The message that :meth:`next` gave last has not been looked at after all."""
        self._position -= 1

    def miss(self, sequence: int) -> None:
        """Somebody has taken the message at *sequence*."""
        entries = self._entries
        if self._position < len(entries) and sequence <= entries[-1].sequence:
            self._taken.add(sequence)


class Paging:
    """What is known of the part of a queue that is not in memory.

    Args:
        bytes_max: Bytes of messages in memory from which on more goes to the store.
        messages_max: The same in messages.
        ask: Has ``MessageQueue.load`` and ``MessageQueue.show`` called with what is to be read.
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
        #: The next messages are wanted in memory, and have not come.
        self.asked = False
        #: Bytes and the last place of what is not in memory.
        self.bytes = 0
        self.last = -1
        #: What was read before this changed is not what is there.
        self.epoch = 0
        #: Messages in memory at places of those that are not; None if they have gone since.
        self.out: dict[int, Entry | None] = {}
        #: Reads under way, and places of messages that have left the store since the first of them.
        self.reads = 0
        self.gone: list[int] = []
        #: By the identity of the subscription.
        self.ahead: dict[int, Ahead] = {}

    def reset(self) -> None:
        """Everything is in memory."""
        self.epoch += 1
        self.asked = False
        self.bytes = 0
        self.last = -1
        self.out.clear()
        self.gone.clear()
        self.ahead.clear()

    def look_ahead(self, identity: int) -> Ahead:
        """What was read for that subscription."""
        found = self.ahead.get(identity)
        if found is None:
            found = self.ahead[identity] = Ahead()
        return found

    def take(self, entry: Entry) -> None:
        """*entry* is in memory now, out of its turn."""
        self.out[entry.sequence] = entry
        for ahead in self.ahead.values():
            ahead.miss(entry.sequence)

    def reads_for(self, identity: int) -> bool:
        """Whether something is being read for that subscription."""
        ahead = self.ahead.get(identity)
        return ahead is not None and ahead.wanted

    def want(self, ahead: Ahead) -> None:
        """Have more read for whom *ahead* belongs to."""
        if not ahead.wanted:
            ahead.wanted = True
            self.ask()

    def forget(self, sequence: int) -> None:
        """The message that was at *sequence* is not in the store any more."""
        if sequence in self.out:
            if self.reads:
                self.gone.append(sequence)
            else:
                del self.out[sequence]

    def read(self) -> None:
        """A read has ended."""
        self.reads -= 1
        if not self.reads:
            for sequence in self.gone:
                self.out.pop(sequence, None)
            self.gone.clear()

    def pass_to(self, sequence: int) -> None:
        """Everything before *sequence* is in memory now."""
        if self.out:
            self.out = {place: entry for place, entry in self.out.items() if place >= sequence}
