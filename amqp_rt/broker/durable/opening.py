"""Opening a store, at once or when the broker that uses it has ended; and the thread in which its methods are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import trio

from ...stores.base import OpenResult, SharedStore, Store, StoreBusy

#: Seconds between attempts to open a store that another broker uses.
STANDBY_POLL_S: Final = 0.25


class Executor(Protocol):
    """Executor of blocking calls outside the event loop, one at a time and in order."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Threaded:
    """Executor with one worker thread. A running call is finished even if its caller is cancelled."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)


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
