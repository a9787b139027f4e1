"""Virtual hosts: nodes by name, and aliases of nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, TypeVar

from ..addresses import LEAVING
from ..errors import AmqpError, LocalProtocolError
from ..fronts.base import LinkConnection, SendingLink
from ..outcomes import Error
from ..security.access import reserved
from .dead_letters import DeadLetters, leads_to_an_exchange
from .durable import facts
from .entries import Entry
from .kinds.base import Node, NodeLink, attached_links
from .lifecycles import JOURNAL
from .nodes import LOG, NAME_MAX, Declaration, Log, Queue, Schedule, split_partition
from .producers import Inlet
from .queue.accounts import Counts
from .queue.subscriptions import ConsumerLink
from .services import Services

_log: Final = logging.getLogger("amqp_rt.broker")

_Kind = TypeVar("_Kind", bound=Node)


class VirtualHost:
    """Nodes that peers reach under one name of the broker.

    Args:
        name: The name; "" is the default virtual host.
        services: The broker's services.
        kinds: Kinds of nodes, by the class of their declarations.
        auto_create: Called with an address that has no node; returns the declaration of the node
            to create for it, or None.
    """

    def __init__(
        self,
        name: str,
        services: Services,
        kinds: Mapping[type[Declaration], type[Node]],
        auto_create: Callable[[str], Declaration | None] | None = None,
    ) -> None:
        self.name = name
        self.services = services
        self._kinds = kinds
        self._auto_create = auto_create
        #: Nodes by name, in the order of creation, dynamic ones included.
        self.nodes: dict[str, Node] = {}
        #: Their names; None if they have changed since.
        self._names: tuple[str, ...] | None = None
        #: Alias → name of the node.
        self.aliases: dict[str, str] = {}
        #: Called with the name of each node that has been created or deleted.
        self.on_change: Callable[[str], None] | None = None
        self.dead_letters = DeadLetters(services, name, self.nodes)
        #: Counts of deleted nodes, by kind.
        self.retired: dict[str, Counts] = {}
        #: Lists of the nodes that are deleted while a snapshot of all counts is taken in turns.
        self.retiring: list[list[Node]] = []
        #: Number of deleted queues without a store whose messages were moved elsewhere.
        self._left = 0

    def __repr__(self) -> str:
        return f"<VirtualHost {self.name!r}: {len(self.nodes)} nodes>"

    # --- Finding nodes ---

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes, dynamic ones included, in the order of creation.

        Callers that walk them at the same time share them, since there may be very many.
        """
        if self._names is None:
            self._names = tuple(self.nodes)
        return self._names

    def declarations(self) -> list[Declaration]:
        """Return the declarations of all nodes, dynamic ones included, in the order of creation."""
        return [node.declared for node in self.nodes.values()]

    def has(self, address: str) -> bool:
        """Return whether a node has the name *address*."""
        return address in self.nodes

    def name_of(self, address: str) -> str | None:
        """Return the name of the node at *address*, which may be an alias; None if none is there."""
        return address if address in self.nodes else self.aliases.get(address)

    def get(self, address: str) -> Node:
        """Return the node named *address*, even if it is out of service.

        Raises:
            AmqpError: There is none.
        """
        node = self.nodes.get(address)
        if node is None:
            raise AmqpError(f"there is no node {address!r}", condition="amqp:not-found")
        return node

    def find(self, address: str) -> Node:
        """Return the node named *address*.

        Raises:
            AmqpError: There is none, or it is out of service.
        """
        node = self.get(address)
        if node.failure is not None:
            raise node.failure
        return node

    def find_kind(self, address: str, kind: type[_Kind]) -> _Kind:
        """Return the node named *address*, which has to be of *kind*.

        Raises:
            AmqpError: There is none, it is out of service, or of another kind.
        """
        node = self.find(address)
        if not isinstance(node, kind):
            raise AmqpError(f"{address!r} is not a {kind.kind}", condition="amqp:not-allowed")
        return node

    def resolve(self, address: object) -> Node | None:
        """Return the node at *address*, None if there is none; ``auto_create`` may declare it now.

        Raises:
            AmqpError: The node is out of service, has no such partition, or cannot be created.
        """
        if not isinstance(address, str):
            return None
        node = self.nodes.get(address)
        if node is None and self.aliases:
            node = self.nodes.get(self.aliases.get(address, ""))
        if node is not None and node.failure is not None:
            raise node.failure
        if node is not None or not 0 < len(address) <= NAME_MAX:
            return node
        found = split_partition(address)
        if found is not None:
            log = self.nodes.get(found[0]) or self._create(found[0], LOG)
            if log is not None and log.failure is not None:
                raise log.failure
            part = None if log is None else log.part(address, found[1])
            if part is not None:
                return part
        return self._create(address)

    def inlet(self, address: str) -> Inlet | Error | None:
        """Return the inlet of the node at *address*, None if there is none, an error if it has failed."""
        try:
            node = self.resolve(address)
        except AmqpError as error:
            return Error.of(error)
        return None if node is None else node.inlet

    def _create(self, address: str, kind: str | None = None) -> Node | None:
        """Create the node that ``auto_create`` declares for *address*; with *kind*, only of that."""
        declared = None if self._auto_create is None else self._auto_create(address)
        if declared is None or (kind is not None and declared.kind != kind) or reserved(address):
            return None
        node = self.make(declared, implicit=True)
        # The first declaration may change it, as for a queue created for dead letters.
        node.found = True
        self._make_dead_letter_queue(declared)
        self._log_event("made", declared, ", on its first use")
        return node

    # --- Declaring ---

    def declare(self, declared: Declaration) -> None:
        """Create a node, and a queue for its dead letters if no node has that name.

        An equal declaration of an existing node changes nothing.

        Raises:
            AmqpError: The name is taken, an address cannot be used, or there are too many nodes.
        """
        self._check_addresses(declared)
        if declared.name != JOURNAL:
            self.declare_journal()
        known = self.nodes.get(declared.name)
        if known is not None and known.failure is not None:
            raise known.failure
        if known is not None and known.found and known.can_redeclare(declared):
            # The application's current declaration replaces the one from before the restart.
            known.found = known.implicit = False
            self._redeclare(known, declared)
        elif known is not None:
            if known.declared != declared:
                raise AmqpError(
                    f"{declared.name!r} exists as {known.declared!r}",
                    condition="amqp:precondition-failed",
                )
            return
        else:
            self.make(declared)
            self._log_event("declared", declared)
        self._make_dead_letter_queue(declared)

    def declare_transient(
        self,
        declared: Declaration,
        owner: LinkConnection | None = None,
        *,
        reserved: LinkConnection | None = None,
    ) -> None:
        """Create a node that is not stored, and accepts durable messages nevertheless.

        The node exists until it is deleted.

        Args:
            declared: Declaration of the node.
            owner: Connection for which the node is created under a name that cannot be guessed; it
                may have ``limits.dynamic_nodes_max`` of them. None for other nodes.
            reserved: The only connection that may receive from the node; None for any.

        Raises:
            AmqpError: The name is taken, an address cannot be used, there are too many nodes, or
                *owner* has too many.
        """
        self._check_addresses(declared)
        if declared.name in self.nodes:
            raise AmqpError(
                f"{declared.name!r} is there already", condition="amqp:precondition-failed"
            )
        services = self.services
        if owner is not None and services.dynamic[owner] >= services.limits.dynamic_nodes_max:
            raise AmqpError(
                "the connection has too many nodes that are not in the store",
                condition="amqp:resource-limit-exceeded",
            )
        self.make(declared, owner, transient=True).reserved = reserved
        if owner is not None:
            services.dynamic[owner] += 1
        else:
            self._log_event("declared", declared)
        self._make_dead_letter_queue(declared)

    def update(self, declared: Declaration) -> None:
        """Replace the declaration of an existing node; its messages and links stay.

        Raises:
            AmqpError: There is no such node, its messages do not permit the change, or an address
                cannot be used.
        """
        node = self.find(declared.name)
        if not node.can_redeclare(declared):
            raise AmqpError(
                f"{declared.name!r} cannot become {declared!r}: delete it first",
                condition="amqp:precondition-failed",
            )
        self._check_addresses(declared)
        node.implicit = False
        self._redeclare(node, declared)
        self._make_dead_letter_queue(declared)

    def adopt(
        self, declared: Declaration, *, durable: bool, reserved: LinkConnection | None = None
    ) -> None:
        """Give the implicit node of that name its first declaration; its messages and links stay.

        The node stays in the store even if it is not *durable*, so that dead letters outlive a restart;
        the first declaration after the restart counts again. *reserved* is the only connection that
        may receive from it; None for any.

        Raises:
            AmqpError: There is no such node, its messages do not permit the change, an address
                cannot be used, or a queue to be reserved has messages or links.
        """
        node = self.find(declared.name)
        if not node.can_redeclare(declared):
            raise AmqpError(
                f"{declared.name!r} was made without a declaration and cannot become {declared!r}:"
                " delete it first, and declare it before the queues whose dead letters it gets",
                condition="amqp:precondition-failed",
            )
        if reserved is not None and (not node.is_empty or node.termini or node.links()):
            # The queue will be deleted with its connection, and messages of others with it.
            raise AmqpError(
                f"queue {declared.name!r} cannot become exclusive: it has messages or links",
                condition="amqp:resource-locked",
            )
        self._check_addresses(declared)
        node.found = False
        node.implicit = not durable
        self._redeclare(node, declared)
        node.reserved = reserved
        self._make_dead_letter_queue(declared)

    def is_implicit(self, name: str) -> bool:
        """Return whether node *name* was created for dead letters or on first use only."""
        node = self.nodes.get(name)
        return node is not None and node.implicit

    def is_dynamic(self, name: str) -> bool:
        """Return whether *name* is that of a dynamic node."""
        node = self.nodes.get(name)
        return node is not None and node.owner is not None

    def is_open(self, name: str) -> bool:
        """Return whether there is a node *name* that any peer can use: no dynamic, exclusive or deleted one."""
        node = self.nodes.get(name)
        return (
            node is not None
            and node.owner is None
            and node.reserved is None
            and not name.startswith(LEAVING)
        )

    def kind(self, name: str) -> str | None:
        """Return the kind of the node *name*; None if there is none, as for an alias."""
        node = self.nodes.get(name)
        return None if node is None else node.kind

    def _redeclare(self, node: Node, declared: Declaration) -> None:
        self._update_aliases(declared, node.declared)
        node.redeclare(declared)
        node.store_declaration()

    def make(
        self,
        declared: Declaration,
        owner: LinkConnection | None = None,
        number: int = 0,
        *,
        transient: bool = False,
        implicit: bool = False,
    ) -> Node:
        """Create a node; with a *number* it is in the store already, *transient* ones never are.

        Raises:
            AmqpError: There are too many nodes, the name or an alias is another node's address, or a
                limit of this kind of node is exceeded.
        """
        transient = transient or owner is not None
        services = self.services
        if services.node_count >= services.limits.nodes_max:
            raise AmqpError(
                f"the broker has {services.node_count} nodes already",
                condition="amqp:resource-limit-exceeded",
            )
        if declared.name in self.aliases:
            raise AmqpError(
                f"{declared.name!r} is an alias of another node",
                condition="amqp:precondition-failed",
            )
        kind = self._kinds.get(type(declared))
        if kind is None:
            raise TypeError(
                f"a node is declared as a Queue, a Topic, a Log or a Schedule, not {declared!r}"
            )
        kind.check(declared, services.limits)
        journal = services.journal
        if journal is not None and not journal.is_open:
            raise LocalProtocolError("the store is not open yet: enter the broker first")
        self._update_aliases(declared, None)
        new = journal is not None and not transient and not number
        if journal is not None and not transient:
            if new:
                number = services.number
                fact = facts.node_fact(declared, self.name, implicit=implicit)
                facts.NODES.put(journal.loose, facts.key_of(number), fact)
            services.reserve_numbers(number, kind.numbers(declared))
        node = kind.make(self, declared, number=number, owner=owner, transient=transient, new=new)
        node.implicit = implicit
        self.nodes[declared.name] = node
        self._changed(declared.name)
        services.node_count += 1
        return node

    def _changed(self, name: str) -> None:
        self._names = None
        if self.on_change is not None:
            self.on_change(name)

    def _make_dead_letter_queue(self, declared: Declaration) -> None:
        """Create the queue for the dead letters of *declared*, unless a node has that name."""
        dead = declared.dead_letter
        if dead is None or leads_to_an_exchange(dead) or dead in self.nodes:
            return
        # A later declaration may change it.
        node = self.make(Queue(dead), implicit=True)
        node.found = True
        why = f", for the dead letters of {declared.name!r:.200}"
        self._log_event("made", node.declared, why)

    def _check_addresses(self, declared: Declaration) -> None:
        """Check the name, aliases and dead-letter address of *declared*.

        Raises:
            AmqpError: One of them has another meaning, the dead-letter address is an alias, or
                there are too many aliases.
        """
        aliases, limits, ways = (
            declared.aliases,
            self.services.limits,
            self.services.routed_addresses,
        )
        if len(aliases) > limits.aliases_max:
            raise AmqpError(
                f"{declared.name!r}: a node has at most {limits.aliases_max} aliases, "
                f"not {len(aliases)}",
                condition="amqp:resource-limit-exceeded",
            )
        dead = declared.dead_letter
        if dead is not None and leads_to_an_exchange(dead):
            if ways is not None and ways.drops_dead_letters(self.name, dead):
                raise AmqpError(
                    f"{declared.name!r}: dead_letter is {dead!r}, a system exchange, which leads to services"
                    " and never to a queue: name a queue or another exchange",
                    condition="amqp:precondition-failed",
                )
            dead = None
        named = [declared.name, *aliases] if dead is None else [declared.name, *aliases, dead]
        for address in named:
            why = self._meaning(address)
            if why and not (address == JOURNAL and address == declared.name):
                raise AmqpError(
                    f"no node can be called so: {why}", condition="amqp:unauthorized-access"
                )
        if isinstance(declared, Schedule):
            self._check_destination(declared)
        if dead is None:
            return
        means = self.aliases.get(dead)
        if means is not None or dead in aliases:
            raise AmqpError(
                f"{declared.name!r}: dead_letter is {dead!r}, an alias of "
                f"{means or declared.name!r}: give the name of the node",
                condition="amqp:precondition-failed",
            )

    def _check_destination(self, declared: Schedule) -> None:
        """Check that *declared* sends to what may be a node.

        Raises:
            AmqpError: The address has another meaning, or is an alias.
        """
        why = self._meaning(declared.to)
        if declared.to in self.aliases:
            why = f"{declared.to!r} is an alias of {self.aliases[declared.to]!r}: give the name of the node"
        if why:
            raise AmqpError(
                f"schedule {declared.name!r}: to is the address of a node, and {why}",
                condition="amqp:unauthorized-access",
            )

    def _meaning(self, address: str) -> str:
        """Return the meaning of *address* that prevents a node of that name; empty if none."""
        if address == JOURNAL:
            return f"{address!r} is where the broker records what becomes of messages"
        found = split_partition(address)
        log = None if found is None else self.nodes.get(found[0])
        if log is not None and log.kind == LOG:
            return f"{address!r} is a partition of {log.name!r}"
        return reserved(address)

    def _update_aliases(self, declared: Declaration, before: Declaration | None) -> None:
        """Point the aliases of *declared* at it, and drop those of *before*.

        Raises:
            AmqpError: An alias is an address of another node.
        """
        known = self.aliases
        for alias in declared.aliases:
            if alias in self.nodes or known.get(alias, declared.name) != declared.name:
                raise AmqpError(
                    f"{alias!r} is another node's address", condition="amqp:precondition-failed"
                )
        for alias in () if before is None else before.aliases:
            known.pop(alias, None)
        known.update(dict.fromkeys(declared.aliases, declared.name))

    def _log_event(self, event: str, declared: Declaration, why: str = "") -> None:
        """Log an event of a node, within the rate limit, since peers can create many nodes."""
        services = self.services
        left_out = services.log_limiter.admit((event, self.name), services.clock.monotonic())
        if left_out is not None:
            host = f" of virtual host {self.name!r}" if self.name else ""
            _log.info(
                "node %s: %s %.200r%s%s%s", event, declared.kind, declared.name, host, why, left_out
            )

    # --- Deleting ---

    def delete(self, address: str) -> int:
        """Delete a node with its messages, and detach its links; return the number of its messages.

        Raises:
            AmqpError: There is no such node, or it has work of distributed transactions that are prepared.
        """
        node = self.get(address)
        self.services.branches.check_free(node, address)
        return self.delete_node(node)

    def delete_when_free(self, address: str) -> None:
        """Delete the node named *address* now, or once it has no work of prepared transactions.

        For nodes that are deleted automatically.
        """
        node = self.get(address)
        if not self.services.branches.wait_free(node, partial(self._delete_released, node)):
            self.delete_node(node)

    def _delete_released(self, node: Node) -> None:
        """Delete *node*, whose deletion had to wait, unless it was deleted or has consumers again."""
        if self.nodes.get(node.name) is node and not attached_links(node.consumers()):
            self.delete_when_free(node.name)

    def delete_node(self, node: Node) -> int:
        """Delete *node* with its messages, and detach its links; return the number of its messages."""
        services = self.services
        name = node.declared.name
        del self.nodes[name]
        self._changed(name)
        if node.owner is None and not name.startswith(LEAVING):
            self._log_event("deleted", node.declared)
        self._update_aliases(Declaration(name), node.declared)
        node.release_owner()
        services.staging.producers.delete(node)
        services.leases.delete(node)
        held = node.held
        messages: int = held.available + held.acquired + node.delayed
        links = node.links()
        termini = list(node.termini)
        if node.close(self._leaving_name(node)):
            self.nodes[node.declared.name] = node
        else:
            services.node_count -= 1
            if node.number and services.journal is not None:
                node.delete_stored(services.journal.loose)
            services.guard(node, held.delete)
            self._retire(node)
        for terminus in termini:
            services.guard(node, terminus.end)
        error = Error("amqp:resource-deleted", f"{name!r} has been deleted")
        services.turns.do_in_turns(_detaching(links, error), 8)
        if services.on_deleted is not None:
            services.on_deleted(self.name, name)
        return messages

    def _retire(self, node: Node) -> None:
        """Keep the counts of *node*, which has been deleted, since totals must not shrink."""
        kept = self.retired.setdefault(node.kind, Counts())
        kept.add(node.held.counts)
        for each in self.retiring:
            each.append(node)

    def _leaving_name(self, node: Node) -> str:
        """Return the name under which *node*, which is deleted, moves its messages elsewhere."""
        if node.number:
            number = str(node.number)
        else:
            self._left += 1
            number = f"t{self._left}"
        return f"{LEAVING}{number}/{node.declared.name}"[:NAME_MAX]

    # --- Events of messages ---

    def declare_journal(self) -> None:
        """Create ``$journal``, if events of messages are recorded.

        Raises:
            AmqpError: A node of that name is no log.
        """
        journals = self.services.journals
        if journals is None:
            return
        options = journals.options
        known = self.nodes.get(JOURNAL)
        if known is None or known.found:
            self.declare(Log(JOURNAL, max_age_s=options.max_age_s, max_bytes=options.max_bytes))
        self.nodes[JOURNAL].seal()

    def record(self, payload: bytes) -> None:
        """Append an event to ``$journal``, unless that has been deleted or has failed."""
        node = self.nodes.get(JOURNAL)
        if node is not None and node.kind == LOG and node.failure is None:
            node.inlet.take(Entry(payload))

    # --- Links of a node ---

    def consumers(self, name: str) -> list[ConsumerLink]:
        """Return the attached links that receive from the node.

        Raises:
            AmqpError: There is no such node.
        """
        return attached_links(self.get(name).consumers())

    def watch_consumers(
        self, name: str, on_consumer_detached: Callable[[SendingLink], None]
    ) -> None:
        """Call *on_consumer_detached* with the link of each consumer that leaves the node.

        Raises:
            AmqpError: There is no such node.
        """
        self.get(name).on_consumer_detached = on_consumer_detached

    def publish(self, address: str, payload: bytes) -> None:
        """Put an encoded message into a node, from within the process.

        Raises:
            AmqpError: There is no such node, it has no room, or the message is malformed.
        """
        node = self.resolve(address) or self.find(address)
        node.inlet.publish(payload)


