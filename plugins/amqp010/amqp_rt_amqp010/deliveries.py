"""Messages that a session has sent to its client, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from amqp_rt.fronts import LocalProtocolError, Outcome

from .limits import COPIES_MAX, DELIVERIES_MAX

if TYPE_CHECKING:
    from .links import SendingLink


class Waiter(Protocol):
    """Command that completes when the outcomes of deliveries are safe."""

    def settled(self) -> None:
        """Note that one of them is."""


class OutgoingDelivery:
    """A message sent to a subscription; ``number`` is the command-id of its transfer."""

    __slots__ = (
        "context",
        "delivery_id",
        "enlisted",
        "link",
        "number",
        "outcome_on_rollback",
        "remote_settled",
        "settled",
        "state",
        "waiter",
    )

    def __init__(self, link: SendingLink, number: int, context: Any, settled: bool) -> None:
        self.link = link
        self.number = self.delivery_id = number
        self.context = context
        self.settled = settled
        self.state: Any = None
        #: Whether the client has given an outcome, which is ``state``.
        self.remote_settled = settled
        #: Whether its outcome depends on a transaction that has not ended.
        self.enlisted = False
        #: Outcome after a rollback of that transaction; None to be held as before.
        self.outcome_on_rollback: Outcome | None = None
        #: The command that settles it.
        self.waiter: Waiter | None = None

    @property
    def tag(self) -> bytes:
        """The command-id, as the delivery-tag of 1.0."""
        return self.number.to_bytes(8, "big")

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Refuse to stream: messages are sent whole.

        Raises:
            LocalProtocolError: Always.
        """
        raise LocalProtocolError("0-10 sends messages whole here")

    def abort(self) -> None:
        """Ignore the call: the message has been sent whole."""

    def settle(self, state: Any = None) -> None:
        """Settle the delivery: its outcome is safe, or the client can no longer choose one."""
        if self.settled:
            return
        self.settled = True
        self.state = state
        self.link.forget(self)
        self.release_waiter()

    def release_waiter(self) -> None:
        """Tell the command that settles the delivery, if there is one, that this has been done."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.settled()


class Deliveries:
    """Messages sent to the client of a session that later commands can refer to, by command-id.

    All tables are in the order of sending.

    Args:
        tidy: Called in the next turn when a cancelled subscription has none of these any more, or when there
            is room again.
    """

    def __init__(self, tidy: Callable[[], None]) -> None:
        self.tidy = tidy
        #: Numbers at which nothing more is sent, and at which copies are forgotten.
        self.most = DELIVERIES_MAX
        self.copies_most = COPIES_MAX
        #: Acquired messages without an outcome.
        self.held: dict[int, OutgoingDelivery] = {}
        #: Messages that the client has got without acquiring them, and may acquire.
        self.copies: dict[int, OutgoingDelivery] = {}
        #: Transfers whose completion returns credit to the subscription.
        self.windowed: dict[int, SendingLink] = {}
        #: Whether the tables have been full, so that subscriptions wait for room in them.
        self.was_full = False

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be sent."""
        return len(self.held) >= self.most or len(self.windowed) >= self.most

    @property
    def has_room_again(self) -> bool:
        """Whether the tables have been full, and a quarter of them is free."""
        room_at = self.most * 3 // 4
        return self.was_full and len(self.held) <= room_at and len(self.windowed) <= room_at

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Remove *delivery*, to which no later command can refer."""
        number = delivery.number
        link = delivery.link
        link.held.pop(number, None)
        self.held.pop(number, None)
        self.copies.pop(number, None)
        if self.was_full or (link.idle and not link.held):
            # Not at once: the caller may be the queue.
            link.session_context.session.at_turn(self.tidy)

    def add_copy(self, delivery: OutgoingDelivery) -> None:
        """Remember a message that can be acquired; the oldest one is forgotten if there are too many."""
        if len(self.copies) >= self.copies_most:
            oldest = self.copies.pop(next(iter(self.copies)))
            oldest.link.held.pop(oldest.number, None)
        self.copies[delivery.number] = delivery
