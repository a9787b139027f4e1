"""Leases: messages of a queue set aside for a group, which can be read any number of times.

An application that computes in steps, each of which may be repeated after a failure, cannot use
messages that are removed once they are read. A *group* takes ranges instead. It asks the queue for
more (:meth:`Leases.extend`), which acquires messages as any consumer would and numbers them; reads
them by number, from any connection and repeatedly (:class:`LeaseReader`); gives unwanted ones back
(:meth:`Leases.give_back`); and accepts all below a number when it has processed them. The queue
remains an ordinary queue for all other consumers.

In a store a lease outlives the process: the number of each message is on the disk before it is
returned. A group has a *generation*, which each opening increments. An operation with an older
generation is refused with ``amqp:link:stolen``, so that no two applications process the same
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any, Final, Protocol, cast

import trio
from msgspec import Struct

from ..clock import Clock
from ..errors import AmqpError, LocalProtocolError
from ..events import Peer
from ..fronts.base import SENDER, OutgoingDelivery, Payload, SendingLink
from ..limits import Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import ACCEPTED, RELEASED, Error, Modified, Outcome
from ..transactions import DeliveryState
from ..values import Symbol
from .durable import facts
from .durable.journal import Journal
from .durable.units import Unit
from .entries import Entry, annotated, encode_outgoing, exceeds_link
from .log.annotations import OFFSET, SEQUENCE_NUMBER
from .queue.queue import MessageQueue

#: Link properties for reading leased messages: the group, optionally its id, the first number, and
#: the number after the last.
GROUP: Final = Symbol("amqp_rt:lease-group")
ID: Final = Symbol("amqp_rt:lease-id")
FROM: Final = Symbol("amqp_rt:lease-from")
TO: Final = Symbol("amqp_rt:lease-to")
#: Kinds of facts: a group, by its number; and its messages, by that number and their own.


_NAME_MAX: Final = 256
#: Seconds to wait for messages that have to be read from the store.
_READ_S: Final = 2.0
#: Messages acquired, accepted or given back in one step, before other tasks run.
_STEP: Final = 500


class LeaseState(Struct, frozen=True):
    """Progress of a group."""

    generation: int
    #: The lowest number that is not accepted, and the number of the next message.
    first: int
    next: int
    #: Messages available in the queue.
    available: int
    #: Distinguishes the group from earlier and later ones of its name, whose numbers
    #: mean other messages.
    id: str = ""


class Queued(Protocol):
    """Node whose messages are leased."""

    #: Its number in the store, 0 if it is in memory only.
    number: int

    @property
    def leased_queue(self) -> MessageQueue | None:
        """The queue whose messages can be leased; None if the node has none."""


class _Delivery:
    """Delivery of a message to a group, from the view of its subscription."""

    __slots__ = ("context", "link", "remote_settled", "settled", "state", "tag")

    def __init__(self, link: _LeaseLink, entry: Entry) -> None:
        self.link = link
        self.context: Any = entry
        self.state: DeliveryState | None = None
        self.settled = False
        self.remote_settled = False
        self.tag = b""

    def settle(self, state: DeliveryState | None = None) -> None:
        """Mark the delivery as settled by the queue."""
        self.settled = True


class _LeaseLink:
    """Link without a peer on which a group receives its messages (fronts.base.SendingLink)."""

    role = SENDER
    idle = False
    draining = False
    attached = True
    writable = True
    flow_properties = None
    connection = None

    def __init__(self, lease: Lease, name: str, max_message_size: int) -> None:
        self._lease = lease
        self.name = name
        self.peer = Peer()
        self.max_message_size = max_message_size
        self.credit = 0
        self.unsettled: list[Any] = []

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Append the message to those that the lease has received."""
        self.credit -= 1
        delivery = _Delivery(self, context)
        self._lease.got.append(delivery)
        self._lease.arrived.set()
        # It has the attributes that a subscription uses.
        return cast("OutgoingDelivery", delivery)

    def offer(self, available: int) -> None:
        """Do nothing: no peer uses the number."""

    def drained(self) -> None:
        """Do nothing: no peer requested a drain."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Mark the link as detached, since the queue has been deleted."""
        self.attached = False


