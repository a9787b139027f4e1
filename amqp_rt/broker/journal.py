"""What a broker has to write, and the one task that writes it (B7, security REL1).

Everything that must outlive the process goes through a :class:`Journal`: whoever changes something
adds a :class:`Unit` and says what is to happen once it is on the disk. Units gather while a batch is
written, so that a commit serves everybody who waited for it, and its size follows the load. Nothing
is answered before its batch has been committed.

A full disk is said to those who bring more; what was consumed is still taken away, which is what
makes room. A disk that fails is never trusted again without being opened and verified anew.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import trio

from ..errors import AmqpError
from ..fronts.base import IncomingDelivery
from ..loglimit import LogLimiter, error_text
from ..outcomes import ACCEPTED, Error, Rejected
from ..stores.base import Batch, Store, StoreDamaged, StoreFailed, StoreFull, StoreRefused
from .entries import Entry, head_of
from .queues import MessageQueue

_log = logging.getLogger("amqp_rt.store")

#: Bytes of one batch; more waits for the next one.
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
#: Changes that are added to a batch, or followed up, in one turn of the event loop.
_CHANGES_OF_A_TURN: Final = 500
#: Seconds for which changes that nobody waits for wait for others to be written with: a consumer's
#: settlement, mostly, for the next message of the publisher that has just had its answer.
LINGER_S: Final = 0.002
#: Seconds without anything to write after which a store may tidy itself up.
IDLE_S: Final = 1.0
#: Seconds for what is to be written when the broker stops.
LAST_COMMIT_S: Final = 30.0
#: Seconds between attempts to write what has to be written although the disk is full.
FULL_RETRY_S: Final = 1.0


class Executor(Protocol):
    """Runs blocking calls away from the event loop, one at a time and in order."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Threaded:
    """A worker thread. The call in hand is finished when its caller is cancelled."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)


class Appended(Protocol):
    """Records of logs, the offsets of which are known only when they are written."""

    def write(self, batch: Batch) -> None:
        """Add them to *batch*, which may be done again with another one."""

    def verify(self, store: Store) -> None:
        """See whether *store* has them, after a commit of which nothing was heard. Called in the
        worker thread; :meth:`write` adds nothing after that if it has."""


class Unit:
    """Changes that are written together, and what follows.

    Args:
        refused: Called instead of what follows if there is no room for them. Without it they are
            tried again until there is, which is for changes that make room.
    """

    __slots__ = ("_changes", "_follow", "_undo", "appended", "gathers", "letters", "refused")

    def __init__(self, refused: Callable[[Error], None] | None = None) -> None:
        self.refused = refused
        #: Dead letters in it, if it is that of a transaction.
        self.letters = 0
        #: Whether all of its messages are put before the first of them is delivered; they are, too, if
        #: it has very many changes. Messages that are not stored are no changes.
        self.gathers = False
        #: What of it goes to logs.
        self.appended: list[Appended] = []
        #: What is called, and whose work it is: a queue, topic or log, None for none of them.
        self._follow: list[tuple[Callable[[], None], object]] = []
        self._undo: list[Callable[[], None]] = []
        self._changes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def then(
        self,
        call: Callable[[], None],
        undo: Callable[[], None] | None = None,
        owner: object = None,
    ) -> None:
        """Call *call* once this is on the disk; several are called in order.

        *undo* is what :meth:`undo` calls instead if it never is. *owner* is the queue, topic or log
        whose work it is, which fails alone if the call raises.
        """
        self._follow.append((call, owner))
        if undo is not None:
            self._undo.append(undo)

    def undo(self) -> None:
        """It was refused: take back what was prepared for it."""
        for call in self._undo:
            call()

    def kept(self, on_fault: Callable[[object, Exception], object]) -> None:
        """Call what follows, as it is on the disk. What one call raises keeps no other from being
        called: *on_fault* gets it afterwards, with the owner, when all have been answered."""
        faults: list[tuple[object, Exception]] = []
        gathering: dict[MessageQueue, None] = {}
        if self.gathers or len(self._changes) > _CHANGES_OF_A_TURN:
            # Everything is there before the first of it is delivered, and that takes its turns.
            for _, owner in self._follow:
                if isinstance(owner, MessageQueue):
                    gathering[owner] = None
        for queue in gathering:
            queue.gather()
        for call, owner in self._follow:
            try:
                call()
            except Exception as error:
                faults.append((owner, error))
        for queue in gathering:
            queue.deliver_gathered()
        self._forget_calls()
        for owner, fault in faults:
            on_fault(owner, fault)

    def refuse(self, error: Error) -> None:
        """Call ``refused``, if this can be refused, as it will not be written."""
        refused = self.refused
        if refused is not None:
            try:
                refused(error)
            finally:
                self._forget_calls()

    def _forget_calls(self) -> None:
        """Drop the calls, which refer to this unit, to messages and to links: no cycle is to keep them."""
        self.refused = None
        self._follow = []
        self._undo = []
        self._changes = []

    def put_entries(self, node: int, entries: list[Entry]) -> None:
        """Put *entries*, which nothing changes before this is written."""
        self._changes += [(_put_entry, (node, entry)) for entry in entries]

    def put(self, node: int, sequence: int, head: bytes, payload: bytes) -> None:
        self._changes.append((Batch.put, (node, sequence, head, payload)))

    def spill(self, node: int, sequence: int, head: bytes, payload: bytes) -> None:
        """Put a message that need not outlive the process."""
        self._changes.append((_spill, (node, sequence, head, payload)))

    def piece(self, node: int, sequence: int, index: int, data: bytes) -> None:
        self._changes.append((Batch.piece, (node, sequence, index, data)))

    def move(self, node: int, sequence: int, to: int, to_sequence: int, head: bytes) -> None:
        self._changes.append((Batch.move, (node, sequence, to, to_sequence, head)))

    def update(self, node: int, sequence: int, head: bytes) -> None:
        self._changes.append((Batch.update, (node, sequence, head)))

    def remove(self, node: int, sequence: int) -> None:
        self._changes.append((Batch.remove, (node, sequence)))

    def keep(self, kind: str, key: bytes, value: bytes) -> None:
        self._changes.append((Batch.keep, (kind, key, value)))

    def forget(self, kind: str, key: bytes) -> None:
        self._changes.append((Batch.forget, (kind, key)))

    def clear(self, node: int) -> None:
        self._changes.append((Batch.clear, (node,)))

    def drop(self, node: int, first: int, last: int) -> None:
        self._changes.append((Batch.drop, (node, first, last)))

    def append(self, records: Appended) -> None:
        """Add *records* to their logs."""
        self.appended.append(records)

    def trim(self, log: int, offset: int) -> None:
        self._changes.append((Batch.trim, (log, offset)))

    def __bool__(self) -> bool:
        return bool(self._changes or self.appended)

    @property
    def is_awaited(self) -> bool:
        """Whether something follows when it is written."""
        return self.refused is not None or bool(self._follow)

    def __len__(self) -> int:
        return len(self._changes) + len(self.appended)

    def write(self, batch: Batch) -> None:
        """Add the changes to *batch*."""
        for _ in self.writing(batch):
            pass

    def writing(self, batch: Batch) -> Iterator[None]:
        """Add the changes to *batch*, one with each step."""
        for change, args in self._changes:
            change(batch, *args)
            yield
        for records in self.appended:
            records.write(batch)
            yield


def _put_entry(batch: Batch, node: int, entry: Entry) -> None:
    batch.put(node, entry.sequence, head_of(entry), entry.payload, spilled=not entry.durable)


def _spill(batch: Batch, node: int, sequence: int, head: bytes, payload: bytes) -> None:
    batch.put(node, sequence, head, payload, spilled=True)


class Journal:
    """Gathers units and commits them to *store*.

    Args:
        store: Where everything is kept; :meth:`open` comes first.
        executor: Where its methods run; by default a thread.
    """

    def __init__(self, store: Store, executor: Executor | None = None) -> None:
        self.store = store
        self._log_limiter = LogLimiter()
        self.is_open = False
        #: Why nothing is kept any more.
        self.failure: AmqpError | None = None
        #: Called with what to tell those whose outcomes cannot be kept any more.
        self.on_given_up: Callable[[Error], None] | None = None
        #: Called with the owner of what follows a unit, and what that has raised.
        self.on_fault: Callable[[object, Exception], object] = _log_fault
        #: Called before the last commit, for what has to be in it.
        self.on_end: Callable[[], None] | None = None
        self.call: Executor = executor or Threaded()
        #: Units that no batch has taken up.
        self._waiting: list[Unit] = []
        #: Takes what is changed one by one, between two chunks of input.
        self._loose: Unit | None = None
        #: The unit of a transaction that is being put together.
        self.joins: Unit | None = None
        self._work = trio.Event()
        #: There is more to write than what ``loose`` has taken, or somebody does not want to wait.
        self._urgent = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    async def _work_on(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run *call*, by which the store is changed or verified.

        Raises:
            AmqpError: The store has failed, whatever it raised.
        """
        try:
            return await self.call(call, *args)
        except AmqpError:
            raise
        except Exception as error:
            _log.exception("the store raised an unexpected error")
            raise StoreFailed(f"the store raised an unexpected error: {error!r}") from error

    async def open(self) -> None:
        """Open the store; what it lost is in the log, by name.

        Raises:
            AmqpError: It cannot be opened; see :meth:`~amqp_rt.stores.base.Store.open`.
        """
        opened = await self.call(self.store.open)
        self.is_open = True
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

    async def close(self) -> None:
        """Close the store; what was never written is not there when it is opened again."""
        if self.is_open:
            self.is_open = False
            await self.call(self.store.close)

    def add(self, unit: Unit) -> None:
        """Write *unit* with the next batch. Units are written in the order in which they come."""
        if self.failure is not None:
            unit.refuse(Error.of(self.failure))
            return
        self._loose = None
        self._waiting.append(unit)
        self._urgent.set()
        self._wake()

    @property
    def loose(self) -> Unit:
        """The unit for changes that cannot be refused, until the next batch or unit."""
        if self.failure is not None:
            return Unit()
        unit = self._loose
        if unit is None:
            unit = self._loose = Unit()
            self._waiting.append(unit)
            self._wake()
        return unit

    @contextmanager
    def joined(self, unit: Unit) -> Iterator[None]:
        """Let *unit*, which is to be added afterwards, take all that is changed meanwhile."""
        self._loose = self.joins = unit
        try:
            yield
        finally:
            self._loose = self.joins = None

    def when_kept(self, call: Callable[[], None]) -> None:
        """Call *call* once everything that was added so far is on the disk, or never will be."""
        unit = Unit(lambda _error: call())
        unit.then(call)
        self.add(unit)

    async def keep(self, fill: Callable[[Unit], None]) -> None:
        """Write what *fill* puts into a unit, and wait until it is on the disk.

        Raises:
            AmqpError: It cannot be kept.
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

    def _wake(self) -> None:
        self._work.set()
        if self._idle.is_set():
            self._idle = trio.Event()

    def hurry(self) -> bool:
        """Write what there is, without waiting for more; whether there is something."""
        self._urgent.set()
        return bool(self._waiting)

    async def wait_kept(self) -> None:
        """Wait until everything that was added so far is on the disk, or never will be."""
        self.hurry()
        await self._idle.wait()

    async def run(self) -> None:
        """Commit what comes, until cancelled; what was added by then is committed first.

        When there has been nothing to commit for a while the store gets to tidy itself up, a step
        at a time.
        """
        try:
            while True:
                with trio.move_on_after(IDLE_S) as idle:
                    await self._work.wait()
                if idle.cancelled_caught:
                    await self._tidy()
                    await self._work.wait()
                await self._commit_all(linger=True)
        finally:
            if self.on_end is not None:
                self.on_end()
            with trio.move_on_after(LAST_COMMIT_S, shield=True):
                await self._commit_all(linger=False)
            left = self._take()
            if left:
                _log.error(
                    "%d changes were not written: there was no room until the end", len(left)
                )
            for unit in left:
                self._refuse(unit, Error("amqp:resource-limit-exceeded", "the store has no room"))

    async def _tidy(self) -> None:
        if self.failure is not None:
            return
        try:
            while await self._work_on(self.store.tidy):
                if self._work.is_set():
                    return
        except StoreFull:
            _log.debug("there is no room to tidy up the store")
        except AmqpError as error:
            await self._reopen([], error)

    async def _commit_all(self, *, linger: bool) -> None:
        while self._waiting and self.failure is None:
            if linger and not any(unit.is_awaited for unit in self._waiting):
                with trio.move_on_after(LINGER_S):
                    await self._urgent.wait()
            units = self._take()
            try:
                await self._write(units)
            finally:
                # Cancelled while there was no room, what is left is not lost to the last commit.
                self._waiting[:0] = units
        self._work = trio.Event()
        self._idle.set()

    async def _write(self, units: list[Unit]) -> None:
        """Write *units*, or refuse those that cannot be written; they are taken out of the list."""
        try:
            await self._commit(units)
        except (StoreFull, StoreRefused) as error:
            await self._one_by_one(units, error)
        except AmqpError as error:
            await self._reopen(units, error)

    def _take(self) -> list[Unit]:
        self._loose = None
        if self._urgent.is_set():
            self._urgent = trio.Event()
        units, self._waiting = self._waiting, []
        return units

    async def _commit(self, units: list[Unit]) -> None:
        """Write *units* in batches and say so.

        Raises:
            StoreFull: Nothing of the units that are left in *units* was kept.
            StoreFailed: The store is of no use any more.
        """
        while units:
            batch = Batch()
            count = 0
            left = _CHANGES_OF_A_TURN
            for unit in units:
                try:
                    if len(unit) <= left:
                        unit.write(batch)
                        left -= len(unit)
                    else:
                        left = await _write_in_turns(unit, batch, left)
                except Exception as error:
                    _log.exception("a change cannot be written")
                    raise StoreRefused(f"a change cannot be written: {error!r}") from error
                count += 1
                if batch.size >= BATCH_BYTES_MAX:
                    break
            if batch:
                await self._work_on(self.store.commit, batch)
            done = units[:count]
            del units[:count]
            left = _CHANGES_OF_A_TURN
            for unit in done:
                left -= len(unit)
                if left < 0 and unit is not done[0]:
                    # What has been written stays written: only the process's end may come between.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    left = _CHANGES_OF_A_TURN
                unit.kept(self.on_fault)

    async def _one_by_one(self, units: list[Unit], error: AmqpError) -> None:
        """The disk is full, or one of *units* cannot be kept: see which of them can."""
        _log.error("%s", error)
        while units:
            unit = units[0]
            try:
                await self._commit([unit])
            except StoreFull as full:
                if unit.refused is None:
                    # It takes away what has gone, and has to be written some time.
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
        """Whether *units* were kept is unknown: verify the store, and write them once more.

        What they do comes to the same when it is done twice.
        """
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
            _log.critical("the store is given up: %s", again)
            self.failure = again
            doubt = InDoubt(
                "amqp:internal-error",
                f"whether it was kept is not known, because the store was given up: {again}",
            )
            for waiting, why in ((units, doubt), (self._take(), Error.of(again))):
                for unit in waiting:
                    self._refuse(unit, why)
            units.clear()
            if self.on_given_up is not None:
                self.on_given_up(_no_outcomes(again))

    def log_refused(self, count: int, address: str, error: Error, now: float) -> None:
        """Warn that *count* messages for *address* cannot be kept, if the log may have the line."""
        left_out = self._log_limiter.admit((address, error.condition), now)
        if left_out is not None:
            _log.warning(
                "messages refused: %d for %.200r: %s%s", count, address, error_text(error), left_out
            )

    def _refuse(self, unit: Unit, error: Error) -> None:
        """Let *unit*, if it can be refused, take *error*."""
        try:
            unit.refuse(error)
        except Exception as another:
            self.on_fault(None, another)


async def _write_in_turns(unit: Unit, batch: Batch, left: int) -> int:
    """Add *unit* to *batch*, of which *left* changes in this turn. Returns how many are left of the last."""
    for _ in unit.writing(batch):
        left -= 1
        if left <= 0:
            await trio.lowlevel.cancel_shielded_checkpoint()
            left = _CHANGES_OF_A_TURN
    return left


def _log_fault(owner: object, error: Exception) -> None:
    _log.error("an unexpected error of %r", owner, exc_info=error)


class InDoubt(Error, gc=False):
    """Nobody knows whether it was kept: no outcome may be said, since either may be a lie."""


def accept(delivery: IncomingDelivery) -> None:
    """What *delivery* brought is kept."""
    delivery.settle(ACCEPTED)


def refuse(delivery: IncomingDelivery, error: Error) -> None:
    """Say that what *delivery* brought is not taken because of *error*; if that is in doubt, say
    nothing of it, and let its sender know by the end of its link."""
    if isinstance(error, InDoubt):
        delivery.link.detach(Error(error.condition, error.description))
    else:
        delivery.settle(Rejected(error))


def _no_outcomes(failure: AmqpError) -> Error:
    return Error(
        "amqp:internal-error",
        "outcomes of durable messages cannot be kept any more, because the store of the broker was"
        f" given up: {failure}; settle them again when the broker has been started again",
    )


class QueueLedger:
    """Keeps the durable messages of *queue*, which is the node *number* of the store.

    A message is put into its queue when it is on the disk, and what comes after it waits with it:
    nobody gets, settles or counts what could still be lost, and order stays order.
    """

    def __init__(
        self, journal: Journal, number: int, queue: MessageQueue, address: str = ""
    ) -> None:
        self.number = number
        self.address = address
        self._journal = journal
        self._queue = queue

    def wants(self, entry: Entry) -> bool:
        """Whether *entry* has to be staged: it is durable, it is behind one that waits, or there is
        no more room for it in memory."""
        queue = self._queue
        return (
            entry.durable
            or queue.pending > 0
            or queue.bytes > queue.bytes_here_max
            or queue.available > queue.messages_here_max
        )

    def reserve(self, entry: Entry) -> None:
        """Give *entry* its place; :meth:`stage` follows."""
        self._queue.reserve(entry)

    def stage(
        self,
        entries: list[Entry],
        deliveries: list[IncomingDelivery],
        done: Callable[[], None] | None = None,
        note: Callable[[Unit, list[IncomingDelivery]], None] | None = None,
    ) -> None:
        """Put *entries* once they are kept, and answer *deliveries* then, which brought them.

        *done* is called last, whatever became of them. *note* adds to the unit what is to be kept
        of the deliveries themselves.
        """

        def put() -> None:
            for entry in entries:
                self._queue.put(entry)

        def kept() -> None:
            for delivery in deliveries:
                delivery.settle(ACCEPTED)
            if done is not None:
                done()

        def refused(error: Error) -> None:
            self._journal.log_refused(len(entries), self.address, error, self._queue.wall())
            unit.undo()
            for entry in entries:
                entry.stored = False
                self._queue.withhold(entry)
            for delivery in deliveries:
                refuse(delivery, error)
            if done is not None:
                done()

        unit = Unit(refused)
        unit.then(put, None, self._queue)
        unit.then(kept)
        self._write(unit, entries)
        if note is not None:
            note(unit, deliveries)
        self._journal.add(unit)

    def receive(self, entry: Entry) -> None:
        """Put *entry*, which is in the broker already and cannot be refused, once it is kept.

        It is written together with what is changed next, such as its removal from another node.
        """
        unit = self._journal.loose
        self._queue.reserve(entry)
        self._write(unit, [entry])

        def undo() -> None:
            entry.stored = False
            self._queue.withhold(entry)

        unit.then(partial(self._queue.put, entry), undo, self._queue)

    def receive_all(self, entries: list[Entry]) -> None:
        """Put *entries*, which were held, as :meth:`receive` does each of them; they are encoded later."""
        unit = self._journal.loose
        queue = self._queue
        let_go, reserve = queue.let_go, queue.reserve
        for entry in entries:
            let_go(entry)
            reserve(entry)
        paged_from = queue.paged_from
        kept = [each for each in entries if each.durable or each.sequence >= paged_from]
        unit.put_entries(self.number, kept)
        for entry in kept:
            entry.stored = True

        def put() -> None:
            for entry in entries:
                queue.put(entry)

        def undo() -> None:
            for entry in entries:
                entry.stored = False
                queue.withhold(entry)

        unit.then(put, undo, queue)

    def _write(self, unit: Unit, entries: list[Entry]) -> None:
        paged_from = self._queue.paged_from
        for entry in entries:
            if entry.durable or entry.sequence >= paged_from:
                self._keep(unit, entry)
                entry.stored = True

    # --- What the queue says (queues.Ledger) ---

    def remove(self, entry: Entry) -> None:
        unit = self._journal.loose
        unit.remove(self.number, entry.sequence)
        if entry.sequence >= self._queue.paged_from:
            unit.then(partial(self._queue.removed, entry.sequence), None, self._queue)

    def update(self, entry: Entry) -> None:
        self._journal.loose.update(self.number, entry.sequence, head_of(entry))

    def rewrite(self, entry: Entry) -> None:
        self._keep(self._journal.loose, entry)

    def _keep(self, unit: Unit, entry: Entry) -> None:
        number = self.number
        head = head_of(entry)
        if not entry.pieces:
            keep = unit.put if entry.durable else unit.spill
            keep(number, entry.sequence, head, entry.payload)
        elif entry.origin == (number, entry.sequence):
            unit.update(number, entry.sequence, head)
        elif entry.origin is not None:
            # It comes from another node, which takes it away in the same unit.
            unit.move(*entry.origin, number, entry.sequence, head)
            entry.origin = (number, entry.sequence)

    def discard(self, first: int, last: int, kept: list[Entry]) -> None:
        unit = self._journal.loose
        for entry in sorted(kept, key=lambda entry: entry.sequence):
            if entry.pieces:
                # It is not in memory and cannot be put again.
                if first < entry.sequence:
                    unit.drop(self.number, first, entry.sequence - 1)
                first = entry.sequence + 1
        if first <= last:
            unit.drop(self.number, first, last)
        for entry in kept:
            if not entry.pieces:
                self._keep(unit, entry)

    # --- Messages in pieces (pieces.Arrival) ---

    def expect(self, entry: Entry) -> None:
        """Give *entry*, the body of which is to come, its place; :meth:`complete` or :meth:`cancel`
        follows."""
        self._queue.expect(entry)
        entry.origin = (self.number, entry.sequence)

    def write(
        self,
        entry: Entry,
        pieces: list[bytes],
        kept: Callable[[], None],
        refused: Callable[[Error], None],
    ) -> None:
        """Keep the next *pieces* of *entry*, and say so."""
        unit = Unit(refused)
        for piece in pieces:
            unit.piece(self.number, entry.sequence, entry.pieces, piece)
            entry.pieces += 1
            self._queue.grow(entry, len(piece))
        unit.then(kept)
        self._journal.add(unit)

    def complete(
        self,
        entry: Entry,
        kept: Callable[[], None],
        refused: Callable[[Error], None],
        note: Callable[[Unit], None],
    ) -> None:
        """All pieces of *entry* have been written: from now on it is a message. *note* adds to the
        unit what is to be kept of its delivery."""

        def failed(error: Error) -> None:
            unit.undo()
            self.cancel(entry)
            refused(error)

        unit = Unit(failed)
        self._put_head(unit, entry)
        note(unit)
        unit.then(partial(self._queue.arrive, entry), None, self._queue)
        unit.then(kept)
        self._journal.add(unit)

    def make(self, entry: Entry) -> None:
        """All pieces of *entry* are kept: it is a message with what is changed next."""
        unit = self._journal.loose
        self._put_head(unit, entry)
        unit.then(partial(self._queue.arrive, entry), partial(self.cancel, entry), self._queue)

    def _put_head(self, unit: Unit, entry: Entry) -> None:
        entry.stored = True
        payload = b"" if entry.pieces else entry.payload
        unit.put(self.number, entry.sequence, head_of(entry), payload)

    def cancel(self, entry: Entry) -> None:
        """The rest of *entry* does not come."""
        entry.stored = False
        self._journal.loose.remove(self.number, entry.sequence)
        self._queue.forgo(entry)

    def settle(self, delivery: Any, outcome: Any) -> None:
        failure = self._journal.failure
        if failure is None:
            self._journal.loose.then(lambda: delivery.settle(outcome))
        else:
            # Its peer would wait for ever.
            delivery.link.detach(_no_outcomes(failure))
