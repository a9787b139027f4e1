"""Changes that are written together, and the calls to make once they are on the disk. Compiled: each durable message
passes through two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...outcomes import Error
from ...stores.changes import ChangeSet
from ..entries import Entry, head_of

if TYPE_CHECKING:
    from ...stores.base import Store

#: Changes that are added to a batch, or followed up, before the event loop gets its turn.
CHANGES_OF_A_TURN: Final = 500
#: Messages that are put or removed at once, at most.
_MESSAGES_OF_A_CHANGE: Final = 100


class Appended(Protocol):
    """Records of logs, whose offsets are known only when they are written."""

    def write(self, batch: ChangeSet) -> None:
        """Add the records to *batch*; may be called again with another batch."""

    def verify(self, store: Store) -> None:
        """Find out whether *store* has the records, after a commit of unknown result. Called in the
        worker thread; if it has them, :meth:`write` adds nothing afterwards."""


class Gathering(Protocol):
    """Queue that can hold back deliveries while many messages are put, since delivering takes turns."""

    def gather(self) -> None:
        """Put messages without delivering them, until :meth:`deliver_gathered` in the same turn."""

    def deliver_gathered(self) -> None:
        """Deliver what was put in the meantime."""


class CallOwner(Protocol):
    """Queue, topic or log that calls belong to."""

    @property
    def gathering(self) -> Gathering | None:
        """The queue; None if the object is none, and hands messages out by itself."""


class Unit:
    """Changes that are written together, and the calls to make afterwards.

    Args:
        refused: Called instead of the calls given to :meth:`then` if the changes cannot be stored.
            Without it, writing is repeated until there is room: for changes that make room.
    """

    __slots__ = (
        *("_changes", "_follow", "_more", "_removed", "_removed_at", "_removed_from", "_undo"),
        *("appended", "gathers", "letters", "on_awaited", "refused"),
    )

    def __init__(self, refused: Callable[[Error], None] | None = None) -> None:
        self.refused = refused
        #: Called when the first call is given to :meth:`then`.
        self.on_awaited: Callable[[], None] | None = None
        #: Number of dead letters in it, each copy for a durable subscription counted, if it is the unit
        #: of a transaction.
        self.letters = 0
        #: Whether all of its messages are put before the first of them is delivered. A unit of very
        #: many changes does so in any case; messages that are not stored do not count as changes.
        self.gathers = False
        #: Records for logs.
        self.appended: list[Appended] = []
        #: Calls to make afterwards, each with its owner: a queue, topic or log, or None.
        self._follow: list[tuple[Callable[[], None], CallOwner | None]] = []
        self._undo: list[Callable[[], None]] = []
        self._changes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        #: Changes beyond those: an element for messages stands for several.
        self._more = 0
        #: Messages of a node that the last element removes, if it has this index.
        self._removed: list[int] = []
        self._removed_from = 0
        self._removed_at = -1

    def then(
        self,
        call: Callable[[], None],
        undo: Callable[[], None] | None = None,
        owner: CallOwner | None = None,
    ) -> None:
        """Call *call* once this unit is on the disk; several calls are made in order.

        *undo* is called by :meth:`undo` instead if the unit is never written. *owner* is the queue, topic
        or log that the call belongs to, which alone fails if the call raises.
        """
        self._follow.append((call, owner))
        if undo is not None:
            self._undo.append(undo)
        if self.on_awaited is not None:
            self.on_awaited()
            self.on_awaited = None

    def undo(self) -> None:
        """Revert the preparations for a unit that has been refused."""
        for call in self._undo:
            call()

    def kept(self, on_fault: Callable[[object, Exception], object]) -> None:
        """Make the calls given to :meth:`then`, as the unit is on the disk. An exception of one call
        prevents no other: *on_fault* gets it afterwards, with its owner, once all have been answered."""
        faults: list[tuple[CallOwner | None, Exception]] = []
        gathering: dict[Gathering, None] = {}
        if self.gathers or len(self._changes) + self._more > CHANGES_OF_A_TURN:
            # Put all messages into their queues before the first is delivered: delivering takes turns.
            for _, owner in self._follow:
                queue = None if owner is None else owner.gathering
                if queue is not None:
                    gathering[queue] = None
        for queue in gathering:
            queue.gather()
        for call, owner in self._follow:
            try:
                call()
            except Exception as error:
                faults.append((owner, error))
        for queue in gathering:
            queue.deliver_gathered()
        self._forget_calls()
        for owner, fault in faults:
            on_fault(owner, fault)

    def refuse(self, error: Error) -> None:
        """Call ``refused``, if this unit can be refused, because it will not be written."""
        refused = self.refused
        if refused is not None:
            try:
                refused(error)
            finally:
                self._forget_calls()

    def _forget_calls(self) -> None:
        """Drop the calls, which refer to this unit, to messages and to links: avoid a reference cycle."""
        self.refused = None
        self._follow = []
        self._undo = []
        self._changes = []
        self._more = 0
        self._removed_at = -1

    def put_entries(self, node: int, entries: list[Entry]) -> None:
        """Put *entries*, which must not change before this unit is written."""
        for at in range(0, len(entries), _MESSAGES_OF_A_CHANGE):
            some = entries[at : at + _MESSAGES_OF_A_CHANGE]
            self._changes.append((_put_entries, (node, some)))
            self._more += len(some) - 1

    def put(self, node: int, sequence: int, head: bytes, payload: bytes) -> None:
        self._changes.append((ChangeSet.put, (node, sequence, head, payload)))

    def spill(self, node: int, sequence: int, head: bytes, payload: bytes) -> None:
        """Put a message that need not survive the process."""
        self._changes.append((_spill, (node, sequence, head, payload)))

    def piece(self, node: int, sequence: int, index: int, data: bytes) -> None:
        self._changes.append((ChangeSet.piece, (node, sequence, index, data)))

    def move(self, node: int, sequence: int, to: int, to_sequence: int, head: bytes) -> None:
        self._changes.append((ChangeSet.move, (node, sequence, to, to_sequence, head)))

    def update(self, node: int, sequence: int, head: bytes) -> None:
        self._changes.append((ChangeSet.update, (node, sequence, head)))

    def remove(self, node: int, sequence: int) -> None:
        removed = self._removed
        at = len(self._changes) - 1
        if (
            at == self._removed_at
            and node == self._removed_from
            and len(removed) < _MESSAGES_OF_A_CHANGE
        ):
            removed.append(sequence)
            self._more += 1
            return
        self._removed = [sequence]
        self._removed_from = node
        self._removed_at = at + 1
        self._changes.append((_remove_all, (node, self._removed)))

    def put_fact(self, kind: str, key: bytes, value: bytes) -> None:
        self._changes.append((ChangeSet.put_fact, (kind, key, value)))

    def remove_fact(self, kind: str, key: bytes) -> None:
        self._changes.append((ChangeSet.remove_fact, (kind, key)))

    def clear(self, node: int) -> None:
        self._changes.append((ChangeSet.clear, (node,)))

    def drop(self, node: int, first: int, last: int) -> None:
        self._changes.append((ChangeSet.drop, (node, first, last)))

    def append(self, records: Appended) -> None:
        """Add *records* to their logs."""
        self.appended.append(records)

    def trim(self, log: int, offset: int) -> None:
        self._changes.append((ChangeSet.trim, (log, offset)))

    def __bool__(self) -> bool:
        return bool(self._changes or self.appended)

    @property
    def is_awaited(self) -> bool:
        """Whether there are calls to make when it is written or refused."""
        return self.refused is not None or bool(self._follow)

    def __len__(self) -> int:
        return len(self._changes) + self._more + len(self.appended)

    def write(self, batch: ChangeSet) -> None:
        """Add the changes to *batch*."""
        for change, args in self._changes:
            change(batch, *args)
        for records in self.appended:
            records.write(batch)

    def writing(self, batch: ChangeSet) -> Iterator[int]:
        """Add the changes to *batch*, a few in each step of the iterator, which yields their number."""
        for change, args in self._changes:
            change(batch, *args)
            yield len(args[1]) if change is _put_entries or change is _remove_all else 1
        for records in self.appended:
            records.write(batch)
            yield 1


def _put_entries(batch: ChangeSet, node: int, entries: list[Entry]) -> None:
    for entry in entries:
        batch.put(node, entry.sequence, head_of(entry), entry.payload, spilled=not entry.durable)


def _remove_all(batch: ChangeSet, node: int, sequences: list[int]) -> None:
    for sequence in sequences:
        batch.remove(node, sequence)


def _spill(batch: ChangeSet, node: int, sequence: int, head: bytes, payload: bytes) -> None:
    batch.put(node, sequence, head, payload, spilled=True)
