"""One consumer's view of a node: its credit, and what it was given (Part 3 §3.3).

Pure: no time, no waiting. A subscription is the endpoint of a sending link, so that what the
peer says reaches its node in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from ..fronts.base import SendingLink
from ..outcomes import RELEASED, Accepted, Error, Modified, Received, Rejected, Released
from ..transactions import TransactionalState
from ..unsettled import Unsettled, UnsettledMap
from .entries import Entry
from .groups import Groups

#: Any of the four standard outcomes.
_OUTCOMES = (Accepted, Rejected, Released, Modified)

_UNKNOWN = Error("amqp:transaction:unknown-id", "there is no such transaction")


class DistributionNode:
    """What a subscription draws from. Its methods are called by subscriptions only."""

    def serve(self, subscription: Subscription) -> None:
        """Credit or room has come: send what there is."""
        raise NotImplementedError

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Any) -> None:
        """A delivery of *entry* has ended in *outcome*; ``concluded`` follows after the batch."""
        raise NotImplementedError

    def settle(self, delivery: Any, entry: Entry, outcome: Any) -> None:
        """Answer *delivery* of *entry*, whose peer waits for it, with *outcome*."""
        raise NotImplementedError

    def concluded(self) -> None:
        """The batch of outcomes is complete."""
        raise NotImplementedError

    def conclude_left(self, deliveries: list[Any], finish: Callable[[Any], None]) -> None:
        """Have *finish* conclude each of *deliveries*; of many some later."""
        raise NotImplementedError

    def pause(self, subscription: Subscription) -> None:
        """The subscription's link is over, and another one may take its place."""
        raise NotImplementedError

    def leave(self, subscription: Subscription) -> None:
        """The subscription is over."""
        raise NotImplementedError


class Enlisted:
    """A delivery about which a transaction decides; in its context in place of its entry.

    Args:
        subscription: Whose delivery it is.
        transaction: What decides.
        entry: What was delivered.
        acquired: It was delivered within the transaction, which may take it back.
        delivery: The delivery, once it has been sent.
        outcome: What becomes of it if the transaction is committed, None if it stays acquired.
    """

    def __init__(
        self,
        subscription: Subscription,
        transaction: Any,
        entry: Entry,
        *,
        acquired: bool = False,
        delivery: Any = None,
        outcome: Any = None,
    ) -> None:
        self.subscription = subscription
        self.transaction = transaction
        self.entry = entry
        self.acquired = acquired
        self.delivery = delivery
        self.outcome = outcome
        #: Its link is over: it cannot go back to who had it.
        self.left: bool = False


class NoLink:
    """The link of a suspended subscription: takes nothing, and refers to no connection."""

    attached: bool = False
    writable: bool = False
    draining: bool = False
    credit: int = 0


_NO_LINK: Final = NoLink()


