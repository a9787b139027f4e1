"""Outbox in a database of SQLAlchemy: messages are rows, written by the application's own transactions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeVar

import anyio
from sqlalchemy import MetaData, event, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, registry, scoped_session

from ...container.boxes import Refused
from ...container.codecs import default_codecs
from ...container.composing import build_message
from ...container.connections import Connection
from ...container.loops import require_trio
from ...limits import check_seconds
from ...message import Message, MessageId
from ...observers import Observer
from ..tracing import CreationTraces
from .relays import OutboxRelay
from .rows import OutboxRows
from .schema import NAME_MAX, outbox_table, short, statements
from .working import Factory, in_transaction, kind_of_sessions

T = TypeVar("T")

#: Seconds between looks for the end of :meth:`SqlOutbox.flush`, at first and at most.
_FLUSH_S: Final = (0.01, 0.5)
#: Rejected messages that :meth:`SqlOutbox.refused` returns at once.
REFUSED_MAX: Final = 1_000


class SqlOutbox:
    """Messages that are committed by the transactions of an application, and then sent by a relay.

    ::

        outbox = SqlOutbox(sessionmaker(create_engine("postgresql+psycopg://...")))
        with sessions.begin() as session:
            session.add(Order(number=1))
            outbox.send(session, "invoices", {"order": 1})

    *At least once*: a row is deleted after its message was accepted; after a crash in between it is sent again, with the
    same message-id. On PostgreSQL any number of processes may relay: they share the rows (``FOR UPDATE SKIP
    LOCKED``), and commits wake them (``NOTIFY``). On SQLite only one process may, which looks for messages every *poll_s*.

    Args:
        session_factory: A ``sessionmaker``, or an ``async_sessionmaker`` for applications of asyncio
            (:mod:`amqp_rt.aio`).
        table: Name of the table.
        order: ``"address"``: messages to one address leave in the order of their rows. ``"group"``: those with the
            same ``group_id`` do, and relays share the others. A message that is released waits, and may be overtaken
            by messages that were sent with it.
        poll_s: Seconds between looks for messages, where no notices arrive.
        metadata: Where the table is declared, by default a ``MetaData`` of its own.
        observe: Observers of messages as they are written, such as ``Otel()``: their trace context goes with the messages.

    Raises:
        TypeError: *session_factory* makes no sessions.
        ValueError: *order* is none of these, or *poll_s* is no number of seconds.
    """

    def __init__(
        self,
        session_factory: Factory,
        *,
        table: str = "amqp_outbox",
        order: Literal["address", "group"] = "address",
        poll_s: float = 1.0,
        metadata: MetaData | None = None,
        observe: Iterable[Observer] = (),
    ) -> None:
        kind_of_sessions(session_factory)
        if order not in ("address", "group"):
            raise ValueError(f"order is 'address' or 'group', not {order!r}")
        check_seconds("poll_s", poll_s, least=0.001)
        self.name = table
        self._factory = session_factory
        self._in_loop = isinstance(session_factory, async_sessionmaker)
        self._by_group = order == "group"
        self._traces = CreationTraces(observe)
        self._poll_s = poll_s
        #: Declaration of the table, for ``create_all`` and for Alembic.
        self.metadata = MetaData() if metadata is None else metadata
        self._table = outbox_table(self.metadata, table)
        # Objects, which a session writes when it commits: send() need not wait for the database.
        self._mapped: Any = type("OutboxRow", (), {})
        registry(metadata=self.metadata).map_imperatively(self._mapped, self._table)
        self._rows = OutboxRows(self._table, self._mapped, by_group=self._by_group)
        self._relays: set[OutboxRelay] = set()
        #: Key in ``Session.info`` of transactions with messages.
        self._mark = f"amqp_rt.outbox {self._rows.name}"

    def __repr__(self) -> str:
        return f"<SqlOutbox {self.name!r}>"

    # --- tables ---

    async def create_tables(self) -> None:
        """Create the table unless it exists; see :meth:`schema` for migrations."""
        await in_transaction(
            self._factory,
            lambda session: self._table.create(self._rows.connection(session), checkfirst=True),
        )

    def schema(self, dialect: str) -> list[str]:
        """Return the statements that create the table, in the SQL of *dialect*: ``"postgresql"``, ``"sqlite"``."""
        return list(statements(self._table, dialect))

    # --- sending ---

    def send(
        self,
        session: Session | AsyncSession | scoped_session[Any],
        address: str,
        message: object,
        **properties: Any,
    ) -> MessageId:
        """Send *message* to *address* once the transaction of *session* is committed; return its message-id.

        The message becomes an object of the session, like those of the application. This does not wait.

        Args:
            session: A session of the application, of either kind.
            address: Address to send to, at most 255 characters.
            message: A :class:`~amqp_rt.message.Message`, or the payload of one.
            properties: As for :meth:`Sender.send <amqp_rt.container.sending.Sender.send>`. A payload is sent as a
                durable message unless ``durable`` is given, and a message without ``message_id`` gets one.

        Raises:
            EncodeError: A value has no encoding.
            ValueError: *address* is too long, or empty, or has a NUL.
        """
        if "\0" in address:
            raise ValueError(f"an address has no NUL, as databases store none: {address!r:.80}")
        if not 0 < len(address) <= NAME_MAX:
            raise ValueError(f"an address has 1 to {NAME_MAX} characters, not {len(address)}")
        given = {} if isinstance(message, Message) else {"durable": True}
        built = build_message(message, {**given, **properties}, default_codecs().encoding)
        message_id = built.message_id
        if message_id is None:
            message_id = str(uuid.uuid4())
            built = built.replace(message_id=message_id)
        stream: str | None = ""
        if self._by_group:
            stream = None if built.group_id is None else short(built.group_id)
        traced = self._traces.traced(address, built)
        row = self._mapped(address=address, stream=stream, payload=bytes(traced.encode()))
        blocking = _blocking(session)
        blocking.add(row)
        self._follow(blocking)
        return message_id

    def _follow(self, session: Session) -> None:
        """Wake relays when *session* commits."""
        if not event.contains(session, "before_commit", self._committing):
            event.listen(session, "before_commit", self._committing)
            event.listen(session, "after_commit", self._committed)
        session.info[self._mark] = "added"

    def _committing(self, session: Session) -> None:
        # The end of a savepoint is not that of the transaction.
        if session.info.get(self._mark) != "added" or session.in_nested_transaction():
            return
        session.info[self._mark] = "committing"
        connection = self._rows.connection(session)
        if connection.dialect.name == "postgresql":
            # A part of the transaction: relays get it after the commit, or never.
            connection.execute(select(func.pg_notify(self._rows.channel, "")))

    def _committed(self, session: Session) -> None:
        if session.info.get(self._mark) == "committing":
            del session.info[self._mark]
            for relay in list(self._relays):
                relay.wake()

    async def run(self, peer: Connection) -> None:
        """Send committed messages to *peer* until cancelled: :meth:`Outbox.run`.

        While the database is not there, the relay waits. Cancelling gives messages that were sent two seconds to get
        their outcomes; those without are sent again.

        Raises:
            ConnectionLost: The connection has ended and is not established again.
            LocalProtocolError: The database has no such table, or is neither PostgreSQL nor SQLite.
            RuntimeError: *session_factory* needs asyncio, and trio runs without it.
        """
        require_trio("outbox.SqlOutbox.run")
        relay = OutboxRelay(
            self._rows, self._factory, peer, poll_s=self._poll_s, in_loop=self._in_loop
        )
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)

    # --- state ---

    async def pending(self) -> int:
        """Return the number of messages that are committed and neither accepted nor rejected."""
        return await self._in_transaction(self._rows.pending)

    async def flush(self) -> None:
        """Wait until all committed messages have been accepted or rejected, by the relay of any process."""
        least_s, most_s = _FLUSH_S
        while await self.pending():
            await anyio.sleep(least_s)
            least_s = min(2 * least_s, most_s)

    async def refused(self) -> list[Refused]:
        """Return the rejected messages, the first 1,000; they stay until :meth:`retry` or :meth:`drop`."""
        return await self._in_transaction(lambda session: self._rows.refused(session, REFUSED_MAX))

    async def retry(self, *ids: int) -> None:
        """Send the rejected messages with these *ids* again."""
        await self._in_transaction(lambda session: self._rows.retry(session, ids))
        for relay in list(self._relays):
            relay.wake()

    async def drop(self, *ids: int) -> None:
        """Delete the rejected messages with these *ids*."""
        await self._in_transaction(lambda session: self._rows.drop(session, ids))

    async def _in_transaction(self, work: Callable[[Session], T]) -> T:
        return await in_transaction(self._factory, work)


def _blocking(session: Session | AsyncSession | scoped_session[Any]) -> Session:
    """Return the session that blocks, in or behind *session*.

    Raises:
        TypeError: It is no session.
    """
    found: Any = session() if isinstance(session, scoped_session) else session
    if isinstance(found, AsyncSession):
        found = found.sync_session
    if not isinstance(found, Session):
        raise TypeError(f"a message is sent with a session of SQLAlchemy, not {session!r:.80}")
    return found
