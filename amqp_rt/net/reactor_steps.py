"""Steps of the reactor that never wait: what it does around each wait for I/O, and when carriers call it.

Apart from :mod:`.reactor`, whose tasks call them, so that they can be compiled: a message that is sent alone passes
through all of them at both ends.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from heapq import heapify, heappush
from math import inf
from time import perf_counter
from typing import Final

import trio

from ..compiling import mypyc_attr
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
STEP_S: Final = 0.004
#: Alarms of ended connections are removed when they outnumber the others by this many.
_STALE_ALARMS: Final = 1_024
#: Bits of epoll's masks, which only Linux has.
_IN: Final[int] = getattr(select, "EPOLLIN", 0x01)
_OUT: Final[int] = getattr(select, "EPOLLOUT", 0x04)
_DEAD: Final[int] = getattr(select, "EPOLLHUP", 0x10) | getattr(select, "EPOLLERR", 0x08)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReactorSteps:
    """State of a :class:`~.reactor.Reactor`, and its steps."""

    #: Of the event loop; set before trio calls us.
    _token: trio.lowlevel.TrioToken

    def __init__(self) -> None:
        #: Whether sockets are being served.
        self._passing = False
        #: Whether trio calls us around its waits for I/O, and whether it waits. Host code of a guest run, or an
        #: instrument, may run meanwhile.
        self._hooked = self._was_hooked = False
        self._between = False
        #: Whether tasks may have been woken since the scheduler decided how long to wait.
        self._stirred = False
        #: The set of trio in which ours stays, None if the serving task waits for it; and the event that makes it wait.
        self._trio_epoll: select.epoll | None = None
        self._task_needed = trio.Event()
        #: Whether the serving task waits, and whether the sockets that end its wait were served before it runs.
        self._waiting = False
        self._served = False
        #: Context variables for what is called around waits.
        self._context = Context()
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
        #: Whether a task may wait there: to look for such tasks costs more than the rest of a connection's end.
        self._emptying = False
        self._flushes: list[Carrier] = []
        self._turn = Turn()
        #: Carriers that have more to do with the input that they read.
        self._resuming: deque[Carrier] = deque()
        self._resumption = Turn()
        #: Times in trio's clock, with descriptors and the same times in the clocks of carriers; an entry
        #: is out of date if its carrier has another.
        self._alarms: list[tuple[float, int, float]] = []
        self._alarm: trio.CancelScope = trio.CancelScope()
        #: The scope's deadline: changing it costs more than the rest of an alarm.
        self._rings_at = inf

    def _call_endings(self) -> None:
        while self._endings:
            endings, self._endings = self._endings, []
            for ended in endings:
                try:
                    ended()
                except Exception:
                    # A fault of ours: it must not end the other connections.
                    log.exception("the end of a connection failed")
        if self._emptying and not self._adopted:
            self._emptying = False
            self._emptied.unpark_all()

    # --- called by carriers --------------------------------------------------------------

    def watch(self, carrier: Carrier) -> None:
        """Update the epoll set when ``wants_read`` or ``wants_write`` has changed."""
        mask = _IN if carrier.wants_read else 0
        if carrier.wants_write:
            mask |= _OUT
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

    # --- called around each wait for I/O ---------------------------------------------------

    def before_io_wait(self, timeout: float) -> None:
        """Send the output of the tasks of this pass. Called by trio, with the seconds that it is going to wait."""
        if self._flushes:
            self._stirred = False
            try:
                self._context.run(self._flush_now)
            except BaseException:
                # Trio logs it, and calls us no more.
                self._served = False
                self._leave_trio()
                self._token.run_sync_soon(self._turn.call)
                raise
            if timeout > 0 and (self._stirred or self._flushes):
                # The wait is not to last until I/O or the deadline that was known before.
                self._token.run_sync_soon(nothing, idempotent=True)
        self._between = True

    def after_io_wait(self, timeout: float) -> None:
        """Serve the sockets that have ended the wait. Called by trio, with the seconds that it was to wait at most.

        Where the serving task waits for our set and other tasks were runnable, nothing is done here: that task looks for
        ready sockets itself.
        """
        self._between = self._served = False
        try:
            if self._trio_epoll is not None:
                if self._at == len(self._ready):
                    self._ready = self._epoll.poll(0, _SOCKETS_IN_A_ROW)
                    self._at = 0
                    if not self._ready:
                        return
            elif timeout <= 0 or not self._waiting:
                return
            self._context.run(self._step)
        except BaseException:
            self._leave_trio()
            self._turn.call()
            raise
        self._served = True

    def _leave_trio(self) -> None:
        """Take our set out of trio's, which calls us no more: from now on the serving task waits for it."""
        self._hooked = False
        kept_in = self._trio_epoll
        if kept_in is not None:
            self._trio_epoll = None
            self._task_needed.set()
            # The loop has closed its set, or we have closed ours.
            with suppress(OSError, ValueError):
                kept_in.unregister(self._epoll)

    def _step(self) -> bool:
        """Serve ready sockets, with a bounded amount of work; return whether more may be ready."""
        sockets, room = _SOCKETS_IN_A_ROW, _BYTES_IN_A_ROW
        until = perf_counter() + STEP_S
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
                if mask & _OUT and carrier.wants_write:
                    carrier.writable()
                if mask & ~_OUT and carrier.wants_read:
                    read += carrier.readable()
                    if read >= room or perf_counter() >= until:
                        break
                elif mask & _DEAD:
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
