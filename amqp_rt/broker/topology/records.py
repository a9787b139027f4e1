"""Declarations of peers in the store: queues, exchanges and bindings as facts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import AmqpError
from ...fronts.base import Exchange, QueueDeclaration
from ..bindings import Binding, Destination
from ..durable import facts
from ..durable.facts import FactKind
from ..durable.journal import Journal
from ..host import BrokerHost
from .declared import DeclaredQueue, DeclaredSpace

_log = logging.getLogger("amqp_rt.broker")


class TopologyRecords:
    """Writer and reader of the facts of stored declarations.

    Args:
        host: The broker.
        space: Returns the declarations in a virtual host.
    """

    def __init__(self, host: BrokerHost, space: Callable[[str], DeclaredSpace]) -> None:
        self._host = host
        self._space = space

    def keep_queue(self, space: DeclaredSpace, known: DeclaredQueue) -> None:
        """Store the declaration of a queue, if it is durable and not exclusive."""
        declared = known.declared
        if declared.is_stored:
            fields = [space.name, declared.name, declared.auto_delete, dict(declared.arguments)]
            rest = [declared.alternate, declared.auto_delete_s, declared.keeps_messages]
            while rest and not rest[-1]:
                rest.pop()
            fields += rest
            self._keep(facts.QUEUES, facts.digest_key(space.name, declared.name), fields)

    def forget_queue(self, space: DeclaredSpace, name: str) -> None:
        """Remove the record of a queue that was deleted."""
        self._forget(facts.QUEUES, facts.digest_key(space.name, name))

    def keep_exchange(self, space: DeclaredSpace, declared: Exchange) -> None:
        """Store an exchange, if it is durable."""
        if declared.durable:
            self._keep(
                facts.EXCHANGES,
                facts.digest_key(space.name, declared.name),
                [
                    *(space.name, declared.name, declared.type, declared.auto_delete),
                    *(declared.internal, dict(declared.arguments)),
                ],
            )

    def exchanges_gone(self, space: DeclaredSpace, names: Sequence[str]) -> None:
        """Remove what is kept of exchanges that were deleted, also with their last binding."""
        space.last_messages.forget(names)
        for name in names:
            self._forget(facts.EXCHANGES, facts.digest_key(space.name, name))

    def keep_binding(
        self, space: DeclaredSpace, source: str, binding: Binding, arguments: Mapping[str, object]
    ) -> None:
        """Store a binding, if both its exchange and its destination are durable."""
        where = binding.destination
        if not space.exchanges.find(source).durable:
            return
        if where.is_exchange:
            durable = space.exchanges.find(where.name).durable
        else:
            durable = self._is_stored(space, where.name)
        if durable:
            key = space.stored[source, binding] = facts.digest_key(space.name, source, binding)
            self._keep(
                facts.BINDINGS,
                key,
                [space.name, source, where.name, where.is_exchange, binding.key, dict(arguments)],
            )

    def _is_stored(self, space: DeclaredSpace, queue: str) -> bool:
        known = space.queues.get(queue)
        return known is None or known.declared.is_stored

    def unbound(self, space: DeclaredSpace, source: str, binding: Binding) -> None:
        """Forget a binding that was removed, and its record."""
        scoped = space.scoped.pop((source, binding), None)
        if scoped is not None:
            scoped.pop((source, binding), None)
        key = space.stored.pop((source, binding), None)
        if key is not None:
            self._forget(facts.BINDINGS, key)

    def _keep(self, kind: FactKind[list[Any]], key: bytes, fields: list[Any]) -> None:
        if self._host.journal is not None:
            kind.put(self._host.journal.loose, key, fields)

    def _forget(self, kind: FactKind[list[Any]], key: bytes) -> None:
        if self._host.journal is not None:
            kind.remove(self._host.journal.loose, key)

    async def restore(self, journal: Journal) -> None:
        """Restore stored declarations: queues, exchanges, and then their bindings."""
        restorers: list[tuple[FactKind[list[Any]], Callable[[bytes, list[Any]], None]]] = [
            (facts.QUEUES, self._restore_queue),
            (facts.EXCHANGES, self._restore_exchange),
            (facts.BINDINGS, self._restore_binding),
        ]
        for kind, restorer in restorers:
            for key, value in await kind.read(journal):
                try:
                    restorer(key, kind.decode(value))
                except (AmqpError, ValueError, TypeError) as error:
                    # Its node or exchange does not exist any more, or this release does not know it.
                    _log.warning("a fact of the topology is dropped: %s", error)
                    kind.remove(journal.loose, key)

    def _restore_queue(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, name, auto_delete, arguments, *rest = fields
        self._host.space(virtual_host).get(name)
        self._space(virtual_host).register(
            name,
            QueueDeclaration(
                name=name,
                durable=True,
                auto_delete=auto_delete,
                arguments=_texts(arguments),
                alternate=str(rest[0]) if rest else "",
                auto_delete_s=float(rest[1]) if len(rest) > 1 else 0.0,
                keeps_messages=len(rest) > 2 and bool(rest[2]),
            ),
        )

    def _restore_exchange(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, name, kind, auto_delete, internal, arguments = fields
        self._space(virtual_host).exchanges.declare(
            Exchange(
                name=name,
                type=kind,
                durable=True,
                auto_delete=auto_delete,
                internal=internal,
                arguments=_texts(arguments),
            ),
            restored=True,
        )

    def _restore_binding(self, key: bytes, fields: list[Any]) -> None:
        virtual_host, source, name, is_exchange, routing_key, arguments = fields
        if not is_exchange:
            self._host.space(virtual_host).get(name)
        space = self._space(virtual_host)
        binding = space.exchanges.bind(
            source, Destination(name, is_exchange), routing_key, _texts(arguments), restored=True
        )
        if binding is not None:
            space.stored[source, binding] = key


def _texts(arguments: Any) -> dict[str, object]:
    return {str(name): value for name, value in dict(arguments).items()}
