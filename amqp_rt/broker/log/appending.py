"""Appending to a log: the entrance of each link, and the records that are written together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ...fronts.base import IncomingDelivery
from ...outcomes import Error
from ...stores.base import ChangeSet, Store
from ..durable.answers import accept, refuse
from ..durable.units import Unit
from ..entries import Entry
from .annotations import partition_key
from .partitions import Partition
from .records import RECORD_COST, Record, size_of

if TYPE_CHECKING:
    from .log import MessageLog


class Entrance:
    """Entry of one link to a log, for one partition or all in turn (broker.producers).

    Messages are both put and stored here (:class:`~amqp_rt.broker.producers.IntakeLedger`).
    """

    #: A record is stored once and whole, and waits for no turn.
    copies: Final = 1
    line: Final = None
    pieces: Final = None

    def __init__(self, log: MessageLog, partition: int | None = None) -> None:
        self.log = log
        self._partition = partition
        self._turn = -1

    @property
    def deleted(self) -> bool:
        """Whether the log has been deleted."""
        return self.log.deleted

    def fits(self, size: int) -> bool:
        """Return whether the log has room for *size* bytes."""
        return self.log.fits(size)

    def why_full(self, name: str, size: int) -> str:
        """Return why the log has no room for a message of *size* bytes."""
        return self.log.why_full(name, size)

    def records(self, entries: list[Entry]) -> dict[Partition, list[Record]]:
        """Return the records for *entries*, which arrive now, by their partitions."""
        log = self.log
        wall = log.wall()
        only = 0 if len(log.partitions) == 1 else self._partition
        if only is not None:
            partition = log.partitions[only]
            return {partition: _records(entries, partition.now(wall))}
        chosen: dict[int, list[Entry]] = {}
        for entry in entries:
            chosen.setdefault(self._choose(entry), []).append(entry)
        found: dict[Partition, list[Record]] = {}
        for index, some in chosen.items():
            partition = log.partitions[index]
            found[partition] = _records(some, partition.now(wall))
        return found

    def _choose(self, entry: Entry) -> int:
        """Return the index of the partition for *entry*: by its key, or else the next one in turn."""
        count = len(self.log.partitions)
        key = partition_key(entry, self.log.limits)
        if key is not None:
            return self.log.key_hash(key) % count
        self._turn = (self._turn + 1) % count
        return self._turn

    def put(self, entry: Entry) -> None:
        """Append *entry* in memory only."""
        if not self.log.deleted:
            for partition, records in self.records([entry]).items():
                self.log.extend(partition, records)

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for *entry*, which may follow when its transaction is discharged."""
        self.reserve(entry)

    def release_room(self, entry: Entry) -> None:
        """Release the room of *entry*, which is put now, or :meth:`notify_waiting` follows."""
        size = len(entry.payload) + RECORD_COST
        self.log.pending -= size
        self.log.memory.held -= size

    def notify_waiting(self) -> None:
        """Notify the waiting senders of room."""
        self.log.notify_waiting()

    def wants(self, entry: Entry) -> bool:
        """Return True: even messages that are not durable are stored, so that offsets have no gaps."""
        return True

    def reserve(self, entry: Entry) -> None:
        """Reserve room for *entry*; :meth:`stage` follows."""
        size = len(entry.payload) + RECORD_COST
        self.log.pending += size
        self.log.memory.held += size

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Append *entries* once they are stored, and then answer *deliveries*, which brought them.

        *done* is called last, whether they were stored or refused. *note* adds to the unit the changes
        for the deliveries themselves.
        """
        unit = self.log.gather(self, entries, deliveries, done)
        if note is not None:
            note(unit, deliveries)

    def receive(self, entries: list[Entry]) -> None:
        """Append *entries* once they are stored, together with the next changes; they are in the broker
        already and cannot be refused."""
        log = self.log
        for partition, records in self.records(entries).items():
            size = size_of(records)
            log.pending += size
            log.memory.held += size
            log.join(partition, records)


def _records(entries: list[Entry], time_ms: int) -> list[Record]:
    """Return the records of *entries*, appended at *time_ms*."""
    return [
        Record(time_ms, entry.payload, entry.message_format, entry.publisher) for entry in entries
    ]


class Appending:
    """Records written together, as part of a unit (:class:`~amqp_rt.broker.durable.journal.Appended`).

    Offsets are assigned when the records are put into a batch: refused records leave no gap.
    """

    def __init__(self, log: MessageLog) -> None:
        self.log = log
        #: Partition → records.
        self.records: dict[Partition, list[Record]] = {}
        self.size = 0
        #: Deliveries to answer, with the call to make afterwards.
        self.answers: list[tuple[list[IncomingDelivery], Callable[[], None] | None]] = []
        #: Whether the records have been put into a batch: no more are added.
        self.closed = False
        #: Partition → offset after its last record, and bytes.
        self._plans: dict[Partition, tuple[int, int]] = {}
        self._kept = False

    def add(self, partition: Partition, records: list[Record]) -> None:
        """Add *records* for *partition*."""
        known = self.records.get(partition)
        if known is None:
            self.records[partition] = records
        else:
            known += records
        self.size += size_of(records)

    def write(self, batch: ChangeSet) -> None:
        self.closed = True
        if not self._kept and (not self.log.deleted or self.log.failed):
            for partition, records in self.records.items():
                self._plans[partition] = partition.plan(batch, records)

    def verify(self, store: Store) -> None:
        self._kept = bool(self._plans) and all(
            store.extent(partition.number)[1] >= end for partition, (end, _) in self._plans.items()
        )

    def kept(self) -> None:
        """Append the records, which are on the disk, and serve readers."""
        log = self.log
        self._give_room()
        for partition, records in self.records.items():
            partition.planned()
            if not log.deleted:
                partition.bytes += self._plans[partition][1]
                log.extend(partition, records)

    def accept(self) -> None:
        """Accept the deliveries that brought the records, which are on the disk."""
        self._answer(accept)
        self.log.notify_waiting()

    def refused(self, error: Error) -> None:
        """Drop the records, which cannot be stored, and refuse their deliveries."""
        log = self.log
        if log.storage is not None:
            count = sum(map(len, self.records.values()))
            log.storage.journal.log_refused(count, log.address, error, log.wall())
        self.undo()
        self._answer(partial(refuse, error=error))

    def undo(self) -> None:
        """Release the room of the records, which are not stored."""
        self.closed = True
        self._give_room()
        for partition in self.records:
            partition.planned()
        self.log.notify_waiting()

    def _give_room(self) -> None:
        self.log.pending -= self.size
        self.log.memory.held -= self.size

    def _answer(self, settle: Callable[[IncomingDelivery], None]) -> None:
        # The log keeps a reference to this until the next records, and deliveries refer to their link.
        answers, self.answers = self.answers, []
        for deliveries, done in answers:
            for delivery in deliveries:
                settle(delivery)
            if done is not None:
                done()