class Subscription:
    """A consumer: takes messages away from its node (distribution-mode *move*).

    Args:
        node: Where messages come from.
        identity: A number that no other subscription of the node ever has.
        default_outcome: What is done with deliveries that end without an outcome (§3.5.3).
        outcomes: The only outcome types that the link may use, None for all four.
        settled: Messages are sent settled and are gone then.
        filters: What messages have to match, an object with ``matches(entry, publisher)``, or None.
        cursor: Of messages never taken, those before this place have been looked at in vain.
        groups: Whose each group of messages is, None if the node has no groups.
        priority: Those with a higher one are served first.
        exclusive: There may be no other consumer.
    """

    def __init__(
        self,
        node: DistributionNode,
        identity: int,
        *,
        default_outcome: Any,
        outcomes: tuple[Any, ...] | None = None,
        settled: bool = False,
        filters: Any = None,
        cursor: int = 0,
        groups: Groups | None = None,
        priority: int = 0,
        exclusive: bool = False,
    ) -> None:
        self.node = node
        self.identity = identity
        #: What fails here is delivered again after a pause.
        self.pauses: bool = True
        self.filters = filters
        self.cursor = cursor
        self.groups = groups
        self.priority = priority
        self.exclusive = exclusive
        #: Not everything is for it.
        self.selective: bool = filters is not None or groups is not None
        #: A message is being sent to it in pieces; called when more of it may be.
        self.feeding: bool = False
        self.on_writable: Callable[[], None] | None = None
        #: It may be served at all; false while it stands by for another.
        self.active: bool = True
        self.default_outcome = default_outcome
        self.outcomes = outcomes
        self.settled = settled
        self.link: Any = None
        #: Finds the transactions that the link may use; None if there are none.
        self.transactions: Any = None
        #: The one in which it acquires what it is sent (Part 4 §4.4.3).
        self.acquiring: Any = None
        #: A transaction has had deliveries of it.
        self.transacted: bool = False
        #: Properties of a flow that were looked at.
        self._flow_properties: Any = None
        #: It has its place among those whose turn will come.
        self.ready: bool = False
        #: Whose terminus it is, an object with ``attached(link)``, ``keeps(link, closed)`` and
        #: ``suspended(link, memory)`` and ``left(link, closed)``; None if nothing is kept of it.
        self.keeper: Any = None
        #: Notes each delivery before it leaves and as it ends, for a terminus whose unsettled state is
        #: durable: an object with ``over_link(link)`` and ``ended(delivery)``.
        self.recorder: Any = None
        self.over: bool = False
        #: Called when the subscription is over, after the node has heard of it.
        self.on_left: list[Callable[[], None]] = []

    def wants(self, entry: Entry) -> bool:
        """Whether its filters let *entry* pass, and its group is not somebody else's."""
        if not self.selective:
            return True
        filters = self.filters
        if filters is not None and not filters.matches(entry, entry.publisher):
            return False
        return self.groups is None or self.groups.allows(entry, self.identity)

    # --- What the link says (fronts.base.SendingEndpoint) ---

    def on_attached(self, link: SendingLink) -> None:
        self.pauses = not link.requeues
        self.link = link if self.recorder is None else self.recorder.over_link(link)
        if self.keeper is not None:
            self.keeper.attached(link)

    def on_credit(self, link: SendingLink) -> None:
        properties = link.flow_properties
        if properties is not None and properties is not self._flow_properties:
            self._flow_properties = properties
            if "txn-id" in properties and not self._acquire_in(link, properties["txn-id"]):
                return
        self.node.serve(self)

    def _acquire_in(self, link: SendingLink, txn_id: object) -> bool:
        """From now on acquire in that transaction, None for none; false if that cannot be."""
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

    def allows(self, outcome: Any) -> bool:
        """Whether *outcome* is one that the link may use."""
        return type(outcome) in (_OUTCOMES if self.outcomes is None else self.outcomes)

    def _enlist(self, link: SendingLink, delivery: Any, entry: Entry) -> bool:
        """Leave it to a transaction what becomes of *delivery*; false if that cannot be."""
        state = delivery.state
        delivery.state = None
        transaction = None
        if self.transactions is not None:
            transaction = self.transactions.find(link.connection, state.txn_id)
        if transaction is None:
            link.detach(_UNKNOWN)
            return False
        if not transaction.takes(self, state.outcome):
            return False
        self.transacted = True
        delivery.state = state
        delivery.context = enlisted = Enlisted(
            self, transaction, entry, delivery=delivery, outcome=state.outcome
        )
        transaction.enlist(enlisted)
        return True

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        node = self.node
        for delivery in deliveries:
            entry = delivery.context
            if not isinstance(entry, Entry):
                # It has had its outcome, or a transaction decides about it.
                if not isinstance(entry, Enlisted) or entry.transaction.hears(entry):
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
                    # Nothing of ours, such as what a coordinator says.
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
            delivery.context = outcome
            node.conclude(self, entry, outcome)
            if self.recorder is not None:
                self.recorder.ended(delivery)
            if not delivery.settled:
                node.settle(delivery, entry, outcome)
        node.concluded()

    # --- What becomes of it when its link is over ---

    def suspend(self, link: SendingLink) -> UnsettledMap:
        """Its link is over, and may come back: what its peer has in hand stays acquired.

        What is unsettled; :meth:`give_up` ends it if the link does not come back.
        """
        node = self.node
        self.acquiring = None
        memory = link.remember()
        if self.transacted:
            for delivery in link.unsettled:
                entry = delivery.context
                if isinstance(entry, Enlisted):
                    if entry.transaction.keeps(entry):
                        # Its outcome comes with the transaction, and the peer need not hear of it.
                        memory.pop(delivery.tag, None)
                        continue
                    entry = delivery.context = entry.entry
                    if delivery.tag in memory:
                        memory[delivery.tag].context = entry
        left: list[Any] = []
        for delivery in link.unsettled:
            entry = delivery.context
            if isinstance(entry, Entry) and (delivery.tag not in memory or entry.pieces):
                # It has not left, or cannot be resumed.
                memory.pop(delivery.tag, None)
                left.append(delivery)
        if left:
            node.conclude_left(left, self._release)
        node.pause(self)
        node.concluded()
        self.link = _NO_LINK
        return memory

    def _release(self, delivery: Any) -> None:
        entry = delivery.context
        if isinstance(entry, Entry):
            delivery.context = RELEASED
            self.node.conclude(self, entry, RELEASED)

    def give_up(self, left: Iterable[Unsettled], outcome: Any) -> None:
        """End what is unsettled in *outcome*: nobody will say anything else of it."""
        self.node.conclude_left(list(left), partial(self._end_in, outcome))
        self.node.concluded()

    def _end_in(self, outcome: Any, known: Unsettled) -> None:
        """End *known* in *outcome*, if it has not its end yet."""
        entry = known.context if known.delivery is None else known.delivery.context
        if isinstance(entry, Entry):
            known.context = known.state = outcome
            if known.delivery is not None:
                known.delivery.context = outcome
            self.node.conclude(self, entry, outcome)
            if self.recorder is not None:
                self.recorder.ended(known)

    def _end_left(self, delivery: Any) -> None:
        """End *delivery*, whose link is over, in the last word of its peer, or in the default outcome."""
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
        """It is over for good. Saying so twice is as once."""
        if self.over:
            return
        self.over = True
        node = self.node
        node.leave(self)
        node.concluded()
        # They refer to this: no cycle is to keep the link.
        called, self.on_left = self.on_left, []
        for on_left in called:
            on_left()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        keeper = self.keeper
        if keeper is not None and keeper.keeps(link, closed):
            keeper.suspended(link, self.suspend(link))
            # Deliveries refer to their link: no cycle is to keep it.
            link.unsettled = []
            return
        self.acquiring = None
        if self.transacted:
            for delivery in link.unsettled:
                enlisted = delivery.context
                if isinstance(enlisted, Enlisted) and not enlisted.transaction.keeps(enlisted):
                    delivery.context = enlisted.entry
        # Deliveries refer to their link.
        left, link.unsettled = link.unsettled, []
        if left:
            self.node.conclude_left(left, self._end_left)
        if keeper is not None:
            # What an earlier link left, and this one did not get to.
            self.give_up(link.remember().values(), self.default_outcome)
        self.end()
        if keeper is not None:
            keeper.left(link, closed)
            # Each refers to the other, and this to the link: no cycle is to keep them.
            self.keeper = None


class Browser(Subscription):
    """Sees the messages of a queue and leaves them there (distribution-mode *copy*).

    Args:
        node: The queue.
        identity: As for :class:`Subscription`.
        backlog: Sequence numbers of older messages that are available now, newest first.
        cursor: The sequence number to go on with after those.
        settled: Messages are sent settled.
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
        filters: Any = None,
    ) -> None:
        super().__init__(
            node, identity, default_outcome=None, settled=settled, filters=filters, cursor=cursor
        )
        self.backlog = backlog

    def _acquire_in(self, link: SendingLink, txn_id: object) -> bool:
        link.detach(Error("amqp:not-implemented", "a browser acquires nothing"))
        return False

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        """Whatever it says, the message is as it was, and does not come twice (§3.5.2)."""
        for delivery in deliveries:
            state = delivery.state
            if not delivery.settled and (
                type(state) in _OUTCOMES or type(state) is TransactionalState
            ):
                delivery.settle(state)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self.node.leave(self)
        # Deliveries refer to their link: no cycle is to keep it.
        link.unsettled = []
        called, self.on_left = self.on_left, []
        for on_left in called:
            on_left()
