"""Objects that all nodes of a broker share: store, clock, memory, turns, transactions, termini and others."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ..annotations import AnnotationPolicy
from ..clock import Clock
from ..errors import AmqpError
from ..events import Peer
from ..fronts.base import LinkConnection, ReceivingEndpoint, ReceivingLink
from ..limits import Limits
from ..loglimit import LogLimiter
from ..observers import ObservedLink, Observer, bind
from ..outcomes import Error
from ..tallies import BoundedCounts
from .branches.registry import Branches
from .durable.duplicates import Duplicates
from .durable.journal import Journal
from .durable.pager import Pager
from .entries import Entry, EntryFactory
from .filtering.plugin_filters import FilterTypes
from .leases import Leases
from .lifecycles import Journals
from .log.log import MessageLog
from .log.storage import LogStorage
from .observed_intake import ObservedEntryFactory
from .queue.accounts import Memory
from .scheduler import Scheduler
from .staging.staging import Staging
from .termini import Termini
from .transactions import Transactions


class RoutedAddresses(Protocol):
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

    def dead_letter_nodes(
        self, virtual_host: str, address: str, entry: Entry, *, diverted: bool = False
    ) -> Sequence[str] | None:
        """Return the nodes for a dead letter to *address*; None if it is not such an address.

        With *diverted* it is an alternate address, and none is followed from there.

        Raises:
            AmqpError: Nothing exists at *address*, or the message is malformed.
        """

    def drops_dead_letters(self, virtual_host: str, address: str) -> bool:
        """Return whether *address* exists and can never lead a dead letter to a node."""

    async def restore(self, journal: Journal) -> None:
        """Restore stored declarations, after all nodes were restored."""

    def sweep(self) -> None:
        """Delete queues that were unused for too long; called periodically."""


class PeriodicNode(Protocol):
    """Node, as far as periodic work needs it."""

    @property
    def is_empty(self) -> bool:
        """Whether the node has no messages."""

    def sweep(self) -> None:
        """Do periodic work, such as to expire messages at the front of a queue."""

    def end_if_due(self) -> None:
        """Delete a dynamic node whose lifetime has ended."""


class Services:
    """Objects that all nodes of a broker share.

    Args:
        limits: Bounds.
        clock: Clock of times to live, locks and schedules.
        annotations: Policy for unknown annotation keys.
        journal: Stores nodes and durable messages; None to keep everything in memory.
        volatile: Whether durable messages are accepted without a journal.
        guard: Makes a call on behalf of an object; an exception concerns only the node of that object.
        fail: Takes the node of an object out of service after an exception.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        clock: Clock,
        annotations: AnnotationPolicy,
        journal: Journal | None,
        volatile: bool,
        guard: Callable[[object, Callable[[], object]], None],
        fail: Callable[[object, Exception], AmqpError],
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.journal = journal
        self.volatile = volatile
        self.guard = guard
        self.fail = fail
        self.memory = Memory(limits.broker_bytes_max)
        self.entry_factory = EntryFactory(annotations, limits)
        self._entry_factories = {annotations: self.entry_factory}
        #: Observers of the messages that nodes take in, asked when a node is made.
        self.observers: Sequence[Observer] = ()
        #: Filter types of the application and of plug-ins.
        self.filters = FilterTypes()
        self.turns = Scheduler(self.memory, clock, guard)
        self.transactions = Transactions(journal, clock.monotonic, limits, self.do_in_turns)
        self.branches = Branches(journal, self.transactions, clock, limits, self.new_number, guard)
        self.termini = Termini(journal, clock, self.transactions, limits)
        self.staging = Staging(self.memory, journal, clock, limits, self.new_number, fail)
        self.leases = Leases(journal, clock, limits, self.new_number, fail)
        self.log_storage = None if journal is None else LogStorage(journal, limits, fail)
        self.pager = Pager(limits, fail)
        self.log_limiter = LogLimiter(limits)
        #: Records events of messages in ``$journal``; None to record none.
        self.journals: Journals | None = None
        #: Id of the era of all logs that begins with this start of the broker.
        self.era = uuid.uuid4().hex[:16]
        #: Returns whether a peer may send to an address; None if all may. Called only for messages
        #: that the broker returns to the ``reply-to`` of a peer.
        self.may_send: Callable[[Peer, str], bool] | None = None
        #: Addresses that lead to several nodes at once; None if there are none.
        self.routed_addresses: RoutedAddresses | None = None
        #: Called with virtual host and name after a node is deleted, so that dependants such as
        #: bindings can be removed.
        self.on_deleted: Callable[[str, str], None] | None = None
        #: Links that nodes have refused, by condition, and messages dead-lettered by reason.
        self.refused = BoundedCounts()
        self.dead_lettered = BoundedCounts()
        #: Number of the next object in the store.
        self.number = 1
        #: Number of nodes in all virtual hosts, and of dynamic nodes by connection.
        self.node_count = 0
        self.dynamic: Counter[LinkConnection] = Counter()
        #: Nodes for the periodic sweep: those that may hold messages with a time to live, and dynamic
        #: ones to be deleted once they are empty or without links, as their lifetimes require.
        self.expiring: dict[PeriodicNode, None] = {}
        self.leaving: dict[PeriodicNode, None] = {}
        #: Duplicate-detection windows of the queues that have one.
        self.windows: dict[Duplicates, None] = {}
        #: Logs and their nodes.
        self.logs: dict[MessageLog, PeriodicNode] = {}

    def do_in_turns(self, steps: Iterator[None]) -> None:
        """Do *steps*, as many as this turn allows now and the rest in later ones."""
        self.turns.do_in_turns(steps)

    def entry_factory_for(
        self, annotations: AnnotationPolicy | None, address: str, *, temporary: bool = False
    ) -> EntryFactory:
        """Return the factory of entries for the node at *address*, which is *temporary* if it is one client's.

        It checks annotations by the policy *annotations*; None for that of the broker.
        """
        if annotations is None:
            annotations = self.entry_factory.annotations
        observer = bind(
            self.observers, ObservedLink(kind="relay", address=address, temporary=temporary)
        )
        if observer is not None:
            return ObservedEntryFactory(annotations, self.limits, observer)
        found = self._entry_factories.get(annotations)
        if found is None:
            found = self._entry_factories[annotations] = EntryFactory(annotations, self.limits)
        return found

    def new_number(self) -> int:
        """Return a number that no other object has in the store."""
        number = self.number
        self.number += 1
        return number

    def reserve_numbers(self, first: int, count: int = 1) -> None:
        """Exclude *count* numbers from *first* on from those of new objects."""
        self.number = max(self.number, first + count)
