"""A single task that waits for many sockets.

A task for each socket costs scheduling for every chunk. The reactor has its own epoll set, which is
a single descriptor for trio: one task waits for it and then serves every ready socket, with a
bounded amount of work at a time. Deadlines are in one heap with one alarm.

A pass of the scheduler, with its system call, costs more than a small message. The reactor is therefore an
instrument of trio too, which is called around each wait for I/O: output of the tasks of a pass leaves before the
wait, and sockets that end the wait are served after it, so that the tasks that they wake run in the same pass. A
request with its reply takes one pass at each end (decision 0123).
"""

from __future__ import annotations

import logging
import select
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from math import inf
from time import perf_counter
from typing import Final

import trio

from .carrier import READ_SIZE, READS_IN_A_ROW, Carrier, nothing
from .driver import Turn, in_trio_time

log = logging.getLogger("amqp_rt.net")

#: Sockets served between two checkpoints.
_SOCKETS_IN_A_ROW: Final = 64
#: Bytes read between two checkpoints.
_BYTES_IN_A_ROW: Final = READS_IN_A_ROW * READ_SIZE
#: Bytes read in a poll of the sockets below which no further poll follows at once.
_LITTLE: Final = 4_096
#: Seconds after which no further socket is served before a checkpoint.
_STEP_S: Final = 0.004
#: Alarms handled between two checkpoints.
_ALARMS_IN_A_ROW: Final = 64
#: Alarms of ended connections are removed when they outnumber the others by this many.
_STALE_ALARMS: Final = 1_024


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


