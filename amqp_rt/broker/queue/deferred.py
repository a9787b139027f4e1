"""Work of a queue that is too much for one turn of the event loop. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from sys import maxsize
from typing import TYPE_CHECKING, Any, Final

from .accounts import WORK_OF_AN_END

if TYPE_CHECKING:
    from .queue import MessageQueue

#: Numbers freed for as much work; freeing a segment of messages takes about as long.
_FREED: Final = 64


class _Left:
    """Deliveries to be concluded, in order.

    Args:
        deliveries: Arguments of :meth:`finish`.
        finish: Concludes one of them, unless it has been concluded in the meantime.
        after: Called after the last one.
    """

    def __init__(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None,
    ) -> None:
        self.deliveries = deliveries
        self.finish = finish
        self.after = after
        #: Number of those concluded.
        self.done: int = 0


class Deferred:
    """Deliveries to be concluded, and objects of a deleted queue to be freed.

    Args:
        queue: The queue.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self.unconcluded: deque[_Left] = deque()
        #: Whether one of them is being concluded.
        self.concluding: bool = False
        #: Objects of the deleted queue that have not been freed yet.
        self.trash: list[Any] = []

    def conclude(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        """Call *finish* for each of *deliveries*: as far as this turn allows, later for the rest.

        No message is delivered before all of them are concluded, since messages behind a requeued
        one must not overtake it. The remaining ones belong to the queue: their link and connection
        may have ended. They are concluded even if the queue is deleted meanwhile, or one of them fails.

        Args:
            deliveries: Deliveries to conclude in this order, after those of earlier calls.
            finish: Called with each of them; must check whether it has been concluded already.
            after: Called after the last of them.
        """
        queue = self._queue
        self.unconcluded.append(_Left(deliveries, finish, after))
        try:
            if len(self.unconcluded) == 1:
                self._conclude_some()
        finally:
            # After an error too: the others are concluded although the queue goes out of service.
            if self.unconcluded:
                queue.turns.pumping = True
                queue.resume_later()

    def _conclude_some(self) -> None:
        """Conclude pending deliveries as far as the work of this turn allows."""
        queue = self._queue
        memory = queue.memory
        while self.unconcluded:
            left = self.unconcluded[0]
            deliveries = left.deliveries
            while left.done < len(deliveries):
                if memory.work <= 0:
                    return
                delivery = deliveries[left.done]
                # Counted before an error can occur, so that no delivery is concluded twice.
                left.done += 1
                memory.work -= 1
                self.concluding = True
                try:
                    left.finish(delivery)
                finally:
                    self.concluding = False
            self.unconcluded.popleft()
            if left.after is not None:
                left.after()

    def resume(self) -> None:
        """Conclude more of the deliveries, and deliver messages once there are none left."""
        queue = self._queue
        try:
            self._conclude_some()
        finally:
            if self.unconcluded:
                queue.resume_later()
        if not self.unconcluded:
            queue.turns.pumping = queue.turns.exhausted
            queue.concluded()
            if not queue.deleted:
                queue.turns.return_all_credit()

    def conclude_all(self) -> None:
        """Conclude all pending deliveries, since the event loop gives no more turns."""
        queue = self._queue
        if self.unconcluded:
            work, queue.memory.work = queue.memory.work, maxsize
            self.resume()
            queue.memory.work = work

    def free_some(self) -> None:
        """Free objects of the deleted queue, some in each turn, as millions take long to free."""
        queue = self._queue
        memory = queue.memory
        while self.trash:
            if memory.work <= 0:
                queue.resume_later()
                return
            memory.work -= WORK_OF_AN_END
            held = self.trash[-1]
            # One segment holds many messages.
            _drop_some(held, 1 if isinstance(held, dict) else _FREED)
            if not held:
                self.trash.pop()


def _drop_some(held: Any, count: int) -> None:
    """Remove up to *count* elements of *held*, a dict, set or list."""
    if isinstance(held, list):
        del held[-count:]
        return
    drop_one = held.popitem if isinstance(held, dict) else held.pop
    for _ in range(min(count, len(held))):
        drop_one()
