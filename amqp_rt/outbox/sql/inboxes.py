"""Inbox in a database of SQLAlchemy: the message-ids that nodes have processed, written by their handlers' transactions."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import MetaData, bindparam, delete, event, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from ...limits import check_seconds
from ...message import MessageId
from .schema import inbox_table, refuse_unless_supported, short, statements
from .working import Factory, call, in_transaction, kind_of_sessions, opened

_log = logging.getLogger("amqp_rt.outbox")

#: Seconds for which the message-ids of processed messages are kept.
REMEMBERED_S: Final = 7 * 86_400.0
#: Old message-ids that are deleted at once.
PRUNED_MAX: Final = 1_000
#: Seconds between two deletions, if there are no more than that, and if there are.
_PRUNE_S: Final = 600.0
_PRUNE_MORE_S: Final = 1.0


def _key(address: str, message_id: MessageId) -> tuple[str, str]:
    """Return the columns by which a message is recognized."""
    return short(address), short(f"{type(message_id).__name__}:{message_id!r}")


class _Record:
    """Transaction with the record of a message, which its handler must not end.

    Ended by the handler, the record would be there although the handler fails later, or be missing although it succeeds.

    Args:
        session: Session with the transaction, in which the message was recorded.
        who: Who must not end it, for errors.
    """

    def __init__(self, session: Session, who: str) -> None:
        self._session = session
        self._who = who
        self._root = session.get_transaction()
        self._connection = session.connection()
        self._below = self._connection.get_transaction()
        event.listen(session, "before_commit", self._committing)

    def _committing(self, session: Session) -> None:
        if not session.in_nested_transaction():
            raise self._error("commits its session")

    def refuse_if_ended(self) -> None:
        """Raise ``RuntimeError`` if the transaction has ended."""
        session, connection = self._session, self._connection
        if (
            session.get_transaction() is not self._root
            or connection.get_transaction() is not self._below
        ):
            raise self._error("has ended the transaction of its session")

    def release(self) -> None:
        """Let the transaction be committed."""
        event.remove(self._session, "before_commit", self._committing)

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._who} {what}, with which its record in the inbox ends: leave commit and rollback to the end of the"
            " handler, and use session.begin_nested() for parts that may fail"
        )


class SqlInbox:
    """Record of processed messages, by which nodes skip those that are delivered again.

    ::

        @node("orders", inbox=SqlInbox(sessions))
        async def place(order: Order, session: AsyncSession) -> None:
            session.add(OrderRow(order))

    The message-id is written by the transaction in which the handler works. It is the one of the resource that the container
    makes for each message (``PerMessage``) of the type of *session_factory*'s sessions; without such a resource the
    inbox opens a session, passes it to the handler, and commits it at its end. A message that was processed is accepted without
    a call of the handler; one that has no message-id is rejected. Messages are distinguished by address and
    message-id.

    Args:
        session_factory: A ``sessionmaker``, or an ``async_sessionmaker`` for applications of asyncio
            (:mod:`amqp_rt.aio`).
        table: Name of the table.
        remembered_s: Seconds for which processed messages are recognized; older rows are deleted, 1,000 at a time.
        metadata: Where the table is declared, by default a ``MetaData`` of its own.

    Raises:
        TypeError: *session_factory* makes no sessions.
        ValueError: *remembered_s* is no number of seconds.
    """

    def __init__(
        self,
        session_factory: Factory,
        *,
        table: str = "amqp_inbox",
        remembered_s: float = REMEMBERED_S,
        metadata: MetaData | None = None,
    ) -> None:
        self._kind = kind_of_sessions(session_factory)
        check_seconds("remembered_s", remembered_s)
        self.name = table
        self._factory = session_factory
        self._remembered_s = remembered_s
        #: Declaration of the table, for ``create_all`` and for Alembic.
        self.metadata = MetaData() if metadata is None else metadata
        self._table = inbox_table(self.metadata, table)
        self._pruned_at = -_PRUNE_S
        self._pause_s = _PRUNE_S

    def __repr__(self) -> str:
        return f"<SqlInbox {self.name!r}>"

    # --- tables ---

    async def create_tables(self) -> None:
        """Create the table unless it exists; see :meth:`schema` for migrations."""
        await in_transaction(
            self._factory,
            lambda session: self._table.create(session.connection(), checkfirst=True),
        )

    def schema(self, dialect: str) -> list[str]:
        """Return the statements that create the table, in the SQL of *dialect*: ``"postgresql"``, ``"sqlite"``."""
        return list(statements(self._table, dialect))

    # --- for nodes ---

    @property
    def session_type(self) -> type:
        """Class of the sessions, by which handlers request theirs."""
        return self._kind

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """Open a session for one message: the end of the block commits it, an exception rolls it back."""
        async with opened(self._factory) as session:
            yield session
            await call(session, Session.commit)

    @asynccontextmanager
    async def recorded(
        self, session: Session | AsyncSession, address: str, message_id: MessageId
    ) -> AsyncIterator[bool]:
        """Record a message in the transaction of *session*; the block gets whether it is to be processed.

        The block leaves the transaction open: a commit in it fails before it reaches the database. While another
        transaction that records the same message is open, this waits for its end. Now and then, old rows are deleted
        first, in a transaction of its own.

        If the block raises or is cancelled, the transaction has to be rolled back.

        Raises:
            RuntimeError: The block has ended the transaction.
        """
        async with self.recorded_batch(session, [(address, message_id)]) as are_new:
            yield are_new[0]

    @asynccontextmanager
    async def recorded_batch(
        self, session: Session | AsyncSession, messages: Sequence[tuple[str, MessageId]]
    ) -> AsyncIterator[Sequence[bool]]:
        """Record messages, each an address and a message-id, as :meth:`recorded` does one.

        The block gets, for each of them, whether it is to be processed.

        Raises:
            RuntimeError: The block has ended the transaction.
        """
        await self._prune_if_due()
        are_new, record = await call(session, self._record, messages)
        if record is None:
            yield are_new
            return
        try:
            yield are_new
            record.refuse_if_ended()
        finally:
            record.release()

    async def forget(
        self, session: Session | AsyncSession, messages: Sequence[tuple[str, MessageId]]
    ) -> None:
        """Delete the records of *messages* in the transaction of *session*: they have not been processed."""
        await call(session, self._forget, messages)

    def _record(
        self, session: Session, messages: Sequence[tuple[str, MessageId]]
    ) -> tuple[list[bool], _Record | None]:
        are_new = self.record_many_now(session, messages)
        if True not in are_new:
            return are_new, None
        kind = "message" if len(messages) == 1 else "batch"
        who = f"inbox {self.name}: the handler of a {kind} to {messages[0][0]!r}"
        return are_new, _Record(session, who)

    def record_now(self, session: Session, address: str, message_id: MessageId) -> bool:
        """Record a message in the transaction of *session*; return False if it was processed before. This blocks.

        For receivers without a node; ``await session.run_sync(inbox.record_now, address, message_id)`` with an
        ``AsyncSession``.
        """
        return self.record_many_now(session, [(address, message_id)])[0]

    def record_many_now(
        self, session: Session, messages: Sequence[tuple[str, MessageId]]
    ) -> list[bool]:
        """Record messages, each an address and a message-id, as :meth:`record_now` does one. This blocks.

        Of a message that *messages* has several times, the first one is recorded, and the others count as processed.
        """
        connection = session.connection()
        dialect = connection.dialect.name
        refuse_unless_supported(dialect)
        table = self._table
        keys = [_key(*each) for each in messages]
        now = time.time()
        # In one order everywhere: two transactions that wait for each other's rows would be a deadlock.
        rows = [
            {"address": address, "message": message, "at": now}
            for address, message in sorted(set(keys))
        ]
        make: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
        adding = make(table).on_conflict_do_nothing().returning(table.c.address, table.c.message)
        new = {(address, message) for address, message in connection.execute(adding, rows)}
        are_new = []
        for key in keys:
            are_new.append(key in new)
            new.discard(key)
        return are_new

    def _forget(self, session: Session, messages: Sequence[tuple[str, MessageId]]) -> None:
        table = self._table
        removing = delete(table).where(
            table.c.address == bindparam("of_address"), table.c.message == bindparam("of_message")
        )
        keys = [_key(*each) for each in messages]
        session.connection().execute(
            removing,
            [{"of_address": address, "of_message": message} for address, message in keys],
        )

    async def _prune_if_due(self) -> None:
        now = time.monotonic()
        if now < self._pruned_at + self._pause_s:
            return
        self._pruned_at = now
        try:
            count = await in_transaction(self._factory, self.prune)
        except SQLAlchemyError as error:
            # The message is processed nevertheless, and the next deletion takes more.
            _log.warning("inbox %s: old rows are not deleted: %s", self.name, error)
            return
        self._pause_s = _PRUNE_S if count < PRUNED_MAX else _PRUNE_MORE_S

    def prune(self, session: Session, most: int = PRUNED_MAX) -> int:
        """Delete at most *most* rows that are older than ``remembered_s``; return their number."""
        table = self._table
        key = tuple_(table.c.address, table.c.message)
        old = (
            select(table.c.address, table.c.message)
            .where(table.c.at < time.time() - self._remembered_s)
            .limit(most)
        )
        return session.connection().execute(delete(table).where(key.in_(old))).rowcount
