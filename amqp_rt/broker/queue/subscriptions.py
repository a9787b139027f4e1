"""Subscriptions: the consumers of a node, their credit and their deliveries (Part 3 §3.3).

Pure: no clock, no waiting. A subscription is the endpoint of a sending link, so that an outcome from the
peer reaches the node in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...errors import LocalProtocolError
from ...events import Peer
from ...fronts.base import SENDER, LinkConnection, OutgoingDelivery, Payload, SendingLink
from ...outcomes import (
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Received,
    Rejected,
    Released,
)
from ...transactions import DeliveryState, TransactionalState
from ...unsettled import Unsettled, UnsettledMap
from ...values import Symbol
from ..entries import Entry
from .groups import Groups

if TYPE_CHECKING:
    from ..filtering.filters import FilterSet

#: The four standard outcomes.
_OUTCOMES = (Accepted, Rejected, Released, Modified)

_UNKNOWN = Error("amqp:transaction:unknown-id", "there is no such transaction")
NO_MORE_WORK: Final = Error(
    "amqp:resource-limit-exceeded", "the transaction holds too many deliveries"
)


class DistributionNode:
    """Interface of a node to its subscriptions, which alone call these methods.

    A node in plain Python has the same methods without this base: this module is compiled, and classes
    that are not compiled cannot inherit from it. If it stores no messages, it needs neither those for
    recorded outcomes nor :meth:`claim` and :meth:`start_lock`.
    """

    def serve(self, subscription: Subscription) -> None:
        """Send available messages to a subscription that has got credit or room."""
        raise NotImplementedError

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> None:
        """Apply *outcome* to *entry*, whose delivery ended; ``concluded`` follows after a batch."""
        raise NotImplementedError

    def record_outcome(self, subscription: Subscription, entry: Entry, outcome: Outcome) -> int:
        """Record *outcome* of *entry*, a stored message, and store it; return its result."""
        raise NotImplementedError

    def apply_outcome(self, entry: Entry, result: int) -> None:
        """Apply the *result* of an outcome to *entry*; ``concluded`` follows."""
        raise NotImplementedError

    def revert_outcome(self, entry: Entry, before: Entry) -> None:
        """Restore *entry* to its state *before* the outcome, which could not be stored."""
        raise NotImplementedError

    def claim(self, subscription: Subscription, sequence: int) -> Entry | None:
        """Acquire the message at *sequence*, as before a restart; return None if it is gone."""
        raise NotImplementedError

    def start_lock(self, subscription: Subscription, delivery: Any) -> None:
        """Note that *delivery*, which was recorded before, has been sent."""
        raise NotImplementedError

    def settle(self, delivery: Any, entry: Entry, outcome: Outcome) -> None:
        """Settle *delivery* of *entry* with *outcome*, for which its peer waits."""
        raise NotImplementedError

    def concluded(self) -> None:
        """Finish a batch of outcomes."""
        raise NotImplementedError

    def is_busy(self) -> bool:
        """Return whether work that may take long has to wait for a later turn of the event loop."""
        return False

    def conclude_left(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Call *finish* for each of *deliveries*, of a large number for some in later turns, then *after*.

        If the node is deleted meanwhile, *after* is called all the same.
        """
        raise NotImplementedError

    def pause(self, subscription: Subscription) -> None:
        """Suspend a subscription whose link has ended and may be replaced by another."""
        raise NotImplementedError

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription that has ended."""
        raise NotImplementedError


class SourceKeeper(Protocol):
    """Terminus of links that receive from a node."""

    def attached(self, link: SendingLink) -> None:
        """Record that *link* is attached."""

    def may_resume(self, link: SendingLink, closed: bool) -> bool:
        """Return whether *link*, which has ended, may be resumed."""

    def suspended(self, link: SendingLink, memory: UnsettledMap) -> None:
        """Keep *memory*, the unsettled map of *link*, which may be resumed."""

    def end_link(self, link: SendingLink, closed: bool) -> None:
        """Record that *link* has ended for good."""


class LinkRecorder(Protocol):
    """Recorder of the deliveries of links, in the store."""

    def wrap_link(self, link: SendingLink) -> ConsumerLink:
        """Return a link that records deliveries, to use in place of *link*."""

    def ended(self, delivery: OutgoingDelivery | Unsettled) -> None:
        """Remove the record of *delivery*, in the unit that has its outcome."""


class WorkTransaction(Protocol):
    """Transaction, as far as consumers work in it."""

    error: Error | None
    #: Delivery state of messages that are acquired in it.
    state: TransactionalState

    @property
    def has_room(self) -> bool:
        """Whether the limit of work allows more."""

    def acquire(self, subscription: Subscription) -> None:
        """Note that *subscription* acquires in it until its discharge."""

    def may_retire(self, subscription: Subscription, outcome: Outcome | None) -> bool:
        """Return whether a delivery may be retired with *outcome*; if not, fail."""

    def enlist(self, enlisted: Enlisted) -> None:
        """Add a delivery that was acquired or retired in it."""

    def on_disposition(self, enlisted: Enlisted) -> bool:
        """Handle a later disposition of a delivery; return False if it is outside of it."""

    def on_link_ended(self, enlisted: Enlisted) -> bool:
        """Note that the link of a delivery has ended; return whether its outcome comes from it."""

    def fail(self, description: str) -> None:
        """Roll back now, and answer the discharge with an error."""


class TransactionRegistry(Protocol):
    """Transactions that a link may use."""

    def find(self, connection: LinkConnection, txn_id: object) -> WorkTransaction | None:
        """Return transaction *txn_id* of *connection*; None if there is none."""


class Enlisted:
    """Delivery whose outcome depends on a transaction; replaces the entry in its context.

    Args:
        subscription: Subscription of the delivery.
        transaction: The transaction.
        entry: The delivered message.
        acquired: Whether it was acquired within the transaction, whose rollback requeues it.
        delivery: The delivery, once it has been sent.
        outcome: Outcome if the transaction is committed, None if the message stays acquired.
    """

    def __init__(
        self,
        subscription: Subscription,
        transaction: WorkTransaction,
        entry: Entry,
        *,
        acquired: bool = False,
        delivery: Any = None,
        outcome: Outcome | None = None,
    ) -> None:
        self.subscription = subscription
        self.transaction = transaction
        self.entry = entry
        self.acquired = acquired
        self.delivery = delivery
        self.outcome = outcome
        #: Whether its link has ended, so that the message cannot return to its consumer.
        self.left: bool = False


class ConsumerLink(Protocol):
    """Link on which a node sends messages to a consumer, as far as the node uses it.

    It is the link of a peer, one that records deliveries first, one of a lease, or none. The attributes
    are those of :class:`~amqp_rt.fronts.base.SendingLink`.
    """

    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> Peer: ...
    @property
    def role(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def attached(self) -> bool: ...
    @property
    def writable(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def credit(self) -> int: ...
    @property
    def max_message_size(self) -> int: ...

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> OutgoingDelivery | None:
        """Send one message, or with ``more`` its first piece; None if it leaves later.

        Raises:
            LocalProtocolError: The link takes no message, or not this one. Nothing was sent.
        """

    def offer(self, available: int) -> None:
        """Set the number of waiting messages that the next flow reports."""

    def drained(self) -> None:
        """Give back unused credit if the peer drains."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Detach the link."""


