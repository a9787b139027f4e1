"""Messages that come twice: a queue remembers for a while which message-ids it has had (B13, Z11).

A sender that never heard what became of a message sends it again, perhaps on another link and after
a restart, where delivery-tags do not help. In a queue with such a window the second one is accepted
like the first, and not put. It is accepted only when the first is safe: a duplicate of a message
that is still being written waits for it, and is refused with it.

Ids are kept as digests, so that their size is not the sender's choice, and in the store a row for
each batch in which durable messages were kept.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

from ..errors import DecodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import ACCEPTED, Error, rejected
from .entries import Entry
from .journal import Journal, Unit
from .views import MessageView

#: The kind of fact that some ids of a queue are.
DUPLICATES: Final = "duplicates"

_DIGEST: Final = 16
_AT: Final = struct.Struct(">d")

_FIRST_REFUSED: Final = rejected(
    "amqp:resource-limit-exceeded",
    "it has the message-id of one that could not be kept: send it again",
)
_IN_DOUBT: Final = Error(
    "amqp:internal-error",
    "whether the message is kept is not known, because the store was given up",
)


class Arrived:
    """Ids of messages that came together, and are kept together if they are."""

    __slots__ = ("_durable", "_waiting", "_window", "at", "ids", "key")

    def __init__(self, window: Duplicates, at: float) -> None:
        self._window = window
        self.at = at
        self.ids: list[bytes] = []
        self._durable: list[bytes] = []
        #: Where the store has them, if it does.
        self.key: bytes | None = None
        #: Deliveries of duplicates, as long as nobody knows whether the first ones are kept; None
        #: once they are.
        self._waiting: list[Any] | None = []

    @property
    def pending(self) -> bool:
        """The messages are being written."""
        return self._waiting is not None

    def add(self, identity: bytes, *, durable: bool) -> None:
        """A message with this id has come; if it is *durable* the id outlives the process with it."""
        self.ids.append(identity)
        if durable:
            self._durable.append(identity)
        self._window.learn(identity, self)

    def note(self, unit: Unit) -> None:
        """Let *unit*, which keeps the messages, keep their ids."""
        if self._durable:
            self.key = self._window.next_key()
            unit.keep(DUPLICATES, self.key, _AT.pack(self.at) + b"".join(self._durable))
        unit.then(self.kept, self.refused)

    def kept(self) -> None:
        """The messages are safe: so are those that came again meanwhile."""
        waiting, self._waiting = self._waiting, None
        for delivery in waiting or ():
            delivery.settle(ACCEPTED)

    def refused(self) -> None:
        """The messages are not kept: they may come again, and what came already was nothing."""
        waiting, self._waiting = self._waiting, None
        self.key = None
        self._window.drop(self)
        given_up = self._window.given_up
        for delivery in waiting or ():
            if given_up:
                # The first one may be there when the store is opened again.
                delivery.link.detach(_IN_DOUBT)
            else:
                delivery.settle(_FIRST_REFUSED)

    def answer(self, delivery: Any) -> None:
        """Accept *delivery*, which brought one of these messages again, as soon as they are safe."""
        if self._waiting is None:
            delivery.settle(ACCEPTED)
        else:
            self._waiting.append(delivery)


class Duplicates:
    """The ids that one queue has had lately.

    Args:
        window_s: Seconds for which they are remembered.
        wall: The clock of that: it goes on while the broker is not there.
        journal: What keeps them, None for nothing.
        number: The queue's number in the store.
        limits: ``duplicates_max`` bounds how many are remembered: beyond it the first go early.
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
        #: In the order in which they came.
        self._arrived: deque[Arrived] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def given_up(self) -> bool:
        """Nothing is kept any more, and what was kept last is not known."""
        return self._journal is not None and self._journal.failure is not None

    def identify(self, entry: Entry) -> bytes | None:
        """What stands for the message-id of *entry*; None if it has none that could be read.

        The four types of ids are different (§3.2.4), and so are a durable and another message: what
        was safe only in memory says nothing of one that has to outlive it.
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
        return blake2b(octets, digest_size=_DIGEST, person=person).digest()

    def find(self, identity: bytes | None) -> Arrived | None:
        """With what the first message of this id came, if that was not too long ago."""
        if identity is None:
            return None
        self.expire()
        return self._known.get(identity)

    def begin(self, *, kept: bool = False) -> Arrived:
        """Ids are to be added of messages that come together; *kept* if they are safe already."""
        self._make_room()
        arrived = Arrived(self, self._wall())
        if kept:
            arrived.kept()
        self._arrived.append(arrived)
        return arrived

    def learn(self, identity: bytes, arrived: Arrived) -> None:
        """This id has come with *arrived*."""
        self._known[identity] = arrived

    def drop(self, arrived: Arrived) -> None:
        """The messages of *arrived* have not come."""
        self._unlearn(arrived)
        if arrived in self._arrived:
            self._arrived.remove(arrived)

    def next_key(self) -> bytes:
        """A key in the store."""
        self._next += 1
        return self._number.to_bytes(4, "big") + self._next.to_bytes(8, "big")

    def recall(self, key: bytes, value: bytes) -> None:
        """The store has kept this; the keys rise."""
        self._next = int.from_bytes(key[4:], "big")
        (at,) = _AT.unpack_from(value)
        self._make_room()
        arrived = Arrived(self, at)
        arrived.kept()
        arrived.key = key
        self._arrived.append(arrived)
        for start in range(_AT.size, len(value), _DIGEST):
            arrived.add(value[start : start + _DIGEST], durable=False)

    def expire(self) -> None:
        """Forget what came too long ago."""
        arrived = self._arrived
        until = self._wall() - self.window_s
        while arrived and arrived[0].at <= until and not arrived[0].pending:
            self._forget(arrived.popleft())

    def clear(self) -> None:
        """Forget everything."""
        while self._arrived:
            self._forget(self._arrived.popleft())

    def _make_room(self) -> None:
        arrived = self._arrived
        while arrived and len(self._known) >= self._limits.duplicates_max:
            if arrived[0].pending:
                break
            self._forget(arrived.popleft())

    def _forget(self, arrived: Arrived) -> None:
        self._unlearn(arrived)
        if arrived.key is not None and self._journal is not None:
            self._journal.loose.forget(DUPLICATES, arrived.key)
            arrived.key = None

    def _unlearn(self, arrived: Arrived) -> None:
        for identity in arrived.ids:
            if self._known.get(identity) is arrived:
                del self._known[identity]
