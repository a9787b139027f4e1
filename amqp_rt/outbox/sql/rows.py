"""Rows of an outbox in a database of SQLAlchemy: functions of a session that blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Select, Table, delete, exists, func, or_, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from ...container.boxes import Refused
from ...container.sending import refusal
from ...limits import MIB
from ...outcomes import Accepted, Outcome, Rejected
from .schema import REFUSED, WAITING, refuse_if_missing

#: Messages, and octets of their payloads, that a relay takes at once. A larger message is taken alone.
BATCH: Final = 100
BATCH_OCTETS: Final = 8 * MIB
#: Addresses that are looked for at once.
ADDRESSES_MAX: Final = 1_000
#: Seconds after which a message that was released is sent again, or an address that was refused is tried again.
RETRY_S: Final = 5.0
#: Databases in which several relays share the rows.
_SKIPS_LOCKED: Final = frozenset({"postgresql"})


class OutboxRow(NamedTuple):
    """Message of an outbox."""

    id: int
    payload: bytes


class _Found(NamedTuple):
    """Row that may be sent, without its payload."""

    id: int
    stream: str | None
    octets: int
    due: float


class OutboxRows:
    """Queries and changes of the rows of one outbox.

    Args:
        table: Table of the outbox.
        mapped: Class that is mapped to it, by which sessions find the database.
    """

    def __init__(self, table: Table, mapped: type) -> None:
        self._table = table
        self._mapped = mapped
        #: Name of the table, of the outbox in logs, and of the channel for notices.
        self.name: str = table.name

    def check(self, session: Session) -> None:
        """Check that the table exists.

        Raises:
            LocalProtocolError: It does not.
        """
        refuse_if_missing(self.connection(session), self._table)

    def engine(self, session: Session) -> Engine:
        """Return the engine of the database with the table."""
        return session.get_bind(self._mapped).engine

    def connection(self, session: Session) -> Connection:
        """Return the connection of *session* to the database with the table."""
        return session.connection(bind_arguments={"mapper": self._mapped})

    def shares(self, session: Session) -> bool:
        """Return whether several relays may work at once: rows are locked while they are sent."""
        return self.engine(session).dialect.name in _SKIPS_LOCKED

    # --- for the relay ---

    def addresses(self, session: Session) -> list[str]:
        """Return the addresses of messages that may be sent now."""
        table = self._table
        found = (
            select(table.c.address)
            .where(table.c.state == WAITING, table.c.due <= time.time())
            .distinct()
            .limit(ADDRESSES_MAX)
        )
        return list(self.connection(session).scalars(found))

    def take(self, session: Session, address: str, most: int) -> list[OutboxRow]:
        """Return at most *most* messages to *address* in the order in which they are to be sent, and lock them if possible.

        Of each stream these are the first one and those that follow it without a gap: one that is locked or not
        due yet holds up the rest of its stream.
        """
        connection = self.connection(session)
        heads = [_Found(*row) for row in connection.execute(self._heads(address))]
        streams = {each.stream for each in heads if each.stream is not None}
        followers = self._followers(connection, address, heads, streams) if streams else []
        chosen: list[int] = []
        octets = 0
        for each in sorted([*heads, *followers]):
            octets += each.octets
            if chosen and (octets > BATCH_OCTETS or len(chosen) >= most):
                break
            chosen.append(each.id)
        if not chosen:
            return []
        table = self._table
        payloads = (
            select(table.c.id, table.c.payload).where(table.c.id.in_(chosen)).order_by(table.c.id)
        )
        return [OutboxRow(row.id, bytes(row.payload)) for row in connection.execute(payloads)]

    def _columns(self) -> list[Any]:
        table = self._table
        return [table.c.id, table.c.stream, func.length(table.c.payload), table.c.due]

    def _heads(self, address: str) -> Select[Any]:
        """Return the query of the first message of each stream, and of all messages without one."""
        table = self._table
        earlier = table.alias("earlier")
        is_later = exists().where(
            earlier.c.address == table.c.address,
            earlier.c.stream == table.c.stream,
            earlier.c.state == WAITING,
            earlier.c.id < table.c.id,
        )
        return (
            select(*self._columns())
            .where(
                table.c.address == address,
                table.c.state == WAITING,
                table.c.due <= time.time(),
                or_(table.c.stream.is_(None), ~is_later),
            )
            .order_by(table.c.id)
            .limit(BATCH)
            # No effect in SQLite, which has no such locks.
            .with_for_update(skip_locked=True, of=table)
        )

    def _followers(
        self, connection: Connection, address: str, heads: Sequence[_Found], streams: set[str]
    ) -> list[_Found]:
        """Return the messages that follow *heads* without a gap, and lock them."""
        table = self._table
        first = min(each.id for each in heads if each.stream is not None)
        query = (
            select(*self._columns())
            .where(
                table.c.address == address,
                table.c.stream.in_(streams),
                table.c.state == WAITING,
                table.c.id > first,
            )
            .order_by(table.c.id)
            .limit(BATCH)
        )
        there = [_Found(*row) for row in connection.execute(query)]
        locked = query.with_for_update(skip_locked=True, of=table)
        ours = {row.id for row in connection.execute(locked)} if there else set()
        taken = {each.id for each in heads}
        now = time.time()
        found = []
        stopped: set[str | None] = set()
        for each in there:
            if each.id in taken or each.stream in stopped:
                continue
            if each.id in ours and each.due <= now:
                found.append(each)
            else:
                stopped.add(each.stream)
        return found

    def finish(self, session: Session, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        """Delete messages that were accepted; keep those that were rejected, and let the others wait."""
        connection = self.connection(session)
        table = self._table
        accepted = []
        for row, outcome in outcomes:
            if isinstance(outcome, Accepted):
                accepted.append(row)
                continue
            values: dict[str, Any] = {"reason": str(refusal(outcome))}
            if isinstance(outcome, Rejected):
                values["state"] = REFUSED
            else:
                values["due"] = time.time() + RETRY_S
            connection.execute(update(table).where(table.c.id == row).values(values))
        if accepted:
            connection.execute(delete(table).where(table.c.id.in_(accepted)))

    def finish_and_commit(self, session: Session, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        """Record outcomes as :meth:`finish` does, and end the transaction that has locked the rows."""
        self.finish(session, outcomes)
        session.commit()

    # --- for the application ---

    def pending(self, session: Session) -> int:
        """Return the number of messages that are neither accepted nor rejected."""
        table = self._table
        count = select(func.count()).select_from(table).where(table.c.state == WAITING)
        return int(self.connection(session).scalar(count) or 0)

    def refused(self, session: Session, most: int) -> list[Refused]:
        """Return the first *most* rejected messages."""
        table = self._table
        query = (
            select(table.c.id, table.c.address, table.c.reason, table.c.payload)
            .where(table.c.state == REFUSED)
            .order_by(table.c.id)
            .limit(most)
        )
        return [
            Refused(row.id, row.address, row.reason or "", bytes(row.payload))
            for row in self.connection(session).execute(query)
        ]

    def retry(self, session: Session, ids: Sequence[int]) -> None:
        """Let rejected messages be sent again."""
        table = self._table
        chosen = update(table).where(table.c.state == REFUSED, table.c.id.in_(ids))
        self.connection(session).execute(chosen.values(state=WAITING, reason=None, due=0.0))

    def drop(self, session: Session, ids: Sequence[int]) -> None:
        """Delete rejected messages."""
        table = self._table
        self.connection(session).execute(
            delete(table).where(table.c.state == REFUSED, table.c.id.in_(ids))
        )
