"""Work on many messages that is divided among turns of the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from amqp_rt.broker.building import Memory

#: Work of a call, in the unit of ``Memory.work``: a few microseconds each.
WORK_OF_A_CALL: Final = 4


def _nothing() -> None:
    """Do nothing."""


#: Stands for an item when there is none left.
_END: Final = object()


class _Job:
    """Calls for some items, and one that follows them or takes their place."""

    def __init__(
        self,
        items: Iterable[Any],
        call: Callable[[Any], object],
        after: Callable[[], object],
        dropped: Callable[[], object],
        work: int,
    ) -> None:
        self.items = iter(items)
        self.call = call
        self.after = after
        self.dropped = dropped
        self.work = work


class Backlog:
    """Calls for many items, in the order in which they were added, as many as each turn allows.

    Args:
        memory: Has the work of a turn, which all entities share.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._jobs: deque[_Job] = deque()
        #: Whether a call is being made: what it adds or asks for is part of it.
        self.running = False

    @property
    def pending(self) -> bool:
        """Whether calls are left for a later turn."""
        return bool(self._jobs)

    def add(
        self,
        items: Iterable[Any],
        call: Callable[[Any], object],
        after: Callable[[], object] = _nothing,
        *,
        dropped: Callable[[], object] = _nothing,
        work: int = WORK_OF_A_CALL,
    ) -> None:
        """Call *call* for each of *items*, then *after*, behind what was added before; see :meth:`run`.

        Items are taken one by one, so that a generator may do the work itself. *work* is that of a call, if it does not
        count its own. If the rest is dropped, *dropped* is called instead of *after*.
        """
        self._jobs.append(_Job(items, call, after, dropped, work))

    def run(self) -> bool:
        """Make calls as far as this turn allows; return whether none is left."""
        if self.running:
            return False
        memory = self.memory
        jobs = self._jobs
        self.running = True
        try:
            while jobs:
                job = jobs[0]
                # A call may delete the entity, which drops all jobs.
                while jobs and jobs[0] is job:
                    if memory.work <= 0:
                        return False
                    item = next(job.items, _END)
                    if item is _END:
                        if jobs and jobs[0] is job:
                            jobs.popleft()
                            job.after()
                        break
                    memory.work -= job.work
                    job.call(item)
        finally:
            self.running = False
        return True

    def clear(self) -> None:
        """Drop all calls that are left."""
        dropped = list(self._jobs)
        self._jobs.clear()
        for job in dropped:
            job.dropped()