class Lease:
    """Messages that one group holds of one queue."""

    def __init__(self, node: Queued, queue: MessageQueue, name: str, number: int, id_: str) -> None:
        self.node = node
        self.queue = queue
        self.name = name
        self.id = id_
        #: Its number in the store, 0 if it is in memory only.
        self.number = number
        self.subscription = queue.subscribe(default_outcome=RELEASED)
        #: The link of ``subscription``.
        self.link: _LeaseLink
        self.generation = 0
        self.first = 0
        #: Held messages from number ``first`` on. None for one that was given back or is lost.
        self.held: list[_Delivery | None] = []
        #: How many of the last ones are being written: their numbers are not public before that is
        #: done.
        self.writing = 0
        #: Messages received from the queue and not numbered yet.
        self.got: list[_Delivery] = []
        self.arrived = trio.Event()
        #: Locked while messages are acquired and numbered.
        self.busy = trio.Lock()
        #: Whether messages were given back that the subscription does not receive again.
        self.selective = False
        self.ttl_s: float | None = None
        self.ends_at = inf
        self.over = False

    @property
    def next(self) -> int:
        """Number after the last message that is kept."""
        return self.first + len(self.held) - self.writing

    def check(self, id_: object) -> None:
        """Check that the group has the id *id_*, unless that is None.

        Raises:
            AmqpError: The group is another one of the same name.
        """
        if id_ is not None and id_ != self.id:
            raise AmqpError(
                f"the group {self.name!r} was released, or has ended, and was opened again since: its "
                "numbers mean other messages",
                condition="amqp:not-found",
            )


