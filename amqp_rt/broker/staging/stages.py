"""Stages: messages that the links of one attempt have staged, and the room that all of them share."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from ...fronts.base import IncomingDelivery, ReceivingLink
from ...limits import Limits
from ...outcomes import Error
from ..durable.answers import accept, refuse
from ..durable.facts import Claim
from ..durable.journal import Journal
from ..durable.units import Unit
from ..entries import Entry, head_of, restored
from ..producers import WINDOW, Intake
from ..queue.accounts import Memory
from ..queue.fullness import full_text, why_bytes, why_memory
from .batches import payloads_of

#: Messages and bytes that are read or published at once.
RUN_MESSAGES: Final = 1_000
RUN_BYTES: Final = 4 * 1024 * 1024
#: Bytes of a message assumed for credit: before any has arrived, and at least. Credit is granted for
#: messages as large as the largest one staged, so that messages with credit find room.
_SIZE_FIRST: Final = 1024 * 1024
_SIZE_LEAST: Final = 4 * 1024


class StagingArea:
    """Room for the staged messages of all nodes of a broker (:class:`~amqp_rt.broker.producers.HasRoom`).

    Args:
        memory: Shared account of bytes.
        journal: Writes the stages of stored nodes; None if there is no store.
        limits: Bounds.
    """

    #: Staged messages are delivered to no consumer (:class:`~amqp_rt.broker.durable.journal.CallOwner`).
    gathering: Final = None

    def __init__(self, memory: Memory, journal: Journal | None, limits: Limits) -> None:
        self.memory = memory
        self.journal = journal
        self.limits = limits
        self.intake = Intake(self)
        self.awaited = False
        self.on_room: Callable[[], None] = self.intake.on_room
        #: Bytes of all staged messages, and size of the largest one since there were none.
        self.bytes = 0
        self._largest = 0

    def room(self) -> int:
        """Return how many messages may get credit, with an eighth of the room in reserve.

        Refusing a message that has credit would break the order of its part, or end it. So credit is
        withheld in time, and links that have some may use it when memory or room has become scarce.
        """
        left = self.limits.staged_bytes_max * 7 // 8 - self.bytes
        if left <= 0 or self.memory.scarce:
            return 0
        size = max(self._largest, _SIZE_LEAST) if self._largest else _SIZE_FIRST
        return min(WINDOW * len(self.intake.producers), max(left // size, 1))

    def fits(self, size: int, *, volatile: bool) -> bool:
        """Return whether a message of *size* bytes, which has credit, may be staged.

        The last message admitted may exceed the bound.
        """
        if size > self.limits.staged_bytes_max or self.bytes >= self.limits.staged_bytes_max:
            return False
        return not volatile or self.memory.held + size <= self.memory.limit

    def grow(self, stage: MessageStage, size: int) -> None:
        """Account for *size* more bytes in *stage*, or fewer if it is negative."""
        stage.bytes += size
        self.bytes += size
        self._largest = max(self._largest, size) if self.bytes else 0
        if not stage.number:
            self.memory.held += size
        if self.awaited:
            # Messages smaller than assumed leave room, too.
            self.on_room()
        if size < 0 and not stage.number:
            self.memory.notify_waiting()

    def note_batch(self, size: int) -> None:
        """Compute credit for batches of *size* bytes: one delivery takes as much room."""
        self._largest = max(self._largest, size)


class MessageStage:
    """Messages that the links of one attempt have staged, and their storage
    (:class:`~amqp_rt.broker.producers.Place` and :class:`~amqp_rt.broker.producers.IntakeLedger`)."""

    #: A message is stored once and whole, and waits for no turn.
    copies: Final = 1
    line: Final = None
    pieces: Final = None

    def __init__(self, area: StagingArea, claim: Claim, number: int, began: float) -> None:
        self.area = area
        self.claim = claim
        #: Its number in the store, 0 if it is in memory only.
        self.number = number
        self.began = began
        self.deleted = False
        #: Its link, as long as it is attached.
        self.link: ReceivingLink | None = None
        self.count = 0
        self.crc = 0
        self.bytes = 0
        self.key = claim.epoch, claim.part, claim.attempt
        #: The messages, if they are in memory only.
        self.entries: deque[Entry] = deque()
        #: Whether count and checksum are known; they are not after a restart.
        self.counted = True
        #: Messages being written to the disk, not yet in ``count``.
        self.writing = 0
        self._next = 0

    # --- Place ---

    def put(self, entry: Entry) -> None:
        """Keep *entry* in memory."""
        self.entries.append(entry)
        self.area.grow(self, len(entry.payload))
        self._count(entry)

    def fits(self, size: int) -> bool:
        """Return whether there is room for *size* bytes."""
        return self.area.fits(size, volatile=not self.number)

    def why_full(self, name: str, size: int) -> str:
        """Return why messages for *name* cannot be staged, of which one has *size* bytes."""
        area = self.area
        most = area.limits.staged_bytes_max
        staged = why_bytes("staged_bytes_max", area.bytes, size, most)
        return full_text("stage", name, staged, why_memory(area.memory, size))

    def reserve_room(self, entry: Entry) -> None:
        """Do nothing: these links take part in no transaction."""

    def release_room(self, entry: Entry) -> None:
        """Do nothing: these links take part in no transaction."""

    def notify_waiting(self) -> None:
        """Do nothing: these links take part in no transaction."""

    # --- IntakeLedger ---

    def wants(self, entry: Entry) -> bool:
        """Return True: even messages that are not durable are stored, so that the epoch is complete."""
        return True

    def reserve(self, entry: Entry) -> None:
        """Assign *entry* its sequence number."""
        entry.sequence = self._next
        self._next += 1
        self.writing += 1
        self.area.grow(self, len(entry.payload))

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Store *entries*, and then answer *deliveries*, which brought them."""
        journal = self.area.journal
        assert journal is not None

        def kept() -> None:
            self.writing -= len(entries)
            if not self.deleted:
                for entry in entries:
                    self._count(entry)
            for delivery in deliveries:
                accept(delivery)
            if done is not None:
                done()

        def refused(error: Error) -> None:
            self.writing -= len(entries)
            if not self.deleted:
                self.area.grow(self, -sum(len(entry.payload) for entry in entries))
            for delivery in deliveries:
                refuse(delivery, error)
            if done is not None:
                done()

        unit = Unit(refused)
        for entry in entries:
            unit.put(self.number, entry.sequence, head_of(entry), entry.payload)
        unit.then(kept)
        journal.add(unit)

    def receive(self, entries: list[Entry]) -> None:
        """Do nothing: only links bring messages here."""

    def restored(self, last: int, size: int) -> None:
        """Restore the stage from the store, which has *size* bytes of messages up to number *last*."""
        self.counted = False
        self._next = last + 1
        self.area.grow(self, size)

    def left(self, link: ReceivingLink) -> None:
        """Forget *link*, which has ended, unless another one has replaced it."""
        if self.link is link:
            self.link = None

    async def recount(self) -> None:
        """Count the stored messages of a stage that is older than the start of the broker."""
        journal = self.area.journal
        assert journal is not None
        first = count = crc = 0
        while True:
            found = await journal.call(
                journal.store.messages, self.number, first, RUN_MESSAGES, RUN_BYTES
            )
            if not found:
                break
            counted = count
            for stored in found:
                entry = restored(self.number, stored.sequence, stored.head, stored.payload)
                for payload in payloads_of(entry):
                    crc = zlib.crc32(payload, crc)
                    count += 1
                if count - counted >= RUN_MESSAGES:
                    # Batches may hold very many messages.
                    await trio.lowlevel.checkpoint()
                    counted = count
            first = found[-1].sequence + 1
        self.count, self.crc, self.counted = count, crc, True

    def _count(self, entry: Entry) -> None:
        payloads = payloads_of(entry) if entry.marks is None else entry.marks
        entry.marks = None
        crc = self.crc
        for payload in payloads:
            crc = zlib.crc32(payload, crc)
        self.crc = crc
        self.count += len(payloads)


def stolen(description: str) -> Error:
    """Return the error of a link whose attempt continues without it."""
    return Error("amqp:link:stolen", description)
