"""Commits of epochs: requests are checked, decided, and then published."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio
from msgspec import Struct

from ...errors import AmqpError
from ...limits import Limits
from ..durable.facts import Identity, Write
from ..durable.journal import Journal
from .attempts import NAME_MAX, Part
from .epochs import EpochProducer, StagedNode
from .publishing import Publishing
from .registry import EpochProducers
from .stages import MessageStage, stolen

#: Identity of a commit that states only its parts.
_NOT_SAID: Final = Identity()


class CommitRequest(Struct, frozen=True):
    """Arguments of :meth:`Commits.commit`, for one producer."""

    run: str
    epoch: int
    parts: Sequence[Part]
    identity: Identity
    skip_different: bool


class Commits:
    """Commits of epochs, of all nodes of a broker."""

    def __init__(
        self,
        producers: EpochProducers,
        publishing: Publishing,
        journal: Journal | None,
        limits: Limits,
        on_fault: Callable[[Any, Exception], AmqpError],
    ) -> None:
        self._producers = producers
        self._publishing = publishing
        self._journal = journal
        self._limits = limits
        self._on_fault = on_fault
        #: Requested commits that ``run`` has not started yet.
        self._asked: list[Callable[[], Any]] = []
        self._work = trio.Event()

    async def commit(
        self,
        destination: StagedNode,
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
        asked = CommitRequest(run, epoch, parts, identity, skip_different)
        known = self._producers.enter(destination, producer, run)
        done = trio.Event()
        found: list[bool | AmqpError] = []

        async def work() -> None:
            try:
                found.append(await self._commit(known, asked))
            except AmqpError as error:
                found.append(error)
            except Exception as error:
                found.append(self._on_fault(destination, error))
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
            ("write", NAME_MAX),
            ("query", NAME_MAX),
            ("plan", self._limits.epoch_plan_max),
            ("content", NAME_MAX),
        ):
            length = len(getattr(identity, name))
            if length > most:
                raise AmqpError(
                    f"the {name} of an epoch has up to {most} characters, not {length}",
                    condition="amqp:invalid-field",
                )

    async def _commit(self, producer: EpochProducer, asked: CommitRequest) -> bool:
        epoch, parts = asked.epoch, asked.parts
        async with producer.busy:
            # Earlier decisions come first, in the node and in the store.
            await self._publishing.publish(producer)
            self._check(producer, asked.run)
            if self._repeat(producer, asked):
                self._sweep(producer, producer.epoch, asked.identity.write)
                return False
            if epoch == producer.epoch and len(producer.writes) >= self._limits.epoch_writes_max:
                raise AmqpError(
                    f"epoch {epoch} of {producer.name!r} has {len(producer.writes)} writes already: let "
                    "other writes have other producers",
                    condition="amqp:resource-limit-exceeded",
                )
            for part in parts:
                stage = producer.stages.get((epoch, part.part, part.attempt))
                if stage is not None and not stage.counted:
                    await stage.recount()
            # While the store was read, another run may have taken over, attempts may have started again,
            # and the node may have been deleted. From here to the decision there is no checkpoint.
            self._check(producer, asked.run)
            stages = [self._verified(producer, epoch, part) for part in parts]
            if len(set(stages)) < len(stages):
                raise AmqpError("an attempt is named twice", condition="amqp:invalid-field")
            earlier = producer.writes if epoch == producer.epoch else ()
            write = Write(asked.run, asked.identity)
            await self._decide(producer, epoch, (*earlier, write), stages)
            await self._publishing.publish(producer)
            self._producers.check_there(producer)
            self._sweep(producer, epoch, asked.identity.write)
            return True

    def _repeat(self, producer: EpochProducer, asked: CommitRequest) -> bool:
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
        self._producers.keep_soon(producer)
        return True

    def _check(self, producer: EpochProducer, run: str) -> None:
        """Check that *run* is the latest one of *producer*, and that the node exists.

        Raises:
            AmqpError: A later run has replaced this one, or as for :meth:`EpochProducers.check_there`.
        """
        self._producers.check_there(producer)
        if run != producer.runs[-1]:
            raise AmqpError(
                f"a later run of {producer.name!r} has taken over", condition="amqp:link:stolen"
            )

    async def _decide(
        self,
        producer: EpochProducer,
        epoch: int,
        writes: tuple[Write, ...],
        stages: list[MessageStage],
    ) -> None:
        """Commit *epoch* with the messages of *stages*; it consists of *writes* afterwards.

        Raises:
            AmqpError: The decision cannot be stored; the stages are kept, as far as none has replaced
                them.
        """
        for stage in stages:
            # From here on no messages are added to the stage.
            if stage.link is not None:
                stage.link.detach(stolen("its epoch is committed"))
            del producer.stages[stage.key]
        producer.publishing = list(stages)
        if producer.destination.number and self._journal is not None:
            producer.deciding = True
            try:
                await self._journal.write(
                    partial(
                        self._producers.keep,
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
            self._producers.keep_soon(producer)

    def _take_back(self, producer: EpochProducer, stages: list[MessageStage]) -> None:
        """Restore *stages* that are not published, and drop those replaced by other ones."""
        for stage in stages:
            if stage.deleted:
                continue
            if stage.claim.run == producer.runs[-1] and stage.key not in producer.stages:
                producer.stages[stage.key] = stage
            else:
                self._producers.drop(producer, stage)

    def _verified(self, producer: EpochProducer, epoch: int, part: Part) -> MessageStage:
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

    def _sweep(self, producer: EpochProducer, epoch: int, write: str) -> None:
        """Drop the stages of *write* to *epoch*, and of earlier epochs, that were not committed."""
        for stage in list(producer.stages.values()):
            claim = stage.claim
            if claim.epoch < epoch or (claim.epoch == epoch and claim.write == write):
                self._producers.drop(producer, stage, stolen("its epoch is committed"))

    async def run(self) -> None:
        """Carry out requested commits, and publish epochs committed before a restart, until
        cancelled."""
        async with trio.open_nursery() as nursery:
            for producers in self._producers.by_node.values():
                for producer in producers.values():
                    if producer.publishing:
                        nursery.start_soon(self._publishing.resume, producer)
            while True:
                await self._work.wait()
                self._work = trio.Event()
                asked, self._asked = self._asked, []
                for work in asked:
                    nursery.start_soon(work)


def _content_of(parts: Sequence[Part]) -> str:
    """Return the fingerprint of messages for an identity without content, made from their parts."""
    crc = 0
    for part in sorted(parts, key=lambda each: each.part):
        crc = zlib.crc32(b"%d %d %d;" % (part.part, part.count, part.crc), crc)
    return f"{sum(part.count for part in parts)} messages in parts with the checksum {crc:08x}"
