"""Storage of queues that number their messages (:mod:`~amqp_rt.broker.queue.numbering`)."""

from __future__ import annotations

from ..entries import Entry
from .facts import NUMBERS, key_of
from .ledgers import QueueLedger
from .units import Unit


class NumberedLedger(QueueLedger):
    """Storage of the messages of a queue, and of how many there were.

    The count is stored before a consumer sees a message, whether that is durable or not, so that no number is
    used again after a restart.
    """

    def wants(self, entry: Entry) -> bool:
        return True

    def _write(self, unit: Unit, entries: list[Entry]) -> None:
        super()._write(unit, entries)
        self._store_count(unit)

    def _put_head(self, unit: Unit, entry: Entry) -> None:
        super()._put_head(unit, entry)
        self._store_count(unit)

    def _store_count(self, unit: Unit) -> None:
        NUMBERS.put(unit, key_of(self.number), self._queue.place_next)
