"""Nodes that are queues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, Self

import trio
from msgspec.structs import replace

from ...addresses import LEAVING
from ...errors import AmqpError
from ...events import Peer
from ...fronts.base import LinkConnection
from ...outcomes import Error, Rejected
from ...values import Int
from ..claims import check_claims
from ..dead_letters import reply_address
from ..durable import facts
from ..durable.duplicates import Duplicates
from ..durable.facts import FactKind
from ..durable.journal import Journal
from ..durable.ledgers import QueueLedger
from ..durable.numbers import NumberedLedger
from ..durable.pager import STEP
from ..durable.units import Unit
from ..entries import Entry, encode_outgoing
from ..expiry import DELETED
from ..nodes import QUEUE, Declaration, Queue, origin_of
from ..producers import Check, Intake
from ..queue.keyed import marker
from ..queue.leaving import is_drained, leave
from ..queue.numbering import Numbering, NumberingObservedQueue, NumberingQueue
from ..queue.observed import ObservedQueue
from ..queue.queue import MessageQueue
from ..queue.subscriptions import Subscription
from ..services import Services
from ..termini import KeptSource, Key, Terminus
from ..terms import EXCLUSIVE, PRIORITIES, Lifetime, Terms
from .base import SEALED, Node, NodeConsumer, Space

#: Class of a queue, by whether it numbers its messages and whether its events are recorded.
_CLASSES: Final[dict[tuple[bool, bool], type[MessageQueue]]] = {
    (False, False): MessageQueue,
    (False, True): ObservedQueue,
    (True, False): NumberingQueue,
    (True, True): NumberingObservedQueue,
}


class QueueNode(Node):
    """Node that gives each message to one consumer."""

    kind = QUEUE
    declaration = Queue
    fact_kinds = (facts.NUMBERS,)
    declared: Queue
    held: MessageQueue

    @classmethod
    def make(
        cls,
        space: Space,
        declared: Queue,
        *,
        number: int,
        owner: LinkConnection | None,
        transient: bool,
        new: bool,
    ) -> Self:
        services = space.services
        limits, clock = services.limits, services.clock
        watch = None
        if services.journals is not None and not transient:
            watch = services.journals.watch(space.name, declared.name, space.record)
        numbers = declared.number_header is not None
        queue = _CLASSES[numbers, watch is not None](
            services.memory,
            clock.wall,
            partial(space.dead_letters.move, declared),
            priorities=declared.priorities,
            monotonic=clock.monotonic,
            marker=marker(
                last_value_key=declared.last_value_key,
                sort_key=declared.sort_key,
                groups=declared.groups,
                group_key=declared.group_key,
                selector=declared.selector,
                limits=limits,
            ),
            last_value=declared.last_value_key is not None,
            sorting=declared.sort_key is not None,
            grouping=declared.groups > 0,
            limits=limits,
        )
        if watch is not None and isinstance(queue, ObservedQueue):
            queue.watch = watch
        if isinstance(queue, NumberingQueue | NumberingObservedQueue):
            queue.numbering = Numbering(queue, str(declared.number_header))
        schedule(queue, services)
        ledger = None
        if services.journal is not None and number:
            kind = NumberedLedger if numbers else QueueLedger
            ledger = queue.ledger = kind(services.journal, number, queue, declared.name)
            services.pager.adopt(queue, number)
        intake = Intake(queue)
        node = cls(
            space,
            declared,
            queue,
            intake,
            queue,
            ledger,
            number=number,
            owner=owner,
            volatile=services.volatile or transient,
        )
        node.inlet.on_expiring = partial(services.expiring.__setitem__, node, None)
        node._apply()
        return node

    def _apply(self) -> None:
        """Apply the declaration to the queue, its intake and its senders."""
        declared, queue = self.declared, self.held
        queue.dead_letter = partial(self.space.dead_letters.move, declared)
        queue.max_deliveries = declared.deliveries_max
        queue.max_attempts = declared.max_attempts or 0
        queue.length_max = declared.length_max or 0
        queue.overflow = declared.overflow
        queue.bytes_max = declared.bytes_max or self._bytes_max
        queue.single_active = declared.single_active
        queue.exclusive = declared.exclusive
        queue.lock(declared.lock_s or 0.0)
        queue.timing.declare_pauses(
            declared.redelivery_delay_s,
            declared.redelivery_delay_max_s,
            doubles=declared.redelivery_growth == "exponential",
        )
        self._remember_ids()
        self.inlet.check = self._check()
        self.inlet.ttl_s = declared.ttl_s
        for producer in self.intake.producers:
            producer.check = self.inlet.check
            producer.ttl_s = self.inlet.ttl_s

    @property
    def _bytes_max(self) -> int:
        """Limit of bytes of a queue that declares none.

        That of a stored queue is higher, since few of its bytes are in memory.
        """
        limits = self.services.limits
        return limits.queue_stored_bytes_max if self.number else limits.queue_bytes_max

    def can_redeclare(self, declared: Declaration) -> bool:
        """Return whether the messages are in the order that *declared* requires."""
        before = self.declared
        return (
            isinstance(declared, Queue)
            and before.priorities == declared.priorities
            and before.sort_key == declared.sort_key
            and before.last_value_key == declared.last_value_key
            and before.groups == declared.groups
            and before.group_key == declared.group_key
            and before.selector == declared.selector
            and before.number_header == declared.number_header
        )

    def redeclare(self, declared: Queue) -> None:
        super().redeclare(declared)
        self._apply()

    def begin_lifetime(self, lifetime: Lifetime) -> None:
        super().begin_lifetime(lifetime)
        self.held.on_empty = self.end_if_due

    # --- Arriving messages ---

    def _remember_ids(self) -> None:
        """Create, change or remove the duplicate-detection window, as declared."""
        window_s = self.declared.duplicate_window_s
        intake, services = self.intake, self.services
        duplicates = intake.duplicates
        if window_s is None:
            if duplicates is not None:
                duplicates.clear()
                del services.windows[duplicates]
            intake.duplicates = None
        elif duplicates is not None:
            duplicates.window_s = window_s
        else:
            duplicates = intake.duplicates = Duplicates(
                window_s, services.clock.wall, services.journal, self.number, services.limits
            )
            services.windows[duplicates] = None

    def _check(self) -> Check | None:
        """Return the check of messages that are sent to the queue, if any."""
        declared = self.declared
        claims: Check | None = None
        if declared.check_user_id or declared.absolute_expiry:
            claims = partial(
                check_claims,
                user_id=declared.check_user_id,
                absolute_expiry=declared.absolute_expiry,
            )
        if not declared.return_to_sender or self.services.may_send is None:
            return claims
        if claims is None:
            return self._mark_returnable
        check = claims

        def both(entry: Entry, peer: Peer) -> Rejected | None:
            self._mark_returnable(entry, peer)
            return check(entry, peer)

        return both

    def _mark_returnable(self, entry: Entry, peer: Peer) -> Rejected | None:
        """Record whether *entry* may be returned to its ``reply-to``, while its sender is known."""
        address = reply_address(entry, self.services.limits)
        may_send = self.services.may_send
        entry.returnable = address is not None and may_send is not None and may_send(peer, address)
        return None

    # --- Restoring ---

    async def restore(self, journal: Journal) -> None:
        if await self.services.pager.restore(journal, self.number, self.held):
            self.services.expiring[self] = None

    def restore_fact(self, kind: FactKind[Any], key: bytes, value: int) -> None:
        self.held.place_next = max(self.held.place_next, value)

    # --- State ---

    @property
    def delayed(self) -> int:
        return self.held.delayed

    @property
    def waiting(self) -> int:
        return self.held.available + self.held.delayed

    @property
    def is_sealed(self) -> bool:
        return self.held.leaving

    @property
    def takes_pieces(self) -> bool:
        return self.ledger is not None

    @property
    def leased_queue(self) -> MessageQueue:
        return self.held

    def consumers(self) -> list[NodeConsumer]:
        return [*self.held.consumers.values(), *self.held.browsers.values()]

    # --- Attaching ---

    def refuse_consumer(self, terms: Terms) -> Error | None:
        if self.held.leaving:
            return Error("amqp:not-found", f"queue {origin_of(self.declared.name)!r} was deleted")
        if terms.copies or not self.held.locked(terms.exclusive):
            return None
        return Error(
            "amqp:resource-locked",
            f"{self.declared.name!r} has a consumer, and one of the two is exclusive",
        )

    def properties(self, terms: Terms) -> dict[object, object]:
        # The answer repeats those properties of the peer that are honoured.
        found: dict[object, object] = {}
        if terms.priority and not terms.copies:
            found[PRIORITIES[0]] = Int(terms.priority)
        if terms.exclusive and not terms.copies:
            found[EXCLUSIVE] = True
        return found

    def consume(self, terms: Terms, *, batches: bool = False) -> Subscription:
        queue = self.held
        subscription: Subscription
        if terms.copies:
            subscription = queue.browse(settled=terms.settled, filters=terms.filters)
            # For messages that it acquires.
            subscription.default_outcome = terms.default_outcome
        else:
            subscription = queue.subscribe(
                default_outcome=terms.default_outcome,
                outcomes=terms.outcomes,
                settled=terms.settled,
                filters=terms.filters,
                priority=terms.priority,
                exclusive=terms.exclusive,
            )
        subscription.transactions = self.services.transactions
        return subscription

    def make_source(self, key: Key, terms: Terms, number: int) -> Terminus:
        termini = self.services.termini
        return KeptSource(termini, key, terms, self.consume(terms), self.held, number)

    def stored_consumers(self) -> Sequence[Subscription]:
        return list(self.held.consumers.values()) if self.held.ledger is not None else ()

    # --- The end ---

    def delete_stored(self, unit: Unit) -> None:
        super().delete_stored(unit)
        if self.declared.number_header is not None:
            facts.NUMBERS.remove(unit, facts.key_of(self.number))

    def close(self, name: str) -> bool:
        declared, queue = self.declared, self.held
        if (
            declared.dead_letters(DELETED)
            and not queue.leaving
            and self.failure is None
            and not is_drained(queue)
        ):
            self.lifetime = self.reserved = None
            self.declared = replace(declared, name=name, aliases=())
            queue.dead_letter = partial(self.space.dead_letters.move, self.declared)
            for inlet in (self.inlet, *self.intake.producers):
                inlet.closed = True
            self.store_declaration()
            self._leave()
            return True
        self.services.pager.release(self.held)
        return super().close(name)

    def _leave(self) -> None:
        self.held.on_empty = None
        leave(self.held, self._delete_if_drained)

    def _delete_if_drained(self) -> None:
        """Delete the queue, which has left, in a later turn if it is empty."""
        if is_drained(self.held):
            self.services.turns.resume_later(_Leaving(self))

    def restored(self) -> None:
        if self.declared.name.startswith(LEAVING):
            self._leave()
            # The last message may have left in the last commit before a crash.
            self._delete_if_drained()

    def stop(self, failure: AmqpError) -> None:
        super().stop(failure)
        self.services.pager.release(self.held, failure)

    def sweep(self) -> None:
        self.held.sweep()

    # --- Operators ---

    async def peek(self, count: int = 1, *, bytes_max: int = sys.maxsize) -> list[bytes]:
        """Return the first *count* messages, encoded as they would be sent now.

        These are the messages that are available or paused after a failure. Messages that are in
        the store only are read, and stay there. Of a message in pieces the body is left out.

        Args:
            count: Maximum number of messages.
            bytes_max: Maximum of their bytes in all, which the first may exceed; by default none.

        Raises:
            AmqpError: The store cannot be read.
        """
        return await peek(self.services, self.held, count, bytes_max)

    async def purge(self) -> int:
        """Drop the messages that are available or paused; return how many there were.

        Messages that are in the store only are dropped at once, unless each has to be recorded in
        ``$journal``: then they are read first. Cancellation may leave some of them.

        Raises:
            AmqpError: The store cannot be read.
        """
        queue, journal = self.held, self.services.journal
        await trio.lowlevel.checkpoint()
        dropped = 0
        if not (journal is not None and isinstance(queue, ObservedQueue)):
            dropped = queue.paging.purge()
        return dropped + await self.services.pager.process_in_order(
            journal, queue, queue.present, queue.drop
        )

    def purging(self) -> Generator[int, None, None]:
        """Purge the queue step by step; yield the number of messages dropped so far.

        Messages that are in the store only are dropped at once, without a record in ``$journal``.
        """
        queue = self.held
        before = queue.place_next
        dropped = queue.paging.purge()
        while True:
            some = queue.drop(STEP, before)
            dropped += some
            yield dropped
            if some < STEP:
                return

    async def move(self, target: Node, count: int) -> int:
        """Move the first *count* messages to *target*, in order.

        These are the messages that are available or paused after a failure. Each is in one of the
        two nodes whenever the broker stops. Messages that are in the store only are read a chunk at
        a time; after cancellation or an error, some may have been moved.

        Returns:
            The number of messages moved.

        Raises:
            AmqpError: *target* is this node or takes no messages, a message is too large for it, or the
                store cannot be read.
        """
        if target.is_sealed:
            raise AmqpError(SEALED.description or "", condition=SEALED.condition)
        if target is self:
            name = self.declared.name
            raise AmqpError(
                f"cannot move the messages of {name!r} to {name!r} itself",
                condition="amqp:not-allowed",
            )
        await trio.lowlevel.checkpoint()
        return await self.services.pager.process_in_order(
            self.services.journal, self.held, count, partial(self._pass_on, target)
        )

    def _pass_on(self, target: Node, count: int, before: int) -> int:
        """Move up to *count* messages in memory with sequence numbers below *before*.

        Return their number.

        Raises:
            AmqpError: *target* has been deleted, or is no stored queue and a message is in pieces.
        """
        queue = self.held
        if target.held.deleted:
            raise AmqpError(
                f"{target.declared.name!r} has been deleted", condition="amqp:resource-deleted"
            )
        if not target.takes_pieces and any(
            entry.pieces for entry in queue.peek(count, before=before)
        ):
            raise AmqpError(
                f"there are messages that are too large for {target.declared.name!r}, which is no"
                " queue in the store",
                condition="amqp:link:message-size-exceeded",
            )
        entries = queue.withdraw(count, before)
        for entry in entries:
            target.inlet.take(entry.copy_for_node())
        return len(entries)

    def wait_stored(self, on_stored: Callable[[], None]) -> bool:
        journal = self.services.journal
        if journal is None or not self.held.pending:
            return False
        journal.when_kept(on_stored)
        return True


class _Leaving:
    """Deletes a queue whose messages have left it."""

    def __init__(self, node: QueueNode) -> None:
        self._node = node

    def resume(self) -> None:
        """Delete the queue, unless it has got messages again or is deleted already."""
        node = self._node
        if is_drained(node.held) and not node.held.deleted:
            node.space.delete_node(node)


def schedule(queue: MessageQueue, services: Services) -> None:
    """Call *queue* when its alarms are due, and in later turns while it has deferred work."""
    turns = services.turns
    queue.on_alarm = partial(turns.set_alarm, queue)
    queue.on_unfinished = partial(turns.resume_later, queue, queue.deferred.conclude_all)


async def peek(
    services: Services, queue: MessageQueue, count: int, bytes_max: int = sys.maxsize
) -> list[bytes]:
    """Return the first *count* messages of *queue*, up to *bytes_max* bytes after the first."""
    await trio.lowlevel.checkpoint()
    if services.journal is None:
        entries = queue.peek(count)
    else:
        entries = await services.pager.peek(services.journal, queue, count, bytes_max)
    now = services.clock.wall()
    found: list[bytes] = []
    size = 0
    for entry in entries:
        payload = encode_outgoing(entry, now) if entry.altered else entry.payload
        encoded = payload if isinstance(payload, bytes) else b"".join(payload)
        size += len(encoded)
        if found and size > bytes_max:
            break
        found.append(encoded)
    return found
