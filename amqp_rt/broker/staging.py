"""Publishing by epochs: the messages sent by all tasks of an epoch are published once, or not at all.

A computation in steps, each of which may be repeated after a failure, gives each link the *producer* it
belongs to, the *epoch* (step), the part of it, and the attempt at that part. The messages of such a link
are held in a :class:`Stage`, where no consumer sees them. One request commits an epoch: it names the
attempts that count, with the number and the checksum of their messages, and these are published in that
order. Committing an epoch again does not publish it again.

The number of an epoch does not determine its content: a checkpoint that was restored from a backup
continues from an older number and plans other input under it. Therefore the producer keeps with its last
epoch an :class:`Identity` of each *write* to it. An equal repetition is skipped; a different one is
refused with :data:`DIFFERENT`, since skipping it would lose messages, and publishing it would duplicate
some. An epoch may have several writes: each has a name of its own, and a later run repeats them in their
order.

A producer has *runs*. A new run replaces the one before it: links of the earlier run are detached with
``amqp:link:stolen``, and its commits are refused, so that a process believed dead cannot interfere.

In a store the decision to commit is one fact. Its effects are written in steps, each of which moves
messages from their stage to their node in one commit, and they continue after a restart: however large
an epoch is, publishing it takes bounded memory.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import trio
from msgspec import Struct

from ..batches import MESSAGE_BATCH, MESSAGE_BATCHES, read_messages
from ..clock import Clock
from ..codec.sections import walk_head
from ..errors import AmqpError, DecodeError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..limits import Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import ACCEPTED, Error, Received, Rejected
from ..stores.base import Stored
from ..termini import Target
from ..values import Symbol
from .durable import facts
from .durable.facts import Claim, Identity, Write
from .durable.journal import Journal, Unit, accept, refuse
from .entries import Entry, Unwelcome, entry_of, head_of, restored
from .expiry import NEVER
from .log.log import Entrance
from .producers import FULL, NOT_KEPT, WINDOW, Inlet, Intake, Producer
from .queue.accounts import Memory
from .queue.queue import MessageQueue
from .topics import TopicLedger
from .transactions import UNKNOWN_TRANSACTION

_log = logging.getLogger("amqp_rt.broker")

#: Capability offered to a link that stages messages, and the properties that such a link has.
EPOCH_PUBLISH: Final = Symbol("amqp_rt:epoch-publish")
PRODUCER: Final = Symbol("amqp_rt:producer")
RUN: Final = Symbol("amqp_rt:run")
EPOCH: Final = Symbol("amqp_rt:epoch")
PART: Final = Symbol("amqp_rt:part")
ATTEMPT: Final = Symbol("amqp_rt:attempt")
#: Property of a link that continues an attempt with the messages staged by an earlier link.
RESUMES: Final = Symbol("amqp_rt:resumes")
#: Optional: name of the write that the attempt belongs to, if an epoch has several.
WRITE: Final = Symbol("amqp_rt:write")
#: Properties of our answer: the epoch committed last, -1 if none; and whether this write appears to be
#: published already, so that nothing has to be sent for it.
COMMITTED: Final = Symbol("amqp_rt:committed-epoch")
PUBLISHED: Final = Symbol("amqp_rt:published")

#: Condition of a commit refused because the epoch was committed with other content.
DIFFERENT: Final = "amqp_rt:epoch-different"

#: Format of an entry that holds a batch of messages; not that of the wire, which any message may carry.
_BATCH: Final = -1

#: Characters in the name of a producer or run.
_NAME_MAX: Final = 256
_WHOLE_MAX: Final = 2**63 - 1
#: Messages and bytes that are published with one commit.
_RUN_MESSAGES: Final = 1_000
_RUN_BYTES: Final = 4 * 1024 * 1024
#: Messages of a unit that are delivered as they are put into their queue, and not in turns.
_FEW: Final = 50
#: Bytes of a message assumed for credit: before any has arrived, and at least. Credit is granted for
#: messages as large as the largest one staged, so that messages with credit find room.
_SIZE_FIRST: Final = 1024 * 1024
_SIZE_LEAST: Final = 4 * 1024
#: Seconds between attempts to publish messages that could not be read or written.
_RETRY_S: Final = 1.0


#: Identity of a commit that states only its parts.
_NOT_SAID: Final = Identity()


class Part(Struct, frozen=True):
    """Attempt that counts, with the number and the CRC-32 of its encoded messages."""

    part: int
    attempt: int
    count: int
    crc: int


class _Commit(Struct, frozen=True):
    """Arguments of :meth:`Staging.commit`, for one producer."""

    run: str
    epoch: int
    parts: Sequence[Part]
    identity: Identity
    skip_different: bool


class Destination(Protocol):
    """Node that messages are staged for."""

    inlet: Inlet
    #: Its number in the store, 0 if it is not stored.
    number: int


def claim_of(link: ReceivingLink) -> Claim | Error | None:
    """Return the claim of *link*; None if it does not stage messages, an error if it is invalid."""
    properties = link.properties
    if PRODUCER not in properties:
        return None
    found: dict[str, Any] = {}
    for key, type_ in ((PRODUCER, str), (RUN, str), (EPOCH, int), (PART, int), (ATTEMPT, int)):
        value = properties.get(key)
        if isinstance(value, bool) or not isinstance(value, type_):
            return Error("amqp:invalid-field", f"a link that stages messages has a property {key}")
        if isinstance(value, str):
            if not 0 < len(value) <= _NAME_MAX:
                return Error("amqp:invalid-field", f"{key} has 1 to {_NAME_MAX} characters")
            found[key.rpartition(":")[2]] = str(value)
        elif not 0 <= value <= _WHOLE_MAX:
            return Error("amqp:invalid-field", f"{key} is a whole number from 0 on")
        else:
            found[key.rpartition(":")[2]] = int(value)
    write = properties.get(WRITE, "")
    if not isinstance(write, str) or len(write) > _NAME_MAX:
        return Error("amqp:invalid-field", f"{WRITE} has up to {_NAME_MAX} characters")
    return Claim(**found, write=str(write))


class Stage:
    """Messages that the links of one attempt have staged, and their storage
    (:class:`~amqp_rt.broker.producers.Place` and :class:`~amqp_rt.broker.producers.Ledger`)."""

    def __init__(self, area: Staging, claim: Claim, number: int, began: float) -> None:
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

    def hold(self, entry: Entry) -> None:
        """Do nothing: these links take part in no transaction."""

    def let_go(self, entry: Entry) -> None:
        """Do nothing: these links take part in no transaction."""

    def room_again(self) -> None:
        """Do nothing: these links take part in no transaction."""

    # --- Ledger ---

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

    def _count(self, entry: Entry) -> None:
        payloads = self.area.payloads_of(entry) if entry.marks is None else entry.marks
        entry.marks = None
        crc = self.crc
        for payload in payloads:
            crc = zlib.crc32(payload, crc)
        self.crc = crc
        self.count += len(payloads)


class StagingProducer(Producer):
    """Receiving end of a link that stages messages, single ones or batches."""

    mixed = True

    def _is_single(self, delivery: Any) -> bool:
        return bool(delivery.message_format != MESSAGE_BATCH)

    def _deliver_other(self, link: ReceivingLink, delivery: Any) -> bool:
        """Stage the messages of a batch, or refuse all of them; return whether the link continues."""
        stage = self.node
        assert isinstance(stage, Stage)
        if delivery.state is not None and type(delivery.state) is not Received:
            link.detach(UNKNOWN_TRANSACTION)
            return False
        now, publisher, check = self.wall(), link.peer.container_id, self.check
        entries: list[Entry] = []
        # Whether reading the messages again later gives the same entries.
        plain = True
        refusal: Rejected | None = None
        try:
            for payload in read_messages(delivery.payload, self.door.limits.batch_messages_max):
                entry = self.door.admit(payload, MESSAGE_FORMAT, now, self.ttl_s)
                if entry.durable and self.ledger is None and not self.volatile:
                    refusal = NOT_KEPT
                elif check is not None:
                    refusal = check(entry, link.peer)
                if refusal is not None:
                    break
                entry.publisher = publisher
                entries.append(entry)
                if (
                    entry.payload is not payload
                    or entry.altered
                    or entry.expires_at != NEVER
                    or entry.due is not None
                    or entry.returnable
                ):
                    plain = False
        except DecodeError as error:
            self._refuse_batch(link, delivery, Rejected(Error.of(error)))
            return True
        except Unwelcome as error:
            link.detach(Error.of(error))
            return False
        if refusal is None and not self.admits(len(delivery.payload)):
            refusal = FULL
        if refusal is not None:
            self._refuse_batch(link, delivery, refusal)
            return True
        if any(entry.expires_at != NEVER for entry in entries):
            self.on_expiring()
        if self.ledger is None:
            for entry in entries:
                stage.put(entry)
            stage.area.note_batch(len(delivery.payload))
            delivery.settle(ACCEPTED)
            return True
        if plain:
            # Their entries can be made from the batch again when they are published. The payloads are
            # kept as marks until they are counted, which saves reading the batch again.
            marks = [entry.payload for entry in entries]
            entries = [
                Entry(delivery.payload, _BATCH, durable=True, publisher=publisher, marks=marks)
            ]
        for entry in entries:
            stage.reserve(entry)
        stage.area.note_batch(len(delivery.payload))
        stage.stage(entries, [delivery])
        return True

    def _refuse_batch(self, link: ReceivingLink, delivery: Any, refusal: Rejected) -> None:
        if delivery.settled:
            self._log_drop(delivery.payload, delivery.message_format, link, refusal.error)
        delivery.settle(refusal)


class EpochProducer:
    """Producer of one node."""

    def __init__(self, destination: Destination, name: str, used: float) -> None:
        self.destination = destination
        self.name = name
        #: Wall-clock time of its last attach, request or run.
        self.used = used
        #: Its runs, the latest one last.
        self.runs: list[str] = []
        #: The epoch committed last, and the writes to it, in order.
        self.epoch = -1
        self.writes: tuple[Write, ...] = ()
        #: epoch, part, attempt → stage
        self.stages: dict[tuple[int, int, int], Stage] = {}
        #: Stages of a committed epoch that have to be published, in order; no longer in ``stages``.
        self.publishing: list[Stage] = []
        #: Held while an epoch is committed or published.
        self.busy = trio.Lock()
        #: Whether a decision is being written, and whether the runs have changed meanwhile. Until the
        #: decision is stored or refused, no other state of the producer may be written: it would replace
        #: the decision, or store one that is refused.
        self.deciding = False
        self.changed = False

    def has(self, claim: Claim) -> bool:
        """Return whether the write of *claim* appears to be published already."""
        if claim.epoch != self.epoch:
            return claim.epoch < self.epoch
        return any(
            each.run != claim.run or each.identity is None or each.identity.write == claim.write
            for each in self.writes
        )

    def repeated(self, run: str, epoch: int, identity: Identity, count: int) -> int | None:
        """Return the index of the write that a write of *count* messages with *identity* repeats.

        None if the write is new.

        Raises:
            AmqpError: The epoch was committed with other content, or is older than the last one.
        """
        if epoch > self.epoch:
            return None
        if epoch < self.epoch:
            raise AmqpError(
                f"epoch {self.epoch} of {self.name!r} is committed, and {epoch} comes before it",
                condition=DIFFERENT,
            )
        earlier = None
        for at, each in enumerate(self.writes):
            known = each.identity
            if known is None:
                return at
            if each.run == run:
                if identity.write != known.write:
                    continue
                if identity.write:
                    # The same request again, because its answer was lost.
                    return at
            # A write without messages adds nothing, so that skipping it loses nothing.
            if identity.repeats(known) or not (identity.write or count):
                return at
            earlier = earlier or known
        if earlier is None:
            return None
        planned = f", planned as {earlier.plan!r}" if earlier.plan else ""
        raise AmqpError(
            f"epoch {epoch} of {self.name!r} is committed with something else: {earlier}{planned}, and not "
            f"{identity}",
            condition=DIFFERENT,
        )


class Staging:
    """Staged messages of all nodes of a broker.

    Args:
        memory: Shared account of bytes.
        journal: Writes the stages of stored nodes; None if there is no store.
        clock: Its wall clock measures the age of stages.
        limits: Bounds.
        new_number: Returns a number unused in the store.
        on_fault: Called with a destination and an unexpected error of its work; returns the error to
            answer the request with.
    """

    def __init__(
        self,
        memory: Memory,
        journal: Journal | None,
        clock: Clock,
        limits: Limits,
        new_number: Callable[[], int],
        on_fault: Callable[[Any, Exception], AmqpError],
    ) -> None:
        self.memory = memory
        self.journal = journal
        self.clock = clock
        self.limits = limits
        self._new_number = new_number
        self.on_fault = on_fault
        self._intake = Intake(self)
        self.awaited = False
        self.on_room: Callable[[], None] = self._intake.on_room
        #: Bytes of all staged messages, and size of the largest one since there were none.
        self.bytes = 0
        self._largest = 0
        self._producers: dict[Destination, dict[str, EpochProducer]] = {}
        self._stages: dict[Stage, EpochProducer] = {}
        #: Requested commits that ``run`` has not started yet.
        self._asked: list[Callable[[], Any]] = []
        self._work = trio.Event()

    # --- Room (producers.HasRoom) ---

    def room(self) -> int:
        """Return how many messages may get credit, with an eighth of the room in reserve.

        Refusing a message that has credit would break the order of its part, or end it. So credit is
        withheld in time, and links that have some may use it when memory or room has become scarce.
        """
        left = self.limits.staged_bytes_max * 7 // 8 - self.bytes
        if left <= 0 or self.memory.scarce:
            return 0
        size = max(self._largest, _SIZE_LEAST) if self._largest else _SIZE_FIRST
        return min(WINDOW * len(self._intake.producers), max(left // size, 1))

    def fits(self, size: int, *, volatile: bool) -> bool:
        """Return whether a message of *size* bytes, which has credit, may be staged.

        The last message admitted may exceed the bound.
        """
        if size > self.limits.staged_bytes_max or self.bytes >= self.limits.staged_bytes_max:
            return False
        return not volatile or self.memory.held + size <= self.memory.limit

    def grow(self, stage: Stage, size: int) -> None:
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
            self.memory.tell()

    def note_batch(self, size: int) -> None:
        """Compute credit for batches of *size* bytes: one delivery takes as much room."""
        self._largest = max(self._largest, size)

    def payloads_of(self, entry: Entry) -> list[bytes]:
        """Return the messages stored in *entry*, which may be a batch."""
        if entry.message_format != _BATCH:
            return [entry.payload]
        # Batches above the limit were refused on arrival, when the limit may have been another one.
        return read_messages(entry.payload, len(entry.payload))

    def _published(self, stage: Stage, stored: Stored, inlet: Inlet) -> list[Entry]:
        """Return the entries to publish for a message that *stage* has *stored*, or for each message of
        a batch.

        Raises:
            DecodeError: A message was admitted under other limits.
        """
        entry = restored(stage.number, stored.sequence, stored.head, stored.payload)
        if entry.message_format != _BATCH:
            return [entry.again()]
        publisher = entry.publisher
        payloads = self.payloads_of(entry)
        if isinstance(inlet.ledger, Entrance):
            # The records of a log have no fields of the header.
            return [Entry(payload, publisher=publisher) for payload in payloads]
        return [
            entry_of(payload, walk_head(payload, self.limits), publisher=publisher)
            for payload in payloads
        ]

    # --- Links ---

    def attach(
        self, destination: Destination, link: ReceivingLink, claim: Claim, target: Target | None
    ) -> None:
        """Attach *link* to stage messages for *destination*, or refuse it; *target* is its answer.

        An attempt that attaches again starts from nothing, unless the link resumes it: then it continues
        with the staged messages, having asked for their number (:meth:`count`).
        """
        stage: Stage | None = None
        try:
            producer = self._enter(destination, claim.producer, claim.run)
            earlier = producer.stages.get((claim.epoch, claim.part, claim.attempt))
            stolen = _stolen("another link stages this attempt")
            if earlier is not None and link.properties.get(RESUMES) is True:
                stage = earlier
                # The broker may not have noticed yet that the connection of the earlier link is lost.
                if stage.link is not None:
                    stage.link.detach(stolen)
            elif earlier is not None:
                self._drop(producer, earlier, stolen)
            elif len(self._stages) >= self.limits.stages_max:
                raise AmqpError(
                    f"{len(self._stages)} attempts are staged already",
                    condition="amqp:resource-limit-exceeded",
                )
        except AmqpError as error:
            link.refuse(Error.of(error))
            return
        if stage is None:
            stage = self._begin(producer, claim)
        stage.link = link
        inlet = destination.inlet
        offered = [EPOCH_PUBLISH]
        kind = Producer
        # A batch is published in one step, which for a topic would write very many copies.
        if MESSAGE_BATCHES in link.desired_capabilities and not isinstance(
            inlet.ledger, TopicLedger
        ):
            offered.append(MESSAGE_BATCHES)
            kind = StagingProducer
        endpoint = kind(
            self._intake,
            stage,
            inlet.door,
            inlet.wall,
            ttl_s=inlet.ttl_s,
            ledger=stage if stage.number else None,
            volatile=inlet.volatile,
            check=inlet.check,
        )
        endpoint.on_left.append(partial(stage.left, link))
        link.accept(
            endpoint,
            max_message_size=self.limits.message_size_max,
            offered_capabilities=offered,
            properties={COMMITTED: producer.epoch, PUBLISHED: producer.has(claim)},
            target=target,
        )

    def _begin(self, producer: EpochProducer, claim: Claim) -> Stage:
        destination = producer.destination
        number = self._new_number() if destination.number else 0
        stage = Stage(self, claim, number, self.clock.wall())
        producer.stages[stage.key] = stage
        self._stages[stage] = producer
        if number:
            assert self.journal is not None
            known = facts.StageFact(destination.number, claim, stage.began)
            facts.STAGES.keep(self.journal.loose, facts.key_of(number), known)
        return stage

    async def count(self, destination: Destination, claim: Claim) -> tuple[int, int]:
        """Return the number and the CRC-32 of the staged messages of *claim*, once all of them that have
        arrived are stored.

        Raises:
            AmqpError: A later run has replaced this one, or the attempt has no stage.
        """
        producer = self._enter(destination, claim.producer, claim.run)
        while True:
            stage = producer.stages.get((claim.epoch, claim.part, claim.attempt))
            if stage is None:
                raise AmqpError(
                    f"there is no attempt {claim.attempt} at part {claim.part} of epoch {claim.epoch}",
                    condition="amqp:precondition-failed",
                )
            if stage.writing and self.journal is not None:
                kept = trio.Event()
                self.journal.when_kept(kept.set)
                await kept.wait()
            elif not stage.counted:
                await self._recount(stage)
            else:
                return stage.count, stage.crc

    def _enter(self, destination: Destination, name: str, run: str) -> EpochProducer:
        """Return producer *name* of *destination*; a new *run* becomes its latest one.

        Raises:
            AmqpError: A later run has replaced *run*, or there are too many producers.
        """
        producers = self._producers.setdefault(destination, {})
        producer = producers.get(name)
        now = self.clock.wall()
        if producer is None:
            if len(producers) >= self.limits.epoch_producers_max:
                self._make_room(producers, now)
            producer = producers[name] = EpochProducer(destination, name, now)
        producer.used = now
        runs = producer.runs
        if not runs or run != runs[-1]:
            if run in runs:
                raise AmqpError(
                    f"a later run of {name!r} has taken over", condition="amqp:link:stolen"
                )
            runs.append(run)
            del runs[: -self.limits.epoch_runs_max]
            for stage in list(producer.stages.values()):
                if stage.claim.run != run:
                    self._drop(producer, stage, _stolen(f"a later run of {name!r} has taken over"))
            self._keep_soon(producer)
        return producer

    def _make_room(self, producers: dict[str, EpochProducer], now: float) -> None:
        """Forget the least recently used of *producers*, if it was idle for long enough.

        Raises:
            AmqpError: None of them was.
        """
        silent = [
            each
            for each in producers.values()
            if not each.stages and not each.publishing and not each.busy.locked()
        ]
        oldest = min(silent, key=lambda each: each.used, default=None)
        least = self.limits.epoch_producer_s
        if oldest is None or now - oldest.used < least:
            raise AmqpError(
                f"the node has {len(producers)} producers already, and forgets none of which it has "
                f"heard in the last {least / 86_400:.0f} days: use fewer names",
                condition="amqp:resource-limit-exceeded",
            )
        del producers[oldest.name]
        if oldest.destination.number and self.journal is not None:
            facts.PRODUCERS.forget(self.journal.loose, _producer_key(oldest))

    def _keep_soon(self, producer: EpochProducer) -> None:
        """Write the state of *producer* with the next changes, or after its decision."""
        producer.changed = producer.deciding
        if not producer.deciding and producer.destination.number and self.journal is not None:
            self._keep(
                self.journal.loose, producer, producer.epoch, producer.writes, producer.publishing
            )

    def _keep(
        self,
        unit: Unit,
        producer: EpochProducer,
        epoch: int,
        writes: tuple[Write, ...],
        publishing: Sequence[Stage],
    ) -> None:
        """Add to *unit* that *producer* has committed *epoch* by *writes*; *publishing* is left to do."""
        numbers = [stage.number for stage in publishing]
        known = facts.ProducerFact(producer.runs, epoch, numbers, producer.used, writes)
        facts.PRODUCERS.keep(unit, _producer_key(producer), known)

    def _drop(self, producer: EpochProducer, stage: Stage, error: Error | None = None) -> None:
        """Drop *stage* and its messages, and detach its link with *error*."""
        stage.deleted = True
        if producer.stages.get(stage.key) is stage:
            del producer.stages[stage.key]
        self._stages.pop(stage, None)
        link, stage.link = stage.link, None
        if link is not None:
            link.detach(error)
        self._forget(stage)

    def _forget(self, stage: Stage) -> None:
        """Delete *stage* from the store, and release its room."""
        if stage.number and self.journal is not None:
            unit = self.journal.loose
            unit.clear(stage.number)
            facts.STAGES.forget(unit, facts.key_of(stage.number))
        stage.entries.clear()
        self.grow(stage, -stage.bytes)

    # --- Committing ---

    def committed(self, destination: Destination, producer: str) -> int:
        """Return the epoch that *producer* has committed last at *destination*, -1 if none."""
        known = self._producers.get(destination, {}).get(producer)
        return -1 if known is None else known.epoch

    def query(self, destination: Destination, producer: str) -> str:
        """Return the query of the epoch that *producer* has committed last, empty if not given."""
        known = self._producers.get(destination, {}).get(producer)
        if known is None or not known.writes or known.writes[-1].identity is None:
            return ""
        return known.writes[-1].identity.query

    async def commit(
        self,
        destination: Destination,
        producer: str,
        run: str,
        epoch: int,
        parts: Sequence[Part],
        identity: Identity = _NOT_SAID,
        *,
        skip_different: bool = False,
    ) -> bool:
        """Publish the messages of *parts* once; return False if they had been published before.

        On return all of them are in the node, and stored. A cancelled commit is still carried out.

        Args:
            destination: The node.
            producer: Name of the producer.
            run: Its run; the latest one, or a new one.
            epoch: Number of the epoch to commit.
            parts: The attempts that count.
            identity: Identity of this write.
            skip_different: Accept the content with which the epoch was committed instead, even if it
                differs from this write, and publish nothing.

        Raises:
            AmqpError: A later run has replaced this one; the epoch was committed with other content
                (:data:`DIFFERENT`); an attempt has no stage, or the messages staged for it differ from
                its part; a limit is exceeded; or the decision cannot be stored. Nothing is published
                then. If publishing fails after the decision, because the node is deleted or the store
                given up, the epoch stays committed.
        """
        self._check_identity(identity)
        if not identity.content:
            identity = msgspec.structs.replace(identity, content=_content_of(parts))
        asked = _Commit(run, epoch, parts, identity, skip_different)
        known = self._enter(destination, producer, run)
        done = trio.Event()
        found: list[bool | AmqpError] = []

        async def work() -> None:
            try:
                found.append(await self._commit(known, asked))
            except AmqpError as error:
                found.append(error)
            except Exception as error:
                found.append(self.on_fault(destination, error))
            finally:
                done.set()

        self._asked.append(work)
        self._work.set()
        await done.wait()
        if not found:
            raise AmqpError("the broker stops", condition="amqp:connection:forced")
        if isinstance(found[0], AmqpError):
            raise found[0]
        return found[0]

    def _check_identity(self, identity: Identity) -> None:
        """Check the lengths of the fields of *identity*.

        Raises:
            AmqpError: A field is too long.
        """
        for name, most in (
            ("write", _NAME_MAX),
            ("query", _NAME_MAX),
            ("plan", self.limits.epoch_plan_max),
            ("content", _NAME_MAX),
        ):
            length = len(getattr(identity, name))
            if length > most:
                raise AmqpError(
                    f"the {name} of an epoch has up to {most} characters, not {length}",
                    condition="amqp:invalid-field",
                )

    async def _commit(self, producer: EpochProducer, asked: _Commit) -> bool:
        epoch, parts = asked.epoch, asked.parts
        async with producer.busy:
            # Earlier decisions come first, in the node and in the store.
            await self._publish(producer)
            self._check(producer, asked.run)
            if self._repeat(producer, asked):
                self._sweep(producer, producer.epoch, asked.identity.write)
                return False
            if epoch == producer.epoch and len(producer.writes) >= self.limits.epoch_writes_max:
                raise AmqpError(
                    f"epoch {epoch} of {producer.name!r} has {len(producer.writes)} writes already: let "
                    "other writes have other producers",
                    condition="amqp:resource-limit-exceeded",
                )
            for part in parts:
                stage = producer.stages.get((epoch, part.part, part.attempt))
                if stage is not None and not stage.counted:
                    await self._recount(stage)
            # While the store was read, another run may have taken over, attempts may have started again,
            # and the node may have been deleted. From here to the decision there is no checkpoint.
            self._check(producer, asked.run)
            stages = [self._verified(producer, epoch, part) for part in parts]
            if len(set(stages)) < len(stages):
                raise AmqpError("an attempt is named twice", condition="amqp:invalid-field")
            earlier = producer.writes if epoch == producer.epoch else ()
            write = Write(asked.run, asked.identity)
            await self._decide(producer, epoch, (*earlier, write), stages)
            await self._publish(producer)
            self._check_there(producer)
            self._sweep(producer, epoch, asked.identity.write)
            return True

    def _repeat(self, producer: EpochProducer, asked: _Commit) -> bool:
        """Record that *asked* repeats a write; return whether it does.

        Raises:
            AmqpError: As for :meth:`EpochProducer.repeated`.
        """
        run, identity = asked.run, asked.identity
        count = sum(part.count for part in asked.parts)
        try:
            at = producer.repeated(run, asked.epoch, identity, count)
        except AmqpError:
            left = [at for at, each in enumerate(producer.writes) if each.run != run]
            if not asked.skip_different or asked.epoch < producer.epoch or not left:
                raise
            at = left[0]
        if at is None:
            return False
        writes = list(producer.writes)
        earlier, known = writes[at].run, writes[at].identity
        # After a checkpoint was restored the plan is another one, and the next repetition will have it. A
        # request without messages may only ask whether the epoch is committed: its content is not that of
        # the epoch.
        if known is None or (run != earlier and (identity.write or count)):
            known = identity
        writes[at] = Write(run, known)
        producer.writes = tuple(writes)
        self._keep_soon(producer)
        return True

    def _check(self, producer: EpochProducer, run: str) -> None:
        """Check that *run* is the latest one of *producer*, and that the node exists.

        Raises:
            AmqpError: A later run has replaced this one, or as for :meth:`_check_there`.
        """
        self._check_there(producer)
        if run != producer.runs[-1]:
            raise AmqpError(
                f"a later run of {producer.name!r} has taken over", condition="amqp:link:stolen"
            )

    def _check_there(self, producer: EpochProducer) -> None:
        """Check that the node of *producer* exists and is in service.

        Raises:
            AmqpError: The node has been deleted, or has failed.
        """
        known = self._producers.get(producer.destination, {}).get(producer.name)
        if known is not producer:
            raise AmqpError(
                f"the node for which {producer.name!r} stages messages has been deleted",
                condition="amqp:resource-deleted",
            )
        if producer.destination.inlet.node.deleted:
            raise AmqpError(
                f"the node for which {producer.name!r} stages messages is out of service: start the "
                "broker again to continue with the contents of its store",
                condition="amqp:internal-error",
            )

    async def _decide(
        self,
        producer: EpochProducer,
        epoch: int,
        writes: tuple[Write, ...],
        stages: list[Stage],
    ) -> None:
        """Commit *epoch* with the messages of *stages*; it consists of *writes* afterwards.

        Raises:
            AmqpError: The decision cannot be stored; the stages are kept, as far as none has replaced
                them.
        """
        for stage in stages:
            # From here on no messages are added to the stage.
            if stage.link is not None:
                stage.link.detach(_stolen("its epoch is committed"))
            del producer.stages[stage.key]
        producer.publishing = list(stages)
        if producer.destination.number and self.journal is not None:
            producer.deciding = True
            try:
                await self.journal.keep(
                    partial(
                        self._keep,
                        producer=producer,
                        epoch=epoch,
                        writes=writes,
                        publishing=stages,
                    )
                )
            except AmqpError:
                producer.publishing = []
                self._take_back(producer, stages)
                self._decided(producer)
                raise
            # If cancelled, the decision stays open, since it may still be written.
            producer.epoch, producer.writes = epoch, writes
            self._decided(producer)
        else:
            producer.epoch, producer.writes = epoch, writes

    def _decided(self, producer: EpochProducer) -> None:
        """Allow the state of *producer* to be written again, and write the changes that have waited."""
        producer.deciding = False
        if producer.changed:
            self._keep_soon(producer)

    def _take_back(self, producer: EpochProducer, stages: list[Stage]) -> None:
        """Restore *stages* that are not published, and drop those replaced by other ones."""
        for stage in stages:
            if stage.deleted:
                continue
            if stage.claim.run == producer.runs[-1] and stage.key not in producer.stages:
                producer.stages[stage.key] = stage
            else:
                self._drop(producer, stage)

    def _verified(self, producer: EpochProducer, epoch: int, part: Part) -> Stage:
        """Return the stage of *part*, whose count and checksum are as they have to be.

        Raises:
            AmqpError: There is no such stage, it is still being written, or it has other messages.
        """
        stage = producer.stages.get((epoch, part.part, part.attempt))
        name = f"attempt {part.attempt} at part {part.part} of epoch {epoch}"
        if stage is None:
            raise AmqpError(f"there is no {name}", condition="amqp:precondition-failed")
        if stage.writing:
            raise AmqpError(
                f"{name} has {stage.writing} more messages that are being written: commit it once"
                " they have been accepted",
                condition="amqp:precondition-failed",
            )
        if (stage.count, stage.crc) != (part.count, part.crc):
            raise AmqpError(
                f"{name} has {stage.count} messages with the checksum {stage.crc:#010x}, not "
                f"{part.count} with {part.crc:#010x}",
                condition="amqp:precondition-failed",
            )
        return stage

    async def _recount(self, stage: Stage) -> None:
        """Count the stored messages of *stage*, which is older than the start of the broker."""
        journal = self.journal
        assert journal is not None
        first = count = crc = 0
        while True:
            found = await journal.call(
                journal.store.messages, stage.number, first, _RUN_MESSAGES, _RUN_BYTES
            )
            if not found:
                break
            counted = count
            for stored in found:
                entry = restored(stage.number, stored.sequence, stored.head, stored.payload)
                for payload in self.payloads_of(entry):
                    crc = zlib.crc32(payload, crc)
                    count += 1
                if count - counted >= _RUN_MESSAGES:
                    # Batches may hold very many messages.
                    await trio.lowlevel.checkpoint()
                    counted = count
            first = found[-1].sequence + 1
        stage.count, stage.crc, stage.counted = count, crc, True

    def _sweep(self, producer: EpochProducer, epoch: int, write: str) -> None:
        """Drop the stages of *write* to *epoch*, and of earlier epochs, that were not committed."""
        for stage in list(producer.stages.values()):
            claim = stage.claim
            if claim.epoch < epoch or (claim.epoch == epoch and claim.write == write):
                self._drop(producer, stage, _stolen("its epoch is committed"))

    async def _publish(self, producer: EpochProducer) -> None:
        """Move the committed messages to their node.

        Raises:
            AmqpError: The node has been deleted, or the store was given up: the rest is published
                after the next start of the broker.
        """
        while producer.publishing:
            self._check_there(producer)
            stage = producer.publishing[0]
            if stage.number:
                await self._publish_stored(producer, stage)
            else:
                await self._publish_held(producer, stage)
            # If the node has been deleted meanwhile, the stage is dropped already.
            if stage in producer.publishing:
                producer.publishing.remove(stage)
                self._drop(producer, stage)
            await trio.lowlevel.checkpoint()

    async def _publish_held(self, producer: EpochProducer, stage: Stage) -> None:
        """Publish *stage*, which is in memory only, in turns.

        Raises:
            AmqpError: As for :meth:`_publish`.
        """
        waiting = stage.entries
        while waiting:
            self._check_there(producer)
            some = [waiting.popleft() for _ in range(min(len(waiting), _RUN_MESSAGES))]
            _put_held(producer.destination.inlet, some)
            await trio.lowlevel.checkpoint()

    async def _publish_stored(self, producer: EpochProducer, stage: Stage) -> None:
        """Publish *stage*, which is in the store; retry failed reads and writes.

        Raises:
            AmqpError: As for :meth:`_publish`.
        """
        journal = self.journal
        assert journal is not None
        warned = False
        while not stage.deleted:
            try:
                if await self._publish_some(producer, stage):
                    return
                warned = False
            except AmqpError as error:
                self._check_there(producer)
                if journal.failure is not None:
                    raise AmqpError(
                        f"epoch {producer.epoch} of {producer.name!r} is committed, and the rest of "
                        f"it is published when the broker is started again: {error.description}",
                        condition="amqp:internal-error",
                    ) from error
                if not warned:
                    _log.warning(
                        "published later: epoch %d of %r: %s", producer.epoch, producer.name, error
                    )
                    warned = True
                await trio.sleep(_RETRY_S)

    async def _publish_some(self, producer: EpochProducer, stage: Stage) -> bool:
        """Read messages of *stage* once, and move them, in commits of bounded size; return whether those
        were the last ones.

        Raises:
            AmqpError: They cannot be read, or there is no room for them.
        """
        journal = self.journal
        assert journal is not None
        found = await journal.call(
            journal.store.messages, stage.number, 0, _RUN_MESSAGES, _RUN_BYTES
        )
        last = len(found) < _RUN_MESSAGES and sum(len(each.payload) for each in found) < _RUN_BYTES
        waiting = deque(found)
        del found
        while True:
            self._check_there(producer)
            inlet = producer.destination.inlet
            most = _RUN_MESSAGES // _copies(inlet)
            entries: list[Entry] = []
            sequences: list[int] = []
            while waiting and len(entries) < max(most, 1):
                stored = waiting.popleft()
                sequences.append(stored.sequence)
                entries += self._published(stage, stored, inlet)
            fill = partial(
                self._move,
                producer=producer,
                stage=stage,
                entries=entries,
                sequences=sequences,
                last=last and not waiting,
            )
            await journal.keep(fill)
            if not waiting:
                return last

    def _move(
        self,
        unit: Unit,
        producer: EpochProducer,
        stage: Stage,
        entries: list[Entry],
        sequences: list[int],
        *,
        last: bool,
    ) -> None:
        """Add to *unit* that *entries* are put into their node, and that the messages with *sequences*,
        of which they were made, leave *stage*; nothing is left there if these are the *last* ones."""
        assert self.journal is not None
        # The queue delivers them in turns, even if few of them are stored.
        unit.gathers = len(entries) > _FEW
        with self.journal.joined(unit):
            if entries:
                _put_stored(producer.destination.inlet, entries, unit)
            for sequence in sequences:
                unit.remove(stage.number, sequence)
            if last:
                rest = [each for each in producer.publishing if each is not stage]
                self._keep(unit, producer, producer.epoch, producer.writes, rest)

    async def run(self) -> None:
        """Carry out requested commits, and publish epochs committed before a restart, until
        cancelled."""
        async with trio.open_nursery() as nursery:
            for producers in self._producers.values():
                for producer in producers.values():
                    if producer.publishing:
                        nursery.start_soon(self._resume, producer)
            while True:
                await self._work.wait()
                self._work = trio.Event()
                asked, self._asked = self._asked, []
                for work in asked:
                    nursery.start_soon(work)

    async def _resume(self, producer: EpochProducer) -> None:
        """Publish an epoch committed before the broker was started."""
        try:
            async with producer.busy:
                await self._publish(producer)
        except AmqpError as error:
            _log.error("not published: epoch %d of %r: %s", producer.epoch, producer.name, error)
        except Exception as error:
            self.on_fault(producer.destination, error)

    # --- Storage ---

    async def restore(self, destinations: Mapping[int, Destination]) -> int:
        """Restore stages and producers of *destinations*, given by number, from the store; return the
        highest number of a stage."""
        journal = self.journal
        assert journal is not None
        highest = 0
        now = self.clock.wall()
        stages: dict[int, Stage] = {}
        for key, value in await facts.STAGES.read(journal):
            number = facts.number_of(key)
            highest = max(highest, number)
            known = facts.STAGES.decode(value)
            destination = destinations.get(known.node)
            stage = Stage(self, known.claim, number, known.began)
            _, size, _, last = await journal.call(journal.store.summary, number)
            stage.restored(last, size)
            if destination is None:
                self._forget(stage)
                continue
            stages[number] = stage
            name = known.claim.producer
            producers = self._producers.setdefault(destination, {})
            producer = producers.setdefault(name, EpochProducer(destination, name, now))
            producer.stages[stage.key] = stage
            self._stages[stage] = producer
        for key, value in await facts.PRODUCERS.read(journal):
            destination = destinations.get(facts.number_of(key))
            if destination is None:
                facts.PRODUCERS.forget(journal.loose, key)
                continue
            kept = facts.PRODUCERS.decode(value)
            name = facts.name_of(key)
            producers = self._producers.setdefault(destination, {})
            producer = producers.setdefault(name, EpochProducer(destination, name, now))
            producer.used = kept.used or now
            producer.runs = kept.runs
            producer.epoch = kept.epoch
            if kept.writes is not None:
                producer.writes = kept.writes
            elif kept.epoch >= 0:
                producer.writes = (Write("", None),)
            producer.publishing = [stages[number] for number in kept.publishing if number in stages]
            for stage in producer.publishing:
                del producer.stages[stage.key]
        return highest

    def sweep(self) -> None:
        """Drop old stages that have no link and were not committed."""
        oldest = self.clock.wall() - self.limits.stage_s
        for stage, producer in list(self._stages.items()):
            if (
                stage.began < oldest
                and stage.link is None
                and producer.stages.get(stage.key) is stage
                and not producer.destination.inlet.node.deleted
            ):
                try:
                    self._drop(producer, stage)
                except Exception as error:
                    self.on_fault(producer.destination, error)

    def delete(self, destination: Destination) -> None:
        """Drop all stages and producers of *destination*, which is deleted."""
        error = Error("amqp:resource-deleted", "the node has been deleted")
        for producer in self._producers.pop(destination, {}).values():
            stages = [*producer.stages.values(), *producer.publishing]
            producer.publishing.clear()
            for stage in stages:
                self._drop(producer, stage, error)
            if destination.number and self.journal is not None:
                facts.PRODUCERS.forget(self.journal.loose, _producer_key(producer))


def _put_stored(inlet: Inlet, entries: list[Entry], unit: Unit) -> None:
    """Put *entries*, which have been admitted, into their node once *unit* is stored."""
    if any(entry.expires_at != NEVER for entry in entries):
        inlet.on_expiring()
    if inlet.ledger is not None:
        inlet.ledger.receive(entries)
    else:
        for entry in entries:
            unit.then(partial(inlet.node.put, entry))


def _put_held(inlet: Inlet, entries: list[Entry]) -> None:
    """Put *entries*, which have been admitted, into their node now."""
    if any(entry.expires_at != NEVER for entry in entries):
        inlet.on_expiring()
    node = inlet.node
    if not isinstance(node, MessageQueue):
        for entry in entries:
            node.put(entry)
        return
    # The queue delivers them in turns.
    node.gather()
    try:
        for entry in entries:
            node.put(entry)
    finally:
        node.deliver_gathered()


def _copies(inlet: Inlet) -> int:
    """Return how many copies of a message are stored at the node of *inlet*, at least 1."""
    return inlet.ledger.copies if isinstance(inlet.ledger, TopicLedger) else 1


def _content_of(parts: Sequence[Part]) -> str:
    """Return the fingerprint of messages for an identity without content, made from their parts."""
    crc = 0
    for part in sorted(parts, key=lambda each: each.part):
        crc = zlib.crc32(b"%d %d %d;" % (part.part, part.count, part.crc), crc)
    return f"{sum(part.count for part in parts)} messages in parts with the checksum {crc:08x}"


def _stolen(description: str) -> Error:
    return Error("amqp:link:stolen", description)


def _producer_key(producer: EpochProducer) -> bytes:
    return facts.name_key(producer.destination.number, producer.name)
