"""Declarations in one virtual host: its exchanges, and its queues with their owners and life spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

from msgspec import Struct

from ...fronts.base import LinkConnection, QueueDeclaration, SendingLink
from ..bindings import Binding, Exchanges, RoutingTable, size_of
from ..host import BrokerHost
from ..spaces import VirtualHost
from .last_messages import LastMessages


class DeclaredQueue(Struct):
    """Declaration of a queue; for an exclusive one, the only connection that may use it."""

    declared: QueueDeclaration
    owner: LinkConnection | None = None
    #: Seconds without use after which it is deleted (``x-expires``), and time of its last use.
    expires_s: float | None = None
    used_at: float = 0.0
    #: Whether it is deleted at that time because its last consumer has left (``auto_delete_s``,
    #: ``keeps_messages``).
    is_leaving: bool = False


class DeclaredSpace:
    """Declarations in one virtual host.

    Args:
        name: Name of the virtual host.
        host: The broker.
        types: Types of exchanges.
        on_unbound: Called with this object, the exchange and the binding for each binding removed.
    """

    def __init__(
        self,
        name: str,
        host: BrokerHost,
        types: Mapping[str, Callable[[], RoutingTable]],
        on_unbound: Callable[[DeclaredSpace, str, Binding], None],
    ) -> None:
        self.name = name
        self.host = host
        self.queues: dict[str, DeclaredQueue] = {}
        #: Exchange and binding → key in the store, for stored bindings.
        self.stored: dict[tuple[str, Binding], bytes] = {}
        #: Exchange and binding → those that end with the same owner.
        self.scoped: dict[tuple[str, Binding], dict[tuple[str, Binding], None]] = {}
        self.exchanges = Exchanges(
            self._has,
            types=types,
            limits=host.limits,
            on_unbound=partial(on_unbound, self),
            memory=host.memory,
        )
        self.last_messages = LastMessages(host, name, self.exchanges)
        #: Exchange → number of queues that have it as their alternate.
        self._alternates: Counter[str] = Counter()
        #: Records of deleted queues, one for each message that is being handed to queues in turns.
        self.watched: dict[Deletions, None] = {}

    @property
    def nodes(self) -> VirtualHost:
        """Nodes of the virtual host."""
        return self.host.space(self.name)

    def _has(self, name: str) -> bool:
        return self.nodes.has(name)

    # --- Queues that are deleted automatically ---

    def register(
        self, name: str, declared: QueueDeclaration, owner: LinkConnection | None = None
    ) -> DeclaredQueue:
        """Register the declaration of queue *name*, whose node exists."""
        expires = declared.arguments.get("x-expires")
        self.host.memory.held += size_of(declared.arguments)
        known = self.queues[name] = DeclaredQueue(
            declared,
            owner,
            expires_s=int(expires) / 1000 if isinstance(expires, int) else None,
            used_at=self.host.clock.monotonic(),
        )
        if declared.auto_delete:
            self.nodes.watch_consumers(name, partial(self._left, name, known))
        if declared.alternate:
            self._alternates[declared.alternate] += 1
        return known

    def forget(self, name: str) -> DeclaredQueue | None:
        """Remove the declaration of queue *name*, whose node has been deleted; None if there is none."""
        known = self.queues.pop(name, None)
        if known is not None:
            self.host.memory.held -= size_of(known.declared.arguments)
            alternate = known.declared.alternate
            if alternate:
                self._alternates[alternate] -= 1
                if not self._alternates[alternate]:
                    del self._alternates[alternate]
        return known

    def is_alternate(self, exchange: str) -> bool:
        """Return whether *exchange* is the alternate of a queue, or of another exchange."""
        return exchange in self._alternates or self.exchanges.is_alternate(exchange)

    def consumers(self, name: str) -> int:
        """Return the number of links that take messages from queue *name*."""
        links = self.nodes.consumers(name)
        return sum(not link.idle for link in links)

    def idle(self, name: str) -> None:
        """Note that a consumer takes no more messages; delete an auto-delete queue with its last."""
        known = self.queues.get(name)
        if known is None:
            return
        known.used_at = self.host.clock.monotonic()
        if not known.declared.auto_delete or not self.nodes.has(name):
            # The queue stays, or is being deleted, which is why its consumers leave.
            return
        if known.owner is not None and known.declared.outlives_owner:
            # It is deleted when the owner has gone (0-10 §queue.declare auto-delete).
            return
        if self.consumers(name):
            return
        if known.declared.auto_delete_s or known.declared.keeps_messages:
            # Messages that this consumer had are not back yet.
            known.expires_s, known.is_leaving = known.declared.auto_delete_s, True
        else:
            self.nodes.delete_when_free(name)

    def _left(self, name: str, known: DeclaredQueue, link: SendingLink) -> None:
        """Note that the link of a consumer of an auto-delete queue has ended."""
        if self.queues.get(name) is known and not link.idle:
            self.idle(name)

    def sweep(self) -> None:
        """Delete queues that were unused for too long (``x-expires``)."""
        now = self.host.clock.monotonic()
        for name, known in list(self.queues.items()):
            if known.expires_s is not None:
                # An error with one queue must not keep the others.
                self.host.guard(None, partial(self._sweep, name, known, now))

    def _sweep(self, name: str, known: DeclaredQueue, now: float) -> None:
        if self.queues.get(name) is not known:
            # It was deleted together with another one.
            return
        if (
            self.consumers(name)
            or (known.is_leaving and known.owner is not None)
            or (known.is_leaving and known.declared.keeps_messages and self._has_messages(name))
        ):
            known.used_at = now
        elif known.expires_s is not None and now - known.used_at >= known.expires_s:
            self.nodes.delete_when_free(name)

    def _has_messages(self, name: str) -> bool:
        """Return whether queue *name* has messages, or holds room for some of transactions."""
        stats = self.nodes.get(name).stats()
        return bool(stats.available or stats.acquired or stats.delayed or stats.bytes)


class Deletions:
    """Names of the queues of a virtual host that are deleted within a ``with`` block.

    Such a name stays in the set if a queue is declared again under it within the block: the message
    that the block hands out was not routed to that queue.
    """

    __slots__ = ("_names", "_space")

    def __init__(self, space: DeclaredSpace) -> None:
        self._space = space
        self._names: set[str] | None = None

    def __enter__(self) -> Self:
        self._space.watched[self] = None
        return self

    def __exit__(self, *error: object) -> None:
        del self._space.watched[self]

    def __contains__(self, name: object) -> bool:
        return self._names is not None and name in self._names

    def add(self, name: str) -> None:
        """Note that queue *name* is deleted."""
        if self._names is None:
            self._names = set()
        self._names.add(name)
