"""Credit of receiving links, which bounds all queued messages (decision 0004).

Messages wait between socket and handler only within the credit given to the peer, so credit
determines how much memory they can take. :class:`CreditWindow` computes the credit of one link;
:class:`SharedSlots` that of the links of a route without prefetch, which share the free slots.
"""

from __future__ import annotations

from collections import deque

from ..fronts.base import ReceivingLink
from ..limits import MIB

#: Bytes of messages that may wait on one link, for any number of messages.
PREFETCH_BYTES = 8 * MIB


class CreditWindow:
    """Credit window of one link.

    Keeps the credit of *link* at ``slots + messages - held`` (Part 2 §2.6.7), where held counts the
    messages received and not yet freed, whether they wait or are being processed. Credit is topped
    up when half of the window can be returned, so that one flow frame serves many messages.

    Credit counts messages, but memory counts bytes: when the held messages exceed half of *bytes*,
    or the credit at the recent message size exceeds twice *bytes*, credit is cut to the room left
    at that size. A message larger than all of *bytes* may still arrive alone.
    """

    __slots__ = ("_size", "bytes", "capacity", "held", "held_bytes", "link", "open")

    def __init__(
        self,
        link: ReceivingLink,
        *,
        messages: int,
        bytes: int = PREFETCH_BYTES,  # noqa: A002  # the unit of the bound, beside messages
        slots: int = 0,
    ) -> None:
        self.link = link
        self.capacity = messages + slots
        self.bytes = bytes
        self.held = 0
        self.held_bytes = 0
        self.open = False
        self._size = 1

    @property
    def target(self) -> int:
        """Credit that the link should have now."""
        if not self.open:
            return 0
        room = (self.bytes - self.held_bytes) // self._size
        if room < 1 and not self.held:
            room = 1
        return max(0, min(self.capacity - self.held, room))

    def opened(self) -> None:
        """Give the first credit, now that the link is attached."""
        self.open = True
        self.link.grant(self.target)

    def took(self, count: int, size: int) -> None:
        """Count *count* arrived messages of *size* bytes in total; their credit is used."""
        self.held += count
        self.held_bytes += size
        each = size // count or 1
        # The size estimate grows at once, because memory is at risk, and shrinks slowly.
        self._size = each if each > self._size else (7 * self._size + each) // 8 or 1
        credit = self.link.credit
        if 2 * self.held_bytes > self.bytes or credit * self._size > 2 * self.bytes:
            target = self.target
            if credit > target:
                self.link.grant(target)

    def freed(self, count: int, size: int) -> None:
        """Release the room of *count* messages of *size* bytes in total."""
        self.held -= count
        self.held_bytes -= size
        # Cheap test first: no more credit can be missing than the count alone allows, and in most
        # calls that is too little for a flow.
        if self.open and 2 * (self.capacity - self.held - self.link.credit) >= self.capacity:
            target = self.target
            missing = target - self.link.credit
            # Half of the credit within reach: of the window, or of the smaller number that the
            # bytes allow.
            if missing > 0 and 2 * missing >= min(self.capacity, target + self.held):
                self.link.grant(target)

    def passed(self, count: int, size: int) -> None:
        """Count *count* messages of *size* bytes in total that have arrived and were freed at once."""
        credit = self.link.credit
        if self.held or credit * size > 2 * self.bytes or 2 * credit <= self.capacity:
            self.took(count, size)
            self.freed(count, size)
        # Otherwise there is enough credit, also if all messages were as large as these together.

    def close(self) -> None:
        """Take back unused credit: no further message is wanted."""
        if self.open:
            self.open = False
            if self.link.attached and self.link.credit:
                self.link.grant(0)


class SharedSlots:
    """Slots of a route without prefetch, shared in turn by its links.

    The total credit of the links never exceeds the free slots. A message that arrives can run at
    once, and one that cannot run stays with the peer, available to other receivers. If a link keeps
    credit unused while others have none, :meth:`rotate` asks for it back (``drain``, Part 2
    §2.6.7).
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: Messages received and not yet freed.
        self.held = 0
        #: Links without credit, longest waiting first.
        self._waiting: deque[ReceivingLink] = deque()
        #: Credit of each link that has some, longest held first.
        self._granted: dict[ReceivingLink, int] = {}
        self._outstanding = 0
        self._draining: set[ReceivingLink] = set()
        self._open = True

    @property
    def starved(self) -> bool:
        """Whether a link waits for credit that other links hold unused."""
        return self._open and bool(self._waiting) and bool(self._granted)

    def add(self, link: ReceivingLink) -> None:
        self._waiting.append(link)
        self._share()

    def remove(self, link: ReceivingLink) -> None:
        """Remove a link that has ended, with its unused credit."""
        if link in self._granted:
            self._outstanding -= self._granted.pop(link)
            self._draining.discard(link)
        elif link in self._waiting:
            self._waiting.remove(link)
        self._share()

    def took(self, link: ReceivingLink, count: int) -> None:
        """Count *count* messages that have arrived on *link* and used their credit."""
        self.held += count
        self._used(link)

    def freed(self, count: int) -> None:
        """Free the slots of *count* messages that are finished."""
        self.held -= count
        self._share()

    def flowed(self, link: ReceivingLink) -> None:
        """Handle the answer of *link*'s peer to a drain, which may return credit."""
        self._draining.discard(link)
        self._used(link)
        self._share()

    def resize(self, slots: int) -> None:
        """Set the number of slots; credit beyond the free ones is taken back, from the latest grants first.

        Messages that are on their way by then still arrive.
        """
        self.slots = slots
        surplus = self.held + self._outstanding - slots
        if surplus > 0:
            for link in reversed(list(self._granted)):
                taken = min(surplus, self._granted[link])
                surplus -= taken
                self._outstanding -= taken
                self._granted[link] -= taken
                link.grant(self._granted[link])
                self._draining.discard(link)
                if not self._granted[link]:
                    del self._granted[link]
                    self._waiting.append(link)
                if surplus <= 0:
                    break
        self._share()

    def rotate(self) -> None:
        """Ask the link that has held unused credit longest to use it or return it."""
        for link in self._granted:
            if link not in self._draining:
                self._draining.add(link)
                link.drain()
                return

    def close(self) -> None:
        """Take back unused credit: no further message is wanted."""
        self._open = False
        for link in self._granted:
            if link.attached:
                link.grant(0)
        self._granted.clear()
        self._outstanding = 0
        self._waiting.clear()

    def _used(self, link: ReceivingLink) -> None:
        granted = self._granted.get(link)
        if granted is None:
            return
        self._outstanding += link.credit - granted
        if link.credit:
            self._granted[link] = link.credit
        else:
            del self._granted[link]
            self._draining.discard(link)
            self._waiting.append(link)

    def _share(self) -> None:
        if not self._open:
            return
        free = self.slots - self.held - self._outstanding
        while free > 0 and self._waiting:
            # In equal parts over the waiting links, at least one for each.
            share = max(1, free // len(self._waiting))
            link = self._waiting.popleft()
            free -= share
            self._give(link, share)
        if free > 0:
            # No link waits: give the rest to one that has credit already.
            for link in self._granted:
                if link not in self._draining:
                    self._give(link, self._granted[link] + free)
                    return

    def _give(self, link: ReceivingLink, credit: int) -> None:
        self._outstanding += credit - self._granted.get(link, 0)
        self._granted[link] = credit
        link.grant(credit)
