"""What is kept of links that are detached and not closed, and for how long (Part 3 §3.5.5, §3.5.6).

A :class:`Terminus` is the broker's end of one link, found again by the container-id and the name of the
link. While the link is away, what its peer has in hand stays acquired, its subscription gathers, and
what its target has accepted is known again, so that the link goes on where it stopped
(Part 2 §2.6.13). When its time has run out, or its peer has closed it, the default-outcome is applied
to what was left (S3 2.3.7) and it is gone.

Where there is a store, a durable terminus is a fact in it, and so is each delivery of one whose
unsettled state is durable: written before the message leaves, and taken back together with what
became of the message.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from math import inf
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from ..clock import Clock
from ..codec.composites import decode_composite, encode_composite
from ..errors import LocalProtocolError
from ..fronts.base import (
    SENDER,
    IncomingDelivery,
    Link,
    OutgoingDelivery,
    Payload,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import ACCEPTED, RELEASED, Accepted, Error, Modified, Rejected, Released
from ..termini import DURABLE_UNSETTLED, Source, Target, outlives_connection
from ..unsettled import Unsettled, UnsettledMap
from .entries import Entry, departing
from .journal import Journal, Unit
from .nodes import CONNECTION_CLOSE, GLOBAL, NEVER, SESSION_END, SHARED, Terms
from .queues import MessageQueue
from .subscriptions import Subscription

_log = logging.getLogger("amqp_rt.broker")

#: The kinds of fact that a terminus, a delivery that left it, and one that came to it are.
TERMINUS: Final = "terminus"
DELIVERY: Final = "terminus-delivery"
SEEN: Final = "terminus-seen"

#: Virtual host, user, container-id, whether we send, name of the link or of a shared subscription, and
#: which kind of the latter.
Key: TypeAlias = tuple[str, str, str, bool, str, str]

_OWN: Final = ""
_SHARED: Final = "shared"
_VOLATILE: Final = "shared, volatile"

_OUTCOMES: Final = (Accepted, Rejected, Released, Modified)
_TAG_MAX: Final = 0xFFFF_FFFF


class Described(Struct, array_like=True):
    """A terminus as the store keeps it. New fields go to the end."""

    #: The number of its node.
    node: int
    virtual_host: str
    user: str
    container_id: str
    sending: bool
    name: str
    #: The source or the target as it was answered, encoded.
    terminus: bytes
    snd_settle_mode: int
    priority: int = 0
    exclusive: bool = False


def key_of(number: int) -> bytes:
    """How the store calls what has *number*."""
    return number.to_bytes(4, "big")


class Terminus:
    """Our end of one link.

    Args:
        termini: Where it is found again.
        key: By what it is found.
        terms: What its link was answered.
        number: What it is called in the store, 0 if it is not there.
    """

    def __init__(self, termini: Termini, key: Key, terms: Terms, number: int = 0) -> None:
        self.termini = termini
        self.key = key
        self.number = number
        #: The address of its node, and the queue, topic or log there.
        self.address = ""
        self.held: Any = None
        #: The link that is attached, None if there is none.
        self.link: Any = None
        #: It has ended.
        self.over = False
        #: Why it has ended while nobody was there, to be told to who comes for it.
        self.error: Error | None = None
        #: When it expires, by the monotonic clock, if nobody comes for it.
        self.deadline = inf
        #: Its node is out of service: it does not expire.
        self.frozen = False
        #: Called when it has ended.
        self.on_end: list[Callable[[], None]] = []
        #: The session or connection with which the countdown begins.
        self._followed: Any = None
        self.agree(terms)

    def __repr__(self) -> str:
        state = "over" if self.over else "detached" if self.link is None else "attached"
        return f"<Terminus {self.key[4]!r} of {self.key[2]!r}, {state}>"

    @property
    def sending(self) -> bool:
        """We send on its links."""
        return self.key[3]

    def agree(self, terms: Terms) -> None:
        """This is what its link was answered."""
        self.terms = terms
        kept: Any = terms.source if self.sending else terms.target
        assert isinstance(kept, Source | Target)
        self.kept = kept

    @property
    def is_durable(self) -> bool:
        """Its unsettled state is to outlive the process."""
        return self.number > 0 and self.kept.durable == DURABLE_UNSETTLED

    @property
    def queue(self) -> MessageQueue | None:
        """Where the messages of its links come from."""
        return None

    def links(self) -> list[Any]:
        """The links of it that are attached."""
        return [] if self.link is None else [self.link]

    def facts(self) -> Iterable[tuple[str, bytes]]:
        """What the store has of it beside itself: kinds, and keys after its own."""
        return ()

    # --- Attaching ---

    def same(self, terms: Terms, address: str) -> bool:
        """Whether a link that gets *terms* at *address* goes on with it, or asks for something else."""
        asked: Any = terms.source if self.sending else terms.target
        return self.address == address and self.kept.durable == asked.durable

    def accept(self, link: Any, terms: Terms, **options: Any) -> None:
        """Attach *link*."""
        raise NotImplementedError

    def attached(self, link: Any) -> None:
        """Its link is attached: it does not expire."""
        self.link = link
        self.stay()

    def stay(self) -> None:
        """Abort the countdown (§3.5.6)."""
        self.deadline = inf
        if self._followed is not None:
            self._followed.followers.pop(self, None)
            self._followed = None

    def interrupt(self) -> None:
        """Another attach takes its link over, whose peer may never answer (§2.6.1)."""
        link = self.link
        if link is not None:
            stolen = Error("amqp:link:stolen", "the link was attached again elsewhere")
            link.detach(stolen)
            link.end(stolen, False)

    # --- Detaching ---

    def keeps(self, link: Any, closed: bool) -> bool:
        """Whether its *link*, which is over, may come back."""
        return not closed and not self.over

    def leave(self, link: Any) -> None:
        """Its *link* is gone: count down as soon as the policy says so."""
        self.link = None
        carrier = self._carrier(link)
        if carrier is None:
            self.count_down()
        else:
            self._followed = carrier
            carrier.followers[self] = self.count_down

    def _carrier(self, link: Any) -> Any:
        """The session or connection of *link* whose end begins the countdown; None if it has begun."""
        policy = self.kept.expiry_policy
        if policy == SESSION_END and not link.session.ended:
            return link.session
        if policy == CONNECTION_CLOSE and not link.connection.over:
            return link.connection
        return None

    def count_down(self) -> None:
        """Expire after the timeout, at once if there is none."""
        self._followed = None
        if self._expires_at_once:
            self.end()
        elif self.kept.expiry_policy != NEVER and not self.frozen:
            self.termini.expire_at(self, self.termini.clock.monotonic() + self.kept.timeout)

    @property
    def _expires_at_once(self) -> bool:
        """Whether the countdown ends as soon as it begins."""
        return self.kept.timeout <= 0 and self.kept.expiry_policy != NEVER and not self.frozen

    # --- Ending ---

    def fail(self, error: Error) -> None:
        """It has ended because of *error*, which who comes for it is to hear."""
        if self.link is None and not self.over:
            self.error = error

    def end(self) -> None:
        """It is gone, and what it held gets the default-outcome."""
        if self.over:
            return
        self.over = True
        self.stay()
        self.termini.forget(self)
        # They refer to it: what is over must not wait for a full collection.
        called, self.on_end = self.on_end, []
        for on_end in called:
            on_end()


class KeptSource(Terminus):
    """The source of one link.

    Args:
        subscription: Draws from the node, over all links that come for this terminus.
    """

    def __init__(
        self, termini: Termini, key: Key, terms: Terms, subscription: Subscription, number: int = 0
    ) -> None:
        super().__init__(termini, key, terms, number)
        self.subscription = subscription
        subscription.keeper = self
        #: What is unsettled while no link is there; None if that is not known any more.
        self.memory: UnsettledMap | None = {}
        self._tags = 0
        #: The default-outcome for what an earlier link has left.
        self._agreed_before: Any = None
        if self.is_durable:
            subscription.recorder = self

    def same(self, terms: Terms, address: str) -> bool:
        """The peer may change what becomes of messages, not which they are (S3 2.3.2)."""
        source, asked = self.terms.source, terms.source
        assert source is not None
        assert asked is not None
        return (
            super().same(terms, address)
            and source.filter == asked.filter
            and source.distribution_mode == asked.distribution_mode
            and self.terms.snd_settle_mode == terms.snd_settle_mode
        )

    def accept(self, link: SendingLink, terms: Terms, **options: Any) -> None:
        self.agree(terms)
        subscription = self.subscription
        self._agreed_before = subscription.default_outcome
        subscription.default_outcome = terms.default_outcome
        subscription.outcomes = terms.outcomes
        memory, self.memory = self.memory, {}
        if memory is not None:
            for known in memory.values():
                context = known.context if known.delivery is None else known.delivery.context
                if not isinstance(context, Entry):
                    # It has ended here meanwhile.
                    known.state = context if type(context) in _OUTCOMES else RELEASED
        link.accept(
            subscription,
            source=terms.source,
            target=terms.target,
            snd_settle_mode=terms.snd_settle_mode,
            unsettled=memory,
            **options,
        )

    def keeps(self, link: SendingLink, closed: bool) -> bool:
        """See :meth:`Terminus.keeps`; false too if it would expire at once.

        Most links are of this kind. Their state would be gathered only to be dropped.
        """
        return super().keeps(link, closed) and (
            self.is_durable or not self._expires_at_once or self._carrier(link) is not None
        )

    def suspended(self, link: SendingLink, memory: UnsettledMap) -> None:
        """Its *link* is over, and left *memory*."""
        now = self.termini.clock.wall()
        for known in memory.values():
            if known.delivery is not None:
                # Its context says all of it, and it refers to a link whose connection may be gone.
                known.context = known.delivery.context
                known.delivery = None
            context = known.context
            if isinstance(context, Entry):
                if known.payload is None:
                    known.payload = _as_sent(context, now)
            elif type(context) in _OUTCOMES:
                known.state = context
        self.memory = memory
        self.leave(link)

    def left(self, link: SendingLink, closed: bool) -> None:
        """Its *link* is over for good."""
        self.end()

    def attached(self, link: Any) -> None:
        super().attached(link)
        for tag in link.remember() if self.is_durable else ():
            self._tags = max(self._tags, int.from_bytes(tag[-4:], "big"))
        if link.unknown:
            # Nobody has these in hand. Where the peer knows the link at all, they come again; where it
            # has forgotten that, what was agreed for that case becomes of them.
            outcome = RELEASED if link.resumed else self._agreed_before
            self.subscription.give_up(link.unknown, outcome)

    def end(self) -> None:
        if self.over:
            return
        memory, self.memory = self.memory, {}
        super().end()
        subscription = self.subscription
        subscription.give_up((memory or {}).values(), subscription.default_outcome)
        subscription.end()
        if self.link is None:
            subscription.keeper = None

    # --- Unsettled state that outlives the process (subscriptions.Subscription.recorder) ---

    def over_link(self, link: SendingLink) -> RecordedLink:
        """What the subscription is to send on in place of *link*."""
        return RecordedLink(link, self)

    @property
    def queue(self) -> MessageQueue | None:
        node = self.subscription.node
        return node if isinstance(node, MessageQueue) else None

    def facts(self) -> Iterable[tuple[str, bytes]]:
        return [(DELIVERY, tag) for tag in self.memory or ()]

    def next_tag(self) -> bytes:
        """A tag that no unsettled delivery has."""
        self._tags = (self._tags + 1) & _TAG_MAX
        return self._tags.to_bytes(4, "big")

    def record(self, tag: bytes, entry: Entry, then: Callable[[], None]) -> None:
        """Note that *entry* is going to leave as *tag*, and call *then* once that is kept."""
        journal = self.termini.journal
        assert journal is not None
        unit = journal.loose
        if entry.stored:
            unit.keep(DELIVERY, key_of(self.number) + tag, entry.sequence.to_bytes(8, "big"))
        unit.then(then, None, self.subscription.node)

    def ended(self, delivery: Any) -> None:
        """A delivery has had its outcome, which is written together with this."""
        journal = self.termini.journal
        if journal is not None:
            journal.loose.forget(DELIVERY, key_of(self.number) + delivery.tag)

    def recall(self, tag: bytes, sequence: int) -> bool:
        """It had the message at *sequence* before the process was started again; whether it is
        still there."""
        queue = self.subscription.node
        assert isinstance(queue, MessageQueue)
        entry = queue.claim(self.subscription, sequence)
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


def _as_sent(entry: Entry, now: float) -> Payload:
    """The message of a delivery that is resumed. What its time to live was when it left is not known
    any more; whoever has the beginning of it has its header too."""
    return departing(entry, now) if entry.altered else entry.payload


class RecordedLink:
    """A sending link on which a message leaves when the store knows that it does.

    So what was delivered is known after a restart, and nobody else gets it meanwhile.
    """

    def __init__(self, link: SendingLink, source: KeptSource) -> None:
        self.raw = link
        self._source = source
        #: Messages that wait until they are noted.
        self._staged = 0

    @property
    def credit(self) -> int:
        return self.raw.credit - self._staged

    @property
    def writable(self) -> bool:
        return self.raw.writable

    @property
    def draining(self) -> bool:
        return self.raw.draining and not self._staged

    @property
    def attached(self) -> bool:
        return self.raw.attached

    @property
    def connection(self) -> Any:
        return self.raw.connection

    def offer(self, available: int) -> None:
        self.raw.offer(available)

    def drained(self) -> None:
        self.raw.drained()

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        self.raw.detach(error, closed=closed)

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        message_format: int = 0,
        state: Any = None,
    ) -> OutgoingDelivery | None:
        """Send it when that is noted; what is settled, or sent within a transaction, at once."""
        source = self._source
        tag = source.next_tag()
        if settled or not isinstance(context, Entry):
            return self.raw.send(
                payload,
                context,
                settled=settled,
                tag=tag,
                message_format=message_format,
                state=state,
            )
        size = len(payload) if isinstance(payload, bytes) else sum(len(each) for each in payload)
        if 0 < self.raw.max_message_size < size:
            raise LocalProtocolError("the message is larger than the peer takes")
        self._staged += 1
        source.record(tag, context, partial(self._leave, tag, payload, context, message_format))
        return None

    def _leave(self, tag: bytes, payload: Payload, entry: Entry, message_format: int) -> None:
        self._staged -= 1
        raw = self.raw
        subscription = self._source.subscription
        node = subscription.node
        if raw.attached and raw.credit > 0 and not self._source.over:
            sent = raw.send(payload, entry, settled=False, tag=tag, message_format=message_format)
            if isinstance(node, MessageQueue):
                node.left(subscription, sent)
        else:
            self._source.ended(Unsettled(tag=tag))
            node.conclude(subscription, entry, RELEASED)
            node.concluded()
        if not self._staged and raw.draining and raw.attached:
            node.serve(subscription)


class SharedSource(Terminus):
    """A subscription that several links have together: what one does not settle, another gets.

    What its links have in hand is not kept for them when they go.
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
        #: The subscriptions of its links.
        self.members: dict[Any, Subscription] = {}

    def same(self, terms: Terms, address: str) -> bool:
        source, asked = self.terms.source, terms.source
        assert source is not None
        assert asked is not None
        return (
            super().same(terms, address)
            and source.filter == asked.filter
            and source.expiry_policy == asked.expiry_policy
        )

    def accept(self, link: SendingLink, terms: Terms, **options: Any) -> None:
        self.agree(terms)
        subscription = self._queue.subscribe(
            default_outcome=terms.default_outcome,
            outcomes=terms.outcomes,
            settled=terms.settled,
        )
        subscription.transactions = self.termini.transactions
        subscription.keeper = self
        self.members[link] = subscription
        self.stay()
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

    def links(self) -> list[Any]:
        return list(self.members)

    def attached(self, link: Any) -> None:
        """Nothing is resumed."""

    def interrupt(self) -> None:
        """Links of other names are not in each other's way."""

    def keeps(self, link: Any, closed: bool) -> bool:
        """What a link has in hand when it goes is for the others."""
        return False

    def left(self, link: Any, closed: bool) -> None:
        """One of its links is over."""
        self.members.pop(link, None)
        if self.members or self.over:
            return
        if closed:
            self.end()
        else:
            self.leave(link)


