"""Registry of the producers of all nodes and their stages, as facts of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...clock import Clock
from ...errors import AmqpError
from ...limits import Limits
from ...outcomes import Error
from ..durable import facts
from ..durable.facts import Claim, Write
from ..durable.journal import Journal
from ..durable.units import Unit
from .epochs import EpochProducer, StagedNode
from .stages import MessageStage, StagingArea, stolen


class EpochProducers:
    """Producers that publish by epochs, and their stages, of all nodes of a broker.

    Args:
        area: Room of the stages.
        journal: Writes the stages of stored nodes; None if there is no store.
        clock: Its wall clock measures the age of stages.
        limits: Bounds.
        new_number: Returns a number unused in the store.
        on_fault: Called with a node and an unexpected error of its work.
    """

    def __init__(
        self,
        area: StagingArea,
        journal: Journal | None,
        clock: Clock,
        limits: Limits,
        new_number: Callable[[], int],
        on_fault: Callable[[Any, Exception], AmqpError],
    ) -> None:
        self._area = area
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._new_number = new_number
        self._on_fault = on_fault
        #: node → name → producer
        self.by_node: dict[StagedNode, dict[str, EpochProducer]] = {}
        #: stage → producer, until the stage is dropped
        self.stages: dict[MessageStage, EpochProducer] = {}

    def enter(self, destination: StagedNode, name: str, run: str) -> EpochProducer:
        """Return producer *name* of *destination*; a new *run* becomes its latest one.

        Raises:
            AmqpError: A later run has replaced *run*, or there are too many producers.
        """
        producers = self.by_node.setdefault(destination, {})
        producer = producers.get(name)
        now = self._clock.wall()
        if producer is None:
            if len(producers) >= self._limits.epoch_producers_max:
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
            del runs[: -self._limits.epoch_runs_max]
            for stage in list(producer.stages.values()):
                if stage.claim.run != run:
                    self.drop(producer, stage, stolen(f"a later run of {name!r} has taken over"))
            self.keep_soon(producer)
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
        least = self._limits.epoch_producer_s
        if oldest is None or now - oldest.used < least:
            raise AmqpError(
                f"the node has {len(producers)} producers already, and forgets none of which it has "
                f"heard in the last {least / 86_400:.0f} days: use fewer names",
                condition="amqp:resource-limit-exceeded",
            )
        del producers[oldest.name]
        if oldest.destination.number and self._journal is not None:
            facts.PRODUCERS.remove(self._journal.loose, _producer_key(oldest))

    def keep_soon(self, producer: EpochProducer) -> None:
        """Write the state of *producer* with the next changes, or after its decision."""
        producer.changed = producer.deciding
        if not producer.deciding and producer.destination.number and self._journal is not None:
            self.keep(
                self._journal.loose, producer, producer.epoch, producer.writes, producer.publishing
            )

    def keep(
        self,
        unit: Unit,
        producer: EpochProducer,
        epoch: int,
        writes: tuple[Write, ...],
        publishing: Sequence[MessageStage],
    ) -> None:
        """Add to *unit* that *producer* has committed *epoch* by *writes*; *publishing* is left to do."""
        numbers = [stage.number for stage in publishing]
        known = facts.ProducerFact(producer.runs, epoch, numbers, producer.used, writes)
        facts.PRODUCERS.put(unit, _producer_key(producer), known)

    def drop(
        self, producer: EpochProducer, stage: MessageStage, error: Error | None = None
    ) -> None:
        """Drop *stage* and its messages, and detach its link with *error*."""
        stage.deleted = True
        if producer.stages.get(stage.key) is stage:
            del producer.stages[stage.key]
        self.stages.pop(stage, None)
        link, stage.link = stage.link, None
        if link is not None:
            link.detach(error)
        self._forget(stage)

    def _forget(self, stage: MessageStage) -> None:
        """Delete *stage* from the store, and release its room."""
        if stage.number and self._journal is not None:
            unit = self._journal.loose
            unit.clear(stage.number)
            facts.STAGES.remove(unit, facts.key_of(stage.number))
        stage.entries.clear()
        self._area.grow(stage, -stage.bytes)

    def begin(self, producer: EpochProducer, claim: Claim) -> MessageStage:
        """Create the stage of *claim*, and record it in the store if its node is stored."""
        destination = producer.destination
        number = self._new_number() if destination.number else 0
        stage = MessageStage(self._area, claim, number, self._clock.wall())
        producer.stages[stage.key] = stage
        self.stages[stage] = producer
        if number:
            assert self._journal is not None
            known = facts.StageFact(destination.number, claim, stage.began)
            facts.STAGES.put(self._journal.loose, facts.key_of(number), known)
        return stage

    def committed(self, destination: StagedNode, producer: str) -> int:
        """Return the epoch that *producer* has committed last at *destination*, -1 if none."""
        known = self.by_node.get(destination, {}).get(producer)
        return -1 if known is None else known.epoch

    def query(self, destination: StagedNode, producer: str) -> str:
        """Return the query of the epoch that *producer* has committed last, empty if not given."""
        known = self.by_node.get(destination, {}).get(producer)
        if known is None or not known.writes or known.writes[-1].identity is None:
            return ""
        return known.writes[-1].identity.query

    def check_there(self, producer: EpochProducer) -> None:
        """Check that the node of *producer* exists and is in service.

        Raises:
            AmqpError: The node has been deleted, or has failed.
        """
        known = self.by_node.get(producer.destination, {}).get(producer.name)
        if known is not producer:
            raise AmqpError(
                f"the node for which {producer.name!r} stages messages has been deleted",
                condition="amqp:resource-deleted",
            )
        if producer.destination.inlet.is_gone:
            raise AmqpError(
                f"the node for which {producer.name!r} stages messages is out of service: start the "
                "broker again to continue with the contents of its store",
                condition="amqp:internal-error",
            )

    async def restore(self, destinations: Mapping[int, StagedNode]) -> int:
        """Restore stages and producers of *destinations*, given by number, from the store; return the
        highest number of a stage."""
        journal = self._journal
        assert journal is not None
        highest = 0
        now = self._clock.wall()
        stages: dict[int, MessageStage] = {}
        for key, value in await facts.STAGES.read(journal):
            number = facts.number_of(key)
            highest = max(highest, number)
            known = facts.STAGES.decode(value)
            destination = destinations.get(known.node)
            stage = MessageStage(self._area, known.claim, number, known.began)
            _, size, _, last = await journal.call(journal.store.summary, number)
            stage.restored(last, size)
            if destination is None:
                self._forget(stage)
                continue
            stages[number] = stage
            name = known.claim.producer
            producers = self.by_node.setdefault(destination, {})
            producer = producers.setdefault(name, EpochProducer(destination, name, now))
            producer.stages[stage.key] = stage
            self.stages[stage] = producer
        for key, value in await facts.PRODUCERS.read(journal):
            destination = destinations.get(facts.number_of(key))
            if destination is None:
                facts.PRODUCERS.remove(journal.loose, key)
                continue
            kept = facts.PRODUCERS.decode(value)
            name = facts.name_of(key)
            producers = self.by_node.setdefault(destination, {})
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
        oldest = self._clock.wall() - self._limits.stage_s
        for stage, producer in list(self.stages.items()):
            if (
                stage.began < oldest
                and stage.link is None
                and producer.stages.get(stage.key) is stage
                and not producer.destination.inlet.is_gone
            ):
                try:
                    self.drop(producer, stage)
                except Exception as error:
                    self._on_fault(producer.destination, error)

    def delete(self, destination: StagedNode) -> None:
        """Drop all stages and producers of *destination*, which is deleted."""
        error = Error("amqp:resource-deleted", "the node has been deleted")
        for producer in self.by_node.pop(destination, {}).values():
            stages = [*producer.stages.values(), *producer.publishing]
            producer.publishing.clear()
            for stage in stages:
                self.drop(producer, stage, error)
            if destination.number and self._journal is not None:
                facts.PRODUCERS.remove(self._journal.loose, _producer_key(producer))


def _producer_key(producer: EpochProducer) -> bytes:
    return facts.name_key(producer.destination.number, producer.name)
