"""Messages of one entity: by number, by place and by lock token, with their counts and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

from amqp_rt.broker.building import Memory

from .messages import PARTITION_SHIFT, partition_of
from .numbers import Numbers
from .stored import State, Stored

_PLACE: Final = (1 << PARTITION_SHIFT) - 1


def place_of(number: int) -> int:
    """Return the place in the order of arrival: a sequence number without its partition."""
    return number & _PLACE


class Shelf:
    """Messages of one entity, in every state.

    Args:
        memory: Memory account that all entities share.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        #: Bytes of the messages, and of those for which there is a reservation.
        self.bytes = 0
        self.reserved = 0
        #: Number of messages in each state, locked ones included.
        self.counts = [0] * len(State)
        #: Places of the active messages that are not locked, unless the entity has sessions.
        self.ready = Numbers()
        #: Numbers of all messages.
        self.numbers = Numbers()
        #: Locked messages, and the number of those that are active.
        self.tokens: dict[UUID, Stored] = {}
        self.locked_active = 0
        self._at: dict[int, Stored] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._at)

    def assign(self, stored: Stored, *, partitioned: bool) -> None:
        """Give *stored* the next sequence number, which no other message of the entity ever has."""
        self._last += 1
        stored.number = self._last
        if partitioned:
            stored.partition = partition_of(stored)
            stored.number |= stored.partition << PARTITION_SHIFT

    def add(self, stored: Stored) -> None:
        """Add *stored*, which has a number."""
        self._at[place_of(stored.number)] = stored
        self.numbers.add(stored.number)
        self.counts[stored.state] += 1
        self.grow(stored.size)

    def remove(self, stored: Stored) -> None:
        """Remove *stored*."""
        del self._at[place_of(stored.number)]
        self.numbers.discard(stored.number)
        self.counts[stored.state] -= 1
        self.grow(-stored.size)

    def grow(self, size: int) -> None:
        """Account for *size* bytes more."""
        self.bytes += size
        self.memory.held += size

    def reserve(self, size: int) -> None:
        """Reserve *size* bytes more for messages that are on their way."""
        self.reserved += size
        self.memory.held += size

    def change_state(self, stored: Stored, state: State) -> None:
        """Set the state of *stored*."""
        self.counts[stored.state] -= 1
        stored.state = state
        self.counts[state] += 1

    def lock(self, stored: Stored, token: UUID) -> None:
        """Give *stored* the lock token *token*."""
        stored.token = token
        self.tokens[token] = stored
        self.locked_active += stored.state == State.ACTIVE

    def unlock(self, stored: Stored) -> None:
        """Take the lock token of *stored*, if it has one."""
        if stored.token is not None:
            del self.tokens[stored.token]
            stored.token = None
            self.locked_active -= stored.state == State.ACTIVE

    def at(self, place: int) -> Stored:
        """Return the message at *place*, which has one."""
        return self._at[place]

    def find(self, number: int) -> Stored | None:
        """Return the message with the sequence number *number*, None if there is none."""
        found = self._at.get(place_of(number))
        return found if found is not None and found.number == number else None

    def clear(self) -> Iterator[Stored]:
        """Remove all messages at once; return an iterator that frees one at each step."""
        self.memory.held -= self.bytes + self.reserved
        self.bytes = self.reserved = 0
        self.counts = [0] * len(State)
        self.ready = Numbers()
        self.numbers = Numbers()
        self.tokens.clear()
        self.locked_active = 0
        removed, self._at = self._at, {}
        return _popped(removed)


def _popped(removed: dict[int, Stored]) -> Iterator[Stored]:
    while removed:
        yield removed.popitem()[1]
