"""Bases of streams: when a batch is planned, settled, and where it starts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .options import Options
from .reading import Reading


class Stream(Reading, ABC):
    """Base of streams."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.ending_offsets != "latest" or options.ending_timestamp is not None:
            raise ValueError(
                "a stream has no end: endingOffsets and endingTimestamp are for batches"
            )
        if options.mode == "browse":
            raise ValueError("a queue is browsed by a batch, spark.read, not by a stream")
        #: Offset that was last settled at the broker.
        self._settled: Any = None
        self._waiting_since: float | None = None
        #: Number of planned batches: each begins with another partition or queue.
        self._turn = 0
        self._now: Callable[[], float] = time.monotonic

    def commit(self, end: dict[str, Any]) -> None:
        """Settle everything before *end* at the broker, once.

        Spark calls this when the next batch has been planned, and never for the last one. But it requests
        the next offset only after noting the previous batch as done, so that request commits its start, too.
        """
        if end != self._settled:
            self._settle(end)
            self._settled = end

    @abstractmethod
    def _settle(self, end: dict[str, Any]) -> None:
        """Settle everything before *end* at the broker."""

    def stop(self) -> None:
        """Do nothing: the connection ends with the process."""

    def _enough(self, available: int, *, ends: bool) -> bool:
        """Return whether a batch should be planned: enough messages are available, or ``maxTriggerDelay`` is over."""
        if ends or not available or available >= self.options.min_messages:
            self._waiting_since = None
            return True
        now = self._now()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self.options.max_delay:
            return False
        self._waiting_since = None
        return True


class StartRemembered(Stream):
    """Plans batches for Spark before 4.2, which does not pass the start of the next one.

    A batch starts at the end of the last planned one. After a restart, Spark first requests the tasks of an empty
    batch at the last planned end, and then repeats that batch if it is not done.
    """

    _planned_end: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, within the bounds of the options."""
        start = self._planned_end
        if start is None:
            start = self.initialOffset()  # type: ignore[attr-defined]
        found: dict[str, Any] = super().latestOffset(start)  # type: ignore[misc]
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        """Return the tasks of the batch between two offsets, and remember its end."""
        found: list[Any] = super().partitions(start, end)  # type: ignore[misc]
        self._planned_end = end
        return found