def _detaching(links: list[NodeLink], error: Error) -> Iterator[None]:
    """Detach *links* with *error*, one in each step."""
    for link in links:
        link.detach(error)
        yield


class VirtualHosts:
    """All virtual hosts of a broker.

    Args:
        services: The broker's services.
        kinds: Kinds of nodes.
        auto_create: As for :class:`VirtualHost`.
        names: Virtual hosts that exist besides those with nodes; None if all unknown names mean the
            default one.
    """

    def __init__(
        self,
        services: Services,
        kinds: Iterable[type[Node]],
        auto_create: Callable[[str], Declaration | None] | None,
        names: Collection[str] | None,
    ) -> None:
        self._services = services
        #: Kinds of nodes by the class of their declarations.
        self.kinds = {kind.declaration: kind for kind in kinds}
        self._auto_create = auto_create
        #: Whether a hostname without a virtual host means the default one.
        self._defaulting = names is None or "" in names
        self._spaces: dict[str, VirtualHost] = {}
        for name in ("", *(names or ())):
            self.open(name)

    def __iter__(self) -> Iterator[VirtualHost]:
        return iter(list(self._spaces.values()))

    def open(self, name: str) -> VirtualHost:
        """Return the virtual host *name*, which is created if it does not exist."""
        found = self._spaces.get(name)
        if found is None:
            found = self._spaces[name] = VirtualHost(
                name, self._services, self.kinds, self._auto_create
            )
        return found

    def get(self, name: str) -> VirtualHost:
        """Return the virtual host *name* if it exists, and the default one otherwise."""
        return self._spaces.get(name) or self._spaces[""]

    def names(self) -> list[str]:
        """Return the names of the virtual hosts; "" is the default one."""
        return list(self._spaces)

    def named(self, hostname: str) -> str | None:
        """Return the virtual host for peers that connect to *hostname*, None if there is none.

        Clients that are not configured otherwise send the name under which they reached the
        machine, so that by default every other name means the default host. ``vhost:NAME``, the
        form of RabbitMQ, means that host or none; ``/`` is the name of its default host.
        """
        if hostname in self._spaces and (hostname or self._defaulting):
            return hostname
        prefix, colon, name = hostname.partition(":")
        if colon and prefix == "vhost":
            if name == "/" and name not in self._spaces:
                return "" if self._defaulting else None
            return name if name and name in self._spaces else None
        return "" if self._defaulting else None

    def nodes(self) -> list[Node]:
        """Return the nodes of all virtual hosts, in the order of creation in each."""
        return [node for space in self._spaces.values() for node in space.nodes.values()]

    def owner_of(self, owner: object) -> Node | None:
        """Return the node that *owner* is or belongs to; None if there is none."""
        if owner is None:
            # Most nodes have no duplicate-detection window: None would match the first of them.
            return None
        for node in self.nodes():
            if node.owns(owner):
                return node
        return None
