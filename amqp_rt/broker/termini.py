"""Termini that are kept when their links are detached without being closed (Part 3 §3.5.5, §3.5.6).

A :class:`Terminus` is the broker's end of one link, identified by the container-id and the name of
the link. While the link is away, unsettled messages stay acquired, a subscription collects
messages, and a target remembers its outcomes, so that the link can be resumed (Part 2 §2.6.13).
When the terminus expires, or the peer closes it, the default-outcome is applied to the remaining
deliveries (S3 2.3.7) and the terminus is removed.

With a store, a durable terminus is a fact in it. So is each unsettled delivery of a terminus with
durable unsettled state: written before the message leaves, and removed together with the change
that the outcome makes to the message.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any, Final, TypeAlias

from ..clock import Clock
from ..fronts.base import (
    SENDER,
    IncomingDelivery,
    Link,
    LinkCarrier,
    OutgoingDelivery,
    Payload,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import ACCEPTED, RELEASED, Accepted, Error, Modified, Outcome, Rejected, Released
from ..termini import DURABLE_UNSETTLED, Source, Target, outlives_connection
from ..transactions import DeliveryState
from ..unsettled import Unsettled, UnsettledMap
from .durable import facts
from .durable.facts import FactKind, TerminusFact
from .durable.journal import Journal
from .durable.units import Unit
from .entries import Entry, encode_outgoing
from .producers import Producer
from .queue.queue import MessageQueue
from .queue.subscriptions import ConsumerLink, Subscription
from .recorded_links import RecordedLink
from .terms import CONNECTION_CLOSE, GLOBAL, NEVER, SESSION_END, SHARED, Terms
from .transactions import Transactions

_log = logging.getLogger("amqp_rt.broker")

#: Virtual host, user, container-id, whether we send, name of the link or of a shared subscription,
#: and the type: own, shared, or shared and volatile.
Key: TypeAlias = tuple[str, str, str, bool, str, str]

_OWN: Final = ""
_SHARED: Final = "shared"
_VOLATILE: Final = "shared, volatile"

_OUTCOMES: Final = (Accepted, Rejected, Released, Modified)
_TAG_MAX: Final = 0xFFFF_FFFF


class Terminus:
    """Our end of one link.

    Args:
        termini: Registry that it belongs to.
        key: Its key there.
        terms: Terms with which its link was answered.
        number: Its number in the store, 0 if it is not stored.
    """

    def __init__(self, termini: Termini, key: Key, terms: Terms, number: int = 0) -> None:
        self.termini = termini
        self.key = key
        self.number = number
        #: Address of its node, and the queue, topic or log there.
        self.address = ""
        self.held: object = None
        #: The attached link, or None.
        self.link: Link | None = None
        #: Whether it has ended.
        self.over = False
        #: Why it ended without a link, for the peer that attaches again.
        self.error: Error | None = None
        #: When it expires, by the monotonic clock, unless a link attaches before.
        self.deadline = inf
        #: Whether its node is out of service; then it does not expire.
        self.frozen = False
        #: Functions called when it has ended.
        self.on_end: list[Callable[[], None]] = []
        #: Session or connection whose end starts the countdown.
        self._followed: LinkCarrier | None = None
        self.set_terms(terms)

    def __repr__(self) -> str:
        state = "over" if self.over else "detached" if self.link is None else "attached"
        return f"<Terminus {self.key[4]!r} of {self.key[2]!r}, {state}>"

    @property
    def sending(self) -> bool:
        """Whether we send on its links."""
        return self.key[3]

    def set_terms(self, terms: Terms) -> None:
        """Set the terms with which its link is answered."""
        self.terms = terms
        kept: Any = terms.source if self.sending else terms.target
        assert isinstance(kept, Source | Target)
        self.kept = kept

    @property
    def is_durable(self) -> bool:
        """Whether its unsettled state outlives the process."""
        return self.number > 0 and self.kept.durable == DURABLE_UNSETTLED

    @property
    def queue(self) -> MessageQueue | None:
        """Queue from which its links get their messages, if any."""
        return None

    def links(self) -> Sequence[Link | ConsumerLink]:
        """Return its attached links, as its node has them."""
        return [] if self.link is None else [self.link]

    @property
    def has_other_links(self) -> bool:
        """Whether links are attached that go on when another one attaches under its name."""
        return False

    def subscriptions(self) -> Sequence[Subscription]:
        """Return its consumers at the node; empty if its links send to the node."""
        return ()

    def deliveries(self) -> Iterable[tuple[FactKind[Any], bytes]]:
        """Return its further facts in the store: their kinds, and their keys after its own key."""
        return ()

    # --- Attaching ---

    def is_resumed_by(self, terms: Terms, address: str) -> bool:
        """Return whether a link with *terms* at *address* resumes it, and does not replace it."""
        asked: Any = terms.source if self.sending else terms.target
        return self.address == address and self.kept.durable == asked.durable

    def accept_consumer(self, link: SendingLink, terms: Terms, **options: Any) -> None:
        """Attach *link*, which receives from the node, with *terms*."""
        raise NotImplementedError

    def accept_producer(
        self, link: ReceivingLink, terms: Terms, producer: Producer, **options: Any
    ) -> None:
        """Attach *link*, which sends to the node, with *terms* and *producer* as its endpoint."""
        raise NotImplementedError

    def attached(self, link: Link) -> None:
        """Record that *link* is attached, and stop the countdown."""
        self.link = link
        self.stop_countdown()

    def stop_countdown(self) -> None:
        """Stop the countdown (§3.5.6)."""
        self.deadline = inf
        if self._followed is not None:
            self._followed.followers.pop(self, None)
            self._followed = None

    def interrupt(self) -> None:
        """End its link, which another attach takes over and its peer may never answer (§2.6.1)."""
        link = self.link
        if link is not None:
            stolen = Error("amqp:link:stolen", "the link was attached again elsewhere")
            link.detach(stolen)
            link.end(stolen, False)

    # --- Detaching ---

    def may_resume(self, link: Link, closed: bool) -> bool:
        """Return whether its *link*, which has ended, may be resumed."""
        return not closed and not self.over

    def suspended(self, link: SendingLink, memory: UnsettledMap) -> None:
        """Keep *memory*, the unsettled map of *link*, which has ended and may be resumed."""
        raise NotImplementedError

    def detach_link(self, link: Link) -> None:
        """Record that *link* has ended; start the countdown when the expiry-policy requires it."""
        self.link = None
        carrier = self._carrier(link)
        if carrier is None:
            self.start_countdown()
        else:
            self._followed = carrier
            carrier.followers[self] = self.start_countdown

    def _carrier(self, link: Link) -> LinkCarrier | None:
        """Return the session or connection whose end starts the countdown; None to start it now."""
        policy = self.kept.expiry_policy
        if policy == SESSION_END and not link.session.ended:
            return link.session
        if policy == CONNECTION_CLOSE and not link.connection.over:
            return link.connection
        return None

    def start_countdown(self) -> None:
        """Expire after the timeout, or at once if it is 0."""
        self._followed = None
        if self._expires_at_once:
            self.end()
        elif self.kept.expiry_policy != NEVER and not self.frozen:
            self.termini.expire_at(self, self.termini.clock.monotonic() + self.kept.timeout)

    @property
    def _expires_at_once(self) -> bool:
        """Whether the terminus expires as soon as the countdown starts."""
        return self.kept.timeout <= 0 and self.kept.expiry_policy != NEVER and not self.frozen

    # --- Restoring ---

    @property
    def unsettled_queue(self) -> MessageQueue | None:
        """Queue with the messages of its deliveries in the store; None if it keeps none there."""
        return None

    def restore_delivery(self, tag: bytes, sequence: int) -> bool:
        """Restore delivery *tag* of the message at *sequence*; return whether that still exists."""
        return False

    def restore_tags(self, seen: Iterable[tuple[int, bytes]]) -> bool:
        """Restore the tags of accepted deliveries, with their order; return whether it keeps such."""
        return False

    def restored(self) -> None:
        """Note that it was restored, and is not known to a peer by its unsettled deliveries yet."""

    # --- Ending ---

    def fail(self, error: Error) -> None:
        """Record that it ends because of *error*, for a peer that attaches again."""
        if self.link is None and not self.over:
            self.error = error

    def end(self) -> None:
        """End the terminus and remove it. A second call has no effect.

        A source also applies its default-outcome to the deliveries that are left.
        """
        if self.over:
            return
        self.over = True
        self.stop_countdown()
        self.termini.forget(self)
        # The functions refer to the terminus: without them no cycle keeps it until a full garbage
        # collection.
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()


class KeptSource(Terminus):
    """Source of one link.

    Args:
        subscription: Its subscription at the node, for all successive links.
        queue: The queue from which that gets its messages.
    """

    def __init__(
        self,
        termini: Termini,
        key: Key,
        terms: Terms,
        subscription: Subscription,
        queue: MessageQueue,
        number: int = 0,
    ) -> None:
        super().__init__(termini, key, terms, number)
        self.subscription = subscription
        self._queue = queue
        subscription.keeper = self
        #: Unsettled deliveries while no link is attached; None if they are no longer known.
        self.memory: UnsettledMap | None = {}
        self._tags = 0
        #: The default-outcome for deliveries left by an earlier link.
        self._agreed_before: Outcome = RELEASED
        if self.is_durable:
            subscription.recorder = self

    def is_resumed_by(self, terms: Terms, address: str) -> bool:
        """Return whether it is resumed; see :meth:`Terminus.is_resumed_by`.

        The peer may change the outcomes, but not which messages it gets or how (S3 2.3.2).
        """
        source, asked = self.terms.source, terms.source
        assert source is not None
        assert asked is not None
        return (
            super().is_resumed_by(terms, address)
            and source.filter == asked.filter
            and source.distribution_mode == asked.distribution_mode
            and self.terms.snd_settle_mode == terms.snd_settle_mode
        )

    def accept_consumer(self, link: SendingLink, terms: Terms, **options: Any) -> None:
        self.set_terms(terms)
        subscription = self.subscription
        self._agreed_before = subscription.default_outcome
        subscription.default_outcome = terms.default_outcome
        subscription.outcomes = terms.outcomes
        memory, self.memory = self.memory, {}
        if memory is not None:
            for known in memory.values():
                context = known.context if known.delivery is None else known.delivery.context
                if not isinstance(context, Entry):
                    # The delivery has ended here in the meantime.
                    known.state = context if type(context) in _OUTCOMES else RELEASED
        link.accept(
            subscription,
            source=terms.source,
            target=terms.target,
            snd_settle_mode=terms.snd_settle_mode,
            unsettled=memory,
            **options,
        )

    def may_resume(self, link: Link, closed: bool) -> bool:
        """Return False also if it would expire at once; see :meth:`Terminus.may_resume`.

        Most links are such, and collecting their state only to drop it would be wasted.
        """
        return super().may_resume(link, closed) and (
            self.is_durable or not self._expires_at_once or self._carrier(link) is not None
        )

    def suspended(self, link: SendingLink, memory: UnsettledMap) -> None:
        now = self.termini.clock.wall()
        for known in memory.values():
            if known.delivery is not None:
                # The context is sufficient, and the delivery refers to a link whose connection may
                # have ended.
                known.context = known.delivery.context
                known.delivery = None
            context = known.context
            if isinstance(context, Entry):
                if known.payload is None:
                    known.payload = _as_sent(context, now)
            elif type(context) in _OUTCOMES:
                known.state = context
        self.memory = memory
        self.detach_link(link)

    def end_link(self, link: Link, closed: bool) -> None:
        """End the terminus, since its *link* has ended for good."""
        self.end()

    def attached(self, link: Link) -> None:
        super().attached(link)
        for tag in link.remember() if self.is_durable else ():
            self._tags = max(self._tags, int.from_bytes(tag[-4:], "big"))
        if link.unknown:
            # The peer does not have these. If it remembers the link they are delivered again,
            # otherwise the default-outcome agreed for that case applies.
            outcome = RELEASED if link.resumed else self._agreed_before
            self.subscription.end_unsettled(link.unknown, outcome)

    def end(self) -> None:
        if self.over:
            return
        memory, self.memory = self.memory, {}
        super().end()
        subscription = self.subscription
        subscription.end_unsettled((memory or {}).values(), subscription.default_outcome)
        subscription.end()
        if self.link is None:
            subscription.keeper = None

    # --- Durable unsettled state (subscriptions.Subscription.recorder) ---

    def wrap_link(self, link: SendingLink) -> RecordedLink:
        """Return a link that records deliveries, for the subscription to use in place of *link*."""
        return RecordedLink(link, self)

    @property
    def queue(self) -> MessageQueue | None:
        return self._queue

    def links(self) -> Sequence[Link | ConsumerLink]:
        return [] if self.link is None else [self.subscription.link]

    def subscriptions(self) -> Sequence[Subscription]:
        return (self.subscription,)

    def deliveries(self) -> Iterable[tuple[FactKind[Any], bytes]]:
        return [(facts.DELIVERIES, facts.key_of(self.number, tag)) for tag in self.memory or ()]

    def next_tag(self) -> bytes:
        """Return a tag that no unsettled delivery has."""
        self._tags = (self._tags + 1) & _TAG_MAX
        return self._tags.to_bytes(4, "big")

    def record(self, tag: bytes, entry: Entry, then: Callable[[], None]) -> None:
        """Record in the store that *entry* leaves with *tag*, and call *then* once that is kept.

        A message that is not in the store is not recorded; *then* is called in the same order.
        """
        journal = self.termini.journal
        assert journal is not None
        unit = journal.loose
        if entry.stored:
            facts.DELIVERIES.put(unit, facts.key_of(self.number, tag), entry.sequence)
        unit.then(then, None, self._queue)

    def ended(self, delivery: OutgoingDelivery | Unsettled) -> None:
        """Remove the record of a delivery, in the unit that has its outcome."""
        journal = self.termini.journal
        if journal is not None:
            facts.DELIVERIES.remove(journal.loose, facts.key_of(self.number, delivery.tag))

    @property
    def unsettled_queue(self) -> MessageQueue | None:
        return self._queue

    def restore_delivery(self, tag: bytes, sequence: int) -> bool:
        entry = self.subscription.node.claim(self.subscription, sequence)
        if entry is None:
            return False
        assert self.memory is not None
        self.memory[tag] = Unsettled(
            tag=tag,
            payload=_as_sent(entry, self.termini.clock.wall()),
            message_format=entry.message_format,
            context=entry,
        )
        return True

    def restored(self) -> None:
        if not self.is_durable:
            # The terminus was stored, but not its unsettled deliveries.
            self.memory = None


def _as_sent(entry: Entry, now: float) -> Payload:
    """Encode a message whose delivery may be resumed.

    The ttl that it had when it left is unknown, but a peer that has the beginning of the message
    has that header too.
    """
    return encode_outgoing(entry, now) if entry.altered else entry.payload


class SharedSource(Terminus):
    """Subscription shared by several links: unsettled messages of one go to the others.

    The unsettled state of its links is not kept when they end.
    """

    def __init__(
        self,
        termini: Termini,
        key: Key,
        terms: Terms,
        queue: MessageQueue,
        number: int = 0,
    ) -> None:
        super().__init__(termini, key, terms, number)
        self._queue = queue
        #: Subscriptions of its links.
        self.members: dict[Link, Subscription] = {}

    def is_resumed_by(self, terms: Terms, address: str) -> bool:
        source, asked = self.terms.source, terms.source
        assert source is not None
        assert asked is not None
        return (
            super().is_resumed_by(terms, address)
            and source.filter == asked.filter
            and source.expiry_policy == asked.expiry_policy
        )

    def accept_consumer(self, link: SendingLink, terms: Terms, **options: Any) -> None:
        self.set_terms(terms)
        subscription = self._queue.subscribe(
            default_outcome=terms.default_outcome,
            outcomes=terms.outcomes,
            settled=terms.settled,
        )
        subscription.transactions = self.termini.transactions
        subscription.keeper = self
        self.members[link] = subscription
        self.stop_countdown()
        link.accept(
            subscription,
            source=terms.source,
            target=terms.target,
            snd_settle_mode=terms.snd_settle_mode,
            **options,
        )

    @property
    def queue(self) -> MessageQueue | None:
        return self._queue

    def links(self) -> Sequence[Link | ConsumerLink]:
        return list(self.members)

    @property
    def has_other_links(self) -> bool:
        return bool(self.members)

    def subscriptions(self) -> Sequence[Subscription]:
        return list(self.members.values())

    def attached(self, link: Link) -> None:
        """Do nothing: links of a shared subscription are not resumed."""

    def interrupt(self) -> None:
        """Do nothing: links of different names do not exclude each other."""

    def may_resume(self, link: Link, closed: bool) -> bool:
        """Return False: unsettled messages of a link are released for the others."""
        return False

    def end_link(self, link: Link, closed: bool) -> None:
        """Remove *link*, which has ended, and end or leave the terminus with the last one."""
        self.members.pop(link, None)
        if self.members or self.over:
            return
        if closed:
            self.end()
        else:
            self.detach_link(link)


class KeptTarget(Terminus):
    """Target of one link, with its outcomes for messages that may be sent again."""

    def __init__(self, termini: Termini, key: Key, terms: Terms, number: int = 0) -> None:
        super().__init__(termini, key, terms, number)
        #: Unsettled deliveries while no link is attached; None if they are no longer known.
        self.memory: UnsettledMap | None = {}
        #: Outcomes that we settled with, by tag, as long as the sender may not have received them.
        self._outcomes: dict[bytes, DeliveryState | None] = {}
        self._open: dict[bytes, IncomingDelivery] = {}
        self._slot = 0
        #: Tags in the store, by slot, and those to be deleted there.
        self._stored_tags: dict[int, bytes] = {}
        self._forgotten: dict[int, bytes] = {}
        self._unfinished = 0

    @property
    def is_lasting(self) -> bool:
        """Whether the terminus may outlive a connection, so that outcomes in flight may be lost."""
        return outlives_connection(self.kept)

    def accept_producer(
        self, link: ReceivingLink, terms: Terms, producer: Producer, **options: Any
    ) -> None:
        if terms is not self.terms:
            self.set_terms(terms)
        producer.keeper = self
        producer.note = self.note
        memory, self.memory = self.memory, {}
        self.termini.unfinished -= self._unfinished
        self._unfinished = 0
        if memory is not None:
            self._gather()
            if not link.remote_incomplete and (self._outcomes or self._stored_tags):
                self._forget_all_but(link.remote_unsettled or {})
            for tag in link.remote_unsettled or ():
                if tag in self._outcomes and tag not in memory:
                    memory[tag] = Unsettled(tag=tag, state=self._outcomes[tag])
        link.accept(
            producer,
            source=terms.source,
            target=terms.target,
            unsettled=memory,
            **options,
        )

    def _forget_all_but(self, unsettled: Mapping[bytes, Any]) -> None:
        """Forget the outcomes of deliveries that are not in *unsettled*, the sender's map.

        The sender has received them, and may use their tags for other messages (§2.6.12).
        """
        for tag in [tag for tag in self._outcomes if tag not in unsettled]:
            del self._outcomes[tag]
        for slot in [slot for slot, tag in self._stored_tags.items() if tag not in unsettled]:
            self._forgotten[slot] = self._stored_tags.pop(slot)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call *call* when new messages may arrive, after the store has deleted forgotten tags.

        Otherwise, after a restart, another message with such a tag would be taken for the old one.
        """
        forgotten, self._forgotten = self._forgotten, {}
        if not forgotten:
            call()
            return
        journal = self.termini.journal
        assert journal is not None

        def refused(error: Error) -> None:
            # Deleting them is tried again at the next attach.
            self._stored_tags = forgotten | self._stored_tags
            call()

        unit = Unit(refused)
        for slot in forgotten:
            facts.SEEN.remove(unit, facts.slot_key(self.number, slot))
        unit.then(call)
        journal.add(unit)

    def delivered(self, deliveries: list[IncomingDelivery]) -> None:
        """Remember the outcomes of *deliveries*, of some once they have one."""
        if not self.is_lasting:
            return
        self._gather()
        for delivery in deliveries:
            # If we settle second, the link itself remembers the delivery until the sender settles.
            if not delivery.settled and not delivery.second:
                self._open[delivery.tag] = delivery
        self._gather()

    def _gather(self) -> None:
        """Move deliveries that have an outcome now to the remembered ones."""
        for tag, delivery in list(self._open.items()):
            state = delivery.local_state
            if type(state) in _OUTCOMES:
                del self._open[tag]
                self._keep_outcome(tag, state)

    def _keep_outcome(self, tag: bytes, state: DeliveryState | None) -> None:
        self._outcomes.pop(tag, None)
        self._outcomes[tag] = state
        if len(self._outcomes) > self.termini.limits.target_outcomes_max:
            del self._outcomes[next(iter(self._outcomes))]

    def note(self, unit: Unit, deliveries: list[IncomingDelivery]) -> None:
        """Record in *unit*, which keeps the messages of *deliveries*, that these were accepted."""
        if not self.is_durable:
            return
        for delivery in deliveries:
            if delivery.settled:
                continue
            self._slot += 1
            slot = self._slot % self.termini.limits.target_outcomes_max
            self._stored_tags[slot] = delivery.tag
            key = facts.slot_key(self.number, slot)
            facts.SEEN.put(unit, key, (self._slot, delivery.tag))

    def deliveries(self) -> Iterable[tuple[FactKind[Any], bytes]]:
        return [(facts.SEEN, facts.slot_key(self.number, slot)) for slot in self._stored_tags]

    def restore_tags(self, seen: Iterable[tuple[int, bytes]]) -> bool:
        for order, tag in sorted(seen):
            self._slot = order
            self._stored_tags[order % self.termini.limits.target_outcomes_max] = tag
            self._keep_outcome(tag, ACCEPTED)
        return True

    def restored(self) -> None:
        if not self.is_durable:
            # The terminus was stored, but not the outcomes of its deliveries.
            self.memory = None

    def end_link(self, link: ReceivingLink, closed: bool) -> bool:
        """Keep the state of an ended *link*, or end the terminus; return whether it is kept."""
        if not self.may_resume(link, closed):
            self.end()
            return False
        memory = link.remember()
        for tag, known in list(memory.items()):
            if known.complete:
                # The complete message is in its node.
                known.payload = b""
                _forget_delivery(known)
                continue
            known.delivery = None
            size = len(known.payload) if isinstance(known.payload, bytes) else 0
            if self.termini.unfinished + size > self.termini.limits.unfinished_bytes_max:
                # There is no room: the sender has to send the message from the beginning.
                del memory[tag]
                continue
            self.termini.unfinished += size
            self._unfinished += size
        self.memory = memory
        if self._open:
            # Their outcomes wait for the disk.
            self.termini.unanswered[self] = None
        self.detach_link(link)
        return True

    def forget_answered(self) -> bool:
        """Drop deliveries that got an outcome after the link ended; return whether none is left."""
        self._gather()
        if self.link is None:
            for known in (self.memory or {}).values():
                _forget_delivery(known)
        return not self._open or self.link is not None

    def end(self) -> None:
        self.termini.unfinished -= self._unfinished
        self._unfinished = 0
        self._outcomes.clear()
        self._open.clear()
        super().end()


