"""Work that is divided among turns of the event loop, and calls that are due at a time.

Each turn does as much work as :attr:`~amqp_rt.broker.queue.accounts.Memory.work` allows; the rest waits here
for the next one, so that connections are served in between.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Final, Protocol

import trio

from ..clock import Clock
from .queue.accounts import WORK_OF_A_TURN, Memory

#: Cost of one call of ``resume``, in deliveries concluded in the same time.
_WORK_OF_A_CALL: Final = 10


class Resumable(Protocol):
    """Object with more work than one turn of the event loop allows."""

    def resume(self) -> None:
        """Do the work of one turn."""


class Alarmed(Protocol):
    """Object that is called at a time."""

    #: The time for which the alarm is set; ``inf`` if it is not set.
    alarm: float
    deleted: bool

    def tick(self) -> None:
        """Do the work that is due now."""


class Steps:
    """Work of many steps, of which each turn does some.

    Args:
        turns: Schedules the turns.
        steps: Iterator that does one step for each element.
        work: Cost of a step, in deliveries concluded in the same time.
    """

    def __init__(self, turns: Scheduler, steps: Iterator[None], work: int) -> None:
        self._turns = turns
        self._steps = steps
        self._work = work
        #: Whether all steps are done.
        self.over = False

    def resume(self) -> None:
        """Do as many steps as this turn allows."""
        memory = self._turns.memory
        for _ in self._steps:
            memory.work -= self._work
            if memory.work <= 0:
                self._turns.resume_later(self)
                return
        self.over = True


class Scheduler:
    """Deferred work and alarms of all nodes.

    Args:
        memory: Has the limit of work in one turn.
        clock: Clock of the alarms.
        guard: Makes a call on behalf of an object; an exception concerns only the node of that object.
    """

    def __init__(
        self,
        memory: Memory,
        clock: Clock,
        guard: Callable[[object, Callable[[], object]], None],
    ) -> None:
        self.memory = memory
        self._clock = clock
        self._guard = guard
        #: Objects with work left for later turns, such as queues whose filters have to examine more
        #: messages, and logs whose readers have to examine more records. The function beside each does
        #: all that has to be done before the store is closed.
        self.unfinished: deque[tuple[Resumable, Callable[[], None] | None]] = deque()
        self.pending = trio.Event()
        #: Heap of alarms: time, number in the order of setting, and object to call.
        self.alarms: list[tuple[float, int, Alarmed]] = []
        self.alarms_set = 0
        self._alarms_max = 64
        self._alarmed = trio.Event()

    def do_in_turns(self, steps: Iterator[None], work: int = 1) -> Steps:
        """Do *steps*, as many as this turn allows now and the rest in later ones.

        Each may take as long as concluding *work* deliveries.
        """
        begun = Steps(self, steps, work)
        begun.resume()
        return begun

    def resume_later(self, work: Resumable, finish: Callable[[], None] | None = None) -> None:
        """Call ``resume`` of *work* in the next turn, after work that was deferred before.

        If the store is closed before that, *finish* is called instead.
        """
        self.unfinished.append((work, finish))
        self.pending.set()

    def finish(self) -> None:
        """Finish deferred work that must not be lost, since no turns follow."""
        for work, finish in list(self.unfinished):
            if finish is not None:
                self._guard(work, finish)

    def run_pending(self) -> None:
        """Continue deferred work, each object once at most, as far as one turn allows."""
        memory = self.memory
        memory.work = WORK_OF_A_TURN
        unfinished = self.unfinished
        for _ in range(len(unfinished)):
            if memory.work <= 0:
                break
            memory.work -= _WORK_OF_A_CALL
            work, _ = unfinished.popleft()
            self._guard(work, work.resume)
        if unfinished:
            self.pending.set()
        else:
            memory.work = WORK_OF_A_TURN

    async def run(self) -> None:
        """Continue deferred work whenever there is some, until cancelled."""
        while True:
            await self.pending.wait()
            self.pending = trio.Event()
            self.run_pending()
            await trio.lowlevel.checkpoint()

    def set_alarm(self, alarmed: Alarmed, at: float) -> None:
        """Call ``tick`` of *alarmed* at *at*, unless its ``alarm`` is another time by then."""
        self.alarms_set += 1
        if len(self.alarms) >= self._alarms_max:
            # Drop alarms of deleted objects, and those replaced by another time.
            self.alarms = [
                alarm
                for alarm in self.alarms
                if alarm[2].alarm == alarm[0] and not alarm[2].deleted
            ]
            heapq.heapify(self.alarms)
            self._alarms_max = 2 * len(self.alarms) + 64
        heapq.heappush(self.alarms, (at, self.alarms_set, alarmed))
        self._alarmed.set()

    def tick(self) -> None:
        """Call objects whose alarm is due, such as queues for delayed messages or expired locks.

        Alarms beyond the work of one turn stay due.
        """
        memory = self.memory
        memory.work = WORK_OF_A_TURN
        alarms = self.alarms
        now = self._clock.monotonic()
        while alarms and alarms[0][0] <= now and memory.work > 0:
            at, _, alarmed = heapq.heappop(alarms)
            memory.work -= 1
            if alarmed.alarm == at and not alarmed.deleted:
                memory.work -= _WORK_OF_A_CALL
                self._guard(alarmed, alarmed.tick)

    async def run_alarms(self) -> None:
        """Call :meth:`tick` whenever an alarm is due, until cancelled."""
        while True:
            self._alarmed = trio.Event()
            wait_s = self.alarms[0][0] - self._clock.monotonic() if self.alarms else inf
            with trio.move_on_after(max(0.0, wait_s)):
                await self._alarmed.wait()
            self.tick()

    def wake(self) -> None:
        """Recompute the next wake-up for alarms, after the clock was moved."""
        self._alarmed.set()
