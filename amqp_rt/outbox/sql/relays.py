"""Relays: they send the committed messages of an outbox, and remove those that their receivers have accepted.

A relay looks for addresses with messages, and sends to several at once, each on a link of its own. Once a link has credit,
the relay takes as many messages, sends them, waits for their outcomes and records them. Where the database can lock
rows, the transaction stays open meanwhile: other relays leave these rows out, and get them at once if the process
is killed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import trio
from sqlalchemy.orm import Session

from ...container.connections import Connection
from ...container.sending import Receipt, Sender, refusal
from ...errors import AmqpError, ConnectionLost, LocalProtocolError
from ...loglimit import LogLimiter
from ...outcomes import Accepted, Error, Outcome, Rejected
from .notices import wait_for_notices
from .rows import ADDRESSES_MAX, BATCH, RETRY_S, OutboxRow, OutboxRows
from .working import PASSING_ERRORS, Factory, call, in_transaction, opened

_log = logging.getLogger("amqp_rt.outbox")

#: Batches that are sent at a time. Each takes a connection to the database.
BATCHES_MAX: Final = 4
#: Links to different addresses; further addresses wait for a free one.
LINKS_MAX: Final = 64
#: Seconds for which rows are held whose messages wait, because the peer has taken its credit back.
HELD_S: Final = 10.0
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
                async with self._slots:
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
        """Send some messages, and record their outcomes; return whether there were any."""
        most = min(BATCH, max(sender.credit, 1))
        if not self._shares:
            rows = await in_transaction(self._factory, self._rows.take, address, most)
            return await self._deliver(sender, address, rows, None)
        async with opened(self._factory) as session:
            rows = await call(session, self._rows.take, address, most)
            return await self._deliver(sender, address, rows, session)

    async def _deliver(
        self, sender: Sender, address: str, rows: Sequence[OutboxRow], session: Any
    ) -> bool:
        """Send *rows*, and record their outcomes; return whether there were any.

        Cancellation lets messages that were sent get their outcomes for ``GRACE_S`` seconds.
        """
        outcomes: list[tuple[int, Outcome]] = []
        sent: list[_Sent] = []
        try:
            for row in rows:
                try:
                    sent.append(_Sent(row.id, sender.send_payload_nowait(row.payload)))
                except LocalProtocolError as error:
                    # Larger than the peer allows: nothing was sent, and another attempt is no better.
                    outcomes.append((row.id, Rejected(Error.of(error))))
            with trio.move_on_after(HELD_S):
                await _wait_for_outcomes(sent)
            _withdraw(sent)
            await _wait_for_outcomes(sent)
        except trio.Cancelled:
            _withdraw(sent)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_S):
                await _wait_for_outcomes(sent)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_S):
                await self._record(session, [*outcomes, *_known(sent)])
            raise
        outcomes += _known(sent)
        if len(outcomes) < len(rows):
            self._pause(address, IN_DOUBT_S)
        await self._record(session, outcomes)
        return bool(outcomes)

    async def _record(self, session: Any, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Record *outcomes*, with *session* that holds the rows if there is one; repeat that until it is done."""
        for row, outcome in outcomes:
            if not isinstance(outcome, Accepted):
                self._complain("outcome", f"message {row}", refusal(outcome))
        while outcomes:
            try:
                if session is None:
                    await in_transaction(self._factory, self._rows.finish, outcomes)
                else:
                    await call(session, self._rows.finish_and_commit, outcomes)
                return
            except PASSING_ERRORS as error:
                # Messages that were accepted are not sent again only because a database was restarted.
                self._complain("database", "the database", error)
                if session is None:
                    await trio.sleep(RETRY_S)
                session = None

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
                    engine, self._rows.name, self._listening, in_loop=self._in_loop
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


async def _wait_for_outcomes(sent: Sequence[_Sent]) -> None:
    """Wait until no outcome is missing that can still arrive. Cancellation leaves no trace."""
    for each in sent:
        try:
            await each.receipt.outcome()
        except AmqpError:
            pass  # In doubt, or withdrawn: the message is sent again.


def _withdraw(sent: Sequence[_Sent]) -> None:
    """Withdraw the messages that wait for credit."""
    for each in sent:
        each.receipt.withdraw()


def _known(sent: Sequence[_Sent]) -> list[tuple[int, Outcome]]:
    """Return the messages with their outcomes, without those that are in doubt."""
    found = []
    for row, receipt in sent:
        if receipt.known_outcome is not None:
            found.append((row, receipt.known_outcome))
    return found