class Leases:
    """Lease groups of a broker's queues.

    Args:
        journal: Keeps the groups of queues that are in the store; None if there is no store.
        clock: Clock of the leases' time to live.
        limits: Bounds.
        new_number: Returns a number that is unused in the store.
        on_fault: Called with a queue and an unexpected error in its work.
    """

    def __init__(
        self,
        journal: Journal | None,
        clock: Clock,
        limits: Limits,
        new_number: Callable[[], int],
        on_fault: Callable[[object, Exception], object],
    ) -> None:
        self.journal = journal
        self.clock = clock
        self.limits = limits
        self._new_number = new_number
        self._on_fault = on_fault
        self._leases: dict[Queued, dict[str, Lease]] = {}

    # --- Operations of a group ---

    async def open(self, node: Queued, group: str, ttl_s: float | None = None) -> LeaseState:
        """Open a group for the first time or after a failure, and invalidate earlier openings.

        If the group holds no messages, it may receive those again that it gave back before.
        Cancellation may leave the group opened.

        Args:
            node: The queue.
            group: Its name; the group is created if it does not exist.
            ttl_s: Seconds without an operation after which all messages are released; by default
                they stay with the group.

        Raises:
            AmqpError: The name, *ttl_s* or the queue does not allow it, there are too many groups,
                the store did not keep it, or the group was opened again or ended in the meantime.
        """
        limits = self.limits
        if not 0 < len(group) <= _NAME_MAX:
            raise AmqpError(
                f"a group has a name of 1 to {_NAME_MAX} characters", condition="amqp:invalid-field"
            )
        if ttl_s is not None and not 0 < ttl_s <= limits.lease_ttl_max_s:
            raise AmqpError(
                f"a lease lasts up to {limits.lease_ttl_max_s:g} seconds without a word",
                condition="amqp:invalid-field",
            )
        groups = self._leases.get(node, {})
        lease = groups.get(group)
        made = lease is None
        if lease is None:
            if len(groups) >= limits.leases_max:
                raise AmqpError(
                    f"the queue has {len(groups)} groups already",
                    condition="amqp:resource-limit-exceeded",
                )
            number = self._new_number() if node.number else 0
            lease = self._make(node, group, number, token_hex(8))
            self._leases.setdefault(node, groups)[group] = lease
        else:
            # Messages acquired for an earlier opening and not numbered yet go back to the queue.
            self._put_back(lease)
            if lease.selective and not any(lease.held):
                self._subscribe(lease)
        lease.generation += 1
        generation = lease.generation
        lease.ttl_s = ttl_s
        self._touch(lease)
        try:
            await self._keep(lease)
        except AmqpError:
            if made and lease.generation == generation and not lease.over:
                self._forget(lease)
            raise
        self._check_current(lease, generation)
        return self._state_of(lease, generation)

    def state(self, node: Queued, group: str, id_: object = None) -> LeaseState:
        """Return the progress of *group*.

        Args:
            node: The queue.
            group: Its name.
            id_: The id that the group must have; None for any.

        Raises:
            AmqpError: No such group exists.
        """
        lease = self._find(node, group)
        lease.check(id_)
        return self._state_of(lease, lease.generation)

    def _state_of(self, lease: Lease, generation: int) -> LeaseState:
        """Return the state of *lease* for its opening *generation*."""
        available = lease.queue.available
        return LeaseState(generation, lease.first, lease.next, available, lease.id)

    async def extend(self, node: Queued, group: str, generation: int, count: int) -> LeaseState:
        """Acquire up to *count* of the available messages, without waiting for more to arrive.

        After cancellation messages that have a number remain with the group, others are released.

        Raises:
            AmqpError: The group was opened again or does not exist, or the store did not keep it.
        """
        lease = self._current(node, group, generation)
        async with lease.busy:
            left = min(count, self.limits.lease_messages_max - len(lease.held))
            while True:
                self._check_current(lease, generation)
                try:
                    await self._draw(lease, min(left, _STEP))
                except BaseException:
                    self._put_back(lease)
                    raise
                # Shielded, since a message that has a number must be known as kept or not kept.
                with trio.CancelScope(shield=True):
                    drawn = await self._number(lease)
                left -= drawn
                if drawn < _STEP or not left:
                    break
                await trio.lowlevel.checkpoint()
        self._check_current(lease, generation)
        return self._state_of(lease, generation)

    async def _draw(self, lease: Lease, count: int) -> None:
        """Request up to *count* messages from the queue.

        If none is in memory, wait up to ``_READ_S`` for the queue to read some from the store.
        """
        link = lease.link
        lease.arrived = trio.Event()
        link.credit = max(0, count)
        try:
            lease.subscription.on_credit(cast("SendingLink", link))
            if link.credit and not lease.got and lease.queue.available:
                with trio.move_on_after(_READ_S):
                    await lease.arrived.wait()
        finally:
            link.credit = 0

    async def _number(self, lease: Lease) -> int:
        """Store the places of the received messages; return how many they are."""
        got, lease.got = lease.got, []
        if not got:
            return 0
        begin = lease.next
        lease.held += got
        lease.writing = len(got)

        def note(unit: Unit) -> None:
            for place, delivery in enumerate(got, begin):
                entry = delivery.context
                if entry.stored:
                    key = facts.place_key(lease.number, place)
                    facts.LEASED.put(unit, key, entry.sequence)

        try:
            await self._keep(lease, note)
        except AmqpError:
            # Accepting and giving back only change messages before these; a release has removed
            # all.
            del lease.held[max(0, begin - lease.first) :]
            self._settle(lease, got, RELEASED)
            raise
        finally:
            lease.writing = 0
        return len(got)

    def _put_back(self, lease: Lease) -> None:
        """Release received messages that are not numbered, and end the wait for more."""
        lease.link.credit = 0
        got, lease.got = lease.got, []
        self._settle(lease, got, RELEASED)
        lease.arrived.set()

    async def accept(self, node: Queued, group: str, generation: int, to: int) -> LeaseState:
        """Accept all messages before the number *to*, which removes them from the queue.

        They are accepted in steps; cancellation leaves the later ones with the group.

        Raises:
            AmqpError: As for :meth:`extend`, or *to* is beyond the last number.
        """
        lease = self._current(node, group, generation)
        if to > lease.next:
            raise AmqpError(
                f"{group!r} has no more than {lease.next} messages, not {to}",
                condition="amqp:invalid-field",
            )
        while done := lease.held[: min(_STEP, max(0, to - lease.first))]:
            self._end(lease, done, ACCEPTED)
            await self._keep(lease)
            if lease.first >= to:
                break
            await trio.lowlevel.checkpoint()
            self._check_current(lease, generation)
        return self._state_of(lease, generation)

    async def give_back(
        self, node: Queued, group: str, generation: int, ranges: Sequence[tuple[int, int]]
    ) -> LeaseState:
        """Requeue messages at their old positions; the group keeps the others.

        The group does not receive them again until it is opened again without any message. They are
        requeued in steps; cancellation leaves the later ones with the group.

        Args:
            node: The queue.
            group: Its name.
            generation: The generation that opening the group returned.
            ranges: Pairs of the first number and the number after the last, in ascending order.

        Raises:
            AmqpError: As for :meth:`extend`, or the ranges are out of order or beyond the messages.
        """
        lease = self._current(node, group, generation)
        at = lease.first
        for begin, end in ranges:
            if not at <= begin <= end <= lease.next:
                raise AmqpError(
                    f"{group!r} has the messages {lease.first} to {lease.next - 1}, and {begin} to "
                    f"{end - 1} are not among them, or not in order",
                    condition="amqp:invalid-field",
                )
            at = end
        steps = [
            range(at, min(at + _STEP, end))
            for begin, end in ranges
            for at in range(begin, end, _STEP)
        ]
        for step in steps:
            self._check_current(lease, generation)
            done = []
            for place in step:
                # Some may have been accepted since the previous step.
                delivery = lease.held[place - lease.first] if place >= lease.first else None
                if delivery is not None:
                    lease.held[place - lease.first] = None
                    done.append(delivery)
                    if lease.number and self.journal is not None:
                        key = facts.place_key(lease.number, place)
                        facts.LEASED.remove(self.journal.loose, key)
            if done:
                lease.selective = True
                self._settle(lease, done, Modified(undeliverable_here=True))
                await self._keep(lease)
            if step is not steps[-1]:
                await trio.lowlevel.checkpoint()
        return self._state_of(lease, generation)

    async def release(self, node: Queued, group: str) -> int:
        """End the group and release its messages; return how many numbers it held.

        Raises:
            AmqpError: No such group exists, or the store failed.
        """
        lease = self._find(node, group)
        count = len(lease.held)
        self._forget(lease)
        if lease.number and self.journal is not None:
            await self.journal.write(_nothing_more)
        return count

    # --- Links ---

    def attach(self, node: Queued, link: SendingLink) -> bool:
        """Let *link* read leased messages, or refuse it; return False if it is not for a lease."""
        properties = link.properties
        if GROUP not in properties:
            return False
        group, begin, end = (properties.get(key) for key in (GROUP, FROM, TO))
        if not (isinstance(group, str) and _whole(begin) and _whole(end)):
            link.refuse(
                Error("amqp:invalid-field", f"a link to a lease must set {GROUP}, {FROM} and {TO}")
            )
            return True
        try:
            lease = self._find(node, str(group))
            lease.check(properties.get(ID))
        except AmqpError as error:
            link.refuse(Error.of(error))
            return True
        assert isinstance(begin, int)
        assert isinstance(end, int)
        if not lease.first <= begin <= end <= lease.next:
            link.refuse(
                Error(
                    "amqp:precondition-failed",
                    f"{group!r} has the messages {lease.first} to {lease.next - 1}, not {begin} "
                    f"to {end - 1}",
                )
            )
            return True
        link.accept(LeaseReader(self, lease, int(begin), int(end)))
        return True

    # --- Inside ---

    def _make(self, node: Queued, group: str, number: int, id_: str) -> Lease:
        queue = node.leased_queue
        if queue is None:
            raise AmqpError("only queues have leases", condition="amqp:not-allowed")
        if queue.timing.locks_deliveries:
            raise AmqpError(
                "messages of a queue with lock_s cannot be leased",
                condition="amqp:not-allowed",
            )
        if queue.locked(False):
            raise AmqpError(
                "the queue has a consumer that wants to be the only one",
                condition="amqp:resource-locked",
            )
        lease = Lease(node, queue, group, number, id_)
        self._open_link(lease)
        return lease

    def _open_link(self, lease: Lease) -> None:
        """Attach a new link to the subscription of *lease*."""
        link = _LeaseLink(lease, f"lease {lease.name}", self.limits.message_size_max)
        lease.link = lease.subscription.link = link

    def _subscribe(self, lease: Lease) -> None:
        """Replace the subscription, so that messages excluded for the old one become available."""
        before = lease.subscription
        lease.subscription = lease.queue.subscribe(default_outcome=RELEASED)
        self._open_link(lease)
        lease.selective = False
        before.end()

    def _find(self, node: Queued, group: str) -> Lease:
        lease = self._leases.get(node, {}).get(group)
        if lease is None:
            raise AmqpError(
                f"there is no group {group!r}: it was never opened, was released, or has ended",
                condition="amqp:not-found",
            )
        return lease

    def _current(self, node: Queued, group: str, generation: int) -> Lease:
        lease = self._find(node, group)
        self._check_current(lease, generation)
        self._touch(lease)
        return lease

    def _check_current(self, lease: Lease, generation: int) -> None:
        """Check that *lease* has not ended, and that *generation* is its latest opening.

        Called again after each wait, as others may open, release or end the group in between.

        Raises:
            AmqpError: The group has ended, or was opened again.
        """
        if lease.over:
            raise AmqpError(
                f"the group {lease.name!r} was released, or has ended", condition="amqp:not-found"
            )
        if generation != lease.generation:
            raise AmqpError(
                f"{lease.name!r} has been opened again since: its generation is "
                f"{lease.generation}, not {generation}",
                condition="amqp:link:stolen",
            )

    def _touch(self, lease: Lease) -> None:
        lease.ends_at = inf if lease.ttl_s is None else self.clock.monotonic() + lease.ttl_s

    async def _keep(self, lease: Lease, note: Callable[[Unit], None] | None = None) -> None:
        """Write *lease* to the store together with *note*, and wait until it is kept."""
        if not lease.number or self.journal is None:
            return

        def fill(unit: Unit) -> None:
            known = facts.LeaseFact(
                lease.node.number,
                lease.name,
                lease.generation,
                lease.first,
                # Numbers that are being written are kept in this unit or in an earlier one.
                lease.first + len(lease.held),
                lease.ttl_s,
                lease.id,
            )
            facts.LEASES.put(unit, facts.key_of(lease.number), known)
            if note is not None:
                note(unit)

        await self.journal.write(fill)

    def _end(self, lease: Lease, done: list[_Delivery | None], outcome: Outcome) -> None:
        """Settle the first messages of *lease*, which are *done*, with *outcome*."""
        if lease.number and self.journal is not None:
            unit = self.journal.loose
            for place in range(lease.first, lease.first + len(done)):
                facts.LEASED.remove(unit, facts.place_key(lease.number, place))
        del lease.held[: len(done)]
        lease.first += len(done)
        self._settle(lease, [delivery for delivery in done if delivery is not None], outcome)

    def _settle(self, lease: Lease, done: list[_Delivery], outcome: Outcome) -> None:
        for delivery in done:
            delivery.state = outcome
            delivery.remote_settled = True
        # They have only the attributes that a subscription uses.
        settled = cast("list[OutgoingDelivery]", [*done])
        lease.subscription.on_outcomes(cast("SendingLink", lease.link), settled)

    def _forget(self, lease: Lease) -> None:
        """End *lease* and release its messages, of a large number some in each turn."""
        lease.over = True
        groups = self._leases.get(lease.node, {})
        groups.pop(lease.name, None)
        if not groups:
            self._leases.pop(lease.node, None)
        self._put_back(lease)
        lease.writing = 0
        held = list(enumerate(lease.held, lease.first))
        lease.first += len(held)
        lease.held = []
        lease.queue.conclude_left(held, partial(self._release, lease))
        lease.subscription.end()
        if lease.number and self.journal is not None:
            facts.LEASES.remove(self.journal.loose, facts.key_of(lease.number))

    def _release(self, lease: Lease, numbered: tuple[int, _Delivery | None]) -> None:
        place, delivery = numbered
        if lease.number and self.journal is not None:
            facts.LEASED.remove(self.journal.loose, facts.place_key(lease.number, place))
        if delivery is not None:
            self._settle(lease, [delivery], RELEASED)

    # --- Time, restarts, ends ---

    def sweep(self) -> None:
        """End the leases whose time to live has passed without an operation."""
        now = self.clock.monotonic()
        for node, groups in list(self._leases.items()):
            for lease in list(groups.values()):
                if lease.ends_at <= now and not lease.queue.deleted:
                    try:
                        self._forget(lease)
                    except Exception as error:
                        self._on_fault(node, error)

    def delete(self, node: Queued) -> None:
        """End the leases of a deleted queue."""
        for lease in list(self._leases.get(node, {}).values()):
            self._forget(lease)

    async def restore(
        self, nodes: Mapping[int, Queued], fetch: Callable[[MessageQueue, int], Any]
    ) -> int:
        """Restore the groups of *nodes* from the store; return the highest number of a group.

        Args:
            nodes: The queues, by their numbers.
            fetch: Loads a message of a queue that may be in the store only.
        """
        journal = self.journal
        assert journal is not None
        highest = 0
        found: dict[int, Lease] = {}
        for key, value in await facts.LEASES.read(journal):
            number = facts.number_of(key)
            highest = max(highest, number)
            known = facts.LEASES.decode(value)
            node = nodes.get(known.node)
            if node is None or node.leased_queue is None:
                facts.LEASES.remove(journal.loose, key)
                continue
            lease = found[number] = self._make(node, known.name, number, known.id)
            self._leases.setdefault(node, {})[known.name] = lease
            lease.generation = known.generation
            lease.first = known.first
            lease.held = [None] * (known.next - known.first)
            lease.ttl_s = known.ttl_s
            self._touch(lease)
        for key, value in await facts.LEASED.read(journal):
            lease_of = found.get(facts.number_of(key))
            place = facts.place_of(key)
            if lease_of is None or not lease_of.first <= place < lease_of.next:
                facts.LEASED.remove(journal.loose, key)
                continue
            queue = lease_of.queue
            sequence = facts.LEASED.decode(value)
            await fetch(queue, sequence)
            entry = queue.claim(lease_of.subscription, sequence)
            if entry is not None:
                lease_of.held[place - lease_of.first] = _Delivery(lease_of.link, entry)
        return highest


