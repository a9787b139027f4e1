"""The nodes of a broker, and what attaches to them.

A :class:`BrokerHost` is one of the places where a container looks for an address
(:class:`~amqp_rt.fronts.base.Host`). It knows links, credit, deliveries and outcomes, and no
protocol: whatever a front makes of its wire can attach here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from msgspec import Struct

from ..clock import Clock, SystemClock
from ..errors import AmqpError, LinkRefused
from ..fronts.base import (
    SENDER,
    IncomingDelivery,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..message import AnnotationPolicy
from ..outcomes import Error
from ..termini import Source, Target
from .entries import Door, Entry, dead_letter, departing
from .nodes import NAME_MAX, QUEUE, Declaration, Queue, Terms, Topic, answer, dynamic_declaration
from .producers import Inlet, Intake, Producer, settle_accepted
from .queues import Memory, MessageQueue
from .topics import MessageTopic

_log = logging.getLogger("amqp_rt.broker")


class NodeStats(Struct, frozen=True, kw_only=True):
    """A node in numbers. Of a topic, messages are summed over its subscribers."""

    name: str
    kind: str
    dynamic: bool
    #: Waiting, delivered and not settled, and payload bytes of both.
    available: int
    acquired: int
    bytes: int
    consumers: int
    producers: int
    #: Since the node was made.
    enqueued: int
    delivered: int
    accepted: int
    requeued: int
    dead_lettered: int
    expired: int
    dropped: int


class _Node:
    """A declaration, what stands behind it, and who is attached."""

    def __init__(
        self,
        declared: Declaration,
        held: MessageQueue | MessageTopic,
        intake: Intake,
        inlet: Inlet,
        owner: Any,
    ) -> None:
        self.declared = declared
        self.held = held
        self.intake = intake
        self.inlet = inlet
        #: The connection that made a dynamic node.
        self.owner = owner

    def links(self) -> list[Any]:
        """The links that are attached."""
        held = self.held
        consumers = (
            held.consumers
            if isinstance(held, MessageTopic)
            else [
                *held.consumers.values(),
                *held.browsers.values(),
            ]
        )
        found = [consumer.link for consumer in consumers if consumer.link is not None]
        return [*found, *(producer.link for producer in self.intake.producers)]


class BrokerHost:
    """Queues and topics in memory.

    Args:
        limits: Bounds; those of messages and nodes are read here.
        clock: Where times to live take the time from.
        auto_create: Called with an address that has no node; returns the declaration of the node
            to make for it, or None.
        annotations: What to do about annotation keys that nobody knows (decision 13).
        settle: Answers deliveries whose messages have been put. A store settles after its commit.
    """

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        clock: Clock | None = None,
        auto_create: Callable[[str], Declaration | None] | None = None,
        annotations: AnnotationPolicy = "default",
        settle: Callable[[list[IncomingDelivery]], None] = settle_accepted,
    ) -> None:
        self.limits = limits
        self.clock = clock or SystemClock()
        self.memory = Memory(limits.broker_bytes_max)
        self._auto_create = auto_create
        self._door = Door(annotations, limits)
        self._settle = settle
        #: Virtual host → address → node. A virtual host without nodes of its own uses "".
        self._spaces: dict[str, dict[str, _Node]] = {"": {}}
        self._count = 0
        #: Dynamic nodes by connection.
        self._dynamic: Counter[Any] = Counter()
        #: Nodes that may hold messages with a time to live.
        self._expiring: dict[MessageQueue | MessageTopic, None] = {}

    def __repr__(self) -> str:
        return f"<BrokerHost: {self._count} nodes, {self.memory.held} bytes>"

    # --- Declaring ---

    def declare(self, declared: Declaration, *, virtual_host: str = "") -> None:
        """Make a node, and the queue for its dead letters if there is none of that name.

        Declaring the same again changes nothing.

        Raises:
            AmqpError: The name is taken by another node, or there are too many.
        """
        space = self._spaces.setdefault(virtual_host, {})
        known = space.get(declared.name)
        if known is not None:
            if known.declared != declared:
                raise AmqpError(
                    f"{declared.name!r} exists as {known.declared!r}",
                    condition="amqp:precondition-failed",
                )
            return
        self._make(space, declared)
        dead = declared.dead_letter if isinstance(declared, Queue) else None
        if dead is not None and dead not in space:
            self._make(space, Queue(dead))

    def delete(self, address: str, *, virtual_host: str = "") -> int:
        """Delete a node with its messages; its links are detached. How many messages it had.

        Raises:
            AmqpError: There is no such node.
        """
        space = self._space(virtual_host)
        return self._delete(space, self._find(space, address))

    def nodes(self, *, virtual_host: str = "") -> list[Declaration]:
        """What there is, dynamic nodes included, in the order in which it was made."""
        return [node.declared for node in self._space(virtual_host).values()]

    def _space(self, virtual_host: str) -> dict[str, _Node]:
        space = self._spaces.get(virtual_host)
        return self._spaces[""] if space is None else space

    def _find(self, space: dict[str, _Node], address: str) -> _Node:
        node = space.get(address)
        if node is None:
            raise AmqpError(f"there is no node {address!r}", condition="amqp:not-found")
        return node

    def _make(self, space: dict[str, _Node], declared: Declaration, owner: Any = None) -> _Node:
        if self._count >= self.limits.nodes_max:
            raise AmqpError(
                f"the broker has {self._count} nodes already",
                condition="amqp:resource-limit-exceeded",
            )
        limits = self.limits
        held: MessageQueue | MessageTopic
        ttl_s: float | None = None
        if isinstance(declared, Queue):
            ttl_s = declared.ttl_s
            held = MessageQueue(
                self.memory,
                self.clock.wall,
                partial(self._bury, space, declared),
                max_deliveries=declared.max_deliveries or 0,
                max_attempts=declared.max_attempts or 0,
                length_max=declared.length_max or 0,
                bytes_max=declared.bytes_max or 0,
                limits=limits,
            )
        elif isinstance(declared, Topic):
            ttl_s = declared.ttl_s
            held = MessageTopic(
                self.memory,
                self.clock.wall,
                backlog_max=declared.backlog_max or 0,
                backlog_bytes_max=declared.backlog_bytes_max or 0,
                limits=limits,
            )
        else:
            raise TypeError(f"a node is declared as a Queue or a Topic, not {declared!r}")
        intake = Intake(held)
        inlet = Inlet(
            intake,
            self._door,
            self.clock.wall,
            ttl_s=ttl_s,
            settle=self._settle,
            on_expiring=partial(self._expiring.__setitem__, held, None),
            successor=partial(self._inlet, space, declared.name),
        )
        node = space[declared.name] = _Node(declared, held, intake, inlet, owner)
        self._count += 1
        return node

    def _delete(self, space: dict[str, _Node], node: _Node) -> int:
        del space[node.declared.name]
        self._count -= 1
        if node.owner is not None:
            self._dynamic[node.owner] -= 1
            if not self._dynamic[node.owner]:
                del self._dynamic[node.owner]
        held = node.held
        self._expiring.pop(held, None)
        self.memory.waiting.pop(node.intake, None)
        messages = held.available + held.acquired
        links = node.links()
        held.delete()
        error = Error("amqp:resource-deleted", f"{node.declared.name!r} has been deleted")
        for link in links:
            link.detach(error)
        return messages

    def _bury(
        self,
        space: dict[str, _Node],
        declared: Queue,
        entry: Entry,
        reason: str,
        error: Error | None,
    ) -> bool:
        if declared.dead_letter is None:
            return False
        node = space.get(declared.dead_letter)
        if node is None:
            _log.warning(
                "%s: a message was dropped (%s): the dead-letter address %s has been deleted",
                declared.name,
                reason,
                declared.dead_letter,
            )
            return False
        node.inlet.take(dead_letter(entry, declared.name, reason, error))
        return True

    # --- Links (fronts.base.Host) ---

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*; False if its address is not ours."""
        sending = link.role == SENDER
        terminus = link.source if sending else link.target
        if not isinstance(terminus, Source | Target):
            return False
        space = self._space(link.peer.virtual_host)
        try:
            if terminus.dynamic:
                return self._attach_dynamic(space, link, terminus, sending)
            node = self._resolve(space, terminus.address)
        except AmqpError as error:
            link.refuse(Error.of(error))
            return True
        if node is None:
            return False
        terms = answer(link, node.declared, sending=sending, owner=node.owner)
        if isinstance(terms, Error):
            link.refuse(terms)
        else:
            self._accept(node, link, terms, sending)
        return True

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Where messages of the anonymous terminus *link* for *address* go."""
        try:
            node = self._resolve(self._space(link.peer.virtual_host), address)
        except AmqpError as error:
            return Error.of(error)
        return None if node is None else node.inlet

    def _inlet(self, space: dict[str, _Node], address: str) -> Inlet | None:
        try:
            node = self._resolve(space, address)
        except AmqpError:
            return None
        return None if node is None else node.inlet

    def publish(self, address: str, payload: bytes, *, virtual_host: str = "") -> None:
        """Put an encoded message into a node, from within the process.

        Raises:
            AmqpError: There is no such node, it has no room, or the message is malformed.
        """
        space = self._space(virtual_host)
        node = self._resolve(space, address) or self._find(space, address)
        node.inlet.publish(payload)

    def _resolve(self, space: dict[str, _Node], address: object) -> _Node | None:
        """The node at *address*, made on the spot if that is wished."""
        if not isinstance(address, str):
            return None
        node = space.get(address)
        if node is None and self._auto_create is not None and 0 < len(address) <= NAME_MAX:
            declared = self._auto_create(address)
            if declared is not None:
                node = self._make(space, declared)
        return node

    def _attach_dynamic(
        self,
        space: dict[str, _Node],
        link: Any,
        terminus: Source | Target,
        sending: bool,
    ) -> bool:
        declared = dynamic_declaration(link, terminus)
        if isinstance(declared, Error):
            link.refuse(declared)
            return True
        owner = link.connection
        if self._dynamic[owner] >= self.limits.dynamic_nodes_max:
            raise LinkRefused(
                "the connection has too many dynamic nodes",
                condition="amqp:resource-limit-exceeded",
            )
        terms = answer(link, declared, sending=sending, dynamic=True)
        if isinstance(terms, Error):
            link.refuse(terms)
            return True
        node = self._make(space, declared, owner)
        self._dynamic[owner] += 1
        self._accept(node, link, terms, sending, partial(self._delete_dynamic, space, node))
        return True

    def _delete_dynamic(self, space: dict[str, _Node], node: _Node) -> None:
        """The link that made it is over (§3.5.10 ``delete-on-close``)."""
        if space.get(node.declared.name) is node:
            self._delete(space, node)

    def _accept(
        self,
        node: _Node,
        link: Any,
        terms: Terms,
        sending: bool,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        held = node.held
        endpoint: Any
        if not sending:
            inlet = node.inlet
            endpoint = Producer(
                node.intake,
                inlet.door,
                inlet.wall,
                ttl_s=inlet.ttl_s,
                settle=inlet.settle,
                on_expiring=inlet.on_expiring,
            )
        elif terms.copies and isinstance(held, MessageQueue):
            endpoint = held.browse(settled=terms.settled)
        else:
            endpoint = held.subscribe(
                default_outcome=terms.default_outcome,
                outcomes=terms.outcomes,
                settled=terms.settled,
            )
        if on_left is not None:
            endpoint.on_left.append(on_left)
        if sending:
            link.accept(
                endpoint,
                source=terms.source,
                target=terms.target,
                snd_settle_mode=terms.snd_settle_mode,
            )
        else:
            link.accept(
                endpoint,
                source=terms.source,
                target=terms.target,
                max_message_size=self.limits.message_size_max,
            )

    # --- What operators do ---

    def stats(self, address: str, *, virtual_host: str = "") -> NodeStats:
        """A node in numbers.

        Raises:
            AmqpError: There is no such node.
        """
        node = self._find(self._space(virtual_host), address)
        held = node.held
        counts = held.counts
        return NodeStats(
            name=node.declared.name,
            kind=node.declared.kind,
            dynamic=node.owner is not None,
            available=held.available,
            acquired=held.acquired,
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
        )

    def peek(self, address: str, count: int = 1, *, virtual_host: str = "") -> list[bytes]:
        """The first *count* available messages of a queue, encoded as they would be sent now.

        Raises:
            AmqpError: There is no such queue.
        """
        now = self.clock.wall()
        found = []
        for entry in self._queue(address, virtual_host).peek(count):
            payload = departing(entry, now) if entry.altered else entry.payload
            found.append(payload if isinstance(payload, bytes) else b"".join(payload))
        return found

    def purge(self, address: str, *, virtual_host: str = "") -> int:
        """Drop the available messages of a queue; how many there were.

        Raises:
            AmqpError: There is no such queue.
        """
        return self._queue(address, virtual_host).purge()

    def move(self, address: str, to: str, count: int, *, virtual_host: str = "") -> int:
        """Move the first *count* available messages of a queue to another node, in order.

        Returns:
            How many were moved.

        Raises:
            AmqpError: There is no such queue, or no such node to move to.
        """
        queue = self._queue(address, virtual_host)
        target = self._find(self._space(virtual_host), to)
        if target.held is queue:
            raise AmqpError(f"{to!r} is where they are", condition="amqp:not-allowed")
        entries = queue.withdraw(count)
        for entry in entries:
            target.inlet.take(entry.again())
        return len(entries)

    def _queue(self, address: str, virtual_host: str) -> MessageQueue:
        node = self._find(self._space(virtual_host), address)
        if not isinstance(node.held, MessageQueue):
            raise AmqpError(f"{address!r} is not a {QUEUE}", condition="amqp:not-allowed")
        return node.held

    # --- Time ---

    def sweep(self) -> None:
        """Give up what has expired at the front of its queue although nobody came for it."""
        for held in list(self._expiring):
            held.sweep()
            if not held.available and not held.acquired:
                self._expiring.pop(held, None)

    async def run(self, *, interval_s: float = 1.0) -> None:
        """Sweep every *interval_s* seconds, until cancelled."""
        while True:
            await trio.sleep(interval_s)
            self.sweep()
