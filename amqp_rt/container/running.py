"""Whole programs: a container or a broker from its start to the signal that ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Protocol, Self

import trio

from ..errors import AmqpError
from .connections import Connection


class Application(Protocol):
    """Container or broker, as a program runs it."""

    @property
    def standby(self) -> str:
        """Why its start waits for another program; empty if it does not."""

    @property
    def timed(self) -> Sequence[object]:
        """Functions that run at certain times, which need no peer."""

    async def __aenter__(self) -> Self:
        """Start it."""

    async def __aexit__(self, *raised: Any) -> bool | None:
        """Stop it."""

    async def listen(self, *urls: str) -> list[str]:
        """Listen at *urls*; return them with the addresses that were bound."""

    def connect(
        self, urls: str | Sequence[str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Connection]:
        """Connect to a peer."""

    async def serve(self) -> None:
        """Wait for :meth:`stop`."""

    async def drain(self) -> None:
        """Take no more work, and wait for handlers."""

    def stop(self) -> None:
        """Make :meth:`serve` return."""


async def run_application(
    application: Application,
    url: str | Sequence[str] | None,
    listen: str | Sequence[str],
    *,
    signals: bool,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Run *application* until it is stopped; see :meth:`Container.run_async`."""
    if url is None and not listen and not application.timed:
        raise ValueError("nothing to run at: give a url, listen, or both")
    async with trio.open_nursery() as watching:
        # Signals are handled until the very end, so that a second one can end the wait for the first.
        if signals:
            await watching.start(
                stop_on_signals, partial(_stop, application, watching.cancel_scope)
            )
        async with application, AsyncExitStack() as connections:
            bound = await application.listen(*([listen] if isinstance(listen, str) else listen))
            served = url is None
            if url is not None:
                # A signal while the peer is not there yet ends the wait for it.
                async with trio.open_nursery() as starting:
                    starting.start_soon(_cancel_after, application.serve, starting.cancel_scope)
                    peer = await connections.enter_async_context(
                        application.connect(url, **options)
                    )
                    await peer.serve()
                    served = True
                    starting.cancel_scope.cancel()
            if not served:
                # Stopped before: it is not ready when the caller continues.
                await application.drain()
            task_status.started(bound)
            await application.serve()
            # The connections carry the outcomes of the handlers that end now.
            await application.drain()
        watching.cancel_scope.cancel()


def _stop(application: Application, scope: trio.CancelScope) -> None:
    """Stop *application*; if it waits for another program in *scope*, end that."""
    application.stop()
    if application.standby:
        scope.cancel()


async def _cancel_after(wait: Callable[[], Any], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


def run_program(
    application: Application,
    url: str | Sequence[str] | None,
    listen: str | Sequence[str],
    **options: Any,
) -> None:
    """Run *application* under trio until it is stopped; see :meth:`Container.run`."""
    work = partial(run_application, application, url, listen, signals=True, **options)
    try:
        trio.run(work)
    except BaseException as raised:
        error = first_of(raised)
        if isinstance(error, AmqpError):
            # Without a condition, which is none of the peer's if the system has failed.
            raise SystemExit(f"Error: {error.description}") from None
        raise


def first_of(error: BaseException) -> BaseException:
    """Return the most useful error in a group: the first expected one, else the first of all."""
    flat: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop(0)
        if isinstance(each, BaseExceptionGroup):
            pending = [*each.exceptions, *pending]
        else:
            flat.append(each)
    return next((e for e in flat if isinstance(e, AmqpError | OSError | SystemExit)), flat[0])


async def stop_on_signals(
    stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call *stop* at the first SIGINT or SIGTERM; the second one ends the process at once.

    The status of the process is then 128 and the number of the signal. No handler is waited for, not even
    one in a thread, and nothing is cleaned up: it is the same as a crash to peers and to the store.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        seen = 0
        async for number in signals:
            seen += 1
            if seen > 1:
                sys.stderr.write("stopped without waiting\n")
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(128 + number)
            stop()
