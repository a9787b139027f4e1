"""Opening a store, at once or when the broker that uses it has ended; and the thread in which its methods are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Protocol

import trio

from ...stores.base import OpenResult, SharedStore, Store, StoreBusy

#: Seconds between attempts to open a store that another broker uses.
STANDBY_POLL_S: Final = 0.25


class Executor(Protocol):
    """Executor of blocking calls outside the event loop, one at a time and in order."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


#: Seconds without a call after which the thread ends.
IDLE_THREAD_S: Final = 10.0


class _Job:
    """A call for the thread, and its result or exception once it has been made."""

    __slots__ = ("args", "call", "error", "result", "task", "token")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.task = trio.lowlevel.current_task()
        self.token = trio.lowlevel.current_trio_token()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call(*self.args)
        except BaseException as error:
            self.error = error
        # The loop has ended if it was killed: then nothing waits.
        with suppress(trio.RunFinishedError):
            self.token.run_sync_soon(trio.lowlevel.reschedule, self.task)


class Threaded:
    """Executor with one worker thread. A running call is finished even if its caller is cancelled.

    Half as expensive as ``trio.to_thread.run_sync``, which chooses a thread for each call, limits them and copies the
    context; with one durable message at a time that is a large part of the cost.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = Lock()
        self._running = False

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        job = _Job(call, args)
        with self._lock:
            self._jobs.put(job)
            if not self._running:
                self._running = True
                Thread(target=self._work, name="amqp_rt store", daemon=True).start()
        await trio.lowlevel.wait_task_rescheduled(_goes_on)
        error = job.error
        if error is not None:
            # Avoid reference cycles: the traceback refers to the frames of the thread and of this call.
            job.error = None
            try:
                raise error
            finally:
                del error
        return job.result

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_THREAD_S)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._running = False
                        return
            else:
                job.run()
                del job


def _goes_on(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


async def open_store(store: Store, call: Executor, waits: Callable[[str], None]) -> OpenResult:
    """Open *store* by *call*; wait while another broker uses a store that several may be started on.

    *waits* is called with the reason of each attempt that failed. If cancelled, the store is closed.

    Raises:
        AmqpError: The store cannot be opened; see :meth:`~amqp_rt.stores.base.Store.open`.
    """
    shared = isinstance(store, SharedStore)
    try:
        while True:
            try:
                opened: OpenResult = await call(store.open)
            except StoreBusy as error:
                if not shared:
                    raise
                waits(error.description)
                await trio.sleep(STANDBY_POLL_S)
            else:
                return opened
    except BaseException:
        if shared:
            await call(store.close)
        raise
