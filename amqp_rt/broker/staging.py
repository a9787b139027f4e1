"""Messages that are published by epochs: all that the tasks of an epoch have sent, once, or nothing.

Who writes the results of a computation in steps, each of which may be done again after a failure,
says of each link which *producer* it belongs to, which *epoch* (step), which part of it, and which
attempt at that part. What comes on such a link is kept aside, where no consumer sees it (a
:class:`Stage`). One request commits an epoch: it names the attempts that count, with the number and
the checksum of their messages, and those are published, in that order. An epoch that is committed
already is not published again, however often it is asked for.

The number of an epoch does not say what it held: a checkpoint that was restored from a backup counts on from
an older number, and plans something else under it. So the producer keeps with its last epoch an
:class:`Identity` of each *write* to it. A repetition that is alike is skipped; one that is not is refused
with :data:`DIFFERENT`, since skipping it would lose messages, and publishing it would double some. An epoch
may have several writes: each is known by a name of its own, and a later run repeats them in their order.

A producer has *runs*. One that was not heard of before replaces the one before it: links of that are
detached with ``amqp:link:stolen``, and what it commits is refused, so that a process that was thought
dead cannot get in between.

In a store the decision is one fact. What follows from it is written in parts, each of which takes
messages from their stage and puts them into their node in one commit, and goes on after a restart:
however large an epoch is, it takes bounded memory.
"""

from __future__ import annotations

import logging
import zlib
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
from ..termini import Target
from ..values import Symbol
from .entries import Entry, Unwelcome, head_of, restored
from .expiry import NEVER
from .journal import Journal, Unit, accept, refuse
from .producers import FULL, NOT_KEPT, WINDOW, Inlet, Intake, Producer
from .queues import Memory
from .termini import key_of
from .transactions import UNKNOWN_TRANSACTION

_log = logging.getLogger("amqp_rt.broker")

#: What is offered to a link that stages messages, and the properties that make it one.
EPOCH_PUBLISH: Final = Symbol("amqp_rt:epoch-publish")
PRODUCER: Final = Symbol("amqp_rt:producer")
RUN: Final = Symbol("amqp_rt:run")
EPOCH: Final = Symbol("amqp_rt:epoch")
PART: Final = Symbol("amqp_rt:part")
ATTEMPT: Final = Symbol("amqp_rt:attempt")
#: Set by a link that goes on with what an earlier one of this attempt has staged.
RESUMES: Final = Symbol("amqp_rt:resumes")
#: Optional: the name of the write that the attempt belongs to, where an epoch has several.
WRITE: Final = Symbol("amqp_rt:write")
#: What the answer says: the epoch that was committed last, -1 if none was; and whether this write seems to be
#: published already, so that nothing has to be sent for it.
COMMITTED: Final = Symbol("amqp_rt:committed-epoch")
PUBLISHED: Final = Symbol("amqp_rt:published")

#: Condition of a commit that is refused because the epoch was committed with something else.
DIFFERENT: Final = "amqp_rt:epoch-different"

#: Kinds of facts: a producer of a node, by their number and name; and a stage, by its number.
PRODUCER_FACT: Final = "epoch-producer"
STAGE_FACT: Final = "epoch-stage"

#: The format of an entry that holds a batch of messages; not the one of the wire, which any message may say it has.
_BATCH: Final = -1

#: Characters of the names of producers and runs.
_NAME_MAX: Final = 256
_WHOLE_MAX: Final = 2**63 - 1
#: Messages and bytes that are published with one commit.
_RUN_MESSAGES: Final = 1_000
_RUN_BYTES: Final = 4 * 1024 * 1024
#: Bytes of a message, as far as credit goes: before any has come, and at least. Credit is promised for the
#: largest one that is staged, so that what has credit finds room.
_SIZE_FIRST: Final = 1024 * 1024
_SIZE_LEAST: Final = 4 * 1024
#: Seconds after which what did not fit the disk is tried again.
_RETRY_S: Final = 1.0


class Claim(Struct, frozen=True):
    """What a link says of the messages that it stages."""

    producer: str
    run: str
    epoch: int
    part: int
    attempt: int
    write: str = ""


