"""A slow store: calls that wait until a test releases them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio


class Stall:
    """A call of the store that waits, or will wait."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached = trio.Event()
        self.released = trio.Event()
        self.error = error

    async def __aenter__(self) -> Stall:
        """Wait until the call has begun."""
        with trio.fail_after(20):
            await self.reached.wait()
        return self

    async def __aexit__(self, *args: object) -> None:
        """Release the call."""
        self.released.set()


class Stalls:
    """An executor that runs calls of a store one at a time and in order, as a worker thread does.

    A call that a test has named waits, and all later ones wait behind it, until the test releases it.
    """

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._stalls: list[tuple[str, Stall]] = []
        #: Names of the calls made so far.
        self.calls: list[str] = []

    def at(self, name: str, *, error: Exception | None = None) -> Stall:
        """Make the next call of *name* wait, and then raise *error* if there is one.

        Several stalls of the same name apply to successive calls, in order.
        """
        stall = Stall(error)
        self._stalls.append((name, stall))
        return stall

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        # As in a thread, a call that has begun is finished even if its caller is cancelled.
        with trio.CancelScope(shield=True):
            return await self._run(call, *args)

    async def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        async with self._turn:
            name = getattr(call, "__name__", "")
            self.calls.append(name)
            for at, (wanted, stall) in enumerate(self._stalls):
                if wanted == name:
                    del self._stalls[at]
                    stall.reached.set()
                    await stall.released.wait()
                    if stall.error is not None:
                        raise stall.error
                    break
            await trio.lowlevel.checkpoint()
            return call(*args)


class Answer:
    """Result or error of a call that runs beside a test."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.over = trio.Event()

    async def get(self) -> Any:
        """Wait for the result and return it; for an error, its condition or the error itself."""
        with trio.fail_after(20):
            await self.over.wait()
        if self.error is not None:
            return getattr(self.error, "condition", self.error)
        return self.value


def beside(nursery: trio.Nursery, call: Callable[..., Any], *args: Any) -> Answer:
    """Run *call* in *nursery*, and return its future answer."""
    answer = Answer()

    async def run() -> None:
        try:
            answer.value = await call(*args)
        except Exception as error:
            answer.error = error
        finally:
            answer.over.set()

    nursery.start_soon(run)
    return answer
