"""Nodes of a broker, and the links that attach to them.

A :class:`BrokerHost` is one of the places where a container looks for an address
(:class:`~amqp_rt.fronts.base.Host`). It knows links, credit, deliveries and outcomes, but no wire
protocol, so that links of every front can attach to its nodes.
"""

from __future__ import annotations

import heapq
import logging
import sys
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final, Protocol, cast

import msgspec
import trio
from msgspec import Struct

from ..addresses import EXCHANGES
from ..batches import RECORD_BATCHES
from ..clock import Clock
from ..errors import AmqpError, DecodeError, LinkRefused, LocalProtocolError
from ..events import Peer
from ..fronts.base import (
    SENDER,
    IncomingDelivery,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..loglimit import LogLimiter, log_loss, log_refusal
from ..message import MESSAGE_FORMAT, AnnotationPolicy
from ..outcomes import Error, Rejected
from ..security.access import reserved
from ..stores.base import SEQUENCE_MAX
from ..termini import (
    SHARED_SUBS,
    Coordinator,
    DeleteOnClose,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
    Source,
    Target,
)
from ..values import Int, Symbol
from .claims import check_claims
from .clocks import RunClock
from .durable import facts
from .durable.duplicates import Duplicates
from .durable.facts import Claim, FactKind, Identity, TerminusFact
from .durable.journal import Journal, QueueLedger, Unit
from .durable.pager import STEP, Pager
from .entries import Door, Entry, Moves, dead_letter, departing, moves_after
from .expiry import AUTOMATIC
from .filtering.selectors import InvalidFilter
from .filtering.views import MessageView
from .leases import Leases, LeaseState
from .lifecycles import JOURNAL, Journals, LifeCycles
from .log.log import Entrance, MessageLog, Reading
from .nodes import (
    EXCLUSIVE,
    LOG,
    NAME_MAX,
    PRIORITIES,
    QUEUE,
    SHARED,
    Addressed,
    Declaration,
    Lifetime,
    Log,
    Means,
    Queue,
    Terms,
    Topic,
    answer,
    dynamic_declaration,
    split_partition,
    terms_again,
)
from .producers import Check, Inlet, Intake, Ledger, Place, Producer
from .queue.accounts import WORK_OF_A_LETTER, WORK_OF_A_TURN, Memory
from .queue.keyed import marker
from .queue.observed import ObservedQueue
from .queue.queue import MessageQueue
from .queue.subscriptions import Subscription
from .staging import Part, Staging, claim_of
from .termini import (
    KeptSource,
    KeptTarget,
    Key,
    SharedSource,
    Termini,
    Terminus,
)
from .topics import MessageTopic, TopicLedger
from .transactions import Transactions

_log = logging.getLogger("amqp_rt.broker")


class NodeStats(Struct, frozen=True, kw_only=True):
    """Statistics of a node; of a topic, all but ``enqueued`` are summed over its subscribers."""

    name: str
    kind: str
    dynamic: bool
    #: Messages that wait, and those delivered and not settled; ``bytes`` has the payloads of both.
    available: int
    acquired: int
    #: Messages not due yet; ``bytes`` includes them.
    delayed: int
    bytes: int
    consumers: int
    producers: int
    #: Counts since the node was created, or restored when the broker started.
    enqueued: int
    delivered: int
    accepted: int
    requeued: int
    dead_lettered: int
    expired: int
    dropped: int
    #: Why the node is out of service until the broker is restarted; None if it is in service.
    failure: str | None = None


class SubscriptionStats(Struct, frozen=True, kw_only=True):
    """Statistics of a topic's subscription."""

    #: Container-id of the subscriber, and the name of its link; of a shared subscription, the
    #: common part of the names of its links.
    container: str
    name: str
    #: Whether the subscription remains when its links are detached.
    kept: bool
    #: Messages that wait, and those delivered and not settled; ``bytes`` has the payloads of both.
    available: int
    acquired: int
    #: Messages not due yet; ``bytes`` includes them.
    delayed: int
    bytes: int
    #: Number of attached links.
    consumers: int


class PartitionStats(Struct, frozen=True, kw_only=True):
    """Statistics of a partition of a log."""

    partition: int
    #: Offset of the first record, and the offset that the next record gets.
    first: int
    next: int
    bytes: int
    #: Time of the last append in milliseconds since 1970; None if there was none.
    last_enqueued_ms: int | None


class EraStats(Struct, frozen=True, kw_only=True):
    """A start of the broker, with the offset of each partition's next record at that time."""

    id: str
    starts: list[int]


class LogStats(Struct, frozen=True, kw_only=True):
    """Statistics of a log."""

    name: str
    #: Id of this log. A later log of the same name has another one: its offsets mean other records.
    incarnation: str
    partitions: list[PartitionStats]
    #: Groups with a cursor.
    groups: list[str]
    #: Known starts of the broker after which records were appended, with their first offsets; none
    #: without a store. After a restore from a backup two records may have had the same offset, in
    #: different eras.
    eras: list[EraStats] = []


class _Node:
    """Node: its declaration, its queue, topic or log, and the state of its links."""

    def __init__(
        self,
        declared: Declaration,
        held: MessageQueue | MessageTopic | MessageLog,
        intake: Intake,
        inlet: Inlet,
        owner: Any,
        ledger: Ledger | None,
        number: int,
        virtual_host: str,
        partition: int | None = None,
    ) -> None:
        self.declared = declared
        self.held = held
        self.intake = intake
        self.inlet = inlet
        #: Connection for which a dynamic node was created.
        self.owner = owner
        self.ledger = ledger
        #: Number in the store, 0 if the node is not stored.
        self.number = number
        #: Lifetime of a dynamic node, and whether the link for which it was created has ended.
        self.lifetime: Lifetime | None = None
        self.abandoned = False
        #: The partition of a log that this node stands for, None for all.
        self.partition = partition
        #: The only connection that may receive from the node; None for any.
        self.reserved: Any = None
        #: Called with the link of each consumer that has left.
        self.on_left: Callable[[Any], None] | None = None
        #: Whether the node was restored, or created for dead letters or on its first use, and has
        #: not been declared since.
        self.found = False
        #: Whether the node was created for dead letters or on its first use, and has not been
        #: declared since, or only by a declaration that does not outlive the process. Stored.
        self.implicit = False
        self.virtual_host = virtual_host
        #: Termini of links that may be resumed, attached or not.
        self.termini: dict[Terminus, None] = {}
        #: Why the node is out of service until the broker is restarted.
        self.failure: AmqpError | None = None

    @property
    def is_sealed(self) -> bool:
        """Whether only the broker itself may append to the node."""
        return isinstance(self.held, MessageLog) and self.held.sealed

    def links(self) -> list[Any]:
        """Return the attached links."""
        held = self.held
        consumers: list[Any] = (
            [*held.consumers.values(), *held.browsers.values()]
            if isinstance(held, MessageQueue)
            else [*held.consumers]
        )
        found = [
            consumer.link
            for consumer in consumers
            if consumer.link is not None and consumer.link.attached
        ]
        return [*found, *(producer.link for producer in self.intake.producers)]


#: Cost of one call of ``resume``, in deliveries concluded in the same time.
_WORK_OF_A_CALL: Final = 10

_WHOLE_LOG: Final = Error(
    "amqp:not-implemented", "epochs are published to a log, not to one of its partitions"
)
_SEALED: Final = Error("amqp:not-allowed", "only the broker itself writes to this log")


def _alike(one: Declaration, other: Declaration) -> bool:
    """Return whether a node declared as *one* can be redeclared as *other*."""
    if isinstance(one, Queue) and isinstance(other, Queue):
        # Messages are in the queue in this order already.
        return (
            one.priorities == other.priorities
            and one.sort_key == other.sort_key
            and one.last_value_key == other.last_value_key
            and one.groups == other.groups
        )
    if isinstance(one, Log) and isinstance(other, Log):
        # Records are in these partitions already.
        return one.partitions == other.partitions
    return type(one) is type(other)


def _way_in(
    held: MessageQueue | MessageTopic | MessageLog,
    ledger: Ledger | None,
    partition: int | None = None,
) -> tuple[Place, Ledger | None]:
    """Return the place for messages to *held* and its ledger; those of a log are for one link."""
    if isinstance(held, MessageLog):
        entrance = Entrance(held, partition)
        return entrance, None if held.reading is None else entrance
    return held, ledger


def _locked(node: _Node, terms: Terms) -> bool:
    """Return whether a consumer with *terms* is excluded, because one of two is exclusive."""
    return isinstance(node.held, MessageQueue) and node.held.locked(terms.exclusive)


def _check_incarnation(address: str, log: MessageLog, incarnation: str | None) -> None:
    if incarnation is not None and incarnation != log.incarnation:
        raise AmqpError(
            f"{address!r} is another log now, {log.incarnation}",
            condition="amqp:precondition-failed",
        )


def _check_note(name: str) -> None:
    if not 0 < len(name) <= NAME_MAX:
        raise AmqpError(f"a name has 1 to {NAME_MAX} characters", condition="amqp:not-allowed")


def _offsets(address: str, log: MessageLog, offsets: Mapping[int, int]) -> dict[int, int]:
    """Return *offsets* with plain integers.

    Raises:
        AmqpError: A partition does not exist, or an offset is out of range.
    """
    for partition, offset in offsets.items():
        if not 0 <= partition < len(log.partitions) or not 0 <= offset <= SEQUENCE_MAX:
            raise AmqpError(
                f"{address!r} has no offset {offset} in a partition {partition}",
                condition="amqp:invalid-field",
            )
    return {int(partition): int(offset) for partition, offset in offsets.items()}


class Resumable(Protocol):
    """Object with more work than one turn of the event loop allows."""

    def resume(self) -> None:
        """Do the work of one turn."""


class _Steps:
    """Work of many steps, of which each turn does some.

    Args:
        host: Schedules the turns.
        steps: Iterator that does one step for each element.
        work: Cost of a step, in deliveries concluded in the same time.
    """

    def __init__(self, host: BrokerHost, steps: Iterator[None], work: int) -> None:
        self._host = host
        self._steps = steps
        self._work = work
        #: Whether all steps are done.
        self.over = False

    def resume(self) -> None:
        """Do as many steps as this turn allows."""
        memory = self._host.memory
        for _ in self._steps:
            memory.work -= self._work
            if memory.work <= 0:
                self._host.go_on_later(self)
                return
        self.over = True


class Ways(Protocol):
    """Addresses that lead to several nodes at once, such as those of exchanges."""

    def inlet(
        self, virtual_host: str, address: str, link: ReceivingLink
    ) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address*.

        None if it is not such an address; an error if nothing there takes messages.
        """

    def own_name(self, address: str) -> str:
        """Return the name under which rights at *address* are granted.

        *address* itself if it is not such an address.
        """

    def letter(self, virtual_host: str, address: str, entry: Entry) -> Sequence[str] | None:
        """Return the nodes for a dead letter to *address*; None if it is not such an address.

        Raises:
            AmqpError: Nothing exists at *address*, or the message is malformed.
        """

    def takes_no_letters(self, virtual_host: str, address: str) -> bool:
        """Return whether *address* exists and can never lead a dead letter to a node."""

    async def restore(self, journal: Journal) -> None:
        """Restore stored declarations, after all nodes were restored."""

    def sweep(self) -> None:
        """Delete queues that were unused for too long; called periodically."""


class BrokerHost:
    """Queues, topics and logs.

    Args:
        limits: Bounds; those of messages and nodes are read here.
        clock: Clock of times to live, locks and schedules; by default the system's, or that of the
            event loop if it is virtual.
        auto_create: Called with an address that has no node; returns the declaration of the node
            to create for it, or None.
        annotations: Policy for unknown annotation keys (Part 3 §3.2.10).
        journal: Stores nodes and durable messages; None to keep everything in memory.
        volatile: Whether durable messages are accepted without a journal; otherwise they are
            refused, as Part 3 §3.2.1 demands.
        virtual_hosts: Virtual hosts that exist besides those with nodes; see :meth:`virtual_host`.
        life_cycles: Events of messages to record in ``$journal``; None to record none.
    """

    #: Several links can share a subscription.
    capabilities = (SHARED_SUBS,)

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        clock: Clock | None = None,
        auto_create: Callable[[str], Declaration | None] | None = None,
        annotations: AnnotationPolicy = "default",
        journal: Journal | None = None,
        volatile: bool = False,
        virtual_hosts: Collection[str] | None = None,
        life_cycles: LifeCycles | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock or RunClock()
        self.memory = Memory(limits.broker_bytes_max)
        self._auto_create = auto_create
        self.door = Door(annotations, limits)
        self.journal = journal
        #: Id of the era of all logs that begins with this start of the broker.
        self._era = uuid.uuid4().hex[:16]
        if journal is not None:
            journal.on_given_up = self._detach_consumers
            journal.on_fault = self.fail
            journal.on_end = self._finish
        self.volatile = volatile
        self.transactions = Transactions(journal, self.clock.monotonic, limits, self.do_in_turns)
        self.termini = Termini(journal, self.clock, self.transactions, limits)
        self.staging = Staging(
            self.memory, journal, self.clock, limits, self._new_number, self.fail
        )
        self.leases = Leases(journal, self.clock, limits, self._new_number, self.fail)
        #: Dynamic nodes, with their virtual host's nodes, that are deleted once they are empty or
        #: without links, as their lifetimes require.
        self._leaving: dict[_Node, dict[str, _Node]] = {}
        #: Returns whether a peer may send to an address; None if all may. Called only for messages
        #: that the broker returns to the ``reply-to`` of a peer.
        self.may_send: Callable[[Peer, str], bool] | None = None
        #: Addresses that lead to several nodes at once; None if there are none.
        self.ways: Ways | None = None
        #: Called with virtual host and name after a node is deleted, so that dependants such as
        #: bindings can be removed.
        self.on_deleted: Callable[[str, str], None] | None = None
        #: Duplicate-detection windows of the queues that have one.
        self._windows: dict[Duplicates, None] = {}
        #: Virtual host → address → node. "" is the default one.
        self._spaces: dict[str, dict[str, _Node]] = {"": {}}
        for name in virtual_hosts or ():
            self._spaces[name] = {}
        #: Records events of messages in ``$journal``; None to record none.
        self.journals: Journals | None = None
        if life_cycles is not None:
            self.journals = Journals(life_cycles, self.clock, limits, self._journal_fault)
        #: Whether a hostname without a virtual host means the default one.
        self._defaulting = virtual_hosts is None or "" in virtual_hosts
        #: Virtual host → alias → name of the node.
        self._aliases: dict[str, dict[str, str]] = {}
        self._count = 0
        #: Number of dynamic nodes by connection.
        self._dynamic: Counter[Any] = Counter()
        #: Number of the next object in the store.
        self._number = 1
        #: Objects with work left for later turns, such as queues whose filters have to examine more
        #: messages, and logs whose readers have to examine more records.
        self._unfinished: deque[Resumable] = deque()
        self._looking = trio.Event()
        #: The latest round of :meth:`sweep` over the nodes; None before the first one.
        self._round: _Steps | None = None
        #: Nodes that may hold messages with a time to live.
        self._expiring: dict[MessageQueue | MessageTopic, None] = {}
        #: Heap of alarms: time, number in the order of setting, and queue to call.
        self._alarms: list[tuple[float, int, MessageQueue]] = []
        self._alarms_set = 0
        self._alarms_max = 64
        self._alarmed = trio.Event()
        self._reading = None if journal is None else Reading(journal, limits, self.fail)
        self._pager = Pager(limits, self.fail)
        self._log_limiter = LogLimiter(limits)
        #: Logs and their numbers in the store, 0 for those not stored.
        self._logs: dict[MessageLog, int] = {}

    def __repr__(self) -> str:
        return f"<BrokerHost: {self._count} nodes, {self.memory.held} bytes>"

    # --- Restoring ---

    async def restore(self) -> None:
        """Open the store, and restore its nodes and messages.

        Raises:
            AmqpError: The store cannot be opened, or has records unknown to this release.
        """
        if isinstance(self.clock, RunClock):
            self.clock.begin()
        journal = self.journal
        if journal is None:
            return
        await journal.open()
        for key, value in await facts.NODES.read(journal):
            number = facts.number_of(key)
            try:
                kept = facts.NODES.decode(value)
                declared = facts.declaration_of(kept)
            except (msgspec.DecodeError, KeyError) as error:
                raise AmqpError(
                    f"the store has a node that this release does not understand: {error}"
                ) from error
            node = self._make(kept.virtual_host, declared, number=number, implicit=kept.implicit)
            node.found = True
            if isinstance(node.held, MessageQueue):
                await self._restore_queue(journal, number, node.held)
            elif isinstance(node.held, MessageLog):
                await node.held.restore()
        if self.ways is not None:
            await self.ways.restore(journal)
        await self._restore_ids(journal)
        await self._restore_logs(journal)
        await self._restore_termini(journal)
        nodes = [node for space in self._spaces.values() for node in space.values()]
        numbered = {node.number: node for node in nodes}
        staged = await self.staging.restore(numbered)
        leased = await self.leases.restore(numbered, partial(self._pager.fetch, journal))
        self._number = max(self._number, staged + 1, leased + 1)
        if nodes:
            queues = [node.held for node in nodes if isinstance(node.held, MessageQueue)]
            messages = sum(queue.available + queue.delayed for queue in queues)
            _log.info("store read: %d nodes, %d messages in queues", len(nodes), messages)

    async def _restore_ids(self, journal: Journal) -> None:
        intakes = {
            node.number: node.intake for space in self._spaces.values() for node in space.values()
        }
        for key, value in await facts.DUPLICATES.read(journal):
            intake = intakes.get(facts.number_of(key))
            if intake is not None and intake.duplicates is not None:
                intake.duplicates.recall(key, value)
            else:
                facts.DUPLICATES.forget(journal.loose, key)
        for duplicates in self._windows:
            duplicates.expire()

    async def _restore_termini(self, journal: Journal) -> None:
        nodes = {node.number: node for space in self._spaces.values() for node in space.values()}
        known: dict[int, Terminus] = {}
        for key, value in await facts.TERMINI.read(journal):
            number = facts.number_of(key)
            self._number = max(self._number, number + 1)
            try:
                fact = facts.TERMINI.decode(value)
                node = nodes.get(fact.node)
                if node is not None:
                    known[number] = await self._restore_terminus(journal, node, fact, number)
                    continue
            except (msgspec.DecodeError, DecodeError, InvalidFilter) as error:
                raise AmqpError(
                    f"the store has a terminus that this release does not understand: {error}"
                ) from error
            facts.TERMINI.forget(journal.loose, key)
        for key, value in await facts.DELIVERIES.read(journal):
            source = known.get(facts.number_of(key))
            sequence = facts.DELIVERIES.decode(value)
            if isinstance(source, KeptSource) and source.queue is not None:
                await self._pager.fetch(journal, source.queue, sequence)
            if not (isinstance(source, KeptSource) and source.recall(facts.part_of(key), sequence)):
                facts.DELIVERIES.forget(journal.loose, key)
        seen: dict[int, list[tuple[int, bytes]]] = {}
        for key, value in await facts.SEEN.read(journal):
            number = facts.number_of(key)
            if isinstance(known.get(number), KeptTarget):
                seen.setdefault(number, []).append(facts.SEEN.decode(value))
            else:
                # A later terminus with this number must not take messages for duplicates of these.
                facts.SEEN.forget(journal.loose, key)
        for number, values in seen.items():
            target = known.get(number)
            if isinstance(target, KeptTarget):
                target.recall(values)
        for terminus in known.values():
            # The connection of its link ended with the process before.
            terminus.count_down()

    async def _restore_terminus(
        self, journal: Journal, node: _Node, fact: TerminusFact, number: int
    ) -> Terminus:
        kept = facts.terminus_of(fact)
        found = split_partition(kept.address or "") if isinstance(node.held, MessageLog) else None
        if found is not None:
            # Its record refers to the log, not to the partition.
            node = self._partition(fact.virtual_host, node, str(kept.address), found[1])
        key = self.termini.restored_key(fact, kept)
        if isinstance(kept, Target):
            terms = Terms(
                source=None, target=kept, snd_settle_mode=fact.snd_settle_mode, keeps=True
            )
        else:
            terms = terms_again(
                kept,
                fact.snd_settle_mode,
                fact.container_id,
                priority=fact.priority,
                exclusive=fact.exclusive,
                now=self.clock.wall(),
                limits=self.limits,
            )
        terminus = self._make_terminus(node, key, terms, number)
        assert terminus is not None
        queue = terminus.queue
        if queue is not None and isinstance(node.held, MessageTopic):
            await self._restore_queue(journal, number, queue)
            self._expiring[node.held] = None
        if not terminus.is_durable and isinstance(terminus, KeptSource | KeptTarget):
            # The terminus was stored, but not its unsettled deliveries.
            terminus.memory = None
        return terminus

    async def _restore_logs(self, journal: Journal) -> None:
        logs = {number: log for log, number in self._logs.items()}
        kinds: tuple[FactKind[Any], ...] = (
            *(facts.INCARNATIONS, facts.CURSORS, facts.HOLDS, facts.ERAS),
        )
        for kind in kinds:
            for key, value in await kind.read(journal):
                log = logs.get(facts.number_of(key))
                if log is None:
                    # The log was deleted while this fact was being written.
                    kind.forget(journal.loose, key)
                    continue
                known = kind.decode(value)
                if kind is facts.INCARNATIONS:
                    log.incarnation = known
                elif kind is facts.ERAS:
                    log.eras = known
                elif kind is facts.CURSORS:
                    log.cursors[facts.name_of(key)] = known
                else:
                    log.holds[facts.name_of(key)] = known
        for log, number in self._logs.items():
            self._begin_era(journal, log, number)

    async def _restore_queue(self, journal: Journal, number: int, queue: MessageQueue) -> None:
        if await self._pager.restore(journal, number, queue):
            self._expiring[queue] = None

    # --- Declaring ---

    def declare(self, declared: Declaration, *, virtual_host: str = "") -> None:
        """Create a node, and a queue for its dead letters if no node has that name.

        An equal declaration of an existing node changes nothing.

        Raises:
            AmqpError: The name is taken, an address cannot be used, or there are too many nodes.
        """
        space = self._spaces.setdefault(virtual_host, {})
        self._check_addresses(virtual_host, declared)
        if declared.name != JOURNAL:
            self._declare_journal(virtual_host)
        known = space.get(declared.name)
        if known is not None and known.failure is not None:
            raise known.failure
        if known is not None and known.found and _alike(known.declared, declared):
            # The application's current declaration replaces the one from before the restart.
            known.found = known.implicit = False
            self._redeclare(known, declared, virtual_host)
        elif known is not None:
            if known.declared != declared:
                raise AmqpError(
                    f"{declared.name!r} exists as {known.declared!r}",
                    condition="amqp:precondition-failed",
                )
            return
        else:
            self._make(virtual_host, declared)
            self._log_node("declared", declared, virtual_host)
        self._make_dead(virtual_host, declared)

    def _log_node(
        self, event: str, declared: Declaration, virtual_host: str, why: str = ""
    ) -> None:
        """Log an event of a node, within the rate limit, since peers can create many nodes."""
        left_out = self._log_limiter.admit((event, virtual_host), self.clock.monotonic())
        if left_out is not None:
            host = f" of virtual host {virtual_host!r}" if virtual_host else ""
            _log.info(
                "node %s: %s %.200r%s%s%s", event, declared.kind, declared.name, host, why, left_out
            )

    def declare_transient(
        self,
        declared: Declaration,
        owner: Any = None,
        *,
        reserved: Any = None,
        virtual_host: str = "",
    ) -> None:
        """Create a node that is not stored, and accepts durable messages nevertheless.

        The node exists until it is deleted.

        Args:
            declared: Declaration of the node.
            owner: Connection for which the node is created under a name that cannot be guessed; it
                may have ``limits.dynamic_nodes_max`` of them. None for other nodes.
            reserved: The only connection that may receive from the node; None for any.
            virtual_host: Virtual host of the node.

        Raises:
            AmqpError: The name is taken, an address cannot be used, there are too many nodes, or
                *owner* has too many.
        """
        self._check_addresses(virtual_host, declared)
        if declared.name in self._space(virtual_host):
            raise AmqpError(
                f"{declared.name!r} is there already", condition="amqp:precondition-failed"
            )
        if owner is not None and self._dynamic[owner] >= self.limits.dynamic_nodes_max:
            raise AmqpError(
                "the connection has too many nodes that are not in the store",
                condition="amqp:resource-limit-exceeded",
            )
        self._make(virtual_host, declared, owner, transient=True).reserved = reserved
        if owner is not None:
            self._dynamic[owner] += 1
        else:
            self._log_node("declared", declared, virtual_host)
        self._make_dead(virtual_host, declared)

    def has(self, address: str, *, virtual_host: str = "") -> bool:
        """Return whether a node has the name *address*."""
        return address in self._space(virtual_host)

    def name_of(self, address: str, *, virtual_host: str = "") -> str | None:
        """Return the name of the node at *address*, which may be an alias; None if none is there."""
        virtual_host = self._existing(virtual_host)
        if address in self._spaces[virtual_host]:
            return address
        return self._aliases.get(virtual_host, {}).get(address)

    def own_name(self, address: str, virtual_host: str) -> str:
        """Return the name under which rights at *address* are granted.

        For an alias this is the name of its node, for an exchange its address without routing key.
        """
        if self.ways is not None and address.startswith(EXCHANGES):
            return self.ways.own_name(address)
        if not self._aliases:
            return address
        return self._aliases.get(self._existing(virtual_host), {}).get(address, address)

    def consumers(self, address: str, *, virtual_host: str = "") -> list[Any]:
        """Return the attached links that receive from the node.

        Raises:
            AmqpError: There is no such node.
        """
        node = self._known(self._space(virtual_host), address)
        return [link for link in node.links() if link.role == SENDER]

    def watch_consumers(
        self, address: str, on_left: Callable[[Any], None], *, virtual_host: str = ""
    ) -> None:
        """Call *on_left* with the link of each consumer that leaves the node.

        Raises:
            AmqpError: There is no such node.
        """
        self._known(self._space(virtual_host), address).on_left = on_left

    def update(self, declared: Declaration, *, virtual_host: str = "") -> None:
        """Replace the declaration of an existing node; its messages and links stay.

        Raises:
            AmqpError: There is no such node, its messages do not permit the change, or an address
                cannot be used.
        """
        node = self._find(self._space(virtual_host), declared.name)
        if not _alike(node.declared, declared):
            raise AmqpError(
                f"{declared.name!r} cannot become {declared!r}: delete it first",
                condition="amqp:precondition-failed",
            )
        virtual_host = self._existing(virtual_host)
        self._check_addresses(virtual_host, declared)
        node.implicit = False
        self._redeclare(node, declared, virtual_host)
        self._make_dead(virtual_host, declared)

    def is_implicit(self, name: str, *, virtual_host: str = "") -> bool:
        """Return whether node *name* was created for dead letters or on first use only."""
        node = self._space(virtual_host).get(name)
        return node is not None and node.implicit

    def adopt(
        self,
        declared: Declaration,
        *,
        durable: bool,
        reserved: Any = None,
        virtual_host: str = "",
    ) -> None:
        """Give the implicit node of that name its first declaration; its messages and links stay.

        The node stays in the store even if it is not *durable*, so that dead letters outlive a restart;
        the first declaration after the restart counts again. *reserved* is the only connection that
        may receive from it; None for any.

        Raises:
            AmqpError: There is no such node, its messages do not permit the change, an address
                cannot be used, or a queue to be reserved has messages or links.
        """
        node = self._find(self._space(virtual_host), declared.name)
        if not _alike(node.declared, declared):
            raise AmqpError(
                f"{declared.name!r} was made without a declaration and cannot become {declared!r}:"
                " delete it first, and declare it before the queues whose dead letters it gets",
                condition="amqp:precondition-failed",
            )
        if reserved is not None and (self._holds_anything(node) or node.termini or node.links()):
            # The queue will be deleted with its connection, and messages of others with it.
            raise AmqpError(
                f"queue {declared.name!r} cannot become exclusive: it has messages or links",
                condition="amqp:resource-locked",
            )
        virtual_host = self._existing(virtual_host)
        self._check_addresses(virtual_host, declared)
        node.found = False
        node.implicit = not durable
        self._redeclare(node, declared, virtual_host)
        node.reserved = reserved
        self._make_dead(virtual_host, declared)

    @staticmethod
    def _holds_anything(node: _Node) -> bool:
        held = node.held
        delayed = held.delayed if isinstance(held, MessageQueue) else 0
        return bool(held.available or held.acquired or delayed)

    def declaration(self, address: str, *, virtual_host: str = "") -> Declaration:
        """Return the declaration of a node.

        Raises:
            AmqpError: There is no such node.
        """
        return self._known(self._space(virtual_host), address).declared

    def declare_journals(self) -> None:
        """Create ``$journal`` in each virtual host, if events of messages are recorded."""
        for virtual_host in list(self._spaces):
            self._declare_journal(virtual_host)

    def _declare_journal(self, virtual_host: str) -> None:
        if self.journals is None:
            return
        options = self.journals.options
        log = Log(JOURNAL, max_age_s=options.max_age_s, max_bytes=options.max_bytes)
        known = self._spaces[virtual_host].get(JOURNAL)
        if known is None or known.found:
            self.declare(log, virtual_host=virtual_host)
        held = self._spaces[virtual_host][JOURNAL].held
        if not isinstance(held, MessageLog):
            raise AmqpError(
                f"{JOURNAL!r} exists and is no log: what becomes of messages cannot be recorded",
                condition="amqp:precondition-failed",
            )
        held.sealed = True

    def _record(self, virtual_host: str, payload: bytes) -> None:
        """Append an event to ``$journal``, unless that has been deleted or has failed."""
        node = self._spaces[virtual_host].get(JOURNAL)
        if node is not None and isinstance(node.held, MessageLog) and node.failure is None:
            node.inlet.take(Entry(payload))

    def _check_addresses(self, virtual_host: str, declared: Declaration) -> None:
        """Check the name, aliases and dead-letter address of *declared*.

        Raises:
            AmqpError: One of them has another meaning, the dead-letter address is an alias, or
                there are too many aliases.
        """
        aliases = declared.aliases if isinstance(declared, Addressed) else ()
        if len(aliases) > self.limits.aliases_max:
            raise AmqpError(
                f"{declared.name!r}: a node has at most {self.limits.aliases_max} aliases, "
                f"not {len(aliases)}",
                condition="amqp:resource-limit-exceeded",
            )
        dead = declared.dead_letter if isinstance(declared, Queue) else None
        if dead is not None and dead.startswith(EXCHANGES):
            if self.ways is not None and self.ways.takes_no_letters(virtual_host, dead):
                raise AmqpError(
                    f"{declared.name!r}: dead_letter is {dead!r}, a system exchange, which leads to services"
                    " and never to a queue: name a queue or another exchange",
                    condition="amqp:precondition-failed",
                )
            dead = None
        named = [declared.name, *aliases] if dead is None else [declared.name, *aliases, dead]
        for address in named:
            why = self._meaning(virtual_host, address)
            if why and not (address == JOURNAL and address == declared.name):
                raise AmqpError(
                    f"no node can be called so: {why}", condition="amqp:unauthorized-access"
                )
        if dead is None:
            return
        means = self._aliases.get(virtual_host, {}).get(dead)
        if means is not None or dead in aliases:
            raise AmqpError(
                f"{declared.name!r}: dead_letter is {dead!r}, an alias of "
                f"{means or declared.name!r}: give the name of the node",
                condition="amqp:precondition-failed",
            )

    def _meaning(self, virtual_host: str, address: str) -> str:
        """Return the meaning of *address* that prevents a node of that name; empty if none."""
        if address == JOURNAL:
            return f"{address!r} is where the broker records what becomes of messages"
        found = split_partition(address)
        log = None if found is None else self._spaces.get(virtual_host, {}).get(found[0])
        if log is not None and isinstance(log.held, MessageLog):
            return f"{address!r} is a partition of {log.declared.name!r}"
        return reserved(address)

    def _make_dead(self, virtual_host: str, declared: Declaration) -> None:
        """Create the queue for the dead letters of *declared*, unless a node has that name."""
        dead = declared.dead_letter if isinstance(declared, Queue) else None
        if dead is not None and dead.startswith(EXCHANGES):
            return
        if dead is not None and dead not in self._spaces[virtual_host]:
            # A later declaration may change it.
            node = self._make(virtual_host, Queue(dead), implicit=True)
            node.found = True
            why = f", for the dead letters of {declared.name!r:.200}"
            self._log_node("made", node.declared, virtual_host, why)

    def _call(self, virtual_host: str, declared: Declaration, before: Declaration | None) -> None:
        """Point the aliases of *declared* at it, and drop those of *before*.

        Raises:
            AmqpError: An alias is an address of another node.
        """
        aliases = declared.aliases if isinstance(declared, Addressed) else ()
        known = self._aliases.get(virtual_host, {})
        for alias in aliases:
            if (
                alias in self._spaces[virtual_host]
                or known.get(alias, declared.name) != declared.name
            ):
                raise AmqpError(
                    f"{alias!r} is another node's address", condition="amqp:precondition-failed"
                )
        for alias in before.aliases if isinstance(before, Addressed) else ():
            known.pop(alias, None)
        if aliases:
            known = self._aliases.setdefault(virtual_host, known)
            known.update(dict.fromkeys(aliases, declared.name))
        if not known:
            self._aliases.pop(virtual_host, None)

    def _redeclare(self, node: _Node, declared: Declaration, virtual_host: str) -> None:
        self._call(virtual_host, declared, node.declared)
        node.declared = declared
        held = node.held
        if isinstance(declared, Queue) and isinstance(held, MessageQueue):
            held.bury = partial(self._bury, self._spaces[virtual_host], declared)
            held.max_deliveries = declared.deliveries_max
            held.max_attempts = declared.max_attempts or 0
            held.length_max = declared.length_max or 0
            held.overflow = declared.overflow
            held.bytes_max = declared.bytes_max or self._queue_bytes_max(node.number)
            held.single_active = declared.single_active
            held.exclusive = declared.exclusive
            held.lock(declared.lock_s or 0.0)
            self._remember_ids(node.intake, declared, node.number)
            node.inlet.check = self._check(declared)
            node.inlet.ttl_s = declared.ttl_s
            for producer in node.intake.producers:
                producer.check = node.inlet.check
                producer.ttl_s = node.inlet.ttl_s
        elif isinstance(declared, Topic) and isinstance(held, MessageTopic):
            held.backlog_max = declared.backlog_max or self.limits.backlog_max
            held.backlog_bytes_max = declared.backlog_bytes_max or self.limits.backlog_bytes_max
            node.inlet.ttl_s = declared.ttl_s
            for producer in node.intake.producers:
                producer.ttl_s = node.inlet.ttl_s
        elif isinstance(declared, Log) and isinstance(held, MessageLog):
            held.keep(declared.max_age_s, declared.max_bytes)
        if node.number and self.journal is not None:
            fact = facts.node_fact(declared, virtual_host, implicit=node.implicit)
            facts.NODES.keep(self.journal.loose, facts.key_of(node.number), fact)

    def delete(self, address: str, *, virtual_host: str = "") -> int:
        """Delete a node with its messages, and detach its links; return the number of its messages.

        Raises:
            AmqpError: There is no such node.
        """
        space = self._space(virtual_host)
        return self._delete(space, self._known(space, address))

    def nodes(self, *, virtual_host: str = "") -> list[Declaration]:
        """Return the declarations of all nodes, dynamic ones included, in the order of creation."""
        return [node.declared for node in self._space(virtual_host).values()]

    def node_count(self, *, virtual_host: str = "") -> int:
        """Return the number of nodes, dynamic ones included."""
        return len(self._space(virtual_host))

    def names(self, *, virtual_host: str = "") -> list[str]:
        """Return the names of all nodes, in the order of :meth:`nodes`."""
        return list(self._space(virtual_host))

    def kind(self, address: str, *, virtual_host: str = "") -> str | None:
        """Return the kind of the node named *address*; None if there is none, as for an alias."""
        node = self._space(virtual_host).get(address)
        return None if node is None else node.declared.kind

    def virtual_hosts(self) -> list[str]:
        """Return the names of the virtual hosts; "" is the default one."""
        return list(self._spaces)

    def virtual_host(self, hostname: str) -> str | None:
        """Return the virtual host for peers that connect to *hostname*, None if there is none.

        Clients that are not configured otherwise send the name under which they reached the
        machine, so that by default every other name means the default host. ``vhost:NAME``, the
        form of RabbitMQ, means that host or none.
        """
        if hostname in self._spaces and (hostname or self._defaulting):
            return hostname
        prefix, colon, name = hostname.partition(":")
        if colon and prefix == "vhost":
            return name if name and name in self._spaces else None
        return "" if self._defaulting else None

    def _existing(self, virtual_host: str) -> str:
        """Return *virtual_host* if it exists, and the default one otherwise."""
        return virtual_host if virtual_host in self._spaces else ""

    def _space(self, virtual_host: str) -> dict[str, _Node]:
        return self._spaces[self._existing(virtual_host)]

    def _known(self, space: dict[str, _Node], address: str) -> _Node:
        """Return the node at *address*, even if it is out of service.

        Raises:
            AmqpError: There is none.
        """
        node = space.get(address)
        if node is None:
            raise AmqpError(f"there is no node {address!r}", condition="amqp:not-found")
        return node

    def _find(self, space: dict[str, _Node], address: str) -> _Node:
        """Return the node at *address*.

        Raises:
            AmqpError: There is none, or it is out of service.
        """
        node = self._known(space, address)
        if node.failure is not None:
            raise node.failure
        return node

    def _make(
        self,
        virtual_host: str,
        declared: Declaration,
        owner: Any = None,
        number: int = 0,
        *,
        transient: bool = False,
        implicit: bool = False,
    ) -> _Node:
        """Create a node; with a *number* it is in the store already, *transient* ones never are."""
        transient = transient or owner is not None
        space = self._spaces.setdefault(virtual_host, {})
        if self._count >= self.limits.nodes_max:
            raise AmqpError(
                f"the broker has {self._count} nodes already",
                condition="amqp:resource-limit-exceeded",
            )
        if declared.name in self._aliases.get(virtual_host, {}):
            raise AmqpError(
                f"{declared.name!r} is an alias of another node",
                condition="amqp:precondition-failed",
            )
        limits = self.limits
        journal = self.journal
        if journal is not None and not journal.is_open:
            raise LocalProtocolError("the store is not open yet: enter the broker first")
        self._call(virtual_host, declared, None)
        new = journal is not None and not transient and not number
        if journal is not None and not transient:
            if new:
                number = self._number
                fact = facts.node_fact(declared, virtual_host, implicit=implicit)
                facts.NODES.keep(journal.loose, facts.key_of(number), fact)
            # A log takes one number for each partition.
            taken = declared.partitions if isinstance(declared, Log) else 1
            self._number = max(self._number, number + taken)
        held: MessageQueue | MessageTopic | MessageLog
        ttl_s: float | None = None
        watch = None
        if self.journals is not None and not transient:
            watch = self.journals.watch(virtual_host, declared.name, self._record)
        queue_type = MessageQueue if watch is None else ObservedQueue
        if isinstance(declared, Queue):
            ttl_s = declared.ttl_s
            held = queue_type(
                self.memory,
                self.clock.wall,
                partial(self._bury, space, declared),
                max_deliveries=declared.deliveries_max,
                max_attempts=declared.max_attempts or 0,
                length_max=declared.length_max or 0,
                bytes_max=declared.bytes_max or self._queue_bytes_max(number),
                priorities=declared.priorities,
                overflow=declared.overflow,
                monotonic=self.clock.monotonic,
                marker=marker(
                    last_value_key=declared.last_value_key,
                    sort_key=declared.sort_key,
                    groups=declared.groups,
                    limits=limits,
                ),
                last_value=declared.last_value_key is not None,
                sorting=declared.sort_key is not None,
                grouping=declared.groups > 0,
                lock_s=declared.lock_s or 0.0,
                single_active=declared.single_active,
                exclusive=declared.exclusive,
                limits=limits,
            )
            if isinstance(held, ObservedQueue):
                held.watch = watch
            held.on_alarm = partial(self._set_alarm, held)
            held.on_unfinished = partial(self.go_on_later, held)
        elif isinstance(declared, Topic):
            ttl_s = declared.ttl_s
            held = MessageTopic(
                self.memory,
                self.clock.wall,
                backlog_max=declared.backlog_max or 0,
                backlog_bytes_max=declared.backlog_bytes_max or 0,
                monotonic=self.clock.monotonic,
                limits=limits,
            )
            held.on_alarm = self._set_alarm
            held.on_unfinished = self.go_on_later
            held.bury = partial(self._bury_copy, declared.name)
            held.queue_type = queue_type
            held.watch = watch
        elif isinstance(declared, Log):
            held = self._make_log(declared, number, new)
        else:
            raise TypeError(f"a node is declared as a Queue, a Topic or a Log, not {declared!r}")
        ledger: Ledger | None = None
        if journal is not None and number and isinstance(held, MessageQueue):
            ledger = held.ledger = QueueLedger(journal, number, held, declared.name)
            self._pager.adopt(held, number)
        elif journal is not None and number and isinstance(held, MessageTopic):
            ledger = TopicLedger(journal, held, declared.name)
        intake = Intake(held)
        if isinstance(declared, Queue):
            self._remember_ids(intake, declared, number)
        place, ledger = _way_in(held, ledger)
        inlet = Inlet(
            intake,
            place,
            self.door,
            self.clock.wall,
            ttl_s=ttl_s,
            ledger=ledger,
            transactions=self.transactions,
            # Topics and transient nodes promise nothing beyond the links that are attached now.
            volatile=self.volatile or transient or isinstance(held, MessageTopic),
            check=self._check(declared),
            successor=partial(self._inlet, virtual_host, declared.name),
        )
        if not isinstance(held, MessageLog):
            inlet.on_expiring = partial(self._expiring.__setitem__, held, None)
        node = _Node(declared, held, intake, inlet, owner, ledger, number, virtual_host)
        node.implicit = implicit
        space[declared.name] = node
        self._count += 1
        return node

    def _make_log(self, declared: Log, number: int, new: bool) -> MessageLog:
        if declared.partitions > self.limits.log_partitions_max:
            raise AmqpError(
                f"a log has at most {self.limits.log_partitions_max} partitions",
                condition="amqp:resource-limit-exceeded",
            )
        held = MessageLog(
            self.memory,
            self.clock.wall,
            str(uuid.uuid4()),
            [number + index if number else 0 for index in range(declared.partitions)],
            self._reading if number else None,
            max_age_s=declared.max_age_s,
            max_bytes=declared.max_bytes,
            limits=self.limits,
        )
        held.address = declared.name
        held.on_unfinished = partial(self.go_on_later, held)
        self._logs[held] = number
        if new and self.journal is not None:
            facts.INCARNATIONS.keep(self.journal.loose, facts.key_of(number), held.incarnation)
            self._begin_era(self.journal, held, number)
        return held

    def _begin_era(self, journal: Journal, log: MessageLog, number: int) -> None:
        """Begin an era of *log*, and store it before the first record of the era."""
        if number and log.reading is not None:
            log.begin_era(self._era)
            facts.ERAS.keep(journal.loose, facts.key_of(number), log.eras)

    def _new_number(self) -> int:
        """Return a number that no other object has in the store."""
        number = self._number
        self._number += 1
        return number

    def _check(self, declared: Declaration) -> Check | None:
        """Return the check of messages that are sent to a node with this declaration, if any."""
        if not isinstance(declared, Queue):
            return None
        returns = declared.return_to_sender and self.may_send is not None
        claims: Check | None = None
        if declared.check_user_id or declared.absolute_expiry:
            claims = partial(
                check_claims,
                user_id=declared.check_user_id,
                absolute_expiry=declared.absolute_expiry,
            )
        if not returns:
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
        address = self._reply_to(entry)
        may_send = self.may_send
        entry.returnable = address is not None and may_send is not None and may_send(peer, address)
        return None

    def _reply_to(self, entry: Entry) -> str | None:
        if entry.message_format != MESSAGE_FORMAT:
            return None
        try:
            address = MessageView(entry, self.limits).properties().reply_to
        except DecodeError:
            return None
        return None if address is None else str(address)

    def _remember_ids(self, intake: Intake, declared: Queue, number: int) -> None:
        """Create, change or remove the duplicate-detection window of *intake*, as *declared*."""
        window_s = declared.duplicate_window_s
        duplicates = intake.duplicates
        if window_s is None:
            if duplicates is not None:
                duplicates.clear()
                del self._windows[duplicates]
            intake.duplicates = None
        elif duplicates is not None:
            duplicates.window_s = window_s
        else:
            duplicates = intake.duplicates = Duplicates(
                window_s, self.clock.wall, self.journal, number, self.limits
            )
            self._windows[duplicates] = None

    def _queue_bytes_max(self, number: int) -> int:
        """Return the limit of bytes of a queue that declares none.

        The limit of a stored queue is higher, since few of its bytes are in memory.
        """
        limits = self.limits
        return limits.queue_stored_bytes_max if number else limits.queue_bytes_max

    def _delete(self, space: dict[str, _Node], node: _Node) -> int:
        del space[node.declared.name]
        if node.owner is None:
            self._log_node("deleted", node.declared, node.virtual_host)
        self._call(node.virtual_host, Declaration(node.declared.name), node.declared)
        self._count -= 1
        self._disown(node)
        self.staging.delete(node)
        self.leases.delete(node)
        held = node.held
        if node.number and self.journal is not None:
            unit = self.journal.loose
            key = facts.key_of(node.number)
            facts.NODES.forget(unit, key)
            if isinstance(held, MessageLog):
                facts.INCARNATIONS.forget(unit, key)
                facts.ERAS.forget(unit, key)
                for name in held.cursors:
                    facts.CURSORS.forget(unit, facts.name_key(node.number, name))
                for name in held.holds:
                    facts.HOLDS.forget(unit, facts.name_key(node.number, name))
                for partition in held.partitions:
                    unit.clear(partition.number)
            else:
                unit.clear(node.number)
        if isinstance(held, MessageQueue):
            self._pager.dismiss(held)
        if isinstance(held, MessageLog):
            del self._logs[held]
        else:
            self._expiring.pop(held, None)
        self.memory.waiting.pop(node.intake, None)
        if node.intake.duplicates is not None:
            node.intake.duplicates.clear()
            del self._windows[node.intake.duplicates]
        messages = held.available + held.acquired
        if isinstance(held, MessageQueue):
            messages += held.delayed
        links = node.links()
        termini = list(node.termini)
        self.guard(node, held.delete)
        for terminus in termini:
            self.guard(node, terminus.end)
        error = Error("amqp:resource-deleted", f"{node.declared.name!r} has been deleted")
        _Steps(self, (link.detach(error) for link in links), 8).resume()
        if self.on_deleted is not None:
            self.on_deleted(node.virtual_host, node.declared.name)
        return messages

    def _detach_consumers(self, error: Error) -> None:
        """Detach the consumers of stored messages, since the store was given up.

        Outcomes can no longer be stored, and peers must not wait for them.
        """
        for space in self._spaces.values():
            for node in space.values():
                held = node.held
                if isinstance(held, MessageQueue) and held.ledger is not None:
                    consumers = [*held.consumers.values()]
                elif isinstance(held, MessageTopic) and node.number:
                    consumers = held.consumers
                else:
                    continue
                kept: set[Any] = set()
                for terminus in node.termini:
                    if not terminus.number:
                        continue
                    if isinstance(terminus, KeptSource):
                        kept.add(terminus.subscription)
                    elif isinstance(terminus, SharedSource):
                        kept.update(terminus.members.values())
                for consumer in consumers:
                    if consumer.link is not None and consumer.link.attached:
                        # A link whose terminus is in the store can be resumed: it is not closed.
                        consumer.link.detach(error, closed=consumer not in kept)

    def _disown(self, node: _Node) -> None:
        """Stop counting a dynamic node as one of its connection's."""
        if node.owner is not None:
            self._dynamic[node.owner] -= 1
            if not self._dynamic[node.owner]:
                del self._dynamic[node.owner]
            # The node and its queue refer to each other: until a full garbage collection they would
            # keep the connection in memory.
            node.owner = None

    def _bury(
        self,
        space: dict[str, _Node],
        declared: Queue,
        entry: Entry,
        reason: str,
        error: Error | None,
    ) -> bool:
        node = self._sender(space, declared, entry) if declared.return_to_sender else None
        if node is not None and entry.pieces and not isinstance(node.ledger, QueueLedger):
            # Only a stored queue can take a message in pieces, and the sender's node is none.
            node = None
        if node is None and declared.dead_letter is None:
            self._drop(declared.name, entry, reason, error, "the queue has no dead_letter")
            return False
        if node is None:
            node = space.get(declared.dead_letter or "")
        if node is None and self.ways is not None:
            here = space.get(declared.name)
            address = declared.dead_letter or ""
            try:
                names = self.ways.letter("" if here is None else here.virtual_host, address, entry)
            except AmqpError as failure:
                why = f"its dead-letter address {address!r} leads nowhere: {failure.description}"
                self._log_drop(declared.name, entry, reason, error, why)
                return False
            if names is not None:
                return self._bury_in(space, declared, entry, names, reason, error)
        if node is None:
            why = f"its dead-letter address {declared.dead_letter!r} has been deleted"
            self._log_drop(declared.name, entry, reason, error, why)
            return False
        if entry.pieces and not isinstance(node.ledger, QueueLedger):
            why = f"it is too large for {node.declared.name!r}, which is not in the store"
            self._log_drop(declared.name, entry, reason, error, why)
            return False
        moves = moves_after(entry, declared.name, reason)
        if moves is not None and moves.leads_back(node.declared.name, self.limits):
            self._log_cycle(node.declared.name, declared.name, entry, reason)
            return False
        letter = dead_letter(
            entry, declared.name, reason, error, self.clock.wall(), self.limits, moves
        )
        unit = None if self.journal is None else self.journal.joins
        if unit is not None:
            unit.letters += 1
        if unit is not None and node.ledger is None:
            # A transaction has no visible effect before it is stored.
            unit.then(partial(node.inlet.take, letter))
        else:
            node.inlet.take(letter)
        return True

    def _bury_copy(self, name: str, entry: Entry, reason: str, error: Error | None) -> bool:
        """Drop a subscriber's copy of *entry* at the topic *name*."""
        self._drop(name, entry, reason, error, "subscriptions have no dead_letter")
        return False

    def _drop(self, name: str, entry: Entry, reason: str, error: Error | None, why: str) -> None:
        """Warn of a dropped message, unless it expired or overflowed, as the node is declared to."""
        if reason not in AUTOMATIC:
            self._log_drop(name, entry, reason, error, why)

    def _log_cycle(self, name: str, source: str, entry: Entry, reason: str) -> None:
        """Warn that *entry* is not moved to the node *name*, because it would move in a cycle."""
        why = f"{reason} in {source!r}"
        # Each of n queues may lead back to all others: the lines are limited for each destination.
        self._log_drop(name, entry, "dead-letter cycle", None, why, key="cycle")

    def _log_drop(
        self,
        name: str,
        entry: Entry,
        reason: str,
        error: Error | None,
        why: str,
        key: object = None,
    ) -> None:
        """Warn that *entry* was dropped at the node *name*, within the rate limit of the log."""
        log_loss(
            _log,
            self._log_limiter,
            self.clock.monotonic(),
            event=f"message dropped: {reason} at",
            address=name,
            payload=entry.payload,
            message_format=entry.message_format,
            why=why,
            error=error,
            key=key,
        )

    def _bury_in(
        self,
        space: dict[str, _Node],
        declared: Queue,
        entry: Entry,
        names: Sequence[str],
        reason: str,
        error: Error | None,
    ) -> bool:
        """Put a dead letter into each of the nodes in *names*, except the one that gave it up.

        Return whether at least one node takes it.
        """
        moves = moves_after(entry, declared.name, reason)
        nodes: list[_Node] = []
        cycle = False
        for name in names:
            node = space.get(name)
            if node is None or name == declared.name or entry.pieces or node.is_sealed:
                continue
            if moves is not None and moves.leads_back(node.declared.name, self.limits):
                self._log_cycle(name, declared.name, entry, reason)
                cycle = True
            else:
                nodes.append(node)
        if moves is not None and nodes:
            nodes = self._within_copies(declared, entry, moves, nodes)
            moves = moves.copied(len(nodes))
        if not nodes:
            if not cycle:
                why = f"its dead-letter address {declared.dead_letter!r} leads to no queue that takes it"
                self._log_drop(declared.name, entry, reason, error, why)
            return False
        letter = dead_letter(
            entry, declared.name, reason, error, self.clock.wall(), self.limits, moves
        )
        unit = None if self.journal is None else self.journal.joins
        self.memory.work -= WORK_OF_A_LETTER * len(nodes)
        if unit is not None:
            unit.letters += len(nodes)
        for node in nodes:
            if unit is not None and node.ledger is None:
                unit.then(partial(node.inlet.take, letter.again()))
            else:
                node.inlet.take(letter.again())
        return True

    def _within_copies(
        self, declared: Queue, entry: Entry, moves: Moves, nodes: list[_Node]
    ) -> list[_Node]:
        """Return as many of *nodes* as the limit of copies allows for this dead letter.

        Without a bound, n queues that are bound to each other's exchange would make about n! copies
        of one message, although no copy enters a queue twice.
        """
        most = max(1, self.limits.dead_letter_copies_max // moves.copies)
        if moves.copies == 1 or len(nodes) <= most:
            return nodes
        why = "dead_letter_copies_max is reached; its queues dead-letter to each other"
        self._log_drop(declared.name, entry, "dead-letter copies", None, why)
        return nodes[:most]

    def _sender(self, space: dict[str, _Node], declared: Queue, entry: Entry) -> _Node | None:
        """Return the node to which a message that was given up returns, None if it names none.

        If that node gives it up too, only a dead-letter address is left: the ``reply-to`` stays.
        """
        if self.may_send is not None and not entry.returnable:
            return None
        address = self._reply_to(entry)
        node = None if address is None or address == declared.name else space.get(address)
        return None if node is None or node.is_sealed else node

    # --- Links (fronts.base.Host) ---

    def _refuse(self, link: ReceivingLink | SendingLink, error: Error) -> None:
        """Refuse *link* with *error*, and log the refusal."""
        link.refuse(error)
        log_refusal(_log, self._log_limiter, link, error, self.clock.monotonic())

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*; return False if its address is not ours."""
        sending = link.role == SENDER
        terminus = link.source if sending else link.target
        if isinstance(terminus, Coordinator):
            self.transactions.attach(cast("ReceivingLink", link))
            return True
        if not isinstance(terminus, Source | Target):
            return False
        virtual_host = self._existing(link.peer.virtual_host)
        if self.ways is not None and not sending and isinstance(terminus.address, str):
            way = self.ways.inlet(virtual_host, terminus.address, cast("ReceivingLink", link))
            if isinstance(way, Error):
                self._refuse(link, way)
                return True
            if way is not None:
                cast("ReceivingLink", link).accept(
                    way,
                    target=Target(address=terminus.address),
                    max_message_size=self.limits.message_size_max,
                )
                return True
        key = self._key(virtual_host, link, terminus)
        kept = self.termini.find(key)
        space = self._spaces[virtual_host]
        address = terminus.address
        if kept is not None:
            if kept.error is not None:
                self._refuse(link, kept.error)
                kept.end()
                return True
            if terminus.dynamic and kept.kept.dynamic and address is None:
                # The node that was created for the terminus still exists.
                address = kept.address
        made = kept is not None and terminus.dynamic and address == kept.address
        try:
            if terminus.dynamic and not made:
                return self._attach_dynamic(space, link, terminus, sending, key)
            node = self._resolve(virtual_host, address)
        except AmqpError as error:
            self._refuse(link, Error.of(error))
            return True
        if node is None:
            return False
        terms = answer(
            link,
            node.declared,
            sending=sending,
            lifetime=node.lifetime if made else None,
            # The link for which the node was created may be resumed on another connection.
            owner=node.owner if isinstance(node.lifetime, DeleteOnClose) and not made else None,
            means=self._means(node, link, kept),
            address=address,
            now=self.clock.wall(),
            limits=self.limits,
        )
        if not sending and node.is_sealed:
            terms = _SEALED
        if sending and node.reserved is not None and node.reserved is not link.connection:
            terms = Error(
                "amqp:resource-locked",
                f"{node.declared.name!r} is exclusive to another connection",
            )
        if isinstance(terms, Error):
            self._refuse(link, terms)
            return True
        if sending and self.leases.attach(node, cast("SendingLink", link)):
            return True
        claim = None if sending else claim_of(cast("ReceivingLink", link))
        if claim is not None and node.partition is not None:
            claim = _WHOLE_LOG
        if isinstance(claim, Error):
            self._refuse(link, claim)
            return True
        if claim is not None:
            self.staging.attach(node, cast("ReceivingLink", link), claim, terms.target)
            return True
        if kept is not None:
            kept.interrupt()
            if not kept.over and not kept.same(terms, node.declared.name):
                if isinstance(kept, SharedSource) and kept.members:
                    self._refuse(
                        link,
                        Error(
                            "amqp:precondition-failed",
                            "the subscription has other links, and another address or filter",
                        ),
                    )
                    return True
                # A link with other terms replaces the kept one (S3 2.3.2, see docs/conformance.md).
                kept.end()
        if made:
            self._disown(node)
            node.owner = link.connection
            self._dynamic[node.owner] += 1
        goes_on = kept is not None and not kept.over
        if sending and not (terms.copies or goes_on) and _locked(node, terms):
            self._refuse(
                link,
                Error(
                    "amqp:resource-locked",
                    f"{node.declared.name!r} has a consumer, and one of the two is exclusive",
                ),
            )
            return True
        if sending and not goes_on and self._has_too_many(node, terms):
            most = self.limits.stored_subscriptions_max
            said = f"{node.declared.name!r} has {most} durable subscriptions already"
            self._refuse(link, Error("amqp:resource-limit-exceeded", said))
            return True
        self._accept(node, link, terms, sending, key)
        return True

    def _has_too_many(self, node: _Node, terms: Terms) -> bool:
        """Return whether *terms* request one durable subscription too many of the topic *node*."""
        return (
            isinstance(node.held, MessageTopic)
            and self.journal is not None
            and (terms.keeps or terms.shared)
            and isinstance(terms.source, Source)
            and bool(terms.source.durable)
            and len(node.held.stored) >= self.limits.stored_subscriptions_max
        )

    def recall(self, link: SendingLink) -> Source | None:
        """Return the source kept for *link*, whose peer gives none; None if none is kept.

        Raises:
            AmqpError: It is that of a shared subscription with attached links.
        """
        virtual_host = self._existing(link.peer.virtual_host)
        kept = self.termini.named(virtual_host, link)
        if kept is None or not isinstance(kept.kept, Source):
            return None
        if isinstance(kept, SharedSource) and kept.members:
            # A peer that attaches without a source address wants to end the subscription.
            raise AmqpError(
                f"the subscription {link.name!r} has links", condition="amqp:resource-locked"
            )
        return msgspec.structs.replace(kept.kept)

    def takes_over(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """Return the terminus kept under the name of *link* for any user; None if there is none."""
        terminus = link.source if link.role == SENDER else link.target
        if not isinstance(terminus, Source | Target):
            return None
        key = self._key(self._existing(link.peer.virtual_host), link, terminus)
        # A terminus kept for a user is found by links of that user only.
        kept = None if key[1] else self.termini.find(key)
        return None if kept is None else kept.kept

    def _key(self, virtual_host: str, link: Any, terminus: Source | Target) -> Key:
        """Return the key under which the terminus of *link*, which requests *terminus*, is kept."""
        if isinstance(terminus, Source) and SHARED in terminus.capabilities:
            return self.termini.shared_key(virtual_host, link, terminus)
        return self.termini.key(virtual_host, link)

    def _means(self, node: _Node, link: Any, kept: Terminus | None) -> Means:
        return Means(
            room=kept is not None or self.termini.has_room(link),
            stored=node.number > 0,
            volatile=self.volatile,
        )

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* on *link*, which has an anonymous terminus.

        None if the address is not ours, an error if it cannot be used.
        """
        if self.ways is not None:
            way = self.ways.inlet(self._existing(link.peer.virtual_host), address, link)
            if way is not None:
                return way
        try:
            node = self._resolve(link.peer.virtual_host, address)
        except AmqpError as error:
            return Error.of(error)
        if node is not None and node.is_sealed:
            return _SEALED
        return None if node is None else node.inlet

    def hold_post(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Delay the discharge of the transaction in which *delivery* is posted."""
        self.transactions.hold(link, delivery)

    def let_go_of_post(self, delivery: IncomingDelivery) -> None:
        """Stop delaying the discharge for *delivery*, which was taken or refused."""
        self.transactions.let_go(delivery)

    def refuse_post(
        self, link: ReceivingLink, delivery: IncomingDelivery, outcome: Rejected
    ) -> bool:
        """Refuse *delivery* within its transaction; return False if there is none."""
        transaction = self.transactions.find_for(link, delivery)
        if transaction is None:
            return False
        transaction.refuse(delivery, outcome)
        return True

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Return whether *address* is that of a dynamic node."""
        node = self._space(virtual_host).get(address)
        return node is not None and node.owner is not None

    def _inlet(self, virtual_host: str, address: str) -> Inlet | Error | None:
        try:
            node = self._resolve(virtual_host, address)
        except AmqpError as error:
            return Error.of(error)
        return None if node is None else node.inlet

    def publish(self, address: str, payload: bytes, *, virtual_host: str = "") -> None:
        """Put an encoded message into a node, from within the process.

        Raises:
            AmqpError: There is no such node, it has no room, or the message is malformed.
        """
        space = self._space(virtual_host)
        node = self._resolve(virtual_host, address) or self._find(space, address)
        node.inlet.publish(payload)

    def _resolve(self, virtual_host: str, address: object) -> _Node | None:
        """Return the node at *address*, None if there is none; ``auto_create`` may declare it now.

        Raises:
            AmqpError: The node is out of service, has no such partition, or cannot be created.
        """
        if not isinstance(address, str):
            return None
        virtual_host = self._existing(virtual_host)
        space = self._spaces[virtual_host]
        node = space.get(address)
        if node is None and self._aliases:
            node = space.get(self._aliases.get(virtual_host, {}).get(address, ""))
        if node is not None and node.failure is not None:
            raise node.failure
        if node is not None or not 0 < len(address) <= NAME_MAX:
            return node
        found = split_partition(address)
        if found is not None:
            log = space.get(found[0]) or self._create(virtual_host, found[0], LOG)
            if log is not None and log.failure is not None:
                raise log.failure
            if log is not None and isinstance(log.declared, Log):
                return self._partition(virtual_host, log, address, found[1])
        return self._create(virtual_host, address)

    def _create(self, virtual_host: str, address: str, kind: str | None = None) -> _Node | None:
        """Create the node that ``auto_create`` declares for *address*; with *kind*, only of that."""
        declared = None if self._auto_create is None else self._auto_create(address)
        if declared is None or (kind is not None and declared.kind != kind) or reserved(address):
            return None
        node = self._make(virtual_host, declared, implicit=True)
        # The first declaration may change it, as for a queue created for dead letters.
        node.found = True
        self._make_dead(virtual_host, declared)
        self._log_node("made", declared, virtual_host, ", on its first use")
        return node

    def _partition(self, virtual_host: str, log: _Node, address: str, partition: int) -> _Node:
        """Return a node for one partition of *log*, for links that attach to it."""
        held = log.held
        assert isinstance(held, MessageLog)
        if partition >= len(held.partitions):
            raise AmqpError(
                f"{log.declared.name!r} has the partitions 0 to {len(held.partitions) - 1}",
                condition="amqp:not-found",
            )
        place, ledger = _way_in(held, None, partition)
        inlet = Inlet(
            log.intake,
            place,
            self.door,
            self.clock.wall,
            ledger=ledger,
            transactions=self.transactions,
            volatile=log.inlet.volatile,
            successor=partial(self._inlet, virtual_host, address),
        )
        declared = msgspec.structs.replace(log.declared, name=address)
        node = _Node(
            declared,
            held,
            log.intake,
            inlet,
            log.owner,
            ledger,
            log.number,
            virtual_host,
            partition,
        )
        # The log and its partitions share their termini.
        node.termini = log.termini
        return node

    def _attach_dynamic(
        self,
        space: dict[str, _Node],
        link: Any,
        terminus: Source | Target,
        sending: bool,
        key: Key,
    ) -> bool:
        found = dynamic_declaration(link, terminus)
        if isinstance(found, Error):
            self._refuse(link, found)
            return True
        declared, lifetime = found
        owner = link.connection
        if self._dynamic[owner] >= self.limits.dynamic_nodes_max:
            raise LinkRefused(
                "the connection has too many dynamic nodes",
                condition="amqp:resource-limit-exceeded",
            )
        terms = answer(
            link,
            declared,
            sending=sending,
            lifetime=lifetime,
            means=Means(room=self.termini.has_room(link), volatile=self.volatile),
            now=self.clock.wall(),
            limits=self.limits,
        )
        if isinstance(terms, Error):
            self._refuse(link, terms)
            return True
        kept = self.termini.find(key)
        if kept is not None:
            kept.interrupt()
            kept.end()
        node = self._make(self._existing(link.peer.virtual_host), declared, owner)
        node.lifetime = lifetime
        if isinstance(node.held, MessageQueue):
            node.held.on_empty = partial(self._judge, space, node)
        self._dynamic[owner] += 1
        self._accept(node, link, terms, sending, key, partial(self._abandon, space, node))
        return True

    def _abandon(self, space: dict[str, _Node], node: _Node) -> None:
        """Note that the link for which a dynamic node was created has ended."""
        node.abandoned = True
        self._judge(space, node)

    def _judge(self, space: dict[str, _Node], node: _Node) -> None:
        """Delete a dynamic node whose lifetime has ended (§3.5.10 to §3.5.13)."""
        if space.get(node.declared.name) is not node:
            return
        lifetime = node.lifetime
        held = node.held
        empty = not (held.available or held.acquired)
        if isinstance(held, MessageQueue):
            empty = empty and not held.delayed
        if isinstance(lifetime, DeleteOnClose):
            over = node.abandoned
        elif isinstance(lifetime, DeleteOnNoMessages):
            over = node.abandoned and empty
        else:
            over = not self._has_links(node)
            if isinstance(lifetime, DeleteOnNoLinksOrMessages):
                over = over and empty
        if over:
            self._leaving.pop(node, None)
            self._delete(space, node)
        elif node.abandoned:
            self._leaving[node] = space

    def _has_links(self, node: _Node) -> bool:
        """Return whether links of *node* are attached or may be resumed."""
        return bool(node.links() or node.termini)

    def _accept(
        self,
        node: _Node,
        link: Any,
        terms: Terms,
        sending: bool,
        key: Key,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        kept = self.termini.find(key)
        if kept is None and (terms.keeps or terms.shared):
            number = 0
            source = terms.source if sending else terms.target
            if isinstance(source, Source | Target) and source.durable and self.journal is not None:
                number = self._new_number()
            kept = self._make_terminus(node, key, terms, number)
            if number:
                self.termini.keep(kept, node.number)
            if on_left is not None:
                kept.on_end.append(on_left)
        elif kept is not None and kept.number:
            kept.agree(terms)
            self.termini.keep(kept, node.number)
        options: dict[str, Any] = {}
        properties = dict(terms.properties or {})
        if isinstance(node.held, MessageLog) and sending:
            properties[Symbol("x-opt-incarnation")] = node.held.incarnation
        elif isinstance(node.held, MessageQueue) and sending and not terms.copies:
            # The answer repeats those properties of the peer that are honoured.
            if terms.priority:
                properties[PRIORITIES[0]] = Int(terms.priority)
            if terms.exclusive:
                properties[EXCLUSIVE] = True
        if properties:
            options["properties"] = properties
        if not sending:
            producer = self._producer(node)
            options["max_message_size"] = self.limits.message_size_max
            if isinstance(producer.ledger, QueueLedger):
                # Larger messages are written to the store while they arrive.
                options["max_message_size"] = self.limits.streaming_message_size_max
                options["stream_above"] = self.limits.message_size_max
            if isinstance(kept, KeptTarget):
                producer.keeper = kept
                producer.note = kept.note
                options["endpoint"] = producer
            self._when_left(node, producer, None if kept is not None else on_left)
            if kept is None:
                link.accept(producer, source=terms.source, target=terms.target, **options)
        elif kept is None:
            batches = isinstance(node.held, MessageLog) and (
                RECORD_BATCHES in link.desired_capabilities
            )
            if batches:
                options["offered_capabilities"] = (RECORD_BATCHES,)
            endpoint = self._consumer(node, terms, batches=batches)
            self._when_left(node, endpoint, on_left)
            if node.on_left is not None:
                endpoint.on_left.append(partial(node.on_left, link))
            link.accept(
                endpoint,
                source=terms.source,
                target=terms.target,
                snd_settle_mode=terms.snd_settle_mode,
                **options,
            )
        if kept is not None:
            if sending and node.on_left is not None:
                kept.on_end.append(partial(node.on_left, link))
            kept.accept(link, terms, **options)

    def _when_left(
        self, node: _Node, endpoint: Any, on_left: Callable[[], None] | None = None
    ) -> None:
        """Call *on_left* when the endpoint's link has ended, and end a dynamic node then if due."""
        if on_left is not None:
            endpoint.on_left.append(on_left)
        if node.lifetime is not None:
            space = self._spaces[node.virtual_host]
            endpoint.on_left.append(partial(self._judge, space, node))

    def _producer(self, node: _Node) -> Producer:
        inlet = node.inlet
        place, ledger = _way_in(node.held, inlet.ledger, node.partition)
        return Producer(
            node.intake,
            place,
            inlet.door,
            inlet.wall,
            ttl_s=inlet.ttl_s,
            ledger=ledger,
            transactions=inlet.transactions,
            volatile=inlet.volatile,
            on_expiring=inlet.on_expiring,
            check=inlet.check,
        )

    def _consumer(self, node: _Node, terms: Terms, *, batches: bool = False) -> Any:
        """Create the endpoint of a link that receives from *node*; from a log also in *batches*."""
        held = node.held
        if isinstance(held, MessageLog):
            return held.subscribe(
                range(len(held.partitions)) if node.partition is None else (node.partition,),
                terms.position,
                settled=terms.settled,
                filters=terms.filters,
                batches=batches,
            )
        subscription: Subscription
        if isinstance(held, MessageTopic):
            subscription = held.subscribe(
                default_outcome=terms.default_outcome,
                outcomes=terms.outcomes,
                settled=terms.settled,
                filters=terms.filters,
            )
        elif terms.copies:
            subscription = held.browse(settled=terms.settled, filters=terms.filters)
        else:
            subscription = held.subscribe(
                default_outcome=terms.default_outcome,
                outcomes=terms.outcomes,
                settled=terms.settled,
                filters=terms.filters,
                priority=terms.priority,
                exclusive=terms.exclusive,
            )
        subscription.transactions = self.transactions
        return subscription

    def _make_terminus(self, node: _Node, key: Key, terms: Terms, number: int) -> Terminus:
        """Create a terminus for a link of *node*, with *number* in the store, 0 for none."""
        held = node.held
        topic = held if isinstance(held, MessageTopic) else None
        terminus: Terminus
        if terms.target is not None and not key[3]:
            terminus = KeptTarget(self.termini, key, terms, number)
        elif terms.shared and topic is not None:
            identity, queue = topic.open(terms.filters)
            terminus = SharedSource(self.termini, key, terms, queue, number)
            terminus.on_end.append(partial(topic.close, identity))
        else:
            terminus = KeptSource(self.termini, key, terms, self._consumer(node, terms), number)
        if topic is not None and terminus.queue is not None:
            identity = topic.identity_of(terminus.queue)
            topic.given_up[identity] = terminus.fail
            if number and self.journal is not None:
                topic.keep(identity, self.journal, number)
        terminus.address = node.declared.name
        terminus.held = held
        terminus.on_end.append(partial(self._ended, node, terminus))
        node.termini[terminus] = None
        self.termini.add(terminus)
        return terminus

    def _ended(self, node: _Node, terminus: Terminus) -> None:
        """Remove *terminus*, which has ended, and its records in the store."""
        node.termini.pop(terminus, None)
        if terminus.number and self.journal is not None:
            unit = self.journal.loose
            facts.TERMINI.forget(unit, facts.key_of(terminus.number))
            for kind, key in terminus.deliveries():
                kind.forget(unit, key)
            if terminus.sending and isinstance(node.held, MessageTopic):
                unit.clear(terminus.number)
        if node.lifetime is not None:
            self._judge(self._spaces[node.virtual_host], node)

    async def wait_kept(self) -> None:
        """Wait until all changes so far are stored and outlive the process."""
        if self.journal is not None:
            await self.journal.wait_kept()

    async def close(self) -> None:
        """Close the store; called when nothing changes any more."""
        if self.journal is not None:
            await self.journal.close()

    # --- Operators ---

    def stats(self, address: str, *, virtual_host: str = "") -> NodeStats:
        """Return the statistics of a node.

        Raises:
            AmqpError: There is no such node.
        """
        node = self._known(self._space(virtual_host), address)
        held = node.held
        counts = held.counts
        return NodeStats(
            name=node.declared.name,
            kind=node.declared.kind,
            dynamic=node.owner is not None,
            available=held.available,
            acquired=held.acquired,
            delayed=held.delayed if isinstance(held, MessageQueue) else 0,
            bytes=held.bytes,
            consumers=len(held.consumers),
            producers=len(node.intake.producers),
            enqueued=counts.enqueued,
            delivered=counts.delivered,
            accepted=counts.accepted,
            requeued=counts.requeued,
            dead_lettered=counts.dead_lettered,
            expired=counts.expired,
            dropped=counts.dropped,
            failure=None if node.failure is None else node.failure.description,
        )

    async def peek(
        self,
        address: str,
        count: int = 1,
        *,
        bytes_max: int = sys.maxsize,
        virtual_host: str = "",
    ) -> list[bytes]:
        """Return the first *count* messages of a queue, encoded as they would be sent now.

        These are the messages that are available or paused after a failure. Messages that are in
        the store only are read, and stay there. Of a message in pieces the body is left out.

        Args:
            address: The queue.
            count: Maximum number of messages.
            bytes_max: Maximum of their bytes in all, which the first may exceed; by default none.
            virtual_host: Virtual host of the queue.

        Raises:
            AmqpError: There is no such queue, or the store cannot be read.
        """
        return await self._peek(self._queue(address, virtual_host), count, bytes_max)

    async def _peek(
        self, queue: MessageQueue, count: int, bytes_max: int = sys.maxsize
    ) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        if self.journal is None:
            entries = queue.peek(count)
        else:
            entries = await self._pager.peek(self.journal, queue, count, bytes_max)
        now = self.clock.wall()
        found: list[bytes] = []
        size = 0
        for entry in entries:
            payload = departing(entry, now) if entry.altered else entry.payload
            encoded = payload if isinstance(payload, bytes) else b"".join(payload)
            size += len(encoded)
            if found and size > bytes_max:
                break
            found.append(encoded)
        return found

    def subscriptions(self, address: str, *, virtual_host: str = "") -> list[SubscriptionStats]:
        """Return the statistics of a topic's subscriptions, in the order of their creation.

        Raises:
            AmqpError: There is no such topic.
        """
        return [stats for stats, _ in self._subscriptions(address, virtual_host)]

    def subscription(
        self, address: str, name: str, *, container: str | None = None, virtual_host: str = ""
    ) -> SubscriptionStats:
        """Return the statistics of a topic's subscription *name*, of *container* if that is given.

        Raises:
            AmqpError: There is no such topic or subscription, or there are several.
        """
        return self._subscription(address, name, container, virtual_host)[0]

    async def peek_subscription(
        self,
        address: str,
        name: str,
        count: int = 1,
        *,
        container: str | None = None,
        virtual_host: str = "",
    ) -> list[bytes]:
        """Return the first *count* available messages of a topic's subscription.

        They are encoded as they would be sent now.

        Raises:
            AmqpError: There is no such topic or subscription, or there are several.
        """
        queue = self._subscription(address, name, container, virtual_host)[1]
        return await self._peek(queue, count)

    def _subscription(
        self, address: str, name: str, container: str | None, virtual_host: str
    ) -> tuple[SubscriptionStats, MessageQueue]:
        every = self._subscriptions(address, virtual_host)
        found = [each for each in every if each[0].name == name]
        if container is not None:
            found = [each for each in found if each[0].container == container]
        if len(found) != 1:
            known = ", ".join(f"{stats.name!r} of {stats.container!r}" for stats, _ in every)
            raise AmqpError(
                f"{address!r} has {len(found) or 'no'} subscriptions {name!r}; there are: "
                f"{known or 'none'}",
                condition="amqp:not-found",
            )
        return found[0]

    def _subscriptions(
        self, address: str, virtual_host: str
    ) -> list[tuple[SubscriptionStats, MessageQueue]]:
        node = self._find(self._space(virtual_host), address)
        topic = node.held
        if not isinstance(topic, MessageTopic):
            raise AmqpError(f"{address!r} is not a topic", condition="amqp:not-allowed")
        kept = {each.queue: each.key for each in node.termini if each.queue is not None}
        found = []
        for queue in topic.queues:
            consumers = list(queue.consumers.values())
            links = [each.link for each in consumers if each.link and each.link.attached]
            if queue in kept:
                _, _, container, _, name, _ = kept[queue]
            elif links:
                container, name = links[0].peer.container_id, links[0].name
            else:
                continue  # its link is being attached
            stats = SubscriptionStats(
                container=container,
                name=name,
                kept=queue in kept,
                available=queue.available,
                acquired=queue.acquired,
                delayed=queue.delayed,
                bytes=queue.bytes,
                consumers=len(links),
            )
            found.append((stats, queue))
        return found

    async def purge(self, address: str, *, virtual_host: str = "") -> int:
        """Drop the messages of a queue that are available or paused; return how many there were.

        Messages that are in the store only are dropped at once, unless each has to be recorded in
        ``$journal``: then they are read first. Cancellation may leave some of them.

        Raises:
            AmqpError: There is no such queue, or the store cannot be read.
        """
        queue = self._queue(address, virtual_host)
        await trio.lowlevel.checkpoint()
        dropped = 0
        if not (self.journal is not None and isinstance(queue, ObservedQueue)):
            dropped = queue.paging.purge()
        return dropped + await self._pager.work_off(self.journal, queue, queue.present, queue.drop)

    def wait_stored(
        self, address: str, on_stored: Callable[[], None], *, virtual_host: str = ""
    ) -> bool:
        """Call *on_stored* once messages that are being stored for a queue have been added to it.

        Return False, without a call, if there are none.
        """
        node = self._space(virtual_host).get(address)
        held = None if node is None else node.held
        if self.journal is None or not isinstance(held, MessageQueue) or not held.pending:
            return False
        self.journal.when_kept(on_stored)
        return True

    def purging(self, address: str, *, virtual_host: str = "") -> Generator[int, None, None]:
        """Purge a queue step by step; yield the number of messages dropped so far.

        Messages that are in the store only are dropped at once, without a record in ``$journal``.

        Raises:
            AmqpError: There is no such queue.
        """
        queue = self._queue(address, virtual_host)
        before = queue.place_next
        dropped = queue.paging.purge()
        while True:
            some = queue.drop(STEP, before)
            dropped += some
            yield dropped
            if some < STEP:
                return

    async def move(self, address: str, to: str, count: int, *, virtual_host: str = "") -> int:
        """Move the first *count* messages of a queue to another node, in order.

        These are the messages that are available or paused after a failure. Each is in one of the
        two nodes whenever the broker stops. Messages that are in the store only are read a chunk at
        a time; after cancellation or an error, some may have been moved.

        Returns:
            The number of messages moved.

        Raises:
            AmqpError: There is no such queue, or no such node to move to; a message is too large for
                that node; or the store cannot be read.
        """
        queue = self._queue(address, virtual_host)
        target = self._find(self._space(virtual_host), to)
        if target.is_sealed:
            raise AmqpError(_SEALED.description or "", condition=_SEALED.condition)
        if target.held is queue:
            raise AmqpError(f"{to!r} is where they are", condition="amqp:not-allowed")
        await trio.lowlevel.checkpoint()
        return await self._pager.work_off(
            self.journal, queue, count, partial(self._pass_on, queue, target)
        )

    def _pass_on(self, queue: MessageQueue, target: _Node, count: int, before: int) -> int:
        """Move up to *count* messages in memory with sequence numbers below *before*.

        Return their number.

        Raises:
            AmqpError: *target* has been deleted, or is no stored queue and a message is in pieces.
        """
        if target.held.deleted:
            raise AmqpError(
                f"{target.declared.name!r} has been deleted", condition="amqp:resource-deleted"
            )
        if not isinstance(target.ledger, QueueLedger) and any(
            entry.pieces for entry in queue.peek(count, before=before)
        ):
            raise AmqpError(
                f"there are messages that are too large for {target.declared.name!r}, which is no"
                " queue in the store",
                condition="amqp:link:message-size-exceeded",
            )
        entries = queue.withdraw(count, before)
        for entry in entries:
            target.inlet.take(entry.again())
        return len(entries)

    async def commit_epoch(
        self,
        address: str,
        producer: str,
        run: str,
        epoch: int,
        parts: Sequence[tuple[int, int, int, int]],
        *,
        write: str = "",
        query: str = "",
        plan: str = "",
        content: str = "",
        skip_different: bool = False,
        virtual_host: str = "",
    ) -> bool:
        """Publish the messages staged at *address*, once; see :mod:`~amqp_rt.broker.staging`.

        Args:
            address: The node.
            producer: Name of the producer.
            run: Its run: the latest one, or a new one.
            epoch: Number of the epoch to commit: the last committed one, or a higher one.
            parts: For each part ``(part, attempt, count, crc)``: the attempt to publish, and the
                number and CRC-32 of its messages.
            write: Name of the write, of which an epoch may have several.
            query: Id of the computation that produced the messages.
            plan: The input that was planned for the computation, if known.
            content: Value that identifies the messages in any order, such as a digest; by default
                it is computed from *parts*.
            skip_different: Whether an earlier commit of the epoch counts as this one even if it was
                different.
            virtual_host: Virtual host of the node.

        Returns:
            Whether this call published the messages; False if they were published before.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.staging.Staging.commit`, or there is no such
                node.
        """
        node = self._find(self._space(virtual_host), address)
        named = [Part(*each) for each in parts]
        return await self.staging.commit(
            node,
            producer,
            run,
            epoch,
            named,
            Identity(write, query, plan, content),
            skip_different=skip_different,
        )

    async def count_staged(
        self,
        address: str,
        producer: str,
        run: str,
        epoch: int,
        part: int,
        attempt: int,
        *,
        virtual_host: str = "",
    ) -> tuple[int, int]:
        """Return the number of messages that an attempt has staged at *address*, and their CRC-32.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.staging.Staging.count`, or there is no such node.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.staging.count(node, Claim(producer, run, epoch, part, attempt))

    def committed_epoch(self, address: str, producer: str, *, virtual_host: str = "") -> int:
        """Return the epoch that *producer* committed last at *address*, -1 if none.

        Raises:
            AmqpError: There is no such node.
        """
        return self.staging.committed(self._find(self._space(virtual_host), address), producer)

    def committed_query(self, address: str, producer: str, *, virtual_host: str = "") -> str:
        """Return the query of the last epoch of *producer* at *address*; empty if none is known.

        Raises:
            AmqpError: There is no such node.
        """
        return self.staging.query(self._find(self._space(virtual_host), address), producer)

    # --- Leases ---

    async def open_lease(
        self, address: str, group: str, ttl_s: float | None = None, *, virtual_host: str = ""
    ) -> LeaseState:
        """Open *group*, which sets messages of a queue aside; see :mod:`~amqp_rt.broker.leases`.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.leases.Leases.open`, or there is no such queue.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.leases.open(node, group, ttl_s)

    def lease_state(
        self, address: str, group: str, id_: object = None, *, virtual_host: str = ""
    ) -> LeaseState:
        """Return the progress of *group*, whose id must be *id_* unless that is None.

        Raises:
            AmqpError: There is no such queue or group, or the group has another id.
        """
        return self.leases.state(self._find(self._space(virtual_host), address), group, id_)

    async def lease(
        self, address: str, group: str, generation: int, count: int, *, virtual_host: str = ""
    ) -> LeaseState:
        """Set up to *count* more messages aside for *group*.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.leases.Leases.extend`, or there is no such queue.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.leases.extend(node, group, generation, count)

    async def accept_lease(
        self, address: str, group: str, generation: int, to: int, *, virtual_host: str = ""
    ) -> LeaseState:
        """Accept the messages of *group* whose numbers are below *to*.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.leases.Leases.accept`, or there is no such queue.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.leases.accept(node, group, generation, to)

    async def return_lease(
        self,
        address: str,
        group: str,
        generation: int,
        ranges: Sequence[tuple[int, int]],
        *,
        virtual_host: str = "",
    ) -> LeaseState:
        """Return *ranges* of the messages of *group* to the queue.

        Raises:
            AmqpError: As for :meth:`~amqp_rt.broker.leases.Leases.give_back`, or there is no such
                queue.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.leases.give_back(node, group, generation, ranges)

    async def release_lease(self, address: str, group: str, *, virtual_host: str = "") -> int:
        """Remove *group*, and return the number of its messages, which return to the queue.

        Raises:
            AmqpError: There is no such queue, or no such group.
        """
        node = self._find(self._space(virtual_host), address)
        return await self.leases.release(node, group)

    # --- Logs ---

    def _log(self, address: str, virtual_host: str) -> MessageLog:
        node = self._find(self._space(virtual_host), address)
        if not isinstance(node.held, MessageLog):
            raise AmqpError(f"{address!r} is not a {LOG}", condition="amqp:not-allowed")
        return node.held

    def log_stats(self, address: str, *, virtual_host: str = "") -> LogStats:
        """Return the statistics of a log.

        Raises:
            AmqpError: There is no such log.
        """
        log = self._log(address, virtual_host)
        return LogStats(
            name=address,
            incarnation=log.incarnation,
            partitions=[
                PartitionStats(
                    partition=partition.index,
                    first=partition.first,
                    next=partition.next,
                    bytes=partition.bytes,
                    last_enqueued_ms=None if partition.last_ms < 0 else partition.last_ms,
                )
                for partition in log.partitions
            ],
            groups=sorted(log.cursors),
            eras=[EraStats(id=era.id, starts=era.starts) for era in log.eras],
        )

    async def purge_log(self, address: str, *, virtual_host: str = "") -> int:
        """Drop the records of a log without a hold, in whole chunks; return how many there were.

        Later records continue the offsets. Cancellation may leave the records dropped or not.

        Raises:
            AmqpError: There is no such log, or the store refuses the change.
        """
        return await self._log(address, virtual_host).purge()

    def cursor(self, address: str, group: str, *, virtual_host: str = "") -> dict[int, int]:
        """Return the cursor of *group* in a log: an offset for each partition that it has set.

        Raises:
            AmqpError: There is no such log.
        """
        return dict(self._log(address, virtual_host).cursors.get(group, {}))

    async def set_cursor(
        self,
        address: str,
        group: str,
        offsets: Mapping[int, int],
        *,
        incarnation: str | None = None,
        virtual_host: str = "",
    ) -> None:
        """Set the cursor of *group* in the partitions of *offsets*; without any, delete it.

        With a store, the cursor is stored when this returns.

        Args:
            address: The log.
            group: Name of the group.
            offsets: Partition → offset of the next record to read.
            incarnation: Expected incarnation of the log; None for any.
            virtual_host: Virtual host of the log.

        Raises:
            AmqpError: There is no such log or partition, the log has another incarnation or was
                deleted in the meantime, it has too many groups, or the store refuses the change.
        """
        log = self._log(address, virtual_host)
        async with log.noting:
            self._check_log(address, log, incarnation)
            if group not in log.cursors and len(log.cursors) >= self.limits.log_groups_max:
                raise AmqpError(
                    f"{address!r} has {len(log.cursors)} groups already",
                    condition="amqp:resource-limit-exceeded",
                )
            kept = _offsets(address, log, offsets)
            if kept:
                kept = {**log.cursors.get(group, {}), **kept}
            note = partial(log.set_cursor, group, kept)
            await self._remember(log, facts.CURSORS, group, kept or None, note)
            self._check_log(address, log, incarnation)

    async def hold(
        self,
        address: str,
        holder: str,
        offsets: Mapping[int, int],
        for_s: float,
        *,
        incarnation: str | None = None,
        virtual_host: str = "",
    ) -> None:
        """Exempt the records from *offsets* on from retention for *for_s* seconds.

        The hold replaces an earlier one of *holder*; without offsets it is removed.

        Args:
            address: The log.
            holder: Name of the holder.
            offsets: Partition → offset of the first record to hold.
            for_s: Duration in seconds.
            incarnation: Expected incarnation of the log; None for any.
            virtual_host: Virtual host of the log.

        Raises:
            AmqpError: As for :meth:`set_cursor`, or the duration is too long, or there are too many
                holders.
        """
        log = self._log(address, virtual_host)
        limits = self.limits
        if not 0 <= for_s <= limits.log_hold_max_s:
            raise AmqpError(
                f"records are held for 0 to {limits.log_hold_max_s:g} seconds",
                condition="amqp:not-allowed",
            )
        _check_note(holder)
        async with log.noting:
            self._check_log(address, log, incarnation)
            if holder not in log.holds and len(log.holds) >= limits.log_holds_max:
                raise AmqpError(
                    f"{address!r} is held by {len(log.holds)} already",
                    condition="amqp:resource-limit-exceeded",
                )
            held = _offsets(address, log, offsets), self.clock.wall() + for_s
            before = log.holds.get(holder)
            # Set before it is stored, because a sweep could run in between.
            log.set_hold(holder, held)
            note = partial(log.set_hold, holder, held)
            try:
                await self._remember(log, facts.HOLDS, holder, held if held[0] else None, note)
            except AmqpError:
                log.set_hold(holder, before)
                raise
            self._check_log(address, log, incarnation)

    def _check_log(self, address: str, log: MessageLog, incarnation: str | None) -> None:
        """Check that *log* has not been deleted in the meantime, and has the expected incarnation.

        Raises:
            AmqpError: It was deleted, or has another incarnation.
        """
        if log not in self._logs:
            raise AmqpError(f"{address!r} was deleted meanwhile", condition="amqp:resource-deleted")
        _check_incarnation(address, log, incarnation)

    async def _remember(
        self,
        log: MessageLog,
        kind: FactKind[Any],
        name: str,
        value: Any,
        note: Callable[[], None],
    ) -> None:
        """Store the fact *name* of *log*, or delete it without a *value*, and call *note* then.

        *note* is not left to the caller, which may be cancelled while the fact is being written.
        """
        _check_note(name)
        journal = self.journal
        if journal is None or log.reading is None:
            await trio.lowlevel.checkpoint()
            note()
            return
        key = facts.name_key(self._logs[log], name)

        def kept() -> None:
            if log in self._logs:
                note()
            elif value is not None:
                # The log was deleted in the meantime, when it did not have this fact yet.
                kind.forget(journal.loose, key)

        def fill(unit: Unit) -> None:
            if value is None:
                kind.forget(unit, key)
            else:
                kind.keep(unit, key, value)
            unit.then(kept)

        await journal.keep(fill)

    def _queue(self, address: str, virtual_host: str) -> MessageQueue:
        node = self._find(self._space(virtual_host), address)
        if not isinstance(node.held, MessageQueue):
            raise AmqpError(f"{address!r} is not a {QUEUE}", condition="amqp:not-allowed")
        return node.held

    # --- Faults ---

    def guard(self, owner: object, call: Callable[[], object]) -> None:
        """Call *call*, work of *owner*; an unexpected error takes only its node out of service."""
        try:
            call()
        except Exception as error:
            self.fail(owner, error)

    def fail(self, owner: object, error: Exception) -> AmqpError:
        """Take the node of *owner* out of service, because its work raised *error*.

        The links of the node are detached, and requests for it are refused until the broker is
        restarted and restores it from the store. Later changes of the node in memory are not
        stored; pending writes are.

        Args:
            owner: The node, its queue, topic or log, its inlet, its duplicate-detection window, or
                a subscriber's queue; None for work of no node.
            error: The exception.

        Returns:
            The error with which to refuse the work that failed.
        """
        node = self._node_of(owner)
        if node is None:
            _log.error("an unexpected error of no node that is there: %r", owner, exc_info=error)
            return AmqpError(
                "an unexpected error in the broker, whose log has it",
                condition="amqp:internal-error",
            )
        if node.failure is not None:
            _log.debug("the node %r has failed again", node.declared.name, exc_info=error)
            return node.failure
        _log.error(
            "node failed: %r of virtual host %r: out of service until the broker is started again",
            node.declared.name,
            node.virtual_host,
            exc_info=error,
        )
        failure = node.failure = AmqpError(
            f"{node.declared.name!r} is out of service after an unexpected error, which is in the "
            "broker's log: start the broker again to continue with the contents of its store",
            condition="amqp:internal-error",
        )
        held = node.held
        queues = held.queues if isinstance(held, MessageTopic) else [held]
        held.deleted = True
        for each in queues:
            each.deleted = True
            if isinstance(each, MessageQueue):
                self._pager.dismiss(each, failure)
        if isinstance(held, MessageLog):
            held.failed = True
        else:
            self._expiring.pop(held, None)
        self._leaving.pop(node, None)
        kept: set[Any] = set()
        for terminus in node.termini:
            # Its countdown continues when its peer can attach again, after the restart.
            terminus.frozen = True
            terminus.stay()
            kept.update(terminus.links())
        said = Error.of(failure)
        for link in node.links():
            raw = getattr(link, "raw", link)
            try:
                link.detach(said, closed=raw not in kept)
            except Exception:
                _log.exception("link not detached: %r of %r", link.name, node.declared.name)
        return failure

    def _journal_fault(self, virtual_host: str, error: Exception) -> None:
        self.fail(self._spaces[virtual_host].get(JOURNAL), error)

    def _node_of(self, owner: object) -> _Node | None:
        """Return the node that *owner* is or belongs to; None if there is none."""
        if owner is None:
            # Most nodes have no duplicate-detection window: None would match the first of them.
            return None
        for space in self._spaces.values():
            for node in space.values():
                held = node.held
                if owner in (node, held, node.inlet, node.intake.duplicates):
                    return node
                if isinstance(held, MessageTopic) and owner in held.queues:
                    return node
        return None

    # --- Time ---

    def do_in_turns(self, steps: Iterator[None]) -> None:
        """Do *steps*, as many as this turn allows now and the rest in later ones.

        Each may take as long as concluding a delivery.
        """
        _Steps(self, steps, 1).resume()

    def go_on_later(self, work: Resumable) -> None:
        """Call ``resume`` of *work* in the next turn, after work that was deferred before."""
        self._unfinished.append(work)
        self._looking.set()

    def look_on(self) -> None:
        """Continue deferred work, each object once at most, as far as one turn allows."""
        memory = self.memory
        memory.work = WORK_OF_A_TURN
        unfinished = self._unfinished
        for _ in range(len(unfinished)):
            if memory.work <= 0:
                break
            memory.work -= _WORK_OF_A_CALL
            held = unfinished.popleft()
            self.guard(held, held.resume)
        if unfinished:
            self._looking.set()
        else:
            memory.work = WORK_OF_A_TURN

    def _finish(self) -> None:
        """Finish deferred conclusions and staging before the store is closed: no turns follow."""
        for held in list(self._unfinished):
            if isinstance(held, MessageQueue):
                self.guard(held, held.conclude_all_left)
            elif isinstance(held, MessageTopic):
                self.guard(held, held.stage_all)

    async def _look_on_always(self) -> None:
        while True:
            await self._looking.wait()
            self._looking = trio.Event()
            self.look_on()
            await trio.lowlevel.checkpoint()

    def _set_alarm(self, held: MessageQueue, at: float) -> None:
        self._alarms_set += 1
        if len(self._alarms) >= self._alarms_max:
            # Drop alarms of deleted queues, and those replaced by another time.
            self._alarms = [
                alarm
                for alarm in self._alarms
                if alarm[2].alarm == alarm[0] and not alarm[2].deleted
            ]
            heapq.heapify(self._alarms)
            self._alarms_max = 2 * len(self._alarms) + 64
        heapq.heappush(self._alarms, (at, self._alarms_set, held))
        self._alarmed.set()

    def tick(self) -> None:
        """Call queues whose alarm is due, such as for delayed messages or expired locks.

        Alarms beyond the work of one turn stay due.
        """
        memory = self.memory
        memory.work = WORK_OF_A_TURN
        alarms = self._alarms
        now = self.clock.monotonic()
        while alarms and alarms[0][0] <= now and memory.work > 0:
            at, _, held = heapq.heappop(alarms)
            memory.work -= 1
            if held.alarm == at:
                memory.work -= _WORK_OF_A_CALL
                self.guard(held, held.tick)

    async def _tick_always(self) -> None:
        while True:
            self._alarmed = trio.Event()
            wait_s = self._alarms[0][0] - self.clock.monotonic() if self._alarms else inf
            with trio.move_on_after(max(0.0, wait_s)):
                await self._alarmed.wait()
            self.tick()

    def sweep(self) -> None:
        """Do periodic work: expire messages, termini, stages and leases, and apply retention.

        Messages at the front of queues expire without a consumer; retention is that of logs in
        memory. Overdue transactions are rolled back.
        """
        self.tick()
        guard = self.guard
        for roll_back in self.transactions.overdue():
            guard(None, roll_back)
        self.termini.forget_answered()
        for terminus in self.termini.due():
            guard(terminus.held, terminus.end)
        self.staging.sweep()
        self.leases.sweep()
        if self.ways is not None:
            guard(None, self.ways.sweep)
        if self._round is None or self._round.over:
            # Only after the round before has finished: many nodes take more than one turn.
            self._round = _Steps(self, self._sweep_nodes(), 2)
            self._round.resume()

    def _sweep_nodes(self) -> Generator[None, None, None]:
        """Sweep one node, or one part of a node, in each step."""
        guard = self.guard
        for duplicates in list(self._windows):
            guard(duplicates, duplicates.expire)
            yield
        for node, space in list(self._leaving.items()):
            guard(node, partial(self._judge, space, node))
            yield
        for held in list(self._expiring):
            guard(held, held.sweep)
            delayed = held.delayed if isinstance(held, MessageQueue) else 0
            if not held.available and not held.acquired and not delayed:
                self._expiring.pop(held, None)
            yield
        for log, number in list(self._logs.items()):
            if log in self._logs and not log.failed:
                guard(log, partial(self._sweep_log, log, number))
            yield

    def _sweep_log(self, log: MessageLog, number: int) -> None:
        log.sweep()
        for holder in log.expire_holds():
            if number and self.journal is not None:
                facts.HOLDS.forget(self.journal.loose, facts.name_key(number, holder))

    def catch_up(self) -> None:
        """Do work that has become due and recompute the next wake-up, after the clock was moved."""
        self.sweep()
        self._alarmed.set()

    async def _retain_always(self, interval_s: float) -> None:
        """Apply retention to logs in the store every *interval_s* seconds."""
        while True:
            await trio.sleep(interval_s)
            for log in list(self._logs):
                if log.failed:
                    continue
                try:
                    await log.retain()
                except AmqpError as error:
                    _log.error("a log goes on without retention for now: %s", error)
                except Exception as error:
                    self.fail(log, error)

    async def run(self, *, interval_s: float = 1.0) -> None:
        """Store changes, and sweep every *interval_s* seconds, until cancelled.

        Changes made before the cancellation are stored.
        """
        if isinstance(self.clock, RunClock):
            self.clock.begin()
        async with trio.open_nursery() as nursery:
            if self.journal is not None:
                nursery.start_soon(self.journal.run)
                nursery.start_soon(self._pager.run, self.journal)
                nursery.start_soon(self._retain_always, interval_s)
            if self._reading is not None:
                nursery.start_soon(self._reading.run)
            nursery.start_soon(self._look_on_always)
            nursery.start_soon(self._tick_always)
            nursery.start_soon(self.staging.run)
            if self.journals is not None:
                nursery.start_soon(self.journals.run)
            while True:
                await trio.sleep(interval_s)
                self.sweep()
