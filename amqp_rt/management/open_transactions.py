"""Transactions that clients have declared and not discharged (Part 4 §4.1), as operators see them: ``amqp_rt.transaction``.

DELETE rolls one back. Its client learns of that when it commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..broker.transactions import Transaction, Transactions
from ..container.connections import Connection
from ..fronts.base import ReceivingLink
from .answering import UnchangeableEntities, attributes


class TransactionEntity(Struct, frozen=True, kw_only=True):
    """A transaction that is open, which only its own connection can use."""

    #: Its number, which no other transaction of this run of the broker has.
    name: str
    #: Name of the connection; None for one that another node of a mesh carries.
    connection: str | None
    container_id: str
    user: str | None
    #: ``open``, ``discharged`` while earlier posts are still arriving, or ``rolled back``.
    state: str
    #: Messages posted, and deliveries acquired or settled.
    posts: int
    deliveries: int
    #: Seconds since its declaration.
    age_s: float
    #: Why it was rolled back before its discharge.
    error: str | None


class TransactionCollection(UnchangeableEntities):
    """Open transactions of a broker (:class:`~amqp_rt.management.answering.Collection`). Only clients declare them.

    Args:
        transactions: Those of all virtual hosts.
        connections: Yields the connections to a virtual host, each after its name.
    """

    type_name = "amqp_rt.transaction"
    attributes = TransactionEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def __init__(
        self,
        transactions: Transactions,
        connections: Callable[[str], Iterator[tuple[str, Connection]]],
    ) -> None:
        self._transactions = transactions
        self._connections = connections

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        """Yield the row of every open transaction, the oldest first."""
        names: dict[object, str] = {
            each.engine: name for name, each in self._connections(virtual_host)
        }
        for link, each in self._transactions.all_open():
            counts = link.peer.virtual_host == virtual_host
            name = names.get(link.connection)
            yield attributes(self._entity(link, each, name)) if counts else None

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        """Return the row of transaction *name*, None if it is not open."""
        found = self._find(name, virtual_host)
        if found is None:
            return None
        link, transaction = found
        connection = next(
            (
                its_name
                for its_name, each in self._connections(virtual_host)
                if each.engine is link.connection
            ),
            None,
        )
        return attributes(self._entity(link, transaction, connection))

    async def delete(self, name: str, virtual_host: str) -> None:
        """Roll back transaction *name*; nothing happens to one that has ended."""
        found = self._find(name, virtual_host)
        if found is not None:
            found[1].fail("an operator has rolled it back")

    def _find(self, name: str, virtual_host: str) -> tuple[ReceivingLink, Transaction] | None:
        for link, each in self._transactions.all_open():
            if each.name == name and link.peer.virtual_host == virtual_host:
                return link, each
        return None

    def _entity(
        self, link: ReceivingLink, transaction: Transaction, connection: str | None
    ) -> TransactionEntity:
        state = "discharged" if transaction.is_discharged else "open"
        if transaction.error is not None:
            state = "rolled back"
        left = transaction.deadline - self._transactions.monotonic()
        return TransactionEntity(
            name=transaction.name,
            connection=connection,
            container_id=link.peer.container_id,
            user=link.peer.user,
            state=state,
            posts=transaction.posts,
            deliveries=transaction.deliveries,
            age_s=round(self._transactions.limits.transaction_s - left, 3),
            error=None if transaction.error is None else transaction.error.description,
        )
