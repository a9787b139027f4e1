"""Many sockets that are served together.

A task for each socket costs scheduling for every chunk. The reactor has its own epoll set, which is
a single descriptor for trio, and serves every ready socket, with a bounded amount of work at a time. Deadlines are in
one heap with one alarm.

A pass of the scheduler, with its system call, costs more than a small message. The reactor is therefore an
instrument of trio too, which is called around each wait for I/O: output of the tasks of a pass leaves before the
wait, and sockets that end the wait are served after it, so that the tasks that they wake run in the same pass. A
request with its reply takes one pass at each end (decision 0123). The set stays in trio's own; only where that cannot be,
a task waits for it (decision 0129).
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from heapq import heappop
from math import inf
from time import perf_counter
from typing import Final

import trio

from .carrier import Carrier
from .reactor_steps import STEP_S, ReactorSteps
from .trio_epoll import trio_epoll

#: Alarms handled between two checkpoints.
_ALARMS_IN_A_ROW: Final = 64


@asynccontextmanager
async def open_reactor() -> AsyncIterator[Reactor | None]:
    """Open a reactor for connections within the block; drop those left at its end.

    Yields None where the system has no epoll: connections then have their own tasks.
    """
    if sys.platform != "linux":
        yield None
        return
    failure: BaseException | None = None
    reactor = Reactor()
    try:
        async with trio.open_nursery() as nursery:
            reactor.start(nursery)
            try:
                yield reactor
            except BaseException as error:
                # Raised again below: the nursery would wrap it in a group.
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        reactor.close()
    if failure is not None:
        raise failure


class Reactor(ReactorSteps, trio.abc.Instrument):
    """Host of carriers on sockets; see :class:`~amqp_rt.net.carrier.CarrierHost`.

    Output that one connection causes on others within a pass is sent once, at its end, and so is all output of the
    tasks that run in one pass of the scheduler.
    """

    def start(self, nursery: trio.Nursery) -> None:
        """Run the reactor's tasks in *nursery*, until it is cancelled."""
        # What is called around waits has the context variables that these tasks have.
        self._context = copy_context()
        nursery.start_soon(self._serve)
        nursery.start_soon(self._flush)
        nursery.start_soon(self._resume)
        nursery.start_soon(self._ring)

    def close(self) -> None:
        """Drop all connections that are still carried."""
        for carrier in list(self._carriers.values()):
            carrier.drop("the program is stopping")
        self._call_endings()
        # A connection may have been opened after the tasks ended, while the program stops.
        self._unhook()
        self._epoll.close()

    async def carry(self, carrier: Carrier, sock: socket.socket, initial: bytes) -> None:
        """Carry *carrier*, whose channel is *sock*, until it has ended."""
        if not self._was_hooked:
            self._hook()
        descriptor = carrier.token = sock.fileno()
        self._carriers[descriptor] = carrier
        self._epoll.register(descriptor, select.EPOLLIN)
        try:
            try:
                carrier.start(self, initial)
            except Exception as error:
                carrier.fail(error)
            if not carrier.over:
                self._parked[descriptor] = trio.lowlevel.current_task()

                def abort(raise_cancel: object) -> trio.lowlevel.Abort:
                    del self._parked[descriptor]
                    return trio.lowlevel.Abort.SUCCEEDED

                await trio.lowlevel.wait_task_rescheduled(abort)
        finally:
            self._forget(descriptor)

    # --- connections without a task ------------------------------------------------------

    def adopt(self, carrier: Carrier, sock: socket.socket, ended: Callable[[], None]) -> None:
        """Carry *carrier*, whose channel is *sock*, without a task of its own.

        *ended* is called once after its end, in another step than the one that ended it; the caller
        closes the socket there. Exceptions of a step are in ``carrier.failure`` then.
        """
        if not self._was_hooked:
            self._hook()
        descriptor = carrier.token = sock.fileno()
        self._carriers[descriptor] = carrier
        self._adopted[descriptor] = ended
        self._epoll.register(descriptor, select.EPOLLIN)
        try:
            carrier.start(self)
        except Exception as error:
            carrier.fail(error)

    async def wait_adopted(self) -> None:
        """Wait until no connection without a task is left. Cancelling changes nothing."""
        while self._adopted or self._endings:
            self._emptying = True
            await self._emptied.park()

    def drop_adopted(self) -> None:
        """Drop the connections without a task, and call what follows their ends."""
        for descriptor in list(self._adopted):
            carrier = self._carriers[descriptor]
            try:
                carrier.drop("the connection was dropped")
            except Exception as error:
                carrier.fail(error)
        self._call_endings()

    # --- the tasks -----------------------------------------------------------------------

    async def _serve(self) -> None:
        """Wait for the set of sockets, if trio does not keep it in its own, and serve those that are ready."""
        try:
            await self._task_needed.wait()
            while True:
                self._waiting = True
                try:
                    await trio.lowlevel.wait_readable(self._epoll)
                finally:
                    self._waiting = False
                while not self._served and self._step():
                    await trio.lowlevel.checkpoint()
        finally:
            self._unhook()

    def _hook(self) -> None:
        """Let trio call us, from the first connection on."""
        self._token = trio.lowlevel.current_trio_token()
        self._trio_epoll = trio_epoll()
        if self._trio_epoll is None:
            self._task_needed.set()
        else:
            self._trio_epoll.register(self._epoll, select.EPOLLIN)
        trio.lowlevel.add_instrument(self)
        self._hooked = self._was_hooked = True

    def _unhook(self) -> None:
        if self._hooked:
            self._leave_trio()
            trio.lowlevel.remove_instrument(self)
            if self._flushes:
                self._turn.call()

    async def _flush(self) -> None:
        while True:
            await self._turn.wait()
            self._flush_now()

    async def _resume(self) -> None:
        # One at a time: each has the work of a whole turn to do.
        while True:
            await self._resumption.wait()
            self._resume_one()
            if self._resuming:
                self._resumption.call()

    def _resume_one(self) -> None:
        # A separate function: a local variable of the task would keep the last connection in
        # memory.
        carrier = self._resuming.popleft()
        if not carrier.over:
            try:
                carrier.flush()
            except Exception as error:
                carrier.fail(error)

    async def _ring(self) -> None:
        alarms = self._alarms
        while True:
            # The task may wait for long, and must not keep the last connection in memory.
            carrier = None
            self._rings_at = alarms[0][0] if alarms else inf
            with trio.CancelScope(deadline=self._rings_at) as self._alarm:
                await trio.sleep_forever()
            now = trio.current_time()
            # An engine may have a whole turn's work when its alarm is due; the others follow in a
            # later step.
            until = perf_counter() + STEP_S
            for _ in range(_ALARMS_IN_A_ROW):
                if not alarms or alarms[0][0] > now or perf_counter() >= until:
                    break
                _, descriptor, wakes_at = heappop(alarms)
                carrier = self._carriers.get(descriptor)
                if carrier is not None and not carrier.over and carrier.wakes_at == wakes_at:
                    try:
                        carrier.expire(carrier.clock.monotonic())
                    except Exception as error:
                        carrier.fail(error)
            # Alarms of connections that have ended: otherwise each short connection costs two wake-ups
            # after its end.
            while alarms and perf_counter() < until:
                _, descriptor, wakes_at = alarms[0]
                carrier = self._carriers.get(descriptor)
                if carrier is not None and carrier.wakes_at == wakes_at:
                    break
                heappop(alarms)
