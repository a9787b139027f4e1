"""Messages that clients publish by protocols without links on the wire, on their way to nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ..outcomes import ACCEPTED, Rejected

if TYPE_CHECKING:
    from .links import FrontReceivingLink

__all__ = ["FrontDelivery"]


class FrontDelivery:
    """A published message on its way to one node.

    Args:
        link: The link it arrives on.
        payload: The encoded AMQP 1.0 message.
        on_outcome: Called once with the outcome; None if the message is sent settled.
        state: Transactional state, None outside of transactions.
    """

    __slots__ = ("context", "link", "local_state", "on_outcome", "payload", "settled", "state")

    # Equal for all deliveries of this class.
    tag: ClassVar[bytes] = b""
    message_format: ClassVar[int] = 0
    second: ClassVar[bool] = False
    complete: ClassVar[bool] = True
    aborted: ClassVar[bool] = False
    streamed: ClassVar[bool] = False
    resumed: ClassVar[bool] = False

    def __init__(
        self,
        link: FrontReceivingLink,
        payload: bytes,
        on_outcome: Callable[[Any], None] | None,
        state: Any = None,
    ) -> None:
        self.link = link
        self.settled = on_outcome is None
        self.state = state
        self.local_state: Any = None
        self.payload = payload
        self.context: Any = None
        self.on_outcome = on_outcome

    def read_chunks(self) -> list[bytes]:
        """Return the whole payload: messages are not streamed here."""
        return [self.payload]

    def settle(self, outcome: Any) -> None:
        """Settle with *outcome*; only the first call counts."""
        self.local_state = outcome
        on_outcome, self.on_outcome = self.on_outcome, None
        self.settled = True
        if on_outcome is not None:
            on_outcome(outcome)
        elif outcome is not ACCEPTED and type(outcome) is Rejected:
            self.link.session.report_refusal(outcome)

    def update(self, state: Any) -> None:
        """Keep *state*: the protocol cannot send it to the publisher."""
        self.local_state = state