class Identity(Struct, array_like=True, frozen=True):
    """What one write to an epoch is, beside the number of the epoch. New fields go to the end.

    Attributes:
        write: Name of the write, which is another one in each run; empty if an epoch has only one.
        query: Which computation has made the messages, whatever its run.
        plan: What the computation was to read, as it was planned; empty if it is not known.
        content: What tells the messages from others, whatever their order and their parts. Made of the parts
            if it is empty.
    """

    write: str = ""
    query: str = ""
    plan: str = ""
    content: str = ""

    def repeats(self, earlier: Identity) -> bool:
        """Whether this is *earlier* once more.

        One plan of one query is read once. Without plans the messages have to be the same.
        """
        return self.query == earlier.query and (
            bool(self.plan and self.plan == earlier.plan) or self.content == earlier.content
        )

    def __str__(self) -> str:
        by = f" of the query {self.query!r}" if self.query else ""
        return f"{self.content}{by}"


class Write(Struct, array_like=True, frozen=True):
    """One write to the epoch that was committed last, as the store keeps it. New fields go to the end."""

    #: The run that has committed it, or repeated it last.
    run: str
    #: None if it was committed before identities were kept: anything repeats it.
    identity: Identity | None


#: The identity of a commit that says nothing of itself but its parts.
_NOT_SAID: Final = Identity()


class Part(Struct, frozen=True):
    """One attempt that counts, and what it has to have sent: CRC-32 over its encoded messages."""

    part: int
    attempt: int
    count: int
    crc: int


class _KnownProducer(Struct, array_like=True):
    """A producer as the store keeps it. New fields go to the end."""

    runs: list[str]
    epoch: int
    #: Stages that are being published.
    publishing: list[int]
    #: When something was heard of it last.
    used: float = 0.0
    #: None if it was kept before identities were.
    writes: tuple[Write, ...] | None = None


class _KnownStage(Struct, array_like=True):
    """A stage as the store keeps it. New fields go to the end."""

    node: int
    claim: Claim
    began: float


class Destination(Protocol):
    """The node that messages are staged for."""

    inlet: Inlet
    #: Its number in the store, 0 if it is not there.
    number: int


