"""Window of unacknowledged deliveries, which the consumers of a channel share (0-9-1 §1.8.3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .outgoing import OutgoingDelivery

#: Unacknowledged messages of a channel whose client sets no bound: the highest bound that it could
#: set. Each of them stays in its queue meanwhile, which has bounds of its own.
_UNACKED_MAX: Final = 65_535


class DeliveryWindow:
    """Deliveries that the client has not settled, their tags, and the bounds on them."""

    def __init__(self) -> None:
        #: Whether the client accepts messages (``channel.flow``).
        self.flowing = True
        #: Deliveries that the client has not settled, by delivery-tag, in order.
        self.unacked: dict[int, OutgoingDelivery] = {}
        #: Bound for each consumer started from now on, 0 for none.
        self.prefetch = 0
        #: Bounds for the whole channel, in messages and in octets, 0 for none.
        self.prefetch_all = 0
        self.prefetch_size = 0
        self.last_tag = 0

    def next_tag(self) -> int:
        """Return the next delivery-tag; tags count from 1 on each channel."""
        self.last_tag += 1
        return self.last_tag

    def room_of(self, prefetch: int, held: int) -> int:
        """Return how many more unsettled messages a consumer may have that has *held* of them.

        Args:
            prefetch: Bound of the consumer, 0 for none.
            held: Its unsettled messages.
        """
        unacked = len(self.unacked)
        room = _UNACKED_MAX - unacked
        if self.prefetch_all:
            room = min(room, self.prefetch_all - unacked)
        if prefetch:
            room = min(room, prefetch - held)
        if room <= 0 or (self.prefetch_size and self._size_held() >= self.prefetch_size):
            return 0
        return room

    def _size_held(self) -> int:
        return sum(delivery.size for delivery in self.unacked.values())
