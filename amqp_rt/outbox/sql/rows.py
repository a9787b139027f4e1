"""Rows of an outbox in a database of SQLAlchemy: functions of a session that blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Select, Table, delete, func, literal_column, or_, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from ...container.boxes import Refused
from ...container.links import refusal
from ...limits import MIB
from ...outcomes import Accepted, Outcome, Rejected
from .schema import REFUSED, WAITING, channel_of, refuse_if_missing, refuse_unless_supported

#: Messages, and octets of their payloads, that a relay takes at once. A larger message is taken alone.
BATCH: Final = 100
BATCH_OCTETS: Final = 8 * MIB
#: Addresses that are looked for at once.
ADDRESSES_MAX: Final = 1_000
#: Messages that are read at once to find the first ones of streams, and reads in one search.
PAGE: Final = 500
PAGES_MAX: Final = 100
#: Seconds after which a message that was released is sent again, or an address that was refused is tried again.
RETRY_S: Final = 5.0
#: Time after which PostgreSQL ends a transaction that holds rows and does nothing.
IDLE: Final = "30s"
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
        by_group: Whether messages have an order by their streams, instead of one for each address.
    """

    def __init__(self, table: Table, mapped: type, *, by_group: bool) -> None:
        self._table = table
        self._by_group = by_group
        #: Condition of the partial indexes, for which databases know no parameters.
        self._waits = table.c.state == literal_column(str(WAITING))
        self._mapped = mapped
        #: Name of the table with its schema, and of the outbox in logs.
        self.name: str = table.fullname
        #: Channel for notices.
        self.channel = channel_of(table)

    def check(self, session: Session) -> None:
        """Check that the table exists.

        Raises:
            LocalProtocolError: It does not, or the database is none of those that are supported.
        """
        refuse_unless_supported(self.engine(session).dialect.name)
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

    def addresses(self, session: Session, after: str, to: str | None = None) -> list[str]:
        """Return the first ``ADDRESSES_MAX`` addresses with messages that may be sent now, in the order of the database.

        Args:
            session: Where to look.
            after: Address before the first one.
            to: The last one; None for no limit.
        """
        table = self._table

        def least(*conditions: Any) -> Any:
            within = () if to is None else (table.c.address <= to,)
            return select(func.min(table.c.address)).where(self._waits, *conditions, *within)

        # One step through the index for each address, however many messages there are: DISTINCT reads them all.
        found = select(least(table.c.address > after).scalar_subquery().label("address")).cte(
            "found", recursive=True
        )
        following = least(table.c.address > found.c.address).scalar_subquery()
        found = found.union_all(select(following).where(found.c.address.is_not(None)))
        there = select(table.c.due).where(self._waits, table.c.address == found.c.address)
        now = time.time()
        if self._by_group:
            is_due: Any = there.where(table.c.due <= now).exists()
        else:
            is_due = there.order_by(table.c.id).limit(1).scalar_subquery() <= now
        query = select(found.c.address).where(found.c.address.is_not(None), is_due)
        return list(self.connection(session).scalars(query.limit(ADDRESSES_MAX)))

    def take(self, session: Session, address: str, most: int) -> list[OutboxRow]:
        """Return at most *most* messages to *address* in the order in which they are to be sent, and lock them if possible.

        Of each stream these are the first one and those that follow it without a gap: one that is locked or not
        due yet holds up the rest of its stream.
        """
        connection = self.connection(session)
        if connection.dialect.name == "postgresql":
            # The locks of a machine that has gone without a word are freed, sooner than its connection is.
            connection.execute(
                select(func.set_config("idle_in_transaction_session_timeout", IDLE, True))
            )
        if self._by_group:
            heads = self._heads(connection, address, most)
        else:
            heads = self._head(connection, address)
        followers = self._followers(connection, address, heads)
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

    def _page(self, address: str, after: int, most: int) -> Select[Any]:
        """Return the query of the first *most* messages behind *after*, locked or not, and due or not."""
        table = self._table
        return (
            select(*self._columns())
            .where(table.c.address == address, self._waits, table.c.id > after)
            .order_by(table.c.id)
            .limit(most)
        )

    def _lock(self, connection: Connection, found: Iterable[_Found]) -> set[int]:
        """Lock those of *found* that are due and that no relay has locked or finished; return their ids.

        SQLite has no such locks, and only one relay.
        """
        now = time.time()
        ids = [each.id for each in found if each.due <= now]
        if not ids:
            return set()
        table = self._table
        locked = (
            select(table.c.id)
            # What has changed since it was found is left out: conditions are checked again once a row is locked.
            .where(table.c.id.in_(ids), self._waits, table.c.due <= now)
            .with_for_update(skip_locked=True, of=table)
        )
        return set(connection.scalars(locked))

    def _head(self, connection: Connection, address: str) -> list[_Found]:
        """Return the first message, and lock it; none if it is locked or not due, which holds up all others."""
        found = [_Found(*row) for row in connection.execute(self._page(address, 0, 1))]
        return found if self._lock(connection, found) else []

    def _heads(self, connection: Connection, address: str, most: int) -> list[_Found]:
        """Return messages without a stream, and the first one of each stream, and lock them."""
        table = self._table
        heads: list[_Found] = []
        seen: set[str] = set()
        last = 0
        for _ in range(PAGES_MAX):
            query = self._page(address, last, PAGE)
            if seen:
                # The rest of a stream with many messages is passed over by the database.
                known = list(seen)[:PAGE]
                query = query.where(or_(table.c.stream.is_(None), table.c.stream.not_in(known)))
            page = [_Found(*row) for row in connection.execute(query)]
            first = []
            for each in page:
                if each.stream is None or each.stream not in seen:
                    first.append(each)
                if each.stream is not None:
                    seen.add(each.stream)
            room = max(most - len(heads), 0)
            while first and room:
                # No more than are sent: other relays share the rest.
                tried, first = first[:room], first[room:]
                ours = self._lock(connection, tried)
                heads += [each for each in tried if each.id in ours]
                room = max(most - len(heads), 0)
            if len(page) < PAGE or not room:
                break
            last = page[-1].id
        return heads

    def _followers(
        self, connection: Connection, address: str, heads: Sequence[_Found]
    ) -> list[_Found]:
        """Return the messages that follow *heads* in their streams without a gap, and lock them."""
        heads = [each for each in heads if each.stream is not None]
        if not heads:
            return []
        query = self._page(address, min(each.id for each in heads), BATCH)
        if self._by_group:
            query = query.where(self._table.c.stream.in_({each.stream for each in heads}))
        there = [_Found(*row) for row in connection.execute(query)]
        ours = self._lock(connection, there)
        taken = {each.id for each in heads}
        found = []
        stopped: set[str | None] = set()
        for each in there:
            stream = each.stream if self._by_group else ""
            if each.id in taken or stream in stopped:
                continue
            if each.id in ours:
                found.append(each)
            else:
                stopped.add(stream)
        return found

    def finish(
        self,
        session: Session,
        outcomes: Iterable[tuple[int, Outcome]],
        others: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> None:
        """Delete messages that were accepted; keep those that were rejected, and let those that were released wait.

        Args:
            session: Where to do it.
            outcomes: The messages, and their outcomes.
            others: Messages without an outcome, which no relay takes for *seconds*.
            seconds: 0 gives them back.
        """
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
        if others:
            lent = update(table).where(table.c.id.in_(others), self._waits)
            connection.execute(lent.values(due=time.time() + seconds))

    # --- for the application ---

    def pending(self, session: Session) -> int:
        """Return the number of messages that are neither accepted nor rejected."""
        table = self._table
        count = select(func.count()).select_from(table).where(self._waits)
        return int(self.connection(session).scalar(count) or 0)

    def refused(self, session: Session, most: int) -> list[Refused]:
        """Return the first *most* rejected messages."""
        table = self._table
        query = (
            select(table.c.id, table.c.address, table.c.reason, table.c.payload)
            .where(table.c.state == literal_column(str(REFUSED)))
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
