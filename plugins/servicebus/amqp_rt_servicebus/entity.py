"""A queue, a subscription of a topic, or a sub-queue of either: the state machine of its messages.

A message is *active*, *deferred* or *scheduled*. A receiver takes an active message and locks it (or removes it at
once), and a deferred one by its sequence number; the lock ends with an outcome, with its time, or with the
session that has it. It does not end with the link. Pure: the clock is an argument, and links are those of
the core, whose ``Subscription`` and ``Intake`` serve an entity unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, TypeAlias, cast
from uuid import UUID, uuid4

from msgspec.structs import replace

from amqp_rt.broker.building import Counts, Duplicates, Enlisted, Entry, Memory, Subscription
from amqp_rt.clock import Clock
from amqp_rt.errors import AmqpError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Accepted, Error, Modified, Outcome, Rejected, Released

from .backlog import WORK_OF_A_CALL, Backlog
from .bounds import DEFAULT_BOUNDS
from .conditions import (
    ENTITY_DISABLED,
    NOT_ALLOWED,
    TOO_LARGE,
    message_lock_lost,
    session_cannot_be_locked,
    session_lock_lost,
)
from .deadlines import EARLY_S
from .distribution import Distribution
from .messages import NewId, arrived, copied, enqueued, mark_dead
from .options import Options, Sizes
from .outcomes import NO_SESSION, TOO_MANY_HOPS, Outcomes
from .sessions import Session, Sessions
from .shelf import Shelf, place_of
from .stored import State, Stored
from .timing import Timing

#: Entities that may forward a message; at the next one it is dead-lettered.
HOPS_MAX: Final = 4
#: Why a message could not be forwarded: a reason and a description for the dead letter.
Failure: TypeAlias = tuple[str, str]


class _Keep:
    """Outcome of a delivery that ends without one: the message stays locked."""


#: Default outcome of all links that receive from an entity.
KEEP: Final = _Keep()
#: Context of a delivery whose lock has ended.
LOST: Final = Entry(b"")


def _nothing() -> None:
    """Do nothing."""


def _forget(item: object) -> None:
    """Free *item*. Deliveries and messages refer to each other: the cycle is removed."""
    if isinstance(item, Stored):
        item.delivery = None


def _no_alarm(at: float) -> None:
    """Do nothing."""


def _no_fault(on: str) -> None:
    """Return None: nothing fails."""


def _no_quota(stored: Stored) -> None:
    """Return None: every message is taken."""


class Entity:
    """Messages of one entity, and their distribution to receivers.

    It is the place of an ``Inlet``, the node of an ``Intake`` and the node of each ``Subscription``. The host
    calls :meth:`tick` at the alarm (``on_alarm``), :meth:`resume` soon after ``on_unfinished``, and wires
    both for each of :attr:`parts`.

    Args:
        path: Address, as dead letters name it.
        options: Options.
        memory: Memory account that all entities share.
        clock: Clock; message times are those of its wall clock, the alarm is of its monotonic one.
        limits: Bounds of the codec and of duplicate detection.
        new_id: Makes lock tokens.
        parent: Entity of which this is a sub-queue.
    """

    #: Whether the messages of a large transaction can be gathered: they are handed out in turns anyway.
    gathering = None

    def __init__(
        self,
        path: str,
        options: Options,
        memory: Memory,
        clock: Clock,
        *,
        limits: Limits = DEFAULT_LIMITS,
        new_id: NewId = uuid4,
        parent: Entity | None = None,
    ) -> None:
        self.path = path
        self.options = options
        self.memory = memory
        self.clock = clock
        self.limits = limits
        self.bounds = DEFAULT_BOUNDS
        self.shelf = Shelf(memory)
        self.sessions = Sessions()
        self.counts = Counts()
        self.consumers: dict[int, Subscription] = {}
        self.deleted = False
        #: For senders that wait for room; see ``Intake``.
        self.awaited = False
        self.on_room: Callable[[], None] = _nothing
        #: Called when work is left for :meth:`resume`.
        self.on_unfinished: Callable[[], None] = _nothing
        #: Called with a time of the monotonic clock by which :meth:`tick` has to be called.
        self.on_alarm: Callable[[float], None] = _no_alarm
        self.alarm = inf
        #: Returns whether links that send to the entity, or other users of it, are there.
        self.is_used: Callable[[], bool] = lambda: False
        #: Called when the entity was idle for the time after which it is deleted.
        self.on_idle: Callable[[], None] = _nothing
        #: Returns the error that a test wants instead of what would happen, by the occasion (``faults.OCCASIONS``).
        self.fault: Callable[[str], Error | None] = _no_fault
        #: Returns why the service would refuse a message that is allowed here otherwise.
        self.quota: Callable[[Stored], Error | None] = _no_quota
        #: Bytes of one message, where the options have no limit; None for that of the broker.
        self.message_bytes_max: int | None = None
        #: Forwards a message, which is a copy; returns why that is impossible, None if it was done. The
        #: attribute is None if the entity keeps its messages.
        self.forward: Callable[[Stored], Failure | None] | None = None
        #: Whether forwarding counts as a hop. It does not for a topic, whose subscriptions get copies.
        self.forward_counts = True
        self.duplicates: Duplicates | None = None
        if options.duplicates_s:
            self.duplicates = Duplicates(options.duplicates_s, clock.wall, limits=limits)
        #: Sub-queues, which a sub-queue does not have. Messages that a sub-queue of dead letters cannot
        #: forward go to the transfer queue of its parent.
        self.parent = parent
        self.dead_letters: Entity | None = None
        self.transfers: Entity | None = None
        if parent is None:
            sub = options.for_sub_queue()
            self.dead_letters = Entity(
                f"{path}/$DeadLetterQueue",
                sub,
                memory,
                clock,
                limits=limits,
                new_id=new_id,
                parent=self,
            )
            self.transfers = Entity(
                f"{path}/$Transfer/$DeadLetterQueue",
                sub,
                memory,
                clock,
                limits=limits,
                new_id=new_id,
                parent=self,
            )
        self.new_id = new_id
        #: Session of each receiver that has one.
        self._session_of: dict[int, Session] = {}
        self._identities = 0
        self.freed = False
        #: The last entry whose outcome came after the end of its lock.
        self._late: Entry | None = None
        #: The fault in place of the last outcome.
        self._failed: Error | None = None
        #: Outcomes, and messages of sessions that end, for later turns.
        self.backlog = Backlog(memory)
        self.outcomes = Outcomes(self)
        self.distribution = Distribution(self)
        self.timing = Timing(self)
        self.timing.arm()

    @property
    def parts(self) -> list[Entity]:
        """The entity and its sub-queues."""
        return [each for each in (self, self.dead_letters, self.transfers) if each is not None]

    # --- State for operators ---

    @property
    def available(self) -> int:
        """Number of active messages that are not locked."""
        return self.shelf.counts[State.ACTIVE] - self.acquired

    @property
    def acquired(self) -> int:
        """Number of active messages that are locked."""
        return self.shelf.locked_active

    @property
    def bytes(self) -> int:
        """Bytes of the messages and of the states of sessions."""
        return self.shelf.bytes

    def sizes(self) -> Sizes:
        """Return how many messages there are, and their bytes."""
        counts = self.shelf.counts
        subs = self.parts[1:]
        return Sizes(
            active=counts[State.ACTIVE],
            deferred=counts[State.DEFERRED],
            scheduled=counts[State.SCHEDULED],
            dead_letters=len(self.dead_letters.shelf) if self.dead_letters else 0,
            transfer_dead_letters=len(self.transfers.shelf) if self.transfers else 0,
            bytes=self.shelf.bytes + sum(each.shelf.bytes for each in subs),
        )

    def reconfigure(self, options: Options) -> None:
        """Apply changed options from now on.

        Sessions, partitions and duplicate detection stay as they were when the entity was created.
        """
        before = self.options
        self.options = replace(
            options,
            sessions=before.sessions,
            partitioned=before.partitioned,
            duplicates_s=options.duplicates_s if self.duplicates is not None else 0.0,
        )
        if self.duplicates is not None and options.duplicates_s:
            self.duplicates.window_s = options.duplicates_s
        for sub in self.parts[1:]:
            sub.options = self.options.for_sub_queue()
        self.timing.idle_check = inf
        self.timing.touch()

    # --- Room (Place, HasRoom) ---

    def room(self) -> int:
        """Return the number of messages for which there is memory, at the mean size of those here.

        Messages beyond the size of the entity may arrive: the service refuses them as over the quota, where
        a sender without credit would wait until it gives up.
        """
        held = len(self.shelf)
        mean = self.shelf.bytes // held if held else 1024
        return max(0, (self.memory.limit - self.memory.held) // max(mean, 64))

    def fits(self, size: int) -> bool:
        """Return whether there is room for a message of *size* bytes."""
        total = self.shelf.bytes + self.shelf.reserved + size
        return self.memory.held + size <= self.memory.limit and total <= self.options.bytes_max

    def why_full(self, name: str, size: int) -> str:
        """Return why the entity has no room for a message of *size* bytes."""
        return f"the messaging entity {name or self.path!r:.200} has no room for {size} bytes"

    def reserve_room(self, entry: Entry) -> None:
        """Reserve room for *entry* until its transaction ends."""
        self.shelf.reserved += len(entry.payload)
        self.memory.held += len(entry.payload)

    def release_room(self, entry: Entry) -> None:
        """Release the room of a reserved *entry*, which is put now, or :meth:`notify_waiting` follows."""
        if not self.deleted:
            self.shelf.reserved -= len(entry.payload)
            self.memory.held -= len(entry.payload)

    def notify_waiting(self) -> None:
        """Notify those that wait for room."""
        if self.awaited:
            self.on_room()
        if self.memory.waiting:
            self.memory.notify_waiting()

    # --- Arrival ---

    def check(self, entry: Entry, peer: object = None) -> Rejected | None:
        """Return why a message that a client sends is refused, None if it is not. For ``Inlet(check=)``."""
        if self.parent is not None:
            return Rejected(Error(NOT_ALLOWED, f"{self.path!r} takes dead letters only"))
        if (error := self.fault("send")) is not None:
            return Rejected(error)
        if self.options.status in ("Disabled", "SendDisabled"):
            return Rejected(Error(ENTITY_DISABLED, f"{self.path!r} is disabled for sending"))
        if not isinstance(entry, Stored):
            return None
        # Links to the entity have the limit too: scheduled messages and those of anonymous termini only this one.
        size_max = self.options.message_bytes_max or self.message_bytes_max
        if size_max is not None and entry.size > size_max:
            return Rejected(
                Error(
                    TOO_LARGE,
                    f"it has {entry.size} octets, and {self.path!r} takes {size_max} at most",
                )
            )
        session = entry.session
        if self.options.sessions and session is None:
            return Rejected(
                Error(
                    NOT_ALLOWED,
                    f"{self.path!r} requires sessions: set the session id (group-id) of each message",
                )
            )
        key = entry.partition_key
        if session is not None and key is not None and key != session:
            return Rejected(
                Error(
                    NOT_ALLOWED, "the partition key of a message with a session has to equal its id"
                )
            )
        error = self.quota(entry)
        return None if error is None else Rejected(error)

    def put(self, entry: Entry) -> None:
        """Take a message that was checked: at once, or when it is due."""
        self.accept(
            entry if isinstance(entry, Stored) else arrived(entry.payload, limits=self.limits)
        )

    def accept(self, stored: Stored) -> int:
        """Take a message; return its sequence number."""
        if self.deleted:
            return 0
        now = self.timing.begin()
        if self.options.sessions and stored.session is None:
            # A client's message was refused; this one was forwarded, or is a copy of a topic's.
            self.shelf.assign(stored, partitioned=False)
            enqueued(stored, now, self.options.ttl_s)
            self.outcomes.bury(
                stored,
                NO_SESSION,
                "the entity requires sessions, and this message has no session id",
            )
        elif stored.due_at > now + EARLY_S:
            self.shelf.assign(stored, partitioned=self.options.partitioned)
            stored.enqueued_at = now
            stored.state = State.SCHEDULED
            self._keep(stored)
            self.timing.due.set(place_of(stored.number), stored.due_at)
        else:
            self.enqueue(stored, now)
        self.finish()
        return stored.number

    def receive(self, stored: Stored) -> None:
        """Take a message of another entity, unless it is a duplicate."""
        if self.remember(stored):
            self.accept(stored)

    def remember(self, stored: Stored) -> bool:
        """Remember the id of a message that did not come through an inlet; return False for a duplicate."""
        duplicates = self.duplicates
        if duplicates is None:
            return True
        identity = duplicates.identify(stored)
        if identity is None:
            return True
        if duplicates.find(identity) is not None:
            return False
        duplicates.begin(kept=True).add(identity, durable=False)
        return True

    def enqueue(self, stored: Stored, at: float) -> None:
        """Make *stored* active at the end, or forward it."""
        self.shelf.assign(stored, partitioned=self.options.partitioned)
        stored.state = State.ACTIVE
        enqueued(stored, at, self.options.ttl_s)
        self.counts.enqueued += 1
        if self._forwarded(stored):
            return
        self._keep(stored)
        self.timing.expiries.set(place_of(stored.number), stored.expires_at)
        self.make_ready(stored)

    def _forwarded(self, stored: Stored) -> bool:
        """Forward *stored*, which is not kept yet, if the entity does so; return whether it is gone."""
        if self.forward is None:
            return False
        if self.forward_counts and stored.hops >= HOPS_MAX:
            if self.dead_letters is None:
                return False
            self.outcomes.bury(
                stored, TOO_MANY_HOPS, f"{HOPS_MAX} entities have forwarded the message already"
            )
            return True
        failure = self.forward(copied(stored, hops=int(self.forward_counts)))
        if failure is not None:
            transfers = self.transfers if self.parent is None else self.parent.transfers
            if transfers is None or transfers is self:
                return False
            mark_dead(stored, self.path, *failure)
            transfers.take_dead(stored)
        return True

    def take_dead(self, stored: Stored) -> None:
        """Take a dead letter, as a sub-queue: it keeps its number and its enqueued time."""
        stored.state = State.ACTIVE
        stored.expires_at = inf
        self.counts.enqueued += 1
        if not self._forwarded(stored):
            self._keep(stored)
            self.make_ready(stored)
        self.finish()

    def _keep(self, stored: Stored) -> None:
        self.shelf.add(stored)
        session_id = stored.session
        if self.options.sessions and session_id is not None:
            self.sessions.open(session_id).numbers.add(stored.number)

    def session_for(self, stored: Stored) -> Session | None:
        """Return the session of a message that is here, None if the entity has no sessions."""
        if not self.options.sessions or stored.session is None:
            return None
        return self.sessions.find(stored.session)

    def make_ready(self, stored: Stored) -> None:
        place = place_of(stored.number)
        session = self.session_for(stored)
        if session is None:
            self.shelf.ready.add(place)
            return
        session.ready.add(place)
        self.sessions.refresh(session)
        if session.holder is not None:
            self.distribution.stirred[session.id] = None

    def remove(self, stored: Stored) -> None:
        """Remove a message, locked or not, from the entity."""
        place = place_of(stored.number)
        if stored.token is not None:
            self.unlock(stored)
        self.shelf.remove(stored)
        self.shelf.ready.discard(place)
        self.timing.expiries.discard(place)
        self.timing.due.discard(place)
        self.freed = True
        session = self.session_for(stored)
        if session is not None:
            session.numbers.discard(stored.number)
            session.ready.discard(place)
            self.sessions.refresh(session)

    # --- Links that receive ---

    def refuse_consumer(self) -> Error | None:
        """Return why no link may receive from the entity, None if it may."""
        if self.options.status in ("Disabled", "ReceiveDisabled"):
            return Error(ENTITY_DISABLED, f"{self.path!r} is disabled for receiving")
        return None

    def consume(self, *, settled: bool) -> Subscription:
        """Return the endpoint of a link that receives, from an entity without sessions.

        Args:
            settled: Whether messages are removed as they are sent (receive and delete).

        Raises:
            AmqpError: The entity requires sessions.
        """
        if self.options.sessions:
            raise AmqpError(
                f"{self.path!r} requires sessions: attach with a session filter",
                condition=NOT_ALLOWED,
            )
        return self._subscribe(settled)

    def consume_session(self, session_id: str | None, *, settled: bool) -> Subscription | None:
        """Lock a session and return the endpoint of its link.

        Args:
            session_id: The session; None for the free one with the oldest message.
            settled: As for :meth:`consume`.

        Returns:
            None if the next session was asked for and none is free: wait with :meth:`wait_for_session`.

        Raises:
            AmqpError: The entity has no sessions, or another receiver has this one.
        """
        if not self.options.sessions:
            raise AmqpError(
                f"{self.path!r} has no sessions: attach without a session filter",
                condition=NOT_ALLOWED,
            )
        now = self.timing.begin()
        if session_id is None:
            session = self.sessions.first_free()
            if session is None:
                return None
        else:
            session = self.sessions.open(session_id)
            if session.holder is not None:
                raise session_cannot_be_locked(session_id)
        subscription = self._subscribe(settled)
        self._session_of[subscription.identity] = session
        self.sessions.lock(session, subscription, now + self.options.lock_s)
        self.timing.arm()
        return subscription

    def wait_for_session(self, on_session: Callable[[Subscription], bool], *, settled: bool) -> int:
        """Call *on_session* with the endpoint for the next session that is free.

        It returns False if its link has ended: the session is then free for the next one that waits.

        Returns:
            A number for ``sessions.stop_waiting``, when the time of the attach has passed.

        Raises:
            AmqpError: Too many receivers wait.
        """

        def on_free() -> bool:
            subscription = self.consume_session(None, settled=settled)
            if subscription is None:
                return False
            if on_session(subscription):
                return True
            self.unsubscribe(subscription)
            return False

        return self.sessions.wait(on_free, self.bounds.session_waiting_max)

    def session_of(self, subscription: Subscription) -> Session | None:
        """Return the session that *subscription* has locked, None if it has none any more."""
        session = self._session_of.get(subscription.identity)
        return session if session is not None and session.holder is subscription else None

    def _subscribe(self, settled: bool) -> Subscription:
        self._identities += 1
        keep = cast("Outcome", KEEP)
        subscription = Subscription(self, self._identities, default_outcome=keep, settled=settled)
        subscription.accepts_later = True
        self.consumers[subscription.identity] = subscription
        self.timing.touch()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a receiver whose link has ended. Its messages stay locked, but a session is free at once."""
        if self.consumers.pop(subscription.identity, None) is None:
            return
        self.distribution.turns.leave(subscription)
        session = self._session_of.pop(subscription.identity, None)
        if session is not None and session.holder is subscription:
            self.empty_hands(
                session, lambda stored: self.outcomes.requeue(stored, self.clock.wall())
            )
        self.timing.touch()
        self.finish()

    def empty_hands(self, session: Session, give_back: Callable[[Stored], object]) -> None:
        """Call *give_back* for the messages that the receiver of *session* has, then unlock the session."""
        holder = session.holder

        def leave(stored: Stored) -> None:
            if (
                session.in_hand.get(place_of(stored.number)) is stored
                and self.enlisted(stored) is None
            ):
                self.unlock(stored)
                give_back(stored)

        def free() -> None:
            if session.holder is holder:
                self.sessions.unlock(session)

        def hands() -> Iterator[Stored]:
            # Taken in its turn: a request that is before it may still give the receiver messages.
            yield from list(session.in_hand.values())

        self.backlog.add(hands(), leave, free)
        self.distribution.run_backlog()

    def serve(self, subscription: Subscription) -> None:
        """Deliver to a receiver that has got credit or room, and return credit that a drain asks for."""
        link: Any = subscription.link
        if subscription.acquiring is not None:
            link.detach(
                Error(
                    "amqp:not-implemented",
                    "messages are settled in transactions, not received in them",
                )
            )
            return
        self.timing.begin()
        session = None
        if self.options.sessions:
            session = self.session_of(subscription)
            if session is None:
                lost = self._session_of.get(subscription.identity)
                link.detach(Error.of(session_lock_lost(lost.id if lost else "")))
                return
            self.distribution.stirred[session.id] = None
        else:
            self.distribution.turns.update(subscription)
        self.finish()
        link.offer(len(self.shelf.ready if session is None else session.ready))
        self.distribution.give_back(link)

    # --- Delivering ---

    def finish(self) -> None:
        """Deliver what has become ready, and set the alarm; called after all changes of a call."""
        self.distribution.deliver()
        if self.freed:
            self.freed = False
            self.notify_waiting()
        self.timing.arm()

    def lock(self, stored: Stored, token: UUID, now: float, delivery: Any = None) -> None:
        """Lock a message, which is not in the ready ones."""
        place = place_of(stored.number)
        stored.delivery = delivery
        self.shelf.lock(stored, token)
        session = self.session_for(stored)
        if session is not None:
            session.in_hand[place] = stored
            stored.until = inf
        else:
            stored.until = now + self.options.lock_s
            self.timing.locks.set(place, stored.until)

    def unlock(self, stored: Stored) -> None:
        """End the lock of a message. A later outcome of its delivery is answered with *lock lost*."""
        place = place_of(stored.number)
        self.shelf.unlock(stored)
        stored.until = inf
        self.timing.locks.discard(place)
        delivery, stored.delivery = stored.delivery, None
        if delivery is not None and delivery.context is stored:
            delivery.context = LOST
        session = self.session_for(stored)
        if session is not None:
            session.in_hand.pop(place, None)

    def enlisted(self, stored: Stored) -> Enlisted | None:
        """Return the part of a transaction that decides about a message, None if there is none."""
        context = None if stored.delivery is None else stored.delivery.context
        return context if isinstance(context, Enlisted) else None

    def is_locked(self, stored: Stored, now: float) -> bool:
        """Return whether a message is locked, and not by a transaction that decides about it."""
        return (
            stored.token is not None
            and stored.until > now + EARLY_S
            and self.enlisted(stored) is None
        )

    # --- Outcomes ---

    def is_busy(self) -> bool:
        """Return whether outcomes wait for a later turn of the event loop; they keep their order."""
        return (self.memory.work <= 0 or self.backlog.pending) and not self.backlog.running

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Any) -> None:
        """Apply *outcome* to *entry*, whose delivery has ended; :meth:`concluded` follows."""
        self._late = self._failed = None
        self.memory.work -= 1 if outcome is KEEP else WORK_OF_A_CALL
        now = self.timing.begin()
        if (
            self.deleted
            or not isinstance(entry, Stored)
            or entry.token is None
            or self.shelf.tokens.get(entry.token) is not entry
            or entry.until <= now + EARLY_S
        ):
            # The lock has ended, perhaps just now; the message may be a dead letter, or locked again.
            self._late = entry
        elif outcome is not KEEP and (error := self.fault("settle")) is not None:
            # The message stays locked: only its delivery has ended.
            self._failed = error
            entry.delivery = None
        elif outcome is KEEP:
            entry.delivery = None
            session = self.session_for(entry)
            if session is not None and session.holder is None:
                # Its transaction was rolled back after its receiver had left.
                self.unlock(entry)
                self.outcomes.requeue(entry, now)
        elif type(outcome) is Accepted:
            self.outcomes.complete(entry)
        elif type(outcome) is Released:
            self.outcomes.release(entry)
        elif type(outcome) is Modified:
            changes = outcome.message_annotations or {}
            if outcome.undeliverable_here:
                self.outcomes.defer(entry, changes)
            else:
                self.outcomes.abandon(entry, changes)
        elif type(outcome) is Rejected:
            self.outcomes.reject(entry, outcome.error)

    def settle(self, delivery: Any, entry: Entry, outcome: Any) -> None:
        """Answer the outcome of *delivery*, for which its receiver waits."""
        if entry is LOST or entry is self._late:
            delivery.settle(Rejected(Error.of(message_lock_lost())))
        elif self._failed is not None:
            delivery.settle(Rejected(self._failed))
        elif type(outcome) is Rejected:
            # With an error, the SDKs take the answer for a failure.
            delivery.settle(Rejected())
        else:
            delivery.settle(None if outcome is KEEP else outcome)

    def conclude_left(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Call *finish* for each of *deliveries*, as far as this turn allows and later for the rest, then *after*.

        If the entity is deleted meanwhile, *after* is called without the rest.
        """
        after = after or _nothing
        self.backlog.add(deliveries, finish, after, dropped=after, work=0)
        self.distribution.run_backlog()

    def concluded(self) -> None:
        """Deliver the messages that a batch of outcomes has made ready."""
        self.finish()

    # --- Calls of the host ---

    def tick(self, now: float | None = None) -> None:
        """Handle the events that are due by *now*, a wall-clock time, or by the clock. Called at the alarm."""
        self.timing.tick(now)

    def resume(self) -> None:
        """Continue with work that was too much for a turn. Called soon after ``on_unfinished``."""
        self.distribution.resume()

    def expire_locks(self) -> int:
        """End all locks now, as if their time were over; return how many messages were locked."""
        now = self.timing.begin()
        locked = len(self.shelf.tokens)
        self.timing.lapse_all(now)
        self.finish()
        return locked

    def purge(self) -> int:
        """Remove all messages that are not locked; return how many there were."""
        found = [self.shelf.find(number) for number in self.shelf.numbers]
        purged = 0
        for stored in found:
            if stored is not None and stored.token is None:
                self.remove(stored)
                self.counts.dropped += 1
                purged += 1
        self.finish()
        return purged

    def delete(self) -> None:
        """Delete the entity with its sub-queues and messages. The host detaches the links."""
        for sub in self.parts[1:]:
            sub.delete()
        self.deleted = True
        self.counts.dropped += len(self.shelf)
        # Freeing a hundred thousand messages or sessions takes long, too.
        self.backlog.clear()
        self.backlog.add(self.shelf.clear(), _forget)
        self.backlog.add(self.sessions.clear(), _forget)
        self.alarm = inf
        self.timing.clear()
        self.distribution.stirred.clear()
        self.distribution.run_backlog()
        if self.memory.waiting:
            self.memory.notify_waiting()
