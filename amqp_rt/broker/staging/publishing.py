"""Publishing: messages of a committed epoch move from their stages to their node."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio

from ...errors import AmqpError
from ...limits import Limits
from ..durable.journal import Journal
from ..durable.units import Unit
from ..entries import Entry
from ..expiry import NEVER
from ..producers import Inlet
from .batches import entries_of
from .epochs import EpochProducer
from .registry import EpochProducers
from .stages import RUN_BYTES, RUN_MESSAGES, MessageStage

_log = logging.getLogger("amqp_rt.broker")

#: Messages of a unit that are delivered as they are put into their queue, and not in turns.
_FEW: Final = 50
#: Seconds between attempts to publish messages that could not be read or written.
_RETRY_S: Final = 1.0


class Publishing:
    """Publication of committed messages at their nodes; with a store, in commits of bounded size."""

    def __init__(
        self,
        producers: EpochProducers,
        journal: Journal | None,
        limits: Limits,
        on_fault: Callable[[Any, Exception], AmqpError],
    ) -> None:
        self._producers = producers
        self._journal = journal
        self._limits = limits
        self._on_fault = on_fault

    async def publish(self, producer: EpochProducer) -> None:
        """Move the committed messages to their node.

        Raises:
            AmqpError: The node has been deleted, or the store was given up: the rest is published
                after the next start of the broker.
        """
        while producer.publishing:
            self._producers.check_there(producer)
            stage = producer.publishing[0]
            if stage.number:
                await self._publish_stored(producer, stage)
            else:
                await self._publish_held(producer, stage)
            # If the node has been deleted meanwhile, the stage is dropped already.
            if stage in producer.publishing:
                producer.publishing.remove(stage)
                self._producers.drop(producer, stage)
            await trio.lowlevel.checkpoint()

    async def _publish_held(self, producer: EpochProducer, stage: MessageStage) -> None:
        """Publish *stage*, which is in memory only, in turns.

        Raises:
            AmqpError: As for :meth:`publish`.
        """
        waiting = stage.entries
        while waiting:
            self._producers.check_there(producer)
            some = [waiting.popleft() for _ in range(min(len(waiting), RUN_MESSAGES))]
            _put_held(producer.destination.inlet, some)
            await trio.lowlevel.checkpoint()

    async def _publish_stored(self, producer: EpochProducer, stage: MessageStage) -> None:
        """Publish *stage*, which is in the store; retry failed reads and writes.

        Raises:
            AmqpError: As for :meth:`publish`.
        """
        journal = self._journal
        assert journal is not None
        warned = False
        while not stage.deleted:
            try:
                if await self._publish_some(producer, stage):
                    return
                warned = False
            except AmqpError as error:
                self._producers.check_there(producer)
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

    async def _publish_some(self, producer: EpochProducer, stage: MessageStage) -> bool:
        """Read messages of *stage* once, and move them, in commits of bounded size; return whether those
        were the last ones.

        Raises:
            AmqpError: They cannot be read, or there is no room for them.
        """
        journal = self._journal
        assert journal is not None
        found = await journal.call(journal.store.messages, stage.number, 0, RUN_MESSAGES, RUN_BYTES)
        last = len(found) < RUN_MESSAGES and sum(len(each.payload) for each in found) < RUN_BYTES
        waiting = deque(found)
        del found
        while True:
            self._producers.check_there(producer)
            inlet = producer.destination.inlet
            most = RUN_MESSAGES // _copies(inlet)
            entries: list[Entry] = []
            sequences: list[int] = []
            while waiting and len(entries) < max(most, 1):
                stored = waiting.popleft()
                sequences.append(stored.sequence)
                entries += entries_of(
                    stage.number,
                    stored,
                    self._limits,
                    headers=producer.destination.uses_headers,
                )
            fill = partial(
                self._move,
                producer=producer,
                stage=stage,
                entries=entries,
                sequences=sequences,
                last=last and not waiting,
            )
            await journal.write(fill)
            if not waiting:
                return last

    def _move(
        self,
        unit: Unit,
        producer: EpochProducer,
        stage: MessageStage,
        entries: list[Entry],
        sequences: list[int],
        *,
        last: bool,
    ) -> None:
        """Add to *unit* that *entries* are put into their node, and that the messages with *sequences*,
        of which they were made, leave *stage*; nothing is left there if these are the *last* ones."""
        assert self._journal is not None
        # The queue delivers them in turns, even if few of them are stored.
        unit.gathers = len(entries) > _FEW
        with self._journal.joined(unit):
            if entries:
                _put_stored(producer.destination.inlet, entries, unit)
            for sequence in sequences:
                unit.remove(stage.number, sequence)
            if last:
                rest = [each for each in producer.publishing if each is not stage]
                self._producers.keep(unit, producer, producer.epoch, producer.writes, rest)

    async def resume(self, producer: EpochProducer) -> None:
        """Publish an epoch committed before the broker was started."""
        try:
            async with producer.busy:
                await self.publish(producer)
        except AmqpError as error:
            _log.error("not published: epoch %d of %r: %s", producer.epoch, producer.name, error)
        except Exception as error:
            self._on_fault(producer.destination, error)


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
    queue = inlet.intake.node.gathering
    if queue is not None:
        # The queue delivers them in turns.
        queue.gather()
    try:
        for entry in entries:
            inlet.node.put(entry)
    finally:
        if queue is not None:
            queue.deliver_gathered()


def _copies(inlet: Inlet) -> int:
    """Return how many copies of a message are stored at the node of *inlet*, at least 1."""
    return 1 if inlet.ledger is None else inlet.ledger.copies