class NoLink:
    """Link of a subscription without one: it sends nothing and refers to no connection.

    Args:
        name: Name of the last link, for events of its messages; empty if there was none.
        container_id: Container-id of that link's peer.
    """

    role: bool = SENDER
    idle: bool = False
    attached: bool = False
    writable: bool = False
    draining: bool = False
    credit: int = 0
    max_message_size: int = 0

    def __init__(self, name: str, container_id: str) -> None:
        self.name = name
        self.peer = Peer(container_id=container_id)

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> OutgoingDelivery | None:
        raise LocalProtocolError("the subscription has no link")

    def offer(self, available: int) -> None:
        """Do nothing: no flow follows."""

    def drained(self) -> None:
        """Do nothing: there is no credit."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Do nothing: no link is attached."""


#: Link of subscriptions that were never attached.
_UNATTACHED: Final = NoLink("", "")


class Subscription:
    """Consumer that takes messages from its node (distribution-mode *move*).

    Args:
        node: Source of the messages, with the methods of :class:`DistributionNode`.
        identity: Number that no other subscription of the node ever has.
        default_outcome: Outcome of deliveries that end without one (§3.5.3).
        outcomes: Outcome types that the link may use, None for all four.
        settled: Whether messages are sent settled, which removes them at once.
        filters: Filters of messages, an object with ``matches(entry, publisher)``, and with
            ``work``, the work of the last match; or None.
        cursor: Sequence number before which all messages never acquired were examined and not
            wanted.
        groups: Owners of the node's message groups, None if it has no groups.
        priority: Consumer priority; higher ones are served first.
        exclusive: Whether other consumers are excluded.
    """

    def __init__(
        self,
        node: Any,
        identity: int,
        *,
        default_outcome: Outcome,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: FilterSet | None = None,
        cursor: int = 0,
        groups: Groups | None = None,
        priority: int = 0,
        exclusive: bool = False,
    ) -> None:
        self.node = node
        self.identity = identity
        #: Whether a message that fails here pauses before its redelivery.
        self.pauses: bool = True
        self.filters = filters
        self.cursor = cursor
        self.groups = groups
        self.priority = priority
        self.exclusive = exclusive
        #: Whether some messages are not for this consumer.
        self.selective: bool = filters is not None or groups is not None
        #: Whether a busy node concludes accepted deliveries later too, since that takes it long.
        self.accepts_later: bool = False
        #: Whether a message is being sent in pieces, and a callback for when more can be sent.
        self.feeding: bool = False
        self.on_writable: Callable[[], None] | None = None
        #: Whether it may be served; False while it stands by for another consumer.
        self.active: bool = True
        #: Link whose peer is told whether it is served, after its first credit and whenever that changes; None if
        #: the peer does not expect that.
        self._informed: Any = None
        #: What it was told last.
        self._told: bool | None = None
        self.default_outcome = default_outcome
        self.outcomes = outcomes
        self.settled = settled
        self.link: ConsumerLink = _UNATTACHED
        #: Registry of the transactions that the link may use; None if there are none.
        self.transactions: TransactionRegistry | None = None
        #: Transaction in which it acquires messages (Part 4 §4.4.3), or None.
        self.acquiring: WorkTransaction | None = None
        #: Whether any of its deliveries has been part of a transaction.
        self.transacted: bool = False
        #: Whether a search for its next message continues in the next turn of the event loop.
        self.searching: bool = False
        #: Last properties of a flow that were processed.
        self._flow_properties: Mapping[object, object] | None = None
        #: Whether it is queued for a turn at its node.
        self.ready: bool = False
        #: Its terminus; None if that is not kept.
        self.keeper: SourceKeeper | None = None
        #: Recorder of deliveries before they leave and as they end, for a terminus with durable
        #: unsettled state.
        self.recorder: LinkRecorder | None = None
        self.over: bool = False
        #: Functions called when the subscription has ended and left its node.
        self.on_end: list[Callable[[], None]] = []

    def wants(self, entry: Entry) -> bool:
        """Return whether its filters let *entry* pass and no other consumer owns the group."""
        if not self.selective:
            return True
        filters = self.filters
        if filters is not None and not filters.matches(entry, entry.publisher):
            return False
        return self.groups is None or self.groups.allows(entry, self.identity)

    # --- Events of the link (fronts.base.SendingEndpoint) ---

    def on_attached(self, link: SendingLink) -> None:
        self.pauses = not link.requeues
        self.link = link if self.recorder is None else self.recorder.wrap_link(link)
        profile = link.peer.profile
        if profile is not None and profile.activity is not None:
            self._informed, self._told = link, None
        if self.keeper is not None:
            self.keeper.attached(link)

    def set_active(self, active: bool) -> None:
        """Begin to serve the consumer, or let it stand by for another."""
        self.active = active
        if self._told is not None and self._told is not active:
            self._tell_activity()

    def _tell_activity(self) -> None:
        link = self._informed
        if link is not None and link.attached:
            self._told = self.active
            link.report({Symbol(link.peer.profile.activity): self.active})

    def on_credit(self, link: SendingLink) -> None:
        if self._informed is not None and self._told is None and link.credit > 0:
            self._tell_activity()
        properties = link.flow_properties
        if properties is not None and properties is not self._flow_properties:
            self._flow_properties = properties
            if "txn-id" in properties and not self._acquire_in(link, properties["txn-id"]):
                return
        self.node.serve(self)

    def _acquire_in(self, link: SendingLink, txn_id: object) -> bool:
        """Acquire in this transaction from now on, None for none; return False if that fails."""
        transaction = None
        if txn_id is not None:
            if self.transactions is not None:
                transaction = self.transactions.find(link.connection, txn_id)
            if transaction is None or transaction.error is not None:
                link.detach(
                    _UNKNOWN if transaction is None else transaction.error,
                )
                return False
            transaction.acquire(self)
            self.transacted = True
        self.acquiring = transaction
        return True

    def allows(self, outcome: object) -> bool:
        """Return whether the link may use *outcome*."""
        return type(outcome) in (_OUTCOMES if self.outcomes is None else self.outcomes)

    def _enlist(self, link: SendingLink, delivery: Any, entry: Entry) -> bool:
        """Make the outcome of *delivery* depend on its transaction; return False if it cannot."""
        state = delivery.state
        delivery.state = None
        transaction = None
        if self.transactions is not None:
            transaction = self.transactions.find(link.connection, state.txn_id)
        if transaction is None:
            link.detach(_UNKNOWN)
            return False
        if not transaction.may_retire(self, state.outcome):
            return False
        self.transacted = True
        delivery.state = state
        delivery.context = enlisted = Enlisted(
            self, transaction, entry, delivery=delivery, outcome=state.outcome
        )
        transaction.enlist(enlisted)
        return True

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        node = self.node
        later: list[Any] = []
        for delivery in deliveries:
            entry = delivery.context
            if not isinstance(entry, Entry):
                # The delivery has its outcome already, or depends on a transaction.
                if not isinstance(entry, Enlisted) or entry.transaction.on_disposition(entry):
                    continue
                entry = delivery.context
                if not isinstance(entry, Entry):
                    continue
            outcome = delivery.state
            if type(outcome) not in _OUTCOMES:
                if type(outcome) is TransactionalState:
                    if self._enlist(link, delivery, entry):
                        continue
                    outcome = None
                if not delivery.remote_settled:
                    continue
                if outcome is not None and type(outcome) is not Received:
                    # A state without meaning for messages, such as a coordinator's *declared*.
                    link.detach(
                        Error("amqp:not-implemented", f"the state {outcome!r} has no meaning here")
                    )
                outcome = self.default_outcome
            elif self.outcomes is not None and type(outcome) not in self.outcomes:
                link.detach(
                    Error(
                        "amqp:invalid-field",
                        f"{type(outcome).__name__.lower()} is not among the outcomes of this link",
                    )
                )
                outcome = self.default_outcome
            # Later dispositions of the peer no longer change the outcome.
            delivery.context = outcome
            if (type(outcome) is not Accepted or self.accepts_later) and (later or node.is_busy()):
                # The message may become a dead letter, and that many copies.
                later.append((delivery, entry, outcome))
                continue
            node.conclude(self, entry, outcome)
            if self.recorder is not None:
                self.recorder.ended(delivery)
            if not delivery.settled:
                node.settle(delivery, entry, outcome)
        if later:
            node.conclude_left(later, self._conclude)
        node.concluded()

    def _conclude(self, ended: Any) -> None:
        """End a delivery of an entry in an outcome, and answer its peer."""
        delivery, entry, outcome = ended
        self.node.conclude(self, entry, outcome)
        if self.recorder is not None:
            self.recorder.ended(delivery)
        if not delivery.settled:
            self.node.settle(delivery, entry, outcome)

    # --- End of the link ---

    def suspend(self, link: SendingLink) -> UnsettledMap:
        """Return the unsettled map of a *link* that has ended and may be resumed.

        Deliveries in the map stay acquired; :meth:`give_up` ends them if the link is not resumed.
        Others are released.
        """
        node = self.node
        self.acquiring = None
        memory = link.remember()
        if self.transacted:
            for delivery in link.unsettled:
                entry = delivery.context
                if isinstance(entry, Enlisted):
                    if entry.transaction.on_link_ended(entry):
                        # The transaction decides the outcome, and the peer need not learn it.
                        memory.pop(delivery.tag, None)
                        continue
                    entry = delivery.context = entry.entry
                    if delivery.tag in memory:
                        memory[delivery.tag].context = entry
        left: list[Any] = []
        for delivery in link.unsettled:
            entry = delivery.context
            if isinstance(entry, Entry) and (delivery.tag not in memory or entry.pieces):
                # Not sent yet, or not resumable.
                memory.pop(delivery.tag, None)
                left.append(delivery)
        if left:
            node.conclude_left(left, self._release)
        node.pause(self)
        node.concluded()
        self.link = NoLink(link.name, link.peer.container_id)
        self._informed = None
        return memory

    def _release(self, delivery: Any) -> None:
        entry = delivery.context
        if isinstance(entry, Entry):
            delivery.context = RELEASED
            self.node.conclude(self, entry, RELEASED)

    def end_unsettled(self, left: Iterable[Unsettled], outcome: Outcome) -> None:
        """End unsettled deliveries with *outcome*, as no other outcome can arrive."""
        self.node.conclude_left(list(left), partial(self._end_in, outcome))
        self.node.concluded()

    def _end_in(self, outcome: Outcome, known: Unsettled) -> None:
        """End *known* with *outcome*, unless it has ended already."""
        entry = known.context if known.delivery is None else known.delivery.context
        if isinstance(entry, Entry):
            known.context = known.state = outcome
            if known.delivery is not None:
                known.delivery.context = outcome
            self.node.conclude(self, entry, outcome)
            if self.recorder is not None:
                self.recorder.ended(known)

    def _end_left(self, delivery: Any) -> None:
        """End *delivery* of an ended link with the peer's last outcome or the default outcome."""
        entry = delivery.context
        if isinstance(entry, Entry):
            outcome = delivery.state
            if type(outcome) not in _OUTCOMES or (
                self.outcomes is not None and type(outcome) not in self.outcomes
            ):
                outcome = self.default_outcome
            delivery.context = outcome
            self.node.conclude(self, entry, outcome)
            if self.recorder is not None:
                self.recorder.ended(delivery)

    def end(self) -> None:
        """End the subscription for good. A second call has no effect."""
        if self.over:
            return
        self.over = True
        node = self.node
        node.unsubscribe(self)
        node.concluded()
        # The functions refer to this object: without them no cycle keeps the link in memory.
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        keeper = self.keeper
        if keeper is not None and keeper.may_resume(link, closed):
            keeper.suspended(link, self.suspend(link))
            # Deliveries refer to their link: remove the cycle that would keep it in memory.
            link.unsettled = []
            return
        self.acquiring = None
        if self.transacted:
            for delivery in link.unsettled:
                enlisted = delivery.context
                if isinstance(enlisted, Enlisted) and not enlisted.transaction.on_link_ended(
                    enlisted
                ):
                    delivery.context = enlisted.entry
        # Deliveries refer to their link: remove the cycle here too.
        left, link.unsettled = link.unsettled, []
        if left:
            self.node.conclude_left(left, self._end_left)
        if keeper is not None:
            # Deliveries left by an earlier link and not resumed on this one.
            self.end_unsettled(link.remember().values(), self.default_outcome)
        self.end()
        if keeper is not None:
            keeper.end_link(link, closed)
            # Keeper and subscription refer to each other, and this one to the link: remove the
            # cycle.
            self.keeper = None


