"""Ledger of a queue: writes its durable messages and their changes to the journal, in units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ...compiling import mypyc_attr
from ...fronts.base import IncomingDelivery
from ...outcomes import ACCEPTED, Error, Outcome
from ..entries import Entry, head_of
from ..queue.queue import MessageQueue
from .answers import no_outcomes, refuse
from .journal import Journal
from .units import Unit


@mypyc_attr(allow_interpreted_subclasses=True)
class QueueLedger:
    """Storage of the durable messages of *queue*, which has the node number *number* in the store.

    A message is put into its queue when it is on the disk, and later messages wait behind it: consumers
    and counters see only messages that cannot be lost any more, and the order is kept.
    """

    #: A message is stored once, and waits for no turn (:class:`~amqp_rt.broker.producers.IntakeLedger`).
    copies: Final = 1
    line: Final = None

    def __init__(
        self, journal: Journal, number: int, queue: MessageQueue, address: str = ""
    ) -> None:
        self.number = number
        self.address = address
        self._journal = journal
        self._queue = queue
        #: Sequence numbers of messages that have left the queue, and are removed from the store
        #: together with storing their dead letters.
        self._leaving: set[int] = set()

    @property
    def pieces(self) -> QueueLedger:
        """Writer of messages that arrive in pieces."""
        return self

    def wants(self, entry: Entry) -> bool:
        """Return whether *entry* has to be staged: it is durable, a message before it is waiting, or
        memory has no room for it."""
        queue = self._queue
        return (
            entry.durable
            or queue.pending > 0
            or queue.bytes > queue.paging.bytes_here_max
            or queue.available > queue.paging.messages_here_max
        )

    def reserve(self, entry: Entry) -> None:
        """Reserve the position of *entry*; :meth:`stage` follows."""
        self._queue.reserve(entry)

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Put *entries* once they are stored, and then answer *deliveries*, which brought them.

        *done* is called last, whether they were stored or refused. *note* adds to the unit the changes
        for the deliveries themselves.
        """

        def put() -> None:
            for entry in entries:
                self._queue.put(entry)

        def kept() -> None:
            for delivery in deliveries:
                delivery.settle(ACCEPTED)
            if done is not None:
                done()

        def refused(error: Error) -> None:
            self._journal.log_refused(len(entries), self.address, error, self._queue.wall())
            unit.undo()
            for entry in entries:
                entry.stored = False
                self._queue.cancel_reserved(entry)
            for delivery in deliveries:
                refuse(delivery, error)
            if done is not None:
                done()

        unit = Unit(refused)
        unit.then(put, None, self._queue)
        unit.then(kept)
        self._write(unit, entries)
        if note is not None:
            note(unit, deliveries)
        self._journal.add(unit)

    def receive(self, entries: list[Entry]) -> None:
        """Put *entries* once they are stored; they are in the broker already and cannot be refused.

        They are written together with the next changes, such as their removal from another node.
        """
        unit = self._journal.loose
        queue = self._queue
        reserve = queue.reserve
        for entry in entries:
            reserve(entry)
        self._write(unit, entries)

        def put() -> None:
            for entry in entries:
                queue.put(entry)

        def undo() -> None:
            for entry in entries:
                entry.stored = False
                queue.cancel_reserved(entry)

        unit.then(put, undo, queue)

    def _write(self, unit: Unit, entries: list[Entry]) -> None:
        """Add those of *entries* to *unit* that have to be stored.

        They have their positions, and are encoded when the unit is written: no consumer has them before.
        """
        paged_from = self._queue.paging.first
        kept = [each for each in entries if each.durable or each.sequence >= paged_from]
        plain = [each for each in kept if not each.pieces]
        unit.put_entries(self.number, plain)
        if len(plain) < len(kept):
            for entry in kept:
                if entry.pieces:
                    self._keep(unit, entry)
        for entry in kept:
            entry.stored = True

    # --- Changes of the queue (queues.Ledger) ---

    def remove(self, entry: Entry) -> None:
        unit = self._journal.loose
        unit.remove(self.number, entry.sequence)
        if entry.sequence >= self._queue.paging.first:
            unit.then(partial(self._queue.paging.removed, entry.sequence), None, self._queue)

    def leave(self, entry: Entry) -> None:
        """Keep *entry*, which leaves the queue, in the store until :meth:`remove_left`."""
        entry.stored = False
        self._leaving.add(entry.sequence)

    def remove_left(self, entry: Entry) -> None:
        """Remove *entry*, which has left the queue."""
        self._leaving.discard(entry.sequence)
        self.remove(entry)

    def update(self, entry: Entry) -> None:
        self._journal.loose.update(self.number, entry.sequence, head_of(entry))

    def rewrite(self, entry: Entry) -> None:
        self._keep(self._journal.loose, entry)

    def _keep(self, unit: Unit, entry: Entry) -> None:
        number = self.number
        head = head_of(entry)
        if not entry.pieces:
            keep = unit.put if entry.durable else unit.spill
            keep(number, entry.sequence, head, entry.payload)
        elif entry.origin == (number, entry.sequence):
            unit.update(number, entry.sequence, head)
        elif entry.origin is not None:
            # The entry comes from another node, which removes it in the same unit.
            unit.move(*entry.origin, number, entry.sequence, head)
            entry.origin = (number, entry.sequence)

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        unit = self._journal.loose
        # The payload of a message in pieces is not in memory, so that it cannot be put again.
        spared = self._leaving.union(entry.sequence for entry in kept if entry.pieces)
        for place in sorted(place for place in spared if first <= place <= last):
            if first < place:
                unit.drop(self.number, first, place - 1)
            first = place + 1
        if first <= last:
            unit.drop(self.number, first, last)
        for entry in kept:
            if not entry.pieces:
                self._keep(unit, entry)

    # --- Messages stored in pieces (pieces.Arrival) ---

    def expect(self, entry: Entry) -> None:
        """Reserve the position of *entry*, whose body has not arrived yet; :meth:`complete` or
        :meth:`cancel` follows."""
        self._queue.large.expect(entry)
        entry.origin = (self.number, entry.sequence)

    def write(
        self,
        entry: Entry,
        pieces: list[bytes],
        kept: Callable[[], None],
        refused: Callable[[Error], None],
    ) -> None:
        """Store the next *pieces* of *entry*; call *kept* or *refused* afterwards."""
        unit = Unit(refused)
        for piece in pieces:
            unit.piece(self.number, entry.sequence, entry.pieces, piece)
            entry.pieces += 1
            self._queue.large.grow(entry, len(piece))
        unit.then(kept)
        self._journal.add(unit)

    def complete(
        self,
        entry: Entry,
        kept: Callable[[], None],
        refused: Callable[[Error], None],
        note: Callable[[Unit], None],
    ) -> None:
        """Store the head of *entry*, whose pieces have all been written, which makes it a message.
        *note* adds to the unit the changes for its delivery."""

        def failed(error: Error) -> None:
            unit.undo()
            self.cancel(entry)
            refused(error)

        unit = Unit(failed)
        self._put_head(unit, entry)
        note(unit)
        unit.then(partial(self._queue.large.arrive, entry), None, self._queue)
        unit.then(kept)
        self._journal.add(unit)

    def make(self, entry: Entry) -> None:
        """Make *entry* a message with the next changes; all of its pieces are stored."""
        unit = self._journal.loose
        self._put_head(unit, entry)
        unit.then(
            partial(self._queue.large.arrive, entry), partial(self.cancel, entry), self._queue
        )

    def _put_head(self, unit: Unit, entry: Entry) -> None:
        entry.stored = True
        payload = b"" if entry.pieces else entry.payload
        unit.put(self.number, entry.sequence, head_of(entry), payload)

    def cancel(self, entry: Entry) -> None:
        """Drop *entry*, the rest of which does not arrive."""
        entry.stored = False
        self._journal.loose.remove(self.number, entry.sequence)
        self._queue.large.cancel(entry)

    def settle(self, delivery: Any, outcome: Outcome) -> None:
        failure = self._journal.failure
        if failure is None:
            self._journal.loose.then(lambda: delivery.settle(outcome))
        else:
            # Without an outcome its peer would wait for ever.
            delivery.link.detach(no_outcomes(failure))
