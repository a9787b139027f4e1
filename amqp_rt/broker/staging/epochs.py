"""A producer that publishes by epochs: its runs, its last epoch and the writes to it, and its stages."""

from __future__ import annotations

from typing import Final, Protocol

import trio

from ...errors import AmqpError
from ..durable.facts import Claim, Identity, Write
from ..producers import Inlet
from .stages import MessageStage

#: Condition of a commit refused because the epoch was committed with other content.
DIFFERENT: Final = "amqp_rt:epoch-different"


class StagedNode(Protocol):
    """Node that messages are staged for."""

    inlet: Inlet
    #: Its number in the store, 0 if it is not stored.
    number: int

    @property
    def uses_headers(self) -> bool:
        """Whether the node uses fields of the header, such as the priority."""


class EpochProducer:
    """Producer of one node."""

    def __init__(self, destination: StagedNode, name: str, used: float) -> None:
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
        self.stages: dict[tuple[int, int, int], MessageStage] = {}
        #: Stages of a committed epoch that have to be published, in order; no longer in ``stages``.
        self.publishing: list[MessageStage] = []
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
