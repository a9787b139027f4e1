"""Work of a branch: a transaction whose discharge is divided into prepare and commit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, ClassVar, Final, cast

from ...codec.composites import decode_composite, encode_composite
from ...outcomes import RELEASED, Accepted, Error, Modified, Outcome, Rejected, Released
from ..durable import facts
from ..durable.answers import InDoubt
from ..durable.facts import BranchFact
from ..durable.journal import Journal
from ..durable.ledgers import QueueLedger
from ..durable.units import Unit
from ..entries import Entry, head_of
from ..producers import Inlet
from ..queue.queue import MessageQueue
from ..queue.subscriptions import Enlisted, Subscription
from ..transactions import Transaction

#: Index of the target of a post that is not stored.
_UNSTORED: Final = -1
#: Identity of the subscription to which messages retired before a restart were delivered.
_FORMER: Final = -1
_OUT_OF_SERVICE: Final = Error(
    "amqp:internal-error",
    "a node of the branch is out of service: start the broker again, and then commit",
)


class _FormerDelivery:
    """Delivery of a retired message whose link ended with an earlier process."""

    __slots__ = ("context", "remote_settled", "settled", "state")

    def __init__(self) -> None:
        self.context: Any = None
        self.state: Any = None
        self.settled = self.remote_settled = True


class BranchWork(Transaction):
    """Posts and retirements of a branch.

    Once it is prepared, durable work survives the process: messages are stored under *number*, a node
    of the store that nothing else refers to, and retired ones stay acquired. A commit that cannot be
    stored leaves the work prepared.

    Args:
        txn_id: Id of the transaction.
        journal: Stores the work; None to keep it in memory.
        work_max: Maximum number of posts and retirements.
        do_in_turns: Does the steps of long work.
        number: Number in the store, 0 without one.
    """

    requeues: ClassVar[bool] = True

    def __init__(
        self,
        txn_id: bytes,
        journal: Journal | None,
        work_max: int,
        do_in_turns: Callable[[Iterator[None]], None],
        number: int,
    ) -> None:
        super().__init__(self, txn_id, inf, journal, work_max, do_in_turns)
        self.number = number
        #: Whether it is prepared: from now on a commit cannot fail for good.
        self.prepared = False
        #: Sequence numbers of the posts, negative, before the attempt to commit them.
        self._sequences: list[int] = []
        #: Places of all work once it is prepared, which changes no more; empty before they are asked for.
        self._places: dict[object, None] = {}
        #: Adds the end of the branch to the unit that commits it or rolls it back.
        self._note: Callable[[Unit], None] = _nothing
        #: Called when the work was rolled back because of an error.
        self.on_failed: Callable[[], None] = _do_nothing

    @property
    def is_empty(self) -> bool:
        """Whether there is no work."""
        return not (self._posts or self._work)

    def abort(self, error: Error) -> None:
        """Roll back because of *error*: the work is its own controller (§4.4.2)."""
        self.fail(error.description or str(error.condition))

    def fail(self, description: str, condition: str = "amqp:transaction:rollback") -> None:
        """Roll back now. Prepared work stays."""
        if not self.prepared and self.error is None and not self.over:
            super().fail(description, condition)
            self.on_failed()

    def touches(self, owns: Callable[[object], bool]) -> bool:
        """Return whether *owns* is true for the place of any work."""
        places = self._places
        if not places:
            places = dict.fromkeys(enlisted.subscription.node for enlisted in self._work)
            for inlet, _, _ in self._posts:
                places[inlet.intake] = None
            if self.prepared:
                self._places = places
        return any(owns(place) for place in places)

    # --- Prepare ---

    def prepare(self, fact: BranchFact, done: Callable[[Error | None], None]) -> None:
        """Prepare the work, and call *done* after that, with an error if it was rolled back instead.

        *fact* describes the branch; its posts and retirements are filled in. An
        :class:`~amqp_rt.broker.durable.answers.InDoubt` means that it is unknown whether it is stored:
        nothing was rolled back then.
        """
        obstacle = self._find_error(self._detecting())
        if obstacle is not None:
            self.fail(obstacle)
        if self.error is not None:
            done(self.error)
            return
        journal = self._journal
        if journal is None:
            self.prepared = True
            done(None)
            return

        def kept() -> None:
            self.prepared = True
            done(None)

        def refused(error: Error) -> None:
            if isinstance(error, InDoubt):
                done(error)
                return
            self.fail(f"it cannot be kept: {error.description or error.condition}")
            done(self.error)

        unit = Unit(refused)
        self._write_prepared(unit, fact)
        unit.then(kept)
        journal.add(unit)

    def _detecting(self) -> dict[Inlet, bool]:
        """Return the destinations of the posts, and whether each detects duplicates."""
        return {inlet: inlet.intake.duplicates is not None for inlet, _, _ in self._posts}

    def _write_prepared(self, unit: Unit, fact: BranchFact) -> None:
        """Add to *unit* the durable posts and *fact*."""
        targets: dict[str, int] = {}
        for place, (inlet, entry, _) in enumerate(self._posts):
            if entry.durable and inlet.ledger is not None:
                unit.put(self.number, place, head_of(entry), entry.payload)
                fact.posts.append(targets.setdefault(inlet.address, len(targets)))
            else:
                fact.posts.append(_UNSTORED)
        fact.targets.extend(targets)
        for enlisted in self._work:
            entry = enlisted.entry
            queue = enlisted.subscription.node
            ledger = queue.ledger if isinstance(queue, MessageQueue) else None
            if (
                enlisted.outcome is not None
                and entry.stored
                and entry.durable
                and isinstance(ledger, QueueLedger)
            ):
                outcome = encode_composite(enlisted.outcome)
                fact.retired.append((ledger.number, entry.sequence, outcome))
        facts.BRANCHES.put(unit, facts.key_of(self.number), fact)

    # --- The end of prepared work ---

    def commit_prepared(
        self, note: Callable[[Unit], None], done: Callable[[Error | None], None]
    ) -> None:
        """Commit prepared work, and call *done* after that, with an error if it is still prepared.

        An :class:`~amqp_rt.broker.durable.answers.InDoubt` means that it is unknown whether the commit is
        stored. *note* adds the end of the branch to the unit.
        """
        if any(inlet.is_gone for inlet, _, _ in self._posts):
            done(_OUT_OF_SERVICE)
            return
        if self._journal is not None and any(
            self._is_undecided(inlet, entry) for inlet, entry, _ in self._posts
        ):
            # The first message with the id of a post is being written: wait for that.
            self._journal.when_kept(partial(self.commit_prepared, note, done))
            return
        self._note = note
        self._sequences = [entry.sequence for _, entry, _ in self._posts]
        self.commit(done)

    def roll_back_prepared(
        self, note: Callable[[Unit], None], done: Callable[[Error | None], None]
    ) -> None:
        """Roll back prepared work, and call *done* after that, with an error if it is still prepared.

        *note* adds the end of the branch to the unit.
        """
        journal = self._journal
        if journal is None:
            self.roll_back()
            self.when_returned(partial(done, None))
            return

        def kept() -> None:
            self.roll_back()
            self.when_returned(partial(done, None))

        unit = Unit(done)
        note(unit)
        unit.clear(self.number)
        unit.then(kept)
        journal.add(unit)

    def _is_too_large(self) -> bool:
        """Return False for prepared work, which has to be committed whatever its size."""
        return not self.prepared and super()._is_too_large()

    def _note_commit(self, unit: Unit) -> None:
        if self.prepared:
            self._note(unit)
            unit.clear(self.number)

    def _letters_max(self) -> int:
        return sys.maxsize if self.prepared else super()._letters_max()

    def _obstructed(self, error: Error, done: Callable[[Error | None], None]) -> None:
        if self.prepared:
            # While the commit waited for its turn at a topic, a node went out of service, or a message with
            # the id of a post began to be written: look again, as prepared work cannot be undone.
            self.commit_prepared(self._note, done)
        else:
            super()._obstructed(error, done)

    def _commit_refused(self, error: Error, done: Callable[[Error | None], None]) -> None:
        if not self.prepared:
            super()._commit_refused(error, done)
            return
        if not isinstance(error, InDoubt):
            # The room was released with the preparations of the commit.
            for (inlet, entry, _), sequence in zip(self._posts, self._sequences, strict=True):
                entry.sequence = sequence
                inlet.node.reserve_room(entry)
        done(error)

    # --- Restoring ---

    def restore_post(self, inlet: Inlet, entry: Entry, sequence: int) -> None:
        """Add *entry*, which was posted before a restart; *sequence* is its number before it has one."""
        entry.stored = False
        entry.sequence = sequence
        inlet.node.reserve_room(entry)
        self._posts.append((inlet, entry, None))

    def restore_retirement(self, queue: MessageQueue, sequence: int, outcome: bytes) -> bool:
        """Acquire the message at *sequence* of *queue*, which was retired before a restart.

        Return False if it is gone.

        Raises:
            DecodeError: *outcome* is none.
        """
        kinds = Accepted, Rejected, Released, Modified
        decoded = cast("Outcome", decode_composite(outcome, *kinds))
        subscription = Subscription(queue, _FORMER, default_outcome=RELEASED)
        entry = queue.claim(subscription, sequence)
        if entry is None:
            return False
        delivery = _FormerDelivery()
        delivery.context = enlisted = Enlisted(
            subscription, self, entry, delivery=delivery, outcome=decoded
        )
        enlisted.left = True
        self.enlist(enlisted)
        return True

    def finish_restoring(self) -> None:
        """Make the restored work prepared."""
        self.is_discharged = True
        self.prepared = True


def _nothing(unit: Unit) -> None:
    """Write nothing: the branch is not prepared."""


def _do_nothing() -> None:
    """Do nothing."""
