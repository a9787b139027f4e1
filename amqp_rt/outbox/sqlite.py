"""Outbox and inbox of one process, on a connection to SQLite: each message is processed once and sent once.

A transaction of AMQP (Part 4) ends at the broker, one of SQLite at the file. :class:`SqliteOutbox` joins them
with two tables in the application's database. A message to send is a row, written by the commit that
writes the application's own rows, and sent afterwards, however long that takes. The message-ids of
processed messages are written by that commit too, so that a duplicate is recognized::

    outbox = SqliteOutbox(sqlite3.connect("shop.db"), "shop")
    nursery.start_soon(outbox.run, peer)
    async for delivery in orders:
        async with outbox.transaction() as work:
            if work.accept(delivery):
                database.execute("INSERT INTO orders VALUES (?)", (delivery.body,))
                work.send("invoices", {"order": delivery.body})

If the process, the connection or the broker stops at any moment: after it is back, the rows are there
once, and each message has been processed once and sent once.

* *Sent once* requires a peer that keeps durable termini, such as our broker with a store: each row is a
  delivery with the row's number as its tag, on a link that is resumed where it stopped (Part 2 §2.6.13),
  and settled after the row is deleted (rcv-settle-mode *second*). The sending container needs a fixed
  name, since a link is identified by it too. Any other peer may get a message twice after a crash or a
  lost connection, always with the same message-id.
* *Processed once* requires messages with a message-id, which a duplicate has too.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeAlias, cast

import trio

from ..container.boxes import Refused
from ..container.composing import build_message
from ..container.connections import Connection
from ..container.deliveries import Delivery
from ..container.links import Owner, refusal
from ..container.sending import Receipt, Sender
from ..errors import AmqpError, LocalProtocolError
from ..fronts.base import RCV_SECOND, OutgoingDelivery, SendingLink
from ..limits import check_seconds
from ..message import Message
from ..observers import Observer
from ..outcomes import RELEASED, Accepted, Error, Outcome, Received, Rejected
from ..termini import DURABLE_UNSETTLED, Target
from ..unsettled import Unsettled
from .tracing import CreationTraces

__all__ = ["Database", "SqliteOutbox", "Work"]

_log = logging.getLogger("amqp_rt.outbox")

#: Messages to one address that were sent and have no outcome.
WINDOW: Final = 100
#: Seconds after which a released message is sent again, or an address that was refused is tried again.
RETRY_S: Final = 5.0
#: Seconds for which the message-ids of processed messages are kept.
REMEMBERED_S: Final = 7 * 86_400.0

#: Seconds between two deletions of expired message-ids.
_TIDIED_S: Final = 3_600.0

#: States of a row: not sent yet, perhaps sent, and rejected.
_WAITING: Final = 0
_TRIED: Final = 1
_REFUSED: Final = 2

_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS amqp_outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        outbox TEXT NOT NULL,
        address TEXT NOT NULL,
        payload BLOB NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        reason TEXT)""",
    "CREATE INDEX IF NOT EXISTS amqp_outbox_by_address ON amqp_outbox (outbox, state, address, id)",
    """CREATE TABLE IF NOT EXISTS amqp_inbox (
        outbox TEXT NOT NULL,
        address TEXT NOT NULL,
        message TEXT NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (outbox, address, message)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS amqp_inbox_by_time ON amqp_inbox (outbox, at)",
)

_Row: TypeAlias = tuple[Any, ...]


class Database(Protocol):
    """Connection to SQLite as an outbox uses it; those of ``sqlite3`` and ``apsw`` will do."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def execute(self, statement: str, parameters: tuple[Any, ...] = (), /) -> Any:
        """Execute one statement, and return a cursor with ``fetchall``."""


def _require_trio() -> None:
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            "a SqliteOutbox runs under trio only, with a connection of amqp_rt.connect: in an application "
            "of asyncio, run it in a thread of its own, under trio.run"
        )


