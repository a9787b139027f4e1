"""Duplicate detection: a queue remembers for some time the message-ids that it has accepted.

A sender that did not receive the outcome of a message sends it again, possibly on another link and
after a restart, where delivery-tags do not help. A queue with such a window accepts the duplicate
without storing it, but only once the original is kept: a duplicate of a message that is still being
written waits for that, and is rejected if the original is.

Ids are kept as digests, so that the sender does not choose their size. The store has one row of ids
for each batch in which durable messages were kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Final
from uuid import UUID

from ...errors import DecodeError
from ...fronts.base import IncomingDelivery
from ...limits import DEFAULT_LIMITS, Limits
from ...message import MESSAGE_FORMAT
from ...outcomes import ACCEPTED, Error, rejected
from ..entries import Entry
from ..filtering.views import MessageView
from .facts import DUPLICATES, ID_BYTES, place_key, place_of
from .journal import Journal
from .units import Unit

_FIRST_REFUSED: Final = rejected(
    "amqp:resource-limit-exceeded",
    "it has the message-id of one that could not be kept: send it again",
)
_IN_DOUBT: Final = Error(
    "amqp:internal-error",
    "whether the message is kept is not known, because the store was given up",
)


class Arrived:
    """Ids of messages that arrived together and are kept or refused together."""

    __slots__ = ("_durable", "_waiting", "_window", "at", "ids", "key")

    def __init__(self, window: Duplicates, at: float) -> None:
        self._window = window
        self.at = at
        self.ids: list[bytes] = []
        self._durable: list[bytes] = []
        #: Key of the ids in the store, if they are stored.
        self.key: bytes | None = None
        #: Deliveries of duplicates to be settled once it is known whether the originals are kept;
        #: None when it is.
        self._waiting: list[IncomingDelivery] | None = []

    @property
    def pending(self) -> bool:
        """Whether the messages are still being written."""
        return self._waiting is not None

    def add(self, identity: bytes, *, durable: bool) -> None:
        """Add the id of an arrived message; with *durable* the id outlives the process too."""
        self.ids.append(identity)
        if durable:
            self._durable.append(identity)
        self._window.add(identity, self)

    def note(self, unit: Unit) -> None:
        """Add the ids of durable messages to *unit*, which keeps the messages."""
        if self._durable:
            self.key = self._window.next_key()
            DUPLICATES.put(unit, self.key, (self.at, self._durable))
        unit.then(self.kept, self.refused)

    def kept(self) -> None:
        """Accept the duplicates that waited for the messages, which are kept now."""
        waiting, self._waiting = self._waiting, None
        for delivery in waiting or ():
            delivery.settle(ACCEPTED)

    def refused(self) -> None:
        """Forget the ids of messages that were not kept, and reject their waiting duplicates.

        If the store was given up, the links of the duplicates are detached with an error instead.
        """
        waiting, self._waiting = self._waiting, None
        self.key = None
        self._window.drop(self)
        store_failed = self._window.store_failed
        for delivery in waiting or ():
            if store_failed:
                # The original may be present when the store is opened again.
                delivery.link.detach(_IN_DOUBT)
            else:
                delivery.settle(_FIRST_REFUSED)

    def answer(self, delivery: IncomingDelivery) -> None:
        """Accept *delivery*, a duplicate of one of these messages, as soon as they are kept."""
        if self._waiting is None:
            delivery.settle(ACCEPTED)
        else:
            self._waiting.append(delivery)


class Duplicates:
    """Duplicate-detection window of one queue.

    Args:
        window_s: Seconds for which ids are remembered.
        wall: Wall clock, which goes on while the broker is stopped.
        journal: Keeps the ids; None to keep them in memory only.
        number: The queue's number in the store, 0 if it has none.
        limits: ``duplicates_max`` bounds the number of ids; beyond it the oldest are forgotten
            early.
    """

    def __init__(
        self,
        window_s: float,
        wall: Callable[[], float],
        journal: Journal | None = None,
        number: int = 0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.window_s = window_s
        self._wall = wall
        self._journal = journal if number else None
        self._number = number
        self._limits = limits
        self._known: dict[bytes, Arrived] = {}
        #: In the order of arrival.
        self._arrived: deque[Arrived] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def store_failed(self) -> bool:
        """Whether the store has failed, so that the last messages may or may not have been kept."""
        return self._journal is not None and self._journal.failure is not None

    def identify(self, entry: Entry) -> bytes | None:
        """Return the digest of the message-id of *entry*; None if it has none or it is malformed.

        Ids of the four types differ (§3.2.4), and so do ids of durable and of other messages: an
        original in memory must not answer for a duplicate that has to outlive the process.
        """
        if entry.message_format != MESSAGE_FORMAT:
            return None
        try:
            found = MessageView(entry, self._limits).properties().message_id
        except DecodeError:
            return None
        if found is None:
            return None
        if isinstance(found, UUID):
            kind, octets = b"u", found.bytes
        elif isinstance(found, bytes):
            kind, octets = b"b", bytes(found)
        elif isinstance(found, str):
            kind, octets = b"s", str(found).encode("utf-8", "surrogatepass")
        else:
            kind, octets = b"n", int(found).to_bytes(8, "big")
        person = kind + (b"d" if entry.durable else b"")
        return blake2b(octets, digest_size=ID_BYTES, person=person).digest()

    def find(self, identity: bytes | None) -> Arrived | None:
        """Return the batch in which this id arrived, or None if it is not in the window."""
        if identity is None:
            return None
        self.expire()
        return self._known.get(identity)

    def begin(self, *, kept: bool = False) -> Arrived:
        """Begin a batch of ids that arrive together; *kept* if their messages are kept already."""
        self._make_room()
        arrived = Arrived(self, self._wall())
        if kept:
            arrived.kept()
        self._arrived.append(arrived)
        return arrived

    def add(self, identity: bytes, arrived: Arrived) -> None:
        """Record that this id arrived with *arrived*."""
        self._known[identity] = arrived

    def drop(self, arrived: Arrived) -> None:
        """Forget the ids of *arrived*, whose messages were not kept."""
        self._remove(arrived)
        if arrived in self._arrived:
            self._arrived.remove(arrived)

    def next_key(self) -> bytes:
        """Return a new key for the store."""
        self._next += 1
        return place_key(self._number, self._next)

    def restore(self, key: bytes, value: bytes) -> None:
        """Restore a batch of ids from the store. Must be called in the order of the keys."""
        self._next = place_of(key)
        at, ids = DUPLICATES.decode(value)
        self._make_room()
        arrived = Arrived(self, at)
        arrived.kept()
        arrived.key = key
        self._arrived.append(arrived)
        for each in ids:
            arrived.add(each, durable=False)

    def expire(self) -> None:
        """Forget ids older than the window."""
        arrived = self._arrived
        until = self._wall() - self.window_s
        while arrived and arrived[0].at <= until and not arrived[0].pending:
            self._forget(arrived.popleft())

    def clear(self) -> None:
        """Forget all ids."""
        while self._arrived:
            self._forget(self._arrived.popleft())

    def _make_room(self) -> None:
        arrived = self._arrived
        while arrived and len(self._known) >= self._limits.duplicates_max:
            if arrived[0].pending:
                break
            self._forget(arrived.popleft())

    def _forget(self, arrived: Arrived) -> None:
        self._remove(arrived)
        if arrived.key is not None and self._journal is not None:
            DUPLICATES.remove(self._journal.loose, arrived.key)
            arrived.key = None

    def _remove(self, arrived: Arrived) -> None:
        for identity in arrived.ids:
            if self._known.get(identity) is arrived:
                del self._known[identity]
