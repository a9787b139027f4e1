"""Functions of an application that run at certain times, in the process of their container.

Each is one task of the container, which ends like a handler: no run begins any more, and a run in progress has ``drain_s`` to
finish. Each process of an application runs them; a message that is sent once is sent by a schedule of a broker.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from math import floor
from typing import Any, Final, TypeVar, cast

import trio
from msgspec import Struct

from ..limits import check_seconds
from ..timetables import Cron
from .callers import CALLER
from .resources import Resources
from .routes import NO_DEADLINE, Context, RouteBinding
from .scopes import Maker, Scope, parameters_of

log = logging.getLogger("amqp_rt.handlers")

F = TypeVar("F", bound=Callable[..., Any])

#: Attribute of functions with their times.
TIMED: Final = "__amqp_timings__"
#: Seconds between checks of the wall clock, which may be set, while a timetable is waited for.
_LOOK_S: Final = 10.0


class RunTimes(Struct, frozen=True, kw_only=True):
    """Times of a function: an interval in seconds, or a timetable."""

    every_s: float | None = None
    cron: Cron | None = None
    overlap: bool = False
    thread: bool = False

    def __str__(self) -> str:
        return f"@every({self.every_s:g})" if self.cron is None else f"@cron({self.cron.text!r})"


class EveryDecorator:
    """Decorator of functions that run in equal intervals; see :meth:`__call__`."""

    def __init__(self, register: Callable[[Any, RunTimes], None]) -> None:
        self._register = register

    def __call__(
        self, seconds: float, *, overlap: bool = False, thread: bool = False
    ) -> Callable[[F], F]:
        """Run the decorated function every *seconds*, the first time after that time.

        Its parameters are resources of the container. An exception is logged, and the next run takes place.

        Args:
            seconds: The interval.
            overlap: Begin a run although the one before has not ended; by default that time is left out.
            thread: Call the function, a ``def`` that blocks, in a thread.

        Raises:
            ValueError: *seconds* is no number of seconds.
        """
        check_seconds("every", seconds, least=0.001)
        timing = RunTimes(every_s=seconds, overlap=overlap, thread=thread)
        return _decorator(self._register, timing)


class CronDecorator:
    """Decorator of functions that run at times of day; see :meth:`__call__`."""

    def __init__(self, register: Callable[[Any, RunTimes], None]) -> None:
        self._register = register

    def __call__(
        self, text: str, *, tz: str = "UTC", overlap: bool = False, thread: bool = False
    ) -> Callable[[F], F]:
        """Run the decorated function at the times of a timetable, such as ``"30 2 * * *"``.

        Args:
            text: Minute, hour, day of the month, month and day of the week.
            tz: Time zone, such as ``"Europe/Berlin"``. Daylight saving time follows Debian's cron.
            overlap: As for :class:`EveryDecorator`.
            thread: As for :class:`EveryDecorator`.

        Raises:
            ValueError: The text or the time zone is wrong, or ``amqp-rt[cron]`` is not installed.
        """
        timing = RunTimes(cron=Cron(text, tz), overlap=overlap, thread=thread)
        return _decorator(self._register, timing)


def _decorator(register: Callable[[Any, RunTimes], None], timing: RunTimes) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        if not callable(function):
            raise TypeError(f"{timing} decorates functions and methods, not {function!r}")
        register(function, timing)
        return function

    return decorate


class TimedFunction:
    """Function with its times, as a task of a container (:class:`~amqp_rt.container.home.Feed`).

    Args:
        function: The function; its parameters are resources of the container, by their types.
        timing: Its times.
        resources: Resources of the container.

    Raises:
        TypeError: A parameter cannot be provided.
    """

    def __init__(
        self, function: Callable[..., Any], timing: RunTimes, resources: Resources
    ) -> None:
        self.function = function
        self.timing = timing
        self.name: str = getattr(function, "__qualname__", type(function).__name__)
        self.finished = trio.Event()
        #: Runs that have begun, and those of them that failed.
        self.runs = 0
        self.failures = 0
        self._stopping = trio.Event()
        self._scope = Scope(self.name, resources, {})
        self._arguments: dict[str, Maker] = {}
        for parameter, wanted in parameters_of(function):
            maker = self._scope.argument(wanted)
            if maker is not None:
                self._arguments[parameter.name] = maker
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"{self.name}: {timing} provides resources only, and there is none for the parameter "
                    f"{parameter.name}: {getattr(wanted, '__qualname__', wanted)}"
                )

    def stop(self) -> None:
        """Begin no run any more; one in progress goes on."""
        self._stopping.set()

    async def run(self) -> None:
        """Run the function at its times, until :meth:`stop`. Cancelling ends a run in progress."""
        # The container may have been started by a handler.
        CALLER.set(None)
        try:
            async with trio.open_nursery() as runs:
                if self.timing.cron is not None:
                    await self._follow(self.timing.cron, runs)
                else:
                    await self._repeat(self.timing.every_s or 0.0, runs)
        finally:
            self.finished.set()

    async def _repeat(self, every_s: float, runs: trio.Nursery) -> None:
        due = trio.current_time() + every_s
        while await self._wait(due - trio.current_time()):
            await self._begin(runs)
            # Times that have passed during the run are left out.
            due += every_s * max(1, floor((trio.current_time() - due) / every_s) + 1)

    async def _follow(self, timetable: Cron, runs: trio.Nursery) -> None:
        wall = _wall_clock()
        due = timetable.after(wall())
        while await self._wait(min(max(due - wall(), 0.0), _LOOK_S)):
            if wall() >= due:
                await self._begin(runs)
                # Never a time before the last one, even if the clock was put back.
                due = timetable.after(max(due, wall()))

    async def _wait(self, seconds: float) -> bool:
        """Wait for *seconds*; return False if the function stops."""
        with trio.move_on_after(max(seconds, 0.0)):
            await self._stopping.wait()
        return not self._stopping.is_set()

    async def _begin(self, runs: trio.Nursery) -> None:
        if self.timing.overlap:
            runs.start_soon(self._run_once)
        else:
            await self._run_once()

    async def _run_once(self) -> None:
        """Run the function once; an exception is logged."""
        self.runs += 1
        # There is no message, and no link that it came from.
        context = Context(cast("RouteBinding", None), None, None, NO_DEADLINE, None)
        try:
            async with self._scope.entered(context):
                arguments = {name: make(context) for name, make in self._arguments.items()}
                if self.timing.thread:
                    await trio.to_thread.run_sync(lambda: self.function(**arguments))
                    return
                result = self.function(**arguments)
                if inspect.isawaitable(result):
                    await result
        except Exception:
            self.failures += 1
            log.exception("%s %s failed; its next run takes place", self.timing, self.name)
        except BaseExceptionGroup as group:
            # A function with its own nursery may be cancelled and fail at once.
            cancelled, rest = group.split(trio.Cancelled)
            if cancelled is None or not isinstance(rest, ExceptionGroup):
                raise
            self.failures += 1
            log.error("%s %s failed when it was cancelled", self.timing, self.name, exc_info=rest)
            raise cancelled from None


def _wall_clock() -> Callable[[], float]:
    """Return the clock of the system, or one that follows the event loop's clock if that is virtual."""
    if type(trio.lowlevel.current_clock()).__name__ == "SystemClock":
        return time.time
    ahead_s = time.time() - trio.current_time()
    return lambda: trio.current_time() + ahead_s


def _mark(function: Any, timing: RunTimes) -> None:
    vars(getattr(function, "__func__", function)).setdefault(TIMED, []).append(timing)


every: Final = EveryDecorator(_mark)
cron: Final = CronDecorator(_mark)
