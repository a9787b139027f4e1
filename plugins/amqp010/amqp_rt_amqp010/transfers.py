"""Messages sent to subscriptions by ``message.transfer`` (0-10 §message)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amqp_rt.errors import CreditTooSmall
from amqp_rt.fronts import LocalProtocolError, Payload
from amqp_rt.fronts.base import SND_SETTLED

from .codec import write_command
from .deliveries import OutgoingDelivery
from .layouts import MessageTransfer
from .limits import GIVEN_OCTETS
from .messages import content_of

if TYPE_CHECKING:
    from .links import SendingLink


class TransferCommands:
    """Encoded ``message.transfer`` of one subscription, with and without a request to complete it at once.

    Args:
        transfer: The command.
        sync_frequency: After so many messages the client is asked to complete them at once; 0 for never.
    """

    def __init__(self, transfer: MessageTransfer, sync_frequency: int) -> None:
        self._plain = write_command(transfer)
        self._synced = write_command(transfer, sync=True)
        self._sync_frequency = sync_frequency
        self._until_sync = sync_frequency

    def next(self) -> bytes:
        """Return the command of the next transfer."""
        if self._sync_frequency:
            self._until_sync -= 1
            if not self._until_sync:
                self._until_sync = self._sync_frequency
                return self._synced
        return self._plain


def send_message(
    link: SendingLink, payload: Payload, context: Any, settled: bool | None
) -> OutgoingDelivery:
    """Send one message to the subscription of *link*.

    The function is compiled, unlike the link, whose class extends one of ``amqp_rt``.

    Args:
        link: The link.
        payload: The encoded AMQP 1.0 message.
        context: Kept with the delivery for the sender.
        settled: Whether it is sent settled; None as the link does.

    Raises:
        CreditTooSmall: The credit in octets does not cover it.
        LocalProtocolError: There is no credit, or 0-10 cannot carry the message.
    """
    if link.credit <= 0:
        raise LocalProtocolError(f"subscription {link.destination!r} has no credit")
    session_context = link.session_context
    connection = session_context.connection
    header, body = content_of(
        payload if isinstance(payload, bytes) else b"".join(payload),
        address=link.address,
        wall=link.wall,
        recents=None if connection is None else connection.recents,
        limits=session_context.limits,
    )
    size = len(header)
    for piece in body:
        size += len(piece)
    balance = link.balance
    if not balance.covers(size):
        raise CreditTooSmall(f"subscription {link.destination!r} has no credit for {size} octets")
    number = session_context.session.send(link.commands.next(), header, body)
    if number < 0:
        raise LocalProtocolError("the session has ended")
    if connection is not None:
        connection.given += 1 + len(header) // GIVEN_OCTETS
    done = link.snd_settle_mode == SND_SETTLED if settled is None else settled
    delivery = OutgoingDelivery(link, number, context, done)
    deliveries = link.deliveries
    if balance.use(number, size):
        deliveries.windowed[number] = link
    if not done:
        link.held[number] = delivery
        deliveries.held[number] = delivery
    elif link.copies and link.accepts:
        link.held[number] = delivery
        deliveries.add_copy(delivery)
    if deliveries.is_full:
        deliveries.was_full = True
    if link.draining and link.credit <= 0:
        link.zero()
    return delivery
