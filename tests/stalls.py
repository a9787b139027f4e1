"""A slow store: calls that stop until a test lets them go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio


class Stall:
    """A call of the store that has stopped, or will."""

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
        """Let the call go on."""
        self.released.set()


class Stalls:
    """An executor that runs calls of a store one at a time and in order, as a worker thread does.

    A call that a test has named stops, and everything behind it waits, until the test lets it go on.
    """

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._stalls: list[tuple[str, Stall]] = []
        #: The names of the calls that have been made.
        self.calls: list[str] = []

    def at(self, name: str, *, error: Exception | None = None) -> Stall:
        """Let the next call of *name* stop, and raise *error* then if there is one.

        Of several for the same name the first one stops the first call.
        """
        stall = Stall(error)
        self._stalls.append((name, stall))
        return stall

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        # As with a thread, the call in hand is finished when its caller is cancelled.
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
    """What a call has returned or raised that a test lets run beside it."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.over = trio.Event()

    async def get(self) -> Any:
        """The result; the condition of an error that has one."""
        with trio.fail_after(20):
            await self.over.wait()
        if self.error is not None:
            return getattr(self.error, "condition", self.error)
        return self.value


def beside(nursery: trio.Nursery, call: Callable[..., Any], *args: Any) -> Answer:
    """Run *call* in *nursery*."""
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