def claim_of(link: ReceivingLink) -> Claim | Error | None:
    """What *link* wants to stage; None if it is a link like any other."""
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
    """What one link has sent for an epoch: where its messages are put, and what keeps them
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
        self.entries: list[Entry] = []
        #: Count and checksum are known: it was not found in the store.
        self.counted = True
        #: Messages on their way to the disk, which are not in ``count`` yet.
        self.writing = 0
        self._next = 0

    # --- Place ---

    def put(self, entry: Entry) -> None:
        """Keep *entry* in memory."""
        self.entries.append(entry)
        self.area.grow(self, len(entry.payload))
        self._count(entry)

    def fits(self, size: int) -> bool:
        """Whether there is room for *size* bytes."""
        return self.area.fits(size, volatile=not self.number)

    def hold(self, entry: Entry) -> None:
        """Never called: these links take part in no transaction."""

    def let_go(self, entry: Entry) -> None:
        """Never called: these links take part in no transaction."""

    def room_again(self) -> None:
        """Never called: these links take part in no transaction."""

    # --- Ledger ---

    def wants(self, entry: Entry) -> bool:
        """Everything is kept, whatever it says of itself: an epoch is whole or it is not there."""
        return True

    def reserve(self, entry: Entry) -> None:
        """Give *entry* its place."""
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
        """Keep *entries*, and answer *deliveries* then, which brought them."""
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

    def receive(self, entry: Entry) -> None:
        """Never called: only links bring messages here."""

    def restored(self, last: int, size: int) -> None:
        """Take up what the store has: messages up to the number *last*, *size* bytes of them."""
        self.counted = False
        self._next = last + 1
        self.area.grow(self, size)

    def left(self, link: ReceivingLink) -> None:
        """Forget *link*, which is over, unless another one has taken its place."""
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
    """A link that stages messages, alone or in batches."""

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        if not any(delivery.message_format == MESSAGE_BATCH for delivery in deliveries):
            super().deliver(link, deliveries)
            return
        # As for single messages: what was promised is used first.
        self.unpromised = self.early and len(deliveries) > self.promised
        self.intake.used(self)
        single: list[Any] = []
        for delivery in deliveries:
            if delivery.message_format != MESSAGE_BATCH:
                single.append(delivery)
                continue
            if single:
                Inlet.deliver(self, link, single)
                single = []
            if not self._deliver_batch(link, delivery):
                # The link is detached: what comes behind is not taken.
                break
        if single:
            Inlet.deliver(self, link, single)
        self.intake.top_up(self)

    def _deliver_batch(self, link: ReceivingLink, delivery: Any) -> bool:
        """Stage the messages of a batch, or refuse all of them; return whether the link goes on."""
        stage = self.node
        assert isinstance(stage, Stage)
        if delivery.state is not None and type(delivery.state) is not Received:
            link.detach(UNKNOWN_TRANSACTION)
            return False
        now, publisher, check = self.wall(), link.peer.container_id, self.check
        entries: list[Entry] = []
        # Each is what its octets say, whenever they are read.
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
            # All that is known of them can be read again when they are published.
            # Until they are counted, they need not be read again.
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
    """One producer of one node."""

    def __init__(self, destination: Destination, name: str, used: float) -> None:
        self.destination = destination
        self.name = name
        #: When something was heard of it last, by the wall clock.
        self.used = used
        #: Its runs, the latest one last.
        self.runs: list[str] = []
        #: The epoch that was committed last, and the writes to it, in order.
        self.epoch = -1
        self.writes: tuple[Write, ...] = ()
        #: epoch, part, attempt → stage
        self.stages: dict[tuple[int, int, int], Stage] = {}
        #: Stages of a committed epoch that are to be published, in order, and not among those any more.
        self.publishing: list[Stage] = []
        #: Held while an epoch is committed or published.
        self.busy = trio.Lock()
        #: A decision is being written, and whether the runs have changed meanwhile. Until the decision
        #: is kept or refused nothing else may be written of the producer: it would replace the decision,
        #: or keep one that is refused.
        self.deciding = False
        self.changed = False

    def has(self, claim: Claim) -> bool:
        """Whether the write of *claim* seems to be published already."""
        if claim.epoch != self.epoch:
            return claim.epoch < self.epoch
        return any(
            each.run != claim.run or each.identity is None or each.identity.write == claim.write
            for each in self.writes
        )

    def repeated(self, run: str, epoch: int, identity: Identity, count: int) -> int | None:
        """Find the write that one of *count* messages with *identity* repeats; None if it is a new one.

        Raises:
            AmqpError: Something else was committed in its place.
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
                    # The same request once more, whose answer was lost.
                    return at
            # A write without messages adds nothing, so nothing is lost with it.
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
    """What is staged at the nodes of a broker.

    Args:
        memory: Shared account of bytes.
        journal: Keeps what is staged for nodes that are in the store; None if there is none.
        clock: Whose wall clock says how old a stage is.
        limits: Bounds.
        new_number: Gives a number that nothing else has in the store.
        on_fault: Called with a destination and an unexpected error of its work; returns the refusal of it.
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
        #: Bytes of everything that is staged, and of the largest message since there was nothing.
        self.bytes = 0
        self._largest = 0
        self._producers: dict[Destination, dict[str, EpochProducer]] = {}
        self._stages: dict[Stage, EpochProducer] = {}
        #: Commits that were asked for, and what is left to be published since a restart.
        self._asked: list[Callable[[], Any]] = []
        self._work = trio.Event()

    # --- Room (producers.Node) ---

    def room(self) -> int:
        """Return how many messages may be promised, with an eighth of the room in reserve.

        Refusing a message that has credit would break the order of its part, or end it. So credit is
        withheld in time, and whoever has some may go on when less memory or room is left than was thought.
        """
        left = self.limits.staged_bytes_max * 7 // 8 - self.bytes
        if left <= 0 or self.memory.scarce:
            return 0
        size = max(self._largest, _SIZE_LEAST) if self._largest else _SIZE_FIRST
        return min(WINDOW * len(self._intake.producers), max(left // size, 1))

    def fits(self, size: int, *, volatile: bool) -> bool:
        """Return whether a message of *size* bytes, which has credit, may be staged.

        The last one may go beyond the bound.
        """
        if size > self.limits.staged_bytes_max or self.bytes >= self.limits.staged_bytes_max:
            return False
        return not volatile or self.memory.held + size <= self.memory.limit

    def grow(self, stage: Stage, size: int) -> None:
        """*stage* has *size* bytes more, or less."""
        stage.bytes += size
        self.bytes += size
        self._largest = max(self._largest, size) if self.bytes else 0
        if not stage.number:
            self.memory.held += size
        if self.awaited:
            # Messages that are smaller than was thought leave room, too.
            self.on_room()
        if size < 0 and not stage.number:
            self.memory.tell()

    def note_batch(self, size: int) -> None:
        """Promise credit for batches of *size* bytes: one delivery of credit takes that much."""
        self._largest = max(self._largest, size)

    def payloads_of(self, entry: Entry) -> list[bytes]:
        """Return the messages that are kept in *entry*, which may be a batch."""
        if entry.message_format != _BATCH:
            return [entry.payload]
        # More than the limit was refused, which may have been another one then.
        return read_messages(entry.payload, len(entry.payload))

    def entries_of(self, entry: Entry) -> list[Entry]:
        """Return *entry*, or an entry for each of the messages that it holds.

        Raises:
            DecodeError: One was admitted under other limits.
        """
        if entry.message_format != _BATCH:
            return [entry]
        found = []
        for payload in self.payloads_of(entry):
            head = walk_head(payload, self.limits)
            found.append(
                Entry(
                    payload,
                    MESSAGE_FORMAT,
                    head.durable,
                    head.priority,
                    head.first_acquirer,
                    head.delivery_count,
                    publisher=entry.publisher,
                )
            )
        return found

    # --- Links ---

    def attach(
        self, destination: Destination, link: ReceivingLink, claim: Claim, target: Target | None
    ) -> None:
        """Let *link* stage messages for *destination*, or refuse it; *target* is its answer.

        An attempt that attaches again begins anew, unless the link says that it resumes: then it goes on
        with what is staged, after it has asked how much that is (:meth:`count`).
        """
        stage: Stage | None = None
        try:
            producer = self._enter(destination, claim.producer, claim.run)
            earlier = producer.stages.get((claim.epoch, claim.part, claim.attempt))
            stolen = _stolen("another link stages this attempt")
            if earlier is not None and link.properties.get(RESUMES) is True:
                stage = earlier
                # The broker may not have noticed yet that the connection of the earlier link is gone.
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
        if MESSAGE_BATCHES in link.desired_capabilities:
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
            known = _KnownStage(destination.number, claim, stage.began)
            self.journal.loose.keep(STAGE_FACT, key_of(number), msgspec.msgpack.encode(known))
        return stage

    async def count(self, destination: Destination, claim: Claim) -> tuple[int, int]:
        """Return how many messages the stage of *claim* has, and their CRC-32, once all that has arrived
        is kept.

        Raises:
            AmqpError: A later run has taken over, or nothing is staged there.
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
        """The producer *name* of *destination*, whose latest run *run* is, from now on at least.

        Raises:
            AmqpError: A later run has replaced it, or there are too many producers.
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
        """Forget the one of *producers* that has been silent for longest, if that was long enough.

        Raises:
            AmqpError: It was not.
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
            self.journal.loose.forget(PRODUCER_FACT, _producer_key(oldest))

    def _keep_soon(self, producer: EpochProducer) -> None:
        """Write what is known of *producer* with what is written next, or after its decision."""
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
        """Let *unit* write that *producer* has committed *epoch* by *writes*, of which *publishing* is left."""
        numbers = [stage.number for stage in publishing]
        known = _KnownProducer(producer.runs, epoch, numbers, producer.used, writes)
        unit.keep(PRODUCER_FACT, _producer_key(producer), msgspec.msgpack.encode(known))

    def _drop(self, producer: EpochProducer, stage: Stage, error: Error | None = None) -> None:
        """Forget *stage* and its messages."""
        stage.deleted = True
        if producer.stages.get(stage.key) is stage:
            del producer.stages[stage.key]
        self._stages.pop(stage, None)
        link, stage.link = stage.link, None
        if link is not None:
            link.detach(error)
        self._forget(stage)

    def _forget(self, stage: Stage) -> None:
        """Nothing of *stage* is left: say so to the store, and give its room back."""
        if stage.number and self.journal is not None:
            unit = self.journal.loose
            unit.clear(stage.number)
            unit.forget(STAGE_FACT, key_of(stage.number))
        stage.entries.clear()
        self.grow(stage, -stage.bytes)

    # --- Committing ---

    def committed(self, destination: Destination, producer: str) -> int:
        """The epoch that *producer* has committed last at *destination*, -1 if none."""
        known = self._producers.get(destination, {}).get(producer)
        return -1 if known is None else known.epoch

    def query(self, destination: Destination, producer: str) -> str:
        """The query of the epoch that *producer* has committed last, empty if it did not say."""
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
        """Publish what *parts* name, once; whether that was not done before.

        When this returns all of it is in the node, and kept. Cancelled, it goes on.

        Args:
            destination: The node.
            producer: Who publishes there.
            run: Its run; the latest one, or a new one.
            epoch: What is committed.
            parts: Which attempts count.
            identity: What this write is.
            skip_different: Take what the epoch was committed with for this write, whatever it was.

        Raises:
            AmqpError: A later run has taken over; the epoch was committed with something else
                (:data:`DIFFERENT`); an attempt is not there, or has sent something
                else than is said; or it cannot be kept. Nothing is published then.
        """
        self._check_identity(identity)
        if not identity.content:
            identity = msgspec.structs.replace(identity, content=_content_of(parts))
        known = self._enter(destination, producer, run)
        done = trio.Event()
        found: list[bool | AmqpError] = []

        async def work() -> None:
            try:
                found.append(
                    await self._commit(
                        known, run, epoch, parts, identity, skip_different=skip_different
                    )
                )
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
        """Check that *identity* is not too long to be kept.

        Raises:
            AmqpError: It is.
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

    async def _commit(
        self,
        producer: EpochProducer,
        run: str,
        epoch: int,
        parts: Sequence[Part],
        identity: Identity,
        *,
        skip_different: bool,
    ) -> bool:
        async with producer.busy:
            # What was decided before comes first, in the node and in the store.
            await self._publish(producer)
            self._check(producer, run)
            if self._repeat(producer, run, epoch, parts, identity, skip_different=skip_different):
                self._sweep(producer, producer.epoch, identity.write)
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
            # While the store was read, another run may have taken over, attempts may have begun anew,
            # and the node may have been deleted. From here on nothing waits until all is decided.
            self._check(producer, run)
            stages = [self._verified(producer, epoch, part) for part in parts]
            if len(set(stages)) < len(stages):
                raise AmqpError("an attempt is named twice", condition="amqp:invalid-field")
            earlier = producer.writes if epoch == producer.epoch else ()
            await self._decide(producer, epoch, (*earlier, Write(run, identity)), stages)
            await self._publish(producer)
            self._check_there(producer)
            self._sweep(producer, epoch, identity.write)
            return True

    def _repeat(
        self,
        producer: EpochProducer,
        run: str,
        epoch: int,
        parts: Sequence[Part],
        identity: Identity,
        *,
        skip_different: bool,
    ) -> bool:
        """Note that *run* repeats a write; whether it does.

        Raises:
            AmqpError: As for :meth:`EpochProducer.repeated`.
        """
        count = sum(part.count for part in parts)
        try:
            at = producer.repeated(run, epoch, identity, count)
        except AmqpError:
            left = [at for at, each in enumerate(producer.writes) if each.run != run]
            if not skip_different or epoch < producer.epoch or not left:
                raise
            at = left[0]
        if at is None:
            return False
        writes = list(producer.writes)
        earlier, known = writes[at].run, writes[at].identity
        # A checkpoint that was restored has another plan now, which is the one that is repeated next. A
        # request without messages may only ask whether the epoch is committed: its content is not that of
        # the epoch.
        if known is None or (run != earlier and (identity.write or count)):
            known = identity
        writes[at] = Write(run, known)
        producer.writes = tuple(writes)
        self._keep_soon(producer)
        return True

    def _check(self, producer: EpochProducer, run: str) -> None:
        """Check that *run* is the latest one of *producer*, whose node is there.

        Raises:
            AmqpError: A later run has taken over, or as for :meth:`_check_there`.
        """
        self._check_there(producer)
        if run != producer.runs[-1]:
            raise AmqpError(
                f"a later run of {producer.name!r} has taken over", condition="amqp:link:stolen"
            )

    def _check_there(self, producer: EpochProducer) -> None:
        """Check that the node of *producer* is there, and in service.

        Raises:
            AmqpError: It has been deleted, or has failed.
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
                "broker again to go on with what is in its store",
                condition="amqp:internal-error",
            )

    async def _decide(
        self,
        producer: EpochProducer,
        epoch: int,
        writes: tuple[Write, ...],
        stages: list[Stage],
    ) -> None:
        """Commit *epoch*, which is what *stages* have, and then has *writes*.

        Raises:
            AmqpError: The decision cannot be kept; the stages are what they were.
        """
        for stage in stages:
            # Nothing is added to it any more.
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
            # Cancelled, it stays undecided, as it may be written yet.
            producer.epoch, producer.writes = epoch, writes
            self._decided(producer)
        else:
            producer.epoch, producer.writes = epoch, writes

    def _decided(self, producer: EpochProducer) -> None:
        """Let changes of *producer* be written again, beginning with those that have waited."""
        producer.deciding = False
        if producer.changed:
            self._keep_soon(producer)

    def _take_back(self, producer: EpochProducer, stages: list[Stage]) -> None:
        """Put *stages* back, which are not published, unless others have their places now."""
        for stage in stages:
            if stage.deleted:
                continue
            if stage.claim.run == producer.runs[-1] and stage.key not in producer.stages:
                producer.stages[stage.key] = stage
            else:
                self._drop(producer, stage)

    def _verified(self, producer: EpochProducer, epoch: int, part: Part) -> Stage:
        """The stage of *part*, which has what it has to have."""
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
        """Count what the store has of *stage*, which was there before the broker started."""
        journal = self.journal
        assert journal is not None
        first = count = crc = 0
        while True:
            found = await journal.call(
                journal.store.messages, stage.number, first, _RUN_MESSAGES, _RUN_BYTES
            )
            if not found:
                break
            for stored in found:
                entry = restored(stage.number, stored.sequence, stored.head, stored.payload)
                for payload in self.payloads_of(entry):
                    crc = zlib.crc32(payload, crc)
                    count += 1
            first = found[-1].sequence + 1
        stage.count, stage.crc, stage.counted = count, crc, True

    def _sweep(self, producer: EpochProducer, epoch: int, write: str) -> None:
        """Forget what was staged for that *write* to *epoch*, or for earlier epochs, and did not count."""
        for stage in list(producer.stages.values()):
            claim = stage.claim
            if claim.epoch < epoch or (claim.epoch == epoch and claim.write == write):
                self._drop(producer, stage, _stolen("its epoch is committed"))

    async def _publish(self, producer: EpochProducer) -> None:
        """Put what was committed into its node.

        Raises:
            AmqpError: The node has been deleted, or the store was given up: the rest is published
                when the broker is started again.
        """
        while producer.publishing:
            self._check_there(producer)
            stage = producer.publishing[0]
            if stage.number:
                await self._publish_stored(producer, stage)
            else:
                for entry in stage.entries:
                    _put(producer.destination.inlet, entry)
            # The deletion of the node forgets all of them.
            if stage in producer.publishing:
                producer.publishing.remove(stage)
                self._drop(producer, stage)
            await trio.lowlevel.checkpoint()

    async def _publish_stored(self, producer: EpochProducer, stage: Stage) -> None:
        """Publish *stage*, which is in the store; what cannot be read or written is tried again."""
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
        """Move messages of *stage* in one commit; whether it has no more of them.

        Raises:
            AmqpError: They cannot be read, or there is no room for them.
        """
        journal = self.journal
        assert journal is not None
        found = await journal.call(
            journal.store.messages, stage.number, 0, _RUN_MESSAGES, _RUN_BYTES
        )
        self._check_there(producer)
        last = len(found) < _RUN_MESSAGES and sum(len(each.payload) for each in found) < _RUN_BYTES
        entries: list[Entry] = []
        sequences: list[int] = []
        for stored in found:
            if len(entries) >= _RUN_MESSAGES:
                # The rest of what was read is read again.
                last = False
                break
            kept = restored(stage.number, stored.sequence, stored.head, stored.payload)
            entries += self.entries_of(kept)
            sequences.append(stored.sequence)
        rest = [each for each in producer.publishing if each is not stage]

        def fill(unit: Unit) -> None:
            with journal.joined(unit):
                for entry in entries:
                    _put(producer.destination.inlet, entry.again(), unit)
                for sequence in sequences:
                    unit.remove(stage.number, sequence)
                if last:
                    self._keep(unit, producer, producer.epoch, producer.writes, rest)

        await journal.keep(fill)
        return last

    async def run(self) -> None:
        """Commit what is asked for, and publish what was committed before a restart, until
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
        """Publish what was decided before the broker was started."""
        try:
            async with producer.busy:
                await self._publish(producer)
        except AmqpError as error:
            _log.error("not published: epoch %d of %r: %s", producer.epoch, producer.name, error)
        except Exception as error:
            self.on_fault(producer.destination, error)

    # --- Keeping ---

    async def restore(self, destinations: Mapping[int, Destination]) -> int:
        """Take up what the store has kept for *destinations*, which are by their numbers; the highest
        number of a stage."""
        journal = self.journal
        assert journal is not None
        highest = 0
        now = self.clock.wall()
        stages: dict[int, Stage] = {}
        for key, value in await journal.call(journal.store.facts, STAGE_FACT):
            number = int.from_bytes(key, "big")
            highest = max(highest, number)
            known = msgspec.msgpack.decode(value, type=_KnownStage)
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
        for key, value in await journal.call(journal.store.facts, PRODUCER_FACT):
            destination = destinations.get(int.from_bytes(key[:4], "big"))
            if destination is None:
                journal.loose.forget(PRODUCER_FACT, key)
                continue
            kept = msgspec.msgpack.decode(value, type=_KnownProducer)
            name = key[4:].decode()
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
        """Forget what was staged long ago, and nobody has committed."""
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
        """*destination* is no more, and neither is what was staged for it."""
        error = Error("amqp:resource-deleted", "the node has been deleted")
        for producer in self._producers.pop(destination, {}).values():
            stages = [*producer.stages.values(), *producer.publishing]
            producer.publishing.clear()
            for stage in stages:
                self._drop(producer, stage, error)
            if destination.number and self.journal is not None:
                self.journal.loose.forget(PRODUCER_FACT, _producer_key(producer))


def _put(inlet: Inlet, entry: Entry, unit: Unit | None = None) -> None:
    """Put *entry*, which has been admitted, into its node; with *unit*, when that is kept."""
    if entry.expires_at != NEVER:
        inlet.on_expiring()
    if inlet.ledger is not None and unit is not None:
        inlet.ledger.receive(entry)
    elif unit is not None:
        unit.then(partial(inlet.node.put, entry))
    else:
        inlet.node.put(entry)


def _content_of(parts: Sequence[Part]) -> str:
    """What is known of messages by their parts, when nothing else is said of them."""
    crc = 0
    for part in sorted(parts, key=lambda each: each.part):
        crc = zlib.crc32(b"%d %d %d;" % (part.part, part.count, part.crc), crc)
    return f"{sum(part.count for part in parts)} messages in parts with the checksum {crc:08x}"


def _stolen(description: str) -> Error:
    return Error("amqp:link:stolen", description)


def _producer_key(producer: EpochProducer) -> bytes:
    return key_of(producer.destination.number) + producer.name.encode()