def _forget_delivery(known: Unsettled) -> None:
    """Keep the outcome of a complete delivery, and drop the delivery itself.

    The delivery refers to its link, whose connection may have ended. If it still waits for the
    disk it has to stay, since its outcome will be found there.
    """
    delivery = known.delivery
    if delivery is not None and type(delivery.local_state) in _OUTCOMES:
        known.state = delivery.local_state
        known.delivery = None


class Termini:
    """Termini of a broker.

    Args:
        journal: Keeps the durable ones; None if there is no store.
        clock: Its monotonic time counts them down.
        transactions: Transactions that links of shared subscriptions may use.
        limits: Bounds of their number, and of their memory.
    """

    def __init__(
        self,
        journal: Journal | None,
        clock: Clock,
        transactions: Transactions,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.journal = journal
        self.clock = clock
        self.transactions = transactions
        self.limits = limits
        #: Bytes of incomplete messages.
        self.unfinished = 0
        #: Targets without a link that have deliveries without an outcome.
        self.unanswered: dict[KeptTarget, None] = {}
        self._kept: dict[Key, Terminus] = {}
        #: Number of termini by user and container-id.
        self._of_container: dict[tuple[str, str], int] = {}
        self._timers: list[tuple[float, int, Terminus]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Terminus]:
        return iter(list(self._kept.values()))

    def has_room(self, link: Link) -> bool:
        """Return whether a terminus of *link* can be kept."""
        return (
            len(self._kept) < self.limits.termini_max
            and self._of_container.get((link.peer.user or "", link.peer.container_id), 0)
            < self.limits.termini_of_container_max
        )

    def key(self, virtual_host: str, link: Link) -> Key:
        """Return the key of the terminus of *link*."""
        peer = link.peer
        return (
            virtual_host,
            peer.user or "",
            peer.container_id,
            link.role == SENDER,
            link.name,
            _OWN,
        )

    def shared_key(self, virtual_host: str, link: Link, source: Source) -> Key:
        """Return the key of a shared subscription, whose name is that of the link up to ``|``.

        It belongs to the links of one container, or with ``global`` to those of all. A volatile
        subscription, which ends with its links, is distinct from a lasting one of the same name.
        """
        name = link.name.partition("|")[0]
        kind = _SHARED if outlives_connection(source) else _VOLATILE
        if GLOBAL in source.capabilities:
            return virtual_host, "", "", True, name, kind
        return virtual_host, link.peer.user or "", link.peer.container_id, True, name, kind

    def find(self, key: Key) -> Terminus | None:
        """Return the terminus with *key*, if there is one."""
        return self._kept.get(key)

    def restored_key(self, fact: TerminusFact, source: Source | Target) -> Key:
        """Return the key of a terminus that was restored from the store."""
        shared = isinstance(source, Source) and SHARED in source.capabilities
        return (
            fact.virtual_host,
            fact.user,
            fact.container_id,
            fact.sending,
            fact.name,
            _SHARED if shared else _OWN,
        )

    def named(self, virtual_host: str, link: Link) -> Terminus | None:
        """Return the source for a link without a source address: its own one, or a shared one."""
        own = self._kept.get(self.key(virtual_host, link))
        if own is not None:
            return own
        user, container_id = link.peer.user or "", link.peer.container_id
        name = link.name.partition("|")[0]
        owners = [(user, container_id), ("", "")]
        if GLOBAL in link.desired_capabilities:
            owners.reverse()
        for owner in owners:
            found = self._kept.get((virtual_host, *owner, True, name, _SHARED))
            if found is not None:
                return found
        return None

    def add(self, terminus: Terminus) -> None:
        """Register *terminus*."""
        self._kept[terminus.key] = terminus
        owner = terminus.key[1:3]
        self._of_container[owner] = self._of_container.get(owner, 0) + 1

    def keep(self, terminus: Terminus, node: int) -> None:
        """Write *terminus*, which has a number, to the store."""
        assert self.journal is not None
        virtual_host, user, container_id, sending, name, _ = terminus.key
        fact = facts.TerminusFact(
            node,
            virtual_host,
            user,
            container_id,
            sending,
            name,
            facts.encode_terminus(terminus.kept),
            terminus.terms.snd_settle_mode,
            terminus.terms.priority,
            terminus.terms.exclusive,
        )
        facts.TERMINI.put(self.journal.loose, facts.key_of(terminus.number), fact)

    def forget(self, terminus: Terminus) -> None:
        """Remove *terminus*, which has ended."""
        if self._kept.get(terminus.key) is terminus:
            del self._kept[terminus.key]
            owner = terminus.key[1:3]
            left = self._of_container[owner] - 1
            if left:
                self._of_container[owner] = left
            else:
                del self._of_container[owner]

    def expire_at(self, terminus: Terminus, deadline: float) -> None:
        """End *terminus* at *deadline* unless a link attaches before."""
        terminus.deadline = deadline
        heapq.heappush(self._timers, (deadline, next(self._order), terminus))
        if len(self._timers) > 2 * len(self._kept) + 16:
            # Remove timers whose countdown was stopped.
            self._timers = [each for each in self._timers if each[2].deadline == each[0]]
            heapq.heapify(self._timers)

    def forget_answered(self) -> None:
        """Drop deliveries that got an outcome after their links ended, as they keep connections."""
        for target in list(self.unanswered):
            if target.forget_answered():
                del self.unanswered[target]

    def due(self) -> Iterator[Terminus]:
        """Yield the termini that have expired, for the caller to end them."""
        now = self.clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            deadline, _, terminus = heapq.heappop(self._timers)
            if terminus.deadline == deadline and not terminus.over:
                yield terminus