class Work:
    """Deliveries and messages that belong to one transaction."""

    def __init__(self, outbox: SqliteOutbox) -> None:
        self._outbox = outbox
        #: Deliveries to accept after the commit.
        self.deliveries: list[Delivery] = []
        #: Whether messages were written.
        self.sends = False

    def accept(self, delivery: Delivery) -> bool:
        """Process *delivery* in this transaction; return False if it has been processed before, so that
        nothing is left to do. It is accepted after the commit in either case.

        Raises:
            LocalProtocolError: The message has no message-id to recognize a duplicate by.
        """
        message_id = delivery.message.message_id
        if message_id is None:
            raise LocalProtocolError(
                "a message without message-id is not known when it comes again"
            )
        source = delivery.link.source
        address = "" if source is None or source.address is None else source.address
        found = self._outbox.database.execute(
            "INSERT INTO amqp_inbox VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1",
            (
                self._outbox.name,
                address,
                f"{type(message_id).__name__}:{message_id!r}",
                time.time(),
            ),
        ).fetchall()
        self.deliveries.append(delivery)
        return bool(found)

    def send(self, address: str, message: object, **properties: Any) -> None:
        """Send *message* to *address* after the commit.

        Args:
            address: Address to send to.
            message: A :class:`~amqp_rt.message.Message`, or the payload of one.
            properties: As for :meth:`Sender.send <amqp_rt.container.sending.Sender.send>`. A payload is
                sent as a durable message unless ``durable`` is given, and a message without
                ``message_id`` gets one.

        Raises:
            EncodeError: A value has no encoding.
        """
        given = {} if isinstance(message, Message) else {"durable": True}
        built = build_message(message, {**given, **properties})
        if built.message_id is None:
            built = built.replace(message_id=str(uuid.uuid4()))
        self._outbox.database.execute(
            "INSERT INTO amqp_outbox (outbox, address, payload) VALUES (?, ?, ?)",
            (self._outbox.name, address, self._outbox.traces.traced(address, built).encode()),
        )
        self.sends = True


