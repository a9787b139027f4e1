"""Health of the container's own instances of addresses, as the application states or checks it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import trio

log = logging.getLogger("amqp_rt.mesh")

#: A value, or a function that returns one, at once or when awaited.
Alive: TypeAlias = bool | Callable[[], bool | Awaitable[bool]]
#: Seconds between two calls of a check, and for which one may take.
CHECK_S: Final = 1.0
CHECKED_WITHIN_S: Final = 5.0


class Health:
    """Health by address. Checks are called once a second, each in a task of its own.

    Args:
        on_change: Called with an address and its health when that changes.
    """

    def __init__(self, on_change: Callable[[str, bool], None]) -> None:
        self._on_change = on_change
        self._alive: dict[str, bool] = {}
        self._checks: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the checks until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def set(self, address: str, alive: Alive) -> None:
        """Set the health of *address*, or the check that tells it from now on."""
        old = self._checks.pop(address, None)
        if old is not None:
            old.cancel()
        if not callable(alive):
            self._change(address, bool(alive))
            return
        if self._nursery is None:
            raise RuntimeError("the health of an address is checked inside the block of the mesh")
        scope = self._checks[address] = trio.CancelScope()
        self._nursery.start_soon(self._check, address, alive, scope)

    async def _check(
        self, address: str, alive: Callable[[], bool | Awaitable[bool]], scope: trio.CancelScope
    ) -> None:
        with scope:
            while True:
                found = False
                try:
                    with trio.move_on_after(CHECKED_WITHIN_S):
                        result = alive()
                        found = bool(await result if inspect.isawaitable(result) else result)
                except Exception:
                    log.exception(
                        "mesh: the check of %.100r failed: it counts as not alive", address
                    )
                if not scope.cancel_called:
                    self._change(address, found)
                await trio.sleep(CHECK_S)

    def _change(self, address: str, alive: bool) -> None:
        if self._alive.get(address, True) != alive:
            log.info("mesh: %.100r is %s here", address, "alive" if alive else "not alive")
        if self._alive.get(address) != alive:
            self._alive[address] = alive
            self._on_change(address, alive)
