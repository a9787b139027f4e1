"""Application with a database: orders become rows and invoices, each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    insert,
    select,
)
from sqlalchemy.orm import Session, sessionmaker

from amqp_rt import node
from amqp_rt.outbox import SqlInbox, SqlOutbox


@dataclass
class Shop:
    """Database of the application, with outbox and inbox."""

    sessions: sessionmaker[Session]
    orders: Table
    outbox: SqlOutbox
    inbox: SqlInbox

    def rows(self) -> list[str]:
        """Return the orders that were committed."""
        with self.sessions() as session:
            return sorted(session.scalars(select(self.orders.c.body)))

    def clear(self) -> None:
        """Delete all rows."""
        with self.sessions.begin() as session:
            for table in self.outbox.metadata.sorted_tables:
                session.execute(delete(table))


def engine_of(url: Any, **options: Any) -> Engine:
    """Return an engine whose commits survive the end of the program, as tests need, but not that of the machine."""
    made = create_engine(url, **options)
    if made.dialect.name == "sqlite":
        event.listen(made, "connect", lambda found, _: found.execute("PRAGMA synchronous=OFF"))
    return made


def declare(engine: Engine, *, create: bool = True, **options: Any) -> Shop:
    """Declare the tables in the database of *engine*, and create them unless they are there."""
    metadata = MetaData()
    # No key: an order that is processed twice has two rows.
    orders = Table("orders", metadata, Column("body", String))
    sessions = sessionmaker(engine)
    shop = Shop(
        sessions,
        orders,
        SqlOutbox(sessions, metadata=metadata, **options),
        SqlInbox(sessions, metadata=metadata),
    )
    if create:
        metadata.create_all(engine)
    return shop


def nodes_of(shop: Shop) -> list[Callable[..., Any]]:
    """Return the handler of orders."""

    @node("orders", inbox=shop.inbox, thread=True)
    def place(order: str, session: Session) -> None:
        session.execute(insert(shop.orders).values(body=order))
        shop.outbox.send(session, "invoices", f"invoice for {order}")

    return [place]


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the URL of an empty database for SQLAlchemy."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'shop.db'}"
    found: str = request.getfixturevalue("cleared_database")
    return found.replace("postgresql://", "postgresql+psycopg://")