class Browser(Subscription):
    """Consumer that is sent copies of a queue's messages (distribution-mode *copy*).

    Args:
        node: The queue.
        identity: As for :class:`Subscription`.
        backlog: Sequence numbers of older messages that are available now, newest first.
        cursor: Sequence number to continue with after those.
        settled: Whether messages are sent settled.
        filters: As for :class:`Subscription`.
    """

    def __init__(
        self,
        node: DistributionNode,
        identity: int,
        *,
        backlog: list[int],
        cursor: int,
        settled: bool = False,
        filters: FilterSet | None = None,
    ) -> None:
        super().__init__(
            node,
            identity,
            default_outcome=RELEASED,
            settled=settled,
            filters=filters,
            cursor=cursor,
        )
        self.backlog = backlog
        #: Whether any of the messages has been acquired.
        self.acquires: bool = False

    def _acquire_in(self, link: SendingLink, txn_id: object) -> bool:
        link.detach(Error("amqp:not-implemented", "a browser acquires nothing"))
        return False

    def acquire(self, copies: Iterable[Any]) -> list[Any]:
        """Acquire the messages of *copies* that were sent; return the copies of those that could be.

        They are deliveries like those of a consumer from then on.
        """
        acquired: list[Any] = self.node.browsing.acquire(self, copies)
        if acquired:
            self.acquires = True
        return acquired

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Settle copies; their messages are unaffected and not sent again (§3.5.2)."""
        if self.acquires:
            acquired = [each for each in deliveries if isinstance(each.context, Entry | Enlisted)]
            deliveries = [each for each in deliveries if isinstance(each.context, int | None)]
            if acquired:
                super().on_outcomes(link, acquired)
        for delivery in deliveries:
            state = delivery.state
            if not delivery.settled and (
                type(state) in _OUTCOMES or type(state) is TransactionalState
            ):
                delivery.settle(state)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        if self.acquires:
            super().on_detached(link, error, closed)
            return
        self.node.unsubscribe(self)
        # Deliveries refer to their link: remove the cycle that would keep it in memory.
        link.unsettled = []
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()