class LeaseReader:
    """Endpoint that sends copies of a group's messages, from one number to another, settled."""

    def __init__(self, leases: Leases, lease: Lease, begin: int, end: int) -> None:
        self._leases = leases
        self._lease = lease
        self._at = begin
        self._end = end

    def on_attached(self, link: SendingLink) -> None:
        """Do nothing: messages are sent when there is credit."""

    def on_credit(self, link: SendingLink) -> None:
        lease = self._lease
        while link.credit and link.writable and self._at < self._end:
            place = self._at - lease.first
            if lease.over or place < 0:
                link.detach(
                    Error("amqp:not-found", "the leased messages were accepted or returned")
                )
                return
            delivery = lease.held[place]
            if delivery is not None:
                entry = delivery.context
                payload = encode_outgoing(entry, self._leases.clock.wall())
                if entry.message_format == MESSAGE_FORMAT:
                    whole = payload if isinstance(payload, bytes) else b"".join(payload)
                    said = {OFFSET: str(self._at), SEQUENCE_NUMBER: self._at}
                    payload = annotated(whole, said)
                try:
                    link.send(payload, settled=True, message_format=entry.message_format)
                except LocalProtocolError as error:
                    if exceeds_link(link, error):
                        link.detach(Error("amqp:link:message-size-exceeded", error.description))
                    else:
                        # More credit may cover it; a drain ends without it.
                        link.drained()
                    return
            self._at += 1
        if self._at >= self._end:
            link.drained()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Do nothing: the messages are sent settled."""

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """Do nothing: the lease does not depend on its readers."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _nothing_more(unit: Unit) -> None:
    """Write nothing: the unit only waits until earlier ones are kept."""
