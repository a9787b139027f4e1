"""Endpoints of links: they keep what arrives, and the state of the link, for calling code that polls them."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from amqp_rt.errors import AmqpError
from amqp_rt.outcomes import Error

#: Messages on the way to a reader; credit is renewed when half of them have come.
CREDIT: Final = 1_000
#: Bytes of those, estimated from recent sizes: large messages get less credit.
CREDIT_BYTES: Final = 16 * 1024 * 1024
#: Credit of a link until the first messages have shown their size.
_FIRST_CREDIT: Final = 16

#: ``snd-settle-mode`` of a link whose sender sends all messages settled (Part 2 §2.8.2).
SND_SETTLED: Final = 1


class LinkEnd:
    """Endpoint of a link, which keeps its state for the calling code."""

    def __init__(self) -> None:
        self.error: Error | None = None
        self.attached = False
        self.over = False

    def on_attached(self, link: Any) -> None:
        self.attached = True

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        self.error = error
        self.over = True

    def failure(self, what: str, kind: type[AmqpError]) -> AmqpError:
        error = self.error or Error("amqp:link:detach-forced", "the peer has ended the link")
        return kind(f"{what}: {error.description or error.condition}", condition=error.condition)


class Window:
    """Credit limited by messages and by bytes.

    Credit counts messages, but a reader must have room for their bytes. So the sizes of the last messages
    determine how many more to request.

    Args:
        most: Most messages; may be changed.
        max_bytes: Most bytes of these, or else one message.
    """

    def __init__(self, most: int, max_bytes: int = CREDIT_BYTES) -> None:
        self.most = most
        self._max_bytes = max_bytes
        self._mean = 0.0

    def note(self, count: int, size: int) -> None:
        """Update the mean size by *count* messages of *size* bytes together."""
        if count:
            mean = size / count
            # Larger messages count at once, smaller ones gradually.
            self._mean = mean if mean > self._mean else (3 * self._mean + mean) / 4

    @property
    def credit(self) -> int:
        """Messages to request."""
        if not self._mean:
            return min(self.most, _FIRST_CREDIT)
        return max(min(self.most, int(self._max_bytes / self._mean)), 1)


class Inbox(LinkEnd):
    """Stores payloads until they are taken. Unsettled deliveries are settled with *outcome*."""

    def __init__(self, outcome: Any, credit: int = CREDIT) -> None:
        super().__init__()
        self.ready: deque[bytes] = deque()
        self.window = Window(credit)
        #: Credit of the last drain, and messages that came for it.
        self.asked = 0
        self.came = 0
        #: Whether the sender has sent a flow.
        self.answered = False
        self._outcome = outcome

    def take(self) -> list[bytes]:
        """Return the stored payloads, and remove them."""
        found = list(self.ready)
        self.ready.clear()
        return found

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        payloads = [delivery.payload for delivery in deliveries]
        self.ready.extend(payloads)
        self.came += len(payloads)
        self.window.note(len(payloads), sum(map(len, payloads)))
        if link.snd_settle_mode != SND_SETTLED:
            for delivery in deliveries:
                if not delivery.settled:
                    delivery.settle(self._outcome)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore partial deliveries: nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore settlement: no code waits for it."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class Basket(LinkEnd):
    """Stores deliveries until they are taken, and leaves them unsettled."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[Any] = []
        #: Whether the broker has sent a flow since credit was last granted.
        self.answered = False

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.ready += deliveries

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore partial deliveries: nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore settlement by the broker: the delivery is settled later all the same, without effect."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class Outbox(LinkEnd):
    """Endpoint of a sending link, whose state is polled."""

    def on_credit(self, link: Any) -> None:
        """Do nothing: senders poll the link's credit."""

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        """Do nothing: senders poll the deliveries."""
