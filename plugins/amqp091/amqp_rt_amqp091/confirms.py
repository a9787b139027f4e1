"""Publisher confirms of a channel (RabbitMQ's extension ``confirm.select``)."""

from __future__ import annotations

from . import methods as m
from .sessions import Session


class Confirms:
    """Sequence numbers of published messages, and the acks and nacks for them.

    Args:
        session: The session of the channel.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        #: Whether the client has selected confirms.
        self.selected = False
        self._last_number = 0
        #: Numbers not confirmed yet, in order.
        self._unconfirmed: dict[int, None] = {}
        #: Numbers whose acks are sent with the next output.
        self._acknowledged: list[int] = []

    def next_number(self) -> int:
        """Return the number of the next message, which has to be confirmed."""
        self._last_number += 1
        self._unconfirmed[self._last_number] = None
        return self._last_number

    def confirm(self, number: int, *, acknowledged: bool) -> None:
        """Confirm message *number*, by an ack if all its queues keep it, else by a nack."""
        if self.session.ended or number not in self._unconfirmed:
            return
        if acknowledged:
            self._acknowledged.append(number)
            self.session.engine.confirm_later(self.flush)
        else:
            self.flush()
            del self._unconfirmed[number]
            self.session.write(m.BasicNack(delivery_tag=number))

    def flush(self) -> None:
        """Send the pending acks, in as few frames as possible."""
        acknowledged, self._acknowledged = self._acknowledged, []
        if self.session.ended or not acknowledged:
            return
        for number in acknowledged:
            del self._unconfirmed[number]
        acknowledged.sort()
        least = next(iter(self._unconfirmed), self._last_number + 1)
        together = 0
        while together < len(acknowledged) and acknowledged[together] < least:
            together += 1
        if together:
            last = acknowledged[together - 1]
            self.session.write(m.BasicAck(delivery_tag=last, multiple=together > 1))
        for number in acknowledged[together:]:
            self.session.write(m.BasicAck(delivery_tag=number))
