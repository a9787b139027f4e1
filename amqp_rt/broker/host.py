"""Broker without a network: virtual hosts with their nodes, and the services that these share.

A :class:`BrokerHost` is one of the places where a container looks for an address
(:class:`~amqp_rt.fronts.base.Host`). It knows links, credit, deliveries and outcomes, but no wire
protocol, so that links of every front can attach to its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import trio

from ..addresses import EXCHANGES
from ..annotations import AnnotationPolicy
from ..clock import Clock
from ..errors import AmqpError
from ..fronts.base import IncomingDelivery, ReceivingEndpoint, ReceivingLink, SendingLink
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error, Rejected, Released
from ..termini import SHARED_SUBS, Source, Target
from .attaching import LinkAcceptor
from .clocks import RunClock
from .durable.journal import Journal
from .faults import Faults
from .kinds.base import Node
from .kinds.logs import LogNode
from .kinds.queues import QueueNode
from .kinds.schedules import ScheduleNode
from .kinds.topics import TopicNode
from .lifecycles import JOURNAL, Journals, LifeCycles
from .log.log import MessageLog
from .nodes import Declaration
from .restoring import restore
from .scheduler import Alarmed
from .services import Services
from .spaces import VirtualHost, VirtualHosts
from .sweeping import Sweeper

__all__ = ["KINDS_OF_NODES", "BrokerHost"]

#: Kinds of nodes that every broker has.
KINDS_OF_NODES: Final[tuple[type[Node], ...]] = (
    QueueNode,
    TopicNode,
    LogNode,
    ScheduleNode,
)


class BrokerHost:
    """Nodes of all virtual hosts, and what attaches to them.

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
        kinds: Kinds of nodes.
    """

    #: Several links can share a subscription.
    capabilities = (SHARED_SUBS,)
    #: Control links of transactions can be attached.
    coordinates = True

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
        kinds: Iterable[type[Node]] = KINDS_OF_NODES,
    ) -> None:
        self.limits = limits
        self.clock = clock or RunClock()
        self.journal = journal
        self._faults = Faults(self._owner_of)
        self.services = services = Services(
            limits=limits,
            clock=self.clock,
            annotations=annotations,
            journal=journal,
            volatile=volatile,
            guard=self.guard,
            fail=self.fail,
        )
        if life_cycles is not None:
            services.journals = Journals(life_cycles, self.clock, limits, self._journal_fault)
        self.spaces = VirtualHosts(services, kinds, auto_create, virtual_hosts)
        self.memory = services.memory
        self.turns = services.turns
        self.transactions = services.transactions
        self.termini = services.termini
        self.staging = services.staging
        self.leases = services.leases
        self._acceptor = LinkAcceptor(services, self.spaces)
        self._sweeper = Sweeper(services)
        if journal is not None:
            journal.on_failure = self._detach_consumers
            journal.on_fault = self.fail
            journal.on_end = self.turns.finish

    def __repr__(self) -> str:
        return f"<BrokerHost: {self.services.node_count} nodes, {self.memory.held} bytes>"

    # --- Virtual hosts ---

    def space(self, virtual_host: str = "") -> VirtualHost:
        """Return *virtual_host* if it exists, and the default one otherwise."""
        return self.spaces.get(virtual_host)

    def virtual_hosts(self) -> list[str]:
        """Return the names of the virtual hosts; "" is the default one."""
        return self.spaces.names()

    def virtual_host(self, hostname: str) -> str | None:
        """Return the virtual host for peers that connect to *hostname*, None if there is none."""
        return self.spaces.named(hostname)

    def log(self, name: str, virtual_host: str = "") -> MessageLog:
        """Return the records of the log *name*, for add-ons that read it in their own way.

        Raises:
            AmqpError: There is no such log.
        """
        return self.space(virtual_host).find_kind(name, LogNode).held

    # --- Links (fronts.base.Host) ---

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*; return False if its address is not ours."""
        return self._acceptor.attach(link)

    def kept_source(self, link: SendingLink) -> Source | None:
        """Return the source kept for *link*, whose peer gives none; None if none is kept.

        Raises:
            AmqpError: It is that of a shared subscription with attached links.
        """
        return self._acceptor.kept_source(link)

    def kept_terminus(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """Return the terminus kept under the name of *link* for any user; None if there is none."""
        return self._acceptor.kept_terminus(link)

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* on *link*, which has an anonymous terminus.

        None if the address is not ours, an error if it cannot be used.
        """
        return self._acceptor.relay(address, link)

    def hold_post(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Delay the discharge of the transaction in which *delivery* is posted."""
        self.transactions.hold_post(link, delivery)

    def release_post(self, delivery: IncomingDelivery) -> None:
        """Stop delaying the discharge for *delivery*, which was taken or refused."""
        self.transactions.release_post(delivery)

    def refuse_post(
        self, link: ReceivingLink, delivery: IncomingDelivery, outcome: Rejected | Released
    ) -> bool:
        """Refuse *delivery* within its transaction; return False if there is none."""
        transaction = self.transactions.find_for(link, delivery)
        if transaction is None:
            return False
        transaction.refuse(delivery, outcome)
        return True

    def own_name(self, address: str, virtual_host: str) -> str:
        """Return the name under which rights at *address* are granted.

        For an alias this is the name of its node, for an exchange its address without routing key.
        """
        ways = self.services.routed_addresses
        if ways is not None and address.startswith(EXCHANGES):
            return ways.own_name(address)
        return self.spaces.get(virtual_host).aliases.get(address, address)

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Return whether *address* is that of a dynamic node."""
        return self.spaces.get(virtual_host).is_dynamic(address)

    # --- Lists of addresses (fronts.hosts.ListedHost) ---

    @property
    def on_address(self) -> Callable[[str], None] | None:
        """Called with each name that has been added to the default virtual host, or removed."""
        return self.space().on_change

    @on_address.setter
    def on_address(self, call: Callable[[str], None] | None) -> None:
        self.space().on_change = call

    def addresses(self) -> list[str]:
        """Return the names of the nodes of the default virtual host that any peer can use."""
        return [each for each in self.space().names if self.lists(each)]

    def lists(self, address: str) -> bool:
        """Return whether *address* is the name of such a node."""
        return self.space().is_open(address) and not address.startswith("$")

    # --- Faults and time ---

    def _owner_of(self, owner: object) -> Node | None:
        return self.spaces.owner_of(owner)

    def guard(self, owner: object, call: Callable[[], object]) -> None:
        """Call *call*, work of *owner*; an unexpected error takes only its node out of service."""
        self._faults.guard(owner, call)

    def fail(self, owner: object, error: Exception) -> AmqpError:
        """Take the node of *owner* out of service, because its work raised *error*.

        Return the error with which to refuse the work that failed; see :meth:`Faults.fail`.
        """
        return self._faults.fail(owner, error)

    def _journal_fault(self, virtual_host: str, error: Exception) -> None:
        self.fail(self.spaces.open(virtual_host).nodes.get(JOURNAL), error)

    def _detach_consumers(self, error: Error) -> None:
        """Detach the consumers of stored messages, since the store was given up."""
        for node in self.spaces.nodes():
            node.detach_consumers(error)

    def unready(self) -> Iterator[str]:
        """Yield why no work is taken: the store has failed, or is not open."""
        journal = self.journal
        if journal is not None and journal.failure is not None:
            yield f"the store has failed: {journal.failure.description}"
        elif journal is not None and not journal.is_open:
            yield f"standby: {journal.standby}" if journal.standby else "the store is not open"

    def sweep(self) -> None:
        """Do periodic work: expire messages, termini, stages and leases, and apply retention."""
        self._sweeper.sweep()

    def catch_up(self) -> None:
        """Do work that has become due and recompute the next wake-up, after the clock was moved.

        Alarms beyond the work of one turn go off in the next ones.
        """
        self.sweep()
        self.turns.tick()
        self.turns.wake()

    def set_alarm(self, alarmed: Alarmed, at: float) -> None:
        """Call ``tick`` of *alarmed* when the clock is at *at*, in its ``monotonic`` seconds.

        The call is left out if ``alarm`` of *alarmed* is another time by then, or ``deleted`` is set: to
        move an alarm, set ``alarm`` and call this again. An exception in ``tick`` is logged.
        """
        self.turns.set_alarm(alarmed, at)

    # --- Running ---

    async def restore(self) -> None:
        """Open the store, and restore its nodes and messages.

        Raises:
            AmqpError: The store cannot be opened, or has records unknown to this release.
        """
        if isinstance(self.clock, RunClock):
            self.clock.begin()
        await restore(self.services, self.spaces)

    def declare_journals(self) -> None:
        """Create ``$journal`` in each virtual host, if events of messages are recorded."""
        for space in self.spaces:
            space.declare_journal()

    async def run(self, *, interval_s: float = 1.0) -> None:
        """Store changes, and sweep every *interval_s* seconds, until cancelled.

        Changes made before the cancellation are stored.
        """
        services = self.services
        if isinstance(self.clock, RunClock):
            self.clock.begin()
        async with trio.open_nursery() as nursery:
            if self.journal is not None:
                nursery.start_soon(self.journal.run)
                nursery.start_soon(services.pager.run, self.journal)
                nursery.start_soon(self._sweeper.retain, interval_s)
            if services.log_storage is not None:
                nursery.start_soon(services.log_storage.run)
            nursery.start_soon(self.turns.run)
            nursery.start_soon(self.turns.run_alarms)
            nursery.start_soon(self.staging.commits.run)
            if services.journals is not None:
                nursery.start_soon(services.journals.run)
            while True:
                await trio.sleep(interval_s)
                self.sweep()

    async def wait_kept(self) -> None:
        """Wait until all changes so far are stored and outlive the process."""
        if self.journal is not None:
            await self.journal.wait_kept()

    async def close(self) -> None:
        """Close the store; called when nothing changes any more."""
        if self.journal is not None:
            await self.journal.close()
