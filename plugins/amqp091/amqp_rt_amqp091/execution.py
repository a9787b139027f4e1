"""Order in which a channel executes its methods (0-9-1 §4.4).

A method that has to wait, for example until a link to a queue is authorised, holds up the frames
behind it on its channel and no others. Work that exceeds a turn continues in later turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Final

from . import methods as m
from .frames import OVERHEAD, Frame
from .sessions import Session

#: Work on one method within one turn, in frames.
_WORK_MAX: Final = 200


class Execution:
    """Frames held up behind a method that is not complete, and the step that comes before them.

    Args:
        session: The session of the channel.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        #: Whether frames wait until the method before them is complete.
        self.held_up = False
        #: Whether publishing may continue while other frames are held up.
        self.lets_publish = False
        self.backlog: deque[Frame] = deque()
        #: Octets of the frames in ``backlog``.
        self._backlog_size = 0
        #: Step to run when the channel resumes, before the backlog.
        self.deferred: Callable[[], None] | None = None
        #: Steps that ``deferred`` continues; None if it does something else.
        self._unfinished: Generator[int, None, None] | None = None

    @property
    def waits(self) -> bool:
        """Whether frames have to wait for an answer, or for a method to complete."""
        return self.held_up or self.deferred is not None

    def hold(self, frame: Frame) -> None:
        """Keep *frame* until the method before it is complete.

        Raises:
            Fault: The channels of the connection hold too much.
        """
        size = len(frame.payload) + OVERHEAD
        self.backlog.append(frame)
        self._backlog_size += size
        self.session.engine.hold(size)

    def resume(self) -> None:
        """Continue after the method that held up the channel has completed."""
        self.held_up = self.lets_publish = False
        if (self.backlog or self.deferred is not None) and not self.session.ended:
            self.session.engine.schedule(self.go_on)

    def continue_with(self, step: Callable[[], None]) -> None:
        """Run *step*, for which the channel was held up, and then handle the frames held since."""
        if self.session.ended:
            return
        self.deferred = step
        self.resume()

    def run(self, steps: Generator[int, None, None]) -> None:
        """Run *steps*, which yield their cost in frames.

        Steps that exceed the work of one turn run in later turns; frames of the channel wait
        meanwhile.
        """
        engine = self.session.engine
        left = _WORK_MAX
        for work in steps:
            engine.spend(work)
            left -= work
            if left <= 0:
                if self.session.ended:
                    steps.close()
                    return
                self._unfinished = steps
                self.deferred = partial(self._run_rest, steps, engine.context)
                engine.work_later(self.go_on)
                return

    def _run_rest(self, steps: Generator[int, None, None], method: m.Method | None) -> None:
        self.session.engine.context = method
        self.run(steps)

    def go_on(self) -> None:
        """Run the deferred step and handle held frames, as far as the work of one turn goes.

        Frames behind a method that has to wait are left, and the rest of the work follows in a
        later turn.
        """
        engine = self.session.engine
        channel = self.session.owner
        step, self.deferred = self.deferred, None
        self._unfinished = None
        if channel is None:
            return
        enough = engine.spent + _WORK_MAX
        if step is not None:
            engine.guard(channel, step)
        while self.backlog and not self.waits:
            frame = self.backlog.popleft()
            size = len(frame.payload) + OVERHEAD
            self._backlog_size -= size
            engine.let_go(size)
            engine.guard(channel, partial(channel.take, frame))
            engine.spend(1)
            if engine.spent >= enough and self.backlog and not self.waits:
                engine.work_later(self.go_on)
                return

    def end(self) -> None:
        """Drop the held frames and the deferred step, which refers to parts of the channel."""
        self.deferred = None
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            # A compiled generator that is dropped runs no ``finally``.
            unfinished.close()
        self.session.engine.let_go(self._backlog_size)
        self._backlog_size = 0
        self.backlog.clear()
