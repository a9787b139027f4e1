"""Credit of one subscription, in messages and in octets (0-10, ``message.flow`` and ``set-flow-mode``). Pure."""

from __future__ import annotations

from typing import Final

from .layouts import CreditUnit

#: Value of ``message.flow`` that removes the limit of its unit, until credit is zeroed.
UNLIMITED: Final = 0xFFFF_FFFF
#: Messages that may be sent where no limit is set.
_MANY: Final = 1 << 31


class Credit:
    """Messages, and octets of their header and body segments, that may still be sent.

    A message needs credit in both units. In window mode the completion of a transfer returns what the
    transfer has used, unless credit has been zeroed since; in credit mode nothing is returned.
    """

    __slots__ = ("_messages", "_octets", "_sizes", "_too_small", "is_windowed")

    def __init__(self) -> None:
        #: Credit left; negative for no limit.
        self._messages = 0
        self._octets = 0
        #: Transfers whose completion returns credit, and the octets of each.
        self._sizes: dict[int, int] = {}
        #: Whether the octets do not cover the next message. It is tried again after each grant.
        self._too_small = False
        #: Whether the flow mode is window, as it is in the beginning. A change needs zero credit.
        self.is_windowed: bool = True

    @property
    def messages(self) -> int:
        """Number of messages that may be sent now, as far as their sizes are unknown."""
        if self._too_small or self._octets == 0:
            return 0
        return self._messages if self._messages >= 0 else _MANY

    @property
    def outstanding(self) -> int:
        """Number of transfers whose completion returns credit."""
        return len(self._sizes)

    @property
    def is_zero(self) -> bool:
        """Whether nothing is left in either unit."""
        return self._messages == 0 and self._octets == 0

    def add(self, unit: int, value: int) -> None:
        """Add *value* to the credit of *unit*; :data:`UNLIMITED` removes its limit."""
        if unit == CreditUnit.MESSAGE:
            if value == UNLIMITED:
                self._messages = -1
            elif self._messages >= 0:
                self._messages += value
        elif value == UNLIMITED:
            self._octets = -1
        elif self._octets >= 0:
            self._octets += value
        self._too_small = False

    def covers(self, size: int) -> bool:
        """Return whether a message of *size* octets may be sent; if not, none is until more credit comes."""
        if 0 <= self._octets < size:
            self._too_small = True
        return self.messages > 0

    def use(self, number: int, size: int) -> bool:
        """Use credit for transfer *number*, a message of *size* octets that it covers.

        Returns:
            Whether the completion of the transfer returns credit: pass it to :meth:`complete`.
        """
        limited = False
        if self._messages > 0:
            self._messages -= 1
            limited = True
        if self._octets >= 0:
            self._octets -= size
            limited = True
        if limited and self.is_windowed:
            self._sizes[number] = size
            return True
        return False

    def complete(self, number: int) -> None:
        """Return the credit that transfer *number* has used, if its completion still does."""
        size = self._sizes.pop(number, -1)
        if size < 0:
            return
        if self._messages >= 0:
            self._messages += 1
        if self._octets >= 0:
            self._octets += size
        self._too_small = False

    def clear(self) -> list[int]:
        """Zero the credit of both units; the completion of transfers before returns nothing.

        Returns:
            The numbers of these transfers.
        """
        self._messages = self._octets = 0
        self._too_small = False
        numbers = list(self._sizes)
        self._sizes.clear()
        return numbers