class SqliteOutbox:
    """Outbox and inbox in the application's own database; under trio only.

    Args:
        database: Connection to SQLite, of ``sqlite3`` or ``apsw``, used by one thread. Messages are as
            durable as its settings: ``PRAGMA synchronous=FULL`` survives power failures, too.
        name: Name of this outbox, which distinguishes it in the database and in the names of its links.
            Only one process at a time may use it.
        remembered_s: Seconds for which duplicates of processed messages are recognized.
        observe: Observers of messages as they are written, such as ``Otel()``: their trace context goes with the messages.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        remembered_s: float = REMEMBERED_S,
        observe: Iterable[Observer] = (),
    ) -> None:
        if database.in_transaction:
            raise LocalProtocolError("the database has a transaction open: commit it first")
        self.database = database
        self.name = name
        check_seconds("remembered_s", remembered_s)
        self.remembered_s = remembered_s
        self.traces = CreationTraces(observe)
        self._lock = trio.Lock()
        self._work = trio.Event()
        #: Links of runs that were cancelled, whose detach the peer may not have answered yet.
        self._left: list[_Link] = []
        #: Tasks in ``flush``, resumed when fewer messages are pending.
        self._progress = trio.lowlevel.ParkingLot()
        for statement in _TABLES:
            database.execute(statement)
        if database.in_transaction:
            database.execute("COMMIT")

    def __repr__(self) -> str:
        return f"<SqliteOutbox {self.name!r}>"

    # --- Methods for the application ---

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Work]:
        """Open a transaction of the database for rows, deliveries and messages.

        The end of the block commits it; after an exception it is rolled back, and deliveries stay
        unsettled. Transactions run one at a time, and others wait. If cancelled while waiting, nothing
        has changed; if cancelled in the block, it is rolled back. The commit itself waits for the disk
        and blocks all tasks of the thread meanwhile.

        Raises:
            LocalProtocolError: The database has another transaction open; or, after the commit, a
                delivery was given another outcome in the block.
        """
        _require_trio()
        async with self._lock:
            if self.database.in_transaction:
                raise LocalProtocolError("the database has a transaction open: commit it first")
            work = Work(self)
            try:
                with _Transaction(self.database):
                    yield work
            except BaseException:
                # flush() may have counted rows that were rolled back.
                self._progress.unpark_all()
                raise
        if work.sends:
            self._work.set()
        faults: list[LocalProtocolError] = []
        for delivery in work.deliveries:
            try:
                # No effect on a link that has ended: the message is redelivered, and recognized then.
                delivery.accept()
            except LocalProtocolError as error:
                # The other deliveries are committed too and have to be accepted.
                faults.append(error)
        if faults:
            raise faults[0]

    async def pending(self) -> int:
        """Return the number of messages that are committed and neither accepted nor rejected."""
        await trio.lowlevel.checkpoint()
        return self._pending()

    def _pending(self) -> int:
        ((count,),) = self.database.execute(
            "SELECT count(*) FROM amqp_outbox WHERE outbox = ? AND state < ?", (self.name, _REFUSED)
        ).fetchall()
        return int(count)

    async def flush(self) -> None:
        """Wait until all committed messages have been accepted or rejected; :meth:`run` has to run.

        Cancellation leaves no trace.
        """
        _require_trio()
        await trio.lowlevel.checkpoint()
        while self._pending():
            await self._progress.park()

    async def refused(self) -> list[Refused]:
        """Return the rejected messages, which stay until :meth:`retry` or :meth:`drop`."""
        await trio.lowlevel.checkpoint()
        return [
            Refused(*row)
            for row in self.database.execute(
                "SELECT id, address, reason, payload FROM amqp_outbox"
                " WHERE outbox = ? AND state = ? ORDER BY id",
                (self.name, _REFUSED),
            ).fetchall()
        ]

    async def retry(self, *ids: int) -> None:
        """Send the rejected messages with these *ids* again."""
        await self._each(
            "UPDATE amqp_outbox SET state = 0, reason = NULL"
            " WHERE outbox = ? AND state = ? AND id = ?",
            ids,
        )

    async def drop(self, *ids: int) -> None:
        """Delete the rejected messages with these *ids*."""
        await self._each("DELETE FROM amqp_outbox WHERE outbox = ? AND state = ? AND id = ?", ids)

    async def _each(self, statement: str, ids: tuple[int, ...]) -> None:
        _require_trio()
        async with self._writing():
            for each in ids:
                self.database.execute(statement, (self.name, _REFUSED, each))
        self._work.set()

    # --- Sending ---

    async def run(self, peer: Connection) -> None:
        """Send committed messages to *peer* until cancelled, beginning with those of earlier processes.

        Messages that are not accepted stay: rejected ones are listed by :meth:`refused`; released ones,
        or those for an address that the peer refuses, are sent again after a while.

        Raises:
            ConnectionLost: The connection has ended and is not established again.
        """
        _require_trio()
        for left in self._left:
            # The name of a link is free once the peer has answered the detach.
            await left.wait_left()
        self._left.clear()
        await peer.wait_open()
        links: dict[str, _Link] = {}
        await self._forget()
        tidied = trio.current_time()
        try:
            while True:
                self._work = trio.Event()
                peer.refuse_if_closed()
                await self._record(links)
                await self._send(peer, links)
                with trio.move_on_after(RETRY_S):
                    await self._work.wait()
                if trio.current_time() >= tidied + _TIDIED_S:
                    tidied = trio.current_time()
                    await self._forget()
        finally:
            for link in links.values():
                link.suspend()
            self._left += links.values()

    async def _record(self, links: Mapping[str, _Link]) -> None:
        """Commit the outcomes of messages, and settle the deliveries only then."""
        heard = [found for link in links.values() for found in link.heard.values()]
        if not heard:
            return
        async with self._writing():
            for found in heard:
                self._record_one(found)
        for found in heard:
            found.finish()
        self._progress.unpark_all()

    async def _forget(self) -> None:
        async with self._writing():
            self.database.execute(
                "DELETE FROM amqp_inbox WHERE outbox = ? AND at < ?",
                (self.name, time.time() - self.remembered_s),
            )

    def _record_one(self, found: _PendingOutcome) -> None:
        outcome = found.outcome
        if isinstance(outcome, Accepted):
            self.database.execute("DELETE FROM amqp_outbox WHERE id = ?", (found.row,))
            return
        reason = str(refusal(outcome))
        _log.warning("message %d to %s: %s", found.row, found.link.address, reason)
        state = _REFUSED if isinstance(outcome, Rejected) else _WAITING
        self.database.execute(
            "UPDATE amqp_outbox SET state = ?, reason = ? WHERE id = ?", (state, reason, found.row)
        )

    async def _send(self, peer: Connection, links: dict[str, _Link]) -> None:
        addresses = self.database.execute(
            "SELECT DISTINCT address FROM amqp_outbox WHERE outbox = ? AND state < ?",
            (self.name, _REFUSED),
        ).fetchall()
        for (address,) in addresses:
            link = links.get(address)
            if link is None or link.is_over:
                # A peer that does not keep the link's state may accept a link that is not durable.
                durable = link is None or not link.was_refused or not link.is_durable
                if link is not None and durable and trio.current_time() < link.over_at + RETRY_S:
                    continue
                # During a reconnect it is unknown which container the peer is, and which state it keeps.
                await peer.wait_open()
                tried = self._rows(address, _TRIED, -1)
                link = links[address] = _Link(
                    peer.default_session,
                    address,
                    self.name,
                    peer.peer.container_id,
                    tried,
                    durable=durable,
                )
                link.on_change = self._changed
                peer.default_session.add(link)
            if self._due(link):
                # Marked before they leave: after a crash, rows that may have been sent are resumed.
                async with self._writing():
                    if link.is_over:
                        # The link ended while the application had the database.
                        continue
                    # The application may have rolled back rows found before.
                    rows = self._due(link)
                    for row, _ in rows:
                        self.database.execute(
                            "UPDATE amqp_outbox SET state = ? WHERE id = ?", (_TRIED, row)
                        )
                for row, payload in rows:
                    link.put(row, bytes(payload))

    def _changed(self) -> None:
        self._work.set()

    def _due(self, link: _Link) -> list[_Row]:
        """Return the rows that may be sent on *link* now."""
        room = WINDOW - link.pending
        if room <= 0:
            return []
        now = trio.current_time()
        return [
            row
            for row in self._rows(link.row_address, _WAITING, room)
            if link.retries.get(row[0], now) <= now
        ]

    def _rows(self, address: str, state: int, count: int) -> list[_Row]:
        found: list[_Row] = self.database.execute(
            "SELECT id, payload FROM amqp_outbox WHERE outbox = ? AND address = ? AND state = ?"
            " ORDER BY id LIMIT ?",
            (self.name, address, state, count),
        ).fetchall()
        return found

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """Open a transaction of our own, once the application has none."""
        async with self._lock:
            while self.database.in_transaction:  # noqa: ASYNC110 (no event for it)
                await trio.sleep(0.01)
            with _Transaction(self.database):
                yield


class _Transaction:
    """Transaction of the database, committed at the end of the block or rolled back."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._database.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")


