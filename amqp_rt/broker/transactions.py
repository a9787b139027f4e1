"""Transactions: posts, retirements and acquisitions that happen together or not at all (Part 4).

A :class:`Transaction` gathers work and lets nobody see it. Posted messages have room in their node
and no place; deliveries that are retired stay acquired. Discharged, everything is written as one
unit of the journal, and only when that is kept does anything become visible and the controller
hear so. Rolled back, room is given back and deliveries are what they were before; credit that was
used stays used (decision 8).

A transaction belongs to the control link on which it was declared and goes with it. Any link of the
same connection may use it; links of other connections cannot name it, whatever id they say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..codec.composites import from_described
from ..errors import AmqpError, DecodeError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from ..outcomes import ACCEPTED, RELEASED, Error, Received, Rejected, rejected
from ..termini import Coordinator
from ..transactions import Declare, Declared, Discharge, TransactionalState
from ..values import Symbol
from .entries import NEVER, Entry
from .journal import InDoubt, Journal, QueueLedger, Unit
from .queues import MessageQueue
from .subscriptions import DistributionNode, Enlisted, Subscription
from .topics import TopicLedger

if TYPE_CHECKING:
    from .duplicates import Arrived, Duplicates
    from .producers import Inlet

#: What a coordinator here can do: any number of transactions in a session, each usable from all
#: sessions of the connection. None are distributed, and none can become so.
CAPABILITIES: Final = tuple(
    Symbol(each)
    for each in (
        "amqp:local-transactions",
        "amqp:multi-txns-per-ssn",
        "amqp:multi-ssns-per-txn",
    )
)

#: Credit of a control link, and bytes of a message there.
_CREDIT: Final = 100
_MESSAGE_MAX: Final = 16 * 1024

UNKNOWN_TRANSACTION: Final = Error("amqp:transaction:unknown-id", "there is no such transaction")
TOO_MUCH: Final = rejected(
    "amqp:resource-limit-exceeded", "there is no room for the message in its transaction"
)

#: Posts, and retirements, that are put or carried out at once. More of them are there at once, too, but
#: are delivered and answered in turns.
_FEW: Final = 100
#: What a dead letter counts.
_WORK_OF_A_LETTER: Final = 4

_ROLLBACK: Final = "amqp:transaction:rollback"
_OUTGROWN: Final = (
    "its topics have more durable subscriptions than when messages were posted there, and each counts"
    " for a post: that is more than a transaction may have"
)
_REJECTED: Final = "amqp:rejected:list"


def _has_come(entry: Entry) -> bool:
    """Whether a posted *entry* came in pieces, and has its place."""
    return entry.sequence >= 0


def _accept(delivery: IncomingDelivery) -> None:
    """Answer *delivery*, which was posted, unless it has been settled."""
    if not delivery.settled:
        delivery.settle(ACCEPTED)


def _accepting(deliveries: list[IncomingDelivery]) -> Iterator[None]:
    """Answer each of *deliveries*, one with each step."""
    for delivery in deliveries:
        _accept(delivery)
        yield


def _do_all(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


class Transaction:
    """Work that waits for its discharge."""

    def __init__(
        self,
        control: CoordinatorEndpoint,
        txn_id: bytes,
        deadline: float,
        journal: Journal | None,
        work_max: int,
        do_in_turns: Callable[[Iterator[None]], None],
    ) -> None:
        self.control = control
        self.id = txn_id
        self.deadline = deadline
        #: What acquired messages are sent with.
        self.state = TransactionalState(txn_id)
        #: Why it was rolled back before it was discharged.
        self.error: Error | None = None
        #: It was discharged, and is being written perhaps.
        self.over = False
        #: Its discharge has come: nothing new belongs to it.
        self.is_discharged = False
        #: Posts that came before the discharge and cannot be taken yet.
        self._coming = 0
        #: Carries out the discharge when those have been taken or refused.
        self._end: Callable[[], None] | None = None
        self._journal = journal
        self._work_max = work_max
        self._do_in_turns = do_in_turns
        #: What was posted, where, and the delivery if its sender waits to settle it after us.
        self._posts: list[tuple[Inlet, Entry, IncomingDelivery | None]] = []
        #: Copies of posts for durable subscriptions, beyond one of each.
        self._copies = 0
        self._work: dict[Enlisted, None] = {}
        self._acquiring: dict[Subscription, None] = {}

    @property
    def has_room(self) -> bool:
        """There may be more work in it."""
        return len(self._posts) + self._copies + len(self._work) < self._work_max

    # --- Work ---

    def post(self, inlet: Inlet, entry: Entry, delivery: IncomingDelivery) -> None:
        """Put *entry* once discharged; its sender hears that it will be accepted then (§4.4.1).

        One that came in pieces has its place and its room, and the pieces are on the disk: it becomes
        a message with what else is written then.
        """
        if not _has_come(entry):
            inlet.node.hold(entry)
        if isinstance(inlet.ledger, TopicLedger):
            self._copies += max(0, inlet.ledger.copies - 1)
        waits = delivery.second and not delivery.settled
        self._posts.append((inlet, entry, delivery if waits else None))
        delivery.settle(TransactionalState(self.id, ACCEPTED))

    def refuse(self, delivery: IncomingDelivery, outcome: Rejected) -> None:
        """A post is not wanted. Who settled it cannot hear that, so that all of it fails then."""
        if delivery.settled:
            self.fail(f"a settled message was rejected: {outcome.error}")
        delivery.settle(TransactionalState(self.id, outcome))

    def takes(self, subscription: Subscription, outcome: Any) -> bool:
        """Whether a delivery may be retired with *outcome*; if not, the transaction has failed."""
        if self.error is not None:
            return False
        if not subscription.allows(outcome):
            self.fail(f"{outcome!r} is not among the outcomes of the link")
        elif not self.has_room:
            self.fail(f"there may be {self._work_max} posts and deliveries in a transaction")
        return self.error is None

    def enlist(self, enlisted: Enlisted) -> None:
        """A delivery was acquired or retired in it."""
        self._work[enlisted] = None

    def acquire(self, subscription: Subscription) -> None:
        """What is sent to *subscription* is acquired in it until it is discharged (§4.4.3)."""
        self._acquiring[subscription] = None

    def hears(self, enlisted: Enlisted) -> bool:
        """The consumer has said more of its delivery; false if that is not within this transaction.

        It is rolled back in that case, and so are the others of its control link: what belongs to a
        transaction has no other fate before the discharge (§4.4.2, §4.4.4).
        """
        if self.is_discharged or self.over:
            # It is being written as it was.
            return True
        delivery = enlisted.delivery
        state = delivery.state
        subscription = enlisted.subscription
        if type(state) is TransactionalState and state.txn_id == self.id:
            if state.outcome is None or not subscription.allows(state.outcome):
                self.fail(f"{state.outcome!r} is not among the outcomes of the link")
            else:
                enlisted.outcome = state.outcome
        elif state is None or type(state) is Received:
            if delivery.remote_settled:
                enlisted.outcome = subscription.default_outcome
        else:
            if not enlisted.acquired:
                # What it says now is heard, and nothing is left to be rolled back.
                del self._work[enlisted]
                delivery.context = enlisted.entry
            self.control.abort(
                Error(_ROLLBACK, "a delivery got an outcome outside the transaction that has it")
            )
            return False
        return True

    def keeps(self, enlisted: Enlisted) -> bool:
        """The link of a delivery is over; whether its outcome is still to come from here."""
        if enlisted.outcome is None and not (self.is_discharged or self.over):
            del self._work[enlisted]
            return False
        enlisted.left = True
        return True

    # --- Ends ---

    def discharge(self, end: Callable[[], None]) -> None:
        """Take nothing new, and call *end* once each post that has come is taken or refused."""
        self.is_discharged = True
        self._stop_acquiring()
        if self._coming:
            self._end = end
        else:
            end()

    def hold(self) -> None:
        """Let the discharge wait for a post; :meth:`let_go` follows."""
        self._coming += 1

    def let_go(self) -> None:
        """End the wait for a post, which was taken or refused."""
        self._coming -= 1
        if not self._coming:
            self._carry_on()

    def _carry_on(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    def drop(self) -> None:
        """Roll back without a discharge, as the control link is gone."""
        self.over = True
        self._end = None
        self.roll_back()

    def fail(self, description: str, condition: str = _ROLLBACK) -> None:
        """It cannot be committed any more: roll back now, and say so at the discharge."""
        if self.error is None and not self.over:
            self.error = Error(condition, description)
            self.roll_back()
            self._carry_on()

    def roll_back(self) -> None:
        """Nothing of it has happened (§4.4.4).

        What its consumer still holds unsettled is as it was; what was acquired in it, or cannot go
        back to who had it, is available again, or gets the default outcome of its link.
        """
        posts, self._posts = self._posts, []
        for inlet, entry, _ in posts:
            self._let_go(inlet, entry)
        for inlet in dict.fromkeys(inlet for inlet, _, _ in posts):
            inlet.node.room_again()
        work, self._work = self._work, {}
        self._stop_acquiring()
        concluded: dict[DistributionNode, list[Enlisted]] = {}
        for enlisted in work:
            delivery = enlisted.delivery
            subscription = enlisted.subscription
            if enlisted.acquired:
                enlisted.outcome = RELEASED
            elif delivery.remote_settled or enlisted.left:
                enlisted.outcome = subscription.default_outcome
            else:
                delivery.context = enlisted.entry
                delivery.state = None
                continue
            # Whatever its consumer says from now on comes too late.
            delivery.context = enlisted.outcome
            concluded.setdefault(subscription.node, []).append(enlisted)
        for node, each in concluded.items():
            node.conclude_left(each, self._conclude_rolled_back)
        self._tell(work)

    def commit(self, done: Callable[[Error | None], None]) -> None:
        """Let all of it happen, and call *done* then; with an error if nothing has happened, or if
        whether it has is in doubt (:class:`~amqp_rt.broker.journal.InDoubt`)."""
        self.over = True
        inlets = {inlet: None for inlet, _, _ in self._posts}
        ledgers = {inlet.ledger: None for inlet in inlets}
        topics = [each for each in ledgers if isinstance(each, TopicLedger)]
        left = 1

        def go_on() -> None:
            nonlocal left
            left -= 1
            if not left:
                if topics and self._has_outgrown():
                    self.roll_back()
                    done(Error(_ROLLBACK, _OUTGROWN))
                else:
                    self._commit(list(inlets), done)

        # Messages that came before wait for their turn at a topic, and are not to be overtaken.
        for ledger in topics:
            if ledger.call_in_line(go_on):
                left += 1
        go_on()

    def _commit(self, places: list[Inlet], done: Callable[[Error | None], None]) -> None:
        """Commit now. Posts are at *places*."""
        #: Where there are posts, by what is known of it once and not for each of them.
        inlets = {inlet: inlet.intake.duplicates is not None for inlet in places}
        if any(inlet.node.deleted for inlet in inlets):
            self.roll_back()
            done(Error(_ROLLBACK, "a node to which a message was posted has been deleted"))
            return
        if any(inlets.values()) and any(
            self._is_undecided(inlet, entry) for inlet, entry, _ in self._posts
        ):
            self.roll_back()
            done(Error(_ROLLBACK, "the first message with the id of a posted one is being written"))
            return
        self._stop_acquiring()
        journal = self._journal
        #: The ids of what was posted to queues that remember them.
        arrived: dict[Duplicates, Arrived] = {}
        if journal is None:
            gathering: dict[MessageQueue, None] = {}
            if len(self._posts) > _FEW:
                for inlet in inlets:
                    if isinstance(inlet.node, MessageQueue):
                        gathering[inlet.node] = None
            for queue in gathering:
                queue.gather()
            try:
                for inlet, entry, _ in self._posts:
                    if self._comes_again(inlet, entry, arrived):
                        self._give_room(inlet, entry)
                    else:
                        self._put(inlet, entry)
            finally:
                for queue in gathering:
                    queue.deliver_gathered()
            for each in arrived.values():
                each.kept()
            self._finish({}, done)
            return
        #: What becomes of stored messages, which is written now and done when it is kept.
        verdicts: dict[Enlisted, int] = {}
        before: dict[Enlisted, Entry] = {}

        def refused(error: Error) -> None:
            unit.undo()
            for enlisted, entry in before.items():
                node = enlisted.subscription.node
                assert isinstance(node, MessageQueue)
                node.reprieve(enlisted.entry, entry)
            self._posts.clear()
            self.roll_back()
            why = f"it cannot be kept: {error.description or error.condition}"
            done(error if isinstance(error, InDoubt) else Error(_ROLLBACK, why))

        unit = Unit(refused)
        unit.gathers = len(self._posts) > _FEW
        #: What comes to each queue that has its messages in the store.
        received: dict[QueueLedger, list[Entry]] = {}
        letters_max = self._work_max // _WORK_OF_A_LETTER
        with journal.joined(unit):
            for inlet, entry, _ in self._posts:
                ledger = inlet.ledger
                if entry.sequence < 0 and type(ledger) is QueueLedger and not inlets[inlet]:
                    # Most of them.
                    received.setdefault(ledger, []).append(entry)
                elif self._comes_again(inlet, entry, arrived):
                    give_room = partial(self._give_room, inlet, entry)
                    unit.then(give_room, give_room, inlet.intake.node)
                elif inlet.ledger is None:
                    unit.then(
                        partial(self._put, inlet, entry),
                        partial(self._give_room, inlet, entry),
                        inlet.intake.node,
                    )
                elif _has_come(entry) and isinstance(inlet.ledger, QueueLedger):
                    inlet.ledger.make(entry)
                elif isinstance(inlet.ledger, QueueLedger):
                    received.setdefault(inlet.ledger, []).append(entry)
                else:
                    inlet.node.let_go(entry)
                    inlet.ledger.receive(entry)
            for stored, entries in received.items():
                stored.receive_all(entries)
            for each in arrived.values():
                each.note(unit)
            for enlisted in self._work:
                node = enlisted.subscription.node
                entry = enlisted.entry
                if enlisted.outcome is not None and entry.stored and isinstance(node, MessageQueue):
                    before[enlisted] = copy(entry)
                    verdicts[enlisted] = node.judge(enlisted.subscription, entry, enlisted.outcome)
                    if unit.letters > letters_max:
                        break
        if unit.letters > letters_max:
            unit.refuse(
                Error(
                    "amqp:resource-limit-exceeded",
                    f"the messages that it gives up would make more than {letters_max} dead letters:"
                    " discharge smaller transactions",
                )
            )
            return
        unit.then(partial(self._finish, verdicts, done))
        journal.add(unit)

    def _has_outgrown(self) -> bool:
        """Whether topics have so many more durable subscriptions than when messages were posted there
        that writing all copies would take too long."""
        copies = 0
        for inlet, _, _ in self._posts:
            if isinstance(inlet.ledger, TopicLedger):
                copies += max(0, inlet.ledger.copies - 1)
        size = len(self._posts) + copies + len(self._work)
        return copies > self._copies and size > self._work_max

    def _is_undecided(self, inlet: Inlet, entry: Entry) -> bool:
        """Whether *entry* is a duplicate of what may still be refused."""
        duplicates = inlet.intake.duplicates
        if duplicates is None:
            return False
        first = duplicates.find(duplicates.identify(entry))
        return first is not None and first.pending

    def _comes_again(self, inlet: Inlet, entry: Entry, arrived: dict[Duplicates, Arrived]) -> bool:
        """Whether *entry* is not to be put, because its queue has had it; if not, it has now."""
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
        inlet.node.let_go(entry)
        inlet.node.put(entry)

    def _give_room(self, inlet: Inlet, entry: Entry) -> None:
        self._let_go(inlet, entry)
        inlet.node.room_again()

    def _let_go(self, inlet: Inlet, entry: Entry) -> None:
        """What was posted does not come."""
        if _has_come(entry) and isinstance(inlet.ledger, QueueLedger):
            inlet.ledger.cancel(entry)
        else:
            inlet.node.let_go(entry)

    def _finish(self, verdicts: dict[Enlisted, int], done: Callable[[Error | None], None]) -> None:
        """It is kept, and the posts are there: do the rest."""
        try:
            self._carry_out(verdicts)
        finally:
            # Whatever a queue does with what it retires, the transaction is committed.
            done(None)

    def _carry_out(self, verdicts: dict[Enlisted, int]) -> None:
        # Deliveries refer to their transaction and their link: no cycle is to keep either.
        posts, self._posts = self._posts, []
        work, self._work = self._work, {}
        waiting: list[IncomingDelivery] = []
        for inlet, entry, delivery in posts:
            if entry.expires_at != NEVER:
                inlet.on_expiring()
            if delivery is not None:
                waiting.append(delivery)
        # The outcome depends on nothing any more.
        if len(waiting) <= _FEW:
            for delivery in waiting:
                _accept(delivery)
        else:
            self._do_in_turns(_accepting(waiting))
        retire = partial(self._retire_or_log, verdicts)
        if len(work) <= _FEW:
            for enlisted in work:
                retire(enlisted)
        else:
            retired: dict[DistributionNode, list[Enlisted]] = {}
            for enlisted in work:
                if enlisted.outcome is None and not enlisted.left:
                    # Its consumer may say its outcome as soon as the discharge is answered.
                    retire(enlisted)
                else:
                    retired.setdefault(enlisted.subscription.node, []).append(enlisted)
            for node, some in retired.items():
                node.conclude_left(some, retire)
        self._tell(work)

    def _retire_or_log(self, verdicts: dict[Enlisted, int], enlisted: Enlisted) -> None:
        """Retire one delivery. Where there is a journal, a fault is that of its node alone."""
        try:
            self._retire(enlisted, verdicts.get(enlisted))
        except Exception as error:
            journal = self._journal
            if journal is None:
                raise
            journal.on_fault(enlisted.subscription.node, error)

    def _retire(self, enlisted: Enlisted, verdict: int | None) -> None:
        """Do to one delivery what was decided in the transaction, which is kept."""
        outcome = enlisted.outcome
        node = enlisted.subscription.node
        if verdict is not None and isinstance(node, MessageQueue):
            node.carry_out(enlisted.entry, verdict)
            self._answer(enlisted, outcome)
        elif outcome is not None:
            self._conclude(enlisted, outcome)
        elif enlisted.left:
            self._conclude(enlisted, enlisted.subscription.default_outcome)
        else:
            # Acquired, and nothing more said of it so far.
            enlisted.delivery.context = enlisted.entry

    def _conclude(self, enlisted: Enlisted, outcome: Any) -> None:
        subscription = enlisted.subscription
        subscription.node.conclude(subscription, enlisted.entry, outcome)
        self._answer(enlisted, outcome)

    def _conclude_rolled_back(self, enlisted: Enlisted) -> None:
        self._conclude(enlisted, enlisted.outcome)

    def _answer(self, enlisted: Enlisted, outcome: Any) -> None:
        delivery = enlisted.delivery
        delivery.context = outcome
        if not (delivery.settled or enlisted.left):
            delivery.settle(outcome)

    def _tell(self, work: dict[Enlisted, None]) -> None:
        journal = self._journal
        for node in dict.fromkeys(enlisted.subscription.node for enlisted in work):
            try:
                node.concluded()
            except Exception as error:
                if journal is None:
                    raise
                journal.on_fault(node, error)

    def _stop_acquiring(self) -> None:
        """Credit stays, and what is sent for it from now on is in no transaction."""
        for subscription in self._acquiring:
            if subscription.acquiring is self:
                subscription.acquiring = None
        self._acquiring.clear()


class Transactions:
    """The transactions of a broker.

    Args:
        journal: Where they are written when they are committed, None for nowhere.
        monotonic: The clock of their timeout.
        limits: Bounds.
        do_in_turns: Does steps of which there may be many; by default all at once.
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
        #: By connection and id, oldest first.
        self._open: dict[tuple[Any, bytes], Transaction] = {}
        #: Posts that have come and cannot be taken yet, and where they belong: a discharge that comes
        #: after them waits for them.
        self._coming: dict[IncomingDelivery, Transaction] = {}
        self._sessions: Counter[Any] = Counter()
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def attach(self, link: ReceivingLink) -> None:
        """Make *link*, whose target is a coordinator, a control link (§4.5.1)."""
        link.accept(
            CoordinatorEndpoint(self, link),
            target=Coordinator(capabilities=CAPABILITIES),
            max_message_size=_MESSAGE_MAX,
        )

    def find(self, connection: Any, txn_id: object) -> Transaction | None:
        """The transaction that links of *connection* call *txn_id*, unless it was discharged."""
        if not isinstance(txn_id, bytes):
            return None
        found = self._open.get((connection, txn_id))
        return None if found is None or found.is_discharged else found

    def find_for(self, link: ReceivingLink, delivery: IncomingDelivery) -> Transaction | None:
        """The transaction that *delivery* says it is posted in, None if there is none."""
        state = delivery.state
        if type(state) is not TransactionalState:
            return None
        found = self._coming.get(delivery)
        if found is not None:
            return None if found.over else found
        return self.find(link.connection, state.txn_id)

    def hold(self, link: ReceivingLink, delivery: IncomingDelivery) -> bool:
        """Let the discharge wait for *delivery*, which has come and cannot be taken yet.

        Returns whether it is posted in a transaction; :meth:`let_go` follows then.
        """
        transaction = self.find_for(link, delivery)
        if transaction is None or delivery in self._coming:
            return False
        self._coming[delivery] = transaction
        transaction.hold()
        return True

    def let_go(self, delivery: IncomingDelivery) -> None:
        """End the wait for *delivery*, which was taken or refused, or will not be."""
        transaction = self._coming.pop(delivery, None)
        if transaction is not None:
            transaction.let_go()

    def declare(self, control: CoordinatorEndpoint) -> Transaction | Error:
        """A new transaction, unless the session has too many."""
        session = control.link.session
        limits = self.limits
        if self._sessions[session] >= limits.transactions_max:
            return Error(
                "amqp:resource-limit-exceeded",
                f"a session may have {limits.transactions_max} transactions at a time",
            )
        self._sessions[session] += 1
        self._last += 1
        transaction = Transaction(
            control,
            self._last.to_bytes(8, "big"),
            self.monotonic() + limits.transaction_s,
            self.journal,
            limits.transaction_work_max,
            self.do_in_turns,
        )
        self._open[control.link.connection, transaction.id] = transaction
        return transaction

    def forget(self, transaction: Transaction) -> None:
        """It is discharged, or its control link is over."""
        link = transaction.control.link
        del self._open[link.connection, transaction.id]
        self._sessions[link.session] -= 1
        if not self._sessions[link.session]:
            del self._sessions[link.session]

    def overdue(self) -> list[Callable[[], None]]:
        """What rolls back each transaction that takes too long; its controller hears so when it
        discharges it."""
        now = self.monotonic()
        limit_s = self.limits.transaction_s
        found: list[Callable[[], None]] = []
        for transaction in self._open.values():
            if transaction.deadline > now:
                break
            said = f"it was not discharged within {limit_s:g} seconds"
            found.append(partial(transaction.fail, said, "amqp:transaction:timeout"))
        return found


