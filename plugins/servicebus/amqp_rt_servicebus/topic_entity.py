"""Entrance of a topic."""

from __future__ import annotations

from collections.abc import Callable

from amqp_rt.broker.building import Memory
from amqp_rt.clock import Clock
from amqp_rt.limits import DEFAULT_LIMITS, Limits

from .entity import Entity
from .options import Options


class TopicEntity(Entity):
    """Entrance of a topic, which holds its scheduled messages; those of its subscriptions count as its size."""

    def __init__(
        self,
        path: str,
        options: Options,
        memory: Memory,
        clock: Clock,
        *,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(path, options, memory, clock, limits=limits)
        #: Returns the bytes of all subscriptions.
        self.count_bytes: Callable[[], int] = lambda: 0
        #: Bytes of the subscriptions at the last count, with those that were added since.
        self.copied_bytes = 0
        #: Returns the number of messages that wait for the rules of the topic.
        self.count_waiting: Callable[[], int] = lambda: 0

    def room(self) -> int:
        """Return the number of messages for which there is memory, none while many wait for the rules."""
        return 0 if self.count_waiting() >= self.limits.backlog_max else super().room()

    def fits(self, size: int) -> bool:
        """Return whether there is room for a message of *size* bytes."""
        # A count visits each subscription. What was removed since the last one matters only here.
        if self.shelf.bytes + self.copied_bytes + size > self.options.bytes_max:
            self.copied_bytes = self.count_bytes()
        return (
            self.memory.held + size <= self.memory.limit
            and self.shelf.bytes + self.shelf.reserved + self.copied_bytes + size
            <= self.options.bytes_max
        )
