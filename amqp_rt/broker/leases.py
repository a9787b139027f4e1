"""Leases: messages of a queue that are set aside for a group, and can be read again and again.

Who computes in steps, each of which may be done again after a failure, cannot work with messages that
are gone when they have been read. A *group* takes ranges instead: it asks the queue for more
(:meth:`Leases.extend`), which sets messages aside as any consumer would and numbers them; reads what it
has, by number and from any connection, as often as it likes (:class:`LeaseReader`); gives those back
that it does not want (:meth:`Leases.give_back`); and accepts all below a number when it is done with
them. The queue stays a queue for everybody else.

In a store a lease outlives the process: which message has which number is on the disk before anybody
hears of it. A group has a *generation*, which each opening raises: what somebody does with an older one
is refused with ``amqp:link:stolen``, so that two never work on the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any, Final, Protocol

import msgspec
import trio
from msgspec import Struct

from ..clock import Clock
from ..errors import AmqpError, LocalProtocolError
from ..fronts.base import Payload, SendingLink
from ..limits import Limits
from ..message import MESSAGE_FORMAT
from ..outcomes import ACCEPTED, RELEASED, Error, Modified
from ..values import Symbol
from .entries import Entry, annotated, departing
from .journal import Journal, Unit
from .logs import OFFSET, SEQUENCE_NUMBER
from .queues import MessageQueue
from .subscriptions import Subscription
from .termini import key_of

#: Properties of a link that reads what is leased: the group, its id if it has to be that one, and the first
#: number and the one after the last.
GROUP: Final = Symbol("amqp_rt:lease-group")
ID: Final = Symbol("amqp_rt:lease-id")
FROM: Final = Symbol("amqp_rt:lease-from")
TO: Final = Symbol("amqp_rt:lease-to")
#: Kinds of facts: a group of a queue, by its number; and its messages, by that and their own numbers.
LEASE_FACT: Final = "lease"
LEASED_FACT: Final = "leased"

_NAME_MAX: Final = 256
#: Seconds for messages that are in the store only to be read.
_READ_S: Final = 2.0
#: Messages that are set aside, accepted or given back in one step, before others have their turn.
_STEP: Final = 500


class LeaseState(Struct, frozen=True):
    """How far a group has come."""

    generation: int
    #: The first number that is not accepted, and the one that the next message gets.
    first: int
    next: int
    #: Messages that wait in the queue.
    available: int
    #: Tells the group from others of its name, before it and after it, whose numbers mean other messages.
    id: str = ""


class _Known(Struct, array_like=True):
    """A group as the store keeps it. New fields go to the end."""

    node: int
    name: str
    generation: int
    first: int
    next: int
    ttl_s: float | None
    id: str = ""


class Queued(Protocol):
    """The node whose messages are leased."""

    held: Any
    #: Its number in the store, 0 if it is not there.
    number: int


class _Delivery:
    """A message that a group has, for the subscription that it has it from."""

    __slots__ = ("context", "link", "remote_settled", "settled", "state", "tag")

    def __init__(self, link: _Inward, entry: Entry) -> None:
        self.link = link
        self.context: Any = entry
        self.state: Any = None
        self.settled = False
        self.remote_settled = False
        self.tag = b""

    def settle(self, state: Any = None) -> None:
        """The queue has done what was said; nobody waits to hear so."""
        self.settled = True


class _Inward:
    """The link on which a group gets its messages (fronts.base.SendingLink): it leads nowhere."""

    draining = False
    attached = True
    writable = True
    flow_properties = None
    connection = None

    def __init__(self, lease: Lease, name: str, max_message_size: int) -> None:
        self._lease = lease
        self.name = name
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
        state: Any = None,
        more: bool = False,
    ) -> _Delivery:
        """Give the message the next number."""
        self.credit -= 1
        delivery = _Delivery(self, context)
        self._lease.got.append(delivery)
        self._lease.arrived.set()
        return delivery

    def offer(self, available: int) -> None:
        """Nobody asks."""

    def drained(self) -> None:
        """Nobody asks."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """The queue has been deleted."""
        self.attached = False


class Lease:
    """What one group has of one queue."""

    def __init__(
        self, node: Queued, name: str, number: int, subscription: Subscription, id_: str
    ) -> None:
        self.node = node
        self.name = name
        self.id = id_
        #: Its number in the store, 0 if it is in memory only.
        self.number = number
        self.subscription = subscription
        self.generation = 0
        self.first = 0
        #: Its messages; the first of them has the number ``first``. None if one has gone.
        self.held: list[_Delivery | None] = []
        #: The last of them, whose numbers are being written and are not said before that is done.
        self.writing = 0
        #: What the queue has just given.
        self.got: list[_Delivery] = []
        self.arrived = trio.Event()
        #: Held while more is set aside.
        self.busy = trio.Lock()
        #: It has given messages back, which its subscription does not get again.
        self.picky = False
        self.ttl_s: float | None = None
        self.ends_at = inf
        self.over = False

    @property
    def next(self) -> int:
        """The number after the last one that is kept."""
        return self.first + len(self.held) - self.writing

    def check(self, id_: object) -> None:
        """Whether it is the one that somebody knows as *id_*; None knows any.

        Raises:
            AmqpError: It is another one of that name.
        """
        if id_ is not None and id_ != self.id:
            raise AmqpError(
                f"the group {self.name!r} was released, or has ended, and was opened again since: its "
                "numbers mean other messages",
                condition="amqp:not-found",
            )


class Leases:
    """The groups of a broker's queues.

    Args:
        journal: Keeps them for queues that are in the store; None if there is none.
        clock: By which leases end.
        limits: Bounds.
        new_number: Gives a number that nothing else has in the store.
        on_fault: Called with a queue and an unexpected error of its work.
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

    # --- What a group does ---

    async def open(self, node: Queued, group: str, ttl_s: float | None = None) -> LeaseState:
        """Begin, or go on after a failure: whoever had the group before has it no more.

        What the group gave back it may get again, unless it still has others from then.

        Args:
            node: The queue.
            group: Its name; made if there is none.
            ttl_s: Seconds without a word after which everything goes back to the queue; by default
                it stays aside.

        Raises:
            AmqpError: It cannot be, or cannot be kept.
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
            # What is drawn for an earlier opening is not for this one.
            self._put_back(lease)
            if lease.picky and not any(lease.held):
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
        """How far *group* has come.

        Args:
            node: The queue.
            group: Its name.
            id_: Which one of that name it has to be; None for any.

        Raises:
            AmqpError: There is no such group.
        """
        lease = self._find(node, group)
        lease.check(id_)
        return self._state_of(lease, lease.generation)

    def _state_of(self, lease: Lease, generation: int) -> LeaseState:
        """The state of *lease*, for its opening *generation*."""
        available = lease.node.held.available
        return LeaseState(generation, lease.first, lease.next, available, lease.id)

    async def extend(self, node: Queued, group: str, generation: int, count: int) -> LeaseState:
        """Set up to *count* more messages aside; what is there, without waiting for more.

        Raises:
            AmqpError: Somebody else has opened the group since, there is none, or it cannot be kept.
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
                # Whether it is kept or not has to be known: what has a number is set aside.
                with trio.CancelScope(shield=True):
                    drawn = await self._number(lease)
                left -= drawn
                if drawn < _STEP or not left:
                    break
                await trio.lowlevel.checkpoint()
        self._check_current(lease, generation)
        return self._state_of(lease, generation)

    async def _draw(self, lease: Lease, count: int) -> None:
        """Have the queue give up to *count* messages. If what it has is in the store only, it takes
        a moment until it does."""
        link = lease.subscription.link
        lease.arrived = trio.Event()
        link.credit = max(0, count)
        try:
            lease.subscription.on_credit(link)
            if link.credit and not lease.got and lease.node.held.available:
                with trio.move_on_after(_READ_S):
                    await lease.arrived.wait()
        finally:
            link.credit = 0

    async def _number(self, lease: Lease) -> int:
        """Give what was drawn its numbers, and keep them; how many messages that were."""
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
                    value = entry.sequence.to_bytes(8, "big")
                    unit.keep(LEASED_FACT, _message_key(lease, place), value)

        try:
            await self._keep(lease, note)
        except AmqpError:
            # What is accepted or given back meanwhile comes before these; a release has taken all.
            del lease.held[max(0, begin - lease.first) :]
            self._settle(lease, got, RELEASED)
            raise
        finally:
            lease.writing = 0
        return len(got)

    def _put_back(self, lease: Lease) -> None:
        """Give back to the queue what *lease* has drawn and not numbered, and end the wait for it."""
        lease.subscription.link.credit = 0
        got, lease.got = lease.got, []
        self._settle(lease, got, RELEASED)
        lease.arrived.set()

    async def accept(self, node: Queued, group: str, generation: int, to: int) -> LeaseState:
        """Be done with all messages before the number *to*: they are gone.

        Raises:
            AmqpError: As for :meth:`extend`, or there is no such number.
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
        """Give messages back to the queue, at their old places; the others of the group stay with it.

        The group does not get them again until it is opened again.

        Args:
            node: The queue.
            group: Its name.
            generation: What opening it has said.
            ranges: First numbers, and those after the last ones; in order.

        Raises:
            AmqpError: As for :meth:`extend`, or the ranges are out of order or not there.
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
                # Some may have been accepted since the step before.
                delivery = lease.held[place - lease.first] if place >= lease.first else None
                if delivery is not None:
                    lease.held[place - lease.first] = None
                    done.append(delivery)
                    if lease.number and self.journal is not None:
                        self.journal.loose.forget(LEASED_FACT, _message_key(lease, place))
            if done:
                lease.picky = True
                self._settle(lease, done, Modified(undeliverable_here=True))
                await self._keep(lease)
            if step is not steps[-1]:
                await trio.lowlevel.checkpoint()
        return self._state_of(lease, generation)

    async def release(self, node: Queued, group: str) -> int:
        """Forget the group; what it has goes back to the queue. How many messages that were.

        Raises:
            AmqpError: There is no such group, or it cannot be kept.
        """
        lease = self._find(node, group)
        count = len(lease.held)
        self._forget(lease)
        if lease.number and self.journal is not None:
            await self.journal.keep(_nothing_more)
        return count

    # --- Links ---

    def attach(self, node: Queued, link: SendingLink) -> bool:
        """Let *link* read what is leased, or refuse it; false if it is a link like any other."""
        properties = link.properties
        if GROUP not in properties:
            return False
        group, begin, end = (properties.get(key) for key in (GROUP, FROM, TO))
        if not (isinstance(group, str) and _whole(begin) and _whole(end)):
            link.refuse(
                Error("amqp:invalid-field", f"a link of a lease says {GROUP}, {FROM} and {TO}")
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
        queue = node.held
        if not isinstance(queue, MessageQueue):
            raise AmqpError("only queues have leases", condition="amqp:not-allowed")
        if queue.locks_deliveries:
            raise AmqpError(
                "the queue takes back what is not settled in time: nothing of it can be leased",
                condition="amqp:not-allowed",
            )
        if queue.locked(False):
            raise AmqpError(
                "the queue has a consumer that wants to be the only one",
                condition="amqp:resource-locked",
            )
        lease = Lease(node, group, number, queue.subscribe(default_outcome=RELEASED), id_)
        lease.subscription.link = self._inward(lease)
        return lease

    def _inward(self, lease: Lease) -> _Inward:
        return _Inward(lease, f"lease {lease.name}", self.limits.message_size_max)

    def _subscribe(self, lease: Lease) -> None:
        """Look at the queue with new eyes: nothing is held back from a new subscription."""
        before = lease.subscription
        lease.subscription = lease.node.held.subscribe(default_outcome=RELEASED)
        lease.subscription.link = self._inward(lease)
        lease.picky = False
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
        """Check that *lease* is there, and that *generation* is its latest opening.

        Called again after each wait, as the group may be opened, released or ended by others meanwhile.

        Raises:
            AmqpError: It is not.
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
        """Have the store know *lease*, and wait until it does."""
        if not lease.number or self.journal is None:
            return

        def fill(unit: Unit) -> None:
            known = _Known(
                lease.node.number,
                lease.name,
                lease.generation,
                lease.first,
                # The numbers that are being written are written with this, or were before.
                lease.first + len(lease.held),
                lease.ttl_s,
                lease.id,
            )
            unit.keep(LEASE_FACT, key_of(lease.number), msgspec.msgpack.encode(known))
            if note is not None:
                note(unit)

        await self.journal.keep(fill)

    def _end(self, lease: Lease, done: list[_Delivery | None], outcome: Any) -> None:
        """Say *outcome* of the first messages of *lease*, which are *done*."""
        if lease.number and self.journal is not None:
            unit = self.journal.loose
            for place in range(lease.first, lease.first + len(done)):
                unit.forget(LEASED_FACT, _message_key(lease, place))
        del lease.held[: len(done)]
        lease.first += len(done)
        self._settle(lease, [delivery for delivery in done if delivery is not None], outcome)

    def _settle(self, lease: Lease, done: list[_Delivery], outcome: Any) -> None:
        for delivery in done:
            delivery.state = outcome
            delivery.remote_settled = True
        lease.subscription.on_outcomes(lease.subscription.link, done)

    def _forget(self, lease: Lease) -> None:
        """End *lease*: what it has is requeued, of much some at a time."""
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
        lease.node.held.conclude_left(held, partial(self._release, lease))
        lease.subscription.end()
        if lease.number and self.journal is not None:
            self.journal.loose.forget(LEASE_FACT, key_of(lease.number))

    def _release(self, lease: Lease, numbered: tuple[int, _Delivery | None]) -> None:
        place, delivery = numbered
        if lease.number and self.journal is not None:
            self.journal.loose.forget(LEASED_FACT, _message_key(lease, place))
        if delivery is not None:
            self._settle(lease, [delivery], RELEASED)

    # --- Time, restarts, ends ---

    def sweep(self) -> None:
        """Give back what those have who have not been heard of for too long."""
        now = self.clock.monotonic()
        for node, groups in list(self._leases.items()):
            for lease in list(groups.values()):
                if lease.ends_at <= now and not node.held.deleted:
                    try:
                        self._forget(lease)
                    except Exception as error:
                        self._on_fault(node, error)

    def delete(self, node: Queued) -> None:
        """The queue is no more."""
        for lease in list(self._leases.get(node, {}).values()):
            self._forget(lease)

    async def restore(
        self, nodes: Mapping[int, Queued], fetch: Callable[[MessageQueue, int], Any]
    ) -> int:
        """Take up what the store has kept for *nodes*, which are by their numbers; the highest number
        of a group.

        Args:
            nodes: The queues.
            fetch: Has a queue know a message in memory that may be in the store only.
        """
        journal = self.journal
        assert journal is not None
        highest = 0
        found: dict[int, Lease] = {}
        for key, value in await journal.call(journal.store.facts, LEASE_FACT):
            number = int.from_bytes(key, "big")
            highest = max(highest, number)
            known = msgspec.msgpack.decode(value, type=_Known)
            node = nodes.get(known.node)
            if node is None or not isinstance(node.held, MessageQueue):
                journal.loose.forget(LEASE_FACT, key)
                continue
            lease = found[number] = self._make(node, known.name, number, known.id)
            self._leases.setdefault(node, {})[known.name] = lease
            lease.generation = known.generation
            lease.first = known.first
            lease.held = [None] * (known.next - known.first)
            lease.ttl_s = known.ttl_s
            self._touch(lease)
        for key, value in await journal.call(journal.store.facts, LEASED_FACT):
            lease_of = found.get(int.from_bytes(key[:4], "big"))
            place = int.from_bytes(key[4:], "big")
            if lease_of is None or not lease_of.first <= place < lease_of.next:
                journal.loose.forget(LEASED_FACT, key)
                continue
            queue = lease_of.node.held
            sequence = int.from_bytes(value, "big")
            await fetch(queue, sequence)
            entry = queue.claim(lease_of.subscription, sequence)
            if entry is not None:
                lease_of.held[place - lease_of.first] = _Delivery(lease_of.subscription.link, entry)
        return highest


class LeaseReader:
    """A link that is sent copies of what a group has, from one number to another. What it says of them
    changes nothing."""

    def __init__(self, leases: Leases, lease: Lease, begin: int, end: int) -> None:
        self._leases = leases
        self._lease = lease
        self._at = begin
        self._end = end
        self.link: Any = None

    def on_attached(self, link: SendingLink) -> None:
        self.link = link

    def on_credit(self, link: SendingLink) -> None:
        lease = self._lease
        while link.credit and link.writable and self._at < self._end:
            place = self._at - lease.first
            if lease.over or place < 0:
                link.detach(
                    Error("amqp:not-found", "what was leased has been accepted or given back")
                )
                return
            delivery = lease.held[place]
            if delivery is not None:
                entry = delivery.context
                payload = departing(entry, self._leases.clock.wall())
                if entry.message_format == MESSAGE_FORMAT:
                    whole = payload if isinstance(payload, bytes) else b"".join(payload)
                    said = {OFFSET: str(self._at), SEQUENCE_NUMBER: self._at}
                    payload = annotated(whole, said)
                try:
                    link.send(payload, settled=True, message_format=entry.message_format)
                except LocalProtocolError as error:
                    link.detach(Error("amqp:link:message-size-exceeded", error.description))
                    return
            self._at += 1
        if self._at >= self._end:
            link.drained()

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        """They are sent settled."""

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """The lease stays."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _message_key(lease: Lease, place: int) -> bytes:
    return key_of(lease.number) + place.to_bytes(8, "big")


def _nothing_more(unit: Unit) -> None:
    """What is to be kept is before this unit."""