class KeptTarget(Terminus):
    """The target of one link: what it has said of messages that may come again."""

    def __init__(self, termini: Termini, key: Key, terms: Terms, number: int = 0) -> None:
        super().__init__(termini, key, terms, number)
        #: What is unsettled while no link is there; None if that is not known any more.
        self.memory: UnsettledMap | None = {}
        #: By tag what was said last, and settled with that, while its sender may not have heard it.
        self._said: dict[bytes, Any] = {}
        self._open: dict[bytes, IncomingDelivery] = {}
        self._slot = 0
        #: The tags that the store has, by slot, and those that it is to forget.
        self._noted: dict[int, bytes] = {}
        self._forgotten: dict[int, bytes] = {}
        self._unfinished = 0

    @property
    def lasts(self) -> bool:
        """It may outlive a connection, and so what is said on it may get lost."""
        return outlives_connection(self.kept)

    def accept(self, link: ReceivingLink, terms: Terms, **options: Any) -> None:
        self.agree(terms)
        memory, self.memory = self.memory, {}
        self.termini.unfinished -= self._unfinished
        self._unfinished = 0
        if memory is not None:
            self._gather()
            if not link.remote_incomplete:
                self._forget_all_but(link.remote_unsettled or {})
            for tag in link.remote_unsettled or ():
                if tag in self._said and tag not in memory:
                    memory[tag] = Unsettled(tag=tag, state=self._said[tag])
        link.accept(
            options.pop("endpoint"),
            source=terms.source,
            target=terms.target,
            unsettled=memory,
            **options,
        )

    def _forget_all_but(self, unsettled: Mapping[bytes, Any]) -> None:
        """The sender says what it has not settled. Everything else it has heard of, and its tags may
        come again for other messages (§2.6.12)."""
        for tag in [tag for tag in self._said if tag not in unsettled]:
            del self._said[tag]
        for slot in [slot for slot, tag in self._noted.items() if tag not in unsettled]:
            self._forgotten[slot] = self._noted.pop(slot)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call *call* when new messages may come: what was forgotten is forgotten on the disk too, or
        else another message with such a tag would be taken for the old one after a restart."""
        forgotten, self._forgotten = self._forgotten, {}
        if not forgotten:
            call()
            return
        journal = self.termini.journal
        assert journal is not None

        def refused(error: Error) -> None:
            # The next attach tries again.
            self._noted = forgotten | self._noted
            call()

        unit = Unit(refused)
        for slot in forgotten:
            unit.forget(SEEN, key_of(self.number) + slot.to_bytes(4, "big"))
        unit.then(call)
        journal.add(unit)

    def delivered(self, deliveries: list[IncomingDelivery]) -> None:
        """These have come, and some have been answered."""
        if not self.lasts:
            return
        self._gather()
        for delivery in deliveries:
            # Where we settle second, the link itself remembers until the sender has settled.
            if not delivery.settled and not delivery.second:
                self._open[delivery.tag] = delivery
        self._gather()

    def _gather(self) -> None:
        """Remember what was said of those that have been answered."""
        for tag, delivery in list(self._open.items()):
            state = delivery.local_state
            if type(state) in _OUTCOMES:
                del self._open[tag]
                self._say(tag, state)

    def _say(self, tag: bytes, state: Any) -> None:
        self._said.pop(tag, None)
        self._said[tag] = state
        if len(self._said) > self.termini.limits.target_outcomes_max:
            del self._said[next(iter(self._said))]

    def note(self, unit: Unit, deliveries: list[IncomingDelivery]) -> None:
        """Let *unit*, which keeps the messages of *deliveries*, keep that they have been accepted."""
        if not self.is_durable:
            return
        for delivery in deliveries:
            if delivery.settled:
                continue
            self._slot += 1
            slot = self._slot % self.termini.limits.target_outcomes_max
            self._noted[slot] = delivery.tag
            unit.keep(
                SEEN,
                key_of(self.number) + slot.to_bytes(4, "big"),
                self._slot.to_bytes(8, "big") + delivery.tag,
            )

    def facts(self) -> Iterable[tuple[str, bytes]]:
        return [(SEEN, slot.to_bytes(4, "big")) for slot in self._noted]

    def recall(self, seen: Iterable[bytes]) -> None:
        """These it had accepted before the process was started again."""
        for value in sorted(seen):
            self._slot = int.from_bytes(value[:8], "big")
            self._noted[self._slot % self.termini.limits.target_outcomes_max] = value[8:]
            self._say(value[8:], ACCEPTED)

    def left(self, link: ReceivingLink, closed: bool) -> bool:
        """Its *link* is over; whether it is kept."""
        if not self.keeps(link, closed):
            self.end()
            return False
        memory = link.remember()
        for tag, known in list(memory.items()):
            if known.complete:
                # It lies in its node.
                known.payload = b""
                _forget_delivery(known)
                continue
            known.delivery = None
            size = len(known.payload) if isinstance(known.payload, bytes) else 0
            if self.termini.unfinished + size > self.termini.limits.unfinished_bytes_max:
                # Its sender begins again.
                del memory[tag]
                continue
            self.termini.unfinished += size
            self._unfinished += size
        self.memory = memory
        if self._open:
            # They wait for the disk.
            self.termini.unanswered[self] = None
        self.leave(link)
        return True

    def forget_answered(self) -> bool:
        """Forget deliveries that were answered since their link ended; whether none is left."""
        self._gather()
        if self.link is None:
            for known in (self.memory or {}).values():
                _forget_delivery(known)
        return not self._open or self.link is not None

    def end(self) -> None:
        self.termini.unfinished -= self._unfinished
        self._unfinished = 0
        self._said.clear()
        self._open.clear()
        super().end()


def _forget_delivery(known: Unsettled) -> None:
    """Keep what was said of a delivery that came whole, and not the delivery.

    It refers to its link, whose connection may be gone. One that waits for the disk is needed: its
    outcome is found there.
    """
    delivery = known.delivery
    if delivery is not None and type(delivery.local_state) in _OUTCOMES:
        known.state = delivery.local_state
        known.delivery = None


class Termini:
    """The termini of a broker.

    Args:
        journal: Keeps the durable ones; None if nothing is.
        clock: The monotonic one counts them down.
        transactions: Those that links of shared subscriptions may use.
        limits: How many there may be, and for how long.
    """

    def __init__(
        self,
        journal: Journal | None,
        clock: Clock,
        transactions: Any,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.journal = journal
        self.clock = clock
        self.transactions = transactions
        self.limits = limits
        #: Bytes of unfinished messages.
        self.unfinished = 0
        #: Targets without a link that have deliveries without an answer.
        self.unanswered: dict[KeptTarget, None] = {}
        self._kept: dict[Key, Terminus] = {}
        #: How many each container of a user has: by user and container-id.
        self._of_container: Counter[tuple[str, str]] = Counter()
        self._timers: list[tuple[float, int, Terminus]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Terminus]:
        return iter(list(self._kept.values()))

    def has_room(self, link: Link) -> bool:
        """Whether *link* may have a terminus that is kept."""
        return (
            len(self._kept) < self.limits.termini_max
            and self._of_container[link.peer.user or "", link.peer.container_id]
            < self.limits.termini_of_container_max
        )

    def key(self, virtual_host: str, link: Link) -> Key:
        """By what the terminus of *link* is found."""
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
        """By what a shared subscription is found: its name is that of the link up to ``|``.

        It belongs to all links of a container, or with ``global`` to those of all. One that ends with
        its links is another one than one of the same name that does not.
        """
        name = link.name.partition("|")[0]
        kind = _SHARED if outlives_connection(source) else _VOLATILE
        if GLOBAL in source.capabilities:
            return virtual_host, "", "", True, name, kind
        return virtual_host, link.peer.user or "", link.peer.container_id, True, name, kind

    def find(self, key: Key) -> Terminus | None:
        """The terminus that *key* finds."""
        return self._kept.get(key)

    def restored_key(self, described: Described, source: Source | Target) -> Key:
        """By what a terminus is found that the store has kept."""
        shared = isinstance(source, Source) and SHARED in source.capabilities
        return (
            described.virtual_host,
            described.user,
            described.container_id,
            described.sending,
            described.name,
            _SHARED if shared else _OWN,
        )

    def named(self, virtual_host: str, link: Link) -> Terminus | None:
        """The source that a link means which names none: one of its own, or a shared one."""
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
        """Find *terminus* from now on."""
        self._kept[terminus.key] = terminus
        self._of_container[terminus.key[1:3]] += 1

    def keep(self, terminus: Terminus, node: int) -> None:
        """Write *terminus*, which has a number, into the store."""
        assert self.journal is not None
        virtual_host, user, container_id, sending, name, _ = terminus.key
        described = Described(
            node,
            virtual_host,
            user,
            container_id,
            sending,
            name,
            encode_composite(terminus.kept),
            terminus.terms.snd_settle_mode,
            terminus.terms.priority,
            terminus.terms.exclusive,
        )
        self.journal.loose.keep(
            TERMINUS, key_of(terminus.number), msgspec.msgpack.encode(described)
        )

    def forget(self, terminus: Terminus) -> None:
        """*terminus* has ended."""
        if self._kept.get(terminus.key) is terminus:
            del self._kept[terminus.key]
            owner = terminus.key[1:3]
            self._of_container[owner] -= 1
            if not self._of_container[owner]:
                del self._of_container[owner]

    def expire_at(self, terminus: Terminus, deadline: float) -> None:
        """End *terminus* at *deadline* unless somebody comes for it before."""
        terminus.deadline = deadline
        heapq.heappush(self._timers, (deadline, next(self._order), terminus))
        if len(self._timers) > 2 * len(self._kept) + 16:
            # Those whose countdown was aborted.
            self._timers = [each for each in self._timers if each[2].deadline == each[0]]
            heapq.heapify(self._timers)

    def forget_answered(self) -> None:
        """Forget deliveries that were answered since their links ended: they refer to connections."""
        for target in list(self.unanswered):
            if target.forget_answered():
                del self.unanswered[target]

    def due(self) -> Iterator[Terminus]:
        """What has expired, and is to be ended."""
        now = self.clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            deadline, _, terminus = heapq.heappop(self._timers)
            if terminus.deadline == deadline and not terminus.over:
                yield terminus


def decode_kept(described: Described) -> Source | Target:
    """The source or target of what the store has kept.

    Raises:
        DecodeError: It is none.
    """
    if described.sending:
        return decode_composite(described.terminus, Source)
    return decode_composite(described.terminus, Target)


def read_described(value: bytes) -> Described:
    """What :meth:`Termini.keep` has written.

    Raises:
        msgspec.DecodeError: It is something else.
    """
    return msgspec.msgpack.decode(value, type=Described)
