"""Objects that run within an ``async with`` block under trio."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import ClassVar, Self

from .loops import require_trio


class TrioBlock:
    """Object that runs within one ``async with`` block, and cannot be entered again."""

    #: Its name in ``amqp_rt``, ``amqp_rt.aio`` and ``amqp_rt.sync``, also of subclasses.
    _public_name: ClassVar[str]

    def __init__(self) -> None:
        #: The block; None until it is entered.
        self._running: AbstractAsyncContextManager[Self] | None = None

    def _run(self) -> AbstractAsyncContextManager[Self]:
        """Return the context manager that starts the object, and stops it at the end of the block."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        require_trio(self._public_name)
        if self._running is not None:
            raise RuntimeError(f"{self!r} has been entered before: make another")
        self._running = self._run()
        return await self._running.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._running is not None
        return await self._running.__aexit__(kind, error, trace)
