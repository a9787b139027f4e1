"""Transactions: posts, retirements and acquisitions that happen together or not at all (Part 4).

A :class:`Transaction` collects work without visible effect. Posted messages have room in their node,
but no sequence number; retired deliveries stay acquired. The discharge writes everything as one unit
of the journal. The effects become visible, and the controller gets its answer, once that unit is
stored. A rollback releases the room and restores the deliveries; credit that was used stays used.

A transaction belongs to the control link on which it was declared, and ends with it. All links of
that connection may use it; links of other connections cannot, not even with its id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, cast

from ..fronts.base import IncomingDelivery, LinkConnection, LinkSession, ReceivingLink
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import ACCEPTED, RELEASED, Error, Outcome, Received, Rejected, Released, rejected
from ..transactions import TransactionalState
from .durable.answers import InDoubt
from .durable.journal import Journal
from .durable.ledgers import QueueLedger
from .durable.units import Gathering, Unit
from .entries import NEVER, Entry
from .queue.subscriptions import DistributionNode, Enlisted, Subscription

if TYPE_CHECKING:
    from .durable.duplicates import Arrived, Duplicates
    from .producers import Inlet, Line

UNKNOWN_TRANSACTION: Final = Error("amqp:transaction:unknown-id", "there is no such transaction")
#: Maximum number of posts, and of retirements, that are delivered and answered at once. More are
#: committed at once too, but delivered and answered in turns (decision 0061).
_FEW: Final = 100
#: Posts and retirements that a dead letter counts for in the limit of a transaction's work.
_POSTS_PER_LETTER: Final = 4

_ROLLBACK: Final = "amqp:transaction:rollback"
_OUTGROWN: Final = (
    "its topics have more durable subscriptions than when messages were posted there, and each counts"
    " for a post: that is more than a transaction may have"
)


def _accept(delivery: IncomingDelivery) -> None:
    """Accept *delivery*, which was posted, unless it has been settled."""
    if not delivery.settled:
        delivery.settle(ACCEPTED)


def _accepting(deliveries: list[IncomingDelivery]) -> Iterator[None]:
    """Accept *deliveries*, one in each step."""
    for delivery in deliveries:
        _accept(delivery)
        yield


def _do_all(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


class Controller(Protocol):
    """Owner of a transaction."""

    def abort(self, error: Error) -> None:
        """Roll back the transactions of the controller because of *error*."""


class ControlEndpoint(Controller, Protocol):
    """Controller of the transactions that are declared on its link."""

    link: ReceivingLink


class Transaction:
    """Transaction: work that takes effect with its discharge."""

    #: Whether a rollback requeues messages even if their consumers hold them unsettled.
    requeues: ClassVar[bool] = False

    def __init__(
        self,
        control: Controller,
        txn_id: bytes,
        deadline: float,
        journal: Journal | None,
        work_max: int,
        do_in_turns: Callable[[Iterator[None]], None],
    ) -> None:
        self.control = control
        self.id = txn_id
        self.deadline = deadline
        #: Delivery state of messages that are acquired in the transaction.
        self.state = TransactionalState(txn_id)
        #: Why the transaction was rolled back before its discharge.
        self.error: Error | None = None
        #: Whether it was committed, and may still be written, or dropped with its control link.
        self.over = False
        #: Whether the discharge has arrived: no work is added any more.
        self.is_discharged = False
        #: Number of posts that arrived before the discharge and cannot be taken yet.
        self._held_posts = 0
        #: Performs the discharge when these have been taken or refused.
        self._end: Callable[[], None] | None = None
        self._journal = journal
        self._work_max = work_max
        self._do_in_turns = do_in_turns
        #: Posted messages: where, the entry, and the delivery if its sender settles it after us.
        self._posts: list[tuple[Inlet, Entry, IncomingDelivery | None]] = []
        #: Number of copies of posts for durable subscriptions, beyond one for each post.
        self._copies = 0
        #: Number of messages in posts of several, beyond one for each post.
        self._held_messages = 0
        self._work: dict[Enlisted, None] = {}
        self._acquiring: dict[Subscription, None] = {}
        #: Nodes to which a rollback still returns messages, and what to call after the last one.
        self._returning = 0
        self._after_return: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        """Number of the transaction, by which operators find it."""
        return str(int.from_bytes(self.id, "big"))

    @property
    def posts(self) -> int:
        """Number of messages posted."""
        return len(self._posts) + self._held_messages

    @property
    def deliveries(self) -> int:
        """Number of deliveries acquired or retired."""
        return len(self._work)

    @property
    def has_room(self) -> bool:
        """Whether the limit of work allows more."""
        return self.has_room_for(1)

    def has_room_for(self, count: int) -> bool:
        """Return whether the limit of work allows *count* messages or deliveries more."""
        work = len(self._posts) + self._copies + self._held_messages + len(self._work)
        return work + count <= self._work_max

    def too_much(self) -> Rejected:
        """Return the outcome of a post that the limit of work does not allow."""
        return rejected(
            "amqp:resource-limit-exceeded",
            f"the transaction has as many posts and deliveries as it may (transaction_work_max"
            f" {self._work_max})",
        )

    # --- Work ---

    def post(
        self, inlet: Inlet, entry: Entry, delivery: IncomingDelivery, *, messages: int = 1
    ) -> None:
        """Add *entry*, to be put at the discharge, and answer its sender provisionally (§4.4.1).

        It holds as many *messages*, each of which counts in the limit of work.

        An entry that arrived in pieces has its sequence number and its room already, and the pieces
        are on the disk: the unit that is written at the discharge makes it a message.
        """
        if entry.sequence < 0:
            inlet.node.reserve_room(entry)
        if inlet.ledger is not None:
            self._copies += inlet.ledger.copies - 1
        self._held_messages += messages - 1
        waits = delivery.second and not delivery.settled
        self._posts.append((inlet, entry, delivery if waits else None))
        delivery.settle(TransactionalState(self.id, ACCEPTED))

    def refuse(self, delivery: IncomingDelivery, outcome: Rejected | Released) -> None:
        """Refuse a post; if it was sent settled and its sender gets no outcome, fail as a whole."""
        if delivery.settled:
            why = "no queue takes it" if isinstance(outcome, Released) else outcome.error
            self.fail(f"a settled message was refused: {why}")
        delivery.settle(TransactionalState(self.id, outcome))

    def may_retire(self, subscription: Subscription, outcome: Outcome | None) -> bool:
        """Return whether a delivery may be retired with *outcome*; if not, fail the transaction."""
        if self.error is not None:
            return False
        if not subscription.allows(outcome):
            self.fail(f"{outcome!r} is not among the outcomes of the link")
        elif not self.has_room:
            self.fail(f"there may be {self._work_max} posts and deliveries in a transaction")
        return self.error is None

    def enlist(self, enlisted: Enlisted) -> None:
        """Add a delivery that was acquired or retired in the transaction."""
        self._work[enlisted] = None

    def acquire(self, subscription: Subscription) -> None:
        """Note that *subscription* acquires in the transaction until its discharge (§4.4.3)."""
        self._acquiring[subscription] = None

    def on_disposition(self, enlisted: Enlisted) -> bool:
        """Handle a later disposition of a delivery; return False if it is outside the transaction.

        In that case all transactions of the control link are rolled back, because work of a
        transaction may have no other outcome before the discharge (§4.4.2, §4.4.4).
        """
        if self.is_discharged or self.over:
            # Too late: the work is written as it was at the discharge.
            return True
        delivery = enlisted.delivery
        state = delivery.state
        subscription = enlisted.subscription
        if type(state) is TransactionalState and state.txn_id == self.id:
            if state.outcome is None or not subscription.allows(state.outcome):
                self.fail(f"{state.outcome!r} is not among the outcomes of the link")
            else:
                enlisted.outcome = cast("Outcome", state.outcome)
        elif state is None or type(state) is Received:
            if delivery.remote_settled:
                enlisted.outcome = subscription.default_outcome
        else:
            if not enlisted.acquired:
                # The new outcome is applied, and nothing is left to be rolled back.
                del self._work[enlisted]
                delivery.context = enlisted.entry
            self.control.abort(
                Error(_ROLLBACK, "a delivery got an outcome outside the transaction that has it")
            )
            return False
        return True

    def on_link_ended(self, enlisted: Enlisted) -> bool:
        """Note that the link of a delivery has ended; return whether its outcome comes from here."""
        if enlisted.outcome is None and not (self.is_discharged or self.over):
            del self._work[enlisted]
            return False
        enlisted.left = True
        return True

    # --- Ends ---

    def discharge(self, end: Callable[[], None]) -> None:
        """Stop adding work, and call *end* once each post so far has been taken or refused."""
        self.is_discharged = True
        self._stop_acquiring()
        if self._held_posts:
            self._end = end
        else:
            end()

    def hold_discharge(self) -> None:
        """Delay the discharge for a post; :meth:`release_discharge` follows."""
        self._held_posts += 1

    def release_discharge(self) -> None:
        """Stop delaying the discharge for a post, which was taken or refused."""
        self._held_posts -= 1
        if not self._held_posts:
            self._answer_discharge()

    def _answer_discharge(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    def drop(self) -> None:
        """Roll back without a discharge, because the control link has ended."""
        self.over = True
        self._end = None
        self.roll_back()

    def fail(self, description: str, condition: str = _ROLLBACK) -> None:
        """Roll back now, and answer the discharge with an error."""
        if self.error is None and not self.over:
            self.error = Error(condition, description)
            self.roll_back()
            self._answer_discharge()

    def roll_back(self) -> None:
        """Undo all work (§4.4.4).

        Deliveries that their consumers hold unsettled are as before. Messages acquired in the
        transaction are released; deliveries that cannot return to their consumers get the default
        outcomes of their links. A node gets back many of them in later turns: see :meth:`when_returned`.
        """
        posts, self._posts = self._posts, []
        for inlet, entry, _ in posts:
            self._release_room(inlet, entry)
        for inlet in dict.fromkeys(inlet for inlet, _, _ in posts):
            inlet.node.notify_waiting()
        work, self._work = self._work, {}
        self._stop_acquiring()
        concluded: dict[DistributionNode, list[Enlisted]] = {}
        for enlisted in work:
            delivery = enlisted.delivery
            subscription = enlisted.subscription
            if enlisted.acquired:
                enlisted.outcome = RELEASED
            elif delivery.remote_settled or enlisted.left or self.requeues:
                enlisted.outcome = subscription.default_outcome
            else:
                delivery.context = enlisted.entry
                delivery.state = None
                continue
            # Later dispositions of its consumer have no effect.
            delivery.context = enlisted.outcome
            concluded.setdefault(subscription.node, []).append(enlisted)
        self._returning += len(concluded)
        for node, each in concluded.items():
            node.conclude_left(each, self._conclude_rolled_back, self._returned)
        self._finish_outcomes(work)

    def _returned(self) -> None:
        """Note that one more node has got back all that a rollback returns to it."""
        self._returning -= 1
        if not self._returning:
            waiting, self._after_return = self._after_return, []
            for call in waiting:
                call()

    def when_returned(self, call: Callable[[], None]) -> None:
        """Call *call* once all nodes have got back what a rollback returns to them; at once if they have.

        Nodes that are deleted or go out of service meanwhile are not waited for any longer.
        """
        if self._returning:
            self._after_return.append(call)
        else:
            call()

    def commit(self, done: Callable[[Error | None], None]) -> None:
        """Commit, and call *done* after that.

        *done* gets an error if nothing was done, or if that is unknown
        (:class:`~amqp_rt.broker.durable.answers.InDoubt`).
        """
        self.over = True
        inlets = {inlet: None for inlet, _, _ in self._posts}
        lines: dict[Line, None] = {}
        for inlet in inlets:
            line = None if inlet.ledger is None else inlet.ledger.line
            if line is not None:
                lines[line] = None
        left = 1

        entries = [entry for _, entry, _ in self._posts] if lines else []

        def go_on() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            try:
                if lines and self._is_too_large():
                    self.roll_back()
                    done(Error(_ROLLBACK, _OUTGROWN))
                else:
                    self._commit(list(inlets), done)
            finally:
                for line in lines:
                    line.forget(entries)

        # Earlier messages may wait for their turn at a topic: posts must not overtake them. Filters
        # of its durable subscriptions examine the posts in turns.
        for line in lines:
            posted = [
                entry
                for inlet, entry, _ in self._posts
                if inlet.ledger is not None and inlet.ledger.line is line
            ]
            if line.call_in_line(go_on, posted):
                left += 1
        go_on()

    def _commit(self, places: list[Inlet], done: Callable[[Error | None], None]) -> None:
        """Commit now; *places* are the destinations of the posts."""
        # Destination → whether it detects duplicates, determined once and not for each post.
        inlets = {inlet: inlet.intake.duplicates is not None for inlet in places}
        obstacle = self._find_error(inlets)
        if obstacle is not None:
            self._obstructed(Error(_ROLLBACK, obstacle), done)
            return
        self._stop_acquiring()
        if self._journal is None:
            self._commit_in_memory(inlets)
            self._finish({}, done)
        else:
            self._commit_stored(self._journal, inlets, done)

    def _find_error(self, inlets: dict[Inlet, bool]) -> str | None:
        """Return why posts to *inlets* cannot be put, None if they can."""
        if any(inlet.is_gone for inlet in inlets):
            return "a node to which a message was posted has been deleted"
        if any(inlets.values()) and any(
            self._is_undecided(inlet, entry) for inlet, entry, _ in self._posts
        ):
            return "the first message with the id of a posted one is being written"
        return None

    def _commit_in_memory(self, inlets: dict[Inlet, bool]) -> None:
        """Put the posts to *inlets*; many of them are delivered in turns."""
        # Message-ids of posts to queues that detect duplicates.
        arrived: dict[Duplicates, Arrived] = {}
        gathering: dict[Gathering, None] = {}
        if len(self._posts) > _FEW:
            for inlet in inlets:
                queue = inlet.intake.node.gathering
                if queue is not None:
                    gathering[queue] = None
        for queue in gathering:
            queue.gather()
        try:
            for inlet, entry, _ in self._posts:
                if inlets[inlet] and self._is_duplicate(inlet, entry, arrived):
                    self._cancel_post(inlet, entry)
                else:
                    self._put(inlet, entry)
        finally:
            for queue in gathering:
                queue.deliver_gathered()
        for each in arrived.values():
            each.kept()

    def _commit_stored(
        self, journal: Journal, inlets: dict[Inlet, bool], done: Callable[[Error | None], None]
    ) -> None:
        """Write posts and outcomes as one unit of *journal*; they take effect when it is stored."""
        # Verdicts on stored messages: written now, and applied when that is stored.
        results: dict[Enlisted, int] = {}
        before: dict[Enlisted, Entry] = {}

        def refused(error: Error) -> None:
            unit.undo()
            for enlisted, entry in before.items():
                enlisted.subscription.node.revert_outcome(enlisted.entry, entry)
            self._commit_refused(error, done)

        unit = Unit(refused)
        self._note_commit(unit)
        unit.gathers = len(self._posts) > _FEW
        letters_max = self._letters_max()
        with journal.joined(unit):
            self._write_posts(unit, inlets)
            for enlisted in self._work:
                node = enlisted.subscription.node
                entry = enlisted.entry
                if enlisted.outcome is not None and entry.stored:
                    before[enlisted] = copy(entry)
                    results[enlisted] = node.record_outcome(
                        enlisted.subscription, entry, enlisted.outcome
                    )
                    if unit.letters > letters_max:
                        break
        if unit.letters > letters_max:
            unit.refuse(
                Error(
                    "amqp:resource-limit-exceeded",
                    f"the messages that it gives up would make more than {letters_max} dead letters and"
                    " copies of them: discharge smaller transactions",
                )
            )
            return
        unit.then(partial(self._finish, results, done))
        journal.add(unit)

    def _obstructed(self, error: Error, done: Callable[[Error | None], None]) -> None:
        """Roll back, because posts cannot be put."""
        self.roll_back()
        done(error)

    def _letters_max(self) -> int:
        """Return how many dead letters a commit may make."""
        return self._work_max // _POSTS_PER_LETTER

    def _note_commit(self, unit: Unit) -> None:
        """Add to *unit*, which commits the transaction, what else has to be written with it."""

    def _commit_refused(self, error: Error, done: Callable[[Error | None], None]) -> None:
        """Roll back, because the unit of the commit was refused with *error* and undone."""
        self._posts.clear()
        self.roll_back()
        why = f"it cannot be kept: {error.description or error.condition}"
        done(error if isinstance(error, InDoubt) else Error(_ROLLBACK, why))

    def _write_posts(self, unit: Unit, inlets: dict[Inlet, bool]) -> None:
        """Add the posts to *inlets* to *unit*, with the message-ids of those that might have duplicates."""
        arrived: dict[Duplicates, Arrived] = {}
        # Posts to each stored queue.
        received: dict[QueueLedger, list[Entry]] = {}
        for inlet, entry, _ in self._posts:
            ledger = inlet.ledger
            if inlets[inlet] and self._is_duplicate(inlet, entry, arrived):
                give_room = partial(self._cancel_post, inlet, entry)
                unit.then(give_room, give_room, inlet.intake.node)
            elif ledger is None:
                unit.then(
                    partial(self._put, inlet, entry),
                    partial(self._cancel_post, inlet, entry),
                    inlet.intake.node,
                )
            elif (stored := ledger.pieces) is None:
                # Links to one log have a ledger each, and its records are in the order of the posts.
                inlet.node.release_room(entry)
                ledger.receive([entry])
            elif entry.sequence < 0:
                inlet.node.release_room(entry)
                received.setdefault(stored, []).append(entry)
            else:
                # It arrived in pieces, which are stored.
                stored.make(entry)
        for stored, entries in received.items():
            stored.receive(entries)
        for each in arrived.values():
            each.note(unit)

    def _is_too_large(self) -> bool:
        """Return whether new durable subscriptions of its topics make the transaction too large.

        Each copy counts as a post: writing too many at once would take too long.
        """
        copies = 0
        for inlet, _, _ in self._posts:
            if inlet.ledger is not None:
                copies += inlet.ledger.copies - 1
        size = len(self._posts) + copies + len(self._work)
        return copies > self._copies and size > self._work_max

    def _is_undecided(self, inlet: Inlet, entry: Entry) -> bool:
        """Return whether *entry* is a duplicate of a message that may still be refused."""
        duplicates = inlet.intake.duplicates
        if duplicates is None:
            return False
        first = duplicates.find(duplicates.identify(entry))
        return first is not None and first.pending

    def _is_duplicate(self, inlet: Inlet, entry: Entry, arrived: dict[Duplicates, Arrived]) -> bool:
        """Return whether *entry* is a duplicate and must not be put; if not, remember it."""
        duplicates = inlet.intake.duplicates
        identity = None if duplicates is None else duplicates.identify(entry)
        if duplicates is None or identity is None:
            return False
        if duplicates.find(identity) is not None:
            return True
        if duplicates not in arrived:
            arrived[duplicates] = duplicates.begin()
        arrived[duplicates].add(identity, durable=entry.durable)
        return False

    def _put(self, inlet: Inlet, entry: Entry) -> None:
        inlet.node.release_room(entry)
        inlet.node.put(entry)

    def _cancel_post(self, inlet: Inlet, entry: Entry) -> None:
        self._release_room(inlet, entry)
        inlet.node.notify_waiting()

    def _release_room(self, inlet: Inlet, entry: Entry) -> None:
        """Release the room of a post that is not put."""
        stored = None if inlet.ledger is None else inlet.ledger.pieces
        if entry.sequence >= 0 and stored is not None:
            # It arrived in pieces, which are stored.
            stored.cancel(entry)
        else:
            inlet.node.release_room(entry)

    def _finish(self, results: dict[Enlisted, int], done: Callable[[Error | None], None]) -> None:
        """Complete the commit, after the unit was stored and the posts were put."""
        try:
            self._apply(results)
        finally:
            # An error of a queue in a retirement changes nothing: the transaction is committed.
            done(None)

    def _apply(self, results: dict[Enlisted, int]) -> None:
        # Deliveries refer to their transaction and their link: a cycle would keep both in memory.
        posts, self._posts = self._posts, []
        work, self._work = self._work, {}
        waiting: list[IncomingDelivery] = []
        for inlet, entry, delivery in posts:
            if entry.expires_at != NEVER:
                inlet.on_expiring()
            if delivery is not None:
                waiting.append(delivery)
        # Their outcome is final.
        if len(waiting) <= _FEW:
            for delivery in waiting:
                _accept(delivery)
        else:
            self._do_in_turns(_accepting(waiting))
        retire = partial(self._retire_or_log, results)
        if len(work) <= _FEW:
            for enlisted in work:
                retire(enlisted)
        else:
            retired: dict[DistributionNode, list[Enlisted]] = {}
            for enlisted in work:
                if enlisted.outcome is None and not enlisted.left:
                    # Acquired only: once the discharge is answered its consumer may settle it.
                    retire(enlisted)
                else:
                    retired.setdefault(enlisted.subscription.node, []).append(enlisted)
            for node, some in retired.items():
                node.conclude_left(some, retire)
        self._finish_outcomes(work)

    def _retire_or_log(self, results: dict[Enlisted, int], enlisted: Enlisted) -> None:
        """Retire one delivery; with a journal, an error takes only its node out of service."""
        try:
            self._retire(enlisted, results.get(enlisted))
        except Exception as error:
            journal = self._journal
            if journal is None:
                raise
            journal.on_fault(enlisted.subscription.node, error)

    def _retire(self, enlisted: Enlisted, result: int | None) -> None:
        """Apply the outcome of one delivery, after the transaction was stored."""
        outcome = enlisted.outcome
        node = enlisted.subscription.node
        if result is not None:
            node.apply_outcome(enlisted.entry, result)
            self._answer(enlisted, cast("Outcome", outcome))
        elif outcome is not None:
            self._conclude(enlisted, outcome)
        elif enlisted.left:
            self._conclude(enlisted, enlisted.subscription.default_outcome)
        else:
            # Acquired, and without an outcome so far: from now on outside of a transaction.
            enlisted.delivery.context = enlisted.entry

    def _conclude(self, enlisted: Enlisted, outcome: Outcome) -> None:
        subscription = enlisted.subscription
        subscription.node.conclude(subscription, enlisted.entry, outcome)
        self._answer(enlisted, outcome)

    def _conclude_rolled_back(self, enlisted: Enlisted) -> None:
        try:
            self._conclude(enlisted, cast("Outcome", enlisted.outcome))
        except Exception as error:
            journal = self._journal
            if journal is None:
                raise
            journal.on_fault(enlisted.subscription.node, error)

    def _answer(self, enlisted: Enlisted, outcome: Outcome) -> None:
        delivery = enlisted.delivery
        delivery.context = outcome
        if not (delivery.settled or enlisted.left):
            enlisted.subscription.node.settle(delivery, enlisted.entry, outcome)

    def _finish_outcomes(self, work: dict[Enlisted, None]) -> None:
        journal = self._journal
        for node in dict.fromkeys(enlisted.subscription.node for enlisted in work):
            try:
                node.concluded()
            except Exception as error:
                if journal is None:
                    raise
                journal.on_fault(node, error)

    def _stop_acquiring(self) -> None:
        """Stop acquiring in the transaction; the credit stays, for deliveries outside of it."""
        for subscription in self._acquiring:
            if subscription.acquiring is self:
                subscription.acquiring = None
        self._acquiring.clear()


class Transactions:
    """Transactions of a broker.

    Args:
        journal: Stores committed transactions; None to store nothing.
        monotonic: Clock of their timeout.
        limits: Bounds.
        do_in_turns: Does the steps of long work, some in later turns; by default all at once.
    """

    def __init__(
        self,
        journal: Journal | None,
        monotonic: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
        do_in_turns: Callable[[Iterator[None]], None] | None = None,
    ) -> None:
        self.journal = journal
        self.do_in_turns = do_in_turns or _do_all
        self.monotonic = monotonic
        self.limits = limits
        #: Connection and id → open transaction, oldest first.
        self._open: dict[tuple[LinkConnection, bytes], Transaction] = {}
        #: Connection and id → transaction without a control link, to which work of the connection belongs.
        self._lent: dict[tuple[LinkConnection, bytes], Transaction] = {}
        #: Posts that have arrived and cannot be taken yet, with their transactions, whose discharges
        #: wait for them.
        self._held_posts: dict[IncomingDelivery, Transaction] = {}
        self._sessions: Counter[LinkSession] = Counter()
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def find(self, connection: LinkConnection, txn_id: object) -> Transaction | None:
        """Return transaction *txn_id* of *connection*; None if it is unknown or discharged."""
        if not isinstance(txn_id, bytes):
            return None
        key = connection, txn_id
        found = self._open.get(key) or self._lent.get(key)
        return None if found is None or found.is_discharged else found

    def find_for(self, link: ReceivingLink, delivery: IncomingDelivery) -> Transaction | None:
        """Return the transaction named in the state of *delivery*, None if there is none."""
        state = delivery.state
        if type(state) is not TransactionalState:
            return None
        found = self._held_posts.get(delivery)
        if found is not None:
            return None if found.over else found
        return self.find(link.connection, state.txn_id)

    def hold_post(self, link: ReceivingLink, delivery: IncomingDelivery) -> bool:
        """Delay the discharge for *delivery*, which has arrived and cannot be taken yet.

        Return whether it is posted in a transaction and was not delayed before; then :meth:`release_post`
        follows.
        """
        transaction = self.find_for(link, delivery)
        if transaction is None or delivery in self._held_posts:
            return False
        self._held_posts[delivery] = transaction
        transaction.hold_discharge()
        return True

    def release_post(self, delivery: IncomingDelivery) -> None:
        """Stop delaying the discharge for *delivery*, which was taken, refused or dropped."""
        transaction = self._held_posts.pop(delivery, None)
        if transaction is not None:
            transaction.release_discharge()

    def declare(self, control: ControlEndpoint) -> Transaction | Error:
        """Create a transaction; return an error if the session has too many."""
        session = control.link.session
        limits = self.limits
        if self._sessions[session] >= limits.transactions_max:
            return Error(
                "amqp:resource-limit-exceeded",
                f"a session may have {limits.transactions_max} transactions at a time",
            )
        self._sessions[session] += 1
        transaction = Transaction(
            control,
            self.new_id(),
            self.monotonic() + limits.transaction_s,
            self.journal,
            limits.transaction_work_max,
            self.do_in_turns,
        )
        self._open[control.link.connection, transaction.id] = transaction
        return transaction

    def new_id(self) -> bytes:
        """Return an id that no other transaction has."""
        self._last += 1
        return self._last.to_bytes(8, "big")

    def lend(self, connection: LinkConnection, transaction: Transaction) -> None:
        """Let links of *connection* post and retire in *transaction*, until :meth:`take_back`."""
        self._lent[connection, transaction.id] = transaction

    def take_back(self, connection: LinkConnection, transaction: Transaction) -> None:
        """Let links of *connection* add no more work to *transaction*."""
        self._lent.pop((connection, transaction.id), None)

    def forget(self, control: ControlEndpoint, transaction: Transaction) -> None:
        """Remove a transaction of *control* that is discharged, or whose control link has ended."""
        link = control.link
        del self._open[link.connection, transaction.id]
        self._sessions[link.session] -= 1
        if not self._sessions[link.session]:
            del self._sessions[link.session]

    def all_open(self) -> list[tuple[ReceivingLink, Transaction]]:
        """Return the transactions that are open, each after its control link, the oldest first."""
        return [(cast("ControlEndpoint", each.control).link, each) for each in self._open.values()]

    def oldest(self) -> tuple[ReceivingLink, Transaction] | None:
        """Return the transaction that has been open for the longest time, after its control link; None if none is open."""
        found = next(iter(self._open.values()), None)
        return None if found is None else (cast("ControlEndpoint", found.control).link, found)

    def overdue(self) -> list[Callable[[], None]]:
        """Return a function for each overdue transaction that rolls it back.

        Its controller gets the error in answer to the discharge.
        """
        now = self.monotonic()
        limit_s = self.limits.transaction_s
        found: list[Callable[[], None]] = []
        for transaction in self._open.values():
            if transaction.deadline > now:
                break
            said = f"it was not discharged within {limit_s:g} seconds"
            found.append(partial(transaction.fail, said, "amqp:transaction:timeout"))
        return found
