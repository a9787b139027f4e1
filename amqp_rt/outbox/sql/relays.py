"""Relays: they send the committed messages of an outbox, and remove those that their receivers have accepted.

A relay looks for addresses with messages, and sends to several at once, each on a link of its own. Once a link has credit,
the relay takes as many messages, sends them, waits for their outcomes and records them. Where the database can lock
rows, the transaction stays open meanwhile: other relays leave these rows out, and get them at once if the process
is killed. Where outcomes take longer, rows are lent instead: no relay takes them before a time in the future, which is
put off as long as the receivers decide.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import trio
from sqlalchemy.orm import Session

from ...container.connections import Connection
from ...container.links import refusal
from ...container.sending import Receipt, Sender
from ...errors import AmqpError, ConnectionLost, LocalProtocolError
from ...loglimit import LogLimiter
from ...outcomes import Accepted, Error, Outcome, Rejected
from .notices import wait_for_notices
from .rows import ADDRESSES_MAX, BATCH, RETRY_S, OutboxRow, OutboxRows
from .working import (
    PASSING_ERRORS,
    Factory,
    call_or_leave,
    committed,
    in_transaction,
    opened,
    was_left,
)

_log = logging.getLogger("amqp_rt.outbox")

#: Transactions at a time. Each takes a connection to the database.
BATCHES_MAX: Final = 4
#: Links to different addresses; further addresses wait for a free one.
LINKS_MAX: Final = 64
#: Seconds for which rows are held whose messages wait, because the peer has taken its credit back.
HELD_S: Final = 10.0
#: Seconds for which a transaction waits for outcomes, before its rows are lent, and for which these are lent.
SLOT_S: Final = 2.0
LEASE_S: Final = 30.0
#: Seconds before messages without an outcome, whose link has ended, are sent again.
IN_DOUBT_S: Final = 1.0
#: Seconds that messages which were sent have to get their outcomes when the relay is cancelled.
GRACE_S: Final = 2.0
#: Seconds between looks for messages where notices wake the relay: for those released, and of relays that were killed.
NOTIFIED_S: Final = RETRY_S
#: Least seconds between two looks: many commits are found by one.
LOOK_S: Final = 0.05
#: Seconds for which an address without credit keeps its place while others wait for one.
CREDIT_S: Final = 5.0
#: Most seconds before an address that is refused again and again is tried again.
REFUSED_S: Final = 60.0


class _Pause(NamedTuple):
    """Pause of an address: the time at which it ends, and its length."""

    until: float
    seconds: float


class _Sent(NamedTuple):
    """Message that was sent, and its receipt."""

    row: int
    receipt: Receipt


class _Batch:
    """Messages that were taken from the table and are sent.

    Args:
        sender: The link.
        rows: The messages, which are sent now.
    """

    def __init__(self, sender: Sender, rows: Sequence[OutboxRow]) -> None:
        self.began = trio.current_time()
        self._sent: list[_Sent] = []
        self._refused: list[tuple[int, Outcome]] = []
        self._recorded: set[int] = set()
        for row in rows:
            try:
                self._sent.append(_Sent(row.id, sender.send_payload_nowait(row.payload)))
            except LocalProtocolError as error:
                # Larger than the peer allows: nothing was sent, and another attempt is no better.
                self._refused.append((row.id, Rejected(Error.of(error))))

    @property
    def waits(self) -> bool:
        """Whether an outcome is missing that can still arrive."""
        return any(not each.receipt.done for each in self._sent)

    async def wait(self) -> None:
        """Wait until no outcome is missing that can still arrive. Cancellation leaves no trace."""
        for each in self._sent:
            try:
                await each.receipt.outcome()
            except AmqpError:
                pass  # In doubt, or withdrawn: the message is sent again.

    def withdraw(self) -> None:
        """Withdraw the messages that wait for credit."""
        for each in self._sent:
            each.receipt.withdraw()

    def outcomes(self) -> list[tuple[int, Outcome]]:
        """Return the messages with their outcomes, without those that are in doubt or forgotten."""
        found = list(self._refused)
        for row, receipt in self._sent:
            if receipt.known_outcome is not None:
                found.append((row, receipt.known_outcome))
        return [each for each in found if each[0] not in self._recorded]

    @property
    def has_outcomes(self) -> bool:
        """Whether there are, or were, outcomes."""
        return bool(self._recorded or self.outcomes())

    def forget(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Leave out *outcomes*, which are recorded."""
        self._recorded.update(row for row, _ in outcomes)

    def in_doubt(self) -> list[int]:
        """Return the messages without an outcome."""
        return [each.row for each in self._sent if each.receipt.known_outcome is None]


