"""Requests to an entity that are done in turns of the event loop, one after the other."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic

import trio

from amqp_rt.errors import AmqpError

from .entity import Entity
from .host import not_found
from .steps import Steps, T, counted


def _pass(item: object) -> None:
    """Do nothing."""


class InTurns(Generic[T]):
    """Request that an entity does behind what it has begun before, a part of it at once if there is time.

    It is done to its end even if the waiting is cancelled: all of it takes effect, or nothing.

    Args:
        entity: The entity.
        steps: The request.
    """

    def __init__(self, entity: Entity, steps: Steps[T]) -> None:
        self._entity = entity
        self._ended = trio.Event()
        self._result: T | None = None
        self._error: AmqpError | None = None
        entity.backlog.add(self._run(steps), _pass, self._ended.set, dropped=self._drop, work=0)
        entity.distribution.run_backlog()

    def _run(self, steps: Steps[T]) -> Generator[None, None, None]:
        try:
            self._result = yield from counted(steps, self._entity.memory)
        except AmqpError as error:
            self._error = error

    def _drop(self) -> None:
        """End the request of an entity that has been deleted."""
        self._error = not_found(self._entity.path).raised_as(AmqpError)
        self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether the request is done, or has failed."""
        return self._ended.is_set()

    def result(self) -> T:
        """Return the result of a request that is done.

        Raises:
            AmqpError: The request has failed, or the entity was deleted.
        """
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    async def wait(self) -> T:
        """Wait for the end of the request, and return its result.

        Raises:
            AmqpError: As for :meth:`result`.
        """
        await self._ended.wait()
        return self.result()
