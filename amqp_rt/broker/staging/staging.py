"""Staging of a broker: links that stage messages, and the parts that commit and publish them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from ...batches import MESSAGE_BATCHES
from ...clock import Clock
from ...errors import AmqpError
from ...fronts.base import ReceivingLink
from ...limits import Limits
from ...outcomes import Error
from ...termini import Target
from ..durable.facts import Claim
from ..durable.journal import Journal
from ..producers import Producer
from ..queue.accounts import Memory
from .attempts import COMMITTED, EPOCH_PUBLISH, PUBLISHED, RESUMES
from .commits import Commits
from .epochs import StagedNode
from .publishing import Publishing
from .receiving import StagingProducer
from .registry import EpochProducers
from .stages import MessageStage, StagingArea, stolen


class Staging:
    """Staged messages of all nodes of a broker: their room, producers and commits.

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
        self._journal = journal
        self._limits = limits
        self.area = StagingArea(memory, journal, limits)
        self.producers = EpochProducers(self.area, journal, clock, limits, new_number, on_fault)
        publishing = Publishing(self.producers, journal, limits, on_fault)
        self.commits = Commits(self.producers, publishing, journal, limits, on_fault)

    def attach(
        self, destination: StagedNode, link: ReceivingLink, claim: Claim, target: Target | None
    ) -> None:
        """Attach *link* to stage messages for *destination*, or refuse it; *target* is its answer.

        An attempt that attaches again starts from nothing, unless the link resumes it: then it continues
        with the staged messages, having asked for their number (:meth:`count`).
        """
        stage: MessageStage | None = None
        try:
            producer = self.producers.enter(destination, claim.producer, claim.run)
            earlier = producer.stages.get((claim.epoch, claim.part, claim.attempt))
            replaced = stolen("another link stages this attempt")
            if earlier is not None and link.properties.get(RESUMES) is True:
                stage = earlier
                # The broker may not have noticed yet that the connection of the earlier link is lost.
                if stage.link is not None:
                    stage.link.detach(replaced)
            elif earlier is not None:
                self.producers.drop(producer, earlier, replaced)
            elif len(self.producers.stages) >= self._limits.stages_max:
                raise AmqpError(
                    f"{len(self.producers.stages)} attempts are staged already",
                    condition="amqp:resource-limit-exceeded",
                )
        except AmqpError as error:
            link.refuse(Error.of(error))
            return
        if stage is None:
            stage = self.producers.begin(producer, claim)
        stage.link = link
        inlet = destination.inlet
        offered = [EPOCH_PUBLISH]
        kind = Producer
        # A batch is published in one step, which for a topic would write very many copies.
        if MESSAGE_BATCHES in link.desired_capabilities and (
            inlet.ledger is None or inlet.ledger.line is None
        ):
            offered.append(MESSAGE_BATCHES)
            kind = StagingProducer
        endpoint = kind(
            self.area.intake,
            stage,
            inlet.entry_factory,
            inlet.wall,
            ttl_s=inlet.ttl_s,
            ledger=stage if stage.number else None,
            volatile=inlet.volatile,
            check=inlet.check,
        )
        endpoint.on_end.append(partial(stage.left, link))
        link.accept(
            endpoint,
            max_message_size=self._limits.message_size_max,
            offered_capabilities=offered,
            properties={COMMITTED: producer.epoch, PUBLISHED: producer.has(claim)},
            target=target,
        )

    async def count(self, destination: StagedNode, claim: Claim) -> tuple[int, int]:
        """Return the number and the CRC-32 of the staged messages of *claim*, once all of them that have
        arrived are stored.

        Raises:
            AmqpError: A later run has replaced this one, or the attempt has no stage.
        """
        producer = self.producers.enter(destination, claim.producer, claim.run)
        while True:
            stage = producer.stages.get((claim.epoch, claim.part, claim.attempt))
            if stage is None:
                raise AmqpError(
                    f"there is no attempt {claim.attempt} at part {claim.part} of epoch {claim.epoch}",
                    condition="amqp:precondition-failed",
                )
            if stage.writing and self._journal is not None:
                kept = trio.Event()
                self._journal.when_kept(kept.set)
                await kept.wait()
            elif not stage.counted:
                await stage.recount()
            else:
                return stage.count, stage.crc