class Reactor(trio.abc.Instrument):
    """Host of carriers on sockets; see :class:`~amqp_rt.net.carrier.CarrierHost`.

    Output that one connection causes on others within a pass is sent once, at its end, and so is all output of the
    tasks that run in one pass of the scheduler.
    """

    def __init__(self) -> None:
        #: Whether sockets are being served.
        self._passing = False
        #: Whether trio calls us around its waits for I/O, and whether it waits. Host code of a guest run, or an
        #: instrument, may run meanwhile.
        self._hooked = self._was_hooked = False
        self._between = False
        #: Whether tasks may have been woken since the scheduler decided how long to wait.
        self._stirred = False
        #: Whether the serving task waits, and whether the sockets that end its wait were served before it runs.
        self._waiting = False
        self._served = False
        #: Ready sockets of the last poll, and the index of the first that has not been served.
        self._ready: list[tuple[int, int]] = []
        self._at = 0
        self._epoll = select.epoll()
        self._carriers: dict[int, Carrier] = {}
        #: Tasks that run a connection and wait for its end.
        self._parked: dict[int, trio.lowlevel.Task] = {}
        #: Functions to call after the end of connections without a task, and those that are due.
        self._adopted: dict[int, Callable[[], None]] = {}
        self._endings: list[Callable[[], None]] = []
        self._emptied = trio.lowlevel.ParkingLot()
        self._flushes: list[Carrier] = []
        self._turn = Turn()
        #: Carriers that have more to do with the input that they read.
        self._resuming: deque[Carrier] = deque()
        self._resumption = Turn()
        #: Times in trio's clock, with descriptors and the same times in the clocks of carriers; an entry
        #: is out of date if its carrier has another.
        self._alarms: list[tuple[float, int, float]] = []
        self._alarm = trio.CancelScope()
        #: The scope's deadline: changing it costs more than the rest of an alarm.
        self._rings_at = inf

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

    def _call_endings(self) -> None:
        while self._endings:
            endings, self._endings = self._endings, []
            for ended in endings:
                try:
                    ended()
                except Exception:
                    # A fault of ours: it must not end the other connections.
                    log.exception("the end of a connection failed")
        if not self._adopted:
            self._emptied.unpark_all()

    # --- called by carriers --------------------------------------------------------------

    def watch(self, carrier: Carrier) -> None:
        """Update the epoll set when ``wants_read`` or ``wants_write`` has changed."""
        mask = select.EPOLLIN if carrier.wants_read else 0
        if carrier.wants_write:
            mask |= select.EPOLLOUT
        self._epoll.modify(carrier.token, mask)

    def alarm(self, carrier: Carrier) -> None:
        """Schedule the alarm after ``wakes_at`` has become earlier."""
        alarms = self._alarms
        if len(alarms) > 2 * len(self._carriers) + _STALE_ALARMS:
            alarms[:] = [
                (in_trio_time(each), each.token, each.wakes_at)
                for each in self._carriers.values()
                if each is not carrier and each.wakes_at < inf
            ]
            heapify(alarms)
        heappush(alarms, (in_trio_time(carrier), carrier.token, carrier.wakes_at))
        if alarms[0][0] < self._rings_at:
            self._stirred = True
            self._rings_at = self._alarm.deadline = alarms[0][0]

    def later(self, carrier: Carrier) -> None:
        """Flush *carrier* at the end of this pass.

        A carrier that has to go on with its input waits for its turn among those like it.
        """
        if carrier.resuming:
            self._stirred = True
            self._resuming.append(carrier)
            self._resumption.call()
            return
        self._flushes.append(carrier)
        if not self._passing and (
            self._between or not self._hooked or getattr(carrier.engine, "notifies", True)
        ):
            # Whatever this wakes must not wait for the end of a wait for I/O.
            self._turn.call()

    def ended(self, carrier: Carrier) -> None:
        """Resume the task that waits for the end of *carrier*, and stop watching its socket.

        The descriptor stays ready until it is closed; watched until then, it would be reported
        again and again.
        """
        self._stirred = True
        self._forget(carrier.token)
        task = self._parked.pop(carrier.token, None)
        if task is not None:
            trio.lowlevel.reschedule(task)
        elif (ended := self._adopted.pop(carrier.token, None)) is not None:
            # The step that ends the carrier goes on after this call.
            self._endings.append(ended)
            if not self._passing:
                self._turn.call()

    def _forget(self, descriptor: int) -> None:
        if self._carriers.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    # --- the tasks -----------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
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
        trio.lowlevel.add_instrument(self)
        self._hooked = self._was_hooked = True

    def _unhook(self) -> None:
        if self._hooked:
            self._hooked = False
            trio.lowlevel.remove_instrument(self)
            if self._flushes:
                self._turn.call()

    def before_io_wait(self, timeout: float) -> None:
        """Send the output of the tasks of this pass. Called by trio, with the seconds that it is going to wait."""
        if self._flushes:
            self._stirred = False
            try:
                self._context.run(self._flush_now)
            except BaseException:
                # Trio logs it, and calls us no more.
                self._hooked = self._served = False
                self._token.run_sync_soon(self._turn.call)
                raise
            if timeout > 0 and (self._stirred or self._flushes):
                # The wait is not to last until I/O or the deadline that was known before.
                self._token.run_sync_soon(nothing, idempotent=True)
        self._between = True

    def after_io_wait(self, timeout: float) -> None:
        """Serve the sockets that have ended the wait. Called by trio, with the seconds that it was to wait at most.

        If other tasks were runnable, the serving task finds out whether there are any, without a poll for each pass.
        """
        self._between = self._served = False
        if timeout > 0 and self._waiting:
            try:
                self._context.run(self._step)
            except BaseException:
                self._hooked = False
                self._turn.call()
                raise
            self._served = True

    def _step(self) -> bool:
        """Serve ready sockets, with a bounded amount of work; return whether more may be ready."""
        sockets, room = _SOCKETS_IN_A_ROW, _BYTES_IN_A_ROW
        until = perf_counter() + _STEP_S
        while True:
            if self._at == len(self._ready):
                self._ready = self._epoll.poll(0, sockets)
                self._at = 0
                if not self._ready:
                    return False
            served, read = self._pass(self._ready, self._at, room, until)
            self._at += served
            sockets -= served
            room -= read
            if sockets <= 0 or room <= 0 or perf_counter() >= until:
                return True
            if read < _LITTLE and self._at == len(self._ready):
                # Probably all that there is. The next wait, which takes place anyway, reports any more.
                return False

    def _pass(
        self, ready: list[tuple[int, int]], at: int, room: int, until: float
    ) -> tuple[int, int]:
        """Serve sockets from index *at*, until *room* bytes are read or the time *until* comes.

        Returns:
            The number of sockets served, and of bytes read.
        """
        self._passing = True
        carriers = self._carriers
        served = read = 0
        for descriptor, mask in ready[at:] if at else ready:
            served += 1
            carrier = carriers.get(descriptor)
            if carrier is None or carrier.over:
                continue
            try:
                if mask & select.EPOLLOUT and carrier.wants_write:
                    carrier.writable()
                if mask & ~select.EPOLLOUT and carrier.wants_read:
                    read += carrier.readable()
                    if read >= room or perf_counter() >= until:
                        break
                elif mask & (select.EPOLLHUP | select.EPOLLERR):
                    carrier.hang_up()
            except Exception as error:
                carrier.fail(error)
        if self._flushes or self._endings:
            self._flush_now()
        self._passing = False
        if self._flushes:
            self._turn.call()
        return served, read

    def _flush_now(self) -> None:
        flushes = self._flushes
        self._flushes = []
        for carrier in flushes:
            if not carrier.over:
                carrier.notified = False
                try:
                    carrier.flush()
                except Exception as error:
                    carrier.fail(error)
                if carrier.notified:
                    self._stirred = True
        if self._endings:
            self._call_endings()

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
            until = perf_counter() + _STEP_S
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
