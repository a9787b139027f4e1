"""Credit is the only queue (decision 26).

Nothing waits between socket and handler that the peer was not given credit for, so what
credit allows is what memory has to hold. :class:`CreditWindow` does the arithmetic of one
link; :class:`SharedSlots` that of the links of a route without prefetch, which share the
free slots between them.
"""

from __future__ import annotations

from collections import deque

from ..fronts.base import ReceivingLink
from ..limits import MIB

#: Bytes that wait on one link, however few messages they are.
PREFETCH_BYTES = 8 * MIB


class CreditWindow:
    """Keeps the credit of *link* at ``slots + messages - held`` (Part 2 §2.6.7).

    Held is every message that was taken and not yet freed, whether it waits or is being
    worked on. Credit is topped up when half of the window is to be given back, so that a
    flow frame pays for many messages. Credit counts messages and memory counts bytes: once
    what is held weighs more than half of *bytes*, or what may come weighs more than twice as
    much, credit is cut to what there is room for at the size seen of late. A message heavier
    than all of *bytes* may still come alone.
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
        """The credit that the link should have now."""
        if not self.open:
            return 0
        room = (self.bytes - self.held_bytes) // self._size
        if room < 1 and not self.held:
            room = 1
        return max(0, min(self.capacity - self.held, room))

    def opened(self) -> None:
        """The link is attached: give the first credit."""
        self.open = True
        self.link.grant(self.target)

    def took(self, count: int, size: int) -> None:
        """*count* messages of *size* bytes together have arrived; their credit is used."""
        self.held += count
        self.held_bytes += size
        each = size // count or 1
        # Grows at once, because memory is at stake, and shrinks slowly.
        self._size = each if each > self._size else (7 * self._size + each) // 8 or 1
        credit = self.link.credit
        if 2 * self.held_bytes > self.bytes or credit * self._size > 2 * self.bytes:
            target = self.target
            if credit > target:
                self.link.grant(target)

    def freed(self, count: int, size: int) -> None:
        """*count* messages of *size* bytes together need no room any more."""
        self.held -= count
        self.held_bytes -= size
        # What the count alone allows is the most that can be missing; mostly it is too little.
        if self.open and 2 * (self.capacity - self.held - self.link.credit) >= self.capacity:
            target = self.target
            missing = target - self.link.credit
            # Half of what is in reach: of the window, or of the fewer that the bytes allow.
            if missing > 0 and 2 * missing >= min(self.capacity, target + self.held):
                self.link.grant(target)

    def close(self) -> None:
        """Take back what was not used: no further message is wanted."""
        if self.open:
            self.open = False
            if self.link.attached and self.link.credit:
                self.link.grant(0)


class SharedSlots:
    """Hands the free slots of a route without prefetch to its links, in turn.

    The credit over all links is never more than the slots that are free, so a message that
    arrives can run at once, and one that cannot stays with the peer, for others to have. A
    link that sits on credit without using it, while others have none, is asked for it back
    (``drain``, Part 2 §2.6.7) by :meth:`rotate`.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: Messages taken and not yet freed.
        self.held = 0
        #: Links without credit, the one that waits longest first.
        self._waiting: deque[ReceivingLink] = deque()
        #: Links with credit, the one that has had it longest first, and how much.
        self._granted: dict[ReceivingLink, int] = {}
        self._outstanding = 0
        self._draining: set[ReceivingLink] = set()
        self._open = True

    @property
    def starved(self) -> bool:
        """Whether a link waits for credit that other links have and do not use."""
        return self._open and bool(self._waiting) and bool(self._granted)

    def add(self, link: ReceivingLink) -> None:
        self._waiting.append(link)
        self._share()

    def remove(self, link: ReceivingLink) -> None:
        """The link is gone, and its unused credit with it."""
        if link in self._granted:
            self._outstanding -= self._granted.pop(link)
            self._draining.discard(link)
        elif link in self._waiting:
            self._waiting.remove(link)
        self._share()

    def took(self, link: ReceivingLink, count: int) -> None:
        """*count* messages have arrived on *link*; their credit is used."""
        self.held += count
        self._used(link)

    def freed(self, count: int) -> None:
        """*count* messages have been finished: that many slots are free again."""
        self.held -= count
        self._share()

    def flowed(self, link: ReceivingLink) -> None:
        """The peer of *link* answered a drain, maybe by giving credit back."""
        self._draining.discard(link)
        self._used(link)
        self._share()

    def rotate(self) -> None:
        """Ask the link that has had unused credit longest to use it or give it back."""
        for link in self._granted:
            if link not in self._draining:
                self._draining.add(link)
                link.drain()
                return

    def close(self) -> None:
        """Take back what was not used: no further message is wanted."""
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
            # In equal parts over those that wait, at least one each.
            share = max(1, free // len(self._waiting))
            link = self._waiting.popleft()
            free -= share
            self._give(link, share)
        if free > 0:
            # Nobody waits: whoever has some may have the rest.
            for link in self._granted:
                if link not in self._draining:
                    self._give(link, self._granted[link] + free)
                    return

    def _give(self, link: ReceivingLink, credit: int) -> None:
        self._outstanding += credit - self._granted.get(link, 0)
        self._granted[link] = credit
        link.grant(credit)