class _PendingOutcome:
    """Outcome of one message, not committed yet."""

    def __init__(self, link: _Link, row: int, outcome: Outcome, raw: Any, receipt: Receipt) -> None:
        self.link = link
        self.row = row
        self.outcome = outcome
        self._raw = raw
        self._receipt = receipt

    def finish(self) -> None:
        """Settle the delivery, whose outcome is committed."""
        if self._raw is not None and not self._raw.settled:
            self._raw.settle()
        if not isinstance(self.outcome, Accepted | Rejected):
            self.link.retries[self.row] = trio.current_time() + RETRY_S
        self.link.finished(self.row, self._receipt, self.outcome)


def _tag(row: int) -> bytes:
    return row.to_bytes(8, "big")


class _Link(Sender):
    """Link to one address. Its delivery-tags are the numbers of rows, in whichever process it attaches."""

    def __init__(
        self,
        session: Owner,
        address: str,
        name: str,
        keeper: str,
        tried: list[_Row],
        *,
        durable: bool,
    ) -> None:
        super().__init__(
            session,
            address,
            name=f"outbox/{name}/{address}",
            max_pending=WINDOW,
            settled=False,
            rcv_settle_mode=RCV_SECOND,
            in_doubt="resend",
        )
        #: The address in its rows; the link may be redirected to another one.
        self.row_address = address
        self.is_durable = durable
        if durable:
            self._asked = Target(address=address, durable=DURABLE_UNSETTLED, expiry_policy="never")
        #: Called when messages may be sent or outcomes recorded.
        self.on_change: Callable[[], None] = _nothing
        #: Time of its end, by trio's clock.
        self.over_at = 0.0
        self.is_over = False
        #: Row → time from which a message that was not accepted may be sent again.
        self.retries: dict[int, float] = {}
        #: Row → outcome that is not committed yet.
        self.heard: dict[int, _PendingOutcome] = {}
        self._numbers: dict[Receipt, int] = {}
        #: Container that keeps the state of messages an earlier process may have sent; they are resumed.
        self._keeper = keeper
        self._memory = {}
        for row, payload in tried:
            receipt = Receipt(self, bytes(payload))
            self._numbers[receipt] = row
            self._unsettled[receipt] = None
            self._memory[_tag(row)] = Unsettled(
                tag=_tag(row), payload=bytes(payload), context=receipt
            )

    @property
    def was_refused(self) -> bool:
        """Whether the peer refused the link."""
        return self.is_over and not self._was_attached

    def put(self, row: int, payload: bytes) -> None:
        """Send the message of *row*."""
        receipt = Receipt(self, payload)
        self._numbers[receipt] = row
        self.retries.pop(row, None)
        self.submit(receipt)

    def finished(self, row: int, receipt: Receipt, outcome: Outcome) -> None:
        """Finish the receipt of a message whose outcome is committed."""
        self.heard.pop(row, None)
        self._numbers.pop(receipt, None)
        receipt.finish(outcome)

    def suspend(self) -> None:
        """Detach the link without closing it, so that the peer keeps its state."""
        if not self.closed:
            self.is_over = True
            self._send_detach(closed=False)

    async def wait_left(self) -> None:
        """Wait until the peer has answered :meth:`suspend`, if it does. Cancellation leaves no trace."""
        await self._detach(closed=False)

    def _transfer(self, link: SendingLink, receipt: Receipt) -> None:
        try:
            receipt.raw = link.send(
                receipt.payload, receipt, settled=False, tag=_tag(self._numbers[receipt])
            )
        except LocalProtocolError as error:
            self._hear(None, receipt, Rejected(Error.of(error)))
            return
        self._unsettled[receipt] = None

    def _again(self, receipts: list[Receipt]) -> None:
        """Send messages that the peer does not know again, except those that have an outcome."""
        super()._again([each for each in receipts if self._numbers.get(each) not in self.heard])

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        for each in deliveries:
            state = each.state
            if state is not None and not isinstance(state, Received):
                # Outcomes that are none of the standard's are recorded as they are.
                self._hear(each, each.context, cast("Outcome", state))
            elif each.remote_settled:
                self._hear(each, each.context, RELEASED)

    def _hear(self, raw: Any, receipt: Receipt, outcome: Outcome) -> None:
        row = self._numbers.get(receipt)
        if row is not None:
            self.heard[row] = _PendingOutcome(self, row, outcome, raw, receipt)
            self.on_change()
        elif raw is not None and not raw.settled:
            # Its outcome was committed while the link was suspended.
            raw.settle()

    def _begin(self, link: Any) -> None:
        super()._begin(link)
        self.on_change()

    def _fail_waiting(self, error: AmqpError) -> None:
        if not self.is_over and not (self.is_durable and not self._was_attached):
            _log.warning("%s: %s", self.address, error)
        self.is_over = True
        self.over_at = trio.current_time()
        super()._fail_waiting(error)
        self.on_change()


def _nothing() -> None:
    """Do nothing: default of the callback."""
