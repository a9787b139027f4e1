"""Work that is done in steps, so that it can be divided among turns of the event loop.

A generator yields the work of each step when the step is done, in the unit of ``Memory.work``, and returns the result. What was true
before a step may have changed after it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeAlias, TypeVar

from amqp_rt.broker.building import Memory

T = TypeVar("T")

Steps: TypeAlias = Generator[int, None, T]

#: Work of finding a message that a request names, of encoding a message, and of reading and checking one.
WORK_OF_FINDING: Final = 1
WORK_OF_ENCODING: Final = 6
WORK_OF_READING: Final = 6


def at_once(steps: Steps[T]) -> T:
    """Do all *steps* now, whatever time they take, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def counted(steps: Steps[Any], memory: Memory) -> Generator[None, None, Any]:
    """Do *steps*, and count the work of each."""
    while True:
        try:
            memory.work -= next(steps)
        except StopIteration as end:
            return end.value
        yield
