"""Window of content that a client has been sent and not finished (0-10 ``file.qos`` and ``stream.qos``). Pure."""

from __future__ import annotations


class Window:
    """Prefetch of the consumers of one class in a session, in messages and in octets; 0 for no limit.

    A message larger than the window is sent when the client has nothing else: it is not sent in advance then.
    """

    __slots__ = ("_octets", "count_max", "outstanding", "size_max")

    def __init__(self) -> None:
        self.count_max: int = 0
        self.size_max: int = 0
        #: Messages that count, by their number, and the octets of each.
        self.outstanding: dict[int, int] = {}
        self._octets = 0

    def covers(self, size: int) -> bool:
        """Return whether a message of *size* octets may be sent now."""
        if self.is_full:
            return False
        return not self.size_max or not self.outstanding or self._octets + size <= self.size_max

    @property
    def is_full(self) -> bool:
        """Whether no message may be sent now, whatever its size."""
        return 0 < self.count_max <= len(self.outstanding)

    def add(self, number: int, size: int) -> None:
        """Count message *number*, of *size* octets."""
        self.outstanding[number] = size
        self._octets += size

    def remove(self, number: int) -> None:
        """Count message *number* no more, if it does."""
        self._octets -= self.outstanding.pop(number, 0)