class _Lane:
    """Sending to one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        #: Whether there may be messages that were not looked for yet.
        self.more = True


class OutboxRelay:
    """One run of a relay.

    Args:
        rows: The rows of the outbox.
        factory: Maker of sessions.
        peer: Where messages are sent.
        poll_s: Seconds between looks for messages, where no notices arrive.
        in_loop: Whether sessions need asyncio.
    """

    def __init__(
        self,
        rows: OutboxRows,
        factory: Factory,
        peer: Connection,
        *,
        poll_s: float,
        in_loop: bool,
    ) -> None:
        self._rows = rows
        self._factory = factory
        self._peer = peer
        self._poll_s = poll_s
        self._in_loop = in_loop
        self._token = trio.lowlevel.current_trio_token()
        self._wake = trio.Event()
        #: Whether the database announces commits.
        self._notified = False
        #: Whether rows are locked while their messages are sent.
        self._shares = False
        self._checked = False
        self._lanes: dict[str, _Lane] = {}
        self._slots = trio.CapacityLimiter(BATCHES_MAX)
        #: Links without a lane, the one that was used last at the end.
        self._idle: dict[str, Sender] = {}
        #: Address → its last pause, as long as the next one grows with it.
        self._paused: dict[str, _Pause] = {}
        #: Whether addresses wait for a lane, and the last one that got one then.
        self._crowded = False
        self._last = ""
        self._limiter = LogLimiter(peer.container.limits)

    def wake(self) -> None:
        """Look for messages soon; for any thread."""
        try:
            self._token.run_sync_soon(self._look_soon, idempotent=True)
        except trio.RunFinishedError:
            pass

    def _look_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            ConnectionLost: The connection to the peer has ended and is not established again.
            LocalProtocolError: The database has no table for the outbox.
        """
        failure: AmqpError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                nursery.start_soon(self._watch_peer)
                try:
                    await self._follow(nursery)
                except AmqpError as error:
                    # Raised below: a nursery would wrap it in a group.
                    failure = error
                    nursery.cancel_scope.cancel()
        finally:
            for sender in self._idle.values():
                sender.abandon()
        if failure is not None:
            raise failure

    async def _watch_peer(self) -> None:
        await self._peer.wait_closed()
        self._wake.set()

    async def _follow(self, nursery: trio.Nursery) -> None:
        """Look for messages again and again, and start lanes for their addresses."""
        await self._peer.wait_open()
        while True:
            self._wake = trio.Event()
            self._peer.refuse_if_closed()
            pause_s = NOTIFIED_S if self._notified else self._poll_s
            began = trio.current_time()
            try:
                await self._look(nursery)
            except PASSING_ERRORS as error:
                self._complain("database", "the database", error)
                pause_s = RETRY_S
            now = trio.current_time()
            self._paused = {
                address: pause
                for address, pause in self._paused.items()
                if now < pause.until + REFUSED_S
            }
            if ends := [each.until for each in self._paused.values() if each.until > now]:
                pause_s = min(pause_s, min(ends) - now)
            with trio.move_on_after(pause_s):
                await self._wake.wait()
            await trio.sleep_until(began + LOOK_S)

    async def _look(self, nursery: trio.Nursery) -> None:
        """Start lanes for addresses with messages; those that found no free one last time are the first."""
        start = self._last
        self._crowded = False
        ranges: list[tuple[str, str | None]] = (
            [(start, None), ("", start)] if start else [("", None)]
        )
        for after, to in ranges:
            while True:
                addresses = await in_transaction(self._factory, self._addresses, after, to)
                for address in addresses:
                    self._start(nursery, address)
                if len(addresses) < ADDRESSES_MAX:
                    break
                after = addresses[-1]
        if not self._crowded:
            self._last = ""

    def _addresses(self, session: Session, after: str, to: str | None) -> list[str]:
        if not self._checked:
            self._rows.check(session)
            self._shares = self._rows.shares(session)
            self._checked = True
        return self._rows.addresses(session, after, to)

    def _start(self, nursery: trio.Nursery, address: str) -> None:
        """Start a lane for *address*, or let the present one look again."""
        pause = self._paused.get(address)
        if address in self._lanes:
            self._lanes[address].more = True
        elif pause is not None and trio.current_time() < pause.until:
            pass
        elif len(self._lanes) < LINKS_MAX:
            lane = self._lanes[address] = _Lane(address)
            self._last = address
            nursery.start_soon(self._run_lane, lane)
        else:
            self._crowded = True

    async def _run_lane(self, lane: _Lane) -> None:
        """Send messages until there are none."""
        address = lane.address
        sender: Sender | None = None
        try:
            sender = await self._open(address)
            while lane.more:
                # No row is held while the peer takes no messages.
                with trio.move_on_after(CREDIT_S) as waiting:
                    await _wait_for_credit(sender)
                    self._paused.pop(address, None)
                if waiting.cancelled_caught:
                    if self._crowded:
                        self._pause(address, CREDIT_S)
                        break
                    continue
                lane.more = False
                if await self._send_batch(sender, address):
                    lane.more = True
        except PASSING_ERRORS as error:
            self._complain("database", f"messages to {address!r} wait for the database", error)
            self._pause(address, RETRY_S)
        except AmqpError as error:
            # The end of the connection is noticed by the next look.
            if self._peer.closing or isinstance(error, ConnectionLost):
                self._pause(address, RETRY_S)
            else:
                self._complain("refused", f"messages to {address!r} wait", error)
                self._pause(address, self._longer(address))
        finally:
            del self._lanes[address]
            if sender is not None:
                self._keep(address, sender)
            if self._crowded:
                self._wake.set()

    def _longer(self, address: str) -> float:
        """Return the seconds for which *address* pauses after a refusal: twice those of the last time."""
        pause = self._paused.get(address)
        return RETRY_S if pause is None else min(2 * pause.seconds, REFUSED_S)

    def _pause(self, address: str, seconds: float) -> None:
        """Let messages to *address* wait, and do not oversleep the end of the pause."""
        self._paused[address] = _Pause(trio.current_time() + seconds, seconds)
        self._wake.set()

    def _complain(self, key: str, what: str, error: Exception) -> None:
        """Log that something waits; lines are counted by *key*, and not by addresses, of which there may be many."""
        left_out = self._limiter.admit((key, type(error)), trio.current_time())
        if left_out is not None:
            reason = str(error).partition("\n")[0]
            _log.warning("outbox %s: %s: %s%s", self._rows.name, what, reason, left_out)

    # --- one batch ---

    async def _send_batch(self, sender: Sender, address: str) -> bool:
        """Send some messages, and record their outcomes; return whether there were any.

        Cancellation lets messages that were sent get their outcomes for ``GRACE_S`` seconds, and waits as long for the
        database to record them. One that does not answer is left to a thread: what it records later is the truth still.
        """
        most = min(BATCH, max(sender.credit, 1))
        lent = False
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._slots)
            session: Any = None
            if self._shares:
                session = await held.enter_async_context(opened(self._factory))
                rows = await call_or_leave(session, self._rows.take, address, most)
            else:
                rows = await in_transaction(self._factory, self._rows.take, address, most)
            batch = _Batch(sender, rows)
            try:
                if session is not None:
                    with trio.move_on_after(SLOT_S):
                        await batch.wait()
                if batch.waits:
                    # Other addresses get the connection to the database while this receiver takes its time.
                    if session is not None:
                        lent = True
                        await self._lend(session, batch)
                        session = None
                    await held.aclose()
                    await self._outlast(batch, lent=lent)
                    await held.enter_async_context(self._slots)
            except trio.Cancelled:
                batch.withdraw()
                if was_left(session):
                    session = None
                with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_S):
                    await batch.wait()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_S):
                    await self._record(session, batch, lent=lent)
                raise
            if batch.in_doubt():
                self._pause(address, IN_DOUBT_S)
            await self._record(session, batch, lent=lent)
        return batch.has_outcomes

    async def _outlast(self, batch: _Batch, *, lent: bool) -> None:
        """Wait for the outcomes of *batch* without a transaction, and keep its rows from other relays if they are *lent*."""
        if not lent:
            with trio.move_on_at(batch.began + HELD_S):
                await batch.wait()
            batch.withdraw()
            await batch.wait()
            return
        while batch.waits:
            with trio.move_on_after(LEASE_S / 3):
                await batch.wait()
            if trio.current_time() >= batch.began + HELD_S:
                batch.withdraw()
            if batch.waits:
                await self._lend(None, batch)

    async def _lend(self, session: Any, batch: _Batch) -> None:
        """Record the outcomes of *batch* so far, and keep its other rows from other relays for ``LEASE_S`` seconds."""
        outcomes, ids = batch.outcomes(), batch.in_doubt()
        self._log_outcomes(outcomes)
        try:
            if session is None:
                await in_transaction(self._factory, self._rows.finish, outcomes, ids, LEASE_S)
            else:
                await committed(session, self._rows.finish, outcomes, ids, LEASE_S)
            batch.forget(outcomes)
        except PASSING_ERRORS as error:
            # Other relays may send these messages too: at least once.
            self._complain("database", "the database", error)

    async def _record(self, session: Any, batch: _Batch, *, lent: bool) -> None:
        """Record the outcomes of *batch*; repeat that until it is done.

        Args:
            session: Session whose transaction holds the rows, or None.
            batch: The messages.
            lent: Whether rows without an outcome have to be given back.
        """
        outcomes = batch.outcomes()
        back = batch.in_doubt() if lent else []
        self._log_outcomes(outcomes)
        while outcomes or back:
            try:
                if session is None:
                    await in_transaction(self._factory, self._rows.finish, outcomes, back)
                else:
                    await committed(session, self._rows.finish, outcomes)
                return
            except PASSING_ERRORS as error:
                # Messages that were accepted are not sent again only because a database was restarted.
                self._complain("database", "the database", error)
                if session is None:
                    await trio.sleep(RETRY_S)
                session = None

    def _log_outcomes(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        for row, outcome in outcomes:
            if not isinstance(outcome, Accepted):
                self._complain("outcome", f"message {row}", refusal(outcome))

    # --- links ---

    async def _open(self, address: str) -> Sender:
        """Return the link to *address*, attached.

        Raises:
            AmqpError: The peer refuses it, or the connection has ended.
        """
        sender = self._idle.pop(address, None)
        if sender is None or sender.closed:
            sender = self._peer.sender(address, settled=False, max_pending=BATCH)
            await sender.__aenter__()
        return sender

    def _keep(self, address: str, sender: Sender) -> None:
        """Keep a link for later messages, unless it has ended; detach those that were not used for long."""
        if not sender.closed:
            self._idle[address] = sender
        while len(self._idle) > LINKS_MAX:
            self._idle.pop(next(iter(self._idle))).abandon()

    # --- notices ---

    async def _listen(self) -> None:
        """Look for messages at each notice of the database, as long as it sends some."""
        while True:
            try:
                engine = await in_transaction(self._factory, self._rows.engine)
                await wait_for_notices(
                    engine, self._rows.channel, self._listening, in_loop=self._in_loop
                )
                if not self._notified:
                    return
            except PASSING_ERRORS as error:
                self._complain("database", "the database", error)
            self._notified = False
            await trio.sleep(RETRY_S)

    def _listening(self) -> None:
        self._notified = True
        self.wake()


async def _wait_for_credit(sender: Sender) -> None:
    """Wait until the peer takes messages. Cancellation leaves no trace.

    Raises:
        AmqpError: The link or the connection has ended.
    """
    await sender.wait_attached()
    while sender.credit <= 0:
        await sender.changes.park()
        await sender.wait_attached()
