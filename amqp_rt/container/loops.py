"""Event loops: trio, in which everything runs, and an asyncio whose guest it may be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def require_trio(name: str) -> None:
    """Check that the caller runs under trio, which *name* needs.

    Raises:
        RuntimeError: The caller runs under asyncio, or without an event loop.
    """
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            f"amqp_rt.{name} runs under trio: under asyncio use amqp_rt.aio.{name}, in a program "
            f"without an event loop amqp_rt.sync.{name}"
        )


async def in_asyncio(call: Callable[[], Awaitable[T]], need: str) -> T:
    """Run the awaitable that *call* returns under asyncio: here, or in the event loop whose guest trio is.

    If cancelled under trio, the task of asyncio is cancelled, and its end awaited.

    Raises:
        RuntimeError: With the text *need*: trio runs without asyncio.
    """
    if not trio.lowlevel.in_trio_task():
        return await call()
    import asyncio  # a broker starts without it

    try:
        # The loop runs the steps of its guest, in its own thread.
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(need) from None
    return (await task_of(loop, call, copy_context())).result()


async def task_of(
    loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[T]], context: Context
) -> asyncio.Task[T]:
    """Run the awaitable that *call* returns in a task of *loop*; wait for its end under trio, and return it.

    If the waiting task is cancelled, so is that of asyncio; an exception that it ends with nevertheless is raised.
    """

    async def run() -> T:
        return await call()

    task = loop.create_task(run(), context=context)
    over = trio.Event()
    task.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    except trio.Cancelled:
        task.cancel()
        with trio.CancelScope(shield=True):
            await over.wait()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
    return task
