"""Changes that a broker has to store, and the one task that writes them.

Everything that must survive the process goes through a :class:`Journal`: the caller that changes
something adds a :class:`Unit` with the calls to make once it is on the disk. Units gather while a batch
is written, so that one commit serves every caller waiting for it, and its size follows the load. No
message is answered before its batch has been committed.

If the disk is full, new messages are refused, while removals of consumed ones are still written, since
they make room. A disk that fails is not trusted again before the store has been reopened and verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Final

import trio

from ...errors import AmqpError
from ...loglimit import LogLimiter, error_text
from ...outcomes import Error
from ...stores.base import (
    ChangeSet,
    SharedStore,
    Store,
    StoreDamaged,
    StoreFailed,
    StoreFull,
    StoreLost,
    StoreRefused,
)
from ...tallies import Distribution
from .answers import InDoubt, Unanswered, no_outcomes
from .opening import Executor, Threaded, open_store
from .units import CHANGES_OF_A_TURN, Unit

_log = logging.getLogger("amqp_rt.store")

#: Bytes of one batch; further changes go into the next one.
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
#: Changes of one batch: the store's thread may keep the interpreter's lock while it goes through them.
BATCH_CHANGES_MAX: Final = 20_000
#: Seconds for which changes that no caller waits for are held back to be written with others: mostly
#: the settlement of a consumer, with the next message of the publisher that has just had its answer.
LINGER_S: Final = 0.002
#: Seconds without anything to write after which the store may do its housekeeping.
IDLE_S: Final = 1.0
#: Seconds for writing the remaining changes when the broker stops.
LAST_COMMIT_S: Final = 30.0
#: Bounds of the distributions of commits: seconds, and messages in a batch.
_COMMIT_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BATCH_BOUNDS: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 1_024.0, 4_096.0)
#: Seconds between attempts to write changes that cannot be refused while the disk is full.
FULL_RETRY_S: Final = 1.0


class Journal:
    """Collector of units, which commits them to *store*.

    Args:
        store: Store of the broker; :meth:`open` has to be called first.
        executor: Runs the methods of the store; by default in a thread.
    """

    def __init__(self, store: Store, executor: Executor | None = None) -> None:
        self.store = store
        self._log_limiter = LogLimiter()
        self.is_open = False
        #: Why the store is not open yet: another broker uses it. Empty otherwise.
        self.standby = ""
        #: Durations of commits, and numbers of messages in their batches.
        self.commit_seconds = Distribution(_COMMIT_BOUNDS_S)
        self.batch_messages = Distribution(_BATCH_BOUNDS)
        #: Time by trio's clock at which the present commit began; infinite if there is none.
        self.commit_began = inf
        #: The error for which the store has been given up; None while it works.
        self.failure: AmqpError | None = None
        #: Called with the error for links whose outcomes can no longer be stored.
        self.on_failure: Callable[[Error], None] | None = None
        #: Called with the error if another broker may use the store now: no link may be answered any more.
        self.on_lost: Callable[[AmqpError], None] | None = None
        #: Error with which units are refused once the store has been given up.
        self._refusal = Error("amqp:internal-error")
        #: Whether the store was lost, as far as it is known.
        self._disconnected = False
        #: Called with an exception raised by a call of a unit, and the owner of that call.
        self.on_fault: Callable[[object, Exception], object] = _log_fault
        #: Called before the last commit, to add the changes that belong to it.
        self.on_end: Callable[[], None] | None = None
        self.call: Executor = executor or Threaded()
        #: Units not taken into a batch yet.
        self._waiting: list[Unit] = []
        #: Unit for single changes that are made between two chunks of input.
        self._loose: Unit | None = None
        #: The unit of a transaction that is being assembled.
        self.transaction_unit: Unit | None = None
        #: Set if a unit was added besides ``loose``, a call belongs to that one, or a commit is wanted without delay.
        self._urgent = trio.Event()
        #: Scope in which :meth:`run` waits for that, and for no longer than the units that wait already may.
        self._resting: trio.CancelScope | None = None
        #: Whether units wait or are being written, and the event for the end of that, if it is awaited.
        self._busy = False
        self._idle: trio.Event | None = None
        #: Whether the store has nothing to tidy up.
        self._tidied = False

    async def _work_on(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run *call*, which changes or verifies the store.

        Raises:
            AmqpError: The store has failed; any other exception of it becomes ``StoreFailed``.
        """
        try:
            return await self.call(call, *args)
        except AmqpError:
            raise
        except Exception as error:
            _log.exception("the store raised an unexpected error")
            raise StoreFailed(f"the store raised an unexpected error: {error!r}") from error

    async def open(self) -> None:
        """Open the store, and log each part that it has lost.

        Raises:
            AmqpError: The store cannot be opened; see :meth:`~amqp_rt.stores.base.Store.open`.
        """
        store = self.store
        if isinstance(store, SharedStore):
            token = trio.lowlevel.current_trio_token()
            store.on_disconnected = partial(token.run_sync_soon, self._on_disconnected)
        opened = await open_store(store, self.call, self._stand_by)
        self.is_open = True
        self.standby = ""
        for damage in opened.damage:
            _log.error(
                "lost: %s %d to %d of node %d: %s",
                damage.what,
                damage.first,
                damage.last,
                damage.node,
                damage.reason,
            )
        if opened.aside is not None:
            _log.error("the damaged store is kept as %s", opened.aside)

    def _stand_by(self, reason: str) -> None:
        if not self.standby:
            _log.info("standby: %s", reason)
        self.standby = reason

    def _on_disconnected(self) -> None:
        self._disconnected = True
        self._urgent.set()

    async def close(self) -> None:
        """Close the store; changes that were never written are lost."""
        if self.is_open:
            self.is_open = False
            await self.call(self.store.close)

    def add(self, unit: Unit) -> None:
        """Write *unit* with the next batch. Units are written in the order of these calls."""
        if self.failure is not None:
            unit.refuse(self._refusal)
            return
        self._loose = None
        self._waiting.append(unit)
        self._busy = True
        self._urgent.set()

    @property
    def loose(self) -> Unit:
        """Unit for changes that cannot be refused, used until the next batch is taken or unit added."""
        if self.failure is not None:
            return Unit()
        unit = self._loose
        if unit is None:
            unit = self._loose = Unit()
            unit.on_awaited = self._urgent.set
            self._busy = True
            if self._resting is not None and not self._waiting:
                self._resting.deadline = trio.current_time() + LINGER_S
            self._waiting.append(unit)
        return unit

    @contextmanager
    def joined(self, unit: Unit) -> Iterator[None]:
        """Collect all changes made in the ``with`` block in *unit*, which has to be added afterwards."""
        self._loose = self.transaction_unit = unit
        try:
            yield
        finally:
            self._loose = self.transaction_unit = None

    def when_kept(self, call: Callable[[], None]) -> None:
        """Call *call* once everything added so far is on the disk, or is known not to get there."""
        unit = Unit(lambda _error: call())
        unit.then(call)
        self.add(unit)

    async def write(self, fill: Callable[[Unit], None]) -> None:
        """Write the changes that *fill* adds to a unit, and wait until they are on the disk.

        Raises:
            AmqpError: The changes cannot be stored.
        """
        done = trio.Event()
        errors: list[Error] = []

        def refused(error: Error) -> None:
            unit.undo()
            errors.append(error)
            done.set()

        unit = Unit(refused)
        fill(unit)
        unit.then(done.set)
        self.add(unit)
        await done.wait()
        if errors:
            raise AmqpError(errors[0].description or "", condition=errors[0].condition)

    def commit_soon(self) -> bool:
        """Write the waiting units without delay; return whether there are any."""
        self._urgent.set()
        return bool(self._waiting)

    async def wait_kept(self) -> None:
        """Wait until everything added so far is on the disk, or is known not to get there."""
        self.commit_soon()
        if not self._busy:
            await trio.lowlevel.checkpoint()
            return
        if self._idle is None:
            self._idle = trio.Event()
        await self._idle.wait()

    async def run(self) -> None:
        """Commit units until cancelled; units added by then are committed first.

        After a while without anything to commit, the store does its housekeeping, step by step.
        """
        try:
            while True:
                await self._rest()
                if self._disconnected:
                    await self._rejoin()
                await self._commit_waiting()
        finally:
            if self.on_end is not None:
                self.on_end()
            with trio.move_on_after(LAST_COMMIT_S, shield=True):
                while self._waiting and self.failure is None:
                    await self._commit_waiting()
                self._note_idle()
            left = self._take()
            if left:
                _log.error(
                    "%d changes were not written: there was no room until the end", len(left)
                )
            for unit in left:
                self._refuse(unit, Error("amqp:resource-limit-exceeded", "the store has no room"))

    async def _rest(self) -> None:
        """Wait until there are units to be written now. Units that no caller waits for are held back a little."""
        while not self._disconnected:
            now = trio.current_time()
            if not self._waiting:
                self._note_idle()
                until = inf if self._tidied else now + IDLE_S
            elif self._urgent.is_set() or any(unit.is_awaited for unit in self._waiting):
                return
            else:
                until = now + LINGER_S
            with trio.CancelScope(deadline=until) as scope:
                self._resting = scope
                try:
                    await self._urgent.wait()
                finally:
                    self._resting = None
            if self._waiting:
                self._tidied = False
                return
            if scope.cancelled_caught:
                await self._tidy()
                self._tidied = True
            elif not self._disconnected:
                # A commit was wanted, and there is nothing to commit.
                self._urgent = trio.Event()

    def _note_idle(self) -> None:
        """Notify those who wait that everything is on the disk, or will not get there."""
        self._busy = False
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    async def _tidy(self) -> None:
        if self.failure is not None:
            return
        try:
            while await self._work_on(self.store.tidy):
                if self._waiting or self._disconnected:
                    return
        except StoreFull:
            _log.debug("there is no room to tidy up the store")
        except AmqpError as error:
            await self._reopen([], error)

    async def _rejoin(self) -> None:
        self._disconnected = False
        if isinstance(self.store, SharedStore) and self.failure is None:
            try:
                await self._work_on(self.store.rejoin)
            except AmqpError as error:
                await self._reopen([], error)

    async def _commit_waiting(self) -> None:
        """Write the units that wait."""
        if not self._waiting or self.failure is not None:
            return
        units = self._take()
        try:
            await self._write(units)
        finally:
            # If cancelled while the disk is full, the remaining units go into the last commit.
            self._waiting[:0] = units

    async def _write(self, units: list[Unit]) -> None:
        """Write *units*, or refuse those that cannot be written, and remove them from the list."""
        try:
            await self._commit(units)
        except (StoreFull, StoreRefused) as error:
            await self._one_by_one(units, error)
        except AmqpError as error:
            await self._reopen(units, error)

    def _take(self) -> list[Unit]:
        if self._loose is not None:
            self._loose.on_awaited = None
            self._loose = None
        if self._urgent.is_set():
            self._urgent = trio.Event()
        units, self._waiting = self._waiting, []
        return units

    async def _commit(self, units: list[Unit]) -> None:
        """Write *units* in batches, remove them from the list and make their calls.

        Raises:
            StoreFull: There is no room; none of the units left in *units* was stored.
            StoreRefused: A change cannot be stored; none of the units left in *units* was stored.
            StoreFailed: The store has failed; whether the units left in *units* were stored is unknown.
        """
        while units:
            batch = ChangeSet()
            count = changes = 0
            left = CHANGES_OF_A_TURN
            for unit in units:
                size = len(unit)
                changes += size
                try:
                    if size <= left:
                        unit.write(batch)
                        left -= size
                    else:
                        left = await _write_in_turns(unit, batch, left)
                except Exception as error:
                    _log.exception("a change cannot be written")
                    raise StoreRefused(f"a change cannot be written: {error!r}") from error
                count += 1
                if batch.size >= BATCH_BYTES_MAX or changes >= BATCH_CHANGES_MAX:
                    break
            if batch:
                began = self.commit_began = trio.current_time()
                try:
                    await self._work_on(self.store.commit, batch)
                finally:
                    self.commit_began = inf
                self.commit_seconds.add(trio.current_time() - began)
                self.batch_messages.add(len(batch.puts))
            done = units[:count]
            del units[:count]
            left = CHANGES_OF_A_TURN
            for unit in done:
                left -= len(unit)
                if left < 0 and unit is not done[0]:
                    # Written changes take effect: only the end of the process may interrupt this.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    left = CHANGES_OF_A_TURN
                unit.kept(self.on_fault)

    async def _one_by_one(self, units: list[Unit], error: AmqpError) -> None:
        """Write *units* one at a time, since the disk is full or the store refuses one of them."""
        _log.error("%s", error)
        while units:
            unit = units[0]
            try:
                await self._commit([unit])
            except StoreFull as full:
                if unit.refused is None:
                    # The unit removes messages, so that it has to be written sooner or later.
                    await trio.sleep(FULL_RETRY_S)
                    continue
                self._refuse(unit, Error.of(full))
            except StoreRefused as refused:
                _log.error("%s", refused)
                self._refuse(unit, Error.of(refused))
            except AmqpError as failed:
                await self._reopen(units, failed)
                return
            del units[0]

    async def _reopen(self, units: list[Unit], error: AmqpError) -> None:
        """Reopen the store, which verifies it, and write *units* again: their result is unknown.

        Writing a unit twice has the same effect as writing it once. A store that was lost stays closed.
        """
        if isinstance(error, StoreLost):
            self._give_up(units, error)
            return
        _log.critical("%s", error)
        try:
            await self._work_on(self.store.close)
        except AmqpError as again:
            _log.error("%s", again)
        try:
            opened = await self._work_on(self.store.open)
            if opened.damage:
                raise StoreDamaged(f"{len(opened.damage)} things are damaged: start again with it")
            for unit in units:
                for records in unit.appended:
                    await self._work_on(records.verify, self.store)
            try:
                await self._commit(units)
            except (StoreFull, StoreRefused) as refused:
                await self._one_by_one(units, refused)
        except AmqpError as again:
            self._give_up(units, again)

    def _give_up(self, units: list[Unit], error: AmqpError) -> None:
        """Refuse all units from now on; the result of *units* is unknown. If the store is shared, its broker ends."""
        _log.critical("the store is given up: %s", error.description)
        self.failure = error
        # Other brokers wait for a shared store: this one must end, so that one of them takes over.
        lost = isinstance(self.store, SharedStore)
        doubt = (Unanswered if lost else InDoubt)(
            "amqp:internal-error",
            f"whether it was kept is not known, because the store was given up: {error}",
        )
        self._refusal = doubt if lost else Error.of(error)
        if lost and self.on_lost is not None:
            self.on_lost(error)
        for waiting, why in ((units, doubt), (self._take(), self._refusal)):
            for unit in waiting:
                self._refuse(unit, why)
        units.clear()
        if not lost and self.on_failure is not None:
            self.on_failure(no_outcomes(error))

    def log_refused(self, count: int, address: str, error: Error, now: float) -> None:
        """Warn that *count* messages for *address* cannot be stored, within the rate limit of the log."""
        left_out = self._log_limiter.admit((address, error.condition), now)
        if left_out is not None:
            _log.warning(
                "messages refused: %d for %.200r: %s%s", count, address, error_text(error), left_out
            )

    def _refuse(self, unit: Unit, error: Error) -> None:
        """Refuse *unit* with *error*, if it can be refused."""
        try:
            unit.refuse(error)
        except Exception as another:
            self.on_fault(None, another)


async def _write_in_turns(unit: Unit, batch: ChangeSet, left: int) -> int:
    """Add *unit* to *batch*, with *left* changes before the next turn; return the number left then."""
    for count in unit.writing(batch):
        left -= count
        if left <= 0:
            await trio.lowlevel.cancel_shielded_checkpoint()
            left = CHANGES_OF_A_TURN
    return left


def _log_fault(owner: object, error: Exception) -> None:
    _log.error("an unexpected error of %r", owner, exc_info=error)
