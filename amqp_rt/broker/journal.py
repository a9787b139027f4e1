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
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import trio

from ..errors import AmqpError
from ..outcomes import Error
from ..stores.base import Batch, Store, StoreFull

_log = logging.getLogger("amqp_rt.store")

#: Bytes of one batch; more waits for the next one.
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
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


class Unit:
    """Changes that are written together, and what follows.

    Args:
        kept: Called once they are on the disk.
        refused: Called instead if there is no room for them. Without it they are tried again until
            there is, which is for changes that only take away.
    """

    __slots__ = ("_changes", "kept", "refused")

    def __init__(
        self,
        kept: Callable[[], None] | None = None,
        refused: Callable[[Error], None] | None = None,
    ) -> None:
        self.kept = kept
        self.refused = refused
        self._changes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def put(self, node: int, sequence: int, head: bytes, payload: bytes) -> None:
        self._changes.append((Batch.put, (node, sequence, head, payload)))

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

    def __bool__(self) -> bool:
        return bool(self._changes)

    def write(self, batch: Batch) -> None:
        """Add the changes to *batch*."""
        for change, args in self._changes:
            change(batch, *args)


class Journal:
    """Gathers units and commits them to *store*.

    Args:
        store: Opened already.
        executor: Where its methods run.
        on_failed: Called when the store can no longer be trusted, with the reason.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        on_failed: Callable[[AmqpError], None],
    ) -> None:
        self.store = store
        self.failure: AmqpError | None = None
        self._executor = executor
        self._on_failed = on_failed
        #: Units that no batch has taken up.
        self._waiting: list[Unit] = []
        #: Takes what is changed one by one, between two chunks of input.
        self._loose: Unit | None = None
        self._work = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def add(self, unit: Unit) -> None:
        """Write *unit* with the next batch. Units are written in the order in which they come."""
        self._loose = None
        self._waiting.append(unit)
        self._wake()

    @property
    def loose(self) -> Unit:
        """A unit for changes that only take away and that nobody waits for."""
        unit = self._loose
        if unit is None:
            unit = self._loose = Unit()
            self._waiting.append(unit)
            self._wake()
        return unit

    def after(self, call: Callable[[], None]) -> None:
        """Call *call* once everything that was added so far is on the disk."""
        self.add(Unit(call))

    def _wake(self) -> None:
        self._work.set()
        if self._idle.is_set():
            self._idle = trio.Event()

    async def settle(self) -> None:
        """Wait until everything is on the disk that was added before."""
        await self._idle.wait()

    async def run(self) -> None:
        """Commit what comes, until cancelled; what was added by then is committed first."""
        try:
            while True:
                await self._work.wait()
                await self._commit_all()
        finally:
            with trio.move_on_after(LAST_COMMIT_S, shield=True):
                await self._commit_all()

    async def _commit_all(self) -> None:
        while self._waiting and self.failure is None:
            units = self._take()
            try:
                await self._commit(units)
            except StoreFull as error:
                await self._make_room(units, error)
            except AmqpError as error:
                self._fail(error)
        self._work = trio.Event()
        self._idle.set()

    def _take(self) -> list[Unit]:
        self._loose = None
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
            for unit in units:
                unit.write(batch)
                count += 1
                if batch.size >= BATCH_BYTES_MAX:
                    break
            if batch:
                await self._executor(self.store.commit, batch)
            done = units[:count]
            del units[:count]
            for unit in done:
                if unit.kept is not None:
                    unit.kept()

    async def _make_room(self, units: list[Unit], error: StoreFull) -> None:
        """The disk is full: take away what has gone, then try the rest one by one."""
        _log.error("%s", error)
        for unit in units:
            while True:
                try:
                    await self._commit([unit])
                    break
                except StoreFull as again:
                    if unit.refused is not None:
                        unit.refused(Error.of(again))
                        break
                    await trio.sleep(FULL_RETRY_S)

    def _fail(self, error: AmqpError) -> None:
        self.failure = error
        _log.critical("the store is given up: %s", error)
        self._on_failed(error)
