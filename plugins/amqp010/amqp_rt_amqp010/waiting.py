"""Input of a session that waits until the peer has told which of our commands it expects."""

from __future__ import annotations

from collections import deque

from .assembling import Assembly
from .layouts import Control
from .limits import COMMAND_COST
from .serials import RangeSet


class WaitingInput:
    """Commands, and the controls between them, in their order; ``octets`` is for its owner to bound."""

    __slots__ = ("_items", "octets")

    def __init__(self) -> None:
        self._items: deque[Assembly | Control] = deque()
        #: Octets of all that waits, with :data:`~amqp_rt_amqp010.limits.COMMAND_COST` for each.
        self.octets = 0

    def add(self, item: Assembly | Control) -> None:
        """Append *item*."""
        self._items.append(item)
        self.octets += _cost(item)

    def take(self) -> Assembly | Control:
        """Remove the first item and return it; there must be one."""
        item = self._items.popleft()
        self.octets -= _cost(item)
        return item

    def taken(self) -> WaitingInput:
        """Return all items as a new object, and hold none."""
        found = WaitingInput()
        found._items, self._items = self._items, found._items
        found.octets, self.octets = self.octets, 0
        return found

    def clear(self) -> None:
        """Drop all items."""
        self._items.clear()
        self.octets = 0

    def __len__(self) -> int:
        return len(self._items)


def _cost(item: Assembly | Control) -> int:
    if isinstance(item, Assembly):
        header = 0 if item.header is None else len(item.header)
        return COMMAND_COST + len(item.content) + header + item.body_size
    commands = getattr(item, "commands", None)
    # Two lists of integers.
    return COMMAND_COST + (80 * commands.range_count if isinstance(commands, RangeSet) else 0)
