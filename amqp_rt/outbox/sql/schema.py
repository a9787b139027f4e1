"""Tables of outboxes and inboxes in databases of SQLAlchemy."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects import registry
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateIndex, CreateTable

from ...errors import LocalProtocolError

#: Characters of a name in an index. Longer ones are stored as their digest.
NAME_MAX: Final = 255

#: States of a row: to be sent, and rejected by its receiver.
WAITING: Final = 0
REFUSED: Final = 1


#: Octets of the name of a channel in PostgreSQL.
CHANNEL_MAX: Final = 63
#: Databases that are supported, as SQLAlchemy names them.
DIALECTS: Final = frozenset({"postgresql", "sqlite"})


def outbox_table(metadata: MetaData, name: str) -> Table:
    """Declare the table of an outbox."""
    waiting = text(f"state = {WAITING}")
    refused = text(f"state = {REFUSED}")
    return Table(
        name,
        metadata,
        # SQLite numbers rows only in a column of the type INTEGER.
        Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
        Column("address", String(NAME_MAX), nullable=False),
        # Messages with the same value leave in the order of their ids; null promises no order.
        Column("stream", String(NAME_MAX)),
        Column("payload", LargeBinary(), nullable=False),
        Column("state", SmallInteger(), nullable=False, server_default=str(WAITING)),
        # Seconds since 1970 before which the message is not sent again.
        Column("due", Double(), nullable=False, server_default="0"),
        Column("reason", Text()),
        Column("created", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Index(
            f"{name}_by_address",
            "address",
            "id",
            postgresql_where=waiting,
            sqlite_where=waiting,
        ),
        Index(
            f"{name}_by_stream",
            "address",
            "stream",
            "id",
            postgresql_where=waiting,
            sqlite_where=waiting,
        ),
        Index(f"{name}_refused", "id", postgresql_where=refused, sqlite_where=refused),
        # Otherwise the number of a deleted row could be given to another one while its message is sent.
        sqlite_autoincrement=True,
    )


def inbox_table(metadata: MetaData, name: str) -> Table:
    """Declare the table of an inbox."""
    return Table(
        name,
        metadata,
        Column("address", String(NAME_MAX), primary_key=True),
        Column("message", String(NAME_MAX), primary_key=True),
        # Seconds since 1970.
        Column("at", Double(), nullable=False),
        Index(f"{name}_by_time", "at"),
    )


def short(text: str) -> str:
    """Return *text*, or its digest if it is longer than a column takes, or has a NUL, which PostgreSQL stores in no text."""
    if len(text) <= NAME_MAX and "\0" not in text:
        return text
    return f"sha256:{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def channel_of(table: Table) -> str:
    """Return the channel for notices about *table*: its name, of at most 63 octets, as PostgreSQL takes them."""
    name: str = table.fullname
    if len(name.encode()) <= CHANNEL_MAX:
        return name
    return f"amqp_outbox_{sha256(name.encode()).hexdigest()[:40]}"


def statements(table: Table, dialect: str) -> Iterator[str]:
    """Yield the statements that create *table*, in the SQL of *dialect*, such as ``"postgresql"``.

    Raises:
        LocalProtocolError: The dialect is not supported.
    """
    refuse_unless_supported(dialect)
    kind: Any = registry.load(dialect)
    yield str(CreateTable(table).compile(dialect=kind())).strip()
    for index in sorted(table.indexes, key=lambda each: str(each.name)):
        yield str(CreateIndex(index).compile(dialect=kind())).strip()


def refuse_unless_supported(dialect: str) -> None:
    """Check that the tables work in databases of *dialect*.

    Others compare addresses without regard to case, or limit payloads to 64 KiB: messages would be lost there.

    Raises:
        LocalProtocolError: They do not.
    """
    if dialect not in DIALECTS:
        raise LocalProtocolError(
            f"outboxes and inboxes are kept in PostgreSQL and SQLite, not in {dialect!r}: choose another database",
            condition="amqp:not-implemented",
        )


def refuse_if_missing(connection: Connection, table: Table) -> None:
    """Check that the database has *table*.

    Raises:
        LocalProtocolError: It does not; the text tells how to create it.
    """
    if not inspect(connection).has_table(table.name, schema=table.schema):
        raise LocalProtocolError(
            f"the database {connection.engine.url.render_as_string()} has no table {table.fullname!r}: create it with"
            " create_tables(), or with the statements that schema() returns",
            condition="amqp:precondition-failed",
        )