class CoordinatorEndpoint:
    """A control link: transactions are declared and discharged on it, and go with it (§4.1)."""

    def __init__(self, transactions: Transactions, link: ReceivingLink) -> None:
        self.link = link
        self._transactions = transactions
        self._open: dict[bytes, Transaction] = {}

    def on_attached(self, link: ReceivingLink) -> None:
        link.grant(_CREDIT)

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            if not link.attached:
                return
            self._take(delivery)
        if link.credit * 2 <= _CREDIT:
            link.grant(_CREDIT)

    def _take(self, delivery: IncomingDelivery) -> None:
        if delivery.settled:
            # Its sender has to hear the answer (§4.2, §4.3).
            self.abort(Error("amqp:not-allowed", "declare and discharge are not sent settled"))
            return
        if delivery.state is not None and type(delivery.state) is not Received:
            self.abort(Error("amqp:not-allowed", "a control link has no transactional work"))
            return
        try:
            said = from_described(Message.decode(delivery.payload).body, Declare, Discharge)
        except DecodeError as error:
            self._refuse(delivery, Error.of(error))
            return
        except AmqpError as error:
            self._refuse(delivery, Error("amqp:decode-error", error.description))
            return
        if isinstance(said, Declare):
            self._declare(delivery, said)
        elif isinstance(said, Discharge):
            self._discharge(delivery, said)

    def _declare(self, delivery: IncomingDelivery, declare: Declare) -> None:
        if declare.global_id is not None:
            self._refuse(
                delivery, Error("amqp:not-implemented", "there are no distributed transactions")
            )
            return
        declared = self._transactions.declare(self)
        if isinstance(declared, Error):
            self._refuse(delivery, declared)
        else:
            self._open[declared.id] = declared
            delivery.settle(Declared(declared.id))

    def _discharge(self, delivery: IncomingDelivery, discharge: Discharge) -> None:
        txn_id = discharge.txn_id
        transaction = self._open.get(txn_id) if isinstance(txn_id, bytes) else None
        if transaction is None or transaction.is_discharged:
            self._refuse(
                delivery,
                Error("amqp:transaction:unknown-id", "no such transaction was declared here"),
            )
            return
        transaction.discharge(partial(self._end, transaction, delivery, bool(discharge.fail)))

    def _end(self, transaction: Transaction, delivery: IncomingDelivery, fail: bool) -> None:
        """Carry out a discharge: all posts that came before it have been taken or refused."""
        del self._open[transaction.id]
        self._transactions.forget(transaction)
        if fail:
            transaction.roll_back()
            delivery.settle(ACCEPTED)
        elif transaction.error is not None:
            self._refuse(delivery, transaction.error)
        else:
            transaction.commit(partial(self._discharged, delivery))

    def _discharged(self, delivery: IncomingDelivery, error: Error | None) -> None:
        if error is None:
            delivery.settle(ACCEPTED)
        elif isinstance(error, InDoubt):
            self.abort(Error(error.condition, error.description))
        else:
            self._refuse(delivery, error)

    def _refuse(self, delivery: IncomingDelivery, error: Error) -> None:
        """Say so as the link's source lets us: where it has no *rejected*, with a detach (§4.2)."""
        source = self.link.source
        if source is not None and source.outcomes and _REJECTED not in source.outcomes:
            self.abort(error)
        else:
            delivery.settle(Rejected(error))

    def abort(self, error: Error) -> None:
        """Roll back everything that was declared here, and detach with *error*."""
        self._roll_back()
        self.link.detach(error)

    def _roll_back(self) -> None:
        lost, self._open = self._open, {}
        for transaction in lost.values():
            self._transactions.forget(transaction)
            transaction.drop()

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Messages come whole."""

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """The controller has heard the answer."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Nothing to grant."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """What was not discharged is rolled back (§4.1)."""
        self._roll_back()
